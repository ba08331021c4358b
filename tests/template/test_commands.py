"""Every command on the pages and in the comments of conf/ is accepted: files, make targets, options
and keys in it exist, each training takes a step, and scripts run for a finished run.

Commands on the pages about extending the project need the code of these pages, see
tests/template/test_extend_pages.py.
"""

from __future__ import annotations

import importlib
import math
import re
import shlex
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from pages import PAGES, all_commands, code_of, commands_of, read, spans
from PIL import Image

from src.app import app
from src.schema import ResolvedConfig
from src.train.build import build_run
from src.train.loop import run_steps
from src.train.step import AUTOCAST, Autocast
from timm_parallel.config.compose import compose_command
from timm_parallel.config.resolve import resolve
from timm_parallel.config.suggest import is_known
from timm_parallel.entry import run_command
from timm_parallel.keys import SearchConfig, SweepConfig, is_timm_dataset
from timm_parallel.lab.sweep.points import expand
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.build import build_strategy
from timm_parallel.project import as_resolved
from timm_parallel.testing import cluster_commands
from timm_parallel.testing.commands import ROOT, Finished, Train
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import in_ranks

COMMANDS = all_commands()
TRAINING = re.compile(r"(?:python|torchrun --nproc-per-node (\d+|N)) train\.py ?(.*)")
SCRIPT = re.compile(
    r"python (?:scripts/)?(plan|predict|export|compare_runs|report|evaluate)\.py ?(.*)"
)
# Trainings that need a cluster, a server, an earlier run or minutes, or that train nothing. They
# are only composed, or their keys are checked.
NOT_HERE = re.compile(
    r"cluster=(slurm|kubernetes)|tracker=(wandb|mlflow|\[)|resume=|debug=profile|dry_run|"
    "experiment=tune|--|[…]"
)
# Scripts with arguments that need other packages, or many seconds on large models.
NOT_HERE_EITHER = re.compile(r"format=onnx|data\.root=/data/new|evaluation=slide|model=resnet18")
TRAININGS = [
    command
    for command in COMMANDS
    if TRAINING.fullmatch(command) and not NOT_HERE.search(command.partition("train.py")[2])
]
SCRIPTS = [
    command
    for command in COMMANDS
    if SCRIPT.fullmatch(command) and not NOT_HERE_EITHER.search(command)
]
LARGE = re.compile("experiment=(small_layers|buckets|scaling_|imagenet_|finetune_)|-m seed=")
# Patterns of script commands that need no run, a sweep, or ranks.
ALONE, ON_A_SWEEP, WITH_RANKS = "/plan", "/report", "evaluate.*parallel=ddp"
ON_A_RUN = "outputs/(…|train|finetune)|<run folder>"


# --- names in commands


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
    """Return True if one of the scripts takes the key: as an option of its own, as a config key, or
    as a config group that has the option.
    """
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
    kinds = (ALONE, ON_A_RUN, ON_A_SWEEP, WITH_RANKS)
    assert [
        command for command in SCRIPTS if not any(re.search(kind, command) for kind in kinds)
    ] == []


# The pages contain placeholders for the addresses and ports that the tests use.
PLACEHOLDERS = {"10.77.0.1": "<first node>", "29511": "29500"}


def test_cluster_commands_in_bash_blocks_equal_the_commands_that_tests_of_clusters_run() -> None:
    """The commands are constants of the tests, because a fork may replace the pages."""
    pages = ("docs/slurm.md", "docs/kubernetes.md", "CONTRIBUTING.md")
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
        command
        for command in COMMANDS
        if TRAINING.fullmatch(command)
        and command not in TRAININGS
        and not re.search("resume=|--|[<…]", command.partition("train.py")[2])
    ],
)
def test_documented_training_command_composes_when_no_test_can_train_it(command: str) -> None:
    words = TRAINING.fullmatch(command)
    assert words is not None
    compose_command(parse(*shlex.split(words[2])))


def documented_overrides() -> set[str]:
    """Return the words `key=value` of all documented commands and inline code, as a shell passes
    them on. The pages about extending the project are included.
    """
    texts = [*COMMANDS]
    for page in PAGES:
        texts += [*spans(read(page)), *commands_of(page)]
    words: set[str] = set()
    for text in texts:
        # Skip inline code that a shell cannot split, for example because of an apostrophe.
        with suppress(ValueError):
            words.update(shlex.split(text))
    keys = {word: OVERRIDE.fullmatch(word) for word in words if not re.search("[<…]", word)}
    return {word for word, key in keys.items() if key is not None and is_known(key[1])}


