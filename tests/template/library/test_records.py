"""Record files are written completely or not at all, and read back unchanged."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.app import app
from tests.template.runs import resolved
from timm_parallel.config.arguments import errors_in_one_line
from timm_parallel.entry import run_command
from timm_parallel.lab.code_copy import git
from timm_parallel.launch import job
from timm_parallel.machine.files import claim_folder, write_json, write_text
from timm_parallel.record import environment
from timm_parallel.record.environment import CODE_DIFF, write_code_diff
from timm_parallel.record.result import (
    FORMAT,
    STATUSES,
    MetricsLog,
    Result,
    read_metrics,
    read_result,
    write_result,
)
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import warm_ranks


@pytest.mark.parametrize(("output", "dirty"), [(None, None), ("", False), (" M train.py", True)])
def test_environment_json_dirty_is_true_and_code_diff_written_only_for_uncommitted_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, dirty: bool | None
) -> None:
    """If git fails, dirty is null."""
    monkeypatch.setattr(environment, "output_of", lambda *command: output)
    job.prepare(resolved(), tmp_path)
    assert json.loads((tmp_path / "environment.json").read_text())["dirty"] is dirty
    assert (tmp_path / CODE_DIFF).exists() == bool(dirty)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text(
        "[user]\nname = me\nemail = me@example.org\n[color]\nui = always\n[diff]\nnoprefix = true\n"
        "[core]\nquotepath = off\n"
    )
    (root / "train.py").write_text("first\nsecond\n")
    (root / "notes.txt").write_text("1\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(("git", "-C", root, *words), check=True, timeout=60)
    return root


def test_saved_code_diff_restores_the_changed_files_when_applied_to_the_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """code.diff must contain staged and unstaged changes. Of untracked files, code.diff must
    list the names, but not the contents.
    """
    changed = {"train.py": "first\nchanged\n", "notes.txt": "2\n"}
    for name, text in changed.items():
        (repository / name).write_text(text)
    subprocess.run(("git", "-C", repository, "add", "notes.txt"), check=True, timeout=60)
    (repository / "mine").mkdir()
    (repository / "mine" / "model.py").write_text("untracked code")
    (repository / os.fsdecode(b"of \xff.py")).touch()
    monkeypatch.setattr(environment, "root", lambda: repository)
    write_code_diff(tmp_path, True)
    diff = tmp_path / CODE_DIFF
    assert (
        diff.read_text().startswith("untracked: mine/\nuntracked: of \ufffd.py\n")
        and "untracked code" not in diff.read_text()
    )
    subprocess.run(("git", "-C", repository, "reset", "-q", "--hard"), check=True, timeout=60)
    subprocess.run(("git", "-C", repository, "apply", diff), check=True, timeout=60)
    assert {name: (repository / name).read_text() for name in changed} == changed
    monkeypatch.setattr(environment, "root", lambda: tmp_path / "nowhere")
    write_code_diff(tmp_path, True)
    assert diff.read_text().startswith("cut: "), "git fails there"
    write_code_diff(tmp_path, False)
    assert not diff.exists(), "expected no code.diff of an earlier attempt"


def test_code_diff_larger_than_1_mb_is_truncated_at_the_end_of_a_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is cut in the middle would not be recognized and masked. Therefore code.diff
    must not end within a line.
    """
    (repository / "notes.txt").write_text("a line of 24 characters\n" * 100_000)
    monkeypatch.setattr(environment, "root", lambda: repository)
    write_code_diff(tmp_path, True)
    *lines, last = (tmp_path / CODE_DIFF).read_text().splitlines()
    assert last.startswith("cut: ")
    assert lines[-1] == "+a line of 24 characters" and len(lines) == pytest.approx(
        1_000_000 / 25, abs=10
    )
    monkeypatch.setattr(environment, "LARGEST", 3_000_000)
    write_code_diff(tmp_path, True)
    assert len((tmp_path / CODE_DIFF).read_text().splitlines()) > 100_000


