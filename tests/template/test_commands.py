"""Every command in the documentation and conf/ runs here with fewer steps, or in a test that
`ELSEWHERE` names.

`NOT_RUN` lists the commands that no test can run, with the reason.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
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
from timm_parallel.testing.commands import ROOT, TEST_FILES, Finished, Train
from timm_parallel.testing.configs import parse, tiny
from timm_parallel.testing.ranks import in_ranks

# Pattern of a command in inline code, which starts with the name of a program.
IN_TEXT = re.compile(
    r"([A-Z]+=\S+ )?(make|python|torchrun|tensorboard|docker|nvidia-smi|pip|source|cp|kubectl|scancel|tests/\S+\.sh) \S"
)
TRAINING = re.compile(r"(?:python|torchrun --nproc-per-node (\d+|N)) train\.py ?(.*)")
SCRIPT = re.compile(
    r"python (?:scripts/)?(plan|predict|export|compare_runs|report|evaluate)\.py ?(.*)"
)
# Dictionary from a pattern of commands to the names of tests that run them. Tests of clusters are
# skipped without Slurm or root rights.
ELSEWHERE = {
    r"make (install|train|compare)\b": (
        "test_make_train_installs_only_runtime_requirements "
        "test_make_installs_nothing_when_requirements_of_the_target_are_installed"
    ),
    r"python scripts/from_timm\.py": "test_from_timm_script_writes_experiment_that_composes_to_the_shipped_a2_recipe",
    r"make doctor$": "test_doctor_script_prints_can_train_and_a_command_on_this_machine",
    r"python timm_parallel/tests/architecture\.py": "test_library_imports_neither_the_project_nor_its_lab",
    r"make schema$": "test_schema_json_and_docs_keys_md_equal_files_generated_from_schema_py",
    r"make fork\b": "test_make_fork_replaces_every_occurrence_of_the_template_name",
    r"(git rm -r timm_parallel|pip install --no-deps)": (
        "test_fork_trains_and_sweeps_when_the_library_is_installed_from_a_tag"
    ),
    r"python -m timm_parallel\.rank": "test_sweep_over_strategies_and_devices_trains_equally",
    r"(make update|python scripts/update\.py)": (
        "test_make_update_replaces_the_library_and_merges_other_files"
    ),
    r"make gpu-check$": "test_make_gpu_check_prints_one_line_when_no_gpu_is_visible",
    r"make docs$": "test_documentation_site_builds_and_the_build_fails_on_a_broken_link",
    r"python scripts/maintain/simulate_sweeps\.py": "test_report_rarely_states_a_false_difference_for_simulated_sweeps",
    r"python scripts/maintain/simulate_verdicts\.py": "test_verdict_rarely_calls_equal_code_better_or_worse",
    r"(make verdict|python scripts/verdict\.py)": "test_verdict_script_compares_the_working_tree_with_the_base_commit",
    r"make size$": "test_count_statements_counts_nested_statements_but_no_docstrings",
    r"python scripts/export\.py .*format=onnx": "test_onnx_export_matches_checkpoint_outputs_at_batch_sizes_1_and_7",
    r"python scripts/reproduce\.py ": "test_repeated_run_has_equal_losses_and_weights",
    r"python scripts/check_data\.py ": "test_check_data_finds_unreadable_leaked_duplicate_and_mislabeled_images",
    r"torchrun --nproc-per-node 2$": "test_pytorch_examples_of_dp_and_ddp_page_run_without_error",
    r"python evaluate\.py run=<run folder> data\.root=": (
        "test_evaluation_of_a_run_on_an_image_folder_needs_no_train_split"
    ),
    r"python evaluate\.py .*train\.task_kwargs\.evaluation=": (
        "test_predicted_masks_of_whole_images_have_the_iou_that_evaluate_py_prints"
    ),
    r"python train\.py --config-path": "test_run_from_the_saved_config_of_another_run_reproduces_metrics_and_weights",
    r"python train\.py tracker=(wandb|mlflow|\[tensorboard,)": (
        "test_wandb_and_mlflow_hold_the_whole_run_and_no_api_key_after_a_resume"
    ),
    r"(make tune|python train\.py -m experiment=tune)": (
        "test_sweep_over_settings_for_speed_reports_images_per_second_of_each"
    ),
    r"(wandb sync|mlflow ui)": "test_wandb_and_mlflow_hold_the_whole_run_and_no_api_key_after_a_resume",
    r"tensorboard ": "test_tensorboard_listens_on_loopback_with_the_documented_command",
    r"python -c ": "test_documented_python_one_liner_prints_true",
    r"python scripts/plan\.py model=resnet18 ": "test_batch_tables_of_page_on_several_gpus_match_output_of_plan_py",
    r"python scripts/maintain/chaos\.py": "test_run_with_injected_faults_matches_run_without_faults",
    r"cp conf/local": "test_example_of_conf_local_default_yaml_composes_with_changed_output_dir",
    r"python train\.py --help": "test_help_shows_options_and_commands_without_importing_torch",
    r"python train\.py --cfg job": "test_cfg_job_shows_all_keys_without_importing_torch",
    r"python train\.py (-m )?debug=profile": (
        "test_profile_of_ddp_writes_a_trace_for_every_rank "
        "test_profile_of_dp_records_the_threads_of_its_replicas"
    ),
    r".* sweep\.dry_run=true": "test_sweep_dry_run_lists_the_jobs_of_the_sweep",
    r"python train\.py resume=(<run folder>|outputs)": (
        "test_train_py_resumes_and_records_allowed_changes_or_exits_2_without_changing_files"
    ),
    r"python train\.py resume=auto": "test_resume_auto_continues_newest_unfinished_run",
    r"python train\.py key=value … resume=auto_or_new": (
        "test_resume_auto_or_new_starts_a_new_run_when_all_runs_are_done"
    ),
    r"python train\.py -m sweep\.resume=": "test_interrupted_sweep_runs_only_its_unfinished_jobs_when_resumed",
    r"python train\.py -m search=optuna cluster=slurm": (
        "test_killed_slurm_search_does_not_resubmit_its_running_trials_when_resumed"
    ),
    r"python train\.py -m cluster=slurm": "test_sweep_run_as_slurm_array_completes_when_a_node_is_lost",
    r"(srun|python train\.py cluster=slurm cluster\.nodes=2 parallel)": (
        "test_slurm_job_on_two_nodes_has_the_losses_and_weights_of_a_run_on_one_machine"
    ),
    r"python train\.py cluster=slurm": "test_slurm_job_script_contains_given_options",
    r"timm_parallel/tests/dev_cluster\.sh": "cluster",
    r"scancel --signal": "test_requeued_slurm_jobs_match_an_undisturbed_run_after_sigusr1_and_a_lost_node",
    r"scancel <job>": "test_scancel_ends_all_processes_of_a_slurm_job_and_refused_job_creates_no_folder",
    r"PYTHONPATH=\S+ python timm_parallel/tests/test_report_simulation": (
        "test_speed_verdicts_have_expected_error_rate_and_power_in_the_full_simulation"
    ),
    r"(python train\.py cluster=|)kubernetes": "test_kubernetes_job_resumes_when_a_pod_is_killed_or_drained",
    r"torchrun (--nnodes|…)": "test_run_on_two_nodes_without_shared_disk_matches_one_machine",
}
NOT_RUN = {
    r"make (check|test|test-fast|test-all|test-ci|test-nightly)$": "runs the test suite itself",
    r"(make (lock|gpu-wheels)|pip install|source)": "downloads gigabytes of packages, for minutes",
    r"wandb login": "needs an account",
    r"git (clone|remote add)": "the URL of the repository is a placeholder",
    r"make docs-outputs$": "runs the commands of the pages for minutes; "
    "tests/template/test_pages.py checks the written output",
    r"python src/eval\.py": "a command of lightning-hydra-template",
    r"(make bench$|python scripts/maintain/bench_)": "measures for minutes on an idle machine",
    r"(docker|mkdir .*docker|buildah|debootstrap|export STORAGE_DRIVER)": "needs a container "
    "engine or root, and "
    "takes minutes",
    r"nvidia-smi": "needs a GPU",
    r"kubectl": "needs a Kubernetes cluster; timm_parallel/tests/test_cluster.py validates the "
    "manifest",
}


def commands_of(path: Path) -> list[str]:
    """Return the commands in the code blocks and inline code of a page, or in the comments of a
    file in conf/.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        lines = re.findall(r"^#   ((?:python|torchrun|make|cp) .*)$", text, re.MULTILINE)
        actual = [part for line in lines for part in re.split(r"\s+or: |\s+&& ", line)]
    else:
        block = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
        actual = [
            line
            for language, lines in block.findall(text)
            if language == "bash"
            for line in lines.splitlines()
        ]
        spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", block.sub("", text)))
        actual += [span for span in spans if IN_TEXT.match(span)]
    return [re.split(r"\s{3,}|\s+#", line)[0].strip() for line in actual if line.strip()]


