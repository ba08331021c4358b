"""Which run goes on, with which settings, and which is refused: train.py's main run here, up to where ranks would start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train as entry
from src.engine.config.compose import freeze, read_frozen
from src.engine.launch import job
from src.engine.machine import hardware
from src.engine.machine.lock import own
from src.engine.machine.ranks import NEEDED
from src.engine.record.result import Result, write_result
from src.schema import Config

WORDS = ("model=tiny", "parallel=single", "parallel.accelerator=cpu", "data.batch_size=32", "print_config=false")


@dataclass
class Main:
    """`main(words)`: (exit code, stderr). In place of its ranks, a run saves a checkpoint and is then `status`."""

    command: Callable[[tuple[str, ...]], tuple[int, str]]
    status: str = "interrupted"
    saves: bool = True
    ran: list[Path] = field(default_factory=list)

    def __call__(self, *words: str) -> tuple[int, str]:
        return self.command(words)

    def run(self, config: Config, folder: Path) -> int:
        self.ran.append(folder)
        freeze(config, folder)
        if self.saves:
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / "last.pt").write_bytes(b"a checkpoint")
        write_result(folder, Result(status=self.status))
        return 0

    def start(self, name: str, *words: str, status: str = "interrupted", saves: bool = True) -> Path:
        """A new run in outputs/train/<name>."""
        self.status, self.saves = status, saves
        code, said = self(*WORDS, f"hydra.run.dir=outputs/train/{name}", *words)
        assert code == 0, said
        return self.ran[-1].resolve()


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    monkeypatch.chdir(tmp_path)
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())

    def command(words: tuple[str, ...]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        capsys.readouterr()
        code = entry.main()
        return code, capsys.readouterr().err

    made = Main(command)
    monkeypatch.setattr(job, "run_job", made.run)
    return made


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_in_its_folder_with_the_words_it_was_started_with(main: Main) -> None:
    folder = main.start("day/1", "optim.lr=0.25", "train.epochs=3")
    before = read_frozen(folder)
    code, said = main(f"resume={folder}")
    assert (code, said) == (0, ""), "nothing has changed, so nothing is said"
    assert main.ran == [main.ran[0], folder]
    after = read_frozen(folder)
    assert after.resume == str(folder)
    after.resume = before.resume
    assert after == before


def test_the_last_word_on_resume_counts(main: Main) -> None:
    """As of any key that is given twice; a new run has nothing of the folder that is not meant after all."""
    folder = main.start("day/1", "optim.lr=0.25")
    code, said = main(f"resume={folder}", *WORDS, "resume=null", "hydra.run.dir=outputs/train/day/2")
    assert (code, said) == (0, "")
    assert main.ran[-1].resolve() != folder and read_frozen(main.ran[-1]).optim.lr == Config().optim.lr


ANOTHER_TRAINING = [
    ("model=resnet18", "model.name"),
    ("model.ema.decay=0.9", "model.ema.decay"),
    ("+model.kwargs.drop_rate=0.1", "model.kwargs"),
    ("data=synthetic", "data.name"),
    ("data.batch_size=64", "data.batch_size"),
    ("data.limit_train=100", "data.limit_train"),
    ("data.augment.hflip=0.5", "data.augment.hflip"),
    ("seed=7", "seed"),
]


def test_what_would_be_another_training_is_refused_by_key(main: Main) -> None:
    folder = main.start("day/1")
    before = contents(folder)
    for word, key in ANOTHER_TRAINING:
        code, said = main(f"resume={folder}", word)
        assert code == 2, word
        assert len(said.splitlines()) == 1
        assert said.startswith(f"train.py: {key}=") and "was " in said
        assert "resume_strict=false" in said
        assert contents(folder) == before, f"a refused command changes nothing: {word}"
    assert len(main.ran) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(("word", "key"), [ANOTHER_TRAINING[index] for index in (0, 3, 4)])
def test_resume_strict_false_lets_it_go_on_and_says_what_changed(main: Main, word: str, key: str) -> None:
    folder = main.start("day/1")
    code, said = main(f"resume={folder}", word, "resume_strict=false")
    assert code == 0, said
    assert f"resume: {key}: " in said
    assert main.ran[-1] == folder
    code, said = main(f"resume={folder}")
    assert code == 0, f"{word} is one of this run's words now: {said}"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data.workers=2",), "data.workers: auto -> 2"),
        (("model.compile=true",), "model.compile: False -> True"),
        (("parallel=ddp", "parallel.devices=2"), "parallel.strategy: single -> ddp"),
        (("parallel=dp", "parallel.devices=4"), "parallel.devices: 1 -> 4"),
        (("train.epochs=40",), "train.epochs: 8 -> 40"),
        (("optim.lr=0.5",), "optim.lr: 0.001 -> 0.5"),
    ],
)
def test_what_leaves_the_training_the_same_may_change_and_is_said(
    main: Main, words: tuple[str, ...], said: str
) -> None:
    folder = main.start("day/1")
    code, err = main(f"resume={folder}", *words)
    assert code == 0, err
    assert f"resume: {said}" in err.splitlines()
    assert main.ran[-1] == folder


def test_the_images_may_have_moved(main: Main, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "here" / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "here" / split / name / "1.png")
    folder = main.start("day/1", "data=folder", "data.root=here", "data.batch_size=1")
    (tmp_path / "here").rename(tmp_path / "there")
    code, said = main(f"resume={folder}")
    assert code == 2 and "data.root=here" in said
    code, said = main(f"resume={folder}", "data.root=there")
    assert code == 0, said
    assert said.splitlines() == ["resume: data.root: here -> there"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("devices", [1, 4])
def test_another_global_batch_through_the_batch_per_device_is_refused(main: Main, devices: int) -> None:
    per_device = ("data.batch_size=null", "data.batch_size_per_device=16", "parallel=ddp", "parallel.devices=2")
    folder = main.start("day/1", *per_device)
    code, said = main(f"resume={folder}", f"parallel.devices={devices}")
    assert code == 2, said
    assert said.startswith(f"train.py: parallel.devices={devices}: ") and "resume_strict=false" in said
    assert f"data.batch_size_per_device=16 the global batch {devices * 16} (was 32)" in said
    half = f"data.batch_size_per_device={32 // devices}"
    code, said = main(f"resume={folder}", f"parallel.devices={devices}", half)
    assert code == 2 and said.startswith(f"train.py: {half} (was 16)"), "refused by the key that was given"


def test_auto_takes_the_newest_run_that_has_not_ended(main: Main) -> None:
    main.start("2026-01-01/09-00-00")
    newest = main.start("2026-01-02/08-00-00", status="failed")
    main.start("2026-01-02/09-00-00", status="done")
    main.start("2026-01-03/09-00-00", "seed=7")
    main.start("2026-01-03/10-00-00", saves=False)
    main.start("2026-01-03/11-00-00", "task_name=other", "hydra.run.dir=outputs/other/2026-01-03/11-00-00")
    code, said = main(*WORDS, "resume=auto")
    assert code == 0, said
    assert main.ran[-1].resolve() == newest


def test_auto_leaves_a_run_that_differs_in_any_key(main: Main) -> None:
    """Two jobs of one task that are queued again together must not swap folders."""
    slow = main.start("2026-01-01/09-00-00", "optim.lr=0.1")
    fast = main.start("2026-01-02/09-00-00", "optim.lr=0.2")
    for word, folder in (("optim.lr=0.1", slow), ("optim.lr=0.2", fast)):
        assert main(*WORDS, "resume=auto", word)[0] == 0
        assert main.ran[-1].resolve() == folder
    code, said = main(*WORDS, "resume=auto", "optim.lr=0.3")
    assert code == 0 and main.ran[-1].resolve() not in (slow, fast)
    assert "has optim.lr=0.2" in said and "starting a new one" in said


@pytest.mark.parametrize(("strategy", "options"), [("ddp", ("parallel.bucket_cap_mb=1",)), ("dp", ("parallel.dim=0",))])
def test_another_strategy_is_not_refused_for_the_devices_and_options_of_the_first(
    main: Main, strategy: str, options: tuple[str, ...]
) -> None:
    folder = main.start("day/1", f"parallel={strategy}", "parallel.devices=2", *options)
    code, said = main(f"resume={folder}", "parallel=single")
    assert code == 0, said
    assert read_frozen(folder).parallel.devices == 1
    assert main(f"resume={folder}", "parallel=single", "parallel.devices=2")[0] == 2, "asked for now"


def test_auto_goes_on_with_a_run_that_was_killed_before_it_could_say_how_it_ended(main: Main) -> None:
    folder = main.start("2026-01-01/09-00-00")
    (folder / "result.json").unlink()
    assert main(*WORDS, "resume=auto")[0] == 0
    assert main.ran[-1].resolve() == folder


def test_auto_passes_over_a_run_that_somebody_else_holds(main: Main) -> None:
    older = main.start("2026-01-01/09-00-00")
    with own(main.start("2026-01-02/09-00-00")):
        assert main(*WORDS, "resume=auto")[0] == 0
    assert main.ran[-1].resolve() == older


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", [None, "", "modle: {}", "train: [1"])
def test_auto_passes_over_a_run_whose_config_cannot_be_read(main: Main, text: str | None) -> None:
    older = main.start("2026-01-01/09-00-00")
    config = main.start("2026-01-02/09-00-00") / "config.yaml"
    config.unlink() if text is None else config.write_text(text)
    code, said = main(*WORDS, "resume=auto")
    assert code == 0, said
    assert main.ran[-1].resolve() == older
    assert "2026-01-02/09-00-00" in said or text == "", "an empty config is one with other settings"


def test_auto_starts_a_new_run_and_says_so_when_all_have_ended(main: Main) -> None:
    done = main.start("2026-01-01/09-00-00", status="done")
    before = contents(done)
    code, said = main(*WORDS, "resume=auto")
    assert code == 0
    assert said == "resume=auto: no unfinished run of train; starting a new one\n"
    assert main.ran[-1].resolve() != done and contents(done) == before


def test_a_run_without_a_checkpoint_is_refused_with_advice(main: Main) -> None:
    folder = main.start("day/1", saves=False)
    code, said = main(f"resume={folder}")
    assert code == 2 and len(said.splitlines()) == 1
    assert f"resume={folder}: it has no checkpoint" in said and "start anew" in said


@pytest.mark.parametrize("name", ["nowhere", "empty", "a_file", "half_written", "not_yaml"])
def test_what_is_no_run_folder_is_refused_with_advice(main: Main, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("text")
    for broken, text in (("half_written", ""), ("not_yaml", "- [1")):
        (tmp_path / broken / ".hydra").mkdir(parents=True)
        (tmp_path / broken / ".hydra" / "overrides.yaml").write_text(text)
        (tmp_path / broken / ".hydra" / "hydra.yaml").write_text(text)
    before = contents(tmp_path)
    code, said = main(f"resume={name}")
    assert code == 2 and len(said.splitlines()) == 1
    assert said.startswith(f"train.py: resume={name}: not a run folder") and "outputs/" in said
    assert main.ran == [] and contents(tmp_path) == before
