"""Check that the run folder still exists. A run whose folder was deleted or moved can save nothing,
and must end.
"""

from __future__ import annotations

import os
from pathlib import Path

# Value of `exception` in the failure record of a run whose folder is gone, in place of an
# exception's name.
GONE = "FolderGone"


class RunFolder:
    """Run folder of this process, with a method that detects its deletion."""

    def __init__(self, folder: Path) -> None:
        # Store an absolute path, because the project's code may change the current folder.
        self.path = folder.absolute()
        self._first = self.path.stat()

    def is_gone(self) -> bool:
        """Return True if the run folder was deleted or moved, or if another folder now has its
        name.
        """
        try:
            # `rm -rf` fails if a rank writes a file at the same moment, and then leaves the folder
            # without its config.yaml.
            (self.path / "config.yaml").stat()
            return not os.path.samestat(self.path.stat(), self._first)
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
