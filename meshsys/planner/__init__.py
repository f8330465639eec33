"""What a configuration will do before it does it: devices, stages, schedule, kept values, memory."""

from __future__ import annotations

from meshsys.planner.make import make_plan, plan_of
from meshsys.planner.plan import Plan
from meshsys.planner.text import describe

__all__ = ["Plan", "describe", "make_plan", "plan_of"]
