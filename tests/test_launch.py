"""One launch, whoever starts the ranks: one folder, equal numbers, and when something goes wrong a prompt, named end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Finished, Running, Train, in_ranks, resolved, tiny, without_times
from PIL import Image

from src.data.sampling import EpochShard
from src.engine.machine.ranks import Ranks
from src.training import checkpoint

pytestmark = pytest.mark.processes
TWO = ("parallel=ddp", "parallel.devices=2")
ENDLESS = ("train.epochs=10000", "train.evaluate_every=0", "train.log_every=5")
FORMS = ("python", "torchrun", "by_hand")


def by_hand(train: Train, folder: Path, delay: float, *overrides: str, timeout: float = 90) -> list[Running]:
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
        started.append(train.start_command(command, folder, environment, timeout))
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


@pytest.mark.timeout(120)
def test_runs_started_together_into_one_folder_get_one_each(forms: dict[str, Finished]) -> None:
    wanted = min((done.folder for done in forms.values()), key=lambda folder: len(folder.name))
    assert {done.folder for done in forms.values()} == {wanted, Path(f"{wanted}_1"), Path(f"{wanted}_2")}
    assert {path.name for path in wanted.parent.iterdir() if path.name.startswith("run")} == {"run", "run_1", "run_2"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_one_run_leaves_one_of_everything(forms: dict[str, Finished], form: str) -> None:
    folder = forms[form].folder
    assert [path.parent for path in folder.rglob(".hydra")] == [folder]
    writers = {path.name.split(".")[-2] for path in folder.rglob("events.out.tfevents.*")}
    assert len(writers) == 1, "one process writes TensorBoard"
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert list(folder.rglob("*.tmp")) == []


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS[1:])
def test_all_forms_give_the_same_numbers(forms: dict[str, Finished], form: str) -> None:
    asked, other = forms["python"], forms[form]
    assert without_times(other.metrics) == without_times(asked.metrics)
    assert other.result["parameters_hash"] == asked.result["parameters_hash"]
    weights = [checkpoint.load(done.folder / "checkpoints" / "last.pt")["model"] for done in (asked, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.timeout(120)
def test_nothing_is_left_in_the_temporary_folder(forms: dict[str, Finished], train_shared: Train) -> None:
    left = [path for path in train_shared.temporary.iterdir() if not path.name.startswith("torchelastic_")]
    assert left == [], "torchrun's own folder of logs excepted"


@pytest.mark.timeout(60)
def test_a_refused_config_is_said_once_by_ranks_started_from_outside(train: Train) -> None:
    ranks = by_hand(train, train.base / "run", 0, "parallel=ddp", "modle=tiny", timeout=20)
    ended = [rank.finish() for rank in ranks]
    assert [done.returncode for done in ended] == [2, 2]
    said = "".join(done.stderr for done in ended)
    assert len(said.splitlines()) == said.count("did you mean model") == 1, said
    assert not (train.base / "run").exists()


@pytest.mark.timeout(60)
def test_torchrun_ends_with_an_error_and_no_folder_when_the_config_is_refused(train: Train) -> None:
    done = train("parallel=ddp", "optim.lr=-1", form="torchrun")
    assert done.returncode != 0
    assert done.stderr.count("train.py: optim.lr=-1") == 1, done.output
    assert not done.folder.exists()


@pytest.mark.timeout(60)
def test_a_sweep_under_torchrun_is_refused_with_advice(train: Train) -> None:
    ranks = by_hand(
        train, train.base / "run", 0, "-m", "parallel=ddp", f"hydra.sweep.dir={train.base}/sweep", timeout=20
    )
    ended = [rank.finish() for rank in ranks]
    assert all(done.returncode == 2 for done in ended), [done.output for done in ended]
    said = "".join(done.stderr for done in ended)
    assert said.count("python train.py -m") == 1, said
    assert not (train.base / "sweep").exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_half_set_environment_is_refused_by_name(train: Train, variables: dict[str, str]) -> None:
    done = train.start(environment=variables).finish()
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "LOCAL_RANK" in done.stderr and "torchrun" in done.stderr
    assert not done.folder.exists()


def folder_with_a_corrupt_image_for_rank_1(root: Path) -> Path:
    """16 training images, of which the one is damaged that rank 1 of 2 reads first. Returns its path."""
    for split, count in (("train", 8), ("val", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (32, 32), (index * 20, 0, 0)).save(root / split / name / f"{index}.png")
    files = sorted((root / "train").rglob("*.png"))
    first = int(EpochShard(16, 4, rank=1, world_size=2, seed=42).shard()[0])
    files[first].write_bytes(files[first].read_bytes()[:40])
    return files[first]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("form", ["python", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_the_run_with_its_name_and_log(train: Train, form: str) -> None:
    corrupt = folder_with_a_corrupt_image_for_rank_1(train.base / "images")
    data = ("data=folder", f"data.root={train.base}/images", "data.image_size=32", "data.limit_train=16")
    devices = () if form == "torchrun" else ("parallel.devices=2",)
    done = train("parallel=ddp", *devices, *data, "data.batch_size=4", "data.workers=0", form=form)
    ended = time.time()
    assert done.returncode == 1, done.output
    failure = done.result["failure"]
    assert (done.result["status"], failure["rank"], failure["exception"]) == ("failed", 1, "UnreadableImageError")
    assert ended - failure["time"] < 20
    for word in ("Failed: rank 1: UnreadableImageError", str(corrupt), "rank_1.log"):
        assert word in done.stderr, done.output
    assert str(corrupt) in done.result["reason"]
    log = (done.folder / "logs" / "rank_1.log").read_text()
    assert str(corrupt) in log and "Traceback (most recent call last)" in log


@pytest.mark.timeout(90)
def test_a_killed_rank_ends_the_run_with_its_name(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS)
    running.wait_for_steps()
    running.workers()[1].kill()
    running.started = time.monotonic()
    done = running.finish()
    assert done.seconds < 20
    assert done.returncode == 1, done.output
    assert done.result["status"] == "failed"
    assert done.result["failure"]["rank"] == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert train.left_after(5) == []


STOPS = [
    pytest.param("ddp", signal.SIGINT, 1, id="SIGINT-ddp-with-a-loader-worker"),
    pytest.param("single", signal.SIGTERM, 0, id="SIGTERM-single", marks=pytest.mark.slow),
    pytest.param("ddp", signal.SIGTERM, 0, id="SIGTERM-ddp", marks=pytest.mark.slow),
    pytest.param("single", signal.SIGINT, 1, id="SIGINT-single-with-a-loader-worker", marks=pytest.mark.slow),
    pytest.param("dp", signal.SIGHUP, 0, id="SIGHUP-dp", marks=pytest.mark.slow),
    pytest.param("ddp", signal.SIGUSR1, 1, id="SIGUSR1-ddp-with-a-loader-worker", marks=pytest.mark.slow),
]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("strategy", "number", "workers"), STOPS)
def test_a_signal_stops_the_run_promptly(train: Train, strategy: str, number: int, workers: int) -> None:
    devices = 1 if strategy == "single" else 2
    running = train.start(f"parallel={strategy}", f"parallel.devices={devices}", f"data.workers={workers}", *ENDLESS)
    running.wait_for_steps()
    done = running.signal(number)
    assert done.returncode == 128 + number, done.output
    assert done.seconds < 15
    assert done.result["status"] == "interrupted"
    assert signal.Signals(number).name in done.result["reason"]
    assert f"resume={done.folder}" in done.stderr
    assert "Traceback" not in done.output
    assert train.left_after(5) == []


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_a_signal_to_the_whole_group_does_the_same(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS, "data.workers=1")
    running.wait_for_steps()
    os.killpg(running.process.pid, signal.SIGINT)
    running.started = time.monotonic()
    done = running.finish()
    assert (done.returncode, done.result["status"]) == (130, "interrupted"), done.output
    assert train.left_after(5) == []


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_a_signal_before_the_ranks_have_started_stops_the_run(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS)
    running.wait_for(lambda: len(running.workers()) == 2)
    done = running.signal(signal.SIGINT)
    assert (done.returncode, done.result["status"]) == (130, "interrupted"), done.output
    assert train.left_after(5) == []


@pytest.mark.timeout(90)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_leaves_nothing(train: Train, number: int) -> None:
    running = train.start("parallel=ddp", *ENDLESS, form="torchrun")
    running.wait_for_steps()
    done = running.signal(number)
    assert done.returncode != 0
    assert done.result["status"] == "interrupted", done.output
    assert train.left_after(10) == []


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("single", marks=pytest.mark.slow)])
def test_nothing_survives_a_killed_launcher(train: Train, strategy: str) -> None:
    devices = 2 if strategy == "ddp" else 1
    running = train.start(f"parallel={strategy}", f"parallel.devices={devices}", "data.workers=1", *ENDLESS)
    running.wait_for_steps()
    before = len(psutil.Process(running.process.pid).children(recursive=True))
    assert before >= 2 * devices, "ranks and loader workers are running"
    running.process.kill()
    running.process.wait()
    assert train.left_after(10) == []


def _drift(ranks: Ranks, store: torch.distributed.Store, where: str, folder: str) -> str:
    from src.run.lifecycle import Training

    run = Training(resolved("parallel=ddp", "parallel.devices=2", "train.max_steps=2"), Path(folder), ranks, store)

    def spoil() -> None:
        with torch.no_grad():
            next(run.state.model.parameters()).add_(ranks.rank)

    if where == "start":
        spoil()
    else:
        ordinary: Callable[[], None] = run.evaluate_best

        def then_spoil() -> None:
            ordinary()
            spoil()

        run.evaluate_best = then_spoil  # type: ignore[method-assign]
    try:
        run.train()
    except RuntimeError as error:
        return str(error)
    return "not noticed"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["start", "end"])
def test_ranks_with_different_parameters_are_noticed(tmp_path: Path, where: str) -> None:
    assert all(
        f"the ranks {where} with different parameters" in said for said in in_ranks(_drift, 2, where, str(tmp_path))
    )
