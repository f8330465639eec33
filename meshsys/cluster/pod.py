"""The chips and links of a cluster, and which job has them.

A pod without cubes is a torus with the links of its topology. With cubes it is made of blocks of `cube` chips a side:
a cube is a mesh, whose six faces end in ports of optical switches. Cubes are numbered row-major, and the topology's
shape only says how many there are: switches join a port to

- `same_position`: the port at the same place of the opposite face, of any cube, this one too; as in TPU v4;
- `any`: any other port, which is what RFold takes for granted.

Links and ports have numbers. Of n chips in D dimensions, `chip * D + dim` is the link, or the port, upwards from a
chip, and `(n + chip) * D + dim` is the port downwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.cubes import Cubes
from meshsys.cluster.grant import Grant
from meshsys.errors import ConfigError
from meshsys.torus import Topology
from meshsys.torus.shapes import TWISTED, dimension_names

__all__ = ["FAILED", "FREE", "Pod", "Wiring"]

Wiring = Literal["same_position", "any"]
FREE, FAILED = 0, -1


class Pod:
    """The chips of a cluster, and whose they are.

    Attributes:
        topology: what it is made of; chips count, not the cores of a chip.
        dims: chips along each dimension.
        cube: side of a cube; None for a torus without switches.
        wiring: which ports a switch can join.
        shared_links: whether traffic of several jobs may use a link.
        options: what comes before the names of options in errors, as in "cluster.".
        size: chips.
        owner: int64 [size], read-only: `FREE`, `FAILED`, or the number of a job, which is above 0. A failed chip
            stays its job's until that is released.
        free: chips that are free.
        free_nodes: bool [*dims], read-only: where `owner` is `FREE`.
        jobs: the grant of each job.
        changes: goes up whenever a chip changes hands.
        coords: int64 [size, dimensions]: where each chip is.
        cubes: which chips of each cube are free; None without cubes.
        cube_of: int64 [size]: the cube of each chip.

    Raises:
        ConfigError: a cube that the topology is not made of, a twisted topology, or an unknown wiring.
    """

    def __init__(
        self,
        topology: Topology,
        cube: int | None,
        wiring: Wiring = "same_position",
        *,
        shared_links: bool = False,
        options: str = "",
    ) -> None:
        self.topology, self.cube, self.wiring, self.shared_links = topology, cube, wiring, shared_links
        self.options = options
        self.dims = topology.shape
        self.ndim = len(self.dims)
        self.size = math.prod(self.dims)
        self._check()
        self.wrap = topology.wrap[: self.ndim]
        self.jobs: dict[int, Grant] = {}
        self.changes = 0
        self.free = self.size
        self._owner = np.zeros(self.size, np.int64)
        self._free = np.ones(self.size, bool)
        self._failed = np.zeros(self.size, bool)
        self._users = np.zeros(2 * self.size * self.ndim, np.int32)
        self.owner = _read_only(self._owner)
        self.free_nodes = _read_only(self._free.reshape(self.dims))
        self.coords = np.stack(np.unravel_index(np.arange(self.size), self.dims), -1)  # int64 [size, ndim]
        self.cubes = Cubes(self.dims, cube) if cube else None
        self.cube_of = np.zeros(self.size, np.int64)
        if self.cubes:
            self.cube_of[self.cubes.nodes] = np.arange(self.cubes.count)[:, None]
            self.cubes.update(np.arange(self.cubes.count), self._free)

    def _check(self) -> None:
        if self.topology.twisted:
            raise ConfigError(
                f"{self.options}topology={self.topology} is twisted, which a slice can be and no pod; leave out "
                f"{TWISTED}, and write it behind the shape of a job"
            )
        if self.wiring not in ("same_position", "any"):
            raise ConfigError(f"{self.options}wiring={self.wiring} is not a wiring; use same_position or any")
        if self.cube is None:
            return
        common = math.gcd(*self.dims)
        fits = [str(side) for side in range(2, common + 1) if common % side == 0]
        if str(self.cube) not in fits:
            way = f"use a cube of {' or '.join(fits)}, or none" if fits else "use none"
            what = f"{self.topology} is not made of cubes of {self.cube} a side"
            raise ConfigError(f"{self.options}cube={self.cube}: {what}; {way}")

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same for all pods that differ only in their jobs and failures."""
        return self.topology, self.cube, self.wiring, self.shared_links

    def empty(self) -> Pod:
        """The same pod without jobs and failures."""
        return Pod(self.topology, self.cube, self.wiring, shared_links=self.shared_links, options=self.options)

    def copy(self) -> Pod:
        """The same pod with the same jobs and failures; what happens to one does not happen to the other."""
        other = copy.copy(self)
        other.jobs = dict(self.jobs)
        other._owner, other._free = self._owner.copy(), self._free.copy()
        other._failed, other._users = self._failed.copy(), self._users.copy()
        other.owner, other.free_nodes = _read_only(other._owner), _read_only(other._free.reshape(self.dims))
        other.cubes = self.cubes.copy() if self.cubes else None
        return other

    # Jobs

    def admits(self, grant: Grant) -> bool:
        """Whether the grant's chips are free, and its links where they are not to be shared."""
        links_free = self.shared_links or not self._users[grant.links].any()
        return links_free and bool(self._free[grant.nodes].all())

    def take(self, job: int, grant: Grant) -> None:
        """Gives a job its chips and links.

        Raises:
            ValueError: a chip that is not free or is there twice, a link that is another job's, or a job that has
                chips already; a mistake of the policy, and nothing has changed.
        """
        nodes = grant.nodes.ravel()
        if job <= 0 or job in self.jobs:
            raise ValueError(f"job {job} has chips already" if job > 0 else f"job {job} is not above 0")
        if not self._free[nodes].all():
            bad = int(nodes[~self._free[nodes]][0])
            raise ValueError(f"job {job}: chip {bad} is not free (owner {self._owner[bad]})")
        if not self.shared_links and self._users[grant.links].any():
            bad = int(grant.links[self._users[grant.links] > 0][0])
            raise ValueError(f"job {job}: another job uses {self.link_name(bad)}")
        self._owner[nodes] = job
        if np.count_nonzero(self._owner == job) != len(nodes):
            self._owner[nodes] = FREE
            raise ValueError(f"job {job}: a chip is there twice")
        self._free[nodes] = False
        self._users[grant.links] += 1
        self.jobs[job] = grant
        self._changed(nodes, -len(nodes))

    def release(self, job: int) -> None:
        """Takes a job's chips and links back; chips that failed meanwhile stay out of use.

        Raises:
            KeyError: the job has none.
        """
        grant = self.jobs.pop(job)
        nodes = grant.nodes.ravel()
        sound = nodes[~self._failed[nodes]]
        self._owner[nodes] = FAILED
        self._owner[sound] = FREE
        self._free[sound] = True
        self._users[grant.links] -= 1
        self._changed(sound, len(sound))

    # Failures

    def fail(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Takes chips out of use; returns the jobs that have some of them, ascending."""
        hit = np.asarray(list(nodes), np.int64)
        self._failed[hit] = True
        idle = np.unique(hit[self._owner[hit] == FREE])
        self._owner[idle] = FAILED
        self._free[idle] = False
        self._changed(idle, -len(idle))
        return tuple(int(job) for job in np.unique(self._owner[hit]) if job > 0)

    def repair(self, nodes: Iterable[int]) -> None:
        """Puts chips back into use."""
        whole = np.asarray(list(nodes), np.int64)
        self._failed[whole] = False
        back = np.unique(whole[self._owner[whole] == FAILED])
        self._owner[back] = FREE
        self._free[back] = True
        self._changed(back, len(back))

    def _changed(self, nodes: NDArray[np.int64], freed: int) -> None:
        self.free += freed
        self.changes += 1
        if self.cubes:
            self.cubes.update(np.unique(self.cube_of[nodes]), self._free)

    # Links

    @property
    def shared(self) -> int:
        """Links that traffic of several jobs uses."""
        return int(np.count_nonzero(self._users > 1))

    def sharing(self, grant: Grant) -> int:
        """Links of a grant that another job uses; the grant is not yet taken."""
        return int(np.count_nonzero(self._users[grant.links]))

    def link_name(self, link: int) -> str:
        """A link for people: "link 1,0,3 +y", or "port 1,0,3 +y" where it leads to a switch."""
        down, rest = divmod(link, self.size * self.ndim)
        chip, dim = divmod(rest, self.ndim)
        name = dimension_names(self.ndim)[dim]
        kind = "port" if self.is_port(link) else "link"
        return f"{kind} {','.join(map(str, self.coords[chip]))} {'-' if down else '+'}{name}"

    def is_port(self, link: int) -> bool:
        """Whether a link leads to a switch."""
        down, rest = divmod(link, self.size * self.ndim)
        chip, dim = divmod(rest, self.ndim)
        return bool(self.cube) and (down == 1 or (self.coords[chip, dim] + 1) % self.cube == 0)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.setflags(write=False)
    return view
