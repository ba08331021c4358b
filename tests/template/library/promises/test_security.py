"""A run is protected against other users and the network."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from timm_parallel.faults.failure import RankExits, failure_text
from timm_parallel.keys import ResolvedParallel
from timm_parallel.lab.image_check import CheckedImage, show_check, summarize
from timm_parallel.launch import torchrun
from timm_parallel.launch.rank import keep_compiled_code_private
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import HidingFormatter, mask
from timm_parallel.run import checkpoint
from timm_parallel.testing.commands import Train

CONTENTS: dict[str, Any] = {
    "model": {},
    "progress": {"step": 1, "epoch": 0, "best_values": {}},
    "classes": [],
    "made_by": {},
}


def test_file_and_checkpoint_writes_do_not_follow_a_symlink_at_their_temporary_name(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".result.json.{os.getpid()}.tmp").symlink_to(victim)
    write_text(tmp_path / "result.json", "{}")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("step_1.pt", "last.pt"):
        (folder / f".{name}.tmp").symlink_to(victim)
    checkpoint.save(folder, CONTENTS, step=1, keep=1, is_best=False)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "result.json").is_symlink() and not (folder / "step_1.pt").is_symlink()


def test_run_files_and_checkpoints_are_private_under_umask_077(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "run" / "a.json", "{}")
        checkpoint.save(tmp_path / "run" / "checkpoints", CONTENTS, step=1, keep=1, is_best=False)
    finally:
        os.umask(before)
    wrong = [path for path in (tmp_path / "run").rglob("*") if path.stat().st_mode & 0o077]
    assert wrong == []


ESCAPES = "\x1b[2J\x9b31m\u202e\x07"


def test_control_characters_of_file_and_class_names_are_escaped_in_printed_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"red{ESCAPES}.png"
    image = CheckedImage("train", 0, name, (f"c{ESCAPES}",), error="")
    show_check(summarize([f"c{ESCAPES}"], ["train"], [image, replace(image, index=1)]))
    record = logging.LogRecord("", logging.INFO, "", 1, f"a\n\tb {name}", None, None)
    text = HidingFormatter("%(message)s").format(record)
    assert text.startswith("a\n\tb red\\x1b[2J")
    failure = failure_text(
        {"reason": name, "traceback": None, "shows_traceback": True, "log": None}
    )
    for shown in (capsys.readouterr().out, text, failure, mask(name)):
        assert "\\x1b[2J" in shown and not any(
            character in shown for character in "\x1b\x9b\u202e\x07"
        )


def test_torchinductor_cache_folder_is_in_home_unless_user_sets_a_folder_outside_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache(given: str = "") -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        if not given:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        keep_compiled_code_private()
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert cache().is_relative_to(Path.home())
    assert cache("/tmp/torchinductor_me").is_relative_to(Path.home())
    assert cache("/scratch/mine") == Path("/scratch/mine")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for home in (no_home, lambda: Path("/proc/nowhere")):
        monkeypatch.setattr(Path, "home", home)
        private = cache()
        assert private.parent == tmp_path and private.stat().st_mode & 0o777 == 0o700


def listening(process: psutil.Process) -> set[str]:
    """Return the IP addresses on which a process or its descendants listen."""
    return {
        connection.laddr.ip
        for one in [process, *process.children(recursive=True)]
        for connection in one.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_on_one_machine_listen_only_on_loopback(train: Train) -> None:
    running = train.start(
        "parallel=ddp", "parallel.devices=2", "train.epochs=500", "train.log_every=1"
    )
    running.wait_for_steps()
    assert listening(psutil.Process(running.process.pid)) == {"127.0.0.1"}
    worker = next(iter(running.workers().values()))
    assert worker.environ()["GLOO_SOCKET_IFNAME"] == worker.environ()["NCCL_SOCKET_IFNAME"] == "lo"
    assert running.signal(2).returncode == 130


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 143, 1: 2}, 2),
        ({0: -15, 1: -9}, 137),
        ({0: 143, 1: -15}, 143),
        ({}, 0),
    ],
)
def test_start_as_ranks_returns_exit_code_of_the_failed_rank_not_of_stopped_ranks(
    monkeypatch: pytest.MonkeyPatch, codes: dict[int, int], code: int
) -> None:
    monkeypatch.setattr(torchrun, "run_agent", lambda *given: RankExits(exit_codes=codes))
    parallel = ResolvedParallel(strategy="ddp", devices=2)
    assert torchrun.start_as_ranks(parallel, "evaluate.py", []) == code


def test_tensorboard_listens_on_loopback_with_the_documented_command(tmp_path: Path) -> None:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(
        argv=["tensorboard", "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false"]
    )
    board.launch()
    assert listening(psutil.Process()) <= {"127.0.0.1", "::1"}
