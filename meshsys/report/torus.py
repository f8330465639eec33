"""The torus as a picture: chips by the rank that they run, links, and where the run leaves chips unused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from html import escape

from meshsys.planner.plan import ChipPlan, MeshPlan, Plan

__all__ = ["rank_colour", "torus_caption", "torus_picture"]

_MOST_CHIPS = 4096
_MOST_LABELS = 64
_WIDTH = 520  # pixels, about
_FITS = 1056  # what is wider scrolls, what is not is made to fit its column
_COMPASS = 52  # pixels below the chips

# Where one step along x, y, z goes on the page. No two chips of a torus that is drawn fall on one another.
_DIRECTIONS = {1: ((1.0, 0.0),), 2: ((1.0, 0.0), (0.0, 1.0)), 3: ((0.92, 0.17), (0.55, -0.27), (0.0, -0.95))}


def rank_colour(rank: int, ranks: int) -> str:
    """From blue over violet and red to orange, in the order of the pipeline; white text is legible on it."""
    part = rank / (ranks - 1) if ranks > 1 else 0.0
    return f"hsl({(222 + 166 * part) % 360:.0f} 64% {52 - 6 * part:.0f}%)"


def torus_picture(plan: Plan) -> str:
    """An SVG element, or a line that says why there is none."""
    mesh = plan.mesh
    if mesh.devices > _MOST_CHIPS:
        return f'<p class="none">{mesh.devices:,} devices are too many to draw.</p>'
    return _Picture(plan).svg()


def torus_caption(plan: Plan) -> str:
    """What the picture's marks mean, in words."""
    mesh = plan.mesh
    others = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name != "pipe"]
    words = ["Chips have the colour of their pipeline rank"]
    if mesh.devices <= _MOST_CHIPS and _Picture(plan).labelled:
        words = ["Chips bear their pipeline rank and have its colour"]
        if others:
            words.append(f"beside them, their position on the other axes ({', '.join(others)}, by first letter)")
    if plan.schedule.ranks > 1:
        words.append("dark links carry activations from rank to rank")
    wraps = [name for dim, name in enumerate(mesh.dim_names) if mesh.wrap[dim] or dim in mesh.twisted]
    if wraps:
        words.append(f"dashed stubs are links that wrap around ({', '.join(wraps)})")
    for dim, shift in mesh.twisted.items():
        along = " and ".join(f"{by} further along {name}" for name, by in zip(mesh.dim_names, shift, strict=True) if by)
        words.append(f"those along {mesh.dim_names[dim]} come back {along}")
    if mesh.devices > mesh.devices_used:
        words.append("grey chips are not used")
    for name, size in zip(mesh.dim_names[3:], mesh.dims[3:], strict=True):
        words.append(f"each of the {size} places along {name} is a picture of its own")
    return f"{'; '.join(words)}."


