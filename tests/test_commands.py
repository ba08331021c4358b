"""Every command that the pages and the files of conf/ show runs in a test: here in small, or where `ELSEWHERE` says.

What no test can run stands in `NOT_RUN`, with the reason. A new command on a page is run here, or has to be named there.
"""

from __future__ import annotations

import importlib
import math
import re
import shlex
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import ROOT, Finished, Train, in_ranks, parse, tiny
from PIL import Image

import train as entry
from scripts.maintain import docs_figures
from src.engine.config.compose import compose_command
from src.engine.config.resolve import resolve
from src.engine.machine.ranks import Ranks
from src.engine.sweep.points import expand
from src.parallel import build_strategy
from src.run.build import Run
from src.schema import ResolvedConfig, SearchConfig, SweepConfig, as_resolved, is_timm_dataset
from src.training.loop import train_epoch

# In running text a command is what begins with one of these.
IN_TEXT = re.compile(
    r"([A-Z]+=\S+ )?(make|python|torchrun|tensorboard|docker|nvidia-smi|pip|source|cp|tc|kubectl|scancel|scripts/\S+\.sh) \S"
)
TRAINING = re.compile(r"(?:python|torchrun --nproc-per-node (\d+|N)) train\.py ?(.*)")
SCRIPT = re.compile(r"python (?:scripts/)?(plan|predict|export|compare_runs|report|forecast|evaluate)\.py ?(.*)")
# What a command matches -> the tests that run it. Those of clusters are skipped where there is no Slurm, or no root.
ELSEWHERE = {
    r"make (train|compare)$": "test_training_installs_the_runtime_alone test_a_second_call_installs_nothing",
    r"make doctor$": "test_this_machine_can_train",
    r"make schema$": "test_it_is_made_from_the_schema_of_today",
    r"make fork ": "test_the_name_stands_wherever_the_old_one_stood",
    r"make gpu-check$": "test_without_a_device_one_line_says_what_was_not_seen",
    r"make docs-figures$": "test_figures_are_drawn_from_a_sweep",
    r"tensorboard ": "test_tensorboard_as_we_say_to_start_it_listens_on_loopback",
    r"python -m src\.run ": "test_command_runs",
    r"python -c ": "test_one_liners_run",
    r"python scripts/plan\.py model=resnet18 ": "test_the_tables_of_the_page_on_batches_are_those_of_the_plan",
    r"python scripts/maintain/chaos\.py": "test_some_faults_change_nothing",
    r"cp conf/local": "test_this_machines_own_settings_have_an_example",
    r"python train\.py --help": "test_help_shows_groups_options_and_three_commands_without_torch",
    r"python train\.py --cfg job": "test_cfg_job_shows_all_keys_without_torch",
    r"python train\.py (-m )?debug=profile": "test_every_rank_of_ddp_has_a_trace test_dp_tells_its_copies_apart",
    r".* sweep\.dry_run=true": "test_a_dry_run_lists_the_jobs",
    r"python train\.py resume=auto": "test_the_newest_unfinished_run_goes_on",
    r"python train\.py -m sweep\.resume=": "test_interrupted_and_resumed",
    r"python train\.py -m search=optuna cluster=slurm": "test_a_search_killed_and_resumed_finds_the_trials_that_went_on",
    r"python train\.py -m cluster=slurm": "test_a_sweep_is_one_array_and_a_lost_node_costs_no_task",
    r"(srun|python train\.py cluster=slurm cluster\.nodes=2 parallel)": "test_a_job_on_two_nodes_has_the_numbers_of_one_machine",
    r"python train\.py cluster=slurm": "test_a_job_s_file_says_what_was_asked_and_is_left_for_you",
    r"scripts/slurm/dev_cluster\.sh": "cluster",
    r"scancel --signal": "test_two_jobs_go_on_in_their_own_folders_whatever_happens_to_them",
    r"scancel <job>": "test_scancel_leaves_nothing_and_a_refused_job_no_folder",
    r"PYTHONPATH=\S+ python tests/test_report_simulation": "test_the_whole_simulation_keeps_its_promises",
    r"(python train\.py cluster=|)kubernetes": "test_a_job_of_kubernetes_goes_on_when_a_pod_is_killed_or_drained",
    r"torchrun (--nnodes|…)": "test_two_nodes_with_disks_of_their_own_have_the_numbers_of_one",
}
NOT_RUN = {
    r"make (check|test|test-fast|test-all)$": "they are the tests",
    r"(make (lock|gpu-wheels)|pip install|source)": "packages are fetched: minutes, and gigabytes",
    r"(make bench$|python scripts/maintain/bench_)": "measures for minutes on an idle machine",
    r"(docker|mkdir .*docker|buildah|debootstrap|export STORAGE_DRIVER)": "needs an engine for containers, or root, and minutes",
    r"nvidia-smi": "needs a GPU",
    r"kubectl": "needs a Kubernetes; the manifest is checked against its schemas",
    r"tc ": "needs root and network namespaces",
}