def shown_commands() -> list[str]:
    """Return all documented commands except those of docs/extend*.md, which need its code: see
    tests/template/test_extend_pages.py.
    """
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("extend*.md"),
    }
    files = [*pages, *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "conf").rglob("*.example")]
    return sorted({command for path in files for command in commands_of(path)})


def named(table: dict[str, str], command: str) -> str | None:
    return next(
        (arguments for pattern, arguments in table.items() if re.match(pattern, command)), None
    )


SHOWN = shown_commands()
HERE = [
    command for command in SHOWN if not named(NOT_RUN, command) and not named(ELSEWHERE, command)
]
TRAININGS = [command for command in HERE if TRAINING.fullmatch(command)]
SCRIPTS = [command for command in HERE if SCRIPT.fullmatch(command)]
LARGE = re.compile("experiment=(small_layers|buckets|scaling_|imagenet_|finetune_)|-m seed=")
# Patterns of script commands that need no run, a sweep, or ranks.
ALONE, ON_A_SWEEP, WITH_RANKS = "/plan", "/report", "evaluate.*parallel=ddp"
ON_A_RUN = "outputs/(…|train|finetune)|<run folder>"


def test_every_documented_command_is_run_by_a_test_or_listed_with_a_reason() -> None:
    assert len(TRAININGS) > 30 and len(SCRIPTS) > 5
    assert set(HERE) == {*TRAININGS, *SCRIPTS}, (
        "run the command in this file, or list it in ELSEWHERE or NOT_RUN"
    )
    kinds = (ALONE, ON_A_RUN, ON_A_SWEEP, WITH_RANKS)
    assert [
        command for command in SCRIPTS if not any(re.search(kind, command) for kind in kinds)
    ] == []
    files = [path.read_text(encoding="utf-8") for path in TEST_FILES]
    tests = {name for text in files for name in re.findall(r"^ *def (\w+)", text, re.MULTILINE)}
    # Check only the template, because a fork has fewer pages and tests.
    if not (ROOT / ".template.json").exists():
        assert {name for names in ELSEWHERE.values() for name in names.split()} <= tests
        assert [
            p for p in (*ELSEWHERE, *NOT_RUN) if not any(re.match(p, command) for command in SHOWN)
        ] == []


