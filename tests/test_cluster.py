"""What a scheduler is handed: one readable file per job, the same config.yaml everywhere, refusals in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_page import JOB_WITH_GPUS

import train
from src.engine.config.cluster import cluster_rules, gpus_of_gres
from src.engine.config.compose import read_frozen
from src.engine.config.rules import refuse
from src.engine.launch import slurm
from src.engine.launch.kubernetes import _bytes, _seconds, write_manifest
from src.engine.machine import hardware
from src.engine.machine.ranks import NEEDED
from src.schema import ClusterConfig, Config, ParallelConfig

WORDS = ("model=tiny", "data.batch_size=32", "print_config=false")
NODES = ("cluster.nodes=2", "parallel=ddp")
KUBERNETES = ("cluster=kubernetes", "cluster.image=me/train:1", "cluster.claim=outputs")
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """train.py's main in an empty folder, on a machine with 8 CUDA devices that no job may count on."""
    monkeypatch.chdir(tmp_path)
    for name in (*NEEDED, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    devices = tuple(hardware.CudaDevice(index, "fake", 1, str(index)) for index in range(8))
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: devices)
    monkeypatch.setattr(hardware, "cores", lambda: 96)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *WORDS, "hydra.run.dir=run", *words])
        code = train.main()
        return code, *capsys.readouterr()

    return run


def script(main: Main, *words: str) -> str:
    code, _, err = main("cluster=slurm", "cluster.submit=false", *words)
    assert code == 0, err
    return Path("run/job.sbatch").read_text()


def test_a_job_s_file_says_what_was_asked_and_is_left_for_you(main: Main) -> None:
    text = script(main, *JOB_WITH_GPUS.split()[2:], "cluster.memory=64G")
    for line in ("nodes=2", "gpus-per-node=4", "cpus-per-task=32", "time=12:00:00", "mem=64G", "signal=USR1@90"):
        assert f"#SBATCH --{line}\n" in text
    assert "srun --ntasks-per-node=1 --cpus-per-task=32 " in text and "scontrol requeue" in text
    assert subprocess.run(["bash", "-n", "run/job.sbatch"], check=False).returncode == 0


def test_auto_follows_the_nodes_and_not_this_machine(main: Main) -> None:
    script(main, *NODES, "cluster.gpus=4", "cluster.cpus=32")
    parallel = read_frozen(Path("run")).parallel
    assert (parallel.devices, parallel.accelerator, parallel.backend) == (8, "cuda", "nccl")
    assert parallel.threads_per_device == 8


def test_nodes_without_gpus_run_on_their_cores(main: Main) -> None:
    script(main, *NODES, "cluster.cpus=3")
    parallel = read_frozen(Path("run")).parallel
    assert (parallel.devices, parallel.accelerator, parallel.threads_per_device) == (2, "cpu", 3)


def test_paths_are_looked_at_by_the_job(main: Main) -> None:
    script(
        main,
        "hydra.run.dir=run",
        "data=folder",
        "data.root=/on/the/nodes",
        "data.image_size=32",
        "model.weights=/on/the/nodes/too.pt",
    )


@pytest.mark.parametrize("key", ["partition", "account", "gres"])
@pytest.mark.parametrize("value", ["a b", "$(touch pwned)", "a'b", "a;touch pwned", "-x", "a#b"])
def test_values_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    slurm.write_script(Config(cluster=ClusterConfig(**{key: value})), tmp_path)
    text = (tmp_path / slurm.SCRIPT).read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"#SBATCH --{key}="))
    done = subprocess.run(["bash", "-c", f"printf -- '%s' {line.removeprefix('#SBATCH ')}"], stdout=-1, text=True)
    assert done.stdout == f"--{key}={value}"
    assert not Path("pwned").exists()


def test_code_is_in_the_job_and_frozen_nowhere(main: Main) -> None:
    text = script(main, "cluster.setup='module load cuda'", "cluster.extra=['#SBATCH --exclusive']")
    assert "\nmodule load cuda\n" in text and "\n#SBATCH --exclusive\n" in text
    cluster = read_frozen(Path("run")).cluster
    assert (cluster.setup, cluster.extra) == (None, [])


@pytest.mark.parametrize("code", ["setup: touch pwned", "extra: ['#SBATCH --exclusive']"])
def test_code_from_a_file_is_refused(main: Main, tmp_path: Path, code: str) -> None:
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    text = f"# @package _global_\ncluster: {{{code}}}\n"
    (tmp_path / "theirs" / "experiment" / "odd.yaml").write_text(text)
    code_, _, err = main(
        "--config-dir", str(tmp_path / "theirs"), "experiment=odd", "cluster=slurm", "cluster.submit=false"
    )
    assert code_ == 2 and "command line and conf/local" in err and len(err.splitlines()) == 1
    assert not Path("run").exists()


