"""Check everything that needs a CUDA device, in under nine minutes: make gpu-check.

    make gpu-wheels && make gpu-check BIN=/usr/bin    # with an interpreter that has torch, without a package index

The parts run in turn, each within the remaining time; after a failure, the next part runs. Prints a table with the name of
the device. Exit code 1 if a check failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

# Python adds the folder of a script, not the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.bench_measures import Figures, Training
from src.engine.machine import hardware
from src.engine.machine.files import claim_folder, write_json
from src.engine.machine.process import terminate_descendants

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 520.0  # for all parts
NOT_SEEN = (
    "skipped: {}, so these were not checked: synchronization, copies during computation, dp, NCCL, "
    "two ranks on one device, ResNet-50 and ViT-B/16 against a hand-written loop, MFU, a profile, faults on a device"
)
NEEDED = (
    *("torch", "torchvision", "timm", "hydra", "omegaconf", "tensorboard", "psutil", "sklearn", "pandas"),
    *("matplotlib", "pytest", "pytest_timeout"),
)
ON_DEVICE = ("tests/test_speed.py", "tests/test_feed.py", "tests/test_gpu.py")
FAULTS = ("tests/test_gpu_faults.py",)
# Dense, from NVIDIA's data sheets.
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
TRAININGS = {
    "ResNet-50": Training("resnet50", {}, 60, 20, batch_size=256, image_size=224, on_gpu=True),
    "ViT-B/16": Training("vit_base_patch16_224", {}, 60, 20, batch_size=128, image_size=224, on_gpu=True),
}


@dataclass
class Row:
    what: str
    figure: str
    wrong: bool = False


# Maps the seconds that it may take to rows of the table.
Part = Callable[[float], list[Row]]


def topology(seconds: float) -> list[Row]:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    python = ".".join(map(str, sys.version_info[:3]))
    rows = [
        Row("versions", f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, Python {python}"),
        Row("cuDNN, cores", f"{torch.backends.cudnn.version()}, {hardware.cores()}"),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append(Row(f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"))
    if shutil.which("nvidia-smi"):
        output = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
        print(output.stdout)
    return rows


def tests(*files: str) -> Part:
    def run(seconds: float) -> list[Row]:
        # Other installed plugins are not loaded.
        plain = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
        arguments = ["-m", "pytest", "-m", "gpu", "-vv", "--tb=short", *plain, *files]
        output, is_whole = python(arguments, seconds)
        rows = [Row(test, verdict, verdict != "passed") for test, verdict in outcomes(output)]
        if not is_whole:
            rows.append(Row(f"the tests after {rows[-1].what if rows else 'none'}", f"not run within {seconds:.0f} s"))
        return rows or [Row(" ".join(files), "no test ran", True)]

    return run


def outcomes(output: str) -> list[tuple[str, str]]:
    """Parse the output of `pytest -v`: (test, passed, failed or error) per line."""
    lines = (re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR)\b", line) for line in output.splitlines())
    return [(line[1].rpartition("/")[2], line[2].lower()) for line in lines if line is not None]


def python(arguments: list[str], seconds: float) -> tuple[str, bool]:
    """Run a Python command for at most `seconds`. Returns (stdout, True if it ended in time); prints failures."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return output.decode(errors="replace") if isinstance(output, bytes) else output, False
    if done.returncode:
        print((done.stdout + done.stderr)[-6000:])
    return done.stdout, True


def against_by_hand(name: str, training: Training, rounds: int = 2) -> Part:
    def run(seconds: float) -> list[Row]:
        until = time.monotonic() + seconds
        pairs: list[tuple[Figures, Figures]] = []
        took = 0.0
        while len(pairs) < rounds and until - time.monotonic() > 1.2 * took:
            began = time.monotonic()
            own = replace(training, limit=until - began).ours(1)
            pairs.append((own, replace(training, limit=max(1.0, until - time.monotonic())).by_hand(1)))
            took = time.monotonic() - began
        return compare(name, training, pairs, hardware.visible_cuda_devices()[0].name)

    return run


