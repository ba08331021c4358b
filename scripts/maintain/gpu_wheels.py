"""Pack Python packages that a GPU machine with torch may lack, so that they can be copied there
with the checkout.

    python scripts/maintain/gpu_wheels.py          # make gpu-wheels: into .gpu-wheels/

The script copies packages and their requirements from this environment, except packages that
usually come with torch. scripts/maintain/gpu_check.py uses the copies on a machine without a
package index.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".gpu-wheels"
WANTED = (
    *(
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime",
        "optuna",
        "timm",
        "tensorboard",
        "rich",
        "psutil",
    ),
    *("nvidia-ml-py", "filelock", "Jinja2", "pytest", "pytest-timeout"),
)
THERE = (
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "scipy",
    "pandas",
    "matplotlib",
    "scikit-learn",
    "setuptools",
)
# Requirements that are left out, because they are large and no run imports them.
NEVER_IMPORTED = ("grpcio", "tensorboard-data-server", "greenlet", "hf-xet")
# Files that are left out. Compiled files work only with one version of Python, and these packages
# work without them.
LEFT_OUT = re.compile(
    r"(^|/)(__pycache__|tests?|testing)/|\.pyc$|\.cpython-\d+-.*\.so$|webfiles\.zip$|^\.\./"
)


def closure(wanted: Iterable[str]) -> list[str]:
    """Return the names of the given packages and of all packages that they require. Packages that
    are not installed here, or that every installation of torch has, are left out.
    """
    names: dict[str, None] = {}
    pending = list(wanted)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop(0)).lower()
        if (
            name in names
            or name in (*THERE, *NEVER_IMPORTED)
            or name.startswith(("nvidia-c", "cuda", "triton"))
        ):
            continue
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        names[name] = None
        pending += [
            re.split(r"[\s;<>=!~\[(]", entry)[0] for entry in requires if "extra ==" not in entry
        ]
    return list(names)


def pack(folder: Path = FOLDER) -> tuple[list[str], int]:
    """Copy the packages to a folder, and delete its previous contents. Return the names of the
    packages and their total size in bytes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    names, size = closure(WANTED), 0
    for name in names:
        for file in metadata.distribution(name).files or []:
            source = Path(str(file.locate()))
            if not LEFT_OUT.search(str(file)) and source.is_file():
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                size += target.stat().st_size
    return names, size


if __name__ == "__main__":
    packed, total = pack()
    print(f"{FOLDER}: {total / 2**20:.0f} MiB of {', '.join(packed)}")
