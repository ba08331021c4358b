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
        self.devices, self.most = devices, most
        self.held: dict[int, tuple[Need, Sequence[str]]] = {}

    def free(self, kind: str) -> list[str]:
        """The devices of a kind that no job has."""
        taken = {name for need, names in self.held.values() if need.kind == kind for name in names}
        return [name for name in self.devices[kind] if name not in taken]

    def start_next(
        self, waiting: Sequence[tuple[int, Need]], has_memory: Callable[[int], bool] = lambda job: True
    ) -> tuple[int, list[str]] | None:
        """The job to start now, and its devices, which it then holds. None: wait until one has ended. Ask until it is None.

        `waiting`: (job, need) in order. `has_memory` is asked before a job starts beside others; a job without it waits,
        and is reserved as one without devices is.
        """
        if len(self.held) == self.most:
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
            if not self.held or (self._count(need) <= len(self.free(need.kind)) and has_memory(job)):
                return job, self._take(job, need)
            reserved.add(need.kind)
        return None

    def release(self, job: int) -> None:
        del self.held[job]

    @property
    def is_full(self) -> bool:
        """True if no job could start that takes devices of the kinds of those under way."""
        none_left = bool(self.held) and not any(self.free(need.kind) for need, _ in self.held.values())
        return none_left or len(self.held) == self.most

    def describe_free(self) -> str:
        """For people: of each kind that jobs hold, what is free."""
        names = {"cpu": "cores", "cuda": "CUDA devices", "mps": "Apple GPUs", "slurm": "places in Slurm's queue"}
        kinds = dict.fromkeys(need.kind for need, _ in self.held.values())
        free = [f"{len(self.free(kind))} of {len(self.devices[kind])} {names[kind]}" for kind in kinds]
        return ", ".join(free) or "all"

    def beside(self, need: Need) -> int:
        """How many jobs of this need the machine holds at a time."""
        fit = 1 if need.alone else len(self.devices[need.kind]) // self._count(need)
        return fit if self.most is None else min(fit, self.most)

    def _rank(self, entry: tuple[int, Need]) -> tuple[bool, int]:
        return entry[1].alone, -self._count(entry[1])

    def _count(self, need: Need) -> int:
        """As many as are asked for, or all there are: four CPU ranks on two cores share them, but with no other job."""
        return max(1, min(need.count, len(self.devices[need.kind])))

    def _take(self, job: int, need: Need) -> list[str]:
        free = self.free(need.kind)
        names = free if need.alone else free[: self._count(need)]
        self.held[job] = (need, names)
        return names
