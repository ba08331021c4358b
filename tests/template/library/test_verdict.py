"""Test verdicts on a change of the code: the decision from the runs, and how the runs of the
base and of the new code (head) are made. Most tests use a small repository whose train.py
writes a result without training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.verdict import main
from tests.template.repositories import NEEDS_GIT, git, make_template
from timm_parallel.app import root
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command
from timm_parallel.lab import code_copy
from timm_parallel.lab.analysis.headline import Finding
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.sequential import (
    BETTER,
    EQUAL,
    FIRST,
    LEVEL,
    NO_DIFFERENCE,
    WORSE,
    word_of,
)
from timm_parallel.lab.analysis.verdict import (
    BASE,
    CODE,
    FAILED,
    HEAD,
    METRIC,
    REFUSED,
    SPEED,
    UNKNOWN,
    Record,
    Verdict,
    judge,
)
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.report.sentences import sentences
from timm_parallel.lab.report.tables import verdict_table
from timm_parallel.metric import metric_name
from timm_parallel.record.result import read_jobs

ROOT = root()
ACCURACIES = (0.701, 0.698, 0.705, 0.695, 0.702, 0.699)


def record_of(code: str, block: int, value: float | None, **changes: Any) -> RunRecord:
    """Build the record of an invented run. `value` is the value of the metric. With None, the
    run was lost.
    """
    name = changes.pop("metric", "val/acc")
    status = changes.pop("status", "done" if value is not None else "not_finite")
    result = {
        name.replace("/", "."): value,
        f"metrics.{metric_name(name)}.lower_is_better": name.endswith("loss"),
        f"metrics.{metric_name(name)}.is_proportion": not name.endswith("loss"),
        "throughput.images_per_sec": changes.pop("speed", 1000.0 + 7 * block),
        "devices": 1,
        "val.samples": 10_000,
        "data.val": "one",
        "parameters": 1000,
        **changes.pop("result", {}),
    }
    return RunRecord(
        name=f"{code}_{block}",
        folder=Path(code),
        status=status,
        block=block,
        seed=block,
        overrides=(f"{CODE}={code}",),
        result=result if status == "done" else {},
        config={CODE: code, "seed": block, "checkpoint.metric": name},
        **changes,
    )


def runs_of(
    base: Sequence[float | None], head: Sequence[float | None], **of_head: Any
) -> list[RunRecord]:
    """Build the runs of base and head from their values of the metric. `of_head` changes the
    records of the runs of head.
    """
    old = [record_of(BASE, block, value) for block, value in enumerate(base)]
    return old + [record_of(HEAD, block, value, **of_head) for block, value in enumerate(head)]


def shifted(difference: float) -> list[float]:
    """Return accuracies that are higher than ACCURACIES by about `difference`."""
    return [a + difference + 0.002 * math.sin(3 * i) for i, a in enumerate(ACCURACIES)]


def verdict_on(runs: Sequence[RunRecord], on: str = METRIC, **record: Any) -> Verdict:
    verdict = judge(runs, Record(BASE, HEAD, 1, on, **record))
    # Each finding must have the numbers that its sentence needs.
    assert sentences([verdict.finding, *verdict.notes])
    return verdict


def words_of(verdict: Verdict) -> dict[str, str]:
    """Return a dictionary from measure to the verdict on it."""
    return {measure: word_of(contrast) for measure, contrast in verdict.contrasts.items()}


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


@pytest.mark.parametrize(
    ("difference", "word"), [(0.03, BETTER), (-0.03, WORSE), (0.0, NO_DIFFERENCE)]
)
def test_verdict_is_better_worse_or_no_difference_depending_on_the_accuracy_difference(
    difference: float, word: str
) -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(difference)))
    assert verdict.word == word
    assert words_of(verdict) == {METRIC: word, SPEED: NO_DIFFERENCE}
    rows = {row["measure"]: row["verdict"] for row in verdict_table(verdict).rows}
    assert rows == {"val/acc": word, "images/s": NO_DIFFERENCE, "memory, MiB": "—"}
    finding = verdict.finding
    assert (finding.kind, finding.numbers["word"]) == ("head_is", word)
    assert finding.numbers["contrast"] == verdict.contrasts[METRIC].fields
    assert verdict.contrasts[METRIC].effect == pytest.approx(difference, abs=0.003)


@pytest.mark.parametrize(("lower", "word"), [(HEAD, BETTER), (BASE, WORSE)])
def test_verdict_is_better_when_the_new_code_has_a_lower_loss(lower: str, word: str) -> None:
    runs = []
    for block in range(5):
        for code in (BASE, HEAD):
            loss = 0.4 + 0.011 * block if code == lower else 0.5 + 0.01 * block
            runs.append(record_of(code, block, loss, metric="val/loss"))
    assert verdict_on(runs).word == word


def test_verdict_with_a_fixed_number_states_the_difference_that_the_seeds_could_have_shown() -> (
    None
):
    verdict = verdict_on(runs_of(ACCURACIES, shifted(0.001)), repeats=len(ACCURACIES))
    contrast = verdict.contrasts[METRIC]
    assert (verdict.word, verdict.is_open) == (NO_DIFFERENCE, False)
    assert contrast.detectable is not None and 0 < contrast.detectable < 0.05
    finding = verdict.finding
    assert (finding.kind, finding.numbers["is_futile"]) == ("head_is", False)
    assert finding.numbers["contrast"]["detectable"] == contrast.detectable


def test_verdict_decides_at_the_fourth_pair_if_all_seeds_agree_and_not_before() -> None:
    for pairs in range(1, FIRST):
        verdict = verdict_on(runs_of(ACCURACIES[:pairs], shifted(0.1)[:pairs]))
        assert (verdict.word, verdict.is_open) == (NO_DIFFERENCE, True)
        assert verdict.contrasts[METRIC].low is None
    runs = runs_of(ACCURACIES[:FIRST], shifted(0.1)[:FIRST])
    assert (verdict_on(runs).word, verdict_on(runs).is_open) == (BETTER, False)
    same = verdict_on(runs_of(ACCURACIES[:FIRST], ACCURACIES[:FIRST]))
    assert (same.word, same.is_open) == (NO_DIFFERENCE, False)
    assert same.contrasts[METRIC].effect == 0.0


def test_verdict_goes_on_while_a_difference_may_be_shown_and_stops_when_it_is_unlikely() -> None:
    noise = [0.01, -0.006, 0.012, 0.003]
    base = [0.7] * 4
    likely = verdict_on(runs_of(base, [0.71 + n for n in noise]))
    assert (likely.word, likely.is_open) == (NO_DIFFERENCE, True)
    runs = runs_of(base, [0.698 + n for n in noise])
    futile = verdict_on(runs)
    assert (futile.word, futile.is_open) == (NO_DIFFERENCE, False)
    assert futile.finding.numbers["is_futile"]
    # Asked again, only the limit ends it.
    assert verdict_on(runs, persists=True).is_open
    assert not verdict_on(runs, persists=True, max_repeats=4).is_open


@pytest.mark.parametrize(("smallest", "word"), [(1.0, EQUAL), (0.1, NO_DIFFERENCE)])
def test_verdict_is_equal_when_the_whole_interval_is_within_sweep_smallest(
    smallest: float, word: str
) -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(0.0)), smallest=smallest)
    assert verdict.word == word
    low, high = verdict.contrasts[METRIC].interval
    assert (max(-low, high) <= smallest / 100) == (word == EQUAL)


def test_verdict_on_speed_is_equal_within_percent_of_base() -> None:
    runs = [record_of(c, i, a) for c in (BASE, HEAD) for i, a in enumerate(ACCURACIES)]
    for place, run in enumerate(runs):
        run.result["throughput.images_per_sec"] *= 1 + 0.002 * math.sin(5 * place)
    assert verdict_on(runs, on=SPEED, smallest=2.0).word == EQUAL


def test_record_counts_the_series_that_contain_a_false_verdict() -> None:
    shares = [Record(BASE, HEAD, number).false_in_100 for number in (1, 5, 20)]
    assert shares == [2, 10, 33]


def lost_runs(code: str, status: str, *blocks: int) -> list[RunRecord]:
    """Build the runs of six repeats, of which those of one version are lost in some repeats."""
    runs = runs_of(ACCURACIES, shifted(0.0))
    return [
        record_of(code, run.block, None, status=status)
        if (run.config[CODE], run.block) in {(code, block) for block in blocks}
        else run
        for run in runs
    ]


@pytest.mark.parametrize("status", ["out_of_memory", "not_finite"])
@pytest.mark.parametrize(("code", "word"), [(HEAD, WORSE), (BASE, BETTER)])
def test_verdict_is_decided_when_all_runs_of_one_version_diverge_or_exceed_memory(
    status: str, code: str, word: str
) -> None:
    verdict = verdict_on(lost_runs(code, status, *range(6)))
    assert verdict.word == word
    finding = verdict.finding
    seeds = [{"seed": seed, "status": status.replace("_", " ")} for seed in range(6)]
    assert (finding.kind, finding.numbers["runs"]) == ("loses_runs", seeds)


def test_verdict_is_open_when_some_runs_of_the_new_code_diverge() -> None:
    """One diverged run of six is no evidence: it may as well have been one of base."""
    for count in (1, 3, 5):
        verdict = verdict_on(lost_runs(HEAD, "not_finite", *range(count)), persists=True)
        assert (verdict.word, verdict.is_open) == (NO_DIFFERENCE, True)


@pytest.mark.parametrize("base", [ACCURACIES, [*ACCURACIES[:-1], None]])
def test_verdict_never_calls_code_better_that_loses_runs(base: Sequence[float | None]) -> None:
    """The last seed diverges in head alone, or in both versions."""
    assert verdict_on(runs_of(base, [*shifted(0.1)[:-1], None])).word == NO_DIFFERENCE


@pytest.mark.parametrize(("status", "word"), [("failed", FAILED), ("waiting", UNKNOWN)])
def test_verdict_is_failed_or_unknown_when_a_job_failed_or_is_waiting(
    status: str, word: str
) -> None:
    runs = [*runs_of(ACCURACIES, shifted(0.03)[:-1]), record_of(HEAD, 5, None, status=status)]
    assert verdict_on(runs).word == word


@pytest.mark.parametrize("key", ["data.val", "val.samples"])
def test_verdict_is_refused_with_the_name_of_the_field_when_validation_images_differ(
    key: str,
) -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(0.03), result={key: 7}))
    assert verdict.word == REFUSED
    finding = verdict.finding
    assert (finding.kind, finding.numbers["key"], finding.numbers["head"]) == ("refused", key, 7)


@pytest.mark.parametrize("key", ["parameters", "steps", "samples_seen", "flops_per_step"])
def test_verdict_has_a_note_when_parameters_steps_samples_or_flops_differ(key: str) -> None:
    base = [record_of(BASE, i, a, result={key: 1000}) for i, a in enumerate(ACCURACIES)]
    head = [record_of(HEAD, i, a, result={key: 2500}) for i, a in enumerate(shifted(0.03))]
    verdict = verdict_on(base + head)
    assert verdict.word == BETTER
    numbers = {"key": key, "base": 1000, "head": 2500}
    assert [n.numbers for n in verdict.notes if n.kind == "not_equal"] == [numbers]
    assert "not_equal" not in kinds(verdict_on(base).notes)


def slower(**changes: Any) -> list[RunRecord]:
    """Build runs in which head has the same accuracy as base and three quarters of its speed."""
    base = [record_of(BASE, i, a) for i, a in enumerate(ACCURACIES)]
    return base + [
        record_of(HEAD, i, a, speed=750 + 5 * (i % 3), **changes)
        for i, a in enumerate(shifted(0.0))
    ]


def test_slower_code_is_worse_only_in_a_verdict_on_speed_of_runs_that_were_alone() -> None:
    verdict = verdict_on(slower())
    assert verdict.word == NO_DIFFERENCE
    assert words_of(verdict)[SPEED] == WORSE
    assert verdict_on(slower(), on=SPEED).word == WORSE
    verdict = verdict_on(slower(result={"neighbours": 1}), on=SPEED)
    assert verdict.contrasts[SPEED].effect is None
    assert verdict.finding == Finding("not_measured", {"measure": SPEED})
    assert kinds(verdict.notes) == ["number_of_verdict"]


def test_verdict_finds_a_speed_difference_that_all_seeds_show_on_a_disturbed_machine() -> None:
    """Other load changes the speed of both runs of a repeat by up to a third. It changes the
    speed of a single run by up to 4 %.
    """
    runs = []
    for block, accuracy in enumerate(ACCURACIES):
        for code, share in ((BASE, 1.0), (HEAD, 0.8)):
            noise = 1 + 0.04 * math.sin(5 * block + (code == HEAD))
            speed = share * noise * (1000 + 330 * math.cos(block))
            runs.append(record_of(code, block, accuracy, speed=speed, result={"flags": ["load"]}))
    verdict = verdict_on(runs, on=SPEED)
    assert verdict.word == WORSE
    assert verdict.contrasts[SPEED].effect == pytest.approx(0.8, abs=0.05)


# Program of a train.py that writes the files of a run without training. The file settings.json of
# the version determines the contents.
TRAIN = """
import json, os, subprocess, sys, time
from pathlib import Path
import library

