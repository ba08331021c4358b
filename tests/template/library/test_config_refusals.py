"""Tests that invalid input ends train.py early with a one-line error and exit code 2. No run folder
is created, no process is started and torch is not imported.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.schema import Config
from timm_parallel.config.compose import compose_command, load_config, save_config
from timm_parallel.config.resolve import resolve
from timm_parallel.config.suggest import is_known
from timm_parallel.lab.sweep.points import expand
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice
from timm_parallel.machine.ranks import NEEDED, ranks_from_environment
from timm_parallel.testing.commands import Refuse
from timm_parallel.testing.configs import conf, parse

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "train.py"


def fake_cuda(count: int) -> tuple[CudaDevice, ...]:
    return tuple(CudaDevice(index, "fake", 1, f"GPU-{index}") for index in range(count))


def write_yaml(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_run_is_refused_on_windows_and_error_recommends_wsl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("timm_parallel.config.resolve.WINDOWS", True)
    with pytest.raises(ValueError, match=r"^Windows: .*WSL 2"):
        resolve(Config())


# Each row holds a command line with a misspelled or forbidden key, and texts that the error message
# must contain.
MISSPELT_KEYS = [
    ("modle=resnet18", "modle=resnet18", "model"),
    ("+modle=resnet18", "modle=resnet18", "model"),
    ("++modle=resnet18", "modle=resnet18", "model"),
    ("~modle", "modle", "model"),
    ("train.epoch=3", "train.epoch=3", "train.epochs"),
    ("+train.epoch=3", "train.epoch=3", "train.epochs"),
    ("++train.epoch=3", "train.epoch=3", "train.epochs"),
    ("model.ema.decy=0.9", "model.ema.decy=0.9", "model.ema.decay"),
    ("epochs=3", "epochs=3", "train.epochs"),
    ("batch_size=3", "batch_size=3", "data.batch_size"),
    ("+model._target_=os.system", "model._target_=os.system"),
    ("_target_=os.system", "_target_=os.system"),
    ("model.kwargs.depth=3", "model.kwargs.depth", "+model.kwargs.depth"),
    ("hydra.runn.dir=x", "hydra.runn"),
    ("+hydra.runn.dir=x", "hydra.runn"),
    ("++hydra.runn.dir=x", "hydra.runn"),
    ("hydra.run.dirr=x", "hydra.run.dirr"),
    ("+hydra.run.dirr=x", "hydra.run.dirr"),
    ("++hydra.run.dirr=x", "hydra.run.dirr"),
    ("+hydra.nonsense=1", "hydra.nonsense"),
    ("hydra/launchr=basic", "hydra/launchr"),
    # parallel.has_ranks is a property of the config class. It is not a key, so a command line
    # cannot set it.
    ("parallel.has_ranks=true", "unknown key parallel.has_ranks"),
    ("+train.untimed_steps=3", "unknown key train.untimed_steps"),
    # Check only the start of this message, because Hydra words the rest.
    ("+train.epochs=3", "train.py: +train.epochs=3: "),
    ("~model.kwargs.depth", "train.py: ~model.kwargs.depth: "),
]
GROUP_OPTIONS = [
    ("model=resnet81", "model=resnet81", "resnet18"),
    ("optim=sgdd", "optim=sgdd", "sgd"),
    ("data=foldr", "data=foldr", "folder"),
    ("parallel=ddpp", "parallel=ddpp", "ddp"),
    ("experiment=compar", "experiment=compar", "compare"),
    ("debug=nope", "debug=nope", "fast", "overfit"),
    ("model=null", "model"),
    ("train=false", "train=false: ", "python evaluate.py run="),
    ("train=[nope]", "train=nope: ", "default, multilabel"),
    ("tracker=[tensorboard,wandbb]", "tracker=wandbb: ", "wandb"),
    ("hydra/launcher=joblib", "hydra/launcher", "joblib"),
    ("hydra=nope", "hydra", "nope"),
]
NAMES = [
    ("model.name=resnet81", "model.name=resnet81", "resnet18"),
    (
        "model.name=vit_tinny_patch16_224",
        "model.name=vit_tinny_patch16_224",
        "vit_tiny_patch16_224",
    ),
    ("model.name=os.system", "model.name=os.system"),
    ("model.name=", "model.name="),
    ("model.name=src.nothing.Net", "model.name=src.nothing.Net"),
    ("model.name=src.models.build.Nothing", "model.name=src.models.build.Nothing"),
    ("model.name=resnet18.nonsense", "model.name=resnet18.nonsense"),
    ("optim.opt=adamww", "optim.opt=adamww", "adamw"),
    ("optim.sched=cosin", "optim.sched=cosin", "cosine"),
    ("data.name=digit", "data.name=digit", "digits"),
    ("data.name=src.nothing.Images", "data.name=src.nothing.Images"),
    ("train.precision=fp8", "train.precision=fp8", "bf16"),
    ("parallel.strategy=ddpp", "parallel.strategy=ddpp", "ddp"),
    ("parallel.accelerator=gpu", "parallel.accelerator=gpu", "cuda"),
    ("checkpoint.metric=acc", "checkpoint.metric=acc", "val/acc"),
    ("optimized_metric=val/ac", "optimized_metric=val/ac", "val/acc"),
]
WRONG_TYPES = [
    ("optim.lr=abc", "optim.lr=abc: ", "number", "optim.lr=0.001"),
    ("optim.lr=", "optim.lr"),
    ("optim.lr=null", "optim.lr", "null"),
    ("optim.lr=[1]", "optim.lr", "[1]"),
    ("train.epochs=1.5", "train.epochs", "1.5"),
    ("train.epochs=two", "train.epochs", "two"),
    ("seed=1.5", "seed", "1.5"),
    ("seed=null", "seed=null: ", "integer", "seed=42"),
    ("model.ema=true", "model.ema=true: ", "model.ema.decay="),
    ("model.sync_bn=maybe", "model.sync_bn=maybe: ", "true or false", "model.sync_bn=false"),
    ("train.max_steps=abc", "train.max_steps=abc: ", "integer or null"),
    ("parallel.device_ids=[a]", "parallel.device_ids=[a]: ", "[0,1]"),
    ("train.precision=[1]", "train.precision=[1]: ", "bf16"),
    ("optim.lr=${model.name}", "optim.lr=${model.name}: ", "number"),
    ("model.name=null", "model.name", "null"),
    ("model.kwargs=3", "model.kwargs=3: ", "{name: value}"),
    ("print_config=maybe", "print_config=maybe", "full"),
    ("tags=x", "tags", "x"),
    ("data.workers=many", "data.workers=many", "auto"),
    ("data.workers=1.5", "data.workers", "1.5"),
    ("data.augment.scale=abc", "data.augment.scale", "abc"),
    ("data.augment.scale=[0.1]", "data.augment.scale=[0.1]"),
    ("parallel.devices=two", "parallel.devices=two", "auto"),
    ("parallel.devices=1.5", "parallel.devices", "1.5"),
    ("parallel.devices=true", "parallel.devices"),
    ("train.epochs=1,2", "train.epochs=1,2: ", "[a,b]", "-m"),
    ("optim.lr=0,001", "optim.lr=0,001: ", "0.1"),
    ("data.augment.scale=(0.5,1.0)", "data.augment.scale=(0.5,1.0): ", "[a,b]"),
    ("data.root=d/my=data", "data.root=d/my=data: ", "quote"),
    ("data.root=d/ü[1]", "data.root=d/ü[1]: ", "write"),
    ("tags=[a", "tags=[a: ", "[a,b]"),
    ("optim.lr=choice(1,2)", "optim.lr=choice(1,2)", "--multirun"),
    ("optim.lr=${nope}", "optim.lr", "nope"),
    ("optim.lr=${optim.lr}", "optim.lr"),
    ("model.name", "model.name"),
    ("hydra.run.dir=a=b", "hydra.run.dir=a=b"),
    ("hydra.verbose=3", "hydra.verbose=3", "true, false"),
    ("hydra.verbose=[1]", "hydra.verbose=[1]", "true, false"),
]
WRONG_NUMBERS = [
    ("optim.lr=nan", "optim.lr=nan"),
    ("optim.lr=inf", "optim.lr=inf"),
    ("optim.lr=-inf", "optim.lr=-inf"),
    ("optim.lr=1e400", "optim.lr=inf"),
    ("optim.lr=0", "optim.lr=0"),
    ("optim.lr=-1", "optim.lr=-1"),
    ("optim.weight_decay=nan", "optim.weight_decay=nan"),
    ("optim.weight_decay=-0.1", "optim.weight_decay=-0.1"),
    ("optim.momentum=1.5", "optim.momentum=1.5"),
    ("optim.clip_grad=0", "optim.clip_grad=0"),
    ("optim.decay_milestones=[1,nan]", "optim.decay_milestones"),
    ("model.ema.decay=2", "model.ema.decay=2"),
    ("train.epochs=0", "train.epochs=0"),
    ("train.epochs=-1", "train.epochs=-1"),
    ("train.max_steps=0", "train.max_steps=0"),
    ("train.accumulate=0", "train.accumulate=0"),
    ("train.log_every=0", "train.log_every=0"),
    ("train.evaluate_every=-1", "train.evaluate_every=-1"),
    ("train.smoothing=1.5", "train.smoothing=1.5"),
    ("data.batch_size=0", "data.batch_size=0"),
    ("data.batch_size=-4", "data.batch_size=-4"),
    ("data.image_size=0", "data.image_size=0"),
    ("data.image_size=[32]", "data.image_size=[32]"),
    ("data.eval_image_size=[32,0]", "data.eval_image_size=[32, 0]"),
    ("data.workers=-1", "data.workers=-1"),
    ("data.limit_train=0", "data.limit_train=0"),
    ("data.augment.hflip=2", "data.augment.hflip=2"),
    ("data.augment.mixup=nan", "data.augment.mixup=nan"),
    ("data.augment.scale=[0.1,nan]", "data.augment.scale", "nan"),
    ("data.augment.scale=[1.0,0.1]", "data.augment.scale=[1.0, 0.1]"),
    (
        "data.augment.ratio=[80,125] data.augment.scale=[0.5,1]",
        "data.augment.ratio=[80.0, 125.0]",
        "[0.75,1.33]",
    ),
    ("parallel.devices=0", "parallel.devices=0"),
    ("parallel.devices=-1", "parallel.devices=-1"),
    ("parallel.threads_per_device=0", "parallel.threads_per_device=0"),
    ("parallel.timeout=0", "parallel.timeout=0"),
    ("checkpoint.keep=0", "checkpoint.keep=0"),
    ("checkpoint.every_steps=0", "checkpoint.every_steps=0"),
    ("seed=-1", "seed=-1"),
    ("seed=99999999999999999999999", "seed=99999999999999999999999"),
]
ACROSS_GROUPS = [
    (
        "parallel=ddp parallel.devices=2 data.batch_size=63",
        "data.batch_size=63",
        "2 devices",
        "62",
        "64",
    ),
    ("parallel=ddp parallel.devices=2 data.batch_size=1", "data.batch_size=1", "2 devices"),
    ("parallel=dp parallel.devices=2 data.batch_size=1", "data.batch_size=1", "2 devices"),
    (
        "parallel=ddp parallel.devices=2 data.batch_size=6 data.augment.mixup=0.2",
        "data.batch_size=6",
        "mixup",
    ),
    ("data.batch_size_per_device=4", "data.batch_size=64", "data.batch_size_per_device=4"),
    ("parallel=single parallel.devices=2", "parallel.devices=2", "single"),
    ("parallel=fsdp model.compile=true", "model.compile=true", "fsdp"),
    ("parallel=fsdp optim.opt=muon", "optim.opt=muon", "fsdp", "adamw"),
    ("parallel=fsdp optim.clip_grad=1 optim.clip_mode=agc", "optim.clip_mode=agc", "fsdp", "value"),
    (
        "parallel=fsdp optim=sgd +optim.kwargs.fused=true",
        "optim.kwargs.fused=true",
        "fsdp",
        "adamw",
    ),
    (
        "parallel=fsdp parallel.devices=4 parallel.shard_size=3",
        "parallel.shard_size=3",
        "4 devices",
        "2, 4",
    ),
    ("parallel=fsdp parallel.devices=2 parallel.shard_size=1", "parallel.shard_size=1", "2"),
    ("parallel=fsdp parallel.output_device=0", "parallel.output_device=0", "ddp"),
    ("parallel=ddp parallel.shard_size=2", "parallel.shard_size=2", "fsdp"),
    ("parallel=ddp parallel.reshard_after_forward=false", "parallel.reshard_after_forward", "fsdp"),
    ("parallel=single parallel.static_graph=true", "parallel.static_graph", "ddp", "single"),
    ("parallel=ddp parallel.dim=1", "parallel.dim=1", "dp"),
    ("parallel=dp parallel.bucket_cap_mb=1", "parallel.bucket_cap_mb=1", "ddp"),
    ("parallel=dp parallel.max_restarts=1", "parallel.max_restarts=1", "ddp"),
    ("parallel=single parallel.device_ids=[0]", "parallel.device_ids=[0]", "single"),
    ("parallel=dp model.compile=true", "model.compile", "dp"),
    ("parallel=single model.sync_bn=true", "model.sync_bn", "single"),
    ("parallel=ddp model.sync_bn=true", "model.sync_bn", "CUDA"),
    ("parallel=ddp parallel.backend=nccl", "parallel.backend=nccl", "gloo"),
    ("parallel.accelerator=cuda", "parallel.accelerator=cuda", "no CUDA device"),
    ("train.evaluate_every=0 train.early_stop=3", "train.early_stop=3", "train.evaluate_every"),
    ("optim.warmup_epochs=8 train.epochs=8", "optim.warmup_epochs=8", "train.epochs=8"),
    ("optim.sched=multistep", "optim.sched=multistep", "optim.decay_milestones"),
    ("data.augment.ratio=[1,2]", "data.augment.ratio", "data.augment.scale"),
    ("data=folder", "data.root"),
    ("data.root=/data/shapes", "data.root=/data/shapes", "data=folder"),
    ("data=synthetic data.root=/data/shapes", "data.root=/data/shapes", "data.name=synthetic"),
    ("data=folder data.root=/nonexistent", "data.root=/nonexistent", "/nonexistent/train"),
    ("data.augment.aa=nonsense", "data.augment.aa=nonsense"),
    ("experiment=compare", "experiment=compare", "-m"),
]
WHAT_HYDRA_WOULD_CALL = [
    ("hydra.launcher._target_=os.system", "hydra.launcher._target_=os.system"),
    ("++hydra.launcher._target_=os.system", "hydra.launcher._target_=os.system"),
    ("++hydra.sweeper._target_=os.system", "hydra.sweeper._target_=os.system"),
    ("+hydra.callbacks.x._target_=os.system", "hydra.callbacks"),
    ("++hydra.callbacks.x._target_=os.system", "hydra.callbacks"),
    ("++hydra.job_logging.handlers.x.class=os.system", "hydra.job_logging"),
    ("++hydra.job_logging.handlers.x={class:src.models.build.build_model}", "hydra.job_logging"),
    ("--experimental-rerun=job.pickle", "--experimental-rerun"),
]
PLACES = [
    ("--config-name=nope", "nope"),
    ("--config-path=/nope", "--config-path=/nope"),
    ("--config-dir=/nope", "--config-dir=/nope"),
    ("hydra.run.dir=", "hydra.run.dir"),
    ("hydra.run.dir=null", "hydra.run.dir"),
    (f"hydra.run.dir={TRAIN}/below", "hydra.run.dir", "train.py/below"),
    ("hydra.run.dir=/proc/nope/run", "hydra.run.dir=/proc/nope/run"),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN"),
    ("hydra.sweeper.params={seed:3}", "hydra.sweeper.params={seed:3}", "-m"),
    ("-m hydra.sweeper.params.seed=3", "hydra.sweeper.params.seed=3", "-m key=a,b"),
    ("resume=/nonexistent", "resume=/nonexistent"),
    ("data.root=/my holiday photos seed=1", "holiday: ", "'data.root=\"/my holiday photos\"'"),
    ("seed=1 model.weights=/all runs/best.pt", "runs/best.pt", "'model.weights=\"/all runs/best"),
    ("--hlep", "--hlep"),
    ("--lr=1e-3", "--lr=1e-3", "optim.lr", "dashes"),
    ("--optim.weight-decay 0.1", "--optim.weight-decay", "optim.weight_decay", "dashes"),
    ("--epochs 3 seed=1", "--epochs", "train.epochs", "dashes"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        pytest.param(row[0], row[1:], id=row[0])
        for rows in (
            MISSPELT_KEYS,
            GROUP_OPTIONS,
            NAMES,
            WRONG_TYPES,
            WRONG_NUMBERS,
            ACROSS_GROUPS,
            WHAT_HYDRA_WOULD_CALL,
            PLACES,
        )
        for row in rows
    ],
)
def test_error_names_invalid_command_line_argument(
    refuse: Refuse, command: str, named: tuple[str, ...]
) -> None:
    line = refuse(*command.split(" "))
    assert [name for name in named if name not in line] == [], line


def test_message_for_wrong_type_contains_no_omegaconf_class_names(refuse: Refuse) -> None:
    for override in (
        "seed=null",
        "train=false",
        "model.ema=true",
        "optim.lr=abc",
        "tags=x",
        "model.kwargs=3",
    ):
        assert not re.search(
            r"Optional|Float|Integer|subclass|ListConfig|Dict\[|Config group", refuse(override)
        )


def test_sweep_accepts_quoted_names_of_config_group_options() -> None:
    _, points = expand(parse("-m", "model='tiny',\"resnet18\""))
    assert [point.config.model.name for point in points] == ["vit_tiny_patch16_224", "resnet18"]


YAML_FILES = [
    ("modle: 3", "modle"),
    ("train: {epoch: 3}", "train.epoch", "train.epochs"),
    ("model: {ema: {decy: 0.9}}", "model.ema.decy", "model.ema.decay"),
    ("defaults: [{override /modle: tiny}]", "modle"),
    ("defaults: [{override /model: resnet81}]", "model", "resnet81"),
    ("optim: {lr: abc}", "optim.lr", "abc"),
    ("optim: {lr: .nan}", "optim.lr=nan"),
    ("train: {epochs: null}", "train.epochs"),
    ("data: {root: '???', name: folder}", "data.root=???"),
    ("optim: {lr: '???'}", "optim.lr=???"),
    ("data: {augment: {hflip: '???'}}", "data.augment.hflip=???"),
    ("model: {kwargs: {block: {depth: '???'}}}", "model.kwargs.block.depth=???"),
    ("data: {mean: ['???']}", "data.mean=???"),
    ("checkpoint: '???'", "checkpoint=???"),
    ("seed: '???'", "seed=???"),
    ("hydra: null", "hydra"),
    ("hydra: {runn: {dir: x}}", "hydra.runn"),
    ("hydra: {run: {dirr: x}}", "hydra.run.dirr"),
    ("hydra: {launcher: {_target_: os.system}}", "hydra.launcher._target_=os.system"),
    ("hydra: {callbacks: {x: {_target_: os.system}}}", "hydra.callbacks"),
    (
        "hydra: {job_logging: {handlers: {x: {'()': os.system, command: 'exit 1'}}}}",
        "hydra.job_logging",
    ),
    ("train: [1", "wrong"),
    ("3", "int"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "named"), [pytest.param(row[0], row[1:], id=row[0]) for row in YAML_FILES]
)
def test_error_names_invalid_key_or_value_in_yaml_file(
    refuse: Refuse, tmp_path: Path, text: str, named: tuple[str, ...]
) -> None:
    write_yaml(tmp_path / "conf", "experiment/wrong.yaml", f"# @package _global_\n{text}\n")
    line = refuse("--config-dir", str(tmp_path / "conf"), "experiment=wrong")
    assert [name for name in named if name not in line] == [], line


# Option files by name, a command line, and the key without a value; None: all keys have one.
MANDATORY = [
    ({"model__mine": "name: ???"}, "model=mine", "model.name"),
    ({"model__mine": "name: ???"}, "model=mine model.name=resnet10t", None),
    ({"local__default": "# @package _global_\ndata:\n  workers: ???"}, "", "data.workers"),
    (
        {
            "local__default": "# @package _global_\noptim: {lr: 0.5}",
            "optim__mine": "lr: ???",
        },
        "optim=mine",
        None,
    ),
    ({"optim__mine": "lr: ???"}, "optim=mine optim={lr: 0.5}", None),
    ({"experiment__a": "# @package _global_\nseed: ???"}, "experiment=a seed=3", None),
    ({"experiment__a": "# @package _global_\nseed: ???"}, "experiment=a seed=???", "seed"),
    (
        {
            "experiment__a": "# @package _global_\ndefaults: [b]\nseed: 3",
            "experiment__b": "# @package _global_\nseed: ???",
        },
        "experiment=a",
        None,
    ),
    (
        {
            "experiment__a": "# @package _global_\ndefaults: [b]\nseed: ???",
            "experiment__b": "# @package _global_\nseed: 3",
        },
        "experiment=a",
        "seed",
    ),
]


@pytest.mark.parametrize(("files", "command", "key"), MANDATORY)
def test_compose_names_mandatory_key_that_no_later_file_or_argument_sets(
    tmp_path: Path, files: dict[str, str], command: str, key: str | None
) -> None:
    words = ["--config-dir", str(conf(tmp_path, **files)), *re.split(" (?=[a-z]+[.=])", command)]
    arguments = parse(*(word for word in words if word))
    if key is None:
        assert compose_command(arguments).config
    else:
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}=\?\?\?: "):
            compose_command(arguments)


def test_sweep_names_mandatory_key_that_neither_file_nor_swept_value_sets(tmp_path: Path) -> None:
    file = "name: ???\nkwargs:\n  depth: ???"
    words = ["--config-dir", str(conf(tmp_path, model__mine=file)), "-m", "model=mine"]
    name = "model.name=resnet10t,resnet18"
    with pytest.raises(ValueError, match=r"^model\.kwargs\.depth=\?\?\?: "):
        expand(parse(*words, name))
    _, points = expand(parse(*words, name, "model.kwargs.depth=1"))
    assert [point.config.model.name for point in points] == ["resnet10t", "resnet18"]
    search = ["search=optuna", "model.kwargs.depth=choice(1,2)", "model.name=resnet18"]
    _, points = expand(parse(*words, *search))
    assert len(points) == 1


@pytest.mark.parametrize(
    ("start", "key"),
    [
        ("", "experiment"),
        ("# A comment above.\n# @package _global_\n", "experiment"),
        ("\ufeff# @package _global_\n", "experiment"),
        ("# @package _globl_\n", "_globl_"),
    ],
    ids=["missing", "second line", "byte order mark", "misspelled"],
)
def test_error_names_experiment_file_and_its_first_line_when_the_line_is_not_read(
    refuse: Refuse, tmp_path: Path, start: str, key: str
) -> None:
    folder = conf(tmp_path / "conf", experiment__trial=f"{start}optim:\n  lr: 0.5\n")
    line = refuse("--config-dir", str(folder), "experiment=trial")
    assert line.startswith(f"train.py: {key}: ")
    assert "experiment/trial.yaml" in line and "# @package _global_" in line


def test_option_in_a_subfolder_of_its_group_is_taken(tmp_path: Path) -> None:
    files = {
        "model__small__mine": "name: resnet10t",
        "experiment__paper__table_2": "# @package _global_\nseed: 11",
        "optim__a__b__c": "lr: 0.25",
    }
    words = ["--config-dir", str(conf(tmp_path, **files)), "experiment=paper/table_2"]
    config = compose_command(parse(*words, "model=small/mine", "optim=a/b/c")).config
    assert (config.model.name, config.seed, config.optim.lr) == ("resnet10t", 11, 0.25)
    _, points = expand(parse("-m", *words, "model=small/mine,tiny"))
    assert [point.config.model.name for point in points] == ["resnet10t", "vit_tiny_patch16_224"]
    with pytest.raises(ValueError, match=r"^model=small/min: .*did you mean small/mine"):
        compose_command(parse(*words, "model=small/min"))


@pytest.mark.parametrize(
    "path",
    [
        "/data/Blüten",
        "/data/花/x",
        "/a (copy)/b",
        "/a#b",
        "/it's",
        "/a&b;c",
        "/a=b",
        "/x,y",
        'a"b(',
    ],
)
@pytest.mark.parametrize("key", ["data.root", "+model.kwargs.file"])
def test_error_for_a_path_with_special_characters_is_the_argument_to_paste(
    path: str, key: str
) -> None:
    folder = "data.name=folder"
    with pytest.raises(ValueError, match=re.escape(f"{key}={path}")) as refusal:
        compose_command(parse(folder, f"{key}={path}"))
    [pasted] = shlex.split(str(refusal.value).rpartition(": write ")[2])
    config = compose_command(parse(folder, pasted)).config
    assert path in (config.data.root, config.model.kwargs.get("file"))


@pytest.mark.parametrize("scale", ["[35,100]", "[0.5,1.5]", "[2,3]"])
def test_area_of_a_crop_above_1_is_refused(refuse: Refuse, scale: str) -> None:
    assert "data.augment.scale=[" in refuse(f"data.augment.scale={scale}")
    assert "1" in refuse(f"data.augment.scale={scale}", "data.augment.train_crop_mode=rrc")
    compose_command(parse("data.augment.scale=[0.8,1.25]", "data.augment.train_crop_mode=rkrc"))


@pytest.mark.parametrize("shown", ["job", "all"])
def test_cfg_names_mandatory_key_without_value(refuse: Refuse, shown: str) -> None:
    assert "data.name=???" in refuse("data=timm", f"--cfg={shown}")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("epochs: 8", "epoch: 8", "train.epoch"),
        ("seed: 42", "sede: 42", "sede"),
        ("lr: 0.001", "lr: much", "optim.lr"),
        ("chdir: false", "chdirr: false", "hydra.job.chdirr"),
    ],
)
def test_error_names_invalid_key_or_value_in_saved_config_of_a_run(
    refuse: Refuse, tmp_path: Path, old: str, new: str, named: str
) -> None:
    save_config(Config(), tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert old in text
    write_yaml(tmp_path / "run", "config.yaml", text.replace(old, new, 1))
    assert named in refuse("--config-path", str(tmp_path / "run"), "--config-name", "config")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("parallel=ddp parallel.devices=4", ("parallel.devices=4", "2 CUDA device")),
        ("parallel=dp parallel.devices=4", ("parallel.devices=4", "2 CUDA device")),
        ("parallel=single parallel.devices=2", ("parallel.devices=2", "single")),
        (
            "parallel=dp parallel.devices=2 parallel.device_ids=[0,2]",
            ("parallel.device_ids=[0, 2]", "0 to 1"),
        ),
        (
            "parallel=ddp parallel.devices=2 parallel.device_ids=[1,1]",
            ("parallel.device_ids=[1, 1]", "different"),
        ),
        (
            "parallel=dp parallel.devices=2 parallel.output_device=2",
            ("parallel.output_device=2", "0 to 1"),
        ),
    ],
)
def test_device_settings_that_two_gpus_cannot_satisfy_are_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, command: str, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: fake_cuda(2))
    line = refuse(*command.split(" "))
    assert [name for name in named if name not in line] == [], line


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE", "LOCAL_RANK", "torchrun")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK", "LOCAL_RANK", "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("RANK=0", "LOCAL_RANK", "torchrun")),
        ({"LOCAL_RANK": "1"}, ("LOCAL_RANK=1", "WORLD_SIZE")),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ("RANK=0", "MASTER_ADDR")),
        ({**dict.fromkeys(NEEDED, "1"), "RANK": "one"}, ("RANK=one",)),
        ({**dict.fromkeys(NEEDED, "1"), "RANK": "²"}, ("RANK=²", "integer")),
        ({**dict.fromkeys(NEEDED, "1"), "RANK": "1"}, ("RANK=1", "WORLD_SIZE=1")),
        ({**dict.fromkeys(NEEDED, "2"), "RANK": "1"}, ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_PROCID", "srun --ntasks=N")),
    ],
)
def test_error_names_missing_or_invalid_rank_environment_variable(
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    named: tuple[str, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refuse("model=tiny")
    assert [name for name in named if name not in line] == [], line


def test_rank_environment_variables_are_accepted_when_complete_or_absent() -> None:
    assert ranks_from_environment({}) is None
    whole = {**dict.fromkeys(NEEDED, "2"), "RANK": "1", "LOCAL_RANK": "1"}
    ranks = ranks_from_environment(whole)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (1, 2, False)


# Valid and invalid values of each key, from which the test draws combinations. Each combination
# must either give a config that can be saved and loaded, or be refused in one line.
OVERRIDES = {
    "model": ["tiny", "resnet18", "resnet81", "null"],
    "data": ["digits", "synthetic", "folder", "foldr"],
    "parallel": ["single", "dp", "ddp", "auto", "ddpp", "null"],
    "optim": ["sgd", "adamw", "sgdd"],
    "experiment": ["digits_vit", "null", "nope"],
    "debug": ["fast", "null"],
    "modle": ["tiny"],
    "+model.kwargs.depth": ["2", "{a: 1}"],
    "++model.name": ["vit_tiny_patch16_224", "resnet81", "null", "os.system", "[a]"],
    "+train.epoch": ["3"],
    "train.epochs": ["1", "0", "-1", "1.5", "nan", "''", "[1]", "null", "9999999999999999999999"],
    "train.max_steps": ["1", "null", "0"],
    "train.precision": ["bf16", "fp8", "null"],
    "train.evaluate_every": ["0", "1", "-1"],
    "train.early_stop": ["1", "null"],
    "optim.lr": ["0.1", "nan", "inf", "-1", "abc", "${optim.min_lr}", "${nope}", "true"],
    "optim.warmup_epochs": ["0", "1", "100", "nan"],
    "optim.sched": ["none", "constant", "multistep", "cosin"],
    "optim.decay_milestones": ["[1,2]", "[]", "[nan]", "3", "null"],
    "optim.kwargs": ["{betas:[0.9,0.95]}", "null", "3"],
    "data.batch_size": ["64", "63", "1", "0", "null", "many"],
    "data.batch_size_per_device": ["3", "null", "0"],
    "data.workers": ["0", "auto", "-1", "1.5", "many", "null"],
    "data.augment.scale": ["[0.1,1]", "[1]", "[]", "[nan,1]", "[a,b]", "null", "3"],
    "data.augment.mixup": ["0.2", "nan"],
    "parallel.devices": ["1", "2", "3", "auto", "0", "-1", "two", "1.5", "true", "null"],
    "parallel.threads_per_device": ["1", "auto", "0", "null"],
    "parallel.device_ids": ["[0]", "[0,0]", "[a]", "null"],
    "parallel.bucket_cap_mb": ["1", "0", "null"],
    "parallel.accelerator": ["cpu", "auto", "cuda", "mps", "tpu"],
    "parallel.backend": ["gloo", "nccl", "auto", "smoke"],
    "seed": ["0", "-1", "null", "1.5"],
    "tags": ["[a]", "a", "[1]", "null"],
    "hydra.run.dir": ["x", "null"],
    "+hydra.run.dirr": ["x"],
    "hydra.launcher._target_": ["os.system"],
    "++hydra.callbacks.x._target_": ["os.system"],
}
COMBINATIONS = st.lists(
    st.sampled_from(sorted(OVERRIDES)).flatmap(
        lambda key: st.sampled_from(OVERRIDES[key]).map(lambda v: f"{key}={v}")
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda override: override.partition("=")[0],
)


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@given(overrides=COMBINATIONS, cuda=st.integers(0, 2))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_overrides_resolve_or_are_refused_in_a_message_that_names_a_key(
    overrides: list[str], cuda: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr(hardware, "visible_cuda_devices", lambda: fake_cuda(cuda))
        try:
            config = resolve(compose_command(parse(*overrides)).config)
        except ValueError as error:
            line = " ".join(str(error).split())
            key = re.match(r"[+~]{0,2}([\w./]+)", line)
            assert key, line
            given_keys = {override.lstrip("+").partition("=")[0] for override in overrides}
            assert (
                is_known(key.group(1))
                or key.group(1) in given_keys
                or key.group(1).startswith("hydra.")
            ), line
            return
        assert "auto" not in (
            config.parallel.strategy,
            config.parallel.devices,
            config.parallel.accelerator,
            config.parallel.threads_per_device,
            config.parallel.backend,
        )
        assert config.global_batch >= config.parallel.devices >= 1
        save_config(config, Path(scratch))
        assert dataclasses.asdict(load_config(Path(scratch))) == dataclasses.asdict(config)
