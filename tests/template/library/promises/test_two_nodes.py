"""Tests of runs on two nodes that share only a network link. A node is a network namespace of this
machine with a separate host name, hosts file and disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_faults import FAULTS, fault_time

from tests.template.cluster_commands import KUBERNETES, TORCHRUN
from tests.template.runs import ROOT, fault_environment, numbers_of, run_warm, tiny
from timm_parallel.record.result import read_result
from timm_parallel.testing.commands import Train

NAMES = ("nodea", "nodeb")
# Addresses of the two nodes. tests/template/test_commands.py replaces the first address in the
# commands of docs/slurm.md.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Longest allowed time in seconds between a fault and the end of all processes.
PROMPT = 15.0
LONG = (
    "train.epochs=60",
    "train.evaluate_every=0",
    "train.log_every=5",
    "checkpoint.every_steps=20",
)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    # Use the process ID in the name of the namespace, because several test workers may run this
    # check at the same time.
    name = f"probe-{os.getpid()}"
    created = (
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode
        == 0
    )
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return created


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.slow(seconds=30),
    pytest.mark.skipif(
        not can_make_namespaces(), reason="needs root and iproute2, to make network namespaces"
    ),
]


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=300
    ).stdout


@dataclass
class Nodes:
    """Two network namespaces that are connected by a link. Commands on each node find a separate
    folder at the path `disk`.
    """

    base: Path
    train: Train
    names: list[str] = field(default_factory=list)
    hosts: str = ""
    disk: str = "/mnt/disk"

    def __enter__(self) -> Nodes:
        self.names = [f"{name}-{os.getpid()}" for name in NAMES]
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            (self.base / name).mkdir()
            self.hosts += f"{address} {name}\n"
        ip(
            *f"link add eth0 netns {self.names[0]} type veth peer name eth0 netns {self.names[1]}".split()  # noqa: E501
        )
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def cut(self, is_up: bool = False) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", "up" if is_up else "down")

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", name).split()]

    def gone_after(self, since: float) -> float:
        """Wait until no process runs on either node; return the seconds since `since`."""
        while any(self.pids(name) for name in self.names):
            assert time.monotonic() - since < 60, [self.output(index) for index in range(2)]
            time.sleep(0.1)
        return time.monotonic() - since

    def start(
        self,
        index: int,
        command: list[str],
        environment: dict[str, str] | None = None,
        mounts: dict[str, Path] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on one node and return its process. `mounts` maps paths below /mnt to the
        folders that the command finds there, by default only the disk of the node.
        """
        name = self.names[index]
        # `ip netns exec` mounts the files in this folder over /etc for commands in the namespace.
        etc = Path("/etc/netns") / name
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.hosts}")
        places = mounts or {self.disk: self.base / name}
        binds = "".join(
            f"mkdir -p {to} && mount --bind {shlex.quote(str(at))} {to} && "
            for to, at in places.items()
        )
        host = (environment or {}).get("HOSTNAME", name)
        inside = (
            f"hostname {host} && mount -t tmpfs none /mnt && {binds} exec {shlex.join(command)}"
        )
        with open(self.base / f"{name}.out", "a") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", inside],
                cwd=ROOT,
                env={**self.train.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def torchrun(
        self, *overrides: str, environment: dict[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start the torchrun command of docs/slurm.md on each node and return both processes."""
        shown = [
            TORCHRUN.replace("--node-rank 0", f"--node-rank {index}").split()[1:]
            for index in range(2)
        ]
        torchrun = str(Path(sys.executable).parent / "torchrun")
        small = tiny(f"paths.output_dir={self.disk}", *overrides)
        return [
            self.start(index, [torchrun, *shown[index], *small], environment) for index in range(2)
        ]

    def ended(self, started: list[subprocess.Popen[str]]) -> list[int]:
        """Wait until all processes on both nodes have ended, and return the exit codes."""
        codes = [process.wait(timeout=300) for process in started]
        self.gone_after(time.monotonic())
        return codes

    def run_folder(self, index: int = 0) -> Path:
        folders = sorted((self.base / self.names[index] / "train").glob("*/*"))
        assert len(folders) == 1, f"expected one run folder: {folders}, {self.output(0)}"
        return folders[0]

    def output(self, index: int) -> str:
        return (self.base / f"{self.names[index]}.out").read_text()


@pytest.fixture
def nodes(tmp_path: Path, train: Train) -> Iterator[Nodes]:
    with Nodes(tmp_path, train) as pair:
        yield pair


def wait_for(what: Callable[[], Any], nodes: Nodes, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"too late:\n{nodes.output(0)}\n{nodes.output(1)}"
        time.sleep(0.1)


def lines_in(nodes: Nodes) -> int:
    files = list((nodes.base / nodes.names[0]).glob("**/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def test_stall_of_a_rank_on_node_1_ends_the_run_on_both_nodes_and_is_recorded_on_node_0(
    nodes: Nodes, tmp_path: Path
) -> None:
    fault = replace(FAULTS["stalls"], step=9)
    environment = {**fault_environment(fault.text, tmp_path / "mark"), "PYTHONUNBUFFERED": "1"}
    started = nodes.torchrun(*LONG, "parallel.timeout=5", environment=environment)
    codes = nodes.ended(started)
    seconds = time.time() - fault_time(tmp_path / "mark")
    assert 0 not in codes and seconds < 5 + PROMPT
    result = read_result(nodes.run_folder())
    assert result.status == "failed" and result.failure is not None and result.failure["rank"] == 1
    for part in ("node 1", nodes.names[1], "rank 1"):
        assert part in result.reason
    assert [line for line in nodes.output(0).splitlines() if line.startswith("Failed: ")] == [
        f"Failed: {result.reason}"
    ]
    assert result.reason in nodes.output(1)
    assert not (nodes.run_folder() / ".lock").exists()


def lose(nodes: Nodes, started: list[subprocess.Popen[str]], fault: str) -> float:
    """Make the second node fail during training. `fault` is `cut off`, `dead` or `stopped`. Return
    the seconds until the run has ended on all nodes that can still be reached.
    """
    lost = nodes.pids(nodes.names[1])
    since = time.monotonic()
    if fault == "cut off":
        nodes.cut()
    else:
        for pid in lost:
            os.kill(pid, signal.SIGKILL if fault == "dead" else signal.SIGSTOP)
    if fault != "stopped":
        return nodes.gone_after(since)
    assert started[0].wait(timeout=300) != 0
    seconds = time.monotonic() - since
    for pid in lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    nodes.gone_after(time.monotonic())
    return seconds


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Train the same run with two ranks on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return numbers_of(run_warm(folder, "parallel=ddp", "parallel.devices=2", *LONG))


def test_error_names_the_lost_node_and_the_same_torchrun_commands_resume_the_run(
    nodes: Nodes, undisturbed: tuple[Any, ...]
) -> None:
    """One run loses its second node three times, in different ways."""
    overrides = (*LONG, "resume=auto_or_new")
    for fault in ("cut off", "dead", "stopped"):
        before = lines_in(nodes)
        started = nodes.torchrun(*overrides)

        def has_trained(before: int = before) -> bool:
            return lines_in(nodes) > before + 3

        wait_for(has_trained, nodes)
        seconds = lose(nodes, started, fault)
        assert seconds < PROMPT, fault
        result = json.loads((nodes.run_folder() / "result.json").read_text())
        assert result["status"] == "failed" and result["failure"]["rank"] == 1, result
        assert nodes.names[1] in result["reason"], result["reason"]
        if fault == "cut off":
            assert "node 0" in (nodes.run_folder(1) / "logs" / "failure_rank_0.json").read_text()
            assert f"its logs are in {nodes.names[1]}:" in nodes.output(1)
            nodes.cut(is_up=True)
    again = nodes.torchrun(*overrides)
    assert [process.wait(timeout=300) for process in again] == [0, 0], nodes.output(
        0
    ) + nodes.output(1)
    assert numbers_of(nodes.run_folder()) == undisturbed
    ended = read_result(nodes.run_folder())
    assert (ended.nodes, ended.hosts, ended.world_size) == (2, nodes.names, 2)
    assert {path.name for path in nodes.run_folder(1).iterdir()} == {"config.yaml", "logs"}


class Job:
    """Kubernetes Job that runs a pod per index, and starts a new one when one fails."""

    def __init__(self, nodes: Nodes, manifest: Path) -> None:
        self.nodes = nodes
        settings, service, job = yaml.safe_load_all(manifest.read_text())
        self.container = job["spec"]["template"]["spec"]["containers"][0]
        self.name = job["metadata"]["name"]
        self.claim, self.config = nodes.base / "claim", nodes.base / "config"
        for folder in (self.claim, self.config):
            folder.mkdir()
        for file, text in settings["data"].items():
            (self.config / file).write_text(text)
        for index, address in enumerate(ADDRESSES):
            nodes.hosts += (
                f"{address} {self.name}-{index} {self.name}-{index}.{service['metadata']['name']}\n"
            )
        self.pods: dict[int, subprocess.Popen[str]] = {}
        self.replaced = 0

    def start(self, index: int, **more: str) -> None:
        environment = {entry["name"]: entry["value"] for entry in self.container["env"]} | more
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{self.name}-{index}", "PATH": path}
        mounts = {"outputs": self.claim, "config": self.config}
        places = {
            entry["mountPath"]: mounts[entry["name"]]
            for entry in self.container["volumeMounts"]
            if entry["name"] in mounts
        }
        self.pods[index] = self.nodes.start(
            index, self.container["command"], {**environment, **own}, places
        )

    def run(self) -> None:
        """Start a new pod for each failed pod until all pods have succeeded."""
        until = time.monotonic() + 300
        while any(pod.poll() != 0 for pod in self.pods.values()):
            assert time.monotonic() < until, self.nodes.output(0) + self.nodes.output(1)
            for index, pod in list(self.pods.items()):
                if pod.poll() not in (None, 0):
                    assert pod.returncode != 2, self.nodes.output(index)
                    self.replaced += 1
                    self.start(index)
            time.sleep(1)


def submitted(nodes: Nodes, train: Train) -> Job:
    written = train(*KUBERNETES.split()[2:], *LONG, folder=train.base / "submitted")
    assert written.returncode == 0 and "kubectl apply" in written.stdout, written.output
    return Job(nodes, written.folder / "job.yaml")


def test_node_0_names_the_rank_that_was_killed_on_node_1(
    nodes: Nodes, train: Train, tmp_path: Path
) -> None:
    """A killed rank writes no record, so the launcher of its node reports it."""
    job = submitted(nodes, train)
    for index in range(2):
        job.start(index, **fault_environment(FAULTS["killed"].text, tmp_path / "mark"))
    assert 0 not in nodes.ended(list(job.pods.values()))
    assert time.time() - fault_time(tmp_path / "mark") < PROMPT
    result = read_result(job.claim / job.name)
    assert result.status == "failed" and result.failure is not None and result.failure["rank"] == 1
    cause = "rank 1 was killed by SIGKILL"
    assert result.reason.startswith(f"{cause} on {job.name}-1")
    assert nodes.output(0).count(cause) == nodes.output(1).count(cause) == 1


def test_kubernetes_job_resumes_when_a_pod_is_killed_or_drained(
    nodes: Nodes, train: Train, undisturbed: tuple[Any, ...]
) -> None:
    job = submitted(nodes, train)
    for index in range(2):
        job.start(index)
    folder = job.claim / job.name

    def steps() -> int:
        path = folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    wait_for(lambda: steps() > 3, nodes)
    for pid in nodes.pids(nodes.names[1]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: job.pods[1].poll() is not None, nodes)
    # Start the replacement of the killed pod at once, while the other pod still waits for the
    # killed one.
    job.start(1)
    assert job.pods[0].wait(timeout=PROMPT) not in (0, 2), nodes.output(0)
    before = steps()
    job.start(0)
    wait_for(lambda: steps() > before + 2, nodes)
    # Send SIGTERM, as Kubernetes does to the pods of a drained node. SIGKILL would follow after the
    # grace period.
    job.pods[0].terminate()
    assert job.pods[0].wait(timeout=PROMPT) == 143
    assert read_result(folder).status == "interrupted"
    job.run()
    assert numbers_of(folder) == undisturbed
    assert nodes.output(0).count("resumed from") == 2