def commands_of(path: Path) -> list[str]:
    """The commands that a page shows in blocks and in running text, or a file of conf/ in its comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        lines = re.findall(r"^#   ((?:python|torchrun|make|cp) .*)$", text, re.MULTILINE)
        found = [part for line in lines for part in re.split(r"\s+or: |\s+&& ", line)]
    else:
        block = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
        found = [line for language, lines in block.findall(text) if language == "bash" for line in lines.splitlines()]
        spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", block.sub("", text)))
        found += [span for span in spans if IN_TEXT.match(span)]
    return [re.split(r"\s{3,}|\s+#", line)[0].strip() for line in found if line.strip()]


def shown_commands() -> list[str]:
    """Those of docs/extend.md need what the page adds; they run in tests/test_bill.py."""
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "CHANGELOG.md", ROOT / "docs" / "extend.md"}
    files = [*pages, *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "conf").rglob("*.example")]
    return sorted({command for path in files for command in commands_of(path)})


def named(table: dict[str, str], command: str) -> str | None:
    return next((words for pattern, words in table.items() if re.match(pattern, command)), None)


SHOWN = shown_commands()
HERE = [command for command in SHOWN if not named(NOT_RUN, command) and not named(ELSEWHERE, command)]
TRAININGS = [command for command in HERE if TRAINING.fullmatch(command)]
SCRIPTS = [command for command in HERE if SCRIPT.fullmatch(command)]
LARGE = re.compile("experiment=(small_layers|buckets|scaling_|imagenet_)|-m seed=")  # to compose, or to train
ALONE, ON_A_RUN, ON_A_SWEEP, WITH_RANKS = "/plan", "outputs/(…|train)", "/(report|forecast)", "parallel=ddp"  # scripts


def test_every_shown_command_runs_in_a_test_or_says_why_not() -> None:
    assert len(TRAININGS) > 30 and len(SCRIPTS) > 5
    assert set(HERE) == {*TRAININGS, *SCRIPTS}, "run it here, or name it in ELSEWHERE or NOT_RUN"
    kinds = (ALONE, ON_A_RUN, ON_A_SWEEP, WITH_RANKS)
    assert [command for command in SCRIPTS if not any(re.search(kind, command) for kind in kinds)] == []
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in files for name in re.findall(r"^ *def (\w+)", text, re.MULTILINE)}
    assert {name for names in ELSEWHERE.values() for name in names.split()} <= tests
    if not (ROOT / ".template.json").exists():  # a fork may have dropped pages
        assert [p for p in (*ELSEWHERE, *NOT_RUN) if not any(re.match(p, command) for command in SHOWN)] == []


# --- trainings: each takes a step


def configs_of(command: str) -> list[ResolvedConfig]:
    """What a training command would run here on CPU, resolved as it is written: of a sweep, one point per model and strategy."""
    match = TRAINING.fullmatch(command)
    assert match is not None
    parsed = parse(*shlex.split(match[2]))
    parsed.overrides.append("parallel.accelerator=cpu")
    if not parsed.multirun:
        ranks = () if match[1] is None else (2, 2)
        return [resolve(compose_command(parsed).config, *ranks)]
    points = [point.config for point in expand(parsed)[1] if not point.reason]
    kinds = {f"{c.model} {c.parallel.strategy}": as_resolved(c) for c in points if int(c.parallel.devices) <= 2}
    return list(kinds.values())


def small(config: ResolvedConfig, folder: Path) -> ResolvedConfig:
    """The same for one step of few images, of which `folder` holds some, without what has no part in a step."""
    data, train, parallel = config.data, config.train, config.parallel
    if data.batch_size_per_device is None:
        data.batch_size = min(data.batch_size or 64, 4 * parallel.devices)
    else:
        data.batch_size_per_device = 4
    if is_timm_dataset(data.name):  # has to be fetched
        data.name, data.kwargs = "synthetic", {}
    if data.name == "synthetic":
        data.kwargs = {**data.kwargs, "num_samples": 64}
    elif data.name == "folder":
        data.root = str(folder)
    data.workers, data.limit_train, parallel.threads_per_device = 0, 64, 1
    train.max_steps, train.log_every, train.evaluate_every, train.target_loss = 1, 1, 1, None
    config.task_name, config.print_config, config.seed = "train", False, 42
    config.sweep, config.search = SweepConfig(), SearchConfig()
    return config


def take_a_step(ranks: Ranks, store: Any, config: ResolvedConfig) -> float:
    """Build all of it, train for a step, and evaluate a batch; returns the loss."""
    torch.manual_seed(config.seed)
    strategy = build_strategy(config.parallel, ranks, store)
    try:
        run = Run(config, strategy)
        batches = run.train.epoch(0)
        reports = list(train_epoch(run.state, batches, config, strategy, run.moments, run.steps_per_epoch, run.mixing))
        images, _ = next(iter(run.evaluation["val"]))
        with torch.inference_mode():
            outputs = strategy.for_evaluation(run.state.model.eval(), run.autocast)(images)
        assert outputs.shape == (len(images), run.num_classes) and bool(outputs.isfinite().all())
        assert len(reports) == run.state.progress.step == 1
        return reports[0].loss
    finally:
        strategy.close()


def take_steps(ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]) -> dict[str, float | str]:
    """The loss of each config's step, or what went wrong."""
    torch.set_num_threads(1)
    found: dict[str, float | str] = {}
    for name, config in configs.items():
        own = None if store is None or ranks.world_size == 1 else torch.distributed.PrefixStore(name, store)
        try:
            found[name] = take_a_step(ranks, own, config)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, in train/ and val/."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(24):
        file = root / ("val" if number % 3 == 0 else "train") / ("rose", "tulip")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (number * 10, 0, 200 * (number % 2))).save(file)
    return root


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, photos: Path) -> dict[str, list[float | str]]:
    """command -> what its steps came to. All that were asked for are taken in one go, and what is the same step, once."""
    chosen = {item.callspec.params.get("command") for item in request.session.items if hasattr(item, "callspec")}
    of_command: dict[str, list[ResolvedConfig]] = {}
    refused: dict[str, list[float | str]] = {}
    for command in (command for command in TRAININGS if command in chosen):
        try:
            of_command[command] = [small(config, photos) for config in configs_of(command)]
        except ValueError as error:
            refused[command] = [str(error)]
    distinct = {str(config): config for configs in of_command.values() for config in configs}
    found: dict[str, float | str] = {}
    for world in (1, 2):
        own = {name: c for name, c in distinct.items() if world == (c.parallel.devices if c.parallel.has_ranks else 1)}
        found |= in_ranks(take_steps, world, own)[0]
    return refused | {command: [found[str(config)] for config in configs] for command, configs in of_command.items()}


