"""Check that the run folder still exists. A run whose folder was deleted or moved can save nothing,
and must end.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

# Value of `exception` in the failure record of a run whose folder is gone, in place of an
# exception's name.
GONE = "FolderGone"


class RunFolder:
    """Run folder of this process, with a method that detects its deletion. It is a context manager,
    because it keeps the folder open.
    """

    def __init__(self, folder: Path) -> None:
        # Store an absolute path, because the project's code may change the current folder.
        self.path = folder.absolute()
        # Watch config.yaml too. `rm -rf` fails if a rank writes a file at the same moment, and then
        # leaves the folder without its config.yaml.
        self._marks = [path for path in (self.path, self.path / "config.yaml") if path.exists()]
        # Keep the folder open, because some network file systems keep its inode number only while
        # it is open.
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
        """Return True if the run folder was deleted or moved, or if another folder now has its
        name.
        """
        try:
            found = [path.stat() for path in self._marks]
            return self._descriptor is not None and not os.path.samestat(
                found[0], os.fstat(self._descriptor)
            )
        except (FileNotFoundError, NotADirectoryError):
            return True
        # Ignore an error of a network file system, which may respond again later.
        except OSError:
            return False

    @property
    def problem(self) -> str:
        return (
            f"{self.path}: this run folder was deleted or moved, so the run cannot save "
            "anything and ends"
        )
