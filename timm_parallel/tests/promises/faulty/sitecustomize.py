"""Cause a fault in the rank that FAULT names. Every Python process with this folder on PYTHONPATH
imports this file.

FAULT is `<kind>:<rank>:<step>:<phase>`, with rank `*` for all ranks. The time of the fault is
written to FAULT_MARK.
"""

import os
import runpy
import signal
import time
from pathlib import Path

# Python imports only the first file of this name on its path: run the next one, too.
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

        # An index beyond the end: a kernel fails, and the next wait for the device raises.
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
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    due = os.environ.get("FAULT_AGAIN") if again else step  # a restarted run has none, unless told
    if mine and str(life.liveness.step) == due and life.PHASES[now] == phase:
        accident()


life.liveness.at = at
