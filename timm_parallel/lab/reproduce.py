"""Repeat the first steps of a run with the code, config and number of devices that it recorded.
Check that losses and weights are equal bit for bit, and compare the metric curves of two runs.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.app import root
from timm_parallel.config.validate import refuse
from timm_parallel.lab.code_copy import apply_diff, copy_commit, no_repository
from timm_parallel.machine.files import claim_folder, write_json
from timm_parallel.record.environment import CODE_DIFF, CUT, read_environment
from timm_parallel.record.result import FAILED, Result, read_metrics, read_result, read_segments

# Logged values of one metric: step -> value.
Curve = dict[int, float]
# Logged metrics that differ between any two runs, because they measure time or memory.
BY_THE_CLOCK = re.compile(
    r"epoch|step|time|train/(images_per_sec(_per_device)?|data_wait)|(memory|utilisation)/.*"
)


@dataclass
class CurveComparison:
    """Result of comparing the curve of one metric in two runs."""

    # The metric, such as `train/loss`.
    name: str
    # Number of logged values in the first run.
    points: int
    # Largest relative difference of two values at the same step.
    largest: float
    # First step at which the difference exceeds the tolerance. None if there is no such step.
    differs_at: int | None
    # Values of the first and the second run at the step `differs_at`.
    values: tuple[float, float]


def compare_curves(one: Path, other: Path, tolerance: float) -> list[CurveComparison]:
    """Compare the curves of all metrics that both runs logged, and return a result per metric.
    Raises ValueError if the runs have different numbers of steps, data or batch sizes.

    `tolerance`: relative difference up to which two values count as equal.
    """
    first, second = _size(one), _size(other)
    for key, a in first.items():
        # A run that failed before it loaded its data recorded no fingerprints of the data.
        if key in second and a != second[key]:
            raise ValueError(
                f"{key}: {a} in {one}, but {second[key]} in {other}; expected two runs with "
                "equal data, number of steps and batch size"
            )
    of_one, of_other = curves(one), curves(other)
    common = sorted(of_one.keys() & of_other.keys())
    if not common:
        raise ValueError(
            f"{one} and {other}: no metric is in both metrics.jsonl files; expected two runs of "
            "one task"
        )
    return [_compare(name, of_one[name], of_other[name], tolerance) for name in common]


def _size(run: Path) -> dict[str, Any]:
    """Read the length, batch size and data fingerprints of a run. The curves of two runs can be
    compared only if all of these are equal.
    """
    result = read_result(run)
    numbers = {
        key: getattr(result, key)
        for key in ("steps", "batch_size", "samples_seen", "dropped_per_epoch")
    }
    numbers |= {
        f"{split} samples": getattr(result, split).get("samples") for split in ("val", "test")
    }
    return numbers | {f"data ({split})": fingerprint for split, fingerprint in result.data.items()}


def curves(run: Path) -> dict[str, Curve]:
    """Read the values of each metric by step from a run's metrics.jsonl. Measurements of time and
    memory are left out.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            f"{run}: has no metrics.jsonl; expected the folder of a run that has logged metrics"
        )
    by_name: dict[str, Curve] = defaultdict(dict)
    for line in read_metrics(run / "metrics.jsonl"):
        for name, value in line.items():
            if not BY_THE_CLOCK.fullmatch(name):
                by_name[name][line["step"]] = math.nan if value is None else value
    return by_name


def _compare(name: str, one: Curve, other: Curve, tolerance: float) -> CurveComparison:
    """Compare the curves of one metric in two runs. A step or value that only one run has counts as
    an infinite difference.
    """
    result = CurveComparison(name, len(one), 0.0, None, (math.nan, math.nan))
    for step in sorted(one.keys() | other.keys()):
        a, b = one.get(step, math.nan), other.get(step, math.nan)
        both_nan = step in one and step in other and math.isnan(a) and math.isnan(b)
        if a == b or both_nan:
            continue
        difference = math.inf if math.isnan(a + b) else abs(a - b) / max(abs(a), abs(b))
        result.largest = max(result.largest, difference)
        if difference > tolerance and result.differs_at is None:
            result.differs_at, result.values = step, (a, b)
    return result


# The result of the comparison, a file in the run folder.
CERTIFICATE = "certificate.json"
LOSS, WEIGHTS = "train/loss", "hash of the weights"
# Keys of environment.json and result.json in which a difference may explain different losses.
OF_MACHINE = ("python", "platform", "driver", "cuda", "nccl", "backend")
OF_RESULT = ("accelerator", "devices", "threads_per_device", "accumulate", "parameters")