HERE = Path(__file__).parent
settings = json.loads((HERE / "settings.json").read_text())
words = [word.partition("=") for word in sys.argv[1:]]
given = {key: value.strip("'") for key, _, value in words}
if "refuse" in settings:
    sys.exit("train.py: " + settings["refuse"])
if "--cfg" in given:
    composed = settings.get("composed", settings.get("metric", "val/acc"))
    print(json.dumps({"checkpoint": {"metric": composed}}))
    sys.exit()
if "resume" in given:
    folder = Path(given["resume"])
else:
    folder = Path(given["hydra.run.dir"])
    folder.mkdir(parents=True)
if "stop" in settings:
    print("train.py: " + settings["stop"], file=sys.stderr)
    sys.exit(2)
seed = int(given.get("seed", 0))
git = subprocess.run(["git", "-C", HERE, "rev-parse", "HEAD"], capture_output=True)
time.sleep(float(os.environ.get("JOB_STAYS", "0")))
metric = settings.get("metric", "val/acc").partition("/")[2]
config = {"seed": seed, "checkpoint": {"metric": "val/acc"}, "sweep": {"repeats": 4}}
(folder / "config.yaml").write_text(json.dumps(config))
swing = settings.get("swing", 0) * (seed % 2)
val = {metric: settings["accuracy"] + 0.001 * (seed % 7) + swing, "samples": 10000}
data = {"val": settings.get("images", "digits")}
facts = {"library": library.NAME, "commit": git.returncode, "cwd": os.getcwd(), "words": sys.argv[1:]}
kinds = {metric: {"lower_is_better": metric == "loss", "is_proportion": metric != "loss"}}
result = {"format": 1, "status": "done", "devices": 1, "val": val, "data": data, "tags": [json.dumps(facts)]}
result["metrics"] = kinds
(folder / "result.json").write_text(json.dumps(result))
"""  # noqa: E501


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "settings.json").write_text(json.dumps({"accuracy": 0.7, **settings}))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_plots: None) -> Path:
    """Create a git repository with one commit. The verdict uses this repository instead of the
    project.
    """
    folder = tmp_path / "repository"
    (folder / "conf/local").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "library.py").write_text('NAME = "first"\n')
    (folder / ".gitignore").write_text("/outputs\n/conf/local/*\n__pycache__\n/ignored.txt\n")
    write_settings(folder)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "First")
    monkeypatch.setattr(code_copy, "root", lambda: folder)
    monkeypatch.chdir(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run scripts/verdict.py with --json. Return the exit code and the printed values."""
    options = [] if any(word.startswith("sweep.resume") for word in words) else ["base=main"]
    repeats = [] if not options or "sweep.repeats" in str(words) else ["sweep.repeats=4"]
    code = main([*options, *repeats, *words, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else {"error": printed.err}


def facts(folder: Path, code: str) -> list[dict[str, Any]]:
    """Return the facts that the runs of a version have recorded about themselves, such as
    library and command line.
    """
    paths = sorted(folder.glob(f"*_{code}_block_*/result.json"))
    return [json.loads(json.loads(path.read_text())["tags"][0]) for path in paths]


@pytest.mark.slow(seconds=2)
def test_verdict_script_compares_the_working_tree_with_the_base_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, accuracy=0.6)
    code, values = run(capsys)
    assert (code, values["verdict"], values["exit_code"]) == (4, WORSE, 4)
    assert values["head"] == "working tree"
    assert values["base"] == f"main ({git(repository, 'rev-parse', 'HEAD')[:10]})"
    page = json.loads((Path(values["sweep"]) / "report.json").read_text())
    assert page["lead"]["sentence"] == values["sentence"]
    assert Path(values["report"]).is_file()


@pytest.mark.slow(seconds=3)
def test_verdict_runs_each_version_with_its_own_library_and_with_the_seeds_of_the_other(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each version composes the metric that a verdict compares by default.
    write_settings(repository, composed="auto")
    git(repository, "commit", "-qam", "Second")
    (repository / "library.py").write_text('NAME = "second"\n')
    # Change the time of a file. A plain git status would then rewrite the index of the repository.
    os.utime(repository / "train.py", (1, 1))
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    before = bytes_of(repository)
    code, values = run(capsys, "seed=7", "sweep.repeats=6")
    assert (code, bytes_of(repository)) == (3, before)
    folder = Path(values["sweep"])
    jobs = read_jobs(folder).jobs
    assert [job.block for job in jobs] == [block for block in range(6) for _ in range(2)]
    assert {(job.overrides[0], job.seed) for job in jobs} == {
        (f"{CODE}={code}", 7 + block) for code in (BASE, HEAD) for block in range(6)
    }
    # Do not check that the order of the versions varies. By chance, one of 32 sweeps of 6 repeats
    # has the same order in all repeats.
    orders = [tuple(job.overrides[0] for job in jobs[i : i + 2]) for i in range(0, 12, 2)]
    assert all(len(set(order)) == 2 for order in orders)
    for version, name in ((BASE, "first"), (HEAD, "second")):
        recorded = facts(folder, version)
        assert len(recorded) == 6
        assert all(f"seed={job.seed}" in str(recorded) for job in jobs)
        assert {fact["library"] for fact in recorded} == {name}
        # The runs must start in the working tree, so that relative paths of data are valid in both
        # versions.
        assert {fact["cwd"] for fact in recorded} == {str(repository)}
        # The code of a version must not be inside a git repository. Otherwise a run would record
        # the commit of the working tree.
        assert all(fact["commit"] != 0 for fact in recorded)


@pytest.mark.slow(seconds=2)
def test_verdict_copies_no_ignored_and_no_large_files_and_notes_other_requirements(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "gone.py").write_text("")
    (repository / "large.bin").write_bytes(b"0" * 2000)
    (repository / "huge.bin").write_bytes(b"0" * 9000)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "Second")
    (repository / "gone.py").unlink()
    (repository / "new.py").write_text("1\n")
    (repository / "requirements.txt").write_text("torch\n")
    (repository / "ignored.txt").write_text("1\n")
    (repository / "conf/local/default.yaml").write_text("seed: 1\n")
    (repository / "link").symlink_to("/nowhere")
    monkeypatch.setattr(code_copy, "LARGEST", 1999 + len(TRAIN))
    (repository / "large.bin").write_bytes(b"0" * (2000 + len(TRAIN)))
    _, values = run(capsys, "sweep.repeats=2")
    copies = Path(values["sweep"]) / "code"
    assert (copies / "base/gone.py").exists() and not (copies / "head/gone.py").exists()
    assert (copies / "head/new.py").exists() and not (copies / "base/new.py").exists()
    assert (copies / "head/link").is_symlink()
    assert (copies / "base/large.bin").exists() and not (copies / "head/large.bin").exists()
    assert not (copies / "base/huge.bin").exists() and not (copies / "head/huge.bin").exists()
    for words in ("huge.bin, large.bin", "requirements.txt"):
        assert any(words in note for note in values["notes"])
    for name in (BASE, HEAD):
        assert (copies / name / "conf/local/default.yaml").read_text() == "seed: 1\n"
        assert not (copies / name / "ignored.txt").exists()
        assert not (copies / name / ".git").exists()


def bytes_of(folder: Path) -> dict[str, str]:
    """Return a dictionary from path to hash of all files of a repository. It includes .git, but
    not outputs/ and __pycache__/.
    """
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not {"outputs", "__pycache__"} & {*path.relative_to(folder).parts}
    }


