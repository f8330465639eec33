"""What a configuration will do before it does it: devices, stages, schedule, kept values, memory, time."""

from __future__ import annotations

from meshsys.planner.choose import config_of, search
from meshsys.planner.make import make_plan, plan_of
from meshsys.planner.plan import Plan, SearchPlan
from meshsys.planner.text import describe, describe_search

__all__ = ["Plan", "SearchPlan", "config_of", "describe", "describe_search", "make_plan", "plan_of", "search"]
