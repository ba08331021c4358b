"""Every command on the pages, in examples/ and in the comments of conf/ is accepted: files, make
targets, options and keys in it exist, the config of each training is resolved, and scripts run for
a finished run. project/test_options.py trains a step with every option of conf/.

Other commands on the pages about extending the project need the code of these pages, see
tests/template/test_examples.py.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from pages import EXTEND_PAGES, all_commands, code_of, name_of, read

from src.app import app
from tests.template import cluster_commands
from tests.template.runs import ROOT, draw_images
from timm_parallel.checked_configs import check_config
from timm_parallel.config.compose import compose_command
from timm_parallel.config.explain import is_known
from timm_parallel.config.resolve import resolve
from timm_parallel.entry import run_command
from timm_parallel.lab.sweep.points import expand
from timm_parallel.testing.commands import Finished, Train
from timm_parallel.testing.configs import parse

COMMANDS = all_commands()
TRAINING = re.compile(r"(?:python|torchrun --nproc-per-node (\d+|N)) train\.py ?(.*)")
SCRIPT = re.compile(r"python (?:scripts/)?(plan|predict|export|compare_runs|evaluate)\.py ?(.*)")
# Trainings that need an earlier run or an optional package, or that print something instead.
NOT_RESOLVED = re.compile(r"resume=|wandb|mlflow|--(?!nproc)|[<…]")
# Commands of scripts that tests of these scripts run: they need other packages, data or seconds.
SCRIPTS_ELSEWHERE = re.compile(r"format=onnx|data\.root=/data/new|evaluation=slide|model=resnet18")
TRAININGS = [
    command
    for command in COMMANDS
    if TRAINING.fullmatch(command) and not NOT_RESOLVED.search(command)
]
SCRIPTS = [
    command
    for command in COMMANDS
    if SCRIPT.fullmatch(command) and not SCRIPTS_ELSEWHERE.search(command)
]
# Patterns of script commands that need no run, or ranks. test_report.py runs scripts/report.py.
ALONE, WITH_RANKS = "/plan", "evaluate.*parallel=ddp"
ON_A_RUN = "outputs/(…|train|finetune)|<run folder>"


# Files that are the user's, so they are not in the repository.
OF_THE_USER = {"args.yaml", "conf/local/default.yaml", "conf/local/slurm.sh"}
FILE = re.compile(r"[\w./-]+\.(py|sh|txt|lock|yaml|toml|ipynb|example)")
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_][a-z_0-9.]*)=(.*)")
# Commands of other programs, whose arguments are not checked.
FOREIGN = ("python src/eval.py", "python -c ")


def missing_names(command: str) -> list[str]:
    """Return the files, make targets, options and keys in a command that do not exist."""
    words = shlex.split(command)
    files = [word for word in words if FILE.fullmatch(word) and word not in OF_THE_USER]
    missing = [file for file in files if not (ROOT / file).is_file()]
    scripts = [read(file) for file in files if file.endswith(".py") and file not in missing]
    if words[0] == "make":
        target, *words = [word for word in words[1:] if word != "-s"]
        missing += {target} - make_targets()
        words = [part for word in words for part in shlex.split(word.removeprefix("ARGS="))]
    if command.startswith("python scripts/"):
        options = [word for word in words if word.startswith("--")]
        missing += [word for word in options if f'"{word}"' not in "".join(scripts)]
    for match in map(OVERRIDE.fullmatch, words if scripts else ()):
        if match is not None and not is_accepted(match[1], match[2], scripts):
            missing.append(match[0])
    return missing


def is_accepted(key: str, value: str, scripts: list[str]) -> bool:
    """Return True if one of the scripts takes the key, or it is a key or group."""
    if (ROOT / "conf" / key).is_dir():
        names = re.findall(r"[\w-]+", value)
        return all((ROOT / "conf" / key / f"{name}.yaml").is_file() for name in names)
    if is_known(key) or key.startswith("hydra."):
        return True
    # The pages write key=value for any override.
    return key == "key" or any(f'"--{key}"' in text for text in scripts)


def make_targets() -> set[str]:
    makefiles = [ROOT / "Makefile", *(ROOT / "scripts").glob("*/targets.mk")]
    return {
        target
        for path in makefiles
        for target in re.findall(r"^([a-z-]+):", read(path), re.MULTILINE)
    }


def test_documented_commands_name_existing_files_make_targets_options_and_keys() -> None:
    wrong = {
        command: missing
        for command in COMMANDS
        if not command.startswith(FOREIGN) and (missing := missing_names(command))
    }
    assert wrong == {}


def test_every_documented_command_of_a_script_runs_in_a_test_of_this_file() -> None:
    kinds = (ALONE, ON_A_RUN, WITH_RANKS)
    assert [
        command for command in SCRIPTS if not any(re.search(kind, command) for kind in kinds)
    ] == []


# The pages contain placeholders for the addresses and ports that the tests use.
PLACEHOLDERS = {"10.77.0.1": "<first node>", "29511": "29500"}


def test_cluster_commands_in_bash_blocks_equal_the_commands_that_tests_of_clusters_run() -> None:
    """The commands are constants of the tests, because a fork may replace the pages."""
    pages = ("docs/slurm.md", "CONTRIBUTING.md")
    lines = [line for page in pages for code in code_of(page, "bash") for line in code.splitlines()]
    cluster = r"dev_cluster\.sh|srun|torchrun|cluster=(slurm|kubernetes)"
    shown = [line.partition("  #")[0].rstrip() for line in lines if re.search(cluster, line)]
    tested = [value for name, value in vars(cluster_commands).items() if name.isupper()]
    for address, placeholder in PLACEHOLDERS.items():
        tested = [command.replace(address, placeholder) for command in tested]
    assert sorted(shown) == sorted(tested)


def test_no_documented_command_opens_tensorboard_to_other_machines() -> None:
    commands = [command for command in COMMANDS if command.startswith("tensorboard ")]
    assert commands
    assert [command for command in commands if re.search("--bind_all|--host", command)] == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow(seconds=1)) if " -m " in command else command
        for command in TRAININGS
    ],
)
def test_config_of_a_documented_training_command_is_resolved(command: str) -> None:
    """Of a sweep, the first job that can run on this machine is resolved."""
    match = TRAINING.fullmatch(command)
    assert match is not None
    parsed = parse(*shlex.split(match[2]))
    if not parsed.multirun:
        ranks = () if match[1] is None else (2, 2)
        assert resolve(compose_command(parsed).config, *ranks)
        return
    jobs = [point for point in expand(parsed)[1] if not point.reason]
    assert resolve(jobs[0].config)


# Commands that copy an example, and those after it.
COPIES = [
    (name_of(page), copied, commands.replace("\\\n", ""))
    for page in (*EXTEND_PAGES, *sorted((ROOT / "examples").glob("*.py")))
    for copied, commands in re.findall(
        r"^ *(cp examples/.*)\n((?: *\S.*\n)+)", read(page), re.MULTILINE
    )
]


@pytest.mark.parametrize(("page", "copied", "commands"), COPIES)
def test_config_of_a_copied_example_is_resolved(
    page: str, copied: str, commands: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for package in ("data", "models", "tasks", "train"):
        (tmp_path / "src" / package).mkdir(parents=True)
        path = [*importlib.import_module(f"src.{package}").__path__, f"{tmp_path}/src/{package}"]
        monkeypatch.setattr(f"src.{package}.__path__", path)
    subprocess.run(copied, shell=True, cwd=tmp_path, check=True, timeout=60)
    # A command may name a file of an earlier run.
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"=(outputs/\S+\.pt)", commands):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    found = [match[2] for match in TRAINING.finditer(commands)]
    trainings = [words for words in found if re.search(r"experiment=|=src\.", words)]
    # The page has the YAML of a tracker.
    assert trainings or "tracker=" in commands or "tracker" in copied
    for words in trainings:
        given = parse(*shlex.split(words), "--config-dir", str(tmp_path / "conf"))
        config = compose_command(given).config
        check_config(config)
        assert resolve(config)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, in train/ and val/, and in a CSV with folds and numbers."""
    root = tmp_path_factory.mktemp("photos")
    draw_images(root, "train/rose", "train/tulip", "val/rose", "val/tulip", count=8, size=40)
    rows = ["file,label,fold,age"]
    for number, file in enumerate(sorted(root.rglob("*.png"))):
        rows.append(f"{file.relative_to(root)},{file.parent.name},{number % 5},{number}")
    (root / "labels.csv").write_text("\n".join(rows))
    return root