@pytest.mark.nightly
@pytest.mark.slow(seconds=7)
def test_verdicts_are_numbered_for_each_base_and_ignore_the_working_tree_when_head_is_a_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [run(capsys, "sweep.repeats=2", f"seed={seed}")[1]["number"] for seed in (1, 2)]
    write_settings(repository, accuracy=0.8)
    git(repository, "commit", "-qam", "Second")
    _, other = run(capsys, "sweep.repeats=2")
    write_settings(repository, accuracy=0.1)
    code, third = run(capsys, "base=main~1", "head=main")
    assert (code, third["verdict"]) == (0, BETTER)
    assert third["head"] == f"main ({git(repository, 'rev-parse', 'HEAD')[:10]})"
    assert [*numbers, other["number"], third["number"]] == [1, 2, 1, 3]
    assert (third["level"], third["false_in_100"]) == (LEVEL, 6)
    ledger = json.loads((repository / "outputs/verdicts.json").read_text())
    assert sorted(len(entries) for entries in ledger["bases"].values()) == [1, 3]


def pairs_of(folder: str | Path) -> int:
    return len(read_jobs(Path(folder)).jobs) // 2


@pytest.mark.slow(seconds=4)
def test_same_verdict_again_adds_pairs_after_it_stopped_and_is_refused_at_its_limit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("sweep.repeats=auto", "sweep.max_repeats=6")
    code, first = run(capsys, *options)
    assert (code, first["verdict"], pairs_of(first["sweep"])) == (3, NO_DIFFERENCE, FIRST)
    _, again = run(capsys, *options)
    assert Path(again["sweep"]).samefile(first["sweep"])
    assert (again["number"], pairs_of(first["sweep"])) == (1, 6)
    code, refused = run(capsys, *options)
    assert code == 2 and Path(first["sweep"]).name in refused["error"]
    # Other seeds, or other code, are another question.
    assert run(capsys, *options, "seed=100")[1]["number"] == 2
    write_settings(repository, accuracy=0.6)
    assert run(capsys, *options)[1]["number"] == 3


