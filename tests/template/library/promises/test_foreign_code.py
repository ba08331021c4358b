"""No config, checkpoint, image or folder can make this project run foreign code."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from src.schema import DataConfig, ModelConfig
from tests.template.runs import ROOT, draw_images
from timm_parallel.config.compose import compose_command
from timm_parallel.data.build import build_dataset
from timm_parallel.data.dataset import IMAGE_FORMATS, IMAGE_SUFFIXES
from timm_parallel.data.decode import Files, decode
from timm_parallel.data.loader import BatchFetcher
from timm_parallel.data.samplers import IndexBatch
from timm_parallel.data.timm_datasets import TimmImages
from timm_parallel.errors import UnreadableImageError
from timm_parallel.lab.image_check import ImageReader
from timm_parallel.launch.job import job_command
from timm_parallel.run import checkpoint
from timm_parallel.task import Targets
from timm_parallel.testing.commands import Refuse
from timm_parallel.testing.configs import conf, parse


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a Python package that creates a marker file when the package is imported or called.
    Yield the path of the marker file. The test fails if the file exists at its end.
    """
    mark = tmp_path / "mark"
    package = tmp_path / "library" / "evil_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Handler: pass\nstream = None\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    yield mark
    assert not mark.exists(), "the hostile package was imported or called"
    assert "evil_package" not in sys.modules


FACTORY = (
    "hydra: {job_logging: {handlers: {x: {'()': evil_package.Handler}}, root: {handlers: [x]}}}"
)
MODES = (("-m",), ("--cfg", "all"), ("--info", "config"))
FILES = [
    FACTORY,
    "hydra: {hydra_logging: {formatters: {x: {'()': evil_package.Handler}}, root: {level: INFO}}}",
    "tags: ['ext://evil_package.stream']\n"
    "hydra: {job_logging: {handlers: {x: {class: logging.StreamHandler, stream: '${tags[0]}'}}}}",
    "hydra: {callbacks: {x: {_target_: evil_package.Handler}}}",
    "hydra: {launcher: {_target_: evil_package.Handler}}",
    "defaults: [{override /hydra/job_logging: evil}]",
    "hydra: {searchpath: ['pkg://evil_package']}",
    "model: {name: evil_package.Handler}",
    "data: {name: evil_package.Handler}",
    # Keys that are not on the allowlist.
    "hydra: {job: {env_set: {NCCL_DEBUG: INFO}}}",
    "hydra: {sweeper: {max_batch_size: 2}}",
    "defaults: [override /hydra/job_logging: stdout]",
]


@pytest.mark.parametrize(
    ("text", "mode"), [*((text, ()) for text in FILES), *((FACTORY, mode) for mode in MODES)]
)
def test_config_file_cannot_make_hydra_import_a_package_or_set_other_keys_of_hydra(
    refuse: Refuse, evil: Path, tmp_path: Path, text: str, mode: tuple[str, ...]
) -> None:
    logging = "version: 1\nhandlers: {x: {class: evil_package.Handler}}\nroot: {handlers: [x]}\n"
    text = f"# @package _global_\n{text}\n"
    folder = conf(tmp_path, experiment__evil=text, hydra__job_logging__evil=logging)
    refusal = refuse(*mode, "--config-dir", str(folder), "experiment=evil")
    assert re.search(r"hydra\.|evil", refusal)


