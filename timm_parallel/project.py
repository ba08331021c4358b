"""Where the project's files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders with Python code that a run uses.
CODE = ("src", "timm_parallel")
