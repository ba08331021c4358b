"""Installation, commands, printed config and errors, which a new user meets first."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from scripts.install import main as install
from scripts.install import settings_for_uv
from src.schema import AugmentConfig, Config
from tests.template.runs import ROOT, resolved, run_python
from timm_parallel.config.compose import compose_command, plain_config
from timm_parallel.config.resolve import resolve
from timm_parallel.data import decode
from timm_parallel.data.decode import Files
from timm_parallel.keys import SweepConfig, leaves
from timm_parallel.lab.multirun import show_points
from timm_parallel.lab.sweep.board import Board
from timm_parallel.lab.sweep.points import Point
from timm_parallel.machine import hardware
from timm_parallel.record.console import print_config
from timm_parallel.record.result import Jobs, Result
from timm_parallel.run.banner import describe_wait
from timm_parallel.run.run_result import speed_without_wait
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import RANK_VARIABLES


def test_install_passes_pip_settings_to_uv_as_environment_variables() -> None:
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


@pytest.mark.parametrize("fits", [True, False])
def test_install_requires_hashes_of_a_lock_file_and_refuses_an_outdated_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fits: bool
) -> None:
    (tmp_path / "wanted.txt").write_text(f"# A comment\nrich==15.0.{0 if fits else 1}\n")
    (tmp_path / "wanted.lock").write_text("rich==15.0.0 \\\n    --hash=sha256:00\n")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        # Let uv fail, so that the installation tries pip next.
        return SimpleNamespace(returncode=int("uv" in command), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert install(str(tmp_path / "wanted.lock")) == (0 if fits else 2)
    installs = [command for command in commands if str(tmp_path / "wanted.lock") in command]
    assert ["uv" in command for command in installs] == ([True, False] if fits else [])
    assert all("--require-hashes" in command for command in installs)
    assert ("rich==15.0.1" in capsys.readouterr().err) != fits


@pytest.mark.processes
@pytest.mark.parametrize(
    ("uv_works", "asked"), [(True, ["uv==", "uv pip"]), (False, ["uv==", "uv pip", "-r wanted"])]
)
def test_install_falls_back_to_pip_when_uv_fails(
    tmp_path: Path, uv_works: bool, asked: list[str]
) -> None:
    note = tmp_path / "note"
    for name, code in (("pip", 0), ("uv", 0 if uv_works else 2)):
        text = (
            f"import sys\nopen({str(note)!r}, 'a').write('{name} ' + ' '.join(sys.argv[1:]) + "
            f"'\\n')\nsys.exit({code})\n"
        )
        (tmp_path / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_python("scripts/install.py", "wanted.txt", environment=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in note.read_text().splitlines() if "config list" not in line]
    assert len(lines) == len(asked)
    assert all(words in line for words, line in zip(asked, lines, strict=True))
    assert not any("--require-hashes" in line for line in lines)
    assert "--compile-bytecode" in lines[1], (
        "expected compilation at installation, because otherwise every process would compile"
    )


def test_schema_defaults_equal_the_config_of_a_run_without_overrides() -> None:
    plain, schema = (
        {key: value for key, value, _ in leaves(config)} for config in (plain_config(), Config())
    )
    # Only two values may differ. The digits dataset sets the image size, and the tracker option
    # sets the name of the tracker, because both are chosen by default.
    assert {key for key in plain if plain[key] != schema[key]} == {"data.image_size", "tracker.use"}


def printed_values(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """Return the values that print_config=true prints, as texts `<dotted key>: <value>`."""
    asked = compose_command(parse(*overrides)).config
    capsys.readouterr()
    print_config(asked, resolve(asked))
    return [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]


AUTO = ["parallel.strategy: single (auto)", "parallel.devices: 1 (auto)"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", AUTO),
        (
            "data.image_size=32 train.epochs=8 optim.lr=0.25 model.ema.decay=0.5",
            ["model.ema.decay: 0.5", *AUTO, "optim.lr: 0.25"],
        ),
        (
            "optim.warmup_epochs=0 tracker=none",
            [*AUTO, "optim.warmup_epochs: 0.0", "tracker.use: {}"],
        ),
    ],
)
def test_print_config_shows_only_what_the_user_or_a_chosen_option_changed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    assert printed_values(capsys, *overrides.split()) == expected


def test_print_config_full_shows_all_resolved_values(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_values(capsys, "print_config=full", "parallel=single")
    assert len(lines) > 100
    assert {"parallel.devices: 1", "parallel.backend: gloo", "optim.weight_decay: 0.05"} <= {*lines}


def test_speed_without_the_wait_is_that_of_the_rank_that_waits_most() -> None:
    ranks = [{"data_ms": 1.0, "step_ms": 10.0}, {"data_ms": 6.0, "step_ms": 10.0}]
    assert speed_without_wait(400.0, ranks) == pytest.approx(1000)
    assert speed_without_wait(None, [{"data_ms": None, "step_ms": None}]) is None
    assert speed_without_wait(50.0, [{"data_ms": 8.0, "step_ms": 8.0}]) is None


@pytest.mark.parametrize(
    ("kind", "workers", "codec", "named", "unnamed"),
    [
        ("files", 2, False, ["data.workers=6", "torchcodec"], ["data.augment"]),
        ("files", 6, True, ["image files"], ["data.workers", "torchcodec"]),
        ("transformed", 1, True, ["data.workers=6", "data.augment"], ["torchcodec", "files"]),
        ("gathered", 0, False, [], ["data.", "torchcodec", "files"]),
    ],
)
def test_run_names_the_keys_that_help_when_a_gpu_waits_for_data_a_tenth_of_the_time(
    kind: str,
    workers: int,
    codec: bool,
    named: list[str],
    unnamed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 12)
    monkeypatch.setattr(decode, "find_jpeg_decoder", lambda: print if codec else None)
    fetcher = SimpleNamespace(
        split=Files([(Path("a.jpg"), 0)]) if kind == "files" else None,
        gathers=kind == "gathered",
        in_memory=None if kind == "files" else "rows",
    )
    device = SimpleNamespace(type="cuda")
    parts: Any = SimpleNamespace(
        strategy=SimpleNamespace(device=device, group=SimpleNamespace(local_world_size=2)),
        train_loader=SimpleNamespace(fetcher=fetcher, num_workers=workers),
    )

    def told(without: float | None) -> str | None:
        speed = {"images_per_sec": 800.0}
        result = Result("done", throughput=speed, images_per_sec_without_wait=without)
        return describe_wait(parts, result)

    line = told(1000.0)
    assert line is not None and "20%" in line
    assert all(text in line for text in named) and not any(text in line for text in unnamed), line
    assert told(880.0) is None and told(None) is None
    # On a CPU, loading and training share the cores.
    device.type = "cpu"
    assert told(1000.0) is None


def test_console_prints_brackets_literally_instead_of_as_rich_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "tags: ['a:b:c', '[red]', '[/x]']" in printed_values(
        capsys, "tags=['a:b:c','[red]','[/x]']"
    )
    Board(Jobs(Path(), "", [])).say("a:b:c [/x]")
    shown = [
        Point([f"x={text}"], "0", OmegaConf.create(), Config(), reason)
        for text, reason in (("a:b:c", "[/x]"), ("b", "b"))
    ]
    show_points(shown, SweepConfig())
    output = capsys.readouterr().out
    assert output.count("a:b:c") == 2 and output.count("[/x]") == 2, output


def test_overfit_preset_turns_label_smoothing_and_every_augmentation_off() -> None:
    preset = yaml.safe_load((ROOT / "conf" / "debug" / "overfit.yaml").read_text())
    assert preset["data"]["augment"] == asdict(AugmentConfig())
    assert preset["train"]["smoothing"] == 0
    assert resolved("debug=overfit").task_name == "debug"
    assert resolved("debug=overfit", "task_name=mine").task_name == "mine"


def test_example_of_conf_local_default_yaml_composes_with_changed_output_dir(
    tmp_path: Path,
) -> None:
    (tmp_path / "local").mkdir()
    text = (ROOT / "conf" / "local" / "default.yaml.example").read_text(encoding="utf-8")
    (tmp_path / "local" / "default.yaml").write_text(
        text.replace("output_dir: outputs", "output_dir: /elsewhere")
    )
    config = compose_command(parse("--config-dir", str(tmp_path))).config
    assert config.paths.output_dir == "/elsewhere"


TRAIN = ROOT / "train.py"

# Script that runs train.py and then prints which of torch, timm and torchvision were imported.
SPY = """
import runpy, sys
sys.argv = sys.argv[1:]
code = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as leave:
    code = leave.code or 0
