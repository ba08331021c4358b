"""Kubernetes support: write the manifest of a job that runs a saved config, and find the address of
the job's first pod.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from timm_parallel.app import current
from timm_parallel.cluster.slurm import quoted, render
from timm_parallel.config.validate import seconds_of
from timm_parallel.keys import Config
from timm_parallel.machine.files import write_text
from timm_parallel.machine.ranks import NodeAddress

MANIFEST = "job.yaml"
PORT = 29500


def write_manifest(config: Config, folder: Path) -> None:
    """Write the Kubernetes manifest `job.yaml` into the run folder, next to config.yaml. Print the
    command that applies the manifest, and the command that shows the log.
    """
    cluster, name, path = config.cluster, _name(config, folder), quoted(folder / MANIFEST)
    sizes = {"nvidia.com/gpu": cluster.gpus, "cpu": cluster.cpus, "memory": _bytes(cluster.memory)}
    manifest = render(
        MANIFEST,
        app=current().name,
        name=name,
        path=path,
        cluster=cluster,
        frozen=(folder / "config.yaml").read_text(encoding="utf-8"),
        limits={key: str(value) for key, value in sizes.items() if value},
        seconds=None if cluster.time is None else seconds_of(cluster.time),
        port=PORT,
    )
    write_text(folder / MANIFEST, manifest)
    print(f"Apply with:  kubectl apply -f {path}")
    namespace = "" if cluster.namespace is None else f" --namespace {cluster.namespace}"
    print(f"Its log:     kubectl logs --follow job/{name}{namespace}")


def address_of_pod(index: int) -> NodeAddress:
    """Read the address of pod 0 and the number of pods from environment variables that the manifest
    sets. `index`: completion index of this pod, which is its node number.
    """
    nodes, address = int(os.environ["CLUSTER_NODES"]), os.environ["CLUSTER_ADDRESS"]
    if index == 0:
        # On pod 0, look up the host name of the pod, which Kubernetes writes into /etc/hosts of
        # each pod.
        address = socket.gethostbyname(socket.gethostname())
    return NodeAddress(index, nodes, address, PORT) if nodes > 1 else NodeAddress()


def _name(config: Config, folder: Path) -> str:
    """Build the name of a Kubernetes job, a DNS label, from task_name and the name of the run
    folder, so that two runs have different names.
    """
    full = f"{config.task_name}-{folder.parent.name}-{folder.name}".lower()
    label = re.sub(r"[^a-z0-9]+", "-", full).strip("-")
    return re.sub(r"^(?=\d)", "run-", label[-45:].strip("-"))


def _bytes(memory: str | None) -> str | None:
    """Convert an amount of memory from Slurm's notation (`64G`, or a plain number of MiB) to that
    of Kubernetes (`64Gi`).
    """
    if memory is None:
        return None
    return f"{memory}i" if memory[-1].isalpha() else f"{memory}Mi"
