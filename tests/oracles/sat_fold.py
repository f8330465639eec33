"""Whether a shape can be laid on a box of a torus, asked of a solver: one Boolean a position and chip."""

from __future__ import annotations

from tests.oracles.brute_fold import Sides, Wraps, edges, kinds


def sat_fold(shape: Sides, wrap: Wraps, box: Sides, box_wrap: Wraps, seconds: float) -> bool | None:
    """Whether there is a fold; None if that was not decided in time."""
    from ortools.sat.python import cp_model

    wanted, linked = edges(shape, wrap), edges(box, box_wrap)
    model = cp_model.CpModel()
    on = {(at, chip): model.new_bool_var(f"{at}{chip}") for at in wanted for chip in linked}
    for at in wanted:
        model.add_exactly_one(on[at, chip] for chip in linked)
    for chip in linked:
        model.add_at_most_one(on[at, chip] for at in wanted)
    for at, others in wanted.items():
        for chip, near in linked.items():
            for other in others:
                model.add_bool_or([~on[at, chip], *(on[other, each] for each in near)])
    middle = max(wanted, key=lambda at: len(wanted[at]))
    model.add_bool_or([on[middle, chip] for chip in kinds(box, box_wrap)])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    return {cp_model.INFEASIBLE: False, cp_model.OPTIMAL: True, cp_model.FEASIBLE: True}.get(status)
