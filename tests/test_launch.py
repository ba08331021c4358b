"""One launch, whoever starts the ranks: one folder, one of everything in it, equal numbers."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import Finished, Running, Train, tiny, without_times

from src.training import checkpoint

pytestmark = pytest.mark.processes
TWO = ("parallel=ddp", "parallel.devices=2")
FORMS = ("python", "torchrun", "by_hand")


def by_hand(train: Train, folder: Path, delay: float, *overrides: str) -> list[Running]:
    """Two ranks started like a cluster does, without an agent, `delay` seconds apart; rank 1 first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in (1, 0):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "train.py", *tiny(f"hydra.run.dir={folder}", *overrides)]
        started.append(train.start_command(command, folder, environment))
        time.sleep(delay if rank else 0)
    return started


@pytest.fixture(scope="module")
def forms(train_shared: Train) -> dict[str, Finished]:
    """The same ddp run in every launch form, all into the same `hydra.run.dir` at the same time."""
    wanted = train_shared.base / "run"
    late = by_hand(train_shared, wanted, 3.0, "parallel=ddp")
    python = train_shared.start(*TWO)
    torchrun = train_shared.start("parallel=ddp", form="torchrun")
    ended = {"python": python.finish(), "torchrun": torchrun.finish(), "by_hand": late[1].finish()}
    assert late[0].finish().returncode == 0
    for form, done in ended.items():
        assert done.returncode == 0, f"{form}: {done.output}"
        said = next(line for line in done.stdout.splitlines() if line.startswith("run folder"))
        done.folder = Path(said.split()[-1])
    return ended


def test_runs_started_together_into_one_folder_get_one_each(forms: dict[str, Finished]) -> None:
    wanted = min((done.folder for done in forms.values()), key=lambda folder: len(folder.name))
    assert {done.folder for done in forms.values()} == {wanted, Path(f"{wanted}_1"), Path(f"{wanted}_2")}
    assert {path.name for path in wanted.parent.iterdir() if path.name.startswith("run")} == {"run", "run_1", "run_2"}


@pytest.mark.parametrize("form", FORMS)
def test_one_run_leaves_one_of_everything(forms: dict[str, Finished], form: str) -> None:
    folder = forms[form].folder
    assert [path.parent for path in folder.rglob(".hydra")] == [folder]
    writers = {path.name.split(".")[-2] for path in folder.rglob("events.out.tfevents.*")}
    assert len(writers) == 1, "one process writes TensorBoard"
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert list(folder.rglob("*.tmp")) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_run_proves_that_two_ranks_hold_one_model(forms: dict[str, Finished], form: str) -> None:
    result = forms[form].result
    assert result["status"] == "done"
    assert (result["strategy"], result["devices"], result["world_size"], result["processes"]) == ("ddp", 2, 2, 2)
    assert result["backend"] == "gloo"
    assert result["proof"]["hashes_equal"] is True
    assert result["proof"]["parameters_hash_start"] != result["parameters_hash"], "training changes the weights"
    assert [entry["device"] for entry in result["memory"]] == ["cpu:0", "cpu:1"]
    assert result["proof"]["files_per_rank"]["1"] == 1, "ranks other than 0 write nothing but their log"
    assert result["proof"]["files_per_rank"]["0"] >= 2, "log and metrics; TensorBoard's file is open only at times"


@pytest.mark.parametrize("form", FORMS[1:])
def test_all_forms_give_the_same_numbers(forms: dict[str, Finished], form: str) -> None:
    asked, other = forms["python"], forms[form]
    assert without_times(other.metrics) == without_times(asked.metrics)
    assert other.result["parameters_hash"] == asked.result["parameters_hash"]
    weights = [checkpoint.load(done.folder / "checkpoints" / "last.pt")["model"] for done in (asked, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_nothing_is_left_in_the_temporary_folder(forms: dict[str, Finished], train_shared: Train) -> None:
    left = [path for path in train_shared.temporary.iterdir() if not path.name.startswith("torchelastic_")]
    assert left == [], "torchrun's own folder of logs excepted"


def test_a_refused_config_is_said_once_by_ranks_started_from_outside(train: Train) -> None:
    ranks = by_hand(train, train.base / "run", 0, "parallel=ddp", "modle=tiny")
    ended = [rank.finish() for rank in ranks]
    assert [done.returncode for done in ended] == [2, 2]
    said = "".join(done.stderr for done in ended)
    assert len(said.splitlines()) == said.count("did you mean model") == 1, said
    assert not (train.base / "run").exists()


@pytest.mark.slow
def test_torchrun_ends_with_an_error_and_no_folder_when_the_config_is_refused(train: Train) -> None:
    done = train("parallel=ddp", "optim.lr=-1", form="torchrun")
    assert done.returncode != 0
    assert done.stderr.count("train.py: optim.lr=-1") == 1, done.output
    assert not done.folder.exists()


def test_a_sweep_under_torchrun_is_refused_with_advice(train: Train) -> None:
    ranks = by_hand(train, train.base / "run", 0, "-m", "parallel=ddp", f"hydra.sweep.dir={train.base}/sweep")
    ended = [rank.finish() for rank in ranks]
    assert all(done.returncode == 2 for done in ended), [done.output for done in ended]
    said = "".join(done.stderr for done in ended)
    assert said.count("python train.py -m") == 1, said
    assert not (train.base / "sweep").exists()


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_half_set_environment_is_refused_by_name(train: Train, variables: dict[str, str]) -> None:
    done = train.start(environment=variables).finish()
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "LOCAL_RANK" in done.stderr and "torchrun" in done.stderr
    assert not done.folder.exists()
