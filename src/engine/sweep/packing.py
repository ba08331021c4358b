"""Which job starts next, and on which devices. It knows no process and no clock, so that a test can play a whole sweep.

The largest jobs first, so that small ones fill what is left. The first that does not fit is reserved: nothing behind it
takes devices of its kind until it has started, else a stream of small jobs would keep it waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """What a job takes: `count` devices of a kind (cpu: cores; cuda; mps; slurm: places in its queue), or all of them, alone."""

    kind: str
    count: int
    alone: bool = False


class Packing:
    """The devices of a machine, and which job has them."""

    def __init__(self, devices: Mapping[str, Sequence[str]], most: int | None = None) -> None:
        """`devices`: their names by kind. `most`: jobs at a time; None: as many as there are devices for."""
        self.most = most
        self.free = {kind: list(names) for kind, names in devices.items()}
        self.total = {kind: len(names) for kind, names in devices.items()}
        self.held: dict[int, tuple[Need, list[str]]] = {}
        self._order = {name: place for names in devices.values() for place, name in enumerate(names)}

    def start_next(
        self, waiting: Sequence[tuple[int, Need]], has_memory: Callable[[int], bool] = lambda job: True
    ) -> tuple[int, list[str]] | None:
        """The job to start now, and its devices, which it then holds. None: wait until one has ended. Ask until it is None.

        `waiting`: (job, need) in order. `has_memory` is asked before a job starts beside others; a job without it waits,
        and is reserved as one without devices is.
        """
        if self.is_full:
            return None
        reserved: set[str] = set()
        for job, need in waiting if self.most == 1 else sorted(waiting, key=self._rank):
            if need.alone or any(other.alone for other, _ in self.held.values()):
                if self.held:
                    return None
                return job, self._take(job, need)
            if need.kind in reserved:
                continue
            # Where nothing runs, nothing will become free: a job of devices that are gone runs too, and says so.
            if not self.held or (self._count(need) <= len(self.free[need.kind]) and has_memory(job)):
                return job, self._take(job, need)
            reserved.add(need.kind)
        return None

    def release(self, job: int) -> None:
        need, names = self.held.pop(job)
        self.free[need.kind] = sorted(self.free[need.kind] + names, key=self._order.__getitem__)

    @property
    def is_full(self) -> bool:
        """True if no job whatsoever could start."""
        none_left = self.held and not any(self.free[need.kind] for need, _ in self.held.values())
        return bool(none_left) or (self.most is not None and len(self.held) >= self.most)

    def describe_free(self) -> str:
        """For people: of each kind that jobs hold, what is free."""
        kinds = dict.fromkeys(need.kind for need, _ in self.held.values())
        names = {"cpu": "cores", "cuda": "CUDA devices", "mps": "Apple GPUs", "slurm": "places in Slurm's queue"}
        return ", ".join(f"{len(self.free[kind])} of {self.total[kind]} {names[kind]}" for kind in kinds) or "all"

    def beside(self, need: Need) -> int:
        """How many jobs of this need the machine holds at a time."""
        fit = 1 if need.alone else self.total[need.kind] // self._count(need)
        return fit if self.most is None else min(fit, self.most)

    def _rank(self, entry: tuple[int, Need]) -> tuple[bool, int]:
        return entry[1].alone, -self._count(entry[1])

    def _count(self, need: Need) -> int:
        """As many as are asked for, or all there are: four CPU ranks on two cores share them, but with no other job."""
        return max(1, min(need.count, self.total[need.kind]))

    def _take(self, job: int, need: Need) -> list[str]:
        count = self.total[need.kind] if need.alone else self._count(need)
        names, self.free[need.kind] = self.free[need.kind][:count], self.free[need.kind][count:]
        self.held[job] = (need, names)
        return names
