"""requirements.lock matches requirements.txt, with a hash for every package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.install import out_of_step

ROOT = Path(__file__).resolve().parents[3]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = (ROOT / "requirements.txt").read_text(encoding="utf-8")


def locked(lock: str) -> dict[str, dict[str, int]]:
    """Return package -> version -> number of hashes."""
    packages: dict[str, dict[str, int]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        head = re.match(r"([\w.-]+)==([\w.+!-]+)", block)
        if head:
            hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)
            packages.setdefault(canonical(head[1]), {})[head[2]] = len(hashes)
    return packages


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_requirements_lock_matches_requirements_txt() -> None:
    assert out_of_step(PINS, LOCK) == [], "run make lock"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"^timm==.*$", "timm==0.0.1"),
        (r"\Z", "einops==0.8.0\n"),
        (r"\Z", "einops[extra]>=0.8  # why\n"),
        (r"^rich==", "richer=="),
    ],
)
def test_lock_check_detects_a_changed_added_or_renamed_requirement(old: str, new: str) -> None:
    changed = re.sub(old, new, PINS, count=1, flags=re.MULTILINE)
    assert changed != PINS
    assert len(out_of_step(changed, LOCK)) == 1


def test_requirements_lock_has_hashes_of_every_package_and_no_path_or_url() -> None:
    packages = locked(LOCK)
    assert [name for name, versions in packages.items() if not all(versions.values())] == []
    assert {"antlr4-python3-runtime", "sympy", "pillow", "sqlalchemy", "setuptools"} <= set(
        packages
    )
    places = r"https?://|file:|--(extra-)?index-url|--find-links|/(opt|home|root|tmp)/"
    assert not re.search(places, LOCK)
    lines = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
    assert all(re.match(r"[\w.-]+==|    --hash=sha256:", line) for line in lines), (
        "only pins and hashes"
    )
