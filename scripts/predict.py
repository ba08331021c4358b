"""Predict images with a trained model: classes, numbers or masks.

python scripts/predict.py run=<run folder> images=<folder or file>
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import (
    command_line,
    errors_in_one_line,
    exit_process,
    file_argument,
    number_argument,
)

if TYPE_CHECKING:
    from timm_parallel import Strategy


@errors_in_one_line
def main(argv: list[str]) -> int:
    """Predict images and write the predictions. Return the exit code: 0 if done, 2 if an argument
    is wrong.
    """
    parser = command_line(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--images", type=Path, required=True, help="folder or file")
    parser.add_argument("--topk", type=number_argument(int, least=1), default=5)
    parser.add_argument(
        "--output",
        type=file_argument,
        help="file (default: printed); its suffix chooses the format",
    )
    parser.add_argument("--folder", type=Path, help="folder for masks, with train=segmentation")
    parser.add_argument("--format", choices=["console", "csv", "json"])
    parser.add_argument("--checkpoint", help="best, last or a file")
    parser.add_argument(
        "--weights",
        choices=["model", "ema"],
        help="default: those that checkpoint.metric evaluates",
    )
    parser.add_argument("--batch_size", type=number_argument(int, least=1), default=64)
    parser.add_argument(
        "--workers",
        type=number_argument(int, or_auto=True),
        default="auto",
        help="loader processes per rank, or auto",
    )
    parser.add_argument("--parallel", choices=["single", "dp", "ddp"], default="single")
    parser.add_argument(
        "--devices",
        type=number_argument(int, least=1, or_auto=True),
        default="auto",
        help="a number, or auto",
    )
    given = parser.parse_intermixed_args(argv)
    if not given.images.exists():
        raise ValueError(f"images={given.images}: no such file or folder")
    if not (given.run / "config.yaml").is_file():
        raise ValueError(f"run={given.run}: not a run folder: it has no config.yaml")
    from timm_parallel import Files, resolve_devices, run_on_devices

    output = given.output
    images = Files.below(given.images).files if output is not None and output.exists() else ()
    # A broken link has no file to compare. It is listed as unreadable.
    if any(path.exists() and path.samefile(output) for path, _ in images):
        raise ValueError(f"output={output}: one of the images; give the path of another file")
    config = resolve_devices(given.parallel, given.devices, given.batch_size)
    return run_on_devices(config, __file__, argv, partial(_predict, given))


def _predict(given: argparse.Namespace, strategy: Strategy) -> None:
    from src.commands.predict import predict
    from timm_parallel import write_predictions

    started = time.monotonic()
    predictions = predict(
        given.run,
        given.images,
        strategy,
        checkpoint=given.checkpoint,
        weights=given.weights,
        topk=given.topk,
        batch_size=given.batch_size,
        workers=given.workers,
        folder=given.folder,
    )
    if strategy.group.is_first:
        form = given.format or "console"
        if given.format is None and given.output is not None:
            form = "json" if given.output.suffix == ".json" else "csv"
        write_predictions(predictions, form, given.output)
        unreadable = sum(values is None for values in predictions.values())
        count = f"{len(predictions)} image{'' if len(predictions) == 1 else 's'}"
        print(
            f"{count} in {time.monotonic() - started:.1f} s, {unreadable} unreadable",
            file=sys.stderr,
        )


if __name__ == "__main__":
    # Use exit_process instead of sys.exit, because this process may be a rank: destructors of CUDA
    # and NCCL may block.
    exit_process(main(sys.argv[1:]))