@pytest.mark.parametrize(
    ("settings", "words", "part"),
    [
        ({"refuse": "data.speling=1: unknown key"}, (), "head"),
        ({"metric": "val/loss"}, (), "checkpoint.metric"),
        ({}, ("base=nothing",), "base=nothing"),
        ({}, ("sweep.repeats=1",), "sweep.repeats=1"),
        ({}, ("cluster=slurm",), "cluster=slurm"),
        ({}, ("model.nam=x",), "model.nam"),
    ],
)
def test_refused_verdict_leaves_no_sweep_folder_and_no_verdicts_json(
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    words: tuple[str, ...],
    part: str,
) -> None:
    write_settings(repository, **settings)
    code, values = run(capsys, *words)
    assert code == 2
    assert part in values["error"]
    assert not list(repository.glob("outputs/sweeps/*/*"))
    assert not (repository / "outputs/verdicts.json").exists()


@pytest.mark.slow(seconds=3)
def test_verdict_is_refused_when_the_code_of_the_metric_has_changed(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = compose_command(parse_command_line([]))
    from timm_parallel.checked_configs import choose_headline, metric_of

    choose_headline(command.config)
    metric = metric_of(command.config.train.task, command.config.checkpoint.metric)
    [function] = {f for f in vars(metric).values() if callable(f) and "diagonal" in f.__name__}
    name = f"{function.__module__.replace('.', '/')}.py"
    (repository / name).parent.mkdir(parents=True)
    source = (ROOT / name).read_text()
    (repository / name).write_text(source)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "Metrics")
    # A changed comment and a new function do not change the code of the metric.
    (repository / name).write_text(f"# A comment.\n{source}\n\ndef other() -> None: ...\n")
    assert run(capsys, "sweep.repeats=2")[0] == 3
    (repository / name).write_text(source.replace("counts.diag()", "counts.diag().square()"))
    assert run(capsys)[0] == 2


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"images": "others"}, "data.val"),
        ({"stop": "data.root=x: no such folder"}, "head: train.py: data.root=x: no such folder"),
    ],
)
def test_verdict_ends_in_its_first_repeat_when_images_differ_or_a_version_refuses_its_job(
    repository: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], part: str
) -> None:
    write_settings(repository, **settings)
    code, values = run(capsys)
    assert (code, values["verdict"]) == (2, REFUSED)
    assert part in values["sentence"]
    assert sum(job.status == "done" for job in read_jobs(Path(values["sweep"])).jobs) <= 2


