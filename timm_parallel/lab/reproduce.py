"""Repeat the first steps of a run with its code, config and number of devices, and compare the two
bit for bit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.config.validate import refuse
from timm_parallel.data.dataset import image_files
from timm_parallel.lab.code_copy import apply_diff, copy_commit, no_repository
from timm_parallel.lab.curves import Curve, curves
from timm_parallel.machine.files import claim_folder, finite, write_json
from timm_parallel.machine.text import first, plural
from timm_parallel.project import root
from timm_parallel.record.code_diff import CODE_DIFF, CUT
from timm_parallel.record.environment import read_environment
from timm_parallel.record.jobs import FAILED
from timm_parallel.record.result import Result, read_result, read_segments

CERTIFICATE = "certificate.json"  # in the run folder
LOSS, WEIGHTS = "train/loss", "hash of the weights"
# Keys of environment.json and result.json that may explain a difference.
OF_MACHINE = ("python", "platform", "driver", "cuda", "nccl", "backend")
OF_RESULT = ("accelerator", "devices", "threads_per_device", "accumulate", "parameters")


def reproduce_run(run: Path, steps: int) -> int:
    """Repeat the first `steps` steps of a run in `<run>/reproduced`, print how they compare, and
    write certificate.json. Return the exit code: 0 reproduced, 3 not, else that of train.py.

    Raises ValueError if the record is incomplete. train.py refuses a machine with too few devices.
    """
    recorded, environment, end = _recorded(run, steps), read_environment(run), _end(run)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    refuse(_problems(run, environment, end))
    folder = claim_folder(run / "reproduced")
    try:
        copy_commit(root(), environment["commit"], folder / "code")
        if environment["dirty"]:
            apply_diff(folder / "code", run / CODE_DIFF)
    except ValueError as error:
        shutil.rmtree(folder)
        has = f"use a clone that has commit {environment['commit']}"
        raise ValueError(f"{run}: its code cannot be restored ({error}); {has}") from None
    last = max(recorded[LOSS])
    is_whole = end.status == "done" and end.steps == last
    code = _train(run, folder, [] if is_whole else [f"train.max_steps={last}"])
    # A run that failed the first time, and fails again, is compared too.
    if code != 0 and (code != 1 or end.status not in FAILED):
        print(f"{run}: its repetition ended with exit code {code}", file=sys.stderr)
        return code
    found = _differing(recorded, curves(folder / "run"))
    again = _end(folder / "run")
    has_hashes = end.parameters_hash is not None and again.steps == end.steps
    if has_hashes and again.parameters_hash != end.parameters_hash:
        found.append((last, WEIGHTS, end.parameters_hash, again.parameters_hash))
    certificate = {
        "format": 1,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "reproduced": not found,
        "run": str(run),
        "repetition": str(folder / "run"),
        "commit": environment["commit"],
        "steps": last,
        "losses": len(recorded[LOSS]),
        "equal_losses": len(recorded[LOSS]) - sum(name == LOSS for _, name, *_ in found),
        "weights_compared": has_hashes,
        "first_difference": None
        if not found
        else dict(zip(("step", "metric", "was", "now"), found[0], strict=True)),
        "differences": _differences(run, folder / "run"),
        "newer_files": _newer_files(run, config["data"]["root"], environment["time"]),
    }
    write_json(run / CERTIFICATE, finite(certificate))
    print("\n".join(describe(certificate)), flush=True)
    return 3 if found else 0


def describe(certificate: dict[str, Any]) -> list[str]:
    """Return a certificate in words: the result, and a line for each thing that is not as
    recorded.
    """
    equal = "{equal_losses} of {losses} losses are equal bit for bit".format(**certificate)
    weights = ", and so are the weights" if certificate["weights_compared"] else ""
    lines = [f"reproduced: {equal}{weights}"]
    if certificate["first_difference"]:
        what = "{metric} of step {step} was {was} and is {now}"
        lines = [f"not reproduced: {what.format(**certificate['first_difference'])}; {equal}"]
    for name, (was, now) in certificate["differences"].items():
        lines.append(f"  {name}: was {was}, is {now}")
    if newer := certificate["newer_files"]:
        lines.append(f"  data: {plural(len(newer), 'file')} newer than the run: {first(newer)}")
    if len(lines) == 1 and not certificate["reproduced"]:
        lines.append("  code, versions, machine and data are as recorded")
    return lines


def _recorded(run: Path, steps: int) -> dict[str, Curve]:
    """Return the curves that a run has logged, up to its last loss in `steps` steps."""
    logged = curves(run)
    last = max((step for step in logged.get(LOSS, {}) if step <= steps), default=None)
    if last is None:
        raise ValueError(f"steps={steps}: {run} has logged no loss up to there; use a larger one")
    for curve in logged.values():
        for step in [step for step in curve if step > last]:
            del curve[step]
    return logged


def _problems(run: Path, environment: dict[str, Any], end: Result) -> Iterator[str]:
    """Yield an error message if the files of a run do not say what its code and settings were."""
    if environment.get("commit") is None:
        yield f"{run}: environment.json has no commit; commit the code and train again in a clone"
    if any(segment["changed"] for segment in end.segments or read_segments(run)):
        yield (
            f"{run}: it was resumed with other settings, and only the last are saved; train again "
            "without them"
        )
    diff = run / CODE_DIFF
    text = diff.read_text(encoding="utf-8") if diff.is_file() else CUT
    if environment.get("dirty") and f"\n{CUT}" in f"\n{text}":
        yield f"{diff}: missing, or cut as too large; commit the changes and train again"
    if environment.get("dirty") and "***" in text:
        yield (
            f"{diff}: secrets in it are masked by ***; move them to the environment, commit and "
            "train again"
        )


def _train(run: Path, folder: Path, more: list[str]) -> int:
    """Train the saved config in `<folder>/run` with the code in `<folder>/code`. Return the exit
    code.
    """
    code = (folder / "code").resolve()
    command = [sys.executable, str(code / "train.py")]
    command += ["--config-path", str(run.resolve()), "--config-name", "config", *more]
    command += [f"hydra.run.dir='{(folder / 'run').resolve()}'", "resume=null"]
    # Not the trackers of the run, which others see. `tracker.use={}` would change nothing.
    command += [f"tracker.{name}=null" for name in ("use", "entity", "mode", "uri")]
    # A new run, with all devices on this machine.
    command += ["search.sampler=null", "cluster.scheduler=local", "cluster.nodes=1"]
    environment = {**os.environ, **no_repository(code)}
    return subprocess.run(command, cwd=_cwd(run), env=environment, check=False).returncode


def _cwd(run: Path) -> Path:
    """Return the folder in which a run was started, to which its relative paths belong."""
    path = run / ".hydra" / "hydra.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    cwd = Path(yaml.safe_load(text)["hydra"]["runtime"]["cwd"]) if text else root()
    return cwd if cwd.is_dir() else root()


def _differing(
    recorded: dict[str, Curve], repeated: dict[str, Curve]
) -> list[tuple[int, str, Any, Any]]:
    """Return (step, metric, recorded, repeated value) of each difference in bits. Of one step, the
    loss is first.
    """
    found = []
    for name, curve in recorded.items():
        for step, value in curve.items():
            again = repeated.get(name, {}).get(step)
            # Also if both are NaN, the texts are equal.
            if repr(value) != repr(again):
                found.append((step, name, value, again))
    return sorted(found, key=lambda each: (each[0], each[1] != LOSS, each[1]))


def _differences(run: Path, repetition: Path) -> dict[str, list[Any]]:
    """Return name -> [of the run, now] of what both have recorded, and not equally."""
    was, now = _facts(run), _facts(repetition)
    common = [name for name, value in was.items() if value and now.get(name)]
    return {name: [was[name], now[name]] for name in common if was[name] != now[name]}


def _facts(run: Path) -> dict[str, Any]:
    """Return what a run has recorded and may explain a difference."""
    environment, end = read_environment(run), _end(run)
    cpu, gpus = environment.get("cpu", {}), environment.get("devices", [])
    return {
        **{name: environment.get(name) for name in OF_MACHINE},
        **environment.get("libraries", {}),
        "cpu": cpu.get("model"),
        "cpu cores": cpu.get("cores"),
        "cpu capability": end.cpu.get("capability"),
        "gpus": [gpu.get("name") for gpu in gpus],
        **{name: getattr(end, name) for name in OF_RESULT},
        "initial weights": end.proof.get("parameters_hash_start"),
        **{f"data ({split})": fingerprint for split, fingerprint in end.data.items()},
        **{f"code of {name}": value for name, value in environment.get("code", {}).items()},
    }


def _end(run: Path) -> Result:
    """Read result.json of a run; an empty one if the run was killed."""
    return read_result(run) if (run / "result.json").is_file() else Result("interrupted")


def _newer_files(run: Path, given: str | None, started: str) -> list[str]:
    """Return the data files that were written after a run began: fingerprints have no contents."""
    if given is None:
        return []
    data = _cwd(run) / given
    folder = data if data.is_dir() else data.parent
    files = [*(data.iterdir() if data.is_dir() else [data]), *image_files(folder)]
    # `started` has no fractions of a second.
    since = datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() + 1
    newer = {path for path in files if path.is_file() and path.stat().st_mtime > since}
    return sorted(str(path.relative_to(folder)) for path in newer)
