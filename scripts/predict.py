"""The best classes of images, by a trained model.

    python scripts/predict.py run=<run folder> images=<folder or file>

Also: topk=5  format=console|csv|json  output=<file> (default: printed; its suffix chooses the format)
      checkpoint=best|last|<file>  weights=model|ema (default: those that checkpoint.metric judged)
      batch_size=64  workers=auto|N  parallel=single|dp|ddp (default: single)  devices=auto|N
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import one_of, parse_arguments, whole_number
from src.engine.machine.secrets import mask
from src.schema import ParallelConfig

OPTIONS = {
    **dict.fromkeys(("run", "images", "format", "output", "checkpoint", "weights")),
    **{"topk": "5", "batch_size": "64", "workers": "auto", "devices": "auto", "parallel": "single"},
}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 refused."""
    try:
        options = parse_arguments(arguments, OPTIONS, ("run", "images"), str(__doc__))
        _check(options)
        if options["parallel"] == "ddp" and "RANK" not in os.environ:
            from src.engine.launch.again import start_again_as_ranks

            start_again_as_ranks(options["devices"], __file__, arguments)
        _predict(options)
    except ValueError as error:
        print(f"predict.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    return 0


def _check(options: dict[str, str]) -> None:
    """What can be refused before torch is there, and before there are ranks. Errors: ValueError."""
    one_of(options, "parallel", "single", "dp", "ddp")
    one_of(options, "format", "console", "csv", "json")
    one_of(options, "weights", "model", "ema")
    for key in ("topk", "batch_size", *(key for key in ("devices", "workers") if options[key] != "auto")):
        whole_number(options, key, least=0 if key == "workers" else 1)
    if not Path(options["images"]).exists():
        raise ValueError(f"images={options['images']}: no such file or folder")
    if not (Path(options["run"]) / "config.yaml").is_file():
        raise ValueError(f"run={options['run']}: not a run folder: it has no config.yaml")


def _predict(options: dict[str, str]) -> None:
    from src.engine.launch.rendezvous import open_store
    from src.engine.machine.ranks import Ranks, ranks_from_environment
    from src.trained.predict import PredictionRequest, predict, write

    started = time.monotonic()
    output = Path(options["output"]) if "output" in options else None
    by_suffix = {".csv": "csv", ".json": "json"}.get(output.suffix, "csv") if output else "console"
    wanted = PredictionRequest(
        run=Path(options["run"]),
        images=Path(options["images"]),
        checkpoint=options.get("checkpoint"),
        weights=options.get("weights"),
        topk=int(options["topk"]),
        batch_size=int(options["batch_size"]),
        workers=_number_or_auto(options["workers"]),
        parallel=ParallelConfig(strategy=options["parallel"], devices=_number_or_auto(options["devices"])),
    )
    ranks = ranks_from_environment(os.environ) or Ranks()
    found = predict(wanted, ranks, open_store(ranks) if options["parallel"] == "ddp" else None)
    if ranks.is_first:
        write(found, options.get("format", by_suffix), output)
        unreadable = sum(not one.classes for one in found)
        print(f"{len(found)} images in {time.monotonic() - started:.1f} s, {unreadable} unreadable", file=sys.stderr)


def _number_or_auto(word: str) -> int | str:
    return word if word == "auto" else int(word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
