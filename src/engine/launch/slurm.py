"""Slurm: the script of a job on a frozen run folder, its submission, and where the tasks of a step meet.

The script is all there is to it, for people to read and to submit again. Slurm starts it anew in the same folder after
a warning that the time is nearly up, or after a node was lost; a run that finds checkpoints goes on from them.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from src.engine.config.compose import ROOT
from src.engine.machine.files import write_text
from src.engine.machine.process import SAFE_PATH
from src.engine.machine.ranks import Place, host_name
from src.schema import ClusterConfig, Config

SCRIPT, JOB_ID = "job.sbatch", "job.id"
WARNED = 128 + 10  # exit code of a run that USR1 has stopped, on the nodes' Linux; this may be another system
NODE_LOST = 75  # exit code of a run that has lost a node: EX_TEMPFAIL of sysexits.h, try again
ALL_LEAVE = 120  # seconds for all nodes to end after the first has: longer than a save
FIRST_PORT, PORTS = 20000, 12000  # below those that Linux gives to outgoing connections (32768 and above)


def write_script(config: Config, folder: Path) -> int:
    """Write `job.sbatch` beside config.yaml. Returns the exit code."""
    (folder / "logs").mkdir(exist_ok=True)  # Slurm opens the job's log before the job begins
    write_text(folder / SCRIPT, job_script(config, folder))
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(folder / SCRIPT))}")
    return 0


def submit(config: Config, folder: Path) -> int:
    """Submit the job of a run folder, which nobody may hold: it may begin at once. Returns the exit code.

    Where Slurm refuses it, a folder that was made for this job is gone again.
    """
    cluster, script = config.cluster, folder / SCRIPT
    if cluster.scheduler != "slurm" or not cluster.submit:
        return 0
    try:
        job = sbatch(script)
    except ValueError:
        if not any((folder / "checkpoints").glob("*.pt")):
            shutil.rmtree(folder)
        raise
    write_text(folder / JOB_ID, f"{job}\n")
    print(f"job          {job}\nrun folder   {folder}\nlog          {folder / 'logs' / 'slurm.log'}", flush=True)
    return wait_for(job) if cluster.wait else 0


def sbatch(script: Path) -> str:
    """Submit a script; returns the job's id."""
    # What Slurm set for the job that we may be in would be read as options of the new one.
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False, env=outside
    )
