"""Nobody gets in, and no secret gets out: docs/security.md, row by row. Hostile inputs are real and leave a mark if run."""

from __future__ import annotations

import ast
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Train

import train as entry
from src.data.datasets import build_images
from src.data.images import decode_file as decode
from src.engine.config.compose import ROOT, compose_command, freeze, read_frozen
from src.engine.config.resolve import resolve
from src.engine.launch.job import job_command
from src.engine.launch.rank import keep_compiled_code_private
from src.engine.machine.files import write_json, write_text
from src.engine.machine.ranks import NEEDED
from src.engine.machine.secrets import HidingFormatter, hide, hide_in, is_secret_key, is_secret_variable, mask
from src.engine.sweep.blocks import freeze_jobs
from src.engine.sweep.points import expand
from src.engine.sweep.space import freeze_search, read_space
from src.schema import Config, DataConfig, ModelConfig
from src.training import checkpoint

SECRET = "hf_9vX2+not/for\"anyone's=eyes"
REFERENCE = "${oc.env:HF_TOKEN}"
Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Runs train.py's main here, in an empty folder; returns the one line it refuses with."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        capfd.readouterr()
        code = entry.main()
        out, err = capfd.readouterr()
        assert (code, out) == (2, ""), f"{words} ended with {code}: {err or out}"
        assert len(err.splitlines()) == 1, err
        assert list(here.iterdir()) == [], "a refused command leaves nothing"
        return err

    return run


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The mark that `import evil_package` would leave, as would calling what is in it. The test fails if it is there."""
    mark = tmp_path / "mark"
    package = tmp_path / "library" / "evil_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\nclass Handler: pass\nstream = None\n")
    monkeypatch.syspath_prepend(package.parent)
    yield mark
    assert not mark.exists(), "something was imported or called because a config, a checkpoint or a file said so"
    assert "evil_package" not in sys.modules


def conf(folder: Path, **files: str) -> Path:
    """A folder for --config-dir: file name (`__` for `/`) -> text."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def holding(folder: Path) -> list[str]:
    """The files below `folder` that hold the secret, in any notation, and the names that do."""
    forms = {form.encode() for form in (SECRET, repr(SECRET)[1:-1], SECRET.replace('"', '\\"'), SECRET[:10])}
    paths = list(folder.rglob("*"))
    assert paths
    wrong = [str(path) for path in paths if SECRET[:10] in path.name]
    return wrong + [str(p) for p in paths if p.is_file() and any(form in p.read_bytes() for form in forms)]


def parse(*words: str) -> Any:
    from hydra._internal.utils import get_args_parser

    return get_args_parser().parse_args(list(words))


