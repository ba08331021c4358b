"""Verdicts on a change of the code: what is decided from the runs, and how the runs of two versions
come about. Most tests use a small repository whose train.py writes a result at once.
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
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import LEVEL
from timm_parallel.lab.analysis.verdict import (
    BASE,
    BETTER,
    CODE,
    FAILED,
    HEAD,
    METRIC,
    NO_DIFFERENCE,
    REFUSED,
    SPEED,
    UNKNOWN,
    WORSE,
    Record,
    Verdict,
    judge,
)
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.verdict import versions
from timm_parallel.project import root
from timm_parallel.record.jobs import read_jobs

ROOT = root()
ACCURACIES = (0.701, 0.698, 0.705, 0.695, 0.702, 0.699)
NO_GIT = shutil.which("git") is None


def record_of(code: str, block: int, value: float | None, **changes: Any) -> RunRecord:
    """Return the record of an invented run. `value`: of the metric; None: it was lost."""
    name = changes.pop("metric", "val/acc")
    status = changes.pop("status", "done" if value is not None else "not_finite")
    result = {
        name.replace("/", "."): value,
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
    """Return the runs of both versions. `of_head`: changes of the runs of head."""
    old = [record_of(BASE, block, value) for block, value in enumerate(base)]
    return old + [record_of(HEAD, block, value, **of_head) for block, value in enumerate(head)]


def shifted(difference: float) -> list[float]:
    """Return accuracies that differ by about `difference` from ACCURACIES."""
    return [a + difference + 0.002 * math.sin(3 * i) for i, a in enumerate(ACCURACIES)]


def verdict_on(runs: Sequence[RunRecord], number: int = 1, on: str = METRIC) -> Verdict:
    return judge(runs, Record(BASE, HEAD, number, on))


def rows_of(verdict: Verdict) -> dict[str, str]:
    """Return the words of the table by measure."""
    return {row["measure"]: row["verdict"] for row in verdict.rows}


@pytest.mark.parametrize(
    ("difference", "word"), [(0.03, BETTER), (-0.03, WORSE), (0.0, NO_DIFFERENCE)]
)
def test_verdict_names_direction_of_difference(difference: float, word: str) -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(difference)))
    assert verdict.word == word
    assert rows_of(verdict) == {"val/acc": word, "images/s": NO_DIFFERENCE, "memory, MiB": "—"}
    assert verdict.contrasts[METRIC].effect == pytest.approx(difference, abs=0.003)


def test_verdict_calls_lower_loss_better() -> None:
    base = [record_of(BASE, i, 0.5 + 0.01 * i, metric="val/loss") for i in range(5)]
    head = [record_of(HEAD, i, 0.4 + 0.011 * i, metric="val/loss") for i in range(5)]
    assert verdict_on(base + head).word == BETTER
    assert verdict_on([*map(_swap, head), *map(_swap, base)]).word == WORSE


def _swap(run: RunRecord) -> RunRecord:
    other = BASE if run.config[CODE] == HEAD else HEAD
    value = run.result["val.loss"]
    return record_of(other, run.block, value, metric="val/loss")


def test_no_difference_says_what_seeds_could_have_shown() -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(0.001)))
    contrast = verdict.contrasts[METRIC]
    assert verdict.word == NO_DIFFERENCE
    assert contrast.detectable is not None and 0 < contrast.detectable < 0.05
    metric = verdict.rows[0]
    assert metric["could have shown"].endswith("points")


def test_later_verdict_needs_larger_difference() -> None:
    runs = runs_of(ACCURACIES, shifted(0.0035))
    assert verdict_on(runs, number=1).word == BETTER
    assert verdict_on(runs, number=20).word == NO_DIFFERENCE


def test_levels_of_all_verdicts_sum_to_level() -> None:
    records = [Record(BASE, HEAD, number) for number in range(1, 10_001)]
    total = sum(record.level for record in records)
    assert total <= LEVEL
    assert total == pytest.approx(LEVEL, rel=1e-3)
    for record in records[:5]:
        both = record.level_of(METRIC) + record.level_of(SPEED)
        assert both == pytest.approx(record.level)
        assert record.level_of(METRIC) > record.level_of(SPEED)


@pytest.mark.parametrize("status", ["out_of_memory", "not_finite"])
def test_head_that_loses_runs_is_worse(status: str) -> None:
    head = [record_of(HEAD, i, a) for i, a in enumerate(shifted(0.03)[:-1])]
    lost = record_of(HEAD, len(ACCURACIES) - 1, None, status=status)
    verdict = verdict_on([*runs_of(ACCURACIES, []), *head, lost])
    assert verdict.word == WORSE
    assert f"seed {lost.seed} ({status.replace('_', ' ')})" in verdict.sentence


def test_losses_that_both_versions_have_are_not_worse() -> None:
    lost = [*ACCURACIES[:-1], None]
    assert verdict_on(runs_of(lost, lost)).word == NO_DIFFERENCE


def test_head_with_all_runs_lost_is_worse() -> None:
    assert verdict_on(runs_of(ACCURACIES, [None] * len(ACCURACIES))).word == WORSE


def test_losses_of_base_alone_do_not_make_head_better() -> None:
    assert verdict_on(runs_of([None] * len(ACCURACIES), ACCURACIES)).word == NO_DIFFERENCE


@pytest.mark.parametrize(("status", "word"), [("failed", FAILED), ("waiting", UNKNOWN)])
def test_failed_or_waiting_job_prevents_verdict(status: str, word: str) -> None:
    runs = [*runs_of(ACCURACIES, shifted(0.03)[:-1]), record_of(HEAD, 5, None, status=status)]
    assert verdict_on(runs).word == word


@pytest.mark.parametrize("key", ["data.val", "val.samples"])
def test_other_images_are_refused_by_name(key: str) -> None:
    verdict = verdict_on(runs_of(ACCURACIES, shifted(0.03), result={key: 7}))
    assert verdict.word == REFUSED
    assert key in verdict.sentence


@pytest.mark.parametrize("key", ["parameters", "steps", "samples_seen", "flops_per_step"])
def test_other_compute_is_a_note(key: str) -> None:
    base = [record_of(BASE, i, a, result={key: 1000}) for i, a in enumerate(ACCURACIES)]
    head = [record_of(HEAD, i, a, result={key: 2500}) for i, a in enumerate(shifted(0.03))]
    verdict = verdict_on(base + head)
    assert verdict.word == BETTER
    assert any("2,500" in note and "1,000" in note for note in verdict.notes)
    assert not any("Not equal" in note for note in verdict_on(base).notes)


def slower(**changes: Any) -> list[RunRecord]:
    """Return runs whose head has equal accuracy and three quarters of the speed."""
    base = [record_of(BASE, i, a) for i, a in enumerate(ACCURACIES)]
    return base + [
        record_of(HEAD, i, a, speed=750 + 5 * (i % 3), **changes)
        for i, a in enumerate(shifted(0.0))
    ]


def test_slower_head_is_worse_on_speed_only() -> None:
    verdict = verdict_on(slower())
    assert verdict.word == NO_DIFFERENCE
    assert rows_of(verdict)["images/s"] == WORSE
    assert verdict_on(slower(), on=SPEED).word == WORSE


def test_speed_of_concurrent_runs_is_not_compared() -> None:
    verdict = verdict_on(slower(result={"neighbours": 1}), on=SPEED)
    assert rows_of(verdict)["images/s"] == "not measured"
    assert "6 of 12 runs were next to other jobs" in verdict.notes[-1]
    waiting = [record_of(BASE, 0, 0.7, result={"flags": ["load"]})]
    assert not any("images/s" in note for note in verdict_on(waiting).notes)


def test_difference_that_all_pairs_show_is_found_on_a_disturbed_machine() -> None:
    """Other load changes the speed of a block by a third, and that of a run by 4 %."""
    runs = []
    for block, accuracy in enumerate(ACCURACIES):
        for code, share in ((BASE, 1.0), (HEAD, 0.8)):
            noise = 1 + 0.04 * math.sin(5 * block + (code == HEAD))
            speed = share * noise * (1000 + 330 * math.cos(block))
            runs.append(record_of(code, block, accuracy, speed=speed, result={"flags": ["load"]}))
    verdict = verdict_on(runs, on=SPEED)
    assert verdict.word == WORSE
    assert verdict.contrasts[SPEED].effect == pytest.approx(0.8, abs=0.05)
    assert "12 of 12 runs had other load" in verdict.notes[-1]


# A train.py that writes the files of a run at once. settings.json of its version says which.
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
    print(json.dumps({"checkpoint": {"metric": settings.get("metric", "val/acc")}}))
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
val = {metric: settings["accuracy"] + 0.001 * (seed % 7), "samples": 10000}
data = {"val": settings.get("images", "digits")}
facts = {"library": library.NAME, "commit": git.returncode, "cwd": os.getcwd(), "words": sys.argv[1:]}
result = {"format": 1, "status": "done", "devices": 1, "val": val, "data": data, "tags": [json.dumps(facts)]}
(folder / "result.json").write_text(json.dumps(result))
"""  # noqa: E501


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "settings.json").write_text(json.dumps({"accuracy": 0.7, **settings}))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_plots: None) -> Path:
    """A repository with one commit, which counts as the project of the verdict."""
    if NO_GIT:
        pytest.skip("needs git")
    folder = tmp_path / "repository"
    (folder / "conf/local").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "library.py").write_text('NAME = "first"\n')
    (folder / ".gitignore").write_text("/outputs\n/conf/local/*\n__pycache__\n/ignored.txt\n")
    write_settings(folder)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "First")
    monkeypatch.setattr(versions, "root", lambda: folder)
    monkeypatch.chdir(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run the script with --json. Return its exit code and what it printed."""
    options = [] if any(word.startswith("sweep.resume") for word in words) else ["base=main"]
    repeats = [] if not options or "sweep.repeats" in str(words) else ["sweep.repeats=4"]
    code = main([*options, *repeats, *words, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else {"error": printed.err}


def facts(folder: Path, code: str) -> list[dict[str, Any]]:
    """Return what the runs of a version have recorded of themselves."""
    paths = sorted(folder.glob(f"*_{code}_block_*/result.json"))
    return [json.loads(json.loads(path.read_text())["tags"][0]) for path in paths]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("accuracy", "code", "word"), [(0.8, 0, BETTER), (0.6, 4, WORSE), (0.7, 3, NO_DIFFERENCE)]
)
def test_script_compares_working_tree_with_base(
    repository: Path, capsys: pytest.CaptureFixture[str], accuracy: float, code: int, word: str
) -> None:
    write_settings(repository, accuracy=accuracy)
    exit_code, values = run(capsys)
    assert (exit_code, values["verdict"], values["exit_code"]) == (code, word, code)
    assert values["head"] == "working tree"
    assert values["base"] == f"main ({git(repository, 'rev-parse', 'HEAD')[:10]})"
    page = json.loads((Path(values["sweep"]) / "report.json").read_text())
    assert page["lead"]["sentence"] == values["sentence"]
    assert Path(values["report"]).is_file()


@pytest.mark.slow(seconds=3)
def test_both_versions_run_in_each_block_with_equal_seeds(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = run(capsys, "seed=7", "sweep.repeats=6")
    jobs = read_jobs(Path(values["sweep"])).jobs
    assert [job.block for job in jobs] == [block for block in range(6) for _ in range(2)]
    assert {(job.overrides[0], job.seed) for job in jobs} == {
        (f"{CODE}={code}", 7 + block) for code in (BASE, HEAD) for block in range(6)
    }
    # With 6 blocks, one of 32 sweeps would have one order in all of them.
    orders = [tuple(job.overrides[0] for job in jobs[i : i + 2]) for i in range(0, 12, 2)]
    assert all(len(set(order)) == 2 for order in orders)
    assert all(f"seed={job.seed}" in str(facts(Path(values["sweep"]), BASE)) for job in jobs)


@pytest.mark.slow(seconds=2)
def test_each_version_runs_its_own_train_and_library(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "library.py").write_text('NAME = "second"\n')
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    _, values = run(capsys)
    folder = Path(values["sweep"])
    for code, name in ((BASE, "first"), (HEAD, "second")):
        recorded = facts(folder, code)
        assert len(recorded) == 4
        assert {fact["library"] for fact in recorded} == {name}
        # Relative paths of data mean what they mean in the working tree.
        assert {fact["cwd"] for fact in recorded} == {str(repository)}
        # The commit of the working tree is not that of the version.
        assert all(fact["commit"] != 0 for fact in recorded)


@pytest.mark.slow(seconds=2)
def test_head_can_be_a_commit(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_settings(repository, accuracy=0.8)
    git(repository, "commit", "-qam", "Second")
    write_settings(repository, accuracy=0.1)
    code, values = run(capsys, "base=main~1", "head=main")
    assert (code, values["verdict"]) == (0, BETTER)
    assert values["head"] == f"main ({git(repository, 'rev-parse', 'HEAD')[:10]})"


@pytest.mark.slow(seconds=2)
def test_copies_hold_what_git_would_see(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "gone.py").write_text("")
    (repository / "large.bin").write_bytes(b"0" * 2000)
    (repository / "huge.bin").write_bytes(b"0" * 9000)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "Second")
    (repository / "gone.py").unlink()
    (repository / "new.py").write_text("1\n")
    (repository / "ignored.txt").write_text("1\n")
    (repository / "conf/local/default.yaml").write_text("seed: 1\n")
    (repository / "link").symlink_to("/nowhere")
    monkeypatch.setattr(versions, "LARGEST", 1999 + len(TRAIN))
    (repository / "large.bin").write_bytes(b"0" * (2000 + len(TRAIN)))
    _, values = run(capsys)
    copies = Path(values["sweep"]) / "code"
    assert (copies / "base/gone.py").exists() and not (copies / "head/gone.py").exists()
    assert (copies / "head/new.py").exists() and not (copies / "base/new.py").exists()
    assert (copies / "head/link").is_symlink()
    assert (copies / "base/large.bin").exists() and not (copies / "head/large.bin").exists()
    assert not (copies / "base/huge.bin").exists() and not (copies / "head/huge.bin").exists()
    assert any("huge.bin, large.bin" in note for note in values["notes"])
    for name in (BASE, HEAD):
        assert (copies / name / "conf/local/default.yaml").read_text() == "seed: 1\n"
        assert not (copies / name / "ignored.txt").exists()
        assert not (copies / name / ".git").exists()


@pytest.mark.slow(seconds=2)
def test_changed_requirements_are_a_note(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "requirements.txt").write_text("torch\n")
    assert any("requirements.txt" in note for note in run(capsys)[1]["notes"])


def bytes_of(folder: Path) -> dict[str, str]:
    """Hash all files of a repository, with .git, but without what it ignores."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not {"outputs", "__pycache__"} & {*path.relative_to(folder).parts}
    }