def test_git_command_is_refused_in_one_line_when_git_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    main = errors_in_one_line(lambda argv: len(git(tmp_path, *argv)))
    assert main(["status"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "PATH" in line


@pytest.mark.slow(seconds=2)
def test_seconds_of_a_run_are_right_when_the_clock_is_changed_meanwhile(tmp_path: Path) -> None:
    change = tmp_path / "change_clock.py"
    change.write_text("import time\nreal = time.time\ntime.time = lambda: real() - 7 * 3600\n")
    config = resolved("model=tiny", "data=synthetic", "parallel=single", "train.max_steps=2")
    folder = tmp_path / "run"
    job.prepare(config, folder)
    began = time.perf_counter()
    ended = warm_ranks(config, folder, first=change)
    assert not ended.exit_codes
    seconds = read_result(folder).seconds
    took = time.perf_counter() - began
    assert 0 < seconds["start_to_first_step"] < seconds["total"] < took
    start = seconds["start"]
    assert set(start) == {
        *("launch", "imports", "devices", "data", "model", "setup", "first_batch", "first_step")
    }
    assert min(start.values()) >= 0
    assert sum(start.values()) == pytest.approx(seconds["start_to_first_step"])
    assert all(0 <= line["time"] < took for line in read_lines(folder / "metrics.jsonl"))


def test_threads_that_create_a_run_folder_with_the_same_name_get_different_folders(
    tmp_path: Path,
) -> None:
    """All threads claim the name at the same time. The parent folder does not exist yet."""
    count = 24
    gate, claimed = threading.Barrier(count), []

    def claim() -> None:
        gate.wait()
        claimed.append(claim_folder(tmp_path / "day" / "time"))

    threads = [threading.Thread(target=claim) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == count
    assert all(folder.is_dir() for folder in claimed)
    assert {folder.name for folder in claimed} == {
        "time",
        *(f"time_{number}" for number in range(1, count)),
    }
    (tmp_path / "run").write_text("a file")
    assert claim_folder(tmp_path / "run") == tmp_path / "run_1"


def crash(*words: object, **options: object) -> None:
    raise OSError("the power went out")


@pytest.mark.parametrize("moment", ["replace", "fsync"])
def test_record_file_keeps_its_old_content_when_a_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "result.json"
    write_json(path, "first")
    before = path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(os, moment, crash)
        with pytest.raises(OSError, match="power"):
            write_json(path, "second")
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"
    write_json(path, "second")
    assert path.read_text() != before


def test_train_py_names_the_file_in_one_line_when_the_disk_is_full_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        sys, "argv", ["train.py", "print_config=false", f"hydra.run.dir={tmp_path / 'run'}"]
    )
    assert run_command(app) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"train.py: [Errno {errno.ENOSPC}] No space left on device: "
        f"'{tmp_path}/run/.hydra/config.yaml'"
    ]


def test_record_file_is_written_when_the_file_system_cannot_fsync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "note", "here")
    assert (tmp_path / "note").read_text() == "here"


