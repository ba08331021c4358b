"""Tests of the job files for Slurm and Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from src.app import app
from src.schema import Config
from tests.template.cluster_commands import JOB_WITH_GPUS
from timm_parallel.cluster import slurm
from timm_parallel.cluster.kubernetes import write_manifest
from timm_parallel.config.compose import load_config
from timm_parallel.config.validate import cluster_rules, gpus_of_gres, refuse
from timm_parallel.entry import run_command
from timm_parallel.faults.failure import RankExits
from timm_parallel.keys import ClusterConfig, ParallelConfig
from timm_parallel.machine import hardware
from timm_parallel.machine.ranks import NEEDED
from timm_parallel.testing.configs import conf

OVERRIDES = ("model=tiny", "data.batch_size=32", "print_config=false")
NODES = ("cluster.nodes=2", "parallel=ddp")
KUBERNETES = ("cluster=kubernetes", "cluster.image=me/train:1", "cluster.claim=outputs")
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    monkeypatch.chdir(tmp_path)
    for name in (*NEEDED, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    devices = tuple(hardware.CudaDevice(index, "fake", 1, str(index)) for index in range(8))
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: devices)
    monkeypatch.setattr(hardware, "cores", lambda: 96)

    def run(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *OVERRIDES, "hydra.run.dir=run", *overrides])
        code = run_command(app)
        return code, *capsys.readouterr()

    return run


def script(main: Main, *overrides: str) -> str:
    code, _, err = main("cluster=slurm", "cluster.submit=false", *overrides)
    assert code == 0, err
    return Path("run/job.sbatch").read_text()


def test_slurm_job_script_has_the_given_options_and_a_dry_run_prints_and_submits_nothing(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "sbatch", lambda script: pytest.fail("submitted"))
    text = script(main, *JOB_WITH_GPUS.split()[2:], "cluster.memory=64G")
    for line in (
        "nodes=2",
        "gpus-per-node=4",
        "cpus-per-task=32",
        "time=12:00:00",
        "mem=64G",
        "signal=USR1@90",
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "srun --ntasks-per-node=1 --cpus-per-task=32 " in text and "scontrol requeue" in text
    assert subprocess.run(["bash", "-n", "run/job.sbatch"], check=False).returncode == 0
    words = ("cluster=slurm", "cluster.gpus=2", "cluster.cpus=24", "cluster.time=4:00:00")
    code, out, err = main(*words, "cluster.submit=false", "hydra.run.dir=dry")
    assert code == 0, err
    assert out.splitlines()[-1].split() == ["Submit", "with:", "sbatch", "dry/job.sbatch"]


def test_auto_devices_threads_and_paths_are_those_of_the_nodes_not_of_the_submitting_machine(
    main: Main,
) -> None:
    data = ("data=folder", "data.root=/on/the/nodes", "data.image_size=32")
    weights = "model.weights=/on/the/nodes/too.pt"
    script(main, *NODES, "cluster.gpus=4", "cluster.cpus=32", *data, weights)
    parallel = load_config(Path("run")).parallel
    assert (parallel.devices, parallel.accelerator, parallel.backend) == (8, "cuda", "nccl")
    assert parallel.threads_per_device == 8
    script(main, *NODES, "cluster.cpus=3", "hydra.run.dir=cpu")
    parallel = load_config(Path("cpu")).parallel
    assert (parallel.devices, parallel.accelerator, parallel.threads_per_device) == (2, "cpu", 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "$(touch pwned)"),
        ("account", "a'b"),
        ("gres", "a;touch pwned"),
        ("gres", "a#b"),
    ],
)
def test_slurm_script_quotes_every_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {key: value}
    slurm.write_script(Config(cluster=ClusterConfig(**options)), tmp_path)
    text = (tmp_path / slurm.SCRIPT).read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"#SBATCH --{key}="))
    done = subprocess.run(
        ["bash", "-c", f"printf -- '%s' {line.removeprefix('#SBATCH ')}"], stdout=-1, text=True
    )
    assert done.stdout == f"--{key}={value}"
    assert not Path("pwned").exists()


PROGRAM = """#!/bin/sh
echo "$(basename $0) $*" >> calls
[ "$(basename $0)" = srun ] && exit 138
[ "$(basename $0)" = sleep ] || [ "$(grep -c scontrol calls)" -gt {failures} ]
"""


@pytest.mark.parametrize(("failures", "tries"), [(3, 4), (99, 8)])
def test_slurm_script_retries_requeue_when_controller_does_not_answer(
    main: Main, tmp_path: Path, failures: int, tries: int
) -> None:
    script(main)
    for name in ("srun", "scontrol", "sleep"):
        (tmp_path / name).write_text(PROGRAM.format(failures=failures))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "run/job.sbatch"], env=environment, capture_output=True, text=True, check=False
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("scontrol requeue 7") == tries
    waited = [int(call.split()[1]) for call in calls if call.startswith("sleep")]
    assert waited == [1, 2, 4, 8, 16, 32, 64, 128][:failures] + ([120] if failures < 8 else [])
    assert done.returncode == 138
    assert done.stdout.count("scontrol requeue failed") == min(failures, 8)


def test_lines_of_local_slurm_sh_appear_in_job_script_and_no_other_run_file(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "slurm.sh"
    local.write_text(
        "#!/bin/bash\n#SBATCH --exclusive\nmodule load cuda\nexport A='b'\n#SBATCH "
        "--mail-type=END\n"
    )
    monkeypatch.setattr(slurm, "LOCAL_LINES", local)
    lines = script(main).splitlines()
    first_command = next(
        number for number, line in enumerate(lines) if line and not line.startswith("#")
    )
    assert lines[first_command : first_command + 2] == ["module load cuda", "export A='b'"]
    assert {"#SBATCH --exclusive", "#SBATCH --mail-type=END"} <= set(lines[:first_command])
    assert lines.count("#!/bin/bash") == 1
    held = [
        path.name
        for path in Path("run").rglob("*")
        if path.is_file() and "module load" in path.read_text()
    ]
    assert held == ["job.sbatch"]


def job(scheduler: str = "slurm", **keys: Any) -> Config:
    parallel = {
        key: keys.pop(key) for key in list(keys) if key in ParallelConfig.__dataclass_fields__
    }
    return Config(
        cluster=ClusterConfig(scheduler=scheduler, **keys), parallel=ParallelConfig(**parallel)
    )


POD = {"image": "x", "claim": "y"}
REFUSED = [
    (job("local", nodes=2, strategy="dp"), "parallel=dp: .*cluster.nodes=2"),
    (job(nodes=2, strategy="single"), "parallel=single: .*cluster.nodes=2"),
    (job(nodes=2, devices=3), "parallel.devices=3: "),
    (job(nodes=2, gpus=4, devices=4), "parallel.devices=4: .*auto"),
    (
        job(nodes=2, cpus=2, devices=2, threads_per_device=4),
        "parallel.threads_per_device=4: .* cluster.cpus=2",
    ),
    (job(accelerator="cuda"), "parallel.accelerator=cuda: .*cluster.gpus"),
    (job(gpus=2, gres="gpu:2"), "cluster.gres=gpu:2: cluster.gpus=2"),
    (job(image="x"), "cluster.image=x: an option of kubernetes"),
    (job("kubernetes", **POD, partition="x"), "cluster.partition=x: an option of slurm"),
    (job("kubernetes", claim="x"), "cluster.image: "),
    (job("kubernetes", image="x", claim="A b"), "cluster.claim=A b: "),
    (job(time="720"), "cluster.time=720: expected hh:mm:ss"),
    (job(time="soon"), "cluster.time=soon: expected hh:mm:ss"),
    (job(time="00:01:00"), r"cluster\.signal_seconds=90: .* cluster\.time=00:01:00 \(60 s\)"),
    (job(time="1-0", signal_seconds=90000), r"signal_seconds=90000: .* \(86400 s\)"),
    (job(memory="lots"), "cluster.memory=lots: "),
    (job(account="a\nb"), "cluster.account=a\nb: "),
    (job(max_restarts=1, strategy="ddp"), "parallel.max_restarts=1: cluster=slurm "),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_error_for_invalid_cluster_settings_names_the_key(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        # A list, because no rule may rely on an earlier one to end the check.
        refuse(iter([*cluster_rules(config)]))


ODD = "# @package _global_\ncluster: {extra: ['#SBATCH --exclusive']}\n"
OF_TORCHRUN = {name: {"RANK": "0", "LOCAL_RANK": "0"}.get(name, "1") for name in NEEDED}
OF_SRUN = {
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "SLURM_NODEID": "0",
}
SUBMIT = ("cluster=slurm", "cluster.submit=false")


@pytest.mark.parametrize(
    ("overrides", "variables", "message"),
    [
        (NODES, {}, "cluster.nodes=2: cluster=local "),
        (("cluster=slurm",), {}, "cluster=slurm: sbatch is not installed"),
        (("cluster=slurm", "-m", "seed=1,2"), {}, "cluster=slurm: sbatch is not installed"),
        ((*KUBERNETES, "-m", "seed=1,2"), {}, "cluster=kubernetes: "),
        # A config must not hold code of a shell.
        ((*SUBMIT, 'cluster.setup="touch pwned"'), {}, "cluster.setup"),
        ((*SUBMIT, "--config-dir", "theirs", "experiment=odd"), {}, "cluster.extra"),
        (SUBMIT, OF_TORCHRUN, "cluster=slurm: .*python"),
        # The fix names srun, which started the ranks, and not torchrun.
        (("parallel=single",), OF_SRUN, "^(?!.*torchrun).*srun"),
        (("parallel=ddp", "parallel.devices=4"), OF_SRUN, "^(?!.*torchrun).*srun"),
    ],
)
def test_refused_cluster_job_does_not_create_a_run_folder(
    main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    variables: dict[str, str],
    message: str,
) -> None:
    conf(tmp_path / "theirs", experiment__odd=ODD)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    monkeypatch.setattr("timm_parallel.entry.refuse_followers", lambda ranks, reason: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = main(*overrides)
    # A slow machine shows how many jobs of a sweep are composed.
    lines = [line for line in err.splitlines() if not line.startswith("composing: ")]
    assert code == 2 and len(lines) == 1 and re.search(message, lines[0]), err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("gres", "count"),
    [(None, 0), ("gpu:a100:2,tmp:9", 2), ("gpu", 1), ("tmp:1", 0), ("gpu:v100", 1)],
)
def test_number_of_gpus_is_parsed_from_slurm_gres(gres: str | None, count: int) -> None:
    assert gpus_of_gres(ClusterConfig(gres=gres)) == count


@pytest.mark.slow(seconds=2)
def test_config_yaml_is_identical_for_local_slurm_and_kubernetes_runs(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timm_parallel.launch.job.run_ranks", lambda *_, **__: RankExits())
    ranks = ("parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu")
    bodies = []
    for overrides in ((), ("cluster=slurm", "cluster.submit=false", "cluster.nodes=2"), KUBERNETES):
        main(*ranks, "parallel.threads_per_device=1", *overrides)
        bodies.append(yaml.safe_load(Path("run/config.yaml").read_text()))
        bodies[-1].pop("cluster")
        shutil.rmtree("run")
    assert bodies[0] == bodies[1] == bodies[2]


def test_kubernetes_manifest_is_valid_with_nodes_gpus_memory_volume_and_config(
    tmp_path: Path,
) -> None:
    pods = {"image": "me/train:1", "claim": "outputs", "namespace": "team"}
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    write_manifest(job("kubernetes", **pods, nodes=2, gpus=1, memory="8G"), tmp_path)
    documents = list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    settings, service, whole = documents
    pod = whole["spec"]["template"]["spec"]
    container = pod["containers"][0]
    name = whole["metadata"]["name"]
    assert {document["metadata"]["namespace"] for document in documents} == {"team"}
    assert (whole["spec"]["completions"], whole["spec"]["completionMode"]) == (2, "Indexed")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"], (
        "expected the service name, so that DNS resolves <job>-0.<service>"
    )
    assert {"name": "CLUSTER_ADDRESS", "value": f"{name}-0.{name}"} in container["env"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["terminationGracePeriodSeconds"] > 30
    assert pod["volumes"][0] == {
        "name": "outputs",
        "persistentVolumeClaim": {"claimName": "outputs"},
    }
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "8Gi"}
    assert settings["data"]["config.yaml"] == "seed: 1\n"
    # A YAML comment has the path of the folder. Text after a line break would be read as YAML.
    folder = tmp_path / "run\nkind: Pod"
    folder.mkdir()
    with pytest.raises(ValueError, match="one line"):
        write_manifest(job("kubernetes", **pods), folder)


@pytest.mark.parametrize("value", ["it's", '"a": {b}', "007", "# no comment"])
def test_kubernetes_manifest_quotes_every_value(tmp_path: Path, value: str) -> None:
    text = f"seed: 1\ntags: ['{value}', '{{{{ 7 * 6 }}}}']\n\tx: --- \n"
    (tmp_path / "config.yaml").write_text(text)
    write_manifest(
        job("kubernetes", image=value, claim=value, namespace=value, time="1:30"), tmp_path
    )
    settings, service, whole = yaml.safe_load_all((tmp_path / "job.yaml").read_text())
    pod = whole["spec"]["template"]["spec"]
    assert settings["data"]["config.yaml"] == text
    assert service["metadata"]["namespace"] == pod["containers"][0]["image"] == value
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == value
    assert (
        whole["spec"]["activeDeadlineSeconds"] == 90
        and pod["containers"][0]["resources"]["limits"] == {}
    )


def test_waiting_for_a_slurm_job_array_returns_the_highest_exit_code_of_all_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """scontrol prints a line per task of the array. It soon omits finished tasks, and sometimes it
    does not respond.
    """
    line = "JobId={} JobState={} ExitCode={}".format
    still = line(9, "RUNNING", "0:0")
    looks: list[str | None] = [
        "\n".join([line(8, "RUNNING", "0:0"), line(7, "COMPLETED", "0:0")]),
        None,
        "\n".join([line(8, "FAILED", "3:0"), line(7, "PREEMPTED", "0:15")]) + f"\n{still}",
        line(9, "COMPLETED", "0:0"),
    ]

    def scontrol(*command: str) -> str:
        assert command[:4] == ("scontrol", "show", "job", "7")
        answer = looks.pop(0)
        if answer is None:
            raise ValueError("Unable to contact slurm controller")
        return answer

    monkeypatch.setattr(slurm, "_output", scontrol)
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    assert slurm.wait_for("7") == 128 + 15
    assert looks == []
    looks += [None, None]
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", -1)
    with pytest.raises(ValueError, match="Unable to contact"):
        slurm.wait_for("7")


@pytest.mark.parametrize(
    ("answer", "code", "queued"),
    [
        ("7 debug RUNNING", 0, "7"),
        ("", 0, None),
        ("slurm_load_jobs error: Invalid job id specified", 1, None),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            1,
            ValueError,
        ),
    ],
)
def test_queued_job_returns_the_slurm_job_id_of_a_run_folder_or_none_when_not_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, queued: Any
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{answer}' {'>&2' if code else ''}\nexit {code}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / slurm.JOB_ID).write_text("7\n")
    if queued is ValueError:
        with pytest.raises(ValueError, match=r"job 7.*squeue"):
            slurm.queued_job(tmp_path)
    else:
        assert slurm.queued_job(tmp_path) == queued


def test_srun_node_address_is_refused_when_unresolvable_or_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "SLURM_STEP_NODELIST": "a[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    answers = {
        "hostnames": "a1\na2\n",
        "node": "NodeName=a1 Arch=x NodeAddr=somewhere NodeHostName=a1",
    }
    monkeypatch.setattr(slurm, "_output", lambda *command: answers[command[2]])
    monkeypatch.setattr(slurm.socket, "gethostbyname", lambda name: {"somewhere": "10.0.0.7"}[name])
    assert slurm.address_of_step(1, 2).address == "10.0.0.7"
    monkeypatch.setattr(slurm.socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ValueError, match=r"NodeAddr=somewhere of a1: .*127\.0\.1\.1"):
        slurm.address_of_step(0, 2)

    def unknown(name: str) -> str:
        raise OSError("no such name")

    monkeypatch.setattr(slurm.socket, "gethostbyname", unknown)
    with pytest.raises(ValueError, match="NodeAddr=somewhere"):
        slurm.address_of_step(0, 2)
