"""Evaluate the checkpoint of a run, or a model with weights from timm or from a file. The result is
the same on any number of devices.

    python evaluate.py run=<run folder>                                       repeats its numbers
    python evaluate.py run=<run folder> data.root=/other/images parallel=ddp  on other data
    python evaluate.py run=<run folder> predictions=predictions.csv           a line per image, too
    python evaluate.py run=<run folder> worst=50          a page of the images with the highest loss
    python evaluate.py model.name=resnet50 model.pretrained=true data=folder data.root=/data/images

evaluate.py accepts the keys of train.py in the groups data and parallel, and train.task_kwargs.
Without run=, it accepts the group model too. A shell loop evaluates several runs:

    for run in outputs/train/*/*; do python evaluate.py run=$run split=test; done
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from src.schema import ResolvedConfig
from timm_parallel import (
    check_data,
    command_line,
    errors_in_one_line,
    evaluation_config,
    exit_process,
    file_argument,
    number_argument,
    print_json,
)

if TYPE_CHECKING:
    from timm_parallel import Strategy


@errors_in_one_line
def main(arguments: list[str]) -> int:
    """Evaluate, and print a line of JSON for each split and each set of weights (raw, averaged).
    Return the exit code: 0 if the evaluation is done, 2 if an argument is wrong.
    """
    if {"-m", "--multirun"} & {*arguments}:
        raise ValueError(
            "-m: evaluate.py takes one run; use a shell loop over run=… (python evaluate.py "
            "--help shows one)"
        )
    parser = command_line(__doc__)
    parser.add_argument("--run", type=Path, help="run folder")
    parser.add_argument("--split", choices=["val", "test", "all"], default="all")
    parser.add_argument(
        "--checkpoint",
        help="best, last or a file (default: what result.json names, else the newest)",
    )
    parser.add_argument(
        "--weights", choices=["model", "ema"], help="raw or averaged weights (default: both)"
    )
    parser.add_argument(
        "--predictions",
        type=file_argument,
        help="CSV file with a line per image: path, label and the five best classes (with several "
        "labels: all classes)",
    )
    parser.add_argument(
        "--worst",
        type=number_argument(int, least=1),
        help="write an HTML page with so many images of the highest loss, of each split",
    )
    parser.add_argument(
        "--page", type=file_argument, help="file for worst= (default: worst.html in the run folder)"
    )
    given, overrides = parser.parse_known_intermixed_args(arguments)
    return _evaluate(given, overrides, arguments)


def _evaluate(given: argparse.Namespace, overrides: list[str], arguments: list[str]) -> int:
    from timm_parallel import run_on_devices

    if given.run is None and given.checkpoint is not None:
        raise ValueError(f"checkpoint={given.checkpoint}: needs a run; give run=<run folder> too")
    if given.run is None and given.weights is not None:
        raise ValueError(f"weights={given.weights}: needs a run; give run=<run folder> too")
    if given.worst is None and given.page is not None:
        raise ValueError(f"page={given.page}: needs a number of images; give worst=50 too")
    page = given.page or (given.run or Path()) / "worst.html"
    config = evaluation_config(given.run, overrides)
    assert isinstance(config, ResolvedConfig)
    check_data(config, None if given.run is None else given.split)

    def evaluate(strategy: Strategy) -> None:
        from src.commands.evaluate import evaluate_config

        for split, numbers in evaluate_config(
            config,
            strategy,
            given.run,
            given.split,
            given.checkpoint,
            given.predictions,
            given.weights,
            given.worst,
            page,
        ):
            if strategy.group.is_first:
                print_json({"split": split, **numbers})

    return run_on_devices(config, __file__, arguments, evaluate)


if __name__ == "__main__":
    # Use exit_process instead of sys.exit, because this process may be a rank: destructors of CUDA
    # and NCCL may block.
    exit_process(main(sys.argv[1:]))
