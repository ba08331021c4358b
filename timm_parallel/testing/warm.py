"""Imports that the fork server of `in_ranks` performs once. Forked ranks inherit the imported
modules and need not import them again.
"""
# ruff: noqa: F401

import os
import sys
from contextlib import suppress

import torchvision.transforms.v2

from timm_parallel.testing import ranks

# Continue without hypothesis, which may be missing on a GPU machine that cannot install packages.
with suppress(ImportError):
    import hypothesis

import timm_parallel.parallel.distributed
import timm_parallel.parallel.fully_sharded
from timm_parallel.app import find_app, import_all
from timm_parallel.config.compose import compose_command
from timm_parallel.testing.configs import parse

if ranks.WARM_APP in os.environ:
    # The server does not inherit the module search path of pytest.
    sys.path.insert(0, os.environ[ranks.WARM_ROOT])
    app = find_app(os.environ[ranks.WARM_APP])
    import_all()
    # Compose a config once, which loads Hydra with its grammar and plugins. Do not resolve the
    # config here, because this would query the GPU driver.
    compose_command(parse(*app.trial))
