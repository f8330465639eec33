"""Policies by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass

from meshsys.cluster.policies.base import Policy
from meshsys.errors import ConfigError

__all__ = ["PolicyInfo", "describe", "get", "names"]


@dataclass(frozen=True)
class PolicyInfo:
    """One line about a policy.

    Attributes:
        where: `module:Class`.
        summary: what it does.
        source: whose it is.
    """

    where: str
    summary: str
    source: str


_HERE = "meshsys.cluster.policies"
_RFOLD = "RFold, arXiv 2510.03891, and its public simulator"
_POLICIES = {
    "first_fit": PolicyInfo(f"{_HERE}.first_fit:FirstFit", "the first free box of the torus, in any rotation", _RFOLD),
    "folding": PolicyInfo(f"{_HERE}.folding:Folding", "folded to be short, then the first free box", _RFOLD),
    "reconfig": PolicyInfo(f"{_HERE}.reconfig:Reconfig", "chunks of any cubes, put together by switches", _RFOLD),
    "rfold": PolicyInfo(f"{_HERE}.rfold:RFold", "folded to few cubes; lines through any free chips", _RFOLD),
    "hilbert": PolicyInfo(
        f"{_HERE}.hilbert:Hilbert", "the free chips closest together on a Hilbert curve", "Slurm's topology/3d_torus"
    ),
    "risa": PolicyInfo(f"{_HERE}.risa:Risa", "within one cube if it can, cubes in turn", "RISA, arXiv 2310.03997"),
    "best": PolicyInfo(f"{_HERE}.best:Best", "exact folds that switches can join, where most room is left", "ours"),
}


def names() -> tuple[str, ...]:
    """The policies that have a name."""
    return tuple(_POLICIES)


def describe(name: str, option: str = "policy") -> PolicyInfo:
    """One policy by its name.

    Args:
        option: whose value it is, for errors.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in _POLICIES:
        near = difflib.get_close_matches(name, _POLICIES, n=1, cutoff=0.5)
        others = f"use {', '.join(_POLICIES)}, or module:Class for one of your own"
        hint = f"did you mean {near[0]}?" if near else others
        raise ConfigError(f"{option}={name} does not exist; {hint}")
    return _POLICIES[name]


def get(name: str, option: str = "policy") -> Policy:
    """A new policy, by its name or as `module:Class` of a user's own.

    Args:
        option: whose value it is, for errors.

    Raises:
        ConfigError: there is none, or it is no policy.
    """
    where = name if ":" in name else describe(name, option).where
    module, _, attribute = where.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"{option}={name} cannot be imported: {error}; write module:Class") from None
    if not inspect.isclass(made):
        raise ConfigError(f"{option}={name} is not a class; write module:Class of a class with place and possible")
    try:
        policy = made()
    except TypeError as error:
        raise ConfigError(f"{option}={name} cannot be made: {error}; its class must take no arguments") from None
    if not isinstance(policy, Policy):
        needs = "a name, place(pod, shape, wrap), possible(pod, shape)"
        raise ConfigError(f"{option}={name} is no policy; it needs {needs}")
    return policy
