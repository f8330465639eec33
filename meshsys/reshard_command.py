"""`meshsys reshard`: a model's parameters go from one layout to another over the same devices, and back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command, number
from meshsys.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from models import Decoder
    from schedules.stages import StageLayout

__all__ = ["add_reshard_command"]

PyTree = Any

_OPTIONS = {"--from": "source", "--to": "destination"}
_AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")


def add_reshard_command(commands: Any) -> None:
    """Adds `meshsys reshard PATH --from AXES --to AXES` to the commands."""
    about = "move a model's parameters between two layouts, and show what it takes"
    parser = command(commands, "reshard", _reshard, about)
    parser.add_argument("path", metavar="PATH", help="a run's folder or its name under runs/, or a Hugging Face folder")
    layout = "mesh axes, as in pipe=2,fsdp=4; with pipe the layers are by stage"
    parser.add_argument("--from", metavar="AXES", dest="source", required=True, help=layout)
    parser.add_argument("--to", metavar="AXES", dest="destination", required=True, help="the same number of devices")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the result; by default as before")
    parser.add_argument(
        "--bucket-mib",
        metavar="N",
        type=number(int, 1, 1 << 20),
        default=64,
        help="what a program may hold on a device",
    )
    parser.add_argument("--out", metavar="DIR", help="write the result as a new Hugging Face folder, without tokenizer")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")


def _reshard(args: argparse.Namespace) -> None:
    axes = {option: _axes(option, getattr(args, name)) for option, name in _OPTIONS.items()}
    counts = {option: math.prod(sizes.values()) for option, sizes in axes.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"--from={args.source} has {counts['--from']} devices and --to={args.destination} {counts['--to']}; "
            "resharding is over the same ones, so make the products equal"
        )
    if args.out is not None and Path(args.out).expanduser().exists():
        raise ConfigError(f"--out={args.out} exists; give the path of a new folder")

    from meshsys.mesh import ensure_devices

    ensure_devices(counts["--from"], f"--from={args.source}")

    from meshsys.reshard import Resharder, plan_reshard

    decoder, params = _read(args.path)
    source, destination = (_Layout.of(decoder, sizes, option) for option, sizes in axes.items())
    tree = source.put(params)
    options: dict[str, Any] = {"dtype": args.dtype, "bucket_bytes": args.bucket_mib << 20}
    options |= {"source_stages": source.stages, "destination_stages": destination.stages}
    plan = plan_reshard(tree, destination.shardings, **options)
    there = Resharder(plan)
    moved = there(tree)
    back = Resharder(plan_reshard(moved, source.shardings, **_backward(options, tree)))
    _check(tree, back(moved), args.dtype)
    if args.out is not None:
        _write(decoder, destination.by_layer(moved), args.out, args.dtype)
    assert there.last is not None and back.last is not None
    if args.json:
        names = ("moved_bytes", "lower_bound_bytes", "source_bytes", "destination_bytes", "peak_bytes", "extra_bytes")
        figures = {name: getattr(plan, name) for name in names} | {"buckets": len(plan.buckets)}
        print(json.dumps(figures | {"seconds": there.last.seconds, "seconds_back": back.last.seconds}))
        return
    print(f"{args.path}: from {args.source} to {args.destination}")
    print(plan.describe())
    same = "equal to the bit" if args.dtype is None else f"equal to what {args.dtype} keeps"
    print(f"there in {there.last.seconds:.3f} s, back in {back.last.seconds:.3f} s; the round trip is {same}")


def _backward(options: dict[str, Any], tree: PyTree) -> dict[str, Any]:
    import jax

    stages = {"source_stages": options["destination_stages"], "destination_stages": options["source_stages"]}
    return options | stages | {"dtype": jax.tree.map(lambda leaf: leaf.dtype, tree)}


def _check(tree: PyTree, returned: PyTree, dtype: str | None) -> None:
    """That what came back is what went, or what the narrower dtype keeps of it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(returned), strict=True):
        if dtype is not None and jnp.issubdtype(before.dtype, jnp.floating):
            before = before.astype(dtype).astype(before.dtype)
        if np.asarray(before).tobytes() != np.asarray(after).tobytes():
            raise RuntimeError(f"{jax.tree_util.keystr(path)} came back otherwise than it went")


