"""List of image files and their labels, which loader workers read without copying it. This module
does not import torch.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any


class FileList(Sequence[tuple[Path, Any]]):
    """List of pairs of path and label of image files, stored in a few large blocks of memory.

    Forked loader workers share these blocks. They would copy a list of tuples page by page, because
    reading a Python object changes its reference count: 300 MB per worker for a million files.
    """

    def __init__(self, files: Sequence[tuple[Path, Any]]) -> None:
        self._paths = Blocks([os.fsencode(path) for path, _ in files])
        labels = [label for _, label in files]
        # Pickle labels that are not class numbers: tuples of numbers, or names of masks.
        self._labels: array[int] | Blocks = (
            array("q", labels)
            if {*map(type, labels)} == {int}
            else Blocks([pickle.dumps(label) for label in labels])
        )

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        path, label = self.read(index)
        return Path(path), label

    def read(self, index: int) -> tuple[str, Any]:
        """Return the path of an image as text, and its label. Workers use this method, because each
        new Path writes to Python's table of interned strings, which would be copied.
        """
        label = self._labels[index]
        path = os.fsdecode(self._paths[index])
        return path, pickle.loads(label) if isinstance(label, bytes) else label

    def columns(self) -> tuple[list[str], list[Any]]:
        """Return all paths and all labels. This is faster than reading pair by pair, because it
        builds no Path objects.
        """
        paths = [os.fsdecode(path) for path in self._paths]
        if isinstance(self._labels, Blocks):
            return paths, [pickle.loads(label) for label in self._labels]
        return paths, self._labels.tolist()


class Blocks(Sequence[bytes]):
    """List of byte strings, stored as one byte string and the positions at which they end."""

    def __init__(self, items: list[bytes]) -> None:
        self._bytes = b"".join(items)
        self._ends = array("Q", accumulate(map(len, items), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        position = range(len(self))[index]
        return self._bytes[self._ends[position] : self._ends[position + 1]]

    def __iter__(self) -> Any:
        return (self._bytes[start:end] for start, end in pairwise(self._ends))
