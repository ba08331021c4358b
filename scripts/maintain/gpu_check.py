"""Everything that only a CUDA device can show, in under nine minutes: make gpu-check.

    make gpu-wheels && make gpu-check BIN=/usr/bin    # with an interpreter that has torch, where pip reaches nothing

One part after the other, each within what is left of the time; one that fails does not keep the next from running. At the
end one table, with the device's name. Exit code 1 where something was found wrong.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

from scripts.maintain.bench_measures import Figures, Training
from src.engine.machine import hardware
from src.engine.machine.files import claim_folder, write_json
from src.engine.machine.process import no_survivors

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 520.0  # for everything
NOT_SEEN = (
    "skipped: {}, so nothing was seen of: synchronisation, copies beside work, dp, NCCL, "
    "two ranks on one device, ResNet-50 and ViT-B/16 against a loop by hand, MFU, a profile, faults on a device"
)
NEEDED = (
    *("torch", "torchvision", "timm", "hydra", "omegaconf", "tensorboard", "psutil", "sklearn", "pandas"),
    *("matplotlib", "pytest", "pytest_timeout"),
)
ON_DEVICE = ("tests/test_speed.py", "tests/test_feed.py", "tests/test_gpu.py")
FAULTS = ("tests/test_gpu_faults.py",)
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}  # dense, by NVIDIA's sheets
TRAININGS = {
    "ResNet-50": Training("resnet50", {}, 60, 20, batch_size=256, image_size=224, on_gpu=True),
    "ViT-B/16": Training("vit_base_patch16_224", {}, 60, 20, batch_size=128, image_size=224, on_gpu=True),
}


@dataclass
class Row:
    what: str
    figure: str
    wrong: bool = False


Part = Callable[[float], list[Row]]  # seconds that it may take -> what it found


def topology(seconds: float) -> list[Row]:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    python = ".".join(map(str, sys.version_info[:3]))
    found = [
        Row("versions", f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, Python {python}"),
        Row("cuDNN, cores", f"{torch.backends.cudnn.version()}, {hardware.cores()}"),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(Row(f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"))
    if shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
        print(said.stdout)
    return found


def tests(*files: str) -> Part:
    def run(seconds: float) -> list[Row]:
        plain = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]  # no plugins that happen to be there
        words = ["-m", "pytest", "-m", "gpu", "-vv", "--tb=short", *plain, *files]
        said, is_whole = python(words, seconds)
        found = [Row(test, verdict, verdict != "passed") for test, verdict in outcomes(said)]
        if not is_whole:
            found.append(
                Row(f"the tests after {found[-1].what if found else 'none'}", f"not seen within {seconds:.0f} s")
            )
        return found or [Row(" ".join(files), "no test ran", True)]

    return run


def outcomes(said: str) -> list[tuple[str, str]]:
    """(test, passed or failed or error) of what `pytest -v` printed, one line after the other."""
    lines = (re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR)\b", line) for line in said.splitlines())
    return [(line[1].rpartition("/")[2], line[2].lower()) for line in lines if line is not None]


def python(words: list[str], seconds: float) -> tuple[str, bool]:
    """(what a command said, whether it came to its end); shown where it fails. One that takes longer is ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return said.decode(errors="replace") if isinstance(said, bytes) else said, False
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
    """Rows of (ours, by hand), one for each round."""
    rate, memory = ([ours[key] / other[key] for ours, other in pairs] for key in ("images_per_sec", "peak_mib"))
    own = statistics.median(ours["images_per_sec"] for ours, _ in pairs)
    peak = next((peak for part, peak in PEAK_BF16.items() if part in device), None)
    mfu = "of an unknown peak" if peak is None else f"{model_flops(training) * own / peak:.3f}"
    return [
        Row(f"{name}: images/s", f"{own:.0f}"),
        Row(f"{name}: images/s over the loop by hand (>= 0.99)", shown(rate), max(rate) < 0.99),
        Row(f"{name}: peak memory over it (<= 1.02)", shown(memory), min(memory) > 1.02),
        Row(f"{name}: model-FLOPs utilisation, bf16", mfu),
    ]


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


def model_flops(training: Training) -> float:
    """Of one image: three times those of the forward pass, two for each multiply-add."""
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model = timm.create_model(training.model, num_classes=10)
        model(torch.empty(1, 3, training.image_size, training.image_size))
    return float(3 * counter.get_total_flops())


def strategies(seconds: float) -> list[Row]:
    """The first table of single, dp and ddp on this machine: ResNet-50 on one device, and on all where there are more."""
    until, found = time.monotonic() + seconds, []
    count = len(hardware.visible_cuda_devices())
    ways = [(kind, devices) for devices in sorted({1, count}) for kind in ("single", "dp", "ddp")]
    for kind, devices in ways:
        left = until - time.monotonic()
        if (kind != "single" or devices == 1) and left > seconds / 4:
            training = replace(TRAININGS["ResNet-50"], batch_size=256 // devices * devices, limit=left)
            rate = training.ours(devices, kind)["images_per_sec"]
            found.append(Row(f"ResNet-50: {kind} on {devices}", f"{rate:.0f} images/s"))
    return found


def profile(seconds: float) -> list[Row]:
    said, is_whole = python(["scripts/maintain/gpu_profile.py", "--accelerator", "cuda"], seconds)
    if not is_whole:
        return [Row("profile", f"not seen within {seconds:.0f} s")]
    found = json.loads(said.splitlines()[-1])
    return [Row(f"between steps: {name}", f"{value:.2f} ms a step") for name, value in found.items()]


PARTS: tuple[tuple[str, Part, float], ...] = (  # name, what it does, seconds at most
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
    """Every part in turn. One for which no time is left is said; so is one that broke."""
    until, found = time.monotonic() + seconds, []
    for name, part, most in parts:
        left = until - time.monotonic()
        if left < min(most, 30):
            found.append(Row(name, "not seen: no time left"))
            continue
        print(f"--- {name}", flush=True)
        try:
            with no_survivors():  # a command that was ended may have started others, which would disturb the next part
                found += part(min(most, left))
        except subprocess.TimeoutExpired:
            found.append(Row(name, f"not seen within {min(most, left):.0f} s"))
        except Exception as error:  # whatever it was, the parts after it may still say something
            found.append(Row(name, f"broke: {type(error).__name__}: {' '.join(str(error).split())[-300:]}", True))
    return found


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    devices = hardware.visible_cuda_devices()
    if not devices:
        print(NOT_SEEN.format(hardware.cuda().problem or "no CUDA device is visible here"))
        return 0
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: run make gpu-wheels where there is a package index, and bring "
            "the folder .gpu-wheels along; or name an interpreter that has them, BIN=<folder>"
        )
        return 2
    rows = check()
    width = max(len(row.what) for row in rows)
    print(f"\n{devices[0].name}" + f" and {len(devices) - 1} more" * (len(devices) > 1))
    for row in rows:
        print(f"{row.what:{width}s}  {row.figure}{'   WRONG' if row.wrong else ''}")
    folder = claim_folder(ROOT / "outputs" / "gpu-check" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    write_json(folder / "gpu_check.json", {"device": devices[0].name, "rows": [vars(row) for row in rows]})
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
