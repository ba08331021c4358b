"""Slurm support: write and submit the batch script of a run, query the queue, and find the address
of a job's first node.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from timm_parallel.app import current, root
from timm_parallel.keys import ClusterConfig, Config
from timm_parallel.machine.files import write_text
from timm_parallel.machine.process import SAFE_PATH
from timm_parallel.machine.ranks import NodeAddress, host_name

T = TypeVar("T")
SCRIPT, JOB_ID = "job.sbatch", "job.id"
# File in which a user writes #SBATCH lines and shell lines for every job of this machine, below the
# project's root.
LOCAL_LINES = "conf/local/slurm.sh"
# Exit code of a run that stopped after SIGUSR1, which is signal 10 on Linux. The number is written
# out, because signal.SIGUSR1 differs on other systems such as macOS.
WARNED = 128 + 10
# Exit code of a run that lost a node and can continue after a requeue: EX_TEMPFAIL of sysexits.h.
NODE_LOST = 75
# Seconds to wait for a Slurm controller that does not answer.
PATIENCE_SECONDS = 60.0
# States of a Slurm job that has ended.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"DEADLINE", "PREEMPTED", "BOOT_FAIL"}
# Range of ports for the key-value store on node 0. It ends below 32768, where the ports begin that
# Linux gives to outgoing connections.
FIRST_PORT, PORTS = 20000, 12000


def write_script(config: Config, folder: Path) -> None:
    """Write the batch script `job.sbatch` of a run into the run folder, next to config.yaml."""
    # Create the folder of the log now, because Slurm opens the log before the job starts.
    (folder / "logs").mkdir(exist_ok=True)
    full = folder.resolve()
    log = full / "logs" / "slurm.log"
    text = script_of(config, log, what=f"{full}/config.yaml", folder=shlex.quote(str(full)))
    write_text(folder / SCRIPT, text)
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(folder / SCRIPT))}")


def submit(config: Config, folder: Path) -> int:
    """Submit the batch script of a run to Slurm, unless cluster.submit=false. Return the exit code
    of train.py, which is that of the job if cluster.wait=true. The run folder must not be locked,
    because the job locks it.
    """
    cluster, script = config.cluster, folder / SCRIPT
    if cluster.scheduler != "slurm" or not cluster.submit:
        return 0
    try:
        job = sbatch(script)
    except ValueError:
        # Remove the run folder if it was created for this job, which Slurm rejected. A resumed run
        # has checkpoints and stays.
        if not any((folder / "checkpoints").glob("*.pt")):
            shutil.rmtree(folder)
        raise
    write_text(folder / JOB_ID, f"{job}\n")
    print(
        f"job          {job}\nrun folder   {folder}\nlog          {folder / 'logs' / 'slurm.log'}",
        flush=True,
    )
    return wait_for(job) if cluster.wait else 0


def sbatch(script: Path) -> str:
    """Submit a batch script to Slurm. Return the id of the new job. Raises ValueError if sbatch
    rejects the script.
    """
    # Remove the SLURM_ variables of a surrounding job, because sbatch would read them as options of
    # the new job.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        raise ValueError(f"cluster=slurm: sbatch rejected the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def check_scheduler(cluster: ClusterConfig) -> None:
    """Raise ValueError if the config submits a job to Slurm and this machine has no sbatch
    command.
    """
    if cluster.scheduler == "slurm" and cluster.submit and shutil.which("sbatch") is None:
        raise ValueError(
            "cluster=slurm: sbatch is not installed; use a login node, or set cluster.submit=false"
        )


def queued_job(folder: Path) -> str | None:
    """Return the id of the Slurm job of a run if the job is queued or running; None otherwise.
    Raises ValueError if Slurm does not answer.
    """
    if not (folder / JOB_ID).exists() or shutil.which("squeue") is None:
        return None
    job = (folder / JOB_ID).read_text(encoding="utf-8").strip()
    try:
        return job if _output("squeue", "--noheader", f"--jobs={job}").strip() else None
    except ValueError as error:
        # Slurm no longer knows the id of a job that ended minutes ago.
        if "Invalid job id" in str(error):
            return None
        raise ValueError(
            f"{folder}: the state of its Slurm job {job} is unknown: {error}"
        ) from None


def jobs_in_queue() -> dict[str, str]:
    """Query the queued and running Slurm jobs of this user. Return a dictionary from path of the
    batch script to job id. Raises ValueError if Slurm does not answer.
    """
    lines = _output("squeue", "--me", "--noheader", "--format=%i %o").splitlines()
    return {script: job for job, _, script in (line.strip().partition(" ") for line in lines)}


def cancel(job: str) -> None:
    """Cancel a Slurm job with scancel. A running job then saves a checkpoint and exits. A job that
    has ended is ignored.
    """
    subprocess.run(["scancel", job], capture_output=True, check=False)


def state_of(job: str) -> str:
    """Return the state of a Slurm job, such as COMPLETED. The state is empty for a job that ended
    minutes ago, because scontrol no longer knows the job.
    """
    try:
        return _facts("job", job)[0]["JobState"]
    except ValueError:
        return ""


def script_of(config: Config, log: Path, **values: str) -> str:
    """Build the text of a batch script for Slurm.

    `log`: path of the job's log. `values`: further variables of the template job.sbatch.j2.
    """
    local_options, local_lines = _local_lines()
    # Escape % in the folder of the log, because Slurm replaces patterns such as %a in the whole
    # path.
    log_folder = str(log.parent).replace("%", "%%")
    return render(
        SCRIPT,
        cluster=config.cluster,
        task_name=config.task_name,
        log=f"{log_folder}/{log.name}",
        local_options=local_options,
        local_lines=local_lines,
        root=root(),
        command=shlex.join(
            [sys.executable, *SAFE_PATH, "-m", "timm_parallel.launch.node", current().name]
        ),
        warned=WARNED,
        node_lost=NODE_LOST,
        **values,
    )


def render(file: str, **values: Any) -> str:
    """Fill in a Jinja template of timm_parallel/cluster/ and return the text. `file`: name of the
    template without `.j2`. `values`: variables of the template.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    templates.filters["quoted"] = quoted
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return templates.get_template(f"{file}.j2").render(values)