def documented_overrides() -> set[str]:
    """Return the words `key=value` of all documented commands and inline code, as a shell passes
    them on. docs/extend*.md are included.
    """
    block = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    texts = list(SHOWN)
    for path in {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}:
        texts += re.findall(
            r"`([^`]+)`", block.sub("", path.read_text(encoding="utf-8"))
        ) + commands_of(path)
    words: set[str] = set()
    for text in texts:
        # Skip inline code that a shell cannot split, for example because of an apostrophe.
        with suppress(ValueError):
            words.update(shlex.split(text))
    keys = {
        word: re.match(r"[+~]{0,2}([a-z_0-9.]+)=", word)
        for word in words
        if not re.search("[<…]", word)
    }
    return {word for word, key in keys.items() if key is not None and is_known(key[1])}


def test_every_documented_override_is_accepted_by_hydra_when_typed_in_a_shell() -> None:
    """Hydra needs quotes around a value that contains parentheses or backslashes, in addition to
    those of the shell.
    """
    words = documented_overrides()
    assert len(words) > 200
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
@pytest.mark.nightly
def test_documented_training_command_exits_0_when_run_as_a_process(
    command: str, train: Train
) -> None:
    assert command in TRAININGS
    arguments = shlex.split(command)[2:]
    arguments += [
        "model.kwargs={}" if "model.name" in command else "model=tiny",
        "optim.warmup_epochs=0",
    ]
    arguments += [
        "train.epochs=1",
        "train.max_steps=2",
        "data.limit_train=64",
        "print_config=false",
    ]
    folders = (f"hydra.run.dir={train.base}/run", f"hydra.sweep.dir={train.base}/sweep")
    done = train.start(*arguments, *folders, defaults=False).finish()
    assert done.returncode == 0, done.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_resume_auto_continues_newest_unfinished_run(train: Train) -> None:
    arguments = (
        *tiny("parallel=single", "train.epochs=30"),
        f"paths.output_dir={train.base}/o",
    )
    running = train.start(*arguments, defaults=False)
    running.wait_for(lambda: list(train.base.glob("o/train/*/*/checkpoints/last.pt")))
    assert running.signal(signal.SIGINT).returncode == 130
    (folder,) = train.base.glob("o/train/*/*")
    done = train.start("resume=auto", arguments[-1], defaults=False, folder=folder).finish()
    assert done.returncode == 0, done.output
    assert "resumed from" in done.stdout and done.result["status"] == "done"


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("command", [command for command in SHOWN if "dry_run=true" in command])
def test_sweep_dry_run_lists_the_jobs_of_the_sweep(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    assert run_command(app) == 0
    assert "optim.lr=0.0001,seed=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [command for command in SHOWN if command.startswith("python -c")]
)
def test_documented_python_one_liner_prints_true(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(shlex.split(command)[2])
    assert capsys.readouterr().out.strip() == "True"