FIRST = set(commands_of(ROOT / "README.md"))  # what a newcomer types; the others are slow
QUICK = [command for command in TRAININGS if command in FIRST and not LARGE.search(command)]


@pytest.mark.processes
@pytest.mark.parametrize("command", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in TRAININGS])
def test_a_training_takes_a_step(losses: dict[str, list[float | str]], command: str) -> None:
    assert losses[command]
    for loss in losses[command]:
        assert isinstance(loss, float) and math.isfinite(loss), loss


# --- scripts: each with the page's own words, against one finished run or sweep


STANDS_FOR = {  # on the pages, for what a reader has -> here
    r"outputs/train/2026-01-01/\S+|outputs/…|<run folder>": "{run}",
    r"<sweep folder>|<folder>( …)?|outputs/sweeps/<date>/<time>": "{sweep}",
    r"photos/": "{photos}",
    r"labels\.csv": "{new}/labels.csv",
    r"report\.json": "{sweep}/report.json",
    r"key=value …": "model=tiny",
    r"data\.root=/data/imagenet": "data.root={photos}",
    r"model\.name=resnet50 model\.pretrained=true": "model.name=resnet10t model.weights={weights}",
}
SAYS = {  # what is printed
    "plan": "per device",
    "predict": "labels.csv",  # written
    "export": "loaded by",
    "compare_runs": "agree",
    "evaluate": '"acc": ',
    "report": "report.html",
    "forecast": "strong",
}


def scripts_like(pattern: str) -> list[str]:
    """The commands that match, with what is here in place of what the page's reader has: many are then the same."""
    found = set()
    for command in (command for command in SCRIPTS if re.search(pattern, command)):
        for shown, here in STANDS_FOR.items():
            command = re.sub(shown, here, command)
        assert not re.search(r"[<>…]", command), command
        found.add(command)
    return sorted(found)