def compare(name: str, training: Training, pairs: list[tuple[Figures, Figures]], device: str) -> list[Row]:
    """Return table rows that compare train.py with a hand-written loop. `pairs`: one (ours, by hand) per round."""
    rate, memory = ([ours[key] / other[key] for ours, other in pairs] for key in ("images_per_sec", "peak_mib"))
    own = statistics.median(ours["images_per_sec"] for ours, _ in pairs)
    peak = next((peak for part, peak in PEAK_BF16.items() if part in device), None)
    mfu = "of an unknown peak" if peak is None else f"{model_flops(training) * own / peak:.3f}"
    return [
        Row(f"{name}: images/s", f"{own:.0f}"),
        Row(f"{name}: images/s over the hand-written loop's (>= 0.99)", shown(rate), max(rate) < 0.99),
        Row(f"{name}: peak memory over it (<= 1.02)", shown(memory), min(memory) > 1.02),
        Row(f"{name}: model-FLOPs utilisation, bf16", mfu),
    ]


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


def model_flops(training: Training) -> float:
    """Return the training FLOPs per image: three times the forward pass, two per multiply-add."""
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model = timm.create_model(training.model, num_classes=10)
        model(torch.empty(1, 3, training.image_size, training.image_size))
    return float(3 * counter.get_total_flops())


def strategies(seconds: float) -> list[Row]:
    """Compare single, dp and ddp with ResNet-50 on one device, and on all devices if there are several."""
    until, rows = time.monotonic() + seconds, []
    count = len(hardware.visible_cuda_devices())
    ways = [(kind, devices) for devices in sorted({1, count}) for kind in ("single", "dp", "ddp")]
    for kind, devices in ways:
        left = until - time.monotonic()
        if (kind != "single" or devices == 1) and left > seconds / 4:
            training = replace(TRAININGS["ResNet-50"], batch_size=256 // devices * devices, limit=left)
            rate = training.ours(devices, kind)["images_per_sec"]
            rows.append(Row(f"ResNet-50: {kind} on {devices}", f"{rate:.0f} images/s"))
    return rows


def profile(seconds: float) -> list[Row]:
    output, is_whole = python(["scripts/maintain/gpu_profile.py", "--accelerator", "cuda"], seconds)
    if not is_whole:
        return [Row("profile", f"not run within {seconds:.0f} s")]
    rows = json.loads(output.splitlines()[-1])
    return [Row(f"between steps: {name}", f"{value:.2f} ms a step") for name, value in rows.items()]


# Name, function, most seconds.
PARTS: tuple[tuple[str, Part, float], ...] = (
    ("topology", topology, 30),
    ("tests", tests(*ON_DEVICE), 200),
    ("ResNet-50", against_by_hand("ResNet-50", TRAININGS["ResNet-50"]), 100),
    ("ViT-B/16", against_by_hand("ViT-B/16", TRAININGS["ViT-B/16"]), 100),
    ("profile", profile, 40),
    ("faults", tests(*FAULTS), 120),
    ("strategies", strategies, 60),
    ("compiled", against_by_hand("ResNet-50 compiled", replace(TRAININGS["ResNet-50"], compile=True), 1), 120),
)


def check(parts: tuple[tuple[str, Part, float], ...] = PARTS, seconds: float = SECONDS) -> list[Row]:
    """Run the checks in turn and return table rows. A check that raises or has no time left gets a row too."""
    until, rows = time.monotonic() + seconds, []
    for name, part, longest in parts:
        left = until - time.monotonic()
        if left < min(longest, 30):
            rows.append(Row(name, "not run: no time left"))
            continue
        print(f"--- {name}", flush=True)
        try:
            # A command that was ended may have started others, which would disturb the next part.
            with terminate_descendants():
                rows += part(min(longest, left))
        except subprocess.TimeoutExpired:
            rows.append(Row(name, f"not run within {min(longest, left):.0f} s"))
        # The next parts run after any error.
        except Exception as error:
            rows.append(Row(name, f"broke: {type(error).__name__}: {' '.join(str(error).split())[-300:]}", True))
    return rows


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    devices = hardware.visible_cuda_devices()
    if not devices:
        print(NOT_SEEN.format(hardware.cuda().problem or "no CUDA device is visible here"))
        return 0
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: run make gpu-wheels on a machine with a package index, and copy "
            "the folder .gpu-wheels here; or name an interpreter that has them, BIN=<folder>"
        )
        return 2
    rows = check()
    width = max(len(row.what) for row in rows)
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    print(f"\n{devices[0].name}{more}")
    for row in rows:
        print(f"{row.what:{width}s}  {row.figure}{'   WRONG' if row.wrong else ''}")
    folder = claim_folder(ROOT / "outputs" / "gpu-check" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    write_json(folder / "gpu_check.json", {"device": devices[0].name, "rows": [vars(row) for row in rows]})
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