class _Picture:
    """Coordinates on the page, and the parts in the order of drawing: links, then chips from back to front."""

    def __init__(self, plan: Plan):
        self.plan, self.mesh = plan, plan.mesh
        mesh: MeshPlan = plan.mesh
        self.shown = min(len(mesh.dims), 3)  # further dimensions (the cores of a chip) are panels side by side
        self.directions = _DIRECTIONS[self.shown]
        span = sum(d[0] * (size - 1) for d, size in zip(self.directions, mesh.dims, strict=False))
        self.unit = min(max(_WIDTH / (span + 1), 20.0), 190.0 if self.shown == 3 else 132.0)
        self.labelled = mesh.devices <= _MOST_LABELS and self.unit >= 56
        self.radius = self.unit * (0.16 if max(mesh.dims) <= 2 or self.shown < 3 else 0.1)
        self.radius = min(max(self.radius, 3.0), 19.0)
        self.stub = min(0.34 * self.unit, 26.0)
        self.position = {chip.coords: chip for chip in mesh.chips}
        ends = ((0, size - 1) for size in mesh.dims[: self.shown])
        corners = [self._project(corner) for corner in itertools.product(*ends)]
        margin = self.radius + (self.stub if any(mesh.wrap) or mesh.twist else 0) + 6
        self.left = min(x for x, _ in corners) - margin
        self.top = min(y for _, y in corners) - margin
        self.width = max(x for x, _ in corners) + margin + (44 if self.labelled else 0) - self.left
        self.height = max(y for _, y in corners) + margin + (_COMPASS if self.shown > 1 else 14) - self.top

    def svg(self) -> str:
        panels = list(itertools.product(*map(range, self.mesh.dims[self.shown :])))
        width = math.ceil(self.width * len(panels))
        title = f"torus {self.mesh.topology}, chips coloured by pipeline rank"
        out = [
            f'<svg class="torus{" fit" if width <= _FITS else ""}" width="{width}" height="{math.ceil(self.height)}" '
            f'viewBox="0 0 {width} {math.ceil(self.height)}" role="img" aria-label="{escape(title)}">'
        ]
        for place, rest in enumerate(panels):
            out.append(f'<g transform="translate({place * self.width - self.left:.1f} {-self.top:.1f})">')
            chips = sorted(itertools.product(*map(range, self.mesh.dims[: self.shown])), key=self._depth)
            for coords in chips:
                out.extend(self._links(coords, rest))
            for coords in chips:
                out.append(self._chip((*coords, *rest)))
            out.extend(self._compass() if not place else ())
            out.append("</g>")
        return "".join([*out, "</svg>"])

    def _project(self, coords: tuple[int, ...]) -> tuple[float, float]:
        return (
            self.unit * sum(d[0] * place for d, place in zip(self.directions, coords, strict=False)),
            self.unit * sum(d[1] * place for d, place in zip(self.directions, coords, strict=False)),
        )

    def _depth(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """The farthest first: those deep along y, then the lower ones."""
        return (-coords[1], coords[2], coords[0]) if self.shown == 3 else coords

    def _links(self, coords: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[str]:
        x, y = self._project(coords)
        for dim, (dx, dy) in enumerate(self.directions):
            size = self.mesh.dims[dim]
            if coords[dim] + 1 < size:
                other = (*coords[:dim], coords[dim] + 1, *coords[dim + 1 :])
                kind = "link hop" if self._successive((*coords, *rest), (*other, *rest)) else "link"
                to_x, to_y = self._project(other)
                yield f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
            if (self.mesh.wrap[dim] or dim in self.mesh.twisted) and coords[dim] in (0, size - 1):
                length = (self.radius + self.stub) / math.hypot(dx, dy) * (1 if coords[dim] else -1)
                yield f'<path class="link wrap" d="M{x:.1f} {y:.1f}l{dx * length:.1f} {dy * length:.1f}"/>'

    def _successive(self, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether activations go over this link: neighbours along `pipe`, and alike on all other axes."""
        a, b = self.position.get(one), self.position.get(other)
        if a is None or b is None or "pipe" not in a.position:
            return False
        apart = {name: abs(a.position[name] - b.position[name]) for name in a.position}
        return apart == {name: int(name == "pipe") for name in apart}

    def _compass(self) -> Iterator[str]:
        """Arrows along the dimensions, at the lower left."""
        if self.shown == 1:
            return
        x, y = self.left + 12, self.top + self.height - (12 if self.shown == 3 else _COMPASS - 10)
        for (dx, dy), name in zip(self.directions, self.mesh.dim_names, strict=False):
            to_x, to_y = x + 24 * dx, y + 24 * dy
            yield f'<path class="arrow" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
            yield f'<text class="axis" x="{x + 33 * dx:.1f}" y="{y + 33 * dy + 4:.1f}">{escape(name)}</text>'

    def _chip(self, coords: tuple[int, ...]) -> str:
        x, y = self._project(coords[: self.shown])
        chip = self.position.get(coords)
        at = f'cx="{x:.1f}" cy="{y:.1f}" r="{self.radius:.1f}"'
        where = f"({', '.join(map(str, coords))})"
        if chip is None:
            return f'<circle class="idle" {at}><title>{where}: not used</title></circle>'
        rank = chip.position.get("pipe", 0)
        words = ", ".join(f"{name} {place}" for name, place in chip.position.items()) or "the only one in use"
        colour = rank_colour(rank, self.plan.schedule.ranks)
        label = ""
        if self.labelled:
            label = f'<text class="in" x="{x:.1f}" y="{y + 4:.1f}">{rank}</text>'
            aside = 0.7 * self.radius
            label += f'<text class="by" x="{x + aside:.1f}" y="{y + aside + 12:.1f}">{_short(chip)}</text>'
        return f'<g><title>{where}: {escape(words)}</title><circle class="chip" {at} style="fill:{colour}"/>{label}</g>'


def _short(chip: ChipPlan) -> str:
    """Position on the axes but pipe, whose place is in the chip: "d1 t0"."""
    return " ".join(f"{name[0]}{place}" for name, place in chip.position.items() if name != "pipe")
