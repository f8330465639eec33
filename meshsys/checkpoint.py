"""Checkpoints that do not know the layout of the run that wrote them.

A checkpoint holds the state in canonical form (every layer's parameters and moments stacked by global layer
number), the position in the data, arrays that only the host uses, and a checksum of every array. It is restored onto
any mesh and schedule.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshsys import distributed
from meshsys.errors import ConfigError

__all__ = ["Checkpoints", "restore_params"]

PyTree = Any

# Orbax reports every step of its work, through absl, as a warning.
logging.getLogger("absl").setLevel(logging.ERROR)


class Checkpoints:
    """The checkpoints of one run, written in the background by orbax.

    Args:
        folder: of the checkpoints, one folder a step.
        keep: how many stay on disk.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder.absolute()
        self._keep = keep
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self._folder, options=options, item_names=("state", "meta", "host"))

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any], host: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Begins to write a checkpoint; returns once the arrays are copied to the host.

        Args:
            state: in canonical form.
            meta: in JSON types.
            host: arrays with elements, which nothing changes any more.
        """
        if step in self._manager.all_steps():
            return
        forms = {name: [array.dtype.str, array.shape, _checksum(array)] for name, array in (host or {}).items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                meta=ocp.args.JsonSave(_sealed(meta | {"checksums": _checksums(state), "host": forms})),
                **({"host": ocp.args.StandardSave(dict(host))} if host else {}),
            ),
        )

    def restore(
        self, wanted: Callable[[dict], PyTree], check: Callable[[dict], None], say: Callable[[str], None]
    ) -> tuple[PyTree, dict[str, Any], dict[str, np.ndarray]] | None:
        """The newest checkpoint that is whole, as `(state, meta, host)`; None where there is none.

        Args:
            wanted: gives the shapes and shardings of the state in canonical form, for a meta.
            check: raises where the meta is of another model.
            say: takes a line about each damaged checkpoint, which is then moved aside.

        Raises:
            ConfigError: there are checkpoints and all are damaged.
        """
        damaged: list[int] = []
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
                if meta != _sealed(meta):
                    raise ValueError("its meta has another checksum than it was written with")
                checksums, forms = meta.pop("checksums"), meta.pop("host", {})
            except Exception as error:  # whatever a damaged file makes orbax raise
                damaged.append(step)
                say(_damage(step, error))
                continue
            check(meta)
            try:
                state = self._manager.restore(
                    step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted(meta)))
                )["state"]
                found = _checksums(state)
                wrong = [name for name, value in checksums.items() if found.get(name) != value]
                if wrong:
                    raise ValueError(f"{wrong[0]} has another checksum than it was written with")
                host = self._host(step, forms)
            except Exception as error:
                damaged.append(step)
                say(_damage(step, error))
                continue
            self._set_aside(damaged)
            return state, meta, host
        if steps:
            raise ConfigError(
                f"run.dir={self._folder.parent}: no checkpoint in it can be read; restore {self._folder.name}/ from a "
                "copy, or delete it to begin again"
            )
        return None

    def _host(self, step: int, forms: dict[str, Any]) -> dict[str, np.ndarray]:
        if not forms:
            return {}
        wanted = {name: np.empty(shape, dtype) for name, (dtype, shape, _) in forms.items()}
        found = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.StandardRestore(wanted)))["host"]
        for name, (_, _, checksum) in forms.items():
            if _checksum(found[name]) != checksum:
                raise ValueError(f"{name} has another checksum than it was written with")
        return found

    def _set_aside(self, steps: list[int]) -> None:
        """Moves damaged checkpoints out of the way of those that the resumed run will write."""
        if not steps:
            return
        self._manager.close()
        if distributed.is_first():
            self._move(steps)
        distributed.wait("damaged checkpoints are set aside")
        self._manager = self._open()

    def _move(self, steps: list[int]) -> None:
        aside = self._folder.with_name(f"{self._folder.name}-damaged")
        for step in steps:
            shutil.rmtree(aside / str(step), ignore_errors=True)
            aside.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(aside / str(step))

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _damage(step: int, error: BaseException) -> str:
    while error.__cause__:  # orbax wraps what it could not read in the whole specification of an array
        error = error.__cause__
    reason = " ".join(str(error).split())
    return f"checkpoint {step} is damaged, taking the one before: {reason[:160]}{'...' if len(reason) > 160 else ''}"


def _sealed(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta with a checksum of its own."""
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return content | {"checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))


def _checksums(state: PyTree) -> dict[str, int]:
    """The sum modulo 2^32 of every array's bits: the same for any sharding."""
    sums = jax.device_get(_sums(state))
    return {jax.tree_util.keystr(path): int(value) for path, value in jax.tree_util.tree_leaves_with_path(sums)}


@jax.jit
def _sums(state: PyTree) -> PyTree:
    def leaf(array: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32), dtype=jnp.uint32)

    return jax.tree.map(leaf, state)


def restore_params(folder: Path, shapes: PyTree) -> PyTree:
    """The parameters of the newest checkpoint, in canonical form, on JAX's first device.

    Raises:
        ConfigError: there is no checkpoint, or it cannot be read.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    wanted = {"params": params}
    with ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(read_only=True), item_names=("state", "meta")
    ) as manager:
        step = manager.latest_step() if folder.is_dir() else None
        if step is None:
            raise ConfigError(
                f"{folder.parent} has no checkpoint yet; train it first, or wait for checkpoint.every steps"
            )
        try:
            restore = ocp.args.PyTreeRestore(
                wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
            )
            return manager.restore(step, args=ocp.args.Composite(state=restore))["state"]["params"]
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ConfigError(
                f"checkpoint {step} of {folder.parent} cannot be read ({reason}); run `meshsys train` on it, which "
                "falls back to the one before"
            ) from None
