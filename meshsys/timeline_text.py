"""A simulated schedule in print, rank by rank."""

from __future__ import annotations

from schedules.simulate import Timeline

__all__ = ["by_rank", "rank_table"]


def by_rank(timeline: Timeline) -> dict[str, tuple[float, ...]]:
    """What is said of each rank: figures by their names, a number a rank."""
    return {
        "work": timeline.work,
        "peak_activations": timeline.peak_activations,
        "peak_weight_stash": timeline.peak_weight_stash,
    }


def rank_table(timeline: Timeline) -> str:
    """The same as lines of text, one a rank."""
    figures = by_rank(timeline)
    rows = enumerate(zip(*figures.values(), strict=True))
    return "\n".join(
        [
            "rank  " + "  ".join(figures),
            *(
                f"{rank:4}  " + "  ".join(f"{value:{len(name)}.6g}" for name, value in zip(figures, row, strict=True))
                for rank, row in rows
            ),
        ]
    )