def job(scheduler: str = "slurm", **keys: Any) -> Config:
    parallel = {key: keys.pop(key) for key in list(keys) if key in ParallelConfig.__dataclass_fields__}
    return Config(cluster=ClusterConfig(scheduler=scheduler, **keys), parallel=ParallelConfig(**parallel))


POD = {"image": "x", "claim": "y"}
REFUSED = [
    (job("local", nodes=2, strategy="dp"), "parallel=dp: one process, which cannot span the nodes"),
    (job(nodes=2, strategy="single"), "parallel=single: one process"),
    (job(nodes=2, devices=3), "parallel.devices=3: of all nodes together"),
    (job(nodes=2, gpus=4, devices=4), "have 8; leave it at auto"),
    (job(nodes=2, cpus=2, devices=2, threads_per_device=4), "parallel.threads_per_device=4: .* cluster.cpus=2"),
    (job(accelerator="cuda"), "the nodes have no GPU; set cluster.gpus"),
    (job(gpus=2, gres="gpu:2"), "cluster.gres=gpu:2: asks for GPUs as cluster.gpus=2"),
    (job(image="x"), "cluster.image=x: an option of kubernetes"),
    (job("kubernetes", **POD, partition="x"), "cluster.partition=x: an option of slurm"),
    (job("kubernetes", claim="x"), "cluster.image: must be given"),
    (job("kubernetes", image="x", claim="A b"), "cluster.claim=A b: Kubernetes has names"),
    (job(time="720"), "cluster.time=720: give hh:mm:ss"),
    (job(memory="lots"), "cluster.memory=lots: give a number"),
    (job(account="a\nb"), "cluster.account='a.*nb': must be one line"),
    (job(extra=["rm x"]), "cluster.extra='rm x': give lines that begin with #SBATCH"),
    (job(extra=["#SBATCH -x\nrm x"]), "give lines that begin with #SBATCH"),
    (job(max_restarts=1, strategy="ddp"), "parallel.max_restarts=1: cluster=slurm restarts"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_cannot_be_a_job_is_refused(config: Config, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse(cluster_rules(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (NODES, "cluster.nodes=2: cluster=local starts this machine's ranks alone"),
        (("cluster=slurm", "-m", "seed=1,2"), "cluster=slurm: no sbatch here"),
        (("cluster=kubernetes", "cluster.image=x", "cluster.claim=y", "-m", "seed=1,2"), "a sweep runs its jobs here"),
        (("cluster=slurm",), "cluster=slurm: no sbatch here"),
    ],
)
def test_a_refused_job_leaves_nothing(
    main: Main, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    code, _, err = main(*words)
    assert code == 2 and said in err and len(err.splitlines()) == 1, err
    assert not Path("run").exists()


def test_a_scheduler_under_torchrun_is_refused(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    code, _, err = main("cluster=slurm", "cluster.submit=false")
    assert code == 2 and "run this with python" in err and not Path("run").exists()


@pytest.mark.parametrize(
    ("gres", "count"), [(None, 0), ("gpu:4", 4), ("gpu:a100:2,tmp:9", 2), ("gpu", 1), ("tmp:1", 0), ("gpu:v100", 1)]
)
def test_gpus_of_a_gres(gres: str | None, count: int) -> None:
    assert gpus_of_gres(ClusterConfig(gres=gres)) == count


def body(folder: str) -> dict[str, Any]:
    whole: dict[str, Any] = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    whole.pop("cluster")
    return whole


def test_one_config_is_the_same_config_yaml_everywhere(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    same = ("parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu", "parallel.threads_per_device=1")
    monkeypatch.setattr("src.engine.launch.job.run_ranks", lambda *_: (_ for _ in ()).throw(SystemExit(0)))
    starts = {"local": (), "slurm": ("cluster=slurm", "cluster.submit=false", "cluster.nodes=2"), "pods": KUBERNETES}
    for name, words in starts.items():
        try:
            code, _, err = main(*same, *words, f"hydra.run.dir={name}")
            assert code == 0, err
        except SystemExit:
            assert name == "local"
    assert body("local") == body("slurm") == body("pods")


@pytest.fixture
def documents(tmp_path: Path) -> list[dict[str, Any]]:
    config = job("kubernetes", image="me/train:1", claim="outputs", nodes=2, gpus=1, memory="8G", namespace="team")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    write_manifest(config, tmp_path)
    return list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))


def test_the_manifest_is_valid(documents: list[dict[str, Any]]) -> None:
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    documents[-1]["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[-1], "1.31", strict=True)


def test_the_manifest_keeps_what_a_run_needs(documents: list[dict[str, Any]]) -> None:
    settings, service, job = documents
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    name = job["metadata"]["name"]
    assert {document["metadata"]["namespace"] for document in documents} == {"team"}
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"], "so that <job>-0.<service> is a name"
    assert {"name": "CLUSTER_ADDRESS", "value": f"{name}-0.{name}"} in container["env"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["terminationGracePeriodSeconds"] > 30
    assert pod["volumes"][0] == {"name": "outputs", "persistentVolumeClaim": {"claimName": "outputs"}}
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "8Gi"}
    assert settings["data"]["config.yaml"] == "seed: 1\n"


@pytest.mark.parametrize(("time", "seconds"), [("12:00:00", 43200), ("1-0", 86400), ("2-01:30", 178200), ("1:30", 90)])
def test_slurm_s_times_in_seconds(time: str, seconds: int) -> None:
    assert _seconds(time) == seconds


def test_slurm_s_memory_in_kubernetes_words() -> None:
    assert [_bytes(word) for word in (None, "64G", "500")] == [None, "64Gi", "500Mi"]


def test_waiting_for_an_array_ends_with_its_last_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """scontrol shows each task in a line; those that have ended are soon left out, and at times it does not answer."""
    running, done, failed = "JobId=8 JobState=RUNNING ExitCode=0:0", "JobState=COMPLETED ExitCode=0:0", "ExitCode=3:0"
    looks: list[str | None] = [
        f"{running}\nJobId=7 {done}",
        None,
        f"JobId=8 JobState=FAILED {failed}\nJobId=7 JobState=PREEMPTED ExitCode=0:15\nJobId=9 {running[8:]}",
        f"JobId=9 {done}",
    ]

    def scontrol(*words: str) -> str:
        assert words[:4] == ("scontrol", "show", "job", "7")
        said = looks.pop(0)
        if said is None:
            raise ValueError("Unable to contact slurm controller")
        return said

    monkeypatch.setattr(slurm, "_output", scontrol)
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    assert slurm.wait_for("7") == 128 + 15
    assert looks == []
    looks += [None, None]
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", -1)
    with pytest.raises(ValueError, match="Unable to contact"):
        slurm.wait_for("7")


@pytest.mark.parametrize(
    ("said", "code", "queued"),
    [
        ("7 debug RUNNING", 0, "7"),
        ("", 0, None),
        ("slurm_load_jobs error: Invalid job id specified", 1, None),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1, ValueError),
    ],
)
def test_a_folder_whose_job_may_be_in_the_queue_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, queued: Any
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{said}' {'>&2' if code else ''}\nexit {code}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / slurm.JOB_ID).write_text("7\n")
    if queued is ValueError:
        with pytest.raises(ValueError, match="belongs to job 7, whose state is unknown: squeue"):
            slurm.queued_job(tmp_path)
    else:
        assert slurm.queued_job(tmp_path) == queued


def test_a_folder_of_several_lines_is_no_place_for_a_manifest(tmp_path: Path) -> None:
    """Its path stands in a comment: what comes after the first line would be YAML."""
    folder = tmp_path / "run\nkind: Pod"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="one line"):
        write_manifest(job("kubernetes", image="x", claim="y"), folder)
    assert not (folder / "job.yaml").exists()


def test_the_first_node_must_have_an_address_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    answers = {"hostnames": "a1\na2\n", "node": "NodeName=a1 Arch=x NodeAddr=somewhere NodeHostName=a1"}
    monkeypatch.setattr(slurm, "_output", lambda *words: answers[words[2]])
    monkeypatch.setattr(slurm.socket, "gethostbyname", lambda name: {"somewhere": "10.0.0.7"}[name])
    assert slurm.place_of_step(1, 2).address == "10.0.0.7"
    monkeypatch.setattr(slurm.socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ValueError, match=r"NodeAddr=somewhere of a1: resolves to 127\.0\.1\.1"):
        slurm.place_of_step(0, 2)

    def unknown(name: str) -> str:
        raise OSError("no such name")

    monkeypatch.setattr(slurm.socket, "gethostbyname", unknown)
    with pytest.raises(ValueError, match="cannot be resolved"):
        slurm.place_of_step(0, 2)
