"""List of image files and their labels, which loader workers read without copying it. This module
does not import torch.
"""

from __future__ import annotations

import os
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
        self._labels = _stored([label for _, label in files])

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
        if isinstance(self._labels, Blocks):
            label = os.fsdecode(label)
        return os.fsdecode(self._paths[index]), label

    def columns(self) -> tuple[list[str], list[Any]]:
        """Return all paths and all labels. This is faster than reading pair by pair, because it
        builds no Path objects.
        """
        labels = [*self._labels]
        if isinstance(self._labels, Blocks):
            labels = [os.fsdecode(label) for label in labels]
        return [os.fsdecode(path) for path in self._paths], labels


def _stored(labels: list[Any]) -> Sequence[Any]:
    """Store labels in large blocks of memory if they are class numbers, texts, or tuples of as many
    numbers each. Other labels stay in a list.
    """
    kinds = {*map(type, labels)}
    if kinds == {int}:
        return array("q", labels)
    if kinds == {str}:
        return Blocks([os.fsencode(label) for label in labels])
    if kinds == {tuple} and len({*map(len, labels)}) == 1:
        numbers = [number for label in labels for number in label]
        if (of_numbers := {*map(type, numbers)}) in ({int}, {float}):
            return Rows(array("q" if of_numbers == {int} else "d", numbers), len(labels[0]))
    return labels


class Rows(Sequence[tuple[Any, ...]]):
    """List of tuples of `width` numbers, stored as one array."""

    def __init__(self, numbers: array[Any], width: int) -> None:
        self._numbers, self._width = numbers, width

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __getitem__(self, index: Any) -> Any:
        start = range(len(self))[index] * self._width
        return tuple(self._numbers[start : start + self._width])


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
