"""Tests that protect a run against other users and the network. The table of docs/security.md names
a test for each of its rows.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.template.runs import ROOT, run_python
from timm_parallel.faults.failure import RankExits, failure_text
from timm_parallel.keys import ResolvedParallel
from timm_parallel.lab.image_check import CheckedImage, show_check, summarize
from timm_parallel.launch import torchrun
from timm_parallel.launch.rank import keep_compiled_code_private
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import HidingFormatter, mask
from timm_parallel.state import checkpoint
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in (None, "/tmp/torchinductor_me"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        keep_compiled_code_private()
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(Path.home())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/mine")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/mine"


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", [Path("/proc/nowhere"), None])
def test_torchinductor_cache_folder_is_private_when_home_is_unknown_or_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path | None
) -> None:
    monkeypatch.setattr(Path, "home", no_home if home is None else lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code_private()
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.parent == tmp_path and cache.stat().st_mode & 0o777 == 0o700


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


# Script that start_as_ranks runs on two ranks. Rank 0 writes the addresses on which the launcher
# and the ranks listen to a file. Rank 1 exits with code 2.
STARTED = """
import os, sys
from pathlib import Path
import psutil
from torch import distributed
from timm_parallel.launch.rendezvous import open_store
from timm_parallel.machine.ranks import ranks_from_environment

ranks = ranks_from_environment(os.environ)
distributed.init_process_group("gloo", store=open_store(ranks), rank=ranks.rank, world_size=ranks.world_size)
distributed.barrier()
if ranks.rank == 0:
    launcher = psutil.Process(os.getppid())
    places = {c.laddr.ip for one in [launcher, *launcher.children()] for c in one.net_connections() if c.status == "LISTEN"}
    Path(sys.argv[1]).write_text(" ".join(sorted(places)))
distributed.barrier()
sys.exit(2 * ranks.rank)
"""  # noqa: E501
START = """
import sys
from timm_parallel.launch.torchrun import start_as_ranks
from timm_parallel.keys import ResolvedParallel
sys.exit(start_as_ranks(ResolvedParallel(strategy="ddp", devices=2), sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.nightly
@pytest.mark.slow(seconds=6)
def test_start_as_ranks_listens_on_loopback_and_returns_the_exit_code_of_a_failed_rank(
    train: Train, tmp_path: Path
) -> None:
    """evaluate.py and scripts/predict.py start ranks with start_as_ranks. The ranks must not import
    files from the current folder.
    """
    (tmp_path / "started.py").write_text(STARTED)
    (tmp_path / "start.py").write_text(START)
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('imported from the current folder')")
    words = (str(tmp_path / name) for name in ("start.py", "started.py", "places"))
    environment = {**train.environment, "PYTHONPATH": str(ROOT)}
    done = run_python(*words, cwd=here, environment=environment)
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "places").read_text() == "127.0.0.1"
    assert list(train.temporary.iterdir()) == []


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
    assert (
        torchrun.start_as_ranks(ResolvedParallel(strategy="ddp", devices=2), "evaluate.py", [])
        == code
    )


def test_tensorboard_listens_on_loopback_with_the_documented_command(tmp_path: Path) -> None:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(
        argv=["tensorboard", "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false"]
    )
    board.launch()
    assert listening(psutil.Process()) <= {"127.0.0.1", "::1"}
