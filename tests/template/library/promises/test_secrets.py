"""Secrets stay out of files and output, and others cannot reach a run."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.app import app
from src.schema import Config, OptimConfig, ResolvedConfig
from tests.template.runs import ROOT, resolved
from timm_parallel import keys
from timm_parallel.checked_configs import evaluation_config
from timm_parallel.config.compose import compose_command, hydra_files, load_config, save_config
from timm_parallel.config.resolve import resolve
from timm_parallel.entry import run_command
from timm_parallel.faults.failure import RankExits, failure_text
from timm_parallel.keys import ResolvedParallel, SearchConfig
from timm_parallel.lab.image_check import CheckedImage, show_check, summarize
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.search.search import open_study
from timm_parallel.lab.search.space import freeze_search, read_space
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.sweep import freeze_jobs
from timm_parallel.launch import job, torchrun
from timm_parallel.launch.rank import keep_compiled_code_private
from timm_parallel.machine.files import write_json, write_text
from timm_parallel.machine.secrets import (
    HidingFormatter,
    hide,
    hide_in,
    is_secret_key,
    is_secret_variable,
    mask,
    mask_code,
)
from timm_parallel.run import checkpoint
from timm_parallel.testing.commands import Refuse, Train
from timm_parallel.testing.configs import conf, parse
from timm_parallel.testing.ranks import warm_ranks
from timm_parallel.trackers.tracker import Tracker

SECRET = "hf_9vX2+not/for\"anyone's=eyes"
REFERENCE = "${oc.env:HF_TOKEN}"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


def files_with_secret(folder: Path) -> list[str]:
    """Return the paths below `folder` whose name or contents include the secret in any form."""
    forms = {
        form.encode()
        for form in (SECRET, repr(SECRET)[1:-1], SECRET.replace('"', '\\"'), SECRET[:10])
    }
    paths = list(folder.rglob("*"))
    assert paths
    wrong = [str(path) for path in paths if SECRET[:10] in path.name]
    return wrong + [
        str(p) for p in paths if p.is_file() and any(form in p.read_bytes() for form in forms)
    ]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("+model.kwargs.token=s3cretvalue", "model.kwargs.token: "),
        ("+model.kwargs={token:s3cretvalue}", "model.kwargs.token"),
        ("+model.kwargs.a={b:[{api_key:s3cretvalue}]}", "model.kwargs.a.b.api_key"),
        # An error message of Hydra would quote this invalid override with the secret.
        ("+modle.kwargs.token=s3cretvalue(", "modle.kwargs.token"),
        ("search.storage=postgresql://me:s3cretvalue@host/db", "search.storage: "),
        ("-m +model.kwargs.token=s3cretvalue,s3cret2", "model.kwargs.token"),
        ("-m search=optuna +model.kwargs.token=choice(s3cretvalue,s3cret2)", "model.kwargs.token"),
        ("+model.kwargs.token=${oc.env:HF_TOKEN,s3cretvalue}", "model.kwargs.token"),
        ("+model.kwargs.token=${oc.env:MISSING_TOKEN}", "MISSING_TOKEN"),
        # The task name becomes a folder name, in which a secret cannot be masked.
        ("task_name=${oc.env:HF_TOKEN}", "task_name"),
        ("hydra.run.dir=x/${oc.env:HF_TOKEN}", "x/${oc.env:HF_TOKEN}"),
        # Hydra would write the values of these variables into .hydra/hydra.yaml.
        ("+hydra.job.env_set.MY_TOKEN=s3cretvalue", "hydra.job.env_set.MY_TOKEN"),
    ],
)
def test_literal_secret_on_the_command_line_is_refused_and_not_printed(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, command: str, named: str
) -> None:
    monkeypatch.delenv("MISSING_TOKEN", raising=False)
    line = refuse(*command.split(" "))
    assert named in line
    assert "s3cret" not in line and SECRET not in line


def test_value_of_a_secret_environment_variable_is_saved_and_printed_as_a_reference(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    line = refuse("modle=0123456789abcdef")
    assert "modle=${oc.env:WANDB_API_KEY}" in line and "0123456789abcdef" not in line
    words = (
        "tags=['0123456789abcdef']",
        "+model.kwargs.anything='0123456789abcdef'",
        "data.name=folder",
        "data.root=/x/0123456789abcdef/y",
    )
    frozen = save_by_command(tmp_path / "run", "model=tiny", *words)
    written = [path.read_text() for path in (tmp_path / "run").rglob("*.yaml")]
    assert len(written) == 4 and not any("0123456789abcdef" in text for text in written)
    assert all("/x/${oc.env:WANDB_API_KEY}/y" in text for text in written)
    assert load_config(tmp_path / "run") == frozen


def save_by_command(folder: Path, *words: str) -> keys.ResolvedConfig:
    """Write the files that train.py writes before it starts ranks, and return the config."""
    command = compose_command(parse("parallel=single", *words))
    config = resolve(command.config)
    folder.mkdir()

    with hydra_files(command, folder) as here:
        save_config(config, here)
    return config


@pytest.mark.slow(seconds=2)
def test_environment_reference_stays_unresolved_in_saved_yaml_and_resolves_on_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reference keeps the value of an environment variable out of files. This also holds if the
    name of the variable does not look like a secret.
    """
    for name in ("HARMLESS_NAME", "SHORT_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    keys = ("+model.kwargs.token=${oc.env:SHORT_TOKEN}", "data.root=/x/${oc.env:HARMLESS_NAME}")
    words = (
        "model=tiny",
        "data.name=folder",
        *keys,
        "+optim.kwargs={password:'${oc.env:HARMLESS_NAME}',nested:[1,{a:2}]}",
        "train.epochs=1",
    )
    config = save_by_command(tmp_path / "run", *words)
    assert (config.model.kwargs["token"], config.data.root) == ("s3cret", "/x/s3cret")
    assert evaluation_config(tmp_path / "run", []).data.root == "/x/s3cret"
    # Save the config a second time without .hydra/, as run_job does on another node with the config
    # that it has read.
    for again in range(2):
        assert not any("s3cret" in path.read_text() for path in (tmp_path / "run").rglob("*.yaml"))
        assert load_config(tmp_path / "run") == config
        if again == 0:
            shutil.rmtree(tmp_path / "run" / ".hydra")
            save_config(load_config(tmp_path / "run"), tmp_path / "run")
    monkeypatch.setenv("HARMLESS_NAME", "of another machine")
    there = load_config(tmp_path / "run")
    assert isinstance(there.optim, OptimConfig)
    assert (there.data.root, there.optim.kwargs["password"]) == (
        "/x/of another machine",
        "of another machine",
    )
    # A value that was changed after loading must be saved instead of the reference.
    there.data.root = "/elsewhere"
    save_config(there, tmp_path / "run")
    assert load_config(tmp_path / "run").data.root == "/elsewhere"
    monkeypatch.delenv("SHORT_TOKEN")
    with pytest.raises(ValueError, match=r"model\.kwargs\.token: .*SHORT_TOKEN"):
        load_config(tmp_path / "run")


def test_value_is_masked_also_for_trackers_when_its_key_looks_like_a_secret(
    tmp_path: Path,
) -> None:
    tree = {
        "token": "abc",
        "max_tokens": 3,
        "a": [{"db_password": 12345}, {"api_key": [SECRET, "x", None, "/etc/passwd"]}],
    }
    hidden = {"token": "***", "max_tokens": 3}
    hidden["a"] = [{"db_password": "***"}, {"api_key": [REFERENCE, "***", None, "/etc/passwd"]}]  # type: ignore[assignment]
    assert hide_in(tree) == hidden
    config = ResolvedConfig()
    config.data.kwargs = {"api_key": "abc", "headers": [SECRET], "size": 3}
    settings = Tracker(config, tmp_path, 0).settings
    assert settings["data"]["kwargs"] == {"api_key": "***", "headers": [REFERENCE], "size": 3}


@pytest.mark.slow(seconds=1)
def test_optuna_study_name_holds_a_reference_instead_of_a_secret_value(tmp_path: Path) -> None:
    config = Config(search=SearchConfig(study_name=f"my {SECRET}", direction="maximize"))
    assert open_study(tmp_path, config, is_new=True).study_name == f"my {REFERENCE}"
    assert files_with_secret(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: {kwargs: {token: s3cretvalue}}", "model.kwargs.token: "),
        ("search: {storage: 'mysql://me:s3cretvalue@host/db'}", "search.storage: "),
        ("search: {params: {model.kwargs.token: 's3cretvalue,s3cret2'}}", "model.kwargs.token: "),
        (
            "hydra: {sweeper: {params: {+model.kwargs.token: 's3cretvalue,s3cret2'}}}",
            "model.kwargs.token: ",
        ),
    ],
)
def test_literal_secret_is_refused_in_a_config_file_and_in_a_saved_config(
    refuse: Refuse, tmp_path: Path, text: str, named: str
) -> None:
    folder = conf(tmp_path / "conf", experiment__wrong=f"# @package _global_\n{text}\n")
    mode = ["-m"] if "sweeper" in text else []
    save_config(Config(), tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("  kwargs: {}", "  kwargs: {token: s3cretvalue}", 1))
    for words, key in (
        ((*mode, "--config-dir", str(folder), "experiment=wrong"), named),
        (("--config-path", str(path.parent), "--config-name", "config"), "model.kwargs.token"),
    ):
        line = refuse(*words)
        assert key in line and "s3cret" not in line


