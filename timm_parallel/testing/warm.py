"""Imports done once by the server of `in_ranks`. Forked ranks inherit these modules instead of
importing them again.
"""
# ruff: noqa: F401

import sys
from contextlib import suppress
from pathlib import Path

# The server does not have this process's path.
sys.path.insert(0, str(Path(__file__).parent))

import torchvision.transforms.v2

from timm_parallel.testing import ranks
from timm_parallel.testing.configs import parse, tiny

with suppress(ImportError):  # a GPU machine without a package index may lack it
    import hypothesis

import timm_parallel.parallel.distributed
import timm_parallel.parallel.fully_sharded
from src.app import app
from timm_parallel.config.compose import compose_command

app.import_all()
compose_command(
    parse(*tiny())
)  # Hydra with its grammar and plugins; without resolve(), which queries the GPU driver
