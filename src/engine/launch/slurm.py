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
import time
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
PATIENCE_SECONDS = 60.0  # with a controller that does not answer
# The states that a job does not leave.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"DEADLINE", "PREEMPTED", "BOOT_FAIL"}
FIRST_PORT, PORTS = 20000, 12000  # below those that Linux gives to outgoing connections (32768 and above)


def write_script(config: Config, folder: Path) -> None:
    """Write `job.sbatch` beside config.yaml."""
    (folder / "logs").mkdir(exist_ok=True)  # Slurm opens the job's log before the job begins
    full = folder.resolve()
    text = script_of(config, f"{full}/config.yaml", full / "logs" / "slurm.log", shlex.quote(str(full)))
    write_text(folder / SCRIPT, text)
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(folder / SCRIPT))}")


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
    own = {name for name in os.environ if name.startswith("SLURM_")} - {"SLURM_CONF"}
    outside = {name: value for name, value in os.environ.items() if name not in own}
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outside)
    if done.returncode != 0:
        raise ValueError(f"cluster=slurm: sbatch refuses the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def check_scheduler(cluster: ClusterConfig) -> None:
    """Refuse where a job cannot be submitted from here."""
    if cluster.scheduler == "slurm" and cluster.submit and shutil.which("sbatch") is None:
        raise ValueError("cluster=slurm: no sbatch here; log in where Slurm is, or set cluster.submit=false")


def queued_job(folder: Path) -> str | None:
    """The id of the job that this run folder belongs to while it is queued or runs."""
    if not (folder / JOB_ID).exists() or shutil.which("squeue") is None:
        return None
    job = (folder / JOB_ID).read_text(encoding="utf-8").strip()
    try:
        return job if _output("squeue", "--noheader", f"--jobs={job}").strip() else None
    except ValueError as error:
        if "Invalid job id" in str(error):  # Slurm has forgotten it
            return None
        raise ValueError(f"{folder}: belongs to job {job}, whose state is unknown: {error}") from None


def jobs_in_queue() -> dict[str, str]:
    """This user's jobs that wait or run: the path of the script of each -> its id. ValueError: Slurm does not answer."""
    lines = _output("squeue", "--me", "--noheader", "--format=%i %o").splitlines()
    return {script: job for job, _, script in (line.strip().partition(" ") for line in lines)}


def cancel(job: str) -> None:
    """It saves and leaves; nothing happens to one that has ended."""
    subprocess.run(["scancel", job], capture_output=True, check=False)


def state_of(job: str) -> str:
    """As `scontrol show job` names it; empty once Slurm has forgotten the job, minutes after its end."""
    try:
        return _facts("job", job)[0]["JobState"]
    except ValueError:
        return ""


def script_of(
    config: Config,
    what: str,
    log: Path,
    folder: str,
    *,
    array: str | None = None,
    before: str = "",
    job: str = '"$SLURM_JOB_ID"',
    after: str = "",
) -> str:
    """A script that runs the run folder `folder`, a word of bash which `before` may set; `job` is what it requeues.

    `array`: as sbatch takes it, with `%a` for the task in the name of the `log`. `after` runs when it is not requeued.
    """
    cluster = config.cluster
    log_folder, log_name = str(log.parent).replace("%", "%%"), log.name  # Slurm reads % as the beginning of a pattern
    options: dict[str, object] = {
        "job-name": config.task_name,
        "array": array,
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cluster.cpus,
        "gpus-per-node": cluster.gpus or None,
        "gres": cluster.gres,
        "mem": cluster.memory,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "signal": f"USR1@{cluster.signal_seconds}",
        "chdir": ROOT,
        "output": f"{log_folder}/{log_name}",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={quoted(value)}" for key, value in options.items() if value is not None]
    cpus = f" --cpus-per-task={cluster.cpus}" if cluster.cpus else ""  # srun does not inherit it since Slurm 22.05
    command = shlex.join([sys.executable, *SAFE_PATH, "-m", "src.engine.launch.node"])
    return f"""#!/bin/bash
# Runs {what}; submit it again with sbatch, and it goes on in the same folder.
{chr(10).join([*lines, "#SBATCH --requeue", *cluster.extra])}

{cluster.setup or "# cluster.setup would stand here"}

export PYTHONPATH={quoted(ROOT)}
{before + chr(10) if before else ""}srun --ntasks-per-node=1{cpus} --kill-on-bad-exit=0 --wait={ALL_LEAVE} \\
    {command} {folder}
code=$?

# {WARNED}: the time is nearly up, and a checkpoint is saved. {NODE_LOST}: a node was lost after progress was made.
if [ $code -eq {WARNED} ] || [ $code -eq {NODE_LOST} ]; then
    scontrol requeue {job} && sleep 120 # Slurm ends this shell meanwhile
fi
{after + chr(10) if after else ""}exit $code
"""


def place_of_step(node: int, nodes: int) -> Place:
    """Where the tasks of this job step meet: the NodeAddr of its first node, as Slurm itself reaches it."""
    names = _output("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
    address = _facts("node", names[0])[0].get("NodeAddr", names[0])
    try:
        found = ipaddress.ip_address(socket.gethostbyname(address))
    except OSError as error:
        raise ValueError(f"NodeAddr={address} of {names[0]}: cannot be resolved on {host_name()} ({error})") from None
    if found.is_loopback and not address.startswith("127."):
        raise ValueError(
            f"NodeAddr={address} of {names[0]}: resolves to {found} on {host_name()}, which no other node can reach; "
            "mend /etc/hosts there, or give Slurm an address"
        )
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    return Place(node, nodes, str(found), FIRST_PORT + (job * 16 + step) % PORTS)


def wait_for(job: str) -> int:
    """Until the job has ended, requeued or not. Its exit code, as Slurm's memory of recent jobs tells it; of an array the
    highest of its tasks'."""
    codes: dict[str, int] = {}  # of the tasks that have ended, which Slurm soon forgets
    answered_at = time.monotonic()
    while True:
        try:
            tasks = _facts("job", job)
            answered_at = time.monotonic()
        except ValueError:  # its controller is busy or restarts
            if time.monotonic() - answered_at > PATIENCE_SECONDS:
                raise
        else:
            codes |= {task["JobId"]: _exit_code(task) for task in tasks if task["JobState"] in ENDED}
            if all(task["JobState"] in ENDED for task in tasks):
                return max(codes.values())
        time.sleep(1)


def _exit_code(task: dict[str, str]) -> int:
    code, _, number = task["ExitCode"].partition(":")
    return int(code) or (128 + int(number) if number != "0" else int(task["JobState"] != "COMPLETED"))


def _facts(kind: str, name: str) -> list[dict[str, str]]:
    """What `scontrol show` tells of a node or job: key -> value, for each task where the job is an array."""
    lines = _output("scontrol", "show", kind, name, "--oneliner").splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.strip()]


def _output(*command: str) -> str:
    """What a command of Slurm's prints. ValueError: it fails, or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command[0]}: no answer for {PATIENCE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise ValueError(f"{shlex.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def quoted(value: object) -> str:
    """One line, for bash and for sbatch, which reads its own lines by the same rules."""
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"{text!r}: a job's file takes one line of text for each value")
    return shlex.quote(text)
