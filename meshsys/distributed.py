"""A run of several processes, one a host: who they are, and what they have to agree on.

Each process runs the same program on the same configuration. The first one alone writes the run's files; of
checkpoints, which orbax writes, each writes the parts that its devices hold.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshsys.errors import ConfigError

__all__ = [
    "Processes",
    "any_of",
    "count",
    "entered_by_first",
    "is_first",
    "join",
    "processes_of",
    "same_for_all",
    "wait",
]

_PORT = 8476  # of the first process, where the environment names its host alone
_NAMES = {"count": "JAX_NUM_PROCESSES", "index": "JAX_PROCESS_ID", "address": "JAX_COORDINATOR_ADDRESS"}


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        address: of the first, as host:port.
        count: at least 2.
        index: of this one.
    """

    address: str
    count: int
    index: int


_here: Processes | None = None  # once they have met; JAX would start its backend to say so


def processes_of(environment: Mapping[str, str]) -> Processes | None:
    """The processes that an environment speaks of; None if it speaks of one, or of none.

    Looked at in this order, where JAX_COORDINATOR_ADDRESS goes before the address that follows from the others:

    - JAX_NUM_PROCESSES, with JAX_PROCESS_ID or the index of a Kubernetes job's pod;
    - TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, as GKE sets them and `meshsys cluster export` does;
    - the variables of Slurm's srun.

    Raises:
        ConfigError: a part is missing or is no number.
    """
    address = environment.get(_NAMES["address"])
    if _NAMES["count"] in environment:
        index = next((name for name in (_NAMES["index"], "JOB_COMPLETION_INDEX") if name in environment), None)
        return _processes(environment, address, _NAMES["count"], index)
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) > 1:
        known = {**environment, "TPU_WORKER_HOSTNAMES": str(len(hosts))}
        return _processes(known, address or f"{hosts[0]}:{_PORT}", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        first = _first_host(environment["SLURM_STEP_NODELIST"])
        return _processes(environment, address or f"{first}:{_PORT}", tasks, "SLURM_PROCID")
    return None


def _processes(environment: Mapping[str, str], address: str | None, count: str, index: str | None) -> Processes | None:
    total = _number(environment, count)
    if total < 2:
        return None
    place = _number(environment, index or _NAMES["index"])
    if place >= total:
        raise ConfigError(f"{index}={place}, but {count} says that there are {total} processes; use 0 to {total - 1}")
    if not address or not re.fullmatch(r".+:\d+", address):
        said = f"{_NAMES['address']}={address} is" if address else f"{_NAMES['address']} is missing; it is"
        raise ConfigError(f"{said} the address of process 0 of {total}; write it as host:port")
    return Processes(address, total, place)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.isdecimal():
        what = "is missing" if text is None else f"={text} is not a number"
        raise ConfigError(f"{name}{' ' if text is None else ''}{what}; several processes of a run need it in each")
    return int(text)


def _first_host(nodes: str) -> str:
    """Of Slurm's list: n1 of "n1,n2", tpu007 of "tpu[007-015,020]"."""
    head = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "".join(filter(None, head.groups())) if head else nodes


def join(environment: Mapping[str, str]) -> None:
    """Meets the other processes, if there are any; before JAX's backend starts.

    Raises:
        ConfigError: the environment is not complete, or the first process cannot be reached.
    """
    global _here
    if jax.distributed.is_initialized():  # by who called us
        _here = Processes("", jax.process_count(), jax.process_index())
        return
    found = processes_of(environment)
    if found is None:
        return
    try:
        jax.distributed.initialize(found.address, found.count, found.index, cluster_detection_method="deactivate")
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"process {found.index} of {found.count} does not reach {_NAMES['address']}={found.address}: {reason}; "
            "start them all, and let them reach the first"
        ) from None
    _here = found


def count() -> int:
    """Processes of this run."""
    return 1 if _here is None else _here.count


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return _here is None or _here.index == 0


def any_of(mine: bool) -> bool:
    """Whether it holds for any process; all have to ask."""
    return mine if count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(mine))))


def wait(name: str) -> None:
    """Until all processes are here."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def same_for_all(text: str) -> bool:
    """Whether all processes have the same text."""
    if count() == 1:
        return True
    sums = multihost_utils.process_allgather(np.array([zlib.crc32(text.encode()), len(text)], np.uint32))
    return bool(np.all(sums == sums[0]))


@contextmanager
def entered_by_first(context: AbstractContextManager[None]) -> Iterator[None]:
    """A context that the first process enters for all.

    Raises:
        ConfigError: it cannot; in every process.
    """
    with ExitStack() as stack:
        failed: ConfigError | None = None
        if is_first():
            try:
                stack.enter_context(context)
            except ConfigError as error:
                failed = error
        if any_of(failed is not None):
            raise failed or ConfigError("the first process cannot begin; it says why")
        yield
