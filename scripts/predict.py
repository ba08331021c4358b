"""The best classes of images, by a trained model.

python scripts/predict.py run=<run folder> images=<folder or file>
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, number_or_auto, refused_in_a_line, whole_number
from src.engine.machine.process import leave
from src.engine.machine.ranks import Ranks, ranks_from_environment
from src.schema import Config, DataConfig, ParallelConfig


@refused_in_a_line
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 refused."""
    parser = CommandLine(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--images", type=Path, required=True, help="folder or file")
    parser.add_argument("--topk", type=whole_number(), default=5)
    parser.add_argument("--output", type=Path, help="file (default: printed); its suffix chooses the format")
    parser.add_argument("--format", choices=["console", "csv", "json"])
    parser.add_argument("--checkpoint", help="best, last or a file")
    parser.add_argument("--weights", choices=["model", "ema"], help="default: those that checkpoint.metric judged")
    parser.add_argument("--batch_size", type=whole_number(), default=64)
    parser.add_argument("--workers", type=number_or_auto(0), default="auto", help="loader processes per rank, or auto")
    parser.add_argument("--parallel", choices=["single", "dp", "ddp"], default="single")
    parser.add_argument("--devices", type=number_or_auto(), default="auto", help="a number, or auto")
    given = parser.read(argv)
    if not given.images.exists():
        raise ValueError(f"images={given.images}: no such file or folder")
    if not (given.run / "config.yaml").is_file():
        raise ValueError(f"run={given.run}: not a run folder: it has no config.yaml")
    ranks = ranks_from_environment(os.environ)
    if given.parallel == "ddp" and ranks is None:
        from src.engine.config.resolve import resolve
        from src.engine.launch.torchrun import start_as_ranks

        parallel = ParallelConfig(strategy="ddp", devices=given.devices)
        data = DataConfig(batch_size=None, batch_size_per_device=given.batch_size)
        return start_as_ranks(resolve(Config(parallel=parallel, data=data)).parallel, __file__, argv)
    _predict(given, ranks)
    return 0


def _predict(given: argparse.Namespace, ranks: Ranks | None) -> None:
    from src.engine.launch.rendezvous import open_store
    from src.engine.machine.process import die_with_parent
    from src.trained.predict import PredictionRequest, predict, write

    started = time.monotonic()
    request = PredictionRequest(
        run=given.run,
        images=given.images,
        checkpoint=given.checkpoint,
        weights=given.weights,
        topk=given.topk,
        batch_size=given.batch_size,
        workers=given.workers,
        parallel=ParallelConfig(strategy=given.parallel, devices=given.devices),
    )
    if ranks is not None:
        die_with_parent()
    ranks = ranks or Ranks()
    found = predict(request, ranks, open_store(ranks) if given.parallel == "ddp" else None)
    if ranks.is_first:
        by_suffix = "console" if given.output is None else "json" if given.output.suffix == ".json" else "csv"
        write(found, given.format or by_suffix, given.output)
        unreadable = sum(not one.classes for one in found)
        print(f"{len(found)} images in {time.monotonic() - started:.1f} s, {unreadable} unreadable", file=sys.stderr)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # this may be a rank
