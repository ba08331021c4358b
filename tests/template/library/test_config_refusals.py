"""Invalid input ends train.py early, with one line and exit code 2."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from src.schema import (
    AugmentConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from src.tasks.classification import Classification, ClassLoss
from tests.template.runs import ROOT
from timm_parallel.checked_configs import check_task
from timm_parallel.config import validate
from timm_parallel.config.compose import compose_command, save_config
from timm_parallel.config.resolve import resolve
from timm_parallel.config.validate import (
    check_combination,
    option_problems,
    own_class_problems,
)
from timm_parallel.keys import STRATEGIES, TRAITS, ParallelConfig, strategy_options
from timm_parallel.lab.sweep.points import expand
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice
from timm_parallel.machine.imports import find_name, import_name
from timm_parallel.testing.commands import Refuse
from timm_parallel.testing.configs import conf, parse


def fake_cuda(count: int) -> tuple[CudaDevice, ...]:
    return tuple(CudaDevice(index, "fake", 1, f"GPU-{index}") for index in range(count))


def test_run_is_refused_on_windows_and_error_recommends_wsl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("timm_parallel.config.resolve.WINDOWS", True)
    with pytest.raises(ValueError, match=r"^Windows: .*WSL 2"):
        resolve(Config())


# Each row holds a command line with a misspelled or forbidden key, and texts that the error message
# must contain.
MISSPELT_KEYS = [
    ("++modle=resnet18", "modle=resnet18", "model"),
    ("~modle", "modle", "model"),
    ("+train.epoch=3", "train.epoch=3", "train.epochs"),
    ("model.ema.decy=0.9", "model.ema.decy=0.9", "model.ema.decay"),
    ("+model._target_=os.system", "model._target_=os.system"),
    ("hydra.runn.dir=x", "hydra.runn"),
    ("++hydra.run.dirr=x", "hydra.run.dirr"),
    ("hydra/launchr=basic", "hydra/launchr"),
    # parallel.has_ranks is a property of the config class. It is not a key, so a command line
    # cannot set it.
    ("parallel.has_ranks=true", "unknown key parallel.has_ranks"),
    # Check only the start of this message, because Hydra words the rest.
    ("~model.kwargs.depth", "train.py: ~model.kwargs.depth: "),
]
GROUP_OPTIONS = [
    ("debug=nope", "debug=nope", "fast", "overfit"),
    ("model=null", "model"),
    ("train=[nope]", "train=nope: ", "default, multilabel"),
    ("hydra/launcher=joblib", "hydra/launcher", "joblib"),
    ("hydra=nope", "hydra", "nope"),
]
NAMES = [
    ("model.name=", "model.name="),
    ("model.name=src.nothing.Net", "model.name=src.nothing.Net"),
    ("model.name=src.models.build.Nothing", "model.name=src.models.build.Nothing"),
    ("model.name=resnet18.nonsense", "model.name=resnet18.nonsense"),
    ("optim.sched=cosin", "optim.sched=cosin", "cosine"),
    ("data.name=digit", "data.name=digit", "digits"),
    ("checkpoint.metric=acc", "checkpoint.metric=acc", "val/acc"),
    ("optimized_metric=val/ac", "optimized_metric=val/ac", "val/acc"),
]
WRONG_TYPES = [
    ("optim.lr=abc", "optim.lr=abc: ", "number", "optim.lr=0.001"),
    ("optim.lr=null", "optim.lr", "null"),
    ("seed=null", "seed=null: ", "integer", "seed=42"),
    ("model.ema=true", "model.ema=true: ", "model.ema.decay="),
    ("train.max_steps=abc", "train.max_steps=abc: ", "integer or null"),
    ("optim.lr=${model.name}", "optim.lr=${model.name}: ", "number"),
    ("model.kwargs=3", "model.kwargs=3: ", "{name: value}"),
    ("tags=x", "tags", "x"),
    ("data.mean=[[1]]", "data.mean=[[1]]: ", "[0.5,1.0]"),
    ("optim.decay_milestones=[[1]]", "optim.decay_milestones=[[1]]: ", "[0.5,1.0]"),
    ("parallel.device_ids=[a]", "parallel.device_ids=[a]: ", "[0,1]"),
    ("data.workers=many", "data.workers=many", "auto"),
    ("parallel.devices=true", "parallel.devices"),
    ("data.augment.scale=(0.5,1.0)", "data.augment.scale=(0.5,1.0): ", "[a,b]"),
    ("data.root=d/ü[1]", "data.root=d/ü[1]: ", "write"),
    ("tags=[a", "tags=[a: ", "[a,b]"),
    ("optim.lr=choice(1,2)", "optim.lr=choice(1,2)", "--multirun"),
    ("optim.lr=${nope}", "optim.lr", "nope"),
    ("optim.lr=${optim.lr}", "optim.lr"),
    ("hydra.run.dir=a=b", "hydra.run.dir=a=b"),
]
WRONG_NUMBERS = [
    ("optim.lr=nan", "optim.lr=nan"),
    ("optim.lr=1e400", "optim.lr=inf"),
    ("optim.lr=0", "optim.lr=0"),
    ("optim.decay_milestones=[1,nan]", "optim.decay_milestones"),
    ("train.epochs=0", "train.epochs=0"),
    ("data.image_size=[32]", "data.image_size=[32]"),
    ("data.eval_image_size=[32,0]", "data.eval_image_size=[32, 0]"),
    ("data.workers=-1", "data.workers=-1"),
    ("data.mean=[0.5,2]", "data.mean=[0.5, 2.0]", "<= 1"),
    ("data.std=[0]", "data.std=[0.0]", "> 0"),
    ("data.augment.scale=[0.1,nan]", "data.augment.scale", "nan"),
    ("data.augment.scale=[1.0,0.1]", "data.augment.scale=[1.0, 0.1]"),
    (
        "data.augment.ratio=[80,125] data.augment.scale=[0.5,1]",
        "data.augment.ratio=[80.0, 125.0]",
        "[0.75,1.33]",
    ),
    ("seed=-1", "seed=-1"),
    ("seed=99999999999999999999999", "seed=99999999999999999999999"),
]
ACROSS_GROUPS = [
    (
        "parallel=ddp parallel.devices=2 data.batch_size=6 data.augment.mixup=0.2",
        "data.batch_size=6",
        "mixup",
    ),
    (
        "parallel=ddp model.compile=true parallel.bucket_cap_mb=0.5",
        "parallel.bucket_cap_mb=0.5",
        "compile",
    ),
    ("data.batch_size_per_device=4", "data.batch_size=64", "data.batch_size_per_device=4"),
    ("parallel=fsdp optim.clip_grad=1 optim.clip_mode=agc", "optim.clip_mode=agc", "fsdp", "value"),
    (
        "parallel=fsdp optim=sgd +optim.kwargs.fused=true",
        "optim.kwargs.fused=true",
        "fsdp",
        "adamw",
    ),
    ("+train.task_kwargs.x=true", "train.task_kwargs.x=true", "no options"),
    ("parallel=single parallel.static_graph=true", "parallel.static_graph=true", "ddp"),
    ("parallel=dp parallel.max_restarts=1", "parallel.max_restarts=1", "ddp"),
    ("parallel=dp model.compile=true", "model.compile", "dp"),
    ("parallel=single model.sync_bn=true", "model.sync_bn", "single"),
    ("parallel=ddp model.sync_bn=true", "model.sync_bn", "CUDA"),
    ("parallel=ddp parallel.backend=nccl", "parallel.backend=nccl", "gloo"),
    ("parallel.accelerator=cuda", "parallel.accelerator=cuda", "no CUDA device"),
    ("train.evaluate_every=0 train.early_stop=3", "train.early_stop=3", "train.evaluate_every"),
    ("train.max_steps=21 train.profile_steps=10", "train.profile_steps=10", "train.max_steps"),
    ("optim.warmup_epochs=8 train.epochs=8", "optim.warmup_epochs=8", "train.epochs=8"),
    ("optim.sched=multistep", "optim.sched=multistep", "optim.decay_milestones"),
    ("data.augment.ratio=[1,2]", "data.augment.ratio", "data.augment.scale"),
    ("data.root=/data/shapes", "data.root=/data/shapes", "data=folder"),
    ("data=synthetic data.root=/data/shapes", "data.root=/data/shapes", "data.name=synthetic"),
    ("data.val_fraction=0.1", "train.py: data.val_fraction=0.1"),
    ("data=folder data.root=x data.test_fraction=0.1", "train.py: data.test_fraction=0.1"),
    (
        "data=folder data.root=x data.val_fraction=0.6 data.test_fraction=0.5",
        "train.py: data.val_fraction=0.6",
    ),
    ("data=folder data.root=x data.fold=1", "train.py: data.fold=1"),
    ("data=csv data.root=x data.fold=1 data.val_fraction=0.2", "train.py: data.fold=1"),
    (
        "data=csv data.root=x data.fold=1 data.test_fraction=0.1",
        "train.py: data.test_fraction=0.1: conflicts with data.fold=1",
    ),
    (
        "data=folder data.root=x data.val_fraction=0.2 data.group_pattern='('",
        "train.py: data.group_pattern=(",
    ),
    ("data.augment.aa=nonsense", "data.augment.aa=nonsense"),
    ("experiment=compare", "experiment=compare", "-m"),
]
PLACES = [
    ("--experimental-rerun=job.pickle", "--experimental-rerun"),
    ("--config-name=nope", "nope"),
    ("--config-path=/nope", "--config-path=/nope"),
    ("--config-dir=/nope", "--config-dir=/nope"),
    ("data=timm --cfg=job", "data.name=???"),
    ("hydra.run.dir=null", "hydra.run.dir"),
    ("hydra.run.dir=???", "hydra.run.dir=???"),
    ("hydra.job.chdir=???", "hydra.job.chdir=???"),
    ("hydra.run.dir=", "hydra.run.dir="),
    ("hydra.run.dir=.", "hydra.run.dir=."),
    ("hydra.run.dir=${hydra.job.id}", "hydra.run.dir=${hydra.job.id}: ", "hydra.job.id"),
    (f"hydra.run.dir={ROOT}/train.py/below", "hydra.run.dir", "train.py/below"),
    ("hydra.run.dir=/proc/nope/run", "hydra.run.dir=/proc/nope/run"),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN"),
    ("search=optuna", "add -m"),
    ("hydra.sweeper.params={seed:3}", "hydra.sweeper.params={seed:3}", "-m"),
    ("-m hydra.sweeper.params.seed=3", "hydra.sweeper.params.seed=3", "-m key=a,b"),
    ("data.root=/my holiday photos seed=1", "holiday: ", "quote a value with spaces"),
    ("seed=1 model.weights=/all runs/best.pt", "runs/best.pt", "quote a value with spaces"),
    ("--hlep", "--hlep"),
    ("data.image_size", "data.image_size: a value is missing", "data.image_size=…"),
    ("--optim.weight-decay 0.1", "--optim.weight-decay", "optim.weight_decay", "dashes"),
]


# Names of classes of OmegaConf, which mean nothing to a user.
OMEGACONF = r"Optional|Float|Integer|subclass|ListConfig|Dict\[|Config group"


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
    assert (command, *named) not in WRONG_TYPES or not re.search(OMEGACONF, line)


YAML_FILES = [
    ("modle: 3", "modle"),
    ("train: {epoch: 3}", "train.epoch", "train.epochs"),
    ("model: {ema: {decy: 0.9}}", "model.ema.decy", "model.ema.decay"),
    ("defaults: [{override /modle: tiny}]", "modle"),
    ("optim: {lr: .nan}", "optim.lr=nan"),
    ("data: {root: '???', name: folder}", "data.root=???"),
    ("model: {kwargs: {block: {depth: '???'}}}", "model.kwargs.block.depth=???"),
    ("data: {mean: ['???']}", "data.mean=???"),
    ("hydra: null", "hydra"),
    ("hydra: {runn: {dir: x}}", "hydra.runn"),
    ("train: [1", "wrong"),
    ("3", "int"),
]


@pytest.mark.parametrize(
    ("text", "named"), [pytest.param(row[0], row[1:], id=row[0]) for row in YAML_FILES]
)
def test_error_names_invalid_key_or_value_in_yaml_file(
    refuse: Refuse, tmp_path: Path, text: str, named: tuple[str, ...]
) -> None:
    folder = conf(tmp_path / "conf", experiment__wrong=f"# @package _global_\n{text}\n")
    line = refuse("--config-dir", str(folder), "experiment=wrong")
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
    _, points = expand(parse("-m", *words, "model='small/mine',\"tiny\""))
    assert [point.config.model.name for point in points] == ["resnet10t", "vit_tiny_patch16_224"]
    with pytest.raises(ValueError, match=r"^model=small/min: .*did you mean small/mine"):
        compose_command(parse(*words, "model=small/min"))


@pytest.mark.parametrize(
    "path",
    [
        "/data/花/x",
        "/a (copy)/b",
        "/it's",
        "/a=b",
        'a"b(',
    ],
)
def test_error_for_a_path_with_special_characters_is_the_argument_to_paste(path: str) -> None:
    folder, override = "data.name=folder", f"data.root={path}"
    with pytest.raises(ValueError, match=re.escape(override)) as refusal:
        compose_command(parse(folder, override))
    [pasted] = shlex.split(str(refusal.value).rpartition(": write ")[2])
    assert compose_command(parse(folder, pasted)).config.data.root == path


def test_area_of_a_crop_above_1_is_refused(refuse: Refuse) -> None:
    assert "data.augment.scale=[" in refuse("data.augment.scale=[35,100]")
    assert "1" in refuse("data.augment.scale=[0.5,1.5]", "data.augment.train_crop_mode=rrc")
    compose_command(parse("data.augment.scale=[0.8,1.25]", "data.augment.train_crop_mode=rkrc"))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("epochs: 8", "epoch: 8", "train.epoch"),
        ("chdir: false", "chdirr: false", "hydra.job.chdirr"),
    ],
)
def test_error_names_invalid_key_or_value_in_saved_config_of_a_run(
    refuse: Refuse, tmp_path: Path, old: str, new: str, named: str
) -> None:
    save_config(Config(), tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert named in refuse("--config-path", str(tmp_path / "run"), "--config-name", "config")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("parallel=ddp parallel.devices=4", ("parallel.devices=4", "2 CUDA device")),
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
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ("RANK=0", "MASTER_ADDR")),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_PROCID", "srun --ntasks=N")),
    ],
)
def test_error_names_missing_rank_environment_variable(
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    named: tuple[str, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refuse("model=tiny")
    assert [name for name in named if name not in line] == [], line


portable = pytest.mark.portable


@dataclass
class OwnModelConfig(ModelConfig):
    gamma: float | None = None

    def problems(self, whole: Config) -> Iterator[str]:
        yield from super().problems(whole)
        if self.gamma is not None and whole.train.loss != "focal":
            yield f"model.gamma={self.gamma}: has an effect with train.loss=focal only"


@portable
def test_config_validation_applies_the_rule_that_a_subclass_of_model_config_adds() -> None:
    check_combination(Config(model=OwnModelConfig()))
    with pytest.raises(ValueError, match=r"model\.gamma=2\.0"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0)))
    with pytest.raises(ValueError, match=r"model\.sync_bn=true"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0, sync_bn=True)))


@portable
def test_option_of_a_task_with_a_wrong_type_is_refused_for_any_type_annotation() -> None:
    """A module without `from __future__ import annotations` has types in place of texts."""
    types = {"a": int, "b": int | None, "c": "tuple[int, int]"}
    options = make_dataclass(
        "Options", [(name, of, field(default=None)) for name, of in types.items()]
    )
    problems = [*option_problems("train.task_kwargs", options, dict.fromkeys(types, "x"))]
    assert [problem.partition(": ")[2] for problem in problems] == [
        "expected an integer",
        "expected an integer or null",
        "expected tuple[int, int]",
    ]


@portable
def test_option_of_dp_ddp_or_fsdp_is_refused_under_another_strategy() -> None:
    assert set(strategy_options().values()) == {"dp", "ddp", "fsdp"}
    assert set(strategy_options()) <= {entry.name for entry in fields(ParallelConfig)}
    for key, owner in strategy_options().items():
        for strategy in ("auto", *STRATEGIES, STRATEGIES["single"]):
            parallel = ParallelConfig(strategy=strategy)
            setattr(parallel, key, 1)
            if strategy == owner:
                check_combination(Config(parallel=parallel))
                continue
            with pytest.raises(
                ValueError,
                match=rf"parallel\.{key}=1: an option of {owner}, but parallel={strategy}",
            ):
                check_combination(Config(parallel=parallel))


@portable
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_class_of_a_built_in_strategy_has_the_traits_of_the_table(strategy: str) -> None:
    assert import_name(STRATEGIES[strategy]).traits == TRAITS[strategy]


@portable
def test_strategy_given_as_a_class_name_follows_the_same_rules_as_its_short_name() -> None:
    fsdp = ParallelConfig(strategy=STRATEGIES["fsdp"])
    assert fsdp.has_ranks and not fsdp.has_one_process
    check_combination(Config(parallel=fsdp, model=ModelConfig(sync_bn=True)))
    for refused, key in (
        (Config(parallel=fsdp, model=ModelConfig(compile=True)), "model.compile"),
        (Config(parallel=fsdp, optim=OptimConfig(opt="muon")), "optim.opt"),
        (Config(parallel=fsdp, optim=OptimConfig(opt="torch.optim.SGD")), "optim.opt=.*works_on_"),
        (
            Config(parallel=ParallelConfig(strategy=STRATEGIES["single"], devices=2)),
            "parallel.devices",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{key}"):
            check_combination(refused)


@portable
@pytest.mark.parametrize(
    ("train", "augment", "key"),
    [
        ({"smoothing": 0.1}, {}, "train.smoothing"),
        ({"class_weights": "auto"}, {}, "train.class_weights"),
        ({}, {"mixup": 0.2}, "data.augment.mixup"),
        ({}, {"cutmix": 1.0}, "data.augment.cutmix"),
        ({}, {"cutmix_minmax": [0.2, 0.8]}, "data.augment.cutmix_minmax"),
    ],
)
def test_option_is_refused_when_the_chosen_loss_does_not_read_the_option(
    train: dict[str, Any], augment: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config_with(loss: str) -> Config:
        data = DataConfig(augment=AugmentConfig(**augment))
        return Config(train=TrainConfig(loss=loss, **train), data=data)

    check_task(config_with("ce"))
    losses = Classification.known_losses
    monkeypatch.setattr(
        Classification, "known_losses", {**losses, "plain": ClassLoss(losses["ce"].build)}
    )
    # The second value of train.loss names a class that does not declare the options that it reads.
    for loss in ("plain", "src.models.segmenter.Segmenter"):
        with pytest.raises(ValueError, match=rf"^{key}=.* train\.loss={loss} does not read it"):
            check_task(config_with(loss))


@portable
def test_class_is_found_only_if_the_package_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "models.py").write_text("class Net: ...\ndef f(): ...\n")
    (package / "broken.py").write_text("import package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (package / "imported.py").write_text("from pathlib import Path\n")
    assert callable(find_name("own_package.models.f", "own_package"))
    assert [*own_class_problems("model.name", "own_package.models.Net")]
    monkeypatch.setattr(validate, "package", lambda: "own_package")
    assert not [*own_class_problems("model.name", "own_package.models.Net")]
    for other in ("models.f", "models.Other", "imported.Path", "missing.Net"):
        (line,) = own_class_problems("model.name", f"own_package.{other}")
        assert line.startswith(f"model.name=own_package.{other}: no such class")
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_installed"):
        [*own_class_problems("model.name", "own_package.broken.Net")]
