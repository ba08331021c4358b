"""No secret gets out: refused where it is typed, a reference in what is frozen, hidden in what is written and shown."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Refuse, Train, conf, parse

from src.engine.config.compose import ROOT, compose_command, freeze, read_frozen
from src.engine.config.resolve import resolve
from src.engine.machine.files import write_json, write_text
from src.engine.machine.secrets import HidingFormatter, hide, hide_in, is_secret_key, is_secret_variable, mask
from src.engine.sweep.blocks import freeze_jobs
from src.engine.sweep.points import expand
from src.engine.sweep.space import freeze_search, read_space
from src.schema import Config

SECRET = "hf_9vX2+not/for\"anyone's=eyes"
REFERENCE = "${oc.env:HF_TOKEN}"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


def holding(folder: Path) -> list[str]:
    """The files below `folder` that hold the secret, in any notation, and the names that do."""
    forms = {form.encode() for form in (SECRET, repr(SECRET)[1:-1], SECRET.replace('"', '\\"'), SECRET[:10])}
    paths = list(folder.rglob("*"))
    assert paths
    wrong = [str(path) for path in paths if SECRET[:10] in path.name]
    return wrong + [str(p) for p in paths if p.is_file() and any(form in p.read_bytes() for form in forms)]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("+model.kwargs.token=s3cretvalue", "model.kwargs.token: looks like a secret; give it as '${oc.env:MY_TOKEN}'"),
        ("+model.kwargs.hf_token=12345678s3cret", "model.kwargs.hf_token"),
        ("+model.kwargs={token:s3cretvalue}", "model.kwargs.token"),
        ("+model.kwargs.a={b:[{api_key:s3cretvalue}]}", "api_key"),
        ("++optim.kwargs.password='s3cretvalue'", "optim.kwargs.password"),
        ("+modle.kwargs.token=s3cretvalue(", "modle.kwargs.token"),  # Hydra's errors would quote it
        ("+modle={token:s3cretvalue}", "modle"),
        ("search.storage=postgresql://me:s3cretvalue@host/db", "search.storage: is a URL with a password"),
        ("-m +model.kwargs.token=s3cretvalue,s3cret2", "model.kwargs.token"),
        ("-m search=optuna +model.kwargs.token=choice(s3cretvalue,s3cret2)", "model.kwargs.token"),
        ("+model.kwargs.token=${oc.env:HARMLESS_NAME}", "HARMLESS_NAME"),
        ("+model.kwargs.token=${oc.env:HF_TOKEN,s3cretvalue}", "model.kwargs.token"),
        ("+model.kwargs.token=${oc.env:SHORT_TOKEN}", "SHORT_TOKEN has fewer than 8 characters"),
        ("+model.kwargs.token=${oc.env:MISSING_TOKEN}", "MISSING_TOKEN"),
        ("task_name=${oc.env:HF_TOKEN}", "task_name"),  # nothing can be hidden in the name of a folder
        ("hydra.run.dir=x/${oc.env:HF_TOKEN}", "hydra.run.dir"),
        ("-m hydra.sweep.dir=x/${oc.env:HF_TOKEN} seed=1,2", "hydra.sweep.dir"),
        ("hydra.job.env_copy=[HF_TOKEN]", "hydra.job.env_"),  # Hydra would write it into .hydra/hydra.yaml
        ("+hydra.job.env_set.MY_TOKEN=s3cretvalue", "hydra.job.env_set.MY_TOKEN"),
    ],
)
def test_a_literal_secret_is_refused_and_not_repeated(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, command: str, named: str
) -> None:
    monkeypatch.setenv("HARMLESS_NAME", "s3cretvalue")
    monkeypatch.setenv("SHORT_TOKEN", "s3cret")
    monkeypatch.delenv("MISSING_TOKEN", raising=False)
    line = refuse(*command.split(" "))
    assert named in line
    assert "s3cret" not in line and SECRET not in line


@pytest.mark.parametrize("word", ["tags=['{}']", "+model.kwargs.anything='{}'", "data.root=/x/{}/y", "modle={}"])
def test_a_value_that_the_shell_has_already_put_in_is_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    line = refuse(word.format("0123456789abcdef"))
    assert "holds the value of WANDB_API_KEY; give it as '${oc.env:WANDB_API_KEY}'" in line
    assert "0123456789abcdef" not in line


@pytest.mark.parametrize(
    "text",
    [
        "model: {kwargs: {token: s3cretvalue}}",
        "search: {storage: 'mysql://me:s3cretvalue@host/db'}",
        "search: {params: {model.kwargs.token: 's3cretvalue,s3cret2'}}",
        "hydra: {sweeper: {params: {model.kwargs.token: 's3cretvalue,s3cret2'}}}",
        "hydra: {job: {env_set: {API_TOKEN: s3cretvalue}}}",
    ],
)
def test_a_literal_secret_in_a_file_is_refused(refuse: Refuse, tmp_path: Path, text: str) -> None:
    folder = conf(tmp_path / "conf", experiment__wrong=f"# @package _global_\n{text}\n")
    line = refuse(*(["-m"] if "sweeper" in text else []), "--config-dir", str(folder), "experiment=wrong")
    assert re.search(r"looks like a secret|URL with a password", line) and "s3cret" not in line


def test_a_secret_typed_into_a_finished_runs_config_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    freeze(Config(), tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("  kwargs: {}", "  kwargs: {token: s3cretvalue}", 1))
    line = refuse("--config-path", str(tmp_path / "run"), "--config-name", "config")
    assert "model.kwargs.token" in line and "s3cret" not in line
    with pytest.raises(ValueError, match=r"model\.kwargs\.token"):
        read_frozen(tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "PGPASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "DB_PASS", "MY_TOKEN_2"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_variable(name, "12345678")
    assert not is_secret_variable(name, "1234567"), "too short to be told from ordinary words"
    assert not is_secret_variable(name, str(ROOT)), "a path says where, not what"


def test_names_that_are_none() -> None:
    for name in ("PWD", "OLDPWD", "PATH", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "KEYBOARD", "COMPASS"):
        assert not is_secret_variable(name, "12345678"), name
    assert is_secret_variable("DATABASE_URL", "postgresql://me:pw@host/db")
    for key in ("max_tokens", "key", "keys", "tokens", "num_tokens", "bypass", "token.size"):
        assert not is_secret_key(key), key


def test_a_secret_is_hidden_in_every_notation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.parse import quote_plus

    monkeypatch.setenv("SSH_PRIVATE_KEY", "-----BEGIN\nabc\n")
    for form in (SECRET, repr(SECRET), quote_plus(SECRET), "x-----BEGIN\nabc\n", repr("-----BEGIN\nabc\n")):
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
    assert holding(tmp_path) == []
    assert "RuntimeError: 401 for ${oc.env:HF_TOKEN}" in (tmp_path / "rank_0.log").read_text()


def test_a_frozen_config_holds_a_reference_that_resolves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG_PASSWORD", "it's: a phrase that YAML quotes, " * 4)  # and breaks into lines
    words = ("model=tiny", f"tags=['{REFERENCE}','a{REFERENCE}b']", f"+model.kwargs.hf_token={REFERENCE}")
    config = resolve(compose_command(parse(*words, "+data.kwargs.password=${oc.env:LONG_PASSWORD}")).config)
    assert config.tags == [SECRET, f"a{SECRET}b"]
    freeze(config, tmp_path)
    assert holding(tmp_path) == [] and "phrase" not in (tmp_path / "config.yaml").read_text()
    assert read_frozen(tmp_path) == config
    again = compose_command(parse("--config-path", str(tmp_path), "--config-name", "config"))
    assert resolve(again.config) == config


def test_a_sweep_and_a_search_freeze_references(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command, points = expand(parse("-m", "model=tiny", f"tags=['{REFERENCE}']", "seed=1,2"))
    freeze_jobs(tmp_path, points, command.config.sweep, 0)
    words = ("-m", "search=optuna", "model=tiny", f"tags=['{REFERENCE}']", "seed=1,2")
    command, points = expand(parse(*words))
    freeze_search(tmp_path, points[0].tree, read_space(command))
    assert len(list(tmp_path.rglob("config.yaml"))) == 4, "of two jobs, each with .hydra/config.yaml"
    assert holding(tmp_path) == []


@pytest.mark.processes
def test_cfg_with_resolve_shows_references() -> None:
    command = [sys.executable, ROOT / "train.py", "--cfg", "job", "--resolve", f"tags=['{REFERENCE}']"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"- {REFERENCE}" in done.stdout and SECRET[:10] not in done.stdout + done.stderr


@pytest.mark.processes
def test_no_file_of_a_run_holds_a_secret_and_no_console(train: Train) -> None:
    """Everywhere a config goes: its tree on the console, frozen files, TensorBoard, records and tracebacks of a failure."""
    variables = {"HF_TOKEN": SECRET}
    words = ("parallel=single", "print_config=true", "train.epochs=1", f"tags=['{REFERENCE}']")
    done = train(*words, environment=variables)
    assert done.returncode == 0, done.output
    assert REFERENCE in done.stdout and SECRET[:10] not in done.output
    assert holding(done.folder) == []
    assert any(REFERENCE.encode() in path.read_bytes() for path in (done.folder / "tensorboard").iterdir())
    failed = train(*words, f"+model.kwargs.token={REFERENCE}", environment=variables, folder=train.base / "failed")
    assert failed.returncode == 2, failed.output
    assert "'token'" in failed.output and SECRET[:10] not in failed.output
    assert holding(failed.folder) == []