@pytest.mark.parametrize("mode", [(), ("--info", "searchpath")])
def test_hydra_searchpath_with_a_package_is_refused_without_importing_the_package(
    refuse: Refuse, evil: Path, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    assert "pkg://evil_package" in refuse(*mode, "hydra.searchpath=[pkg://evil_package]")
    main = (
        "defaults: [schema, _self_]\nhydra: {searchpath: ['${task_name}']}\ntask_name: "
        "pkg://evil_package\n"
    )
    assert "hydra.searchpath" in refuse(
        *mode, "--config-dir", str(conf(tmp_path / "conf", train=main))
    )


@pytest.mark.parametrize(
    "command",
    [
        # Hydra's default logging uses the job name as a file name.
        "hydra.job.name=../evil",
        "hydra.job.name=${tags[0]} tags=[../evil]",
        "+model.kwargs.checkpoint_path=/tmp/evil.pt",
        "+model.kwargs.pretrained_cfg={file:/tmp/evil.pt}",
        "+model.kwargs.pretrained_cfg_overlay={url:'http://127.0.0.1/evil'}",
        "+model.kwargs.cache_dir=/tmp/evil",
        "model.name=hf-hub:evil/model",
        # model.name and data.name must not name a function, a module, or an object that a module of
        # the library has imported from another package.
        "model.name=timm_parallel.machine.process.kill_on_parent_exit",
        "model.name=src.models.build.nn",
        "data.name=timm_parallel.launch.job.contextmanager",
        "search.storage=postgresql+evil://host/db",
    ],
)
def test_command_line_override_that_could_run_code_or_load_a_file_is_refused(
    refuse: Refuse, command: str
) -> None:
    assert command.lstrip("+").partition("=")[0] in refuse(*command.split(" "))


# Settings of Hydra that must be refused. Each has its default value, so that only the key can be
# the reason for the refusal.
FIXED = [
    "job_logging.version=1",
    "job.config.override_dirname.kv_sep='='",
    "sweeper.max_batch_size=null",
    "launcher={}",
    "searchpath=[]",
    "job.env_set={}",
    "output_subdir=.hydra",
    "mode=RUN",
    "job.num=1",
]
GROUPS = ["hydra/launcher=basic", "hydra=default", "~hydra/help"]


@pytest.mark.parametrize("word", [*(f"hydra.{word}" for word in FIXED), *GROUPS])
def test_hydra_override_is_refused_when_its_key_is_not_on_the_allowlist(
    refuse: Refuse, word: str
) -> None:
    for given in (word,) if word[0] == "~" else (word, f"+{word}", f"++{word}"):
        line = refuse(given)
        assert given in line and "hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir" in line


def test_hydra_keys_of_the_allowlist_are_accepted_on_the_command_line_and_in_a_file(
    tmp_path: Path,
) -> None:
    words = ("run.dir=x", "sweep.dir=x", "sweep.subdir=x", "job.name=a", "job.chdir=false")
    for plus in ("", "++"):
        compose_command(parse(*(f"{plus}hydra.{word}" for word in (*words, "verbose=[a]"))))
    text = (
        "hydra: {run: {dir: x}, sweep: {dir: y, subdir: z}, job: {name: a, chdir: false}, "
        "verbose: true, sweeper: {params: {seed: '1,2'}}}"
    )
    folder = conf(tmp_path / "conf", experiment__own=f"# @package _global_\n{text}\n")
    command = compose_command(parse("-m", "--config-dir", str(folder), "experiment=own"))
    assert (str(command.run_dir), command.tree.hydra.job.name) == ("x", "a")
    main = conf(tmp_path / "main", train="defaults: [schema, _self_]\nhydra: {run: {dir: x}}\n")
    assert str(compose_command(parse("--config-path", str(main))).run_dir) == "x"


def test_class_path_in_config_is_refused_when_it_is_not_a_model_or_dataset() -> None:
    from src.models.build import build_model

    for name in ("src.data.datasets.Digits", "src.models.build.nn"):
        with pytest.raises(ValueError, match="expected a class that extends"):
            build_model(ModelConfig(name=name), 10, 3, None, torch.device("cpu"))
    for name in ("src.models.cifar_resnet.CifarResNet18", "src.data.datasets.Path"):
        with pytest.raises(ValueError, match="expected a class that extends"):
            build_dataset(DataConfig(name=name))


class Payload:
    """Object that creates the marker file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


def test_checkpoint_with_pickled_code_is_refused_without_running_the_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"format": 1, "model": Payload(mark)}, tmp_path / "zip.pt")
    torch.save(
        {"format": 1, "model": Payload(mark)},
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=False,
    )
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Payload(mark)))
    for name in ("zip", "old", "raw"):
        with pytest.raises(ValueError, match=f"{name}.pt: damaged, or not a checkpoint") as refusal:
            checkpoint.load(tmp_path / f"{name}.pt")
        assert "weights_only" not in str(refusal.value), (
            "the error must not suggest the unsafe load"
        )
    assert not mark.exists()
    with open(tmp_path / "raw.pt", "rb") as file:
        pickle.load(file).close()
    assert mark.exists(), (
        "the payload must write the mark file when it is unpickled without protection"
    )


def test_decode_refuses_pickles_and_decompression_bombs_named_like_images(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("a.jpg", "a.png", "a.webp"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(mark)))
        with pytest.raises(ValueError, match="not a readable image"):
            decode(tmp_path / name)
    header = b"\x00\x00\x00\rIHDR" + (200_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    import zlib

    bomb = b"\x89PNG\r\n\x1a\n" + header + zlib.crc32(header[4:]).to_bytes(4, "big")
    bomb += bytes(4) + b"IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(bomb)
    # The message states the size, the limit and a fix.
    with pytest.raises(ValueError, match=r"40000000000 pixels.*178956970 pixels.*tiles"):
        decode(tmp_path / "bomb.png")
    assert not mark.exists()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a fake program `gs` first on PATH, which must not be started."""
    mark, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    yield mark
    assert not mark.exists(), "Ghostscript was started"


def test_decoder_accepts_exactly_the_image_formats_of_the_accepted_file_suffixes() -> None:
    Image.init()
    assert {Image.registered_extensions()[suffix] for suffix in IMAGE_SUFFIXES} == set(
        IMAGE_FORMATS
    )


def test_postscript_named_like_an_image_is_unreadable_and_starts_no_program(
    tmp_path: Path, ghostscript: Path
) -> None:
    """PIL would start Ghostscript to read PostScript. The test covers training, prediction and
    check_data with both image folder datasets.
    """
    draw_images(tmp_path, "train/a", "train/b", size=32)
    evil = tmp_path / "train" / "b" / "1.png"
    evil.write_bytes(POSTSCRIPT)
    with pytest.raises(UnreadableImageError, match=r"1\.png"):
        decode(evil)
    config = DataConfig(name="torch/image_folder", root=str(tmp_path))
    images = TimmImages(config, val_split="train")
    assert images.in_chans == 3 and images.train[0][0].shape == (3, 32, 32)
    with pytest.raises(UnreadableImageError, match=r"1\.png"):
        images.train[2]
    checked = ImageReader(images, "label")["train", 2]
    assert "1.png" in checked.error


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, "gs"),
        SyntaxError("broken PNG file"),
        Image.DecompressionBombError("too large"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_decoder_exception_is_reported_as_an_unreadable_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """UnreadableImageError lets data.on_error decide about the image in training, and lets
    check_data list it.
    """

    def fail(image: Any, mode: str) -> None:
        raise error

    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(
        UnreadableImageError, match=r"0\.png: not a readable image \(.+\)"
    ) as refusal:
        decode(tmp_path / "0.png")
    assert "\n" not in str(refusal.value)
    split = Files([(tmp_path / "0.png", 0)])
    dataset: Any = SimpleNamespace(train=split, target_names=["a"])
    assert ImageReader(dataset, "label")["train", 0].error
    _, read, unreadable, _ = BatchFetcher(split, Targets(), None, 0, "skip").read(
        IndexBatch(0, np.array([0]))
    )
    assert len(read.indices) == 0 and unreadable == [0]


@pytest.mark.processes
def test_ranks_do_not_import_files_from_the_current_folder(tmp_path: Path) -> None:
    """`python -m` searches modules in the current folder first. A shared data folder may contain a
    file json.py of another user.
    """
    for name in ("json", "torch", "logging"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = job_command(tmp_path / "nothing")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "nothing" in done.stderr
    assert not (tmp_path / "mark").exists()


# Patterns of imports and calls that may run code in the data that they read.
UNSAFE = (
    r"(import|from) (pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib)\b",
    r"(eval|exec|compile|__import__|os\.system|os\.popen|torch\.hub\.load|torch\.jit\.load)\(",
    # These functions of torch.distributed unpickle data of other ranks.
    r"[\w.]*\.(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\b",
    r"(torch\.load|[\w.]*load_state_dict_from_url)\((?!.*weights_only=True)",
    r"np\.load\((?!.*allow_pickle=False)",
    r"yaml\.(?!safe_)\w*load\w*\((?!.*SafeLoader)",
    r"[\w.]+\(.*shell=(?!False)",
)


def unsafe_calls(source: str) -> list[str]:
    """Return the calls and imports of a file that may run code in the data that they read."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    calls = [ast.unparse(node).replace("\n", " ") for node in nodes]
    return [call for call in calls if any(re.match(pattern, call) for pattern in UNSAFE)]


DETECTED = (
    *("import pickle", "from marshal import loads", "eval(x)", "os.system(x)"),
    *("torch.load(p)", "torch.load(p, weights_only=False)", "torch.load(p, weights_only=safe)"),
    *("np.load(p)", "yaml.load(t, Loader=yaml.FullLoader)", "subprocess.run(x, shell=True)"),
    "dist.all_gather_object(a, b)",
)


def test_source_file_has_no_pickle_eval_or_shell_calls() -> None:
    sources = [
        *ROOT.glob("*.py"),
        *(
            file
            for name in ("src", "timm_parallel", "scripts")
            for file in (ROOT / name).rglob("*.py")
            if not {"tests", "testing"} & {*file.parts}
        ),
    ]
    assert all(unsafe_calls(call) for call in DETECTED)
    found = {
        path.relative_to(ROOT).as_posix(): unsafe_calls(path.read_text(encoding="utf-8"))
        for path in sources
    }
    # Allow pickle for values that a file pickles itself and keeps in memory: the composer of sweeps
    # copies config trees in this way, and a list of image files holds paths and labels.
    assert {path: calls for path, calls in found.items() if calls} == {
        "timm_parallel/lab/sweep/points.py": ["import pickle"],
        "timm_parallel/data/file_list.py": ["import pickle"],
    }