def reproduce_run(run: Path, steps: int) -> int:
    """Repeat the first `steps` steps of a run and compare the losses, metrics and weights with the
    recorded ones. The new run is written to `<run>/reproduced`, and the comparison to
    `<run>/certificate.json`.

    Return exit code 0 if all values are equal bit for bit, and 3 if not. If train.py fails, for
    example because this machine has too few devices, return its exit code. Raises ValueError if the
    run did not record its code or settings completely.
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
        raise ValueError(
            f"{run}: the code of this run cannot be restored ({error}); use a clone that has "
            f"commit {environment['commit']}"
        ) from None
    last = max(recorded[LOSS])
    is_whole = end.status == "done" and end.steps == last
    more = [] if is_whole else [f"train.max_steps={last}"]
    if config["train"].get("max_minutes") is not None:
        # The clock ended the run at a step that the repetition must reach too.
        more = [f"train.max_steps={last}", "train.max_minutes=null"]
    code = _train(run, folder, more)
    # If the recorded run failed, and the repetition failed too, compare the steps before the
    # failure.
    if code != 0 and (code != 1 or end.status not in FAILED):
        print(f"{run}: its repetition ended with exit code {code}", file=sys.stderr)
        return code
    found = _differing(recorded, curves(folder / "run"))
    again = _end(folder / "run")
    has_hashes = end.parameters_hash is not None and again.steps == end.steps
    if has_hashes and again.parameters_hash != end.parameters_hash:
        found.append((last, WEIGHTS, end.parameters_hash, again.parameters_hash))
    was, now = _facts(run), _facts(folder / "run")
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
        # What both runs recorded, with different values: name -> [recorded, repeated].
        "differences": {
            name: [value, now[name]]
            for name, value in was.items()
            if value and now.get(name) and value != now[name]
        },
    }
    write_json(run / CERTIFICATE, certificate)
    print("\n".join(describe(certificate)), flush=True)
    return 3 if found else 0


def describe(certificate: dict[str, Any]) -> list[str]:
    """Format the contents of certificate.json as lines of text: the result first, then a line for
    each library, device or part of the code that differs from the record.
    """
    equal = "{equal_losses} of {losses} losses are equal bit for bit".format(**certificate)
    weights = ", and so are the weights" if certificate["weights_compared"] else ""
    lines = [f"reproduced: {equal}{weights}"]
    if certificate["first_difference"]:
        what = "{metric} of step {step} was {was} and is {now}"
        lines = [f"not reproduced: {what.format(**certificate['first_difference'])}; {equal}"]
    for name, (was, now) in certificate["differences"].items():
        lines.append(f"  {name}: was {was}, is {now}")
    if len(lines) == 1 and not certificate["reproduced"]:
        lines.append("  code, versions, machine and names of the data are as recorded")
    return lines


def _recorded(run: Path, steps: int) -> dict[str, Curve]:
    """Read the curves that a run has logged, up to the last loss within its first `steps` steps."""
    logged = curves(run)
    last = max((step for step in logged.get(LOSS, {}) if step <= steps), default=None)
    if last is None:
        raise ValueError(
            f"steps={steps}: {run} has logged no loss in its first {steps} steps; use more steps"
        )
    for curve in logged.values():
        for step in [step for step in curve if step > last]:
            del curve[step]
    return logged


def _problems(run: Path, environment: dict[str, Any], end: Result) -> Iterator[str]:
    """Yield an error message for each reason why the code or settings of a run cannot be
    restored.
    """
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
    """Train with the saved config of a run and the code in `<folder>/code`, and write the new run
    to `<folder>/run`. Return the exit code.

    `more`: further overrides.
    """
    code = (folder / "code").resolve()
    command = [
        *(sys.executable, str(code / "train.py")),
        *("--config-path", str(run.resolve()), "--config-name", "config", *more),
        *(f"hydra.run.dir='{(folder / 'run').resolve()}'", "resume=null"),
        # Switch off trackers such as Weights & Biases, because other people see their entries. The
        # override `tracker.use={}` would change nothing, because Hydra merges it with the saved
        # dictionary.
        *("tracker.use=null", "tracker.entity=null", "tracker.mode=null", "tracker.uri=null"),
        # Start a new run on this machine only, even if the recorded run was a trial or a job on a
        # cluster.
        *("search.sampler=null", "cluster.scheduler=local", "cluster.nodes=1"),
    ]
    environment = {**os.environ, **no_repository(code)}
    return subprocess.run(command, env=environment, check=False).returncode


def _differing(
    recorded: dict[str, Curve], repeated: dict[str, Curve]
) -> list[tuple[int, str, Any, Any]]:
    """Return (step, metric, recorded value, repeated value) for each value that is not equal bit
    for bit. Sort by step, and put the loss before other metrics of the same step.
    """
    found = [
        (step, name, value, again)
        for name, curve in recorded.items()
        for step, value in curve.items()
        # Compare the texts, because NaN is not equal to itself.
        if repr(value) != repr(again := repeated.get(name, {}).get(step))
    ]
    return sorted(found, key=lambda each: (each[0], each[1] != LOSS, each[1]))


def _facts(run: Path) -> dict[str, Any]:
    """Read the recorded versions, hardware, fingerprints and hashes of a run, which may explain a
    difference from another run.
    """
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
    """Read result.json of a run. Return an empty result if the run was killed before it wrote that
    file.
    """
    return read_result(run) if (run / "result.json").is_file() else Result("interrupted")