SECRET_NAMES = (
    "HF_TOKEN PGPASSWORD WANDB_API_KEY MYSQL_PWD DB_PASS SENTRY_DSN SLACK_WEBHOOK_URL "
    "AZURE_STORAGE_CONNECTION_STRING SESSION_COOKIE CI_JWT MY_KEY"
)
OTHER_NAMES = "PWD PATH TOKENIZERS_PARALLELISM KEYBOARD COMPASS SSH_PUBLIC_KEY KEY"


def test_variables_and_keys_are_secret_only_when_the_name_looks_like_a_secret() -> None:
    for name in SECRET_NAMES.split():
        assert is_secret_variable(name, "12345678"), name
        # Short values occur in ordinary words, and the value of a variable may be a path.
        assert not is_secret_variable(name, "1234567"), name
        assert not is_secret_variable(name, str(ROOT)), name
    assert is_secret_variable("DATABASE_URL", "postgresql://me:pw@host/db")
    for name in OTHER_NAMES.split():
        assert not is_secret_variable(name, "12345678"), name
    for key in ("max_tokens", "key", "tokens", "bypass", "token.size", "image_key"):
        assert not is_secret_key(key), key


def test_secret_is_masked_in_quoted_text_url_encoded_text_json_files_and_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from urllib.parse import quote_plus

    monkeypatch.setenv("SSH_PRIVATE_KEY", "-----BEGIN\nabc\n")
    for form in (
        SECRET,
        repr(SECRET),
        quote_plus(SECRET),
        "x-----BEGIN\nabc\n",
        repr("-----BEGIN\nabc\n"),
    ):
        assert not any(part in hide(form) for part in ("9vX2", "BEGIN")), form
    assert hide_in({SECRET: [(SECRET, 1, None)]}) == {REFERENCE: [[REFERENCE, 1, None]]}
    assert mask("x={'token': 'abc'} mysql://me:pw@h") == "x={'token': ***} mysql://me:***@h"
    write_json(tmp_path / "a.json", {"reason": f"not {SECRET}", SECRET: 1.5})
    write_text(tmp_path / "a.txt", f"not {SECRET}")
    try:
        raise RuntimeError(f"401 for {SECRET}")
    except RuntimeError:
        record = logging.getLogger().makeRecord("n", 40, "f", 1, "as %s", (SECRET,), sys.exc_info())
    (tmp_path / "rank_0.log").write_text(HidingFormatter("%(message)s").format(record))
    assert files_with_secret(tmp_path) == []
    assert "RuntimeError: 401 for ${oc.env:HF_TOKEN}" in (tmp_path / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ('+HF_TOKEN = "two words"  # mine', "+HF_TOKEN = ***"),
        ("+  api_key: s3cretvalue", "+  api_key: ***"),
        ("-export DB_PASSWORD=s3cretvalue", "-export DB_PASSWORD=***"),
        (' os.environ["HF_TOKEN"] = value("s3cretvalue")', ' os.environ["HF_TOKEN"] = ***'),
        ("@@ -1,3 +1,4 @@ password: s3cretvalue", "@@ -1,3 +1,4 @@ password: ***"),
        ("+url = mysql://me:s3cretvalue@host/db", "+url = mysql://me:***@host/db"),
        (f"+print('{SECRET}')", f"+print('{REFERENCE}')"),
        ("+  token: ${oc.env:HF_TOKEN}", "+  token: ${oc.env:HF_TOKEN}"),
        (
            "+self.cls_token = nn.Parameter(torch.zeros(1))",
            "+self.cls_token = nn.Parameter(torch.zeros(1))",
        ),
        ("+num_tokens = 5", "+num_tokens = 5"),
    ],
)
def test_saved_code_diff_masks_a_value_whose_name_looks_like_a_secret(
    line: str, masked: str
) -> None:
    assert mask_code(f"+first\n{line}\n+last\n") == f"+first\n{masked}\n+last\n"


