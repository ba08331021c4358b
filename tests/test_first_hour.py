"""What somebody meets in the first hour: the installer, the config's tree, the bar, and words instead of riddles."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Train, in_ranks, resolved
from omegaconf import OmegaConf
from torch import Tensor, nn

from scripts.maintain.install import settings_for_uv
from src.engine.launch.rank import Stdout
from src.engine.machine.ranks import Ranks
from src.engine.record.console import Console, print_config
from src.engine.record.jobs import Jobs
from src.engine.record.result import Result
from src.engine.sweep.board import Board, show_points
from src.engine.sweep.packing import Packing
from src.engine.sweep.points import Point
from src.parallel.reporting import unused_parameters
from src.run.plan import show
from src.run.proof import show_end
from src.schema import Config

ROOT = Path(__file__).resolve().parents[1]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


# --- installing


def test_uv_is_handed_what_pip_is_told() -> None:
    listed = (
        ":env:.find-links='/opt/wheels'\nglobal.index-url='https://mirror/simple'\nglobal.timeout='60'\n"
        "global.extra-index-url='https://one/simple\\nhttps://two/simple'\nuser.trusted-host='mirror'\n"
    )
    assert settings_for_uv(listed) == {
        "UV_FIND_LINKS": "/opt/wheels",
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_INSECURE_HOST": "mirror",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert settings_for_uv("") == {}


@pytest.mark.processes
@pytest.mark.parametrize(("uv_works", "asked"), [(True, ["uv==", "uv pip"]), (False, ["uv==", "uv pip", "-r wanted"])])
def test_pip_is_the_way_back(tmp_path: Path, uv_works: bool, asked: list[str]) -> None:
    """pip and uv are stand-ins that write down what they are asked, ahead of the real ones on the path."""
    note = tmp_path / "note"
    for name, code in (("pip", 0), ("uv", 0 if uv_works else 2)):
        text = f"import sys\nopen({str(note)!r}, 'a').write('{name} ' + ' '.join(sys.argv[1:]) + '\\n')\nsys.exit({code})\n"
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "maintain" / "install.py"), "wanted.txt"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in note.read_text().splitlines() if "config list" not in line]
    assert len(lines) == len(asked)
    assert all(words in line for words, line in zip(asked, lines, strict=True))
    assert "--compile-bytecode" in lines[1], "else every process may have to, as pip knows"


# --- what is shown


def test_the_config_is_shown_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolved("parallel=single", "optim.lr=0.25", "model.ema.decay=0.5")
    print_config(config, full=False)
    short = capsys.readouterr().out
    print_config(config, full=True)
    long = capsys.readouterr().out
    assert "lr: 0.25" in short
    assert re.search(r"ema\n.*decay: 0.5", short)
    assert "weight_decay" not in short
    assert "weight_decay: 0.05" in long
    assert len(short.splitlines()) < 30 < len(long.splitlines())


def test_what_a_terminal_takes_for_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_config(resolved("parallel=single", "tags=['a:b:c','[red]','[/x]']"), full=False)
    assert "tags: ['a:b:c', '[red]', '[/x]']" in capsys.readouterr().out
    Board(Jobs(Path(), "", []), Packing({"cpu": ["0"]})).say("a:b:c [/x]")
    show_points([Point(["x=a:b:c"], "0", OmegaConf.create(), Config(), "[/x]")], lambda data: None)
    refused = SimpleNamespace(bytes=None, devices=2, reason="a:b:c [/x]", warnings=[])
    show([refused])  # type: ignore[list-item]
    said = capsys.readouterr().out
    assert said.count("a:b:c") == 3 and said.count("[/x]") == 3, said


@pytest.mark.parametrize(
    ("loss", "said"), [(0.02, "reached: train/loss 0.0200"), (1.5, "not reached: train/loss 1.5000")]
)
def test_overfitting_says_whether_it_got_there(loss: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    config = resolved("debug=overfit", "parallel=single")
    result = Result("done", train={"loss": loss}, val={"acc": 0.5, "acc_best": 0.5})
    with caplog.at_level(logging.INFO):
        show_end(config, Path("outputs/x"), result)
    assert any(line.partition(" ")[2].strip().startswith(said) for line in caplog.messages), caplog.messages


def test_lines_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's handler was made before the bar; written past it, a line would continue the bar's."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    log = logging.Logger("test")
    log.addHandler(Stdout())
    with Console(True, total_steps=10, first_step=0) as console:
        console.step(3, 0.5, 1234.0)
        assert list(console.counted("val", range(4), 4)) == [0, 1, 2, 3]
        log.info("epoch 1/2")
    log.info("afterwards")
    text = terminal.getvalue()
    assert re.search(r"(\n|\x1b\[2K)epoch 1/2\s*\n", text), text
    assert "steps" in text.split("epoch 1/2")[1], "the bar is drawn again below the line"
    assert text.endswith("afterwards\n")


def test_no_bar_when_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with Console(True, total_steps=10, first_step=0) as console:
        console.step(3, 0.5, None)
        assert list(console.counted("val", "ab", 2)) == ["a", "b"]
    assert file.getvalue() == ""


def test_this_machines_own_settings_have_an_example(tmp_path: Path) -> None:
    from hydra._internal.utils import get_args_parser

    from src.engine.config.compose import compose_command

    (tmp_path / "local").mkdir()
    text = (ROOT / "conf" / "local" / "default.yaml.example").read_text(encoding="utf-8")
    (tmp_path / "local" / "default.yaml").write_text(text.replace("output_dir: outputs", "output_dir: /elsewhere"))
    config = compose_command(get_args_parser().parse_args(["--config-dir", str(tmp_path)])).config
    assert config.paths.output_dir == "/elsewhere"


# --- words instead of riddles


@pytest.mark.processes
@pytest.mark.parametrize("word", ["--local-rank=0", "--local_rank=0"])
def test_the_old_launcher_is_refused_by_naming_the_new(train: Train, word: str) -> None:
    done = train.start_command([sys.executable, "train.py", word, "parallel=ddp"], train.base).finish()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "torchrun --nproc-per-node N train.py parallel=ddp" in done.stderr


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.used(images)  # type: ignore[no-any-return]


def two_steps(ranks: Ranks, store: object, find: bool) -> str:
    """What the second step says."""
    from src.parallel import build_strategy
    from src.schema import ParallelConfig

    config = ParallelConfig(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        threads_per_device=1,
        backend="gloo",
        find_unused_parameters=find or None,
    )
    strategy = build_strategy(config, ranks, store)  # type: ignore[arg-type]
    wrapped = strategy.wrap(HalfUsed(), nn.functional.cross_entropy, None)
    try:
        for _ in range(2):
            wrapped(torch.ones(2, 4), torch.tensor([0, 1])).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        strategy.close()
    return "trained"


@pytest.mark.processes
def test_a_parameter_without_a_gradient_is_named_with_the_remedy() -> None:
    for said in in_ranks(two_steps, 2, False):
        assert said.startswith("no gradient reached idle.weight, idle.bias:")
        assert "parallel.find_unused_parameters=true" in said
        assert "\n" not in said
    assert in_ranks(two_steps, 2, True) == ["trained", "trained"]


def test_other_errors_name_no_parameter() -> None:
    assert unused_parameters("Expected all tensors to be on the same device", HalfUsed()) == []


@pytest.mark.parametrize(
    ("words", "task"), [((), "train"), (("debug=fast",), "debug"), (("task_name=mine", "debug=fast"), "mine")]
)
def test_a_preset_names_its_task(words: tuple[str, ...], task: str) -> None:
    """conf/train.yaml names one too, and must not win over what was chosen."""
    assert resolved(*words).task_name == task
