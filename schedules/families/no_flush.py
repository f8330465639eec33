"""Schedules without a flush: the next step's forwards run while the last step's backwards are on their way.

Such a schedule has no bubbles after its first step. Its lists are one step of an endless stream, see
`schedules.actions.Schedule.period`.
"""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule, ScheduleError

__all__ = ["nf1b", "pipedream_2bw"]


def pipedream_2bw(ranks: int, microbatches: int) -> Schedule:
    """PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503): two versions of the weights.

    A microbatch runs forward and backward on the weights that were the newest when its step began. A step's
    gradient is there when the next step ends, so its weights lack the gradient of the step before: with g the gradient
    of batch t, `W(t+1) = W(t) - rate * g(W(t-1))` in the paper's words, for any optimizer.
    """
    return _stream("pipedream_2bw", ranks, microbatches, 1, versions=2)


def nf1b(ranks: int, microbatches: int, group: int) -> Schedule:
    """TiMePReSt's nF1B (2024, arXiv:2410.14312): groups of forwards and backwards, all on the newest weights.

    One version of the weights is kept. A microbatch that is in flight while the weights change goes on with the new
    ones: its backward uses the activations that F kept and the newest weights.
    """
    return _stream("nf1b", ranks, microbatches, group, versions=1)


def _stream(name: str, ranks: int, microbatches: int, group: int, *, versions: int) -> Schedule:
    """Every rank runs `group` forwards, then as many input gradients, each rank one tick after its neighbour.

    The input gradients start at the first tick that does not meet the rank's forwards, and the weight gradients fill
    what is left, so that every rank is busy in every tick of the period of `3 * group`.
    """
    if microbatches % group:
        raise ScheduleError(f"microbatches={microbatches} are no groups of {group}; use a multiple of {group}")
    period = 3 * group
    starts = [0] * ranks
    begin = 0
    for rank in reversed(range(ranks)):
        begin = rank + group if rank == ranks - 1 else begin + 1
        while not group <= (begin - rank) % period <= period - group:
            begin += 1
        starts[rank] = begin

    def at(start: int, number: int) -> int:
        return start + period * (number // group) + number % group

    # The window of a step in which all ranks are in their steady state, and the steps before it.
    before = 1 + (starts[0] + 2 * period) // (3 * microbatches) + 1
    window = range(before * 3 * microbatches, (before + 1) * 3 * microbatches)
    rows = []
    for rank in range(ranks):
        numbers = range((before + 1) * microbatches)
        found = {at(rank, number): (Kind.F, number) for number in numbers}
        inputs = {at(starts[rank], number): (Kind.I, number) for number in numbers}
        found |= inputs
        ready: list[int] = []
        for tick in range(window.stop):
            if tick not in found and ready:
                found[tick] = (Kind.W, ready.pop(0))
            if tick in inputs:
                ready.append(inputs[tick][1])
        row = [found[tick] for tick in window]
        oldest = (before - 1) * microbatches
        late = min(number for _, number in row) - oldest
        if late < 0:
            raise ScheduleError(
                f"microbatches={microbatches} is too few for {name} on {ranks} ranks: a microbatch must be done before "
                f"the next step ends; use {_least(microbatches - late, group)} or more"
            )
        rows.append(tuple(Action(rank, kind, number - oldest) for kind, number in row))
    return Schedule(name, tuple(rows), tuple(range(ranks)), period=microbatches, versions=versions)


def _least(microbatches: int, group: int) -> int:
    return -(-microbatches // group) * group