@pytest.mark.slow(seconds=8)
def test_verdict_ends_alike_after_a_kill_between_two_pairs_or_in_a_pair(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The difference alternates between 3 points and 1 point, so that 4 pairs do not decide.
    write_settings(repository, accuracy=0.71, swing=0.02)
    code, whole = run(capsys, "sweep.repeats=auto")
    folder = Path(whole["sweep"])
    order = [job.name for job in read_jobs(folder).jobs]
    # The verdict stops by itself when it can decide, before the 12 pairs of its limit.
    assert (code, whole["verdict"]) == (0, BETTER) and FIRST + 1 < len(order) // 2 < 12
    # A resumed verdict uses its copies of the code, not the working tree.
    write_settings(repository, accuracy=0.1)
    for pairs, is_in_a_pair in ((FIRST + 1, True), (FIRST, False)):
        jobs = read_jobs(folder)
        # Write what a killed verdict leaves: its jobs so far, in a pair with one that was running.
        for job in jobs.jobs[2 * pairs :]:
            shutil.rmtree(folder / job.folder)
        jobs.jobs, jobs.status = jobs.jobs[: 2 * pairs + 2 * is_in_a_pair], "running"
        for job in jobs.jobs[2 * pairs :]:
            job.reset()
        if is_in_a_pair:
            jobs.jobs[-2].status = "running"
            (folder / jobs.jobs[-2].folder).mkdir()
        jobs.write()
        finished = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
        assert run(capsys, f"sweep.resume={folder}") == (code, whole)
        assert [job.name for job in read_jobs(folder).jobs] == order
        # A job that ran again would have changed the time of its file.
        assert {path: path.stat().st_mtime_ns for path in finished} == finished


# Files that the jobs of a verdict write, and a program that starts a verdict.
RESULTS = "outputs/sweeps/*/*/*/result.json"
KILLED = """
import sys
from pathlib import Path
from timm_parallel.lab import code_copy
from scripts.verdict import main
code_copy.root = lambda: Path(sys.argv[1])
main(["base=main", "sweep.repeats=auto"])
"""


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_killed_process_of_a_verdict_leaves_what_a_resume_continues(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, accuracy=0.8)
    environment = {**os.environ, "JOB_STAYS": "0.7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(repository)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list(repository.glob(RESULTS))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in repository.glob(RESULTS)}
    assert 2 <= len(done) < 8
    [folder] = repository.glob("outputs/sweeps/*/*")
    assert run(capsys, f"sweep.resume={folder}")[0] == 0
    assert len(list(repository.glob(RESULTS))) == 8
    assert {path: path.stat().st_mtime_ns for path in done} == done


@pytest.mark.slow(seconds=3)
def test_train_py_with_sweep_resume_continues_a_verdict_and_the_checkpoint_of_its_last_run(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = run(capsys, "sweep.repeats=2")
    folder = Path(values["sweep"])
    jobs = read_jobs(folder)
    stopped = folder / jobs.jobs[-1].folder
    jobs.jobs[-1].status = "running"
    jobs.write()
    (stopped / "result.json").unlink()
    (stopped / "checkpoints").mkdir()
    (stopped / "checkpoints/last.pt").write_bytes(b"")
    assert multirun(parse_command_line(["-m", f"sweep.resume={folder}"])) == 3
    facts = json.loads(json.loads((stopped / "result.json").read_text())["tags"][0])
    assert facts["words"] == [f"resume='{stopped.resolve()}'"]


@NEEDS_GIT
@pytest.mark.slow(seconds=120)
@pytest.mark.nightly
@pytest.mark.processes
def test_verdict_on_this_project_is_worse_when_the_learning_rate_is_100_times_smaller(
    tmp_path: Path,
) -> None:
    copy = make_template(tmp_path / "project")
    path = copy / "conf/experiment/digits_resnet10t.yaml"
    path.write_text(path.read_text().replace("lr: 3e-3", "lr: 3e-5"))
    before = bytes_of(copy)
    overrides = ["experiment=digits_resnet10t", "train.epochs=3"]
    overrides += ["checkpoint.metric=val/acc"]
    command = [sys.executable, "scripts/verdict.py", "base=main", *overrides, "--json"]
    done = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 4, done.stderr
    values = json.loads(done.stdout)
    assert (values["verdict"], pairs_of(copy / values["sweep"])) == (WORSE, FIRST)
    assert bytes_of(copy) == before
