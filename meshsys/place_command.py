"""`meshsys cluster place`: where a job would go."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command, number
from meshsys.errors import ConfigError
from meshsys.torus.shapes import TWISTED, dimension_names, read_shape

if TYPE_CHECKING:
    from meshsys.cluster.grant import Grant
    from meshsys.cluster.pod import Pod

__all__ = ["add_place_command"]

_SHOWN = 16  # chips of the device order in text


def add_place_command(views: Any) -> None:
    """Adds `place` to the cluster commands."""
    place = command(views, "place", _place, "the chips that a policy would give to a job")
    place.add_argument("--topology", metavar="T", required=True, help="the pod, as 16x16x16 or v4:16x16x16")
    place.add_argument("--cube", metavar="C", type=number(int, 1), help="side of the cubes that switches join")
    place.add_argument("--shape", metavar="S", required=True, help="of the job, as 4x4x8 or 4x4x8_twisted")
    place.add_argument("--policy", metavar="NAME", default="best", help="a name, or module:Class of your own")
    place.add_argument(
        "--wiring",
        choices=("same_position", "any"),
        default="same_position",
        help="ports that a switch can join: the same position of opposite faces, or any",
    )
    place.add_argument("--wrap", metavar="x,y", default="", help="dimensions of the shape that must be rings, or all")
    place.add_argument("--occupied", metavar="FILE", help="CSV or JSON of chips and boxes that are taken")
    place.add_argument("--allow-shared-links", action="store_true", help="jobs may send over the same links")
    place.add_argument("--json", action="store_true", help="as JSON, with the whole device order")


def _place(args: argparse.Namespace) -> int:
    from meshsys.cluster import policies
    from meshsys.cluster.occupied import occupy
    from meshsys.cluster.twisted import check_twisted, place_twisted

    pod = _pod(args)
    twisted = args.shape.endswith(TWISTED)
    shape = _shape(args.shape.removesuffix(TWISTED), pod)
    wrap = _wrap(args.wrap, shape)
    if twisted:
        check_twisted(pod, shape, "--shape")
    policy = policies.get(args.policy, "--policy")
    if args.occupied is not None:
        occupy(pod, args.occupied, "--occupied")
    grant = place_twisted(pod, shape) if twisted else policy.place(pod, shape, wrap)
    if grant is None:
        if not twisted and not policy.possible(pod, shape):
            raise ConfigError(
                f"--shape={args.shape} has no place on {_named(pod)} with --policy={args.policy}, even if all is free; "
                f"use another policy, such as best, or another shape"
            )
        print(f"meshsys: no room now for {args.shape} on {_named(pod)}: {pod.free} of {pod.size} chips are free")
        return 1
    if args.json:
        print(json.dumps(_found(pod, grant, policy.name, wrap), indent=2))
    else:
        print(_text(pod, grant, policy.name, wrap))
    return 0


# Options


def _pod(args: argparse.Namespace) -> Pod:
    from meshsys.cluster.pod import Pod
    from meshsys.torus import Topology, TopologyError

    try:
        topology = Topology.parse(args.topology, "--topology")
    except TopologyError as error:
        raise ConfigError(str(error)) from None
    return Pod(topology, args.cube, args.wiring, shared_links=args.allow_shared_links, options="--")


def _shape(text: str, pod: Pod) -> tuple[int, ...]:
    shape = read_shape(text)
    if shape is None:
        raise ConfigError(f"--shape={text} is not a shape; write up to 6 sizes of at least 1, as in 4x4x8")
    size = math.prod(shape)
    if size > pod.size:
        raise ConfigError(f"--shape={text} has {size} chips, but {_named(pod)} has {pod.size}; use a smaller shape")
    return shape


def _wrap(text: str, shape: tuple[int, ...]) -> tuple[bool, ...] | None:
    if not text:
        return None
    names = dimension_names(len(shape))
    wanted = list(names) if text == "all" else [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--wrap={text}: the shape has no dimension {name!r}; it has {', '.join(names)}")
    return tuple(name in wanted for name in names)


def _named(pod: Pod) -> str:
    return f"{pod.topology}" + (f" in cubes of {pod.cube}" if pod.cube else "")


# What is found


def _found(pod: Pod, grant: Grant, policy: str, wrap: tuple[bool, ...] | None) -> dict[str, Any]:
    names = dimension_names(len(grant.shape))
    return {
        "policy": policy,
        "topology": str(pod.topology),
        "cube": pod.cube,
        "wiring": pod.wiring if pod.cube else None,
        "shape": list(grant.shape),
        "fold": grant.fold,
        "rotation": [dimension_names(pod.ndim)[dim] for dim in grant.rotation],
        "cubes": list(grant.cubes),
        "wrap_asked": [name for name, asked in zip(names, wrap or (), strict=False) if asked],
        "wrap": [name for name, ring in zip(names, grant.wrap, strict=True) if ring],
        "dilation": grant.dilation,
        "wireable": grant.wireable,
        "links": len(grant.links),
        "shared_links": pod.sharing(grant),
        "ports": [pod.link_name(int(link)) for link in grant.links if pod.is_port(int(link))],
        "device_order": pod.coords[grant.nodes.ravel()].tolist(),
    }


def _text(pod: Pod, grant: Grant, policy: str, wrap: tuple[bool, ...] | None) -> str:
    found = _found(pod, grant, policy, wrap)
    names = dimension_names(len(grant.shape))
    rows = {
        "policy": policy,
        "fold": grant.fold,
        "rotation": ", ".join(
            f"{name} along {along}" for name, along in zip(names, found["rotation"], strict=False)
        ),
        "cubes": ", ".join(map(str, grant.cubes)),
        "rings": ", ".join(found["wrap"]) or "none",
        "dilation": f"{grant.dilation}" + ("" if grant.dilation == 1 else ": no fold has every neighbour a link away"),
        "wireable": "yes" if grant.wireable else "no: switches cannot join all chunks",
        "links": f"{len(grant.links)}, {len(found['ports'])} of them ports"
        + (f"; {found['shared_links']} shared" if pod.shared_links else ""),
    }
    order = [",".join(map(str, place)) for place in found["device_order"][:_SHOWN]]
    more = grant.size - len(order)
    rows["order"] = " ".join(order) + (f" ... and {more} more (--json has all)" if more else "")
    return "\n".join(f"{name:9} {value}" for name, value in rows.items() if value)