def _axes(option: str, text: str) -> dict[str, int]:
    """Sizes of all mesh axes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in _AXES:
            raise ConfigError(f"{option}={text}: {name or 'nothing'} is no mesh axis; use {', '.join(_AXES)}")
        if name in sizes:
            raise ConfigError(f"{option}={text} names {name} twice; give it once")
        if not (size.isascii() and size.isdecimal() and 1 <= int(size) <= 4096):
            raise ConfigError(f"{option}={text}: {part} has no size from 1 to 4096; write it as {name}=2")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in _AXES}


def _read(path: str) -> tuple[Decoder, PyTree]:
    """A model and its parameters in canonical form, as they are stored."""
    import jax

    from meshsys.checkpoint import restore_params
    from meshsys.config import load_config
    from meshsys.data import load_tokenizer
    from models import Decoder, PretrainedError, load_pretrained

    run = next((folder for folder in (Path(path), Path("runs", path)) if (folder / "config.yaml").is_file()), None)
    if run is None:
        try:
            model, params = load_pretrained(path)
        except PretrainedError as error:
            raise ConfigError(str(error)) from None
        return Decoder(model), params
    config = load_config(run / "config.yaml")
    vocabulary = config.model.vocab_size or load_tokenizer(config.data.tokenizer or "bytes").vocab_size
    decoder = Decoder(dataclasses.replace(config.model, vocab_size=vocabulary))
    return decoder, restore_params(run / "checkpoints", jax.eval_shape(decoder.init, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where a model's parameters are.

    Attributes:
        stages: where the layers are that are stacked by stage; None without a pipeline.
    """

    mesh: Mesh
    shardings: PyTree
    stages: StageLayout | None

    @classmethod
    def of(cls, decoder: Decoder, sizes: dict[str, int], option: str) -> _Layout:
        import jax

        from meshsys.mesh import make_mesh
        from meshsys.sharding import canonical_specs, named, training_specs
        from meshsys.torus import Topology, TopologyError, place
        from schedules import families
        from schedules.stages import StageLayout

        try:
            mesh = make_mesh(place(Topology.parse(str(math.prod(sizes.values()))), sizes))
        except TopologyError as error:
            raise ConfigError(f"{option}: {error}") from None
        shapes = jax.eval_shape(decoder.init, jax.random.key(0))
        specs = (training_specs if sizes["pipe"] > 1 else canonical_specs)(decoder.logical_axes(), shapes, sizes)
        stages = None
        if sizes["pipe"] > 1:
            schedule = families.make("1f1b", ranks=sizes["pipe"], microbatches=sizes["pipe"])
            stages = StageLayout.of(schedule, decoder.config.layers, decoder.holders)
        return cls(mesh, named(mesh, specs), stages)

    def put(self, params: PyTree) -> PyTree:
        """Parameters in canonical form."""
        import jax

        if self.stages is not None:
            layers = {name: self.stages.part(name).to_stages(part) for name, part in params["layers"].items()}
            params = params | {"layers": layers}
        return jax.device_put(params, self.shardings)

    def by_layer(self, tree: PyTree) -> PyTree:
        """In canonical form, on the host."""
        import jax

        tree = jax.device_get(tree)
        if self.stages is None:
            return tree
        layers = {name: self.stages.part(name).to_layers(part) for name, part in tree["layers"].items()}
        return tree | {"layers": layers}


def _write(decoder: Decoder, params: PyTree, out: str, dtype: Any) -> None:
    from models.pretrained import PretrainedError, save_pretrained

    model = dataclasses.replace(decoder.config, param_dtype=dtype) if dtype else decoder.config
    try:
        save_pretrained(model, params, Path(out).expanduser(), facts={})
    except PretrainedError as error:
        raise ConfigError(str(error)) from None