def test_every_documented_override_is_accepted_by_hydra_when_typed_in_a_shell() -> None:
    """Hydra needs quotes around a value that contains parentheses or backslashes, in addition to
    those of the shell.
    """
    words = documented_overrides()
    parser = OverridesParser.create()
    refused = []
    for word in sorted(words):
        try:
            parser.parse_overrides([word])
        except OverrideParseException:
            refused.append(word)
    assert refused == []
    (pattern,) = [word for word in words if word.startswith("data.group_pattern=")]
    value = compose_command(
        parse("data=folder", "data.root=x", "data.val_fraction=0.2", pattern)
    ).config.data.group_pattern
    assert re.search(str(value), "rose/p17_2.jpg")[1] == "p17"  # type: ignore[index]


# --- trainings: each takes a step


def configs_of(command: str) -> list[ResolvedConfig]:
    """Return the resolved CPU configs of a training command; for a sweep, one config per model and
    strategy.
    """
    match = TRAINING.fullmatch(command)
    assert match is not None
    # Leave out weights files of runs that the pages name, because these runs do not exist here.
    parsed = parse(
        *(word for word in shlex.split(match[2]) if not word.startswith("model.weights=outputs/"))
    )
    parsed.overrides.append("parallel.accelerator=cpu")
    if not parsed.multirun:
        ranks = () if match[1] is None else (2, 2)
        return [cast(ResolvedConfig, resolve(compose_command(parsed).config, *ranks))]
    points = [point.config for point in expand(parsed)[1] if not point.reason]
    kinds = {
        f"{c.model} {c.parallel.strategy}": cast(ResolvedConfig, as_resolved(c))
        for c in points
        if int(c.parallel.devices) <= 2
    }
    return list(kinds.values())


def small(config: ResolvedConfig, folder: Path) -> ResolvedConfig:
    """Reduce a config to one step on a few images and reset keys that do not affect a step.

    Image folders are replaced by `folder`.
    """
    data, train, parallel = config.data, config.train, config.parallel
    if data.batch_size_per_device is None:
        data.batch_size = min(data.batch_size or 64, 4 * parallel.devices)
    else:
        data.batch_size_per_device = 4
    # Replace datasets that timm would download.
    if is_timm_dataset(data.name):
        data.name, data.root, data.kwargs = "synthetic", None, {}
    if data.name == "synthetic":
        data.kwargs = {**data.kwargs, "num_samples": 64}
    elif data.name == "folder":
        data.root, data.val_fraction, data.test_fraction, data.group_pattern = (
            str(folder),
            None,
            None,
            None,
        )
    elif data.name == "csv":
        data.root = str(folder / "labels.csv")
    elif data.name == "segmentation":
        data.name, data.root, data.kwargs, data.val_fraction = "shapes", None, {}, None
    # Do not load weights: pretrained ones would be downloaded, and the run of a weights file does
    # not exist here.
    config.model.pretrained, config.model.weights = False, None
    data.workers, data.limit_train, parallel.threads_per_device = 0, 64, 1
    train.max_steps, train.log_every, train.evaluate_every, train.target_loss = 1, 1, 1, None
    config.task_name, config.print_config, config.seed = "train", False, 42
    config.sweep, config.search = SweepConfig(), SearchConfig()
    return config


def take_a_step(ranks: Ranks, store: Any, config: ResolvedConfig) -> float:
    """Build the parts of a run, train one step, evaluate one batch and return the loss."""
    torch.manual_seed(config.seed)
    strategy = build_strategy(config.parallel, ranks, store)
    try:
        run = build_run(config, strategy)
        batches = run.train_loader.epoch(0)
        reports = list(run_steps(run, batches))
        images, _ = next(iter(run.eval_loaders["val"]))
        with torch.inference_mode():
            autocast = Autocast(
                run.state.model.eval(), strategy.device.type, AUTOCAST[config.train.precision]
            )
            outputs = strategy.for_evaluation(autocast)(images)
        scores, _ = run.task.blank(len(images), (images.shape[2], images.shape[3]))
        assert outputs.shape == scores.shape
        assert bool(outputs.isfinite().all())
        assert len(reports) == run.state.progress.step == 1
        return reports[0].means["loss"]
    finally:
        strategy.close()


