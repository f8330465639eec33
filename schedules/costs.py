"""How long actions and transfers take.

A transfer has two terms, as in CrossPipe (Chen et al. 2025, arXiv:2507.00217, section 4): a message occupies its link
for `transfer`, one after another, and arrives `latency` after it has left. Links have one direction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from schedules.actions import Action, Kind, Schedule, ScheduleError

__all__ = ["Costs", "Link", "Time"]

Time = float | tuple[float, ...]


@dataclass(frozen=True)
class Link:
    """What one message takes from rank to rank.

    Attributes:
        sender: a rank of the `pipe` axis.
        receiver: another one.
        latency: from leaving the link to arriving; messages do not wait for one another's.
        transfer: the time that a message occupies the link (its bytes over the bandwidth).
    """

    sender: int
    receiver: int
    latency: float = 0.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        if min(self.sender, self.receiver) < 0 or self.sender == self.receiver:
            raise ScheduleError(
                f"cost link from rank {self.sender} to rank {self.receiver} joins no two ranks; use ranks from 0"
            )
        for name in ("latency", "transfer"):
            _check_time(f"{name} of the link from rank {self.sender} to rank {self.receiver}", getattr(self, name))

    @property
    def delay(self) -> float:
        """From the end of an action to the arrival of its result, on a link that is free."""
        return self.transfer + self.latency


@dataclass(frozen=True)
class Costs:
    """Times in one unit of the caller's choice: seconds if measured, or relative to a forward.

    F, I, W, B and R are one number for all stages, or a tuple with one for each stage.

    Attributes:
        F: forward of one microbatch through one stage.
        I: input gradient.
        W: weight gradient.
        B: full backward; None for I + W.
        R: recompute as an action of its own.
        send: latency between ranks, where `links` names none.
        transfer: occupation of the link by one message, where `links` names none.
        stages: a factor for each stage, or empty for 1 everywhere; transfers have none.
        links: the links that differ.
    """

    F: Time = 1.0
    I: Time = 1.0  # noqa: E741 (the field's own letter)
    W: Time = 1.0
    B: Time | None = None
    R: Time = 0.0
    send: float = 0.0
    transfer: float = 0.0
    stages: tuple[float, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        lengths = {}
        for name in (*_KINDS, *_TRANSFERS, "stages"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                for stage, time in enumerate(value):
                    _check_time(f"{name}[{stage}]", time)
                if value:
                    lengths[name] = len(value)
                elif name != "stages":
                    raise ScheduleError(f"cost {name} is an empty list; give a time for each stage, or one number")
            elif value is not None:
                _check_time(name, value)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} for {count}" for name, count in lengths.items())
            raise ScheduleError(f"costs give times for different numbers of stages: {counts}; give all the same number")
        if len(self._links) < len(self.links):
            twice = next(link for link in self.links if self._links[link.sender, link.receiver] is not link)
            raise ScheduleError(
                f"cost link from rank {twice.sender} to rank {twice.receiver} is there twice; remove one of them"
            )

    @classmethod
    def per_rank(cls, schedule: Schedule) -> Costs:
        """F, I and W of 1/P of the model take one unit each, so that any numbers of stages compare."""
        unit = schedule.ranks / schedule.depth
        return cls(F=unit, I=unit, W=unit)

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Reads `F=1,I=1.3,W=0.7`; what is not named keeps its default."""
        values: dict[str, float] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in _NAMES or name in values:
                reason = "is named twice" if name in values else "is no cost"
                raise ScheduleError(
                    f"costs {text!r}: {name!r} {reason}; use {', '.join(_NAMES)}, as in F=1,I=1.3,W=0.7"
                )
            try:
                values[name] = float(value)
            except ValueError:
                raise ScheduleError(f"costs {text!r}: {item!r} has no number; write it as in F=1,I=1.3,W=0.7") from None
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Reads what `to_json` writes; every key may be left out.

        Raises:
            ScheduleError: text that is no such object; names the key.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"is not JSON ({error}); write an object such as {_EXAMPLE}") from None
        if not isinstance(raw, dict):
            raise ScheduleError(f"holds no JSON object; write one such as {_EXAMPLE}")
        known = {field.name for field in fields(cls)} | {"about"}
        for key, value in raw.items():
            if key not in known:
                raise ScheduleError(f"{key!r} is no cost; use {', '.join(sorted(known))}")
            if key == "links":
                raw[key] = tuple(_link(item) for item in _list(key, value))
            elif key != "about":
                raw[key] = _time(key, value)
        raw.pop("about", None)
        return cls(**raw)

    def to_json(self, about: Mapping[str, Any] | None = None) -> str:
        """A JSON object: times as numbers or lists, `links` as objects, and `about`, which is for the reader alone."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("stages", "links") and getattr(self, field.name) is not None
        }
        if self.stages:
            values["stages"] = self.stages
        if self.links:
            values["links"] = [{field.name: getattr(link, field.name) for field in fields(Link)} for link in self.links]
        if about:
            values["about"] = dict(about)
        return json.dumps(values, indent=2) + "\n"

    def check(self, stages: int, ranks: int) -> None:
        """Checks that the costs are of a schedule with these stages and ranks.

        Raises:
            ScheduleError: times for another number of stages, or a link of a rank that is not there.
        """
        for name in (*_KINDS, "stages"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) not in (stages, 0):
                raise ScheduleError(
                    f"costs: {name} is given for {len(value)} stages, and the schedule has {stages}; give each a time"
                )
        for link in self.links:
            if max(link.sender, link.receiver) >= ranks:
                raise ScheduleError(
                    f"costs: there is no link from rank {link.sender} to rank {link.receiver}; "
                    f"the schedule has the ranks 0 to {ranks - 1}"
                )

    def of(self, action: Action) -> float:
        """The time of one action.

        Raises:
            ScheduleError: times are given for fewer stages than the schedule has.
        """
        return self.time(action.kind, action.stage)

    def time(self, kind: Kind, stage: int) -> float:
        """The time of an action of this kind in this stage; raises as `of`."""
        if kind is Kind.B and self.B is None:
            return self.time(Kind.I, stage) + self.time(Kind.W, stage)
        return _at(kind, getattr(self, kind), stage) * (_at("stages", self.stages, stage) if self.stages else 1.0)

    def link(self, sender: int, receiver: int) -> Link:
        """The link between two ranks; within a rank nothing is sent, and there is none."""
        found = self._links.get((sender, receiver))
        return Link(sender, receiver, self.send, self.transfer) if found is None else found

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {(link.sender, link.receiver): link for link in self.links}


_KINDS = ("F", "I", "W", "B", "R")
_TRANSFERS = ("send", "transfer")
_NAMES = (*_KINDS, *_TRANSFERS)
_LARGEST = 1e30  # sums of more actions than any schedule has are finite
_EXAMPLE = '{"F": [1, 1.2], "I": 1.3, "W": 0.7}'


def _check_time(name: str, value: float) -> None:
    if not 0 <= value <= _LARGEST:
        raise ScheduleError(f"cost {name}={value} is not a time; use a number from 0 to {_LARGEST:g}")


def _at(name: str, time: Time, stage: int) -> float:
    if not isinstance(time, tuple):
        return time
    if stage >= len(time):
        raise ScheduleError(f"costs: {name} is given for {len(time)} stages, none for stage {stage}; give all of them")
    return time[stage]


def _time(key: str, value: Any) -> Time | None:
    if isinstance(value, list) and key not in _TRANSFERS:
        return tuple(_number(f"{key}[{place}]", item) for place, item in enumerate(value))
    if key == "stages":
        raise ScheduleError(f"{key}={json.dumps(value)} is no list; write one factor a stage, as in [1, 1.2]")
    return None if value is None and key == "B" else _number(key, value)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScheduleError(f"cost {key}={json.dumps(value)} is not a time; use a number from 0 to {_LARGEST:g}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _list(key: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, list):
        raise ScheduleError(f"{key}={json.dumps(value)} is no list; write one object a link")
    return value


def _link(item: Any) -> Link:
    ranks = ("sender", "receiver")
    known = {field.name for field in fields(Link)}
    if not isinstance(item, dict) or not set(ranks) <= set(item) <= known:
        raise ScheduleError(
            f"link {json.dumps(item)} must be an object with sender, receiver and, if not 0, latency and transfer"
        )
    for rank in ranks:
        if isinstance(item[rank], bool) or not isinstance(item[rank], int):
            raise ScheduleError(f"link {json.dumps(item)}: {rank} is no rank; use a whole number from 0")
    return Link(item["sender"], item["receiver"], *(_number(key, item.get(key, 0)) for key in ("latency", "transfer")))
