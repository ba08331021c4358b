"""Metrics by themselves, exact on any number of devices: of a run's checkpoint, or of a model with weights of its own.

    python evaluate.py run=<run folder>                                       what it reported, again
    python evaluate.py run=<run folder> data.root=/other/images parallel=ddp  on other data, on all devices
    python evaluate.py model.name=resnet50 model.pretrained=true data=folder data.root=/data/imagenet
    python evaluate.py -m run=<one>,<another> split=test                      a table

Also train.py's keys of data, parallel and, without a run, model. -m: commas separate what is compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from src.engine.config.arguments import CommandLine, refused_in_a_line
from src.engine.machine.process import die_with_parent, leave
from src.engine.machine.ranks import Ranks, ranks_from_environment

COLUMNS = ("acc", "acc5", "loss", "samples")


@refused_in_a_line
def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 where a row of a table failed, 2 refused. Prints a JSON line per split and weights."""
    options = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    if options != arguments:
        return _table(options)
    parser = CommandLine(__doc__)
    parser.add_argument("--run", type=Path, help="run folder")
    parser.add_argument("--split", choices=["val", "test", "all"], default="all")
    parser.add_argument("--checkpoint", help="best, last or a file (default: what result.json names, else the newest)")
    return _evaluate(*parser.read_known(arguments), arguments)


def _evaluate(given: argparse.Namespace, overrides: list[str], arguments: list[str]) -> int:
    from src.data.folders import check_data
    from src.engine.config.evaluation import evaluation_config

    if given.run is None and given.checkpoint is not None:
        raise ValueError(f"checkpoint={given.checkpoint}: is of a run: give run=<run folder> too")
    ranks = ranks_from_environment(os.environ)
    config = evaluation_config(given.run, overrides, ranks)
    check_data(config.data)
    if config.parallel.has_ranks and ranks is None:
        from src.engine.launch.torchrun import start_as_ranks

        return start_as_ranks(config.parallel, __file__, arguments)
    from src.engine.launch.rendezvous import open_store
    from src.run.evaluate import evaluate_config

    if ranks is not None:
        die_with_parent()
    ranks = ranks or Ranks()
    store = open_store(ranks) if config.parallel.has_ranks else None
    for split, numbers in evaluate_config(config, given.run, given.split, given.checkpoint, ranks, store):
        if ranks.is_first:
            print(json.dumps({"split": split, **numbers}), flush=True)
    return 0


def _table(options: list[str]) -> int:
    """One process per combination, so that each has its devices for itself; one that fails is a row with its reason."""
    swept = [re.split(r",(?![^\[{(]*[\]})])", option.partition("=")[2]) for option in options]
    keys = [option.partition("=")[0] for option in options]
    varied = [key for key, values in zip(keys, swept, strict=True) if len(values) > 1]
    rows, code = [["", "split", *COLUMNS]], 0
    for values in itertools.product(*swept):
        point = dict(zip(keys, values, strict=True))
        name = " ".join(f"{key}={point[key]}" for key in varied) or " ".join(options)
        command = [sys.executable, __file__, *(f"{key}={value}" for key, value in point.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            rows.append([name, (done.stderr.strip().splitlines() or ["failed"])[-1]])
            code = 1
        else:
            rows += [_row(name, json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    widths = [max((len(row[i]) for row in rows if len(row) > 2), default=0) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    return code


def _row(name: str, numbers: dict[str, Any]) -> list[str]:
    weights = " (ema)" if numbers.get("weights") == "ema" else ""
    cells = [numbers.get(column) for column in COLUMNS]
    shown = ["" if cell is None else f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return [name, f"{numbers['split']}{weights}", *shown]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # this may be a rank