def take_steps(
    ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]
) -> dict[str, float | str]:
    """Train one step per config and return each loss, or the traceback of a failure."""
    torch.set_num_threads(1)
    actual: dict[str, float | str] = {}
    for name, config in configs.items():
        own = (
            None
            if store is None or ranks.world_size == 1
            else torch.distributed.PrefixStore(name, store)
        )
        try:
            actual[name] = take_a_step(ranks, own, config)
        except Exception:
            actual[name] = traceback.format_exc()
    return actual


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, in train/ and val/, and in a CSV with folds and numbers."""
    root = tmp_path_factory.mktemp("photos")
    rows = ["file,label,fold,age"]
    for number in range(24):
        file = (
            root
            / ("val" if number % 3 == 0 else "train")
            / ("rose", "tulip")[number % 2]
            / f"{number}.png"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (number * 10, 0, 200 * (number % 2))).save(file)
        rows.append(f"{file.relative_to(root)},{file.parent.name},{number % 5},{number}")
    (root / "labels.csv").write_text("\n".join(rows))
    return root


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, photos: Path) -> dict[str, list[float | str]]:
    """Return losses or tracebacks by command. Commands share a group of ranks, and identical steps
    run once.
    """
    chosen = {
        item.callspec.params.get("command")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    of_command: dict[str, list[ResolvedConfig]] = {}
    refused: dict[str, list[float | str]] = {}
    for command in (command for command in TRAININGS if command in chosen):
        try:
            of_command[command] = [small(config, photos) for config in configs_of(command)]
        except ValueError as error:
            refused[command] = [str(error)]
    distinct = {str(config): config for configs in of_command.values() for config in configs}
    actual: dict[str, float | str] = {}
    for world in (1, 2):
        own = {
            name: c
            for name, c in distinct.items()
            if world == (c.parallel.devices if c.parallel.has_ranks else 1)
        }
        actual |= in_ranks(take_steps, world, own, timeout=1500)[0]
    return refused | {
        command: [actual[str(config)] for config in configs]
        for command, configs in of_command.items()
    }


# Only small commands of the README run in the quick tests.
FIRST = set(commands_of(ROOT / "README.md"))
QUICK = [command for command in TRAININGS if command in FIRST and not LARGE.search(command)]


@pytest.mark.timeout(3600)
@pytest.mark.sample(24)
@pytest.mark.processes
@pytest.mark.parametrize(
    "command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in TRAININGS]
)
def test_documented_training_command_trains_one_step(
    losses: dict[str, list[float | str]], command: str
) -> None:
    assert losses[command]
    for loss in losses[command]:
        assert isinstance(loss, float) and math.isfinite(loss), loss


# --- scripts: each with the arguments of the page, for one finished run or sweep


# Dictionary from a pattern of placeholders on the pages to the path that replaces it.
STANDS_FOR = {
    r"outputs/(?:train|finetune)/(2026-01-01/\S+|<date>/<time>)|outputs/…|<run folder>": "{run}",
    r"<sweep folder>|<folder>( …)?|outputs/sweeps/<date>/<time>": "{sweep}",
    r"photos/|/data/new(?= )": "{photos}",
    r"(labels|predictions)\.csv": r"{new}/\1.csv",
    r"report\.json": "{sweep}/report.json",
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
    "report": "report.html",
}


def scripts_like(pattern: str) -> list[str]:
    """Return the commands that match, with paths replaced by test paths and without the resulting
    duplicates.
    """
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
@pytest.mark.processes
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


@pytest.fixture(scope="module")
def sweep(train_shared: Train) -> Path:
    """Run a short sweep over two numbers of devices."""
    folder = train_shared.base / "sweep"
    arguments = [
        "-m",
        "model=tiny",
        "parallel=ddp",
        "parallel.devices=1,2",
        "parallel.threads_per_device=1",
        "train.max_steps=20",
        "print_config=false",
        f"hydra.sweep.dir={folder}",
    ]
    done = train_shared.start(*arguments, defaults=False).finish()
    assert done.returncode == 0, done.output
    return folder


# This test is nightly, because test_report.py runs the script at every commit.
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("command", scripts_like(ON_A_SWEEP))
@pytest.mark.nightly
def test_documented_report_command_prints_results_of_a_sweep(
    command: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(command, capsys, sweep=sweep)


@pytest.mark.slow
@pytest.mark.processes
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


# --- other commands


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
