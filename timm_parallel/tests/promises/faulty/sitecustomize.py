"""Injection of a fault into a rank. Python imports this file at startup in every process that has
its folder on PYTHONPATH.

The environment variable FAULT is `<kind>:<rank>:<step>:<phase>`, where the rank `*` selects all
ranks. The time of the fault is written to the file that FAULT_MARK names.
"""

import os
import runpy
import signal
import time
from pathlib import Path

# Run the next sitecustomize.py on PYTHONPATH, because Python imports only the first file of this
# name.
here = Path(__file__).resolve()
following = [
    Path(folder, here.name) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]
for file in [file for file in following if file.is_file() and file.resolve() != here][:1]:
    runpy.run_path(str(file), run_name="sitecustomize")

from timm_parallel.faults import liveness as life  # noqa: E402

kind, rank, step, phase = os.environ["FAULT"].split(":")
beat = life.liveness.at


def accident() -> None:
    with open(os.environ["FAULT_MARK"], "a") as mark:
        mark.write(f"{time.time()}\n")
    if kind == "raise":
        raise RuntimeError("the accident of this test")
    if kind == "no_memory":
        import torch

        torch.empty(2**50, device="cuda" if torch.cuda.is_initialized() else "cpu")
    if kind == "device_assert":
        import torch

        # Use an index beyond the end of the tensor. The kernel fails asynchronously, and the next
        # synchronization with the device raises the error.
        torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind.startswith("exit"):
        os._exit(int(kind.removeprefix("exit")))
    if kind == "stall":
        time.sleep(10_000)
    if kind == "spin":
        while True:
            pass


def at(now: int) -> None:
    beat(now)
    mine = rank in ("*", os.environ.get("RANK", "0"))
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_due = str(life.liveness.step) == step and life.PHASES[now] == phase
    if mine and is_due and not is_restarted:
        accident()


life.liveness.at = at  # type: ignore[assignment, method-assign]