def _local_lines() -> tuple[list[str], str]:
    """Read conf/local/slurm.sh. Return (its `#SBATCH` lines, its other lines as one text)."""
    # Take shell code from this file only. A config or a run folder may come from another person, so
    # it must not add shell code to a job.
    own = root() / LOCAL_LINES
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    options = [line for line in lines if line.startswith("#SBATCH")]
    setup = [line for line in lines if not line.startswith(("#SBATCH", "#!"))]
    return options, "\n".join(setup).strip()


def address_of_step(node: int, nodes: int) -> NodeAddress:
    """Return the address of the key-value store for node `node` of a Slurm step with `nodes` nodes.
    The store of the ranks is on the first node of the step, whose address Slurm knows. Raises
    ValueError if other nodes cannot reach that address.
    """
    names = _output("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
    address = _facts("node", names[0])[0].get("NodeAddr", names[0])
    try:
        resolved = ipaddress.ip_address(socket.gethostbyname(address))
    except OSError as error:
        raise ValueError(
            f"NodeAddr={address} of {names[0]}: cannot be resolved on {host_name()} ({error})"
        ) from None
    if resolved.is_loopback and not address.startswith("127."):
        raise ValueError(
            f"NodeAddr={address} of {names[0]}: resolves to {resolved} on {host_name()}, which no "
            f"other node can reach; fix /etc/hosts of {host_name()}, or set an IP address as "
            "NodeAddr"
        )
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    return NodeAddress(node, nodes, str(resolved), FIRST_PORT + (job * 16 + step) % PORTS)


def patiently(ask: Callable[[], T], pause: float = 1.0) -> T:
    """Return an answer of Slurm. Ask again for a minute if its controller does not answer, because
    it may be busy or restarting. `pause`: seconds between two questions.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except ValueError:
            if time.monotonic() > until:
                raise
        time.sleep(pause)


def wait_for(job: str) -> int:
    """Wait until a Slurm job has ended, also if Slurm queues it again meanwhile. Return the exit
    code of the job. For a job array, return the highest exit code of its tasks.
    """
    # Keep the exit codes of ended tasks, because scontrol soon omits these tasks.
    codes: dict[str, int] = {}
    while True:
        tasks = patiently(lambda: _facts("job", job))
        ended = [task for task in tasks if task["JobState"] in ENDED]
        codes |= {task["JobId"]: _exit_code(task) for task in ended}
        if len(ended) == len(tasks):
            return max(codes.values())
        time.sleep(1)


def _exit_code(task: dict[str, str]) -> int:
    code, _, number = task["ExitCode"].partition(":")
    return int(code) or (
        128 + int(number) if number != "0" else int(task["JobState"] != "COMPLETED")
    )


def _facts(kind: str, name: str) -> list[dict[str, str]]:
    """Run `scontrol show <kind> <name>`, e.g. for a job or a node. Return its output as a list of
    dictionaries from field to value. A job array has one dictionary per task.
    """
    lines = _output("scontrol", "show", kind, name, "--oneliner").splitlines()
    return [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in lines
        if line.strip()
    ]


def _output(*command: str) -> str:
    """Run a Slurm command and return its output. Raises ValueError if the command fails or does not
    answer in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{command[0]}: Slurm did not answer within {PATIENCE_SECONDS:.0f} s; try again later"
        ) from None
    if done.returncode != 0:
        raise ValueError(
            f"{shlex.join(command)}: failed: {' '.join((done.stderr or done.stdout).split())}"
        )
    return done.stdout


def quoted(value: object) -> str:
    """Quote a value for bash and for `#SBATCH` lines. Raises ValueError if the value contains a
    line break or a control character.
    """
    text = str(value)
    if not text.isprintable():
        raise ValueError(
            f"{text!r}: cannot be written into a batch script; use one line of printable characters"
        )
    return shlex.quote(text)