@pytest.mark.slow(seconds=2)
def test_working_tree_and_git_stay_as_they_are(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, accuracy=0.8)
    # With other times of files than in the index, git status would refresh it.
    os.utime(repository / "library.py", (1, 1))
    before = bytes_of(repository)
    run(capsys)
    assert bytes_of(repository) == before


@pytest.mark.slow(seconds=7)
def test_ledger_counts_verdicts_on_one_base(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [run(capsys, "sweep.repeats=2")[1]["number"] for _ in range(2)]
    write_settings(repository, accuracy=0.8)
    git(repository, "commit", "-qam", "Second")
    _, other = run(capsys, "sweep.repeats=2")
    _, third = run(capsys, "sweep.repeats=2", "base=main~1")
    _, new = run(capsys, "sweep.repeats=2", "base=main~1", "ledger=new")
    _, next_one = run(capsys, "sweep.repeats=2", "base=main~1")
    assert [*numbers, other["number"], third["number"]] == [1, 2, 1, 3]
    assert [new["number"], next_one["number"]] == [1, 2]
    assert third["level"] == pytest.approx(LEVEL / 12)
    ledger = json.loads((repository / "outputs/verdicts.json").read_text())
    assert sorted(len(entries) for entries in ledger["bases"].values()) == [1, 5]


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
def test_refused_verdict_leaves_nothing(
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
def test_metric_with_other_code_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = compose_command(parse_command_line([]))
    from timm_parallel.config.suggest import metric_of

    metric = metric_of(command.config.checkpoint.metric)
    [function] = {f for f in vars(metric).values() if callable(f) and "diagonal" in f.__name__}
    name = f"{function.__module__.replace('.', '/')}.py"
    (repository / name).parent.mkdir(parents=True)
    source = (ROOT / name).read_text()
    (repository / name).write_text(source)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "Metrics")
    # Comments and other functions do not count.
    (repository / name).write_text(f"# A comment.\n{source}\n\ndef other() -> None: ...\n")
    assert run(capsys)[0] == 3
    (repository / name).write_text(source.replace("counts.diag()", "counts.diag().square()"))
    assert run(capsys)[0] == 2


def test_other_images_end_verdict_after_first_block(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, images="others")
    code, values = run(capsys)
    assert (code, values["verdict"]) == (2, REFUSED)
    assert "data.val" in values["sentence"]
    assert sum(job.status == "done" for job in read_jobs(Path(values["sweep"])).jobs) == 2


def test_job_that_version_refuses_ends_verdict_with_its_message(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, stop="data.root=x: no such folder")
    code, values = run(capsys)
    assert code == 2
    assert "head: train.py: data.root=x: no such folder" in values["sentence"]


KILLED = """
import sys
from pathlib import Path
from timm_parallel.lab.verdict import versions
from scripts.verdict import main
versions.root = lambda: Path(sys.argv[1])
main(["base=main", "sweep.repeats=3"])
"""


@pytest.mark.slow(seconds=4)
def test_killed_verdict_continues_without_repeating_finished_jobs(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, accuracy=0.8)
    before = bytes_of(repository)
    environment = {**os.environ, "JOB_STAYS": "0.7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(repository)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(finished(repository)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = finished(repository)
    [folder] = repository.glob("outputs/sweeps/*/*")
    assert 2 <= len(done) < 6
    # The working tree has changed since; the copies have not.
    write_settings(repository, accuracy=0.1)
    code, values = run(capsys, f"sweep.resume={folder}")
    assert (code, values["number"]) == (0, 1)
    assert len(finished(repository)) == 6
    # A repeated job would write these files again.
    assert {path: path.stat().st_mtime_ns for path in done} == done
    write_settings(repository, accuracy=0.8)
    assert bytes_of(repository) == before


def finished(repository: Path) -> dict[Path, int]:
    """Return when each result was written."""
    paths = repository.glob("outputs/sweeps/*/*/*/result.json")
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.slow(seconds=3)
def test_sweep_resume_of_train_continues_verdict(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(repository, accuracy=0.8)
    _, values = run(capsys)
    folder = Path(values["sweep"])
    [first, *_] = sorted(folder.glob("*_head_block_*"))
    shutil.rmtree(first)
    assert multirun(parse_command_line(["-m", f"sweep.resume={folder}"])) == 0
    assert (first / "result.json").is_file()


@pytest.mark.slow(seconds=3)
def test_unfinished_run_continues_from_its_checkpoint(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = run(capsys)
    folder = Path(values["sweep"])
    jobs = read_jobs(folder)
    stopped = folder / jobs.jobs[-1].folder
    jobs.jobs[-1].status = "running"
    jobs.write()
    (stopped / "result.json").unlink()
    (stopped / "checkpoints").mkdir()
    (stopped / "checkpoints/last.pt").write_bytes(b"")
    assert run(capsys, f"sweep.resume={folder}")[0] == 3
    facts = json.loads(json.loads((stopped / "result.json").read_text())["tags"][0])
    assert facts["words"] == [f"resume='{stopped.resolve()}'"]


@pytest.mark.slow(seconds=120)
@pytest.mark.nightly
@pytest.mark.processes
def test_changed_default_of_real_project_is_found_worse(tmp_path: Path) -> None:
    if NO_GIT or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    copy = tmp_path / "project"
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    git(copy, "init", "-q", "-b", "main")
    git(copy, "add", ".")
    git(copy, "commit", "-q", "-m", "First")
    path = copy / "conf/experiment/digits_resnet10t.yaml"
    path.write_text(path.read_text().replace("lr: 3e-3", "lr: 3e-5"))
    before = bytes_of(copy)
    overrides = ["experiment=digits_resnet10t", "train.epochs=3"]
    overrides += ["checkpoint.metric=val/acc", "sweep.repeats=3"]
    command = [sys.executable, "scripts/verdict.py", "base=main", *overrides, "--json"]
    done = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["verdict"] == WORSE
    assert bytes_of(copy) == before
