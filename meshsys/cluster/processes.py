"""Processes that outlive whoever started them, told apart from later ones that got the same number."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["ATTEMPT", "alive", "identity", "members", "send"]

ATTEMPT = "MESHSYS_ATTEMPT"
"""The environment variable by which all processes of one attempt at a job are found."""

_PROC = Path("/proc")


def identity(pid: int) -> str | None:
    """What no other process with this number has, before or after: its start, within this boot; None if there is none.

    A process that has ended and waits for its parent counts as none.
    """
    if not (_PROC / "self" / "stat").exists():
        return _identity_by_ps(pid)
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before may hold anything
    return None if fields[0] in b"ZX" else f"{_boot()}:{fields[19].decode()}"


def alive(pid: int | None, known: str | None) -> bool:
    """Whether the process that was seen with this number and identity still runs."""
    return pid is not None and known is not None and identity(pid) == known


def members(token: str) -> list[int]:
    """All processes of an attempt, whoever is their parent now; empty where the system does not tell."""
    wanted, found = f"{ATTEMPT}={token}".encode(), []
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if identity(pid)]


def send(
    token: str, leader: int | None, known: str | None, number: signal.Signals, told: set[int] | None = None
) -> None:
    """Sends a signal to all processes of an attempt.

    Args:
        leader, known: its first process, which leads a process group, and that process's identity.
        told: processes that have had it, and do not get it again; those that get it are added.
    """
    pids = members(token)
    for pid in pids:
        if told is not None:
            if pid in told:
                continue
            told.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if not pids and leader is not None and alive(leader, known) and leader not in (told or ()):
        with suppress(ProcessLookupError):
            os.killpg(leader, number)
        if told is not None:
            told.add(leader)


@lru_cache(1)
def _boot() -> str:
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def _identity_by_ps(pid: int) -> str | None:
    shown = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout
    state, _, start = shown.strip().partition(" ")
    return start.strip() if start and not state.startswith("Z") else None