def words_of(command: str, **places: Path) -> tuple[str, list[str]]:
    """(script, its words)"""
    match = SCRIPT.fullmatch(command)
    assert match is not None
    return match[1], shlex.split(match[2].format(**places))


def check(command: str, capsys: pytest.CaptureFixture[str], **places: Path) -> None:
    """Run a script's `main` here; it says what it has done."""
    name, words = words_of(command, **places)
    script = importlib.import_module(name if name == "evaluate" else f"scripts.{name}")
    code, said = script.main(words), capsys.readouterr()
    assert code == 0, said.err
    written = [path for word in words if (path := Path(word.partition("=")[2])).name == SAYS[name]]
    assert SAYS[name] in said.out or (written and written[0].stat().st_size > 0), said


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", scripts_like(ALONE))
def test_a_plan_is_made(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(command, capsys)


@pytest.mark.processes
@pytest.mark.parametrize("command", scripts_like(ON_A_RUN))
def test_a_script_runs_on_a_run(
    command: str, finished_run: Finished, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_run.folder, tmp_path / "run")
    check(command, capsys, run=tmp_path / "run", photos=photos, new=tmp_path)


@pytest.fixture(scope="module")
def sweep(train_shared: Train) -> Path:
    """The sweep that docs/forecast.md shows, of a smaller model."""
    (command,) = [command for command in TRAININGS if "parallel.threads_per_device=1 train.max_steps=20" in command]
    folder = train_shared.base / "sweep"
    words = [*shlex.split(command)[2:], "model=tiny", "print_config=false", f"hydra.sweep.dir={folder}"]
    done = train_shared.start(*words, defaults=False).finish()
    assert done.returncode == 0, done.output
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("command", scripts_like(ON_A_SWEEP))
def test_a_script_runs_on_a_sweep(command: str, sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(command, capsys, sweep=sweep)


@pytest.mark.slow
@pytest.mark.processes
def test_figures_are_drawn_from_a_sweep(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_figures, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs_figures.py", str(sweep)])
    assert docs_figures.main() == 0
    assert {path.name for path in tmp_path.iterdir()} >= {path.name for path in (ROOT / "docs" / "figures").iterdir()}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("command", scripts_like(WITH_RANKS))
def test_a_script_starts_its_ranks(command: str, photos: Path, tmp_path: Path, train: Train) -> None:
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), tmp_path / "weights.pt")
    name, words = words_of(command, photos=photos, weights=tmp_path / "weights.pt")
    words += ["data.image_size=32", "parallel.devices=2"]
    done = train.start_command([sys.executable, f"{name}.py", *words], tmp_path).finish()
    assert done.returncode == 0, done.output
    assert SAYS[name] in done.stdout and '"world_size": 2' in done.stdout


# --- whole commands, as they are typed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        "python train.py parallel=ddp parallel.devices=2",
        "python train.py model.name=convnext_atto optim=sgd",
        "python train.py -m parallel=single,dp,ddp parallel.devices=1,2,4",
    ],
)
def test_command_runs(command: str, train: Train) -> None:
    assert command in TRAININGS
    words = shlex.split(command)[2:]
    words += ["model.kwargs={}" if "model.name" in command else "model=tiny", "optim.warmup_epochs=0"]
    words += ["train.epochs=1", "train.max_steps=2", "data.limit_train=64", "print_config=false"]
    folders = (f"hydra.run.dir={train.base}/run", f"hydra.sweep.dir={train.base}/sweep")
    done = train.start(*words, *folders, defaults=False).finish()
    assert done.returncode == 0, done.output


@pytest.mark.slow
@pytest.mark.processes
def test_the_newest_unfinished_run_goes_on(train: Train) -> None:
    words = (
        *tiny("parallel=single", "train.epochs=30"),
        f"paths.output_dir={train.base}/o",
    )
    running = train.start(*words, defaults=False)
    running.wait_for(lambda: list(train.base.glob("o/train/*/*/checkpoints/last.pt")))
    assert running.signal(signal.SIGINT).returncode == 130
    (folder,) = train.base.glob("o/train/*/*")
    done = train.start("resume=auto", *words, defaults=False, folder=folder).finish()
    assert done.returncode == 0, done.output
    assert "going on from" in done.stdout and done.result["status"] == "done"


@pytest.mark.parametrize("command", [command for command in SHOWN if "dry_run=true" in command])
def test_a_dry_run_lists_the_jobs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    assert entry.main() == 0
    assert "parallel=ddp" in capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("python -c")])
def test_one_liners_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(shlex.split(command)[2])
    assert capsys.readouterr().out.strip() == "True"
