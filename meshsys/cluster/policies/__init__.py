"""Policies: which free chips a job gets."""

from __future__ import annotations

from meshsys.cluster.policies.base import Policy
from meshsys.cluster.policies.registry import PolicyInfo, describe, get, names

__all__ = ["Policy", "PolicyInfo", "describe", "get", "names"]