# Dictionary from a pattern of placeholders on the pages to the path that replaces it.
STANDS_FOR = {
    r"outputs/(?:train|finetune)/(2026-01-01/\S+|<date>/<time>)|outputs/…|<run folder>": "{run}",
    r"photos/|/data/new(?= )": "{photos}",
    r"(labels|predictions)\.csv": r"{new}/\1.csv",
    r"key=value …": "model=tiny",
    r"data\.root=/data/imagenet": "data.root={photos}",
    r"model\.name=resnet50 model\.pretrained=true": "model.name=resnet10t model.weights={weights}",
}
# Dictionary from a script to a text that its output must contain.
SAYS = {
    "plan": "per device",
    # predict.py prints the name of the file that it has written.
    "predict": "labels.csv",
    "export": "verified equal",
    "compare_runs": "agree",
    "evaluate": '"acc": ',
}


def scripts_like(pattern: str) -> list[str]:
    """Return the commands that match, with test paths and without duplicates."""
    actual = set()
    for command in (command for command in SCRIPTS if re.search(pattern, command)):
        for shown, here in STANDS_FOR.items():
            command = re.sub(shown, here, command)
        assert not re.search(r"[<>…]", command), command
        actual.add(command)
    return sorted(actual)


def arguments_of(command: str, **places: Path) -> tuple[str, list[str]]:
    """Split a command into (script, arguments) with test paths filled in."""
    match = SCRIPT.fullmatch(command)
    assert match is not None
    return match[1], shlex.split(match[2].format(**places))


