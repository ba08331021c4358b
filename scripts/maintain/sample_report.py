"""Write a sample report of a sweep with invented measurements of eight GPUs. The report says that
they are invented.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timm_parallel.lab.report.report import write_report
from timm_parallel.testing.report_sweeps import Sweep

ROOT = Path(__file__).resolve().parents[2]
DEVICE, CPU = "invented GPU", "invented CPU (a sample: no machine measured these figures)"
# Dictionary from (strategy, number of devices) to invented images/s.
SPEEDS = {
    ("single", 1): 1000.0,
    **{("dp", devices): speed for devices, speed in ((2, 1500.0), (4, 1900.0), (8, 1800.0))},
    **{("ddp", devices): speed for devices, speed in ((2, 1930.0), (4, 3700.0), (8, 6900.0))},
}
# Invented factors of the speed of each of the five repeats, and of the runs within a repeat.
BLOCKS = (1.0, 0.99, 1.01, 0.985, 1.005)
NOISE = (0.0, 0.008, -0.006, 0.004, -0.01, 0.006, -0.003)


def write_sample(folder: Path) -> Path:
    """Write an invented sweep and its report into a folder. Return the path of report.html."""
    sweep = Sweep(folder, cores=64, host="example")
    devices = [{"index": index, "name": DEVICE, "memory_bytes": 80 * 2**30} for index in range(8)]
    environment = {"devices": devices, "cpu": {"model": CPU, "cores": 64, "memory_bytes": 2**39}}
    for number, ((strategy, count), speed) in enumerate(SPEEDS.items()):
        for block, pace in enumerate(BLOCKS):
            noise = 1 + NOISE[(number + 2 * block) % len(NOISE)]
            sweep.add(strategy, count, speed * pace * noise, block=block, environment=environment)
    jobs = sweep.write() / "jobs.json"
    command = (
        "python train.py -m parallel=single,dp,ddp parallel.devices=1,2,4,8 sweep.repeats=5 "
        "sweep.timed=true"
    )
    jobs.write_text(
        json.dumps(json.loads(jobs.read_text(encoding="utf-8")) | {"command": command}),
        encoding="utf-8",
    )
    return write_report([folder])
