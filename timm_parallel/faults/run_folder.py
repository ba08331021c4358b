"""Check that the run folder still exists: a run whose folder was deleted or moved can save nothing,
and must end.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

GONE = "FolderGone"  # in place of the name of an exception, in failure records


class RunFolder:
    """Run folder as it was at the start of this process. A context manager, because it holds the
    folder open.
    """

    def __init__(self, folder: Path) -> None:
        # Absolute, because your code may change the current folder.
        self.path = folder.absolute()
        # `rm -rf` fails if a rank writes a file at the same moment. Then the folder stays, without
        # its config.
        self._marks = [path for path in (self.path, self.path / "config.yaml") if path.exists()]
        # Some network file systems keep a folder's inode number only while it is open.
        self._descriptor = (
            os.open(self.path, os.O_RDONLY) if os.name == "posix" and self._marks else None
        )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_gone(self) -> bool:
        """Return True if the folder was deleted, moved,
        or replaced by another folder of this name.
        """
        try:
            found = [path.stat() for path in self._marks]
            return self._descriptor is not None and not os.path.samestat(
                found[0], os.fstat(self._descriptor)
            )
        except (FileNotFoundError, NotADirectoryError):
            return True
        # A network file system that does not answer comes back.
        except OSError:
            return False

    @property
    def problem(self) -> str:
        return (
            f"{self.path}: this run folder was deleted or moved, so the run cannot save "
            "anything and ends"
        )
