"""What the server of `in_ranks` does once, before it forks: all that a rank of a test would else import and read anew."""
# ruff: noqa: F401

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the server has not this process's path

import conftest
import hypothesis
import torch.utils.tensorboard
import torchvision.transforms.v2
from configs import parse, tiny

import src.parallel.data_parallel
import src.parallel.distributed
import src.run.lifecycle
from src.engine.config.compose import compose_command

compose_command(parse(*tiny()))  # Hydra with its grammar and plugins; no resolving, which asks the driver of a GPU
