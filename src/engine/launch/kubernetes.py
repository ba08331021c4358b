"""Kubernetes: the manifest of a job on a frozen config, and where its pods meet. Nothing is applied from here.

An Indexed Job gives each pod its node rank (the completion index) and, with a headless Service of the same name, a host
name that the others find. A run that has lost a pod ends; the Job starts all of its pods again, and it goes on.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import yaml

from src.engine.launch.slurm import quoted
from src.engine.machine.files import write_text
from src.engine.machine.ranks import Place
from src.schema import Config

MANIFEST = "job.yaml"
PORT = 29500
OUTPUTS, CONFIG = "/mnt/outputs", "/mnt/config"  # where the claim and the frozen config are mounted
GRACE = 120  # seconds from TERM to KILL: longer than a save
RETRIES = 20  # failed pods before the Job gives up; a drained node does not count
USER = 1000


def write_manifest(config: Config, folder: Path) -> None:
    """Write `job.yaml` beside config.yaml and say how to apply it."""
    documents = _manifest(config, folder)
    body = "---\n".join(yaml.safe_dump(document, sort_keys=False, width=120) for document in documents)
    name = documents[-1]["metadata"]["name"]
    path = quoted(folder / MANIFEST)
    write_text(folder / MANIFEST, f"# kubectl apply -f {path}\n{body}")
    print(f"Apply with:  kubectl apply -f {path}")
    namespace = "" if config.cluster.namespace is None else f" --namespace {config.cluster.namespace}"
    print(f"Its log:     kubectl logs --follow job/{name}{namespace}")


def _manifest(config: Config, folder: Path) -> list[dict[str, Any]]:
    """ConfigMap, Service and Job, in the order in which they are needed."""
    cluster, name = config.cluster, _name(config, folder)
    frozen = (folder / "config.yaml").read_text(encoding="utf-8")
    about: dict[str, Any] = {"name": name, "labels": {"app": name}}
    if cluster.namespace is not None:
        about["namespace"] = cluster.namespace
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    job: dict[str, Any] = {
        "completions": cluster.nodes,
        "parallelism": cluster.nodes,
        "completionMode": "Indexed",
        "backoffLimit": RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},  # refused: no use to repeat it
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": {"app": name}}, "spec": _pod(config, name)},
    }
    if cluster.time is not None:
        job["activeDeadlineSeconds"] = _seconds(cluster.time)
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"config.yaml": frozen}},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": job},
    ]


def _pod(config: Config, name: str) -> dict[str, Any]:
    cluster = config.cluster
    sizes = {"nvidia.com/gpu": cluster.gpus, "cpu": cluster.cpus, "memory": _bytes(cluster.memory)}
    limits = {key: str(value) for key, value in sizes.items() if value}
    environment = {"CLUSTER_NODES": str(cluster.nodes), "CLUSTER_ADDRESS": f"{name}-0.{name}", "HOME": "/tmp"}
    container = {
        "name": "node",
        "image": cluster.image,
        "command": ["python", "-m", "src.engine.launch.node", f"{OUTPUTS}/{name}", CONFIG],  # in the image's folder
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "outputs", "mountPath": OUTPUTS},
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # loader workers hand over images through it; 64 MiB by default
        ],
    }
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": [
            {"name": "outputs", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def place_of_pod(index: int) -> Place:
    """The node that the pod of this completion index is, by the environment that our manifest sets."""
    for name in ("CLUSTER_NODES", "CLUSTER_ADDRESS"):
        if name not in os.environ:
            raise ValueError(f"{name}: not set; start this in a pod of {MANIFEST}")
    nodes, address = int(os.environ["CLUSTER_NODES"]), os.environ["CLUSTER_ADDRESS"]
    if index == 0:
        address = socket.gethostbyname(socket.gethostname())  # the pod's entry in its /etc/hosts
    return Place(index, nodes, address, PORT) if nodes > 1 else Place()


def _name(config: Config, folder: Path) -> str:
    """A DNS label of the task and the run folder, so that two runs of a task differ."""
    full = f"{config.task_name}-{folder.parent.name}-{folder.name}".lower()
    label = re.sub(r"[^a-z0-9]+", "-", full).strip("-")
    return re.sub(r"^(?=\d)", "run-", label[-45:].strip("-"))


def _bytes(memory: str | None) -> str | None:
    """Slurm's `64G` as Kubernetes writes it; a plain number is MiB to Slurm."""
    return None if memory is None else f"{memory}i" if memory[-1].isalpha() else f"{memory}Mi"


def _seconds(time: str) -> int:
    """Slurm's `d-hh:mm:ss`, `hh:mm:ss`, `mm:ss` or `d-hh`."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = (parts + [0, 0])[:3]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
