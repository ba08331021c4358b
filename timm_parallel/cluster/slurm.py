"""Slurm: write and submit the script of a run's job, query the queue, and find the address of a
job's first node.
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
from typing import Any

from timm_parallel.keys import ClusterConfig, Config
from timm_parallel.machine.files import write_text
from timm_parallel.machine.process import SAFE_PATH
from timm_parallel.machine.ranks import NodeAddress, host_name
from timm_parallel.project import current, root

SCRIPT, JOB_ID = "job.sbatch", "job.id"
# Exit code of a run that USR1 has stopped: signal 10 on Linux. signal.SIGUSR1 differs on other
# systems, such as macOS.
WARNED = 128 + 10
# Exit code of a run that has lost a node and can continue: EX_TEMPFAIL of sysexits.h.
NODE_LOST = 75
PATIENCE_SECONDS = 60.0  # to wait for a controller that does not answer
# The final states of a job.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"DEADLINE", "PREEMPTED", "BOOT_FAIL"}
# Below the ports that Linux gives to outgoing connections (32768 and above).
FIRST_PORT, PORTS = 20000, 12000


def local_lines() -> Path:
    """Return the file of #SBATCH lines and shell lines that every job of this machine gets."""
    return root() / "conf" / "local" / "slurm.sh"


def write_script(config: Config, folder: Path) -> None:
    """Write the run's Slurm script, `job.sbatch`, next to its config.yaml."""
    # Slurm opens the job's log before the job begins.
    (folder / "logs").mkdir(exist_ok=True)
    full = folder.resolve()
    log = full / "logs" / "slurm.log"
    text = script_of(config, log, what=f"{full}/config.yaml", folder=shlex.quote(str(full)))
    write_text(folder / SCRIPT, text)
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(folder / SCRIPT))}")


def submit(config: Config, folder: Path) -> int:
    """Submit the job of an unlocked run folder to Slurm, unless cluster.submit=false. Return the
    exit code.
    """
    cluster, script = config.cluster, folder / SCRIPT
    if cluster.scheduler != "slurm" or not cluster.submit:
        return 0
    try:
        job = sbatch(script)
    except ValueError:
        # Remove a folder that was created for this job.
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
    """Submit a batch script to Slurm and return the id of its job. Raises ValueError if sbatch
    rejects the script.
    """
    # Inside a Slurm job, sbatch would read that job's SLURM_ variables as options of the new job.
    names = [name for name in os.environ if not name.startswith("SLURM_") or name == "SLURM_CONF"]
    environment = {name: os.environ[name] for name in names}
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise ValueError(f"cluster=slurm: sbatch rejected the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def check_scheduler(cluster: ClusterConfig) -> None:
    """Raise ValueError if the config submits to Slurm, but this machine has no sbatch."""
    if cluster.scheduler == "slurm" and cluster.submit and shutil.which("sbatch") is None:
        raise ValueError(
            "cluster=slurm: sbatch is not installed; use a login node, or set cluster.submit=false"
        )


def queued_job(folder: Path) -> str | None:
    """Return the id of the Slurm job that was submitted for a run folder, if it is queued or
    running, else None.
    """
    if not (folder / JOB_ID).exists() or shutil.which("squeue") is None:
        return None
    job = (folder / JOB_ID).read_text(encoding="utf-8").strip()
    try:
        return job if _output("squeue", "--noheader", f"--jobs={job}").strip() else None
    except ValueError as error:
        if "Invalid job id" in str(error):  # ended minutes ago
            return None
        raise ValueError(
            f"{folder}: the state of its Slurm job {job} is unknown: {error}"
        ) from None


def jobs_in_queue() -> dict[str, str]:
    """Return script path -> job id of this user's queued and running jobs. Raises ValueError if
    Slurm does not answer.
    """
    lines = _output("squeue", "--me", "--noheader", "--format=%i %o").splitlines()
    return {script: job for job, _, script in (line.strip().partition(" ") for line in lines)}


def cancel(job: str) -> None:
    """Cancel a Slurm job with scancel: a running job saves and exits. Does nothing if the job has
    ended.
    """
    subprocess.run(["scancel", job], capture_output=True, check=False)


def state_of(job: str) -> str:
    """Return the state of a job, such as COMPLETED; empty minutes after its end, when scontrol no
    longer knows the job.
    """
    try:
        return _facts("job", job)[0]["JobState"]
    except ValueError:
        return ""


def script_of(config: Config, log: Path, **values: str) -> str:
    """Return the text of a batch script for Slurm. `log`: path of its output, `values`: more
    variables of job.sbatch.j2.
    """
    local_options, local_lines = _local_lines()
    # Slurm expands patterns such as %a in the whole path.
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
    """Render the template `<file>.j2` of this folder and return the text."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    templates.filters["quoted"] = quoted
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return templates.get_template(f"{file}.j2").render(values)


def _local_lines() -> tuple[list[str], str]:
    """Return (`#SBATCH` lines, shell lines) of conf/local/slurm.sh, which a user writes for this
    machine.
    """
    # Only this file may hold shell code, because a config or a run folder may come from another
    # person.
    own = local_lines()
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    options = [line for line in lines if line.startswith("#SBATCH")]
    setup = [line for line in lines if not line.startswith(("#SBATCH", "#!"))]
    return options, "\n".join(setup).strip()


def address_of_step(node: int, nodes: int) -> NodeAddress:
    """Return the NodeAddress of node `node` of `nodes`. Node 0 is the first node of the Slurm step;
    Slurm knows its address.
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


def wait_for(job: str) -> int:
    """Wait until a Slurm job has ended, even if it is requeued. Return its exit code; for an array
    the highest one.
    """
    # scontrol soon omits tasks that have ended.
    codes: dict[str, int] = {}
    answered_at = time.monotonic()
    while True:
        try:
            tasks = _facts("job", job)
            answered_at = time.monotonic()
        except ValueError:  # the controller is busy or restarting
            if time.monotonic() - answered_at > PATIENCE_SECONDS:
                raise
        else:
            codes |= {
                task["JobId"]: _exit_code(task) for task in tasks if task["JobState"] in ENDED
            }
            if all(task["JobState"] in ENDED for task in tasks):
                return max(codes.values())
        time.sleep(1)


def _exit_code(task: dict[str, str]) -> int:
    code, _, number = task["ExitCode"].partition(":")
    return int(code) or (
        128 + int(number) if number != "0" else int(task["JobState"] != "COMPLETED")
    )


def _facts(kind: str, name: str) -> list[dict[str, str]]:
    """Return what `scontrol show <kind> <name>` prints, as a dict of key -> value; one dict per
    task of a job array.
    """
    lines = _output("scontrol", "show", kind, name, "--oneliner").splitlines()
    return [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in lines
        if line.strip()
    ]


def _output(*command: str) -> str:
    """Run a Slurm command and return its output. Raises ValueError if the command fails or times
    out.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command[0]}: no answer for {PATIENCE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise ValueError(f"{shlex.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def quoted(value: object) -> str:
    """Return a value quoted for bash and for `#SBATCH` lines. Raises ValueError for line breaks and
    control characters.
    """
    text = str(value)
    if not text.isprintable():
        raise ValueError(
            f"{text!r}: cannot be written into a batch script; use one line of printable characters"
        )
    return shlex.quote(text)