# Secrets -----------------------------------------------------------------------------------------------------------


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
@pytest.mark.timeout(60)
def test_cfg_with_resolve_shows_references() -> None:
    command = [sys.executable, ROOT / "train.py", "--cfg", "job", "--resolve", f"tags=['{REFERENCE}']"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert f"- {REFERENCE}" in done.stdout and SECRET[:10] not in done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.timeout(90)
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


# Config ------------------------------------------------------------------------------------------------------------


FACTORY = "hydra: {job_logging: {handlers: {x: {'()': evil_package.Handler}}, root: {handlers: [x]}}}"
MODES = (("-m",), ("--help",), ("--cfg", "all"), ("--info", "config"), ("--hydra-help",))
FILES = [
    FACTORY,
    "hydra: {job_logging: {handlers: {x: {class: evil_package.Handler}}, root: {handlers: [x]}}}",
    "hydra: {hydra_logging: {formatters: {x: {'()': evil_package.Handler}}, root: {level: INFO}}}",
    "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'ext://evil_package.stream'}}}}",
    "tags: ['ext://evil_package.stream']\n"
    "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: '${tags[0]}'}}}}",
    "hydra: {callbacks: {x: {_target_: evil_package.Handler}}}",
    "hydra: {launcher: {_target_: evil_package.Handler}}",
    "hydra: {sweeper: {_target_: evil_package.Handler}}",
    "defaults: [{override /hydra/launcher: evil}]",
    "defaults: [{override /hydra/job_logging: evil}]",
    "hydra: {searchpath: ['pkg://evil_package']}",
    "model: {_target_: evil_package.Handler}",
    "model: {name: evil_package.Handler}",
    "data: {name: evil_package.Handler}",
]


@pytest.mark.parametrize(("text", "mode"), [*((text, ()) for text in FILES), *((FACTORY, mode) for mode in MODES)])
def test_nothing_is_imported_because_a_file_says_so(
    refuse: Refuse, evil: Path, tmp_path: Path, text: str, mode: tuple[str, ...]
) -> None:
    folder = conf(
        tmp_path / "conf",
        experiment__evil=f"# @package _global_\n{text}\n",
        hydra__launcher__evil="_target_: evil_package.Handler\n",
        hydra__job_logging__evil="version: 1\nhandlers: {x: {class: evil_package.Handler}}\nroot: {handlers: [x]}\n",
    )
    assert refuse(*mode, "--config-dir", str(folder), "experiment=evil")


@pytest.mark.parametrize("mode", [(), ("-m",), ("--help",), ("--info", "searchpath")])
def test_the_search_path_imports_no_package(refuse: Refuse, evil: Path, tmp_path: Path, mode: tuple[str, ...]) -> None:
    assert "pkg://evil_package" in refuse(*mode, "hydra.searchpath=[pkg://evil_package]")
    main = "defaults: [schema, _self_]\nhydra: {searchpath: ['${task_name}']}\ntask_name: pkg://evil_package\n"
    assert "hydra.searchpath" in refuse(*mode, "--config-dir", str(conf(tmp_path / "conf", train=main)))


@pytest.mark.parametrize(
    "command",
    [
        "+hydra.job.env_set.LD_PRELOAD=/tmp/evil.so",
        "+hydra.job.env_set.PYTHONSTARTUP=/tmp/evil.py",
        "+hydra.job.env_set.NCCL_NET_PLUGIN=evil",
        "hydra.job.env_copy=[HOME]",
        "hydra.job.env_copy=[NOT_SET_ANYWHERE]",
        "hydra.output_subdir=../elsewhere",
        "hydra.output_subdir=/tmp/elsewhere",
        "++hydra.job_logging.handlers.x={class:logging.FileHandler,filename:/tmp/evil.log}",
        "hydra.job.name=../evil",  # hydra/job_logging=default names a file by it
        "hydra.job.name=${tags[0]} tags=[../evil]",
        "+model.kwargs.checkpoint_path=/tmp/evil.pt",
        "+model.kwargs.pretrained_cfg={file:/tmp/evil.pt}",
        "+model.kwargs.pretrained_cfg_overlay={url:'http://127.0.0.1/evil'}",
        "+model.kwargs.cache_dir=/tmp/evil",
        "model.name=hf-hub:evil/model",
        "model.name=local-dir:/tmp/evil",
        "model.name=src.engine.machine.process.die_with_parent",  # a function
        "model.name=src.models.build.nn",  # a module
        "data.name=src.engine.launch.supervisor.contextmanager",  # somebody else's
        "search.storage=evil://host/db",
        "search.storage=postgresql+evil://host/db",
    ],
)
def test_what_a_config_may_not_ask_for(refuse: Refuse, command: str) -> None:
    key = command.lstrip("+").partition("=")[0]
    assert re.split(r"[.]handlers", key)[0] in refuse(*command.split(" "))


def test_hydras_own_logging_is_allowed_and_a_known_variable() -> None:
    compose_command(parse("hydra/job_logging=default", "hydra/hydra_logging=default", "hydra.job.name=a"))
    compose_command(parse("hydra/job_logging=stdout", "+hydra.job.env_set.NCCL_DEBUG=INFO", "hydra.verbose=true"))


def test_only_classes_of_the_right_kind_are_called() -> None:
    from src.models.build import build_model

    images = build_images(DataConfig(name="synthetic"))
    for name in (
        "src.data.datasets.Digits",
        "src.engine.record.result.MetricsLog",
        "src.engine.machine.process.die_with_parent",
    ):
        with pytest.raises(ValueError, match="not a torch"):
            build_model(ModelConfig(name=name), 10, images.in_chans, None, torch.device("cpu"))
    for name in ("src.data.datasets.Path", "src.engine.machine.process.die_with_parent", "src.models.build.nn"):
        with pytest.raises(ValueError, match="not a class of this project"):
            build_images(DataConfig(name=name))
    with pytest.raises(ValueError, match="does not take them"):
        build_model(
            ModelConfig(name="resnet18", kwargs={"_target_": "os.system"}),
            10,
            images.in_chans,
            None,
            torch.device("cpu"),
        )


# Checkpoints and data ----------------------------------------------------------------------------------------------


class Payload:
    """Unpickled, it leaves the mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"format": 1, "model": Payload(mark)}, tmp_path / "zip.pt")
    torch.save({"format": 1, "model": Payload(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Payload(mark)))
    for name in ("zip", "old", "raw"):
        with pytest.raises(ValueError, match=f"{name}.pt: damaged or no checkpoint"):
            checkpoint.load(tmp_path / f"{name}.pt")
    assert not mark.exists()
    with open(tmp_path / "raw.pt", "rb") as file:
        pickle.load(file).close()
    assert mark.exists(), "the payload works"


def test_a_file_in_a_data_folder_is_an_image_or_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("a.jpg", "a.png", "a.webp"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(mark)))
        with pytest.raises(ValueError, match="not a readable image"):
            decode(tmp_path / name)
    header = b"\x00\x00\x00\rIHDR" + (200_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    import zlib

    bomb = b"\x89PNG\r\n\x1a\n" + header + zlib.crc32(header[4:]).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(ValueError, match="bomb"):
        decode(tmp_path / "bomb.png")
    assert not mark.exists()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    """`python -m` looks there first; a shared data folder may hold anybody's json.py."""
    for name in ("json", "torch", "logging"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = job_command(tmp_path / "nothing")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and "nothing" in done.stderr
    assert not (tmp_path / "mark").exists()


OBJECTS = r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?"  # unpickle what other ranks send


def unsafe_calls(source: str) -> list[str]:
    """Calls that run what they read, in a file's source."""
    modules = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    calls = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.hub.load", "torch.jit.load")
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
        found += [name for name in names if name.split(".")[0] in modules]
        if isinstance(node, ast.Attribute) and re.fullmatch(OBJECTS, node.attr):
            found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {key.arg: ast.unparse(key.value) for key in node.keywords}
        unsafe = (
            name in calls
            or given.get("shell", "False") != "False"
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (name.endswith("load_state_dict_from_url") and given.get("weights_only") != "True")
            or (name == "np.load" and given.get("allow_pickle") != "False")
            or (name.startswith("yaml.") and "load" in name and not re.search("safe|SafeLoader", ast.unparse(node)))
            or (name == "importlib.import_module" and "src" not in source)
        )
        found += [ast.unparse(node)] if unsafe else []
    return found


SOURCES = sorted([*ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_is_loaded_safely(path: Path) -> None:
    assert unsafe_calls(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import joblib.numpy_pickle",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=safe)",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(t, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(t, Loader=L)".replace("unsafe_load", "load_all"),
        "eval(x)",
        "exec(x)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
    ],
)
def test_the_check_of_loading_can_fail(source: str) -> None:
    assert unsafe_calls(source) != []


# Neighbours and the network ----------------------------------------------------------------------------------------


CONTENTS: dict[str, Any] = {
    "model": {},
    "progress": {"step": 1, "epoch": 0, "best_acc": 0.0},
    "classes": [],
    "made_by": {},
}


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
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


def test_files_are_as_private_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "run" / "a.json", "{}")
        checkpoint.save(tmp_path / "run" / "checkpoints", CONTENTS, step=1, keep=1, is_best=False)
    finally:
        os.umask(before)
    wrong = [path for path in (tmp_path / "run").rglob("*") if path.stat().st_mode & 0o077]
    assert wrong == []


def test_compiled_code_is_not_taken_from_a_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, "/tmp/torchinductor_me"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        keep_compiled_code_private()
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(Path.home())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/mine")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/mine"


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which the process or what it started listens."""
    return {
        connection.laddr.ip
        for one in [process, *process.children(recursive=True)]
        for connection in one.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(90)
def test_ranks_of_one_machine_listen_on_loopback_alone(train: Train) -> None:
    running = train.start("parallel=ddp", "parallel.devices=2", "train.epochs=500", "train.log_every=1")
    running.wait_for_steps()
    assert listening(psutil.Process(running.process.pid)) == {"127.0.0.1"}
    worker = next(iter(running.workers().values()))
    assert worker.environ()["GLOO_SOCKET_IFNAME"] == worker.environ()["NCCL_SOCKET_IFNAME"] == "lo"
    assert running.signal(2).returncode == 130


@pytest.mark.timeout(60)
def test_tensorboard_as_we_say_to_start_it_listens_on_loopback(tmp_path: Path) -> None:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=["tensorboard", "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false"])
    board.launch()
    assert listening(psutil.Process()) <= {"127.0.0.1", "::1"}
    told = [path.read_text() for path in (ROOT / "README.md", ROOT / "src/run/proof.py", ROOT / "docs/security.md")]
    assert any("tensorboard --logdir" in text for text in told)
    assert not re.search(r"--bind_all|--host[ =]", "".join(told).replace("`--bind_all`", ""))


def test_every_row_of_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| who")]
    assert len(rows) >= 5
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and set(named) <= tests, row