print("\\nimported:", *sorted({"torch", "timm", "torchvision"} & set(sys.modules)))
sys.exit(code)
"""


def run_process(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run train.py in an empty folder. It must import neither torch nor timm, and write nothing."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["PYTHONPATH"] = str(ROOT)
    done = run_python("-c", SPY, str(TRAIN), *words, cwd=cwd, environment=environment)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
    assert list(cwd.iterdir()) == []
    return done


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            "parallel=ddp parallel.devices=2 data.batch_size=63 parallel.accelerator=cpu",
            "data.batch_size=63",
        ),
        ("model.name=resnet81", "resnet18"),
        ("data=folder data.root=/missing", "/missing/train"),
    ],
)
def test_invalid_command_fails_quickly_without_importing_torch(
    tmp_path: Path, command: str, named: str
) -> None:
    started = time.monotonic()
    done = run_process(*command.split(" "), cwd=tmp_path, code=2)
    seconds = time.monotonic() - started
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr and done.stdout.split() == ["imported:"]
    assert seconds < 10, (
        "expected about 1 s on an idle machine; more than 10 s suggests an import of torch"
    )


@pytest.mark.processes
def test_help_shows_options_and_cfg_job_all_keys_without_importing_torch(tmp_path: Path) -> None:
    done = run_process("--help", cwd=tmp_path)
    assert done.stderr == ""
    for group in ("model", "data", "parallel", "optim", "experiment", "debug"):
        options = sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
        assert re.search(rf"^{group}: {', '.join(options)}$", done.stdout, re.MULTILINE), group
    assert len(re.findall(r"^\s+python train\.py", done.stdout, re.MULTILINE)) >= 3
    done = run_process("--cfg", "job", "parallel=ddp", "optim.lr=0.25", cwd=tmp_path)
    for line in ("  strategy: ddp", "  lr: 0.25", "  smoothing: 0.0", "seed: 42"):
        assert line in done.stdout.splitlines(), line


@pytest.mark.slow(seconds=1)
def test_bash_completion_installs_and_lists_parallel_strategies(tmp_path: Path) -> None:
    done = run_process("--shell-completion", "install=bash", cwd=tmp_path)
    assert "COMP_WORDBREAKS" in done.stdout
    environment = {"COMP_LINE": "python train.py parallel=", "COMP_POINT": "25"}
    environment["PATH"] = os.environ["PATH"]
    words = (str(TRAIN), "--shell-completion", "query=bash")
    done = run_python(*words, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert {"parallel=ddp", "parallel=dp", "parallel=single"} <= set(done.stdout.split())
    assert list(tmp_path.iterdir()) == []