def reject(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_nan_and_infinity_become_null_in_json_files_and_metrics_jsonl(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    write_json(
        tmp_path / "value.json",
        {"loss": nan, "list": [1.5, -inf, (inf, 2)], "deep": {"er": {"x": nan}}},
    )
    text = (tmp_path / "value.json").read_text()
    expected = {"loss": None, "list": [1.5, None, [None, 2]], "deep": {"er": {"x": None}}}
    assert json.loads(text, parse_constant=reject) == expected
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, loss=nan, acc=0.5)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=reject) == {"step": 1, "loss": None, "acc": 0.5}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no result.json"),
        ('{"status": "do', "cannot be read as JSON"),
        ("[]", "not of this project"),
        ('{"loss": 1}', "not of this project"),
        (json.dumps({"status": "done", "format": FORMAT + 1}), f"format {FORMAT + 1} is newer"),
        (json.dumps({"status": "wonderful", "format": FORMAT}), "wonderful"),
        # Not UTF-8.
        ("\udcff\udcfe{", r"result\.json"),
    ],
)
def test_error_names_the_run_folder_and_the_reason_when_result_json_is_unusable(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "result.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=reason) as refusal:
        read_result(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_result_json_of_an_older_version_is_read_with_defaults_for_new_fields(
    tmp_path: Path,
) -> None:
    (tmp_path / "result.json").write_text(
        '{"format": 0, "status": "done", "val": {"acc": 0.5}, "of_old": 1}'
    )
    result = read_result(tmp_path)
    assert result.val == {"acc": 0.5}
    assert (result.memory, result.objective, result.reason) == ([], None, "")
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    assert read_result(tmp_path).status == "failed"


NUMBERS = st.none() | st.integers(0, 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TABLES = st.dictionaries(st.text(max_size=8), NUMBERS | st.text(max_size=8), max_size=4)
RESULTS = st.builds(
    Result,
    status=st.sampled_from(STATUSES),
    reason=st.text(),
    strategy=st.sampled_from(["single", "dp", "ddp"]),
    devices=st.integers(0, 64),
    threads_per_device=st.none() | st.integers(1, 64),
    world_size=st.none() | st.integers(1, 64),
    epochs=st.floats(0, 1e6),
    train=TABLES,
    val=TABLES,
    memory=st.lists(TABLES, max_size=3),
    objective=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    failure=st.none() | TABLES,
)


@settings(max_examples=60, deadline=None)
@given(result=RESULTS)
def test_result_is_unchanged_when_written_to_json_and_read_back(result: Result) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_result(Path(folder), result)
        assert read_result(Path(folder)) == result
        assert set(json.loads((Path(folder) / "result.json").read_text())) == {
            field.name for field in dataclasses.fields(Result)
        }


def logged(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(path)]


def test_metrics_jsonl_is_created_when_missing_and_extended_by_a_run_that_is_not_resumed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    for resume_step in (None, 0, 5):
        path.unlink(missing_ok=True)
        MetricsLog(path, resume_step).close()
        assert logged(path) == []
    for step in (1, 2):
        log = MetricsLog(path)
        log.write(step, loss=0.5)
        log.close()
    assert logged(path) == [(1, 0.5), (2, 0.5)]


DAMAGE = st.one_of(
    st.binary(min_size=1, max_size=40).map(lambda noise: noise.replace(b"\n", b"") or b"\0"),
    st.sampled_from(
        [
            b"\0" * 300,
            b"\xff\xfe",
            b"[" * 100_000,
            b"[1]",
            b'{"loss": 1}',
            b'{"step": null}',
            b"NaN",
        ]
    ),
)


@settings(max_examples=60, deadline=None)
@given(damage=DAMAGE, position=st.integers(0, 4), cut=st.integers(0, 3))
def test_resume_keeps_the_valid_lines_of_metrics_jsonl_up_to_its_step_and_continues_them(
    damage: bytes, position: int, cut: int
) -> None:
    """A damaged line may be anywhere, and the end of the last line may be missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines = [json.dumps({"step": step, "loss": step / 10}).encode() for step in (1, 2, 3, 4)]
        text = b"".join(line + b"\n" for line in [*lines[:position], damage, *lines[position:]])
        path.write_bytes(text[: len(text) - cut])
        expected = [(step, step / 10) for step in (1, 2, 3, 4)]
        # If only the line feed is missing, the last line is still complete.
        if cut > 1 and position < 4:
            del expected[-1]
        assert logged(path) == expected
        again = MetricsLog(path, resume_step=3)
        assert logged(path) == expected[:3]
        again.write(4, loss=0.9)
        # Each line can be read as soon as it is logged.
        assert logged(path) == [*expected[:3], (4, 0.9)]
        again.close()


def test_reader_of_a_damaged_metrics_jsonl_logs_the_number_of_skipped_lines_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 0.5}\n\0\0\n\xff\n{"step": 2, "loss": 0.5}\n{"step": 3, "lo'
    )
    for _ in range(2):
        assert logged(path) == [(1, 0.5), (2, 0.5)]
    [record] = caplog.records
    assert (record.levelname, record.args) == ("WARNING", (path, "2 damaged lines"))