@pytest.mark.slow(seconds=3)
def test_sweep_and_search_save_secrets_as_references(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, points = expand(parse("-m", "model=tiny", f"tags=['{REFERENCE}']", "optim.lr=1,2"))
    for frozen in freeze_jobs(tmp_path, points, replace(command.config.sweep, repeats=2), 0).jobs:
        write_job_folder(tmp_path, frozen)
    words = ("-m", "search=optuna", "model=tiny", f"tags=['{REFERENCE}']", "seed=1,2")
    command, points = expand(parse(*words))
    freeze_search(tmp_path, points[0].tree, read_space(command))
    configs = [path.read_text() for path in tmp_path.rglob("config.yaml")]
    assert len(configs) == 12, (
        "expected config.yaml and .hydra/config.yaml of two configurations and four jobs"
    )
    assert all(REFERENCE in text for text in configs)
    assert files_with_secret(tmp_path) == []


def test_cfg_job_with_resolve_prints_secrets_as_references(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train.py", "--cfg", "job", "--resolve", f"tags=['{REFERENCE}']"]
    monkeypatch.setattr(sys, "argv", words)
    assert run_command(app) == 0
    shown = capsys.readouterr()
    assert f"- {REFERENCE}" in shown.out and SECRET[:10] not in shown.out + shown.err


@pytest.mark.slow(seconds=6)
def test_files_and_console_of_a_run_do_not_contain_secrets(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not in TensorBoard logs, and in the records and tracebacks of a failure."""
    variables = {"HF_TOKEN": SECRET, "HARMLESS_NAME": "plain"}
    words = (
        *("parallel=single", "print_config=true", "train.epochs=1", "data.limit_train=64"),
        f"tags=['{REFERENCE}','${{oc.env:HARMLESS_NAME}}']",
    )
    done = train(*words, environment=variables)
    assert done.returncode == 0, done.output
    assert REFERENCE in done.stdout and SECRET[:10] not in done.output
    assert files_with_secret(done.folder) == []
    events = b"".join(path.read_bytes() for path in (done.folder / "tensorboard").iterdir())
    assert REFERENCE.encode() in events and b"${oc.env:HARMLESS_NAME}" in events
    monkeypatch.setenv("HARMLESS_NAME", "plain")
    monkeypatch.setattr(job, "run_ranks", partial(warm_ranks, environment=variables))
    failed = train.base / "failed"
    assert job.run_job(resolved(*words, f"+model.kwargs.token={REFERENCE}"), failed) == 2
    shown = capsys.readouterr()
    assert "'token'" in shown.err and SECRET[:10] not in shown.out + shown.err
    assert files_with_secret(failed) == []


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