def check(command: str, capsys: pytest.CaptureFixture[str], **places: Path) -> None:
    """Run `main` of the script in this process and check that it prints its result."""
    name, arguments = arguments_of(command, **places)
    script = importlib.import_module(name if name == "evaluate" else f"scripts.{name}")
    code, output = script.main(arguments), capsys.readouterr()
    assert code == 0, output.err
    written = [
        path for word in arguments if (path := Path(word.partition("=")[2])).name == SAYS[name]
    ]
    assert SAYS[name] in output.out or (written and written[0].stat().st_size > 0), output


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", scripts_like(ALONE))
@pytest.mark.slow(seconds=2)
def test_documented_plan_py_command_prints_memory_per_device(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(command, capsys)


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("command", scripts_like(ON_A_RUN))
def test_documented_script_command_prints_or_writes_a_result_for_a_finished_run(
    command: str,
    finished_run: Finished,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished_run.folder, tmp_path / "run")
    check(command, capsys, run=tmp_path / "run", photos=photos, new=tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("command", scripts_like(WITH_RANKS))
def test_documented_evaluate_command_runs_on_two_ddp_ranks(
    command: str, photos: Path, tmp_path: Path, train: Train
) -> None:
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), tmp_path / "weights.pt")
    name, arguments = arguments_of(command, photos=photos, weights=tmp_path / "weights.pt")
    arguments += ["data.image_size=32", "parallel.devices=2"]
    done = train.start_command([sys.executable, f"{name}.py", *arguments], tmp_path).finish()
    assert done.returncode == 0, done.output
    assert SAYS[name] in done.stdout and '"world_size": 2' in done.stdout


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("command", [command for command in COMMANDS if "dry_run=true" in command])
def test_sweep_dry_run_lists_the_jobs_of_the_sweep(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    assert run_command(app) == 0
    assert "optim.lr=0.0001,seed=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.startswith("python -c")]
)
def test_documented_python_one_liner_prints_true(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(shlex.split(command)[2])
    assert capsys.readouterr().out.strip() == "True"
