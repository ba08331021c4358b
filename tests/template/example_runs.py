"""Train, evaluate, predict with and resume runs in a copy of the project that contains the examples
of docs/extend.md.

python example_runs.py <jobs as JSON> <folder of images> # in the copy, which is on the path

The script prints a JSON line for each run. Each run is a process forked from this one, which has
imported torch and the modules of the commands. The only rank of a run is that process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401
import torch.utils.tensorboard

import evaluate
from scripts import predict
from src.app import app
from src.schema import ResolvedConfig
from src.train.run import run
from timm_parallel.entry import run_command
from timm_parallel.faults.failure import RankExits
from timm_parallel.launch import job
from timm_parallel.machine.ranks import Ranks
from timm_parallel.testing.configs import parse


def run_rank_here(config: ResolvedConfig, folder: Path, **_: Any) -> RankExits:
    """Replace `run_ranks`: run the only rank in this process."""
    run(
        config,
        folder,
        Ranks(),
        torch.distributed.HashStore() if config.parallel.has_ranks else None,
    )
    return RankExits(world_size=1)


def output_of(main: Callable[..., int], *arguments: Any) -> tuple[int, str]:
    """Return the exit code of a command and its output, without warnings."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(*arguments)
    return code, out.getvalue()


def train_with(*words: str) -> None:
    sys.argv = ["train.py", *words]
    code, out = output_of(lambda: run_command(app))
    assert code == 0, f"{words}\n{out}"


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "done", result["reason"]
    return result


def follow(name: str, words: list[str], images: Path) -> dict[str, Any]:
    """Run the commands of a job one after the other, and return their outputs."""
    folder = Path("runs") / name.replace(" ", "_")
    train_with(*words, f"hydra.run.dir={folder}")
    first = result_of(folder)
    code, out = output_of(
        evaluate.main, [f"run={folder}", "split=val", "checkpoint=last", "weights=model"]
    )
    assert code == 0, out
    table = folder / "table.csv"
    code, _ = output_of(
        evaluate.main, [f"run={folder}", "split=val", "weights=model", f"predictions={table}"]
    )
    output = folder / "predicted.json"
    predicted, out_of_predict = output_of(
        predict.main, [f"run={folder}", f"images={images}", f"output={output}", "workers=0"]
    )
    assert predicted == 0, out_of_predict
    train_with(f"resume={folder}", "train.max_steps=null", "train.epochs=2")
    return {
        "name": name,
        "steps": [first["steps"], result_of(folder)["steps"]],
        "trained": first["val"],
        "evaluated": json.loads(out),
        "predictions_code": code,
        "rows": len(table.read_text(encoding="utf-8").splitlines()) - 1 if table.exists() else None,
        "predicted": json.loads(output.read_text(encoding="utf-8")),
    }


def main(jobs: str, images: str) -> int:
    job.run_ranks = run_rank_here  # type: ignore[assignment]
    torch.set_num_threads(1)
    app.import_all()
    # Import Hydra before the fork, so that the runs need not import it.
    parse()
    for name, words in json.loads(jobs).items():
        child = os.fork()
        if not child:
            try:
                print(json.dumps(follow(name, words, Path(images))), flush=True)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(f"{name}: exit code {code}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
