"""Convert a run of timm's train.py: `python scripts/from_timm.py args.yaml` writes an experiment
that trains in the same way.

The file is args.yaml from the folder of timm's run, or a file that timm's `--config` reads. An
argument that the file does not contain has timm's default. The script prints the arguments that
have no equivalent here, and the differences that remain.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from src.app import app
from src.schema import Config
from timm_parallel import command_line, compose, errors_in_one_line, file_argument

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
# Parts of TABLE that list timm's default of an argument, and the key of this project or the reason
# why there is none.
PARTS = ("same", "without_meaning", "missing")
# Override for composing a config, because a config without a data folder is refused.
ROOT = "data.root=."
CYCLIC = ("cosine", "tanh", "poly")
METRICS = {"top1": "val/acc", "top5": "val/acc5", "loss": "val/loss"}
# Settings of an experiment: dictionary from dotted key, such as `optim.lr`, to value.
Settings = dict[str, Any]


class TimmArguments:
    """Arguments of a run of timm's train.py, with notes about those that were not converted
    exactly.
    """

    def __init__(self, given: Settings) -> None:
        self.values: Settings = {
            name: row[0] for part in PARTS for name, row in TABLE[part].items()
        }
        self.values |= TABLE["converted"]
        self.differences: list[str] = []
        for name, value in given.items():
            if name in self.values:
                self.values[name] = value if isinstance(self.values[name], str) else _number(value)
        # Ignore unknown arguments that are off, because they have no effect.
        unknown = [
            f"{name}={value}" for name, value in given.items() if value and name not in self.values
        ]
        if unknown:
            self.note_missing(", ".join(unknown), "this script knows no such argument")
        for name, (default, instead) in TABLE["missing"].items():
            if self.values[name] != default and (self.values[name] or default):
                self.note_missing(f"{name}={self.values[name]}", instead)
        if self.no_aug:
            self.values |= TABLE["no_aug"]
        self.mixes = bool(self.mixup or self.cutmix or self.cutmix_minmax)
        # With --bce-loss, timm uses cross entropy if neither mixup nor smoothing is on. With
        # --loss, timm has no such exception.
        self.values["bce_loss"] = self.loss == "bce" or (
            self.bce_loss and (self.mixes or self.smoothing > 0)
        )
        if self.loss not in (None, "", "ce", "bce"):
            self.note_missing(
                f"loss={self.loss}", "train.loss=asl of train=multilabel, or a loss of your own"
            )

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def note(self, difference: str) -> None:
        self.differences.append(f"Not the same here: {difference}")

    def note_missing(self, argument: str, instead: str) -> None:
        self.differences.append(f"Without an equivalent here: {argument}; {instead or 'left out'}")

    def has_effect(self, name: str, default: Any, key: str, needed: Sequence[str] = ()) -> bool:
        """Return True if an argument must be written to the experiment. An argument of a
        constructor that has timm's default need not be written.
        """
        if "kwargs." in key and self.values[name] == default:
            return False
        return not needed or any(
            f"sched={self.sched}" == need or self.values.get(need) for need in needed
        )


def convert(args: TimmArguments) -> Settings:
    """Convert the arguments of timm to settings of this project. Note the differences that remain
    in the TimmArguments object.
    """
    settings = {
        row[1]: args.values[name]
        for name, row in TABLE["same"].items()
        if args.has_effect(name, *row)
    }
    for part in (_data, _model, _augment, _optim, _schedule, _train):
        settings |= part(args)
    return settings


def _data(args: TimmArguments) -> Settings:
    settings: Settings = {"data.batch_size": None, "data.image_size": args.img_size}
    if root := args.data_dir or args.data:
        settings["data.root"] = root
    if args.input_size is not None:
        channels, height, width = args.input_size
        settings |= {
            "model.in_chans": channels if channels != 3 else None,
            "data.image_size": height if height == width else [height, width],
        }
    for name in ("mean", "std"):
        values = args.values[name]
        settings[f"data.{name}"] = (
            values * (args.in_chans or 3) if values and len(values) == 1 else values
        )
    settings["data.interpolation"] = args.interpolation or None
    kind = args.dataset.partition("/")[0]
    if kind in ("tfds", "hfids", "wds"):
        args.note_missing(f"dataset={args.dataset}", "a stream; use hfds/… or a folder")
    elif kind not in ("torch", "hfds"):
        if args.train_split != "train" or args.val_split not in ("validation", "val"):
            args.note_missing(
                f"train_split={args.train_split}, val_split={args.val_split}", "train/ and val/"
            )
    else:
        settings["data.name"] = args.dataset
        for name in ("train_split", "val_split", "dataset_download", "input_key", "target_key"):
            if args.values[name] != TABLE["converted"][name]:
                settings[f"data.kwargs.{name.removeprefix('dataset_')}"] = args.values[name]
    return settings


def _model(args: TimmArguments) -> Settings:
    weights = args.initial_checkpoint or args.pretrained_path or None
    settings: Settings = {
        "model.weights": weights,
        "model.pretrained": args.pretrained and weights is None,
    }
    settings |= {f"model.kwargs.{name}": value for name, value in args.model_kwargs.items()}
    settings["model.compile"] = args.torchcompile is not None and (args.torchcompile_mode or True)
    if args.torchcompile not in (None, "inductor"):
        args.note_missing(f"torchcompile={args.torchcompile}", "model.compile=true is inductor's")
    return settings


def _augment(args: TimmArguments) -> Settings:
    jitter = args.color_jitter if args.aa is None or "3a" in args.aa else None
    values = {
        "interpolation": args.train_interpolation or args.interpolation or "bicubic",
        "color_jitter": jitter or None,
        "color_jitter_prob": args.color_jitter_prob if jitter else None,
        "grayscale_prob": args.grayscale_prob or 0.0,
        "gaussian_blur_prob": args.gaussian_blur_prob or 0.0,
        "aug_repeats": max(1, int(args.aug_repeats)),
        "cutmix": 0.0 if args.cutmix_minmax else args.cutmix,
    }
    if args.mixup and (args.cutmix or args.cutmix_minmax):
        values["mixup_switch_prob"] = args.mixup_switch_prob
    if not (args.train_interpolation or args.interpolation):
        args.note(
            "training images are resized by bicubic; timm takes what the model's weights were "
            "made with"
        )
    if args.mixup_off_epoch >= _epochs(args):
        values["mixup_off_epoch"] = 0
    if args.reprob and args.mixes and not args.no_prefetcher:
        args.note("images are erased before mixup, as in DeiT; timm's prefetcher erases mixed ones")
    return {f"data.augment.{name}": value for name, value in values.items()}


def _optim(args: TimmArguments) -> Settings:
    settings: Settings = {f"optim.kwargs.{name}": value for name, value in args.opt_kwargs.items()}
    if args.lr:
        return {**settings, "optim.lr": args.lr, "optim.lr_rule": "none"}
    rule = args.lr_base_scale or (
        "sqrt" if any(part in args.opt.lower() for part in ("ada", "lamb")) else "linear"
    )
    return {
        **settings,
        "optim.lr": args.lr_base,
        "optim.lr_rule": rule,
        "optim.lr_base_batch": args.lr_base_size,
    }


def _schedule(args: TimmArguments) -> Settings:
    settings: Settings = {"optim.sched": args.sched, "train.epochs": _epochs(args)}
    if args.sched in ("plateau", "none"):
        args.note_missing(f"sched={args.sched}", "written as constant")
        settings["optim.sched"] = "constant"
    elif args.sched not in ("constant", "wsd", "rsqrt"):
        settings["optim.warmup_prefix"] = args.warmup_prefix or not args.warmup_epochs
    if args.sched == "multistep" and args.warmup_prefix:
        settings["optim.decay_milestones"] = [
            epoch + args.warmup_epochs for epoch in args.decay_milestones
        ]
    if args.lr_cycle_limit > 1 and args.sched in CYCLIC:
        cycles = {"cycle_limit": args.lr_cycle_limit, "cycle_decay": args.lr_cycle_decay}
        settings |= {f"optim.sched_kwargs.{name}": value for name, value in cycles.items()}
    if args.lr_noise is not None:
        settings["optim.sched_kwargs.noise_seed"] = args.seed
    if not args.sched_on_updates:
        args.note("the rate moves by step; timm's moves by epoch without --sched-on-updates")
    return settings


def _epochs(args: TimmArguments) -> int:
    """Compute the number of epochs that timm trains. It includes cycles and cool-down, and the
    warm-up if --warmup-prefix is set.
    """
    epochs = args.epochs
    if args.sched in CYCLIC:
        cycles = sum(args.epochs * args.lr_cycle_mul**cycle for cycle in range(args.lr_cycle_limit))
        epochs = int(cycles) + args.cooldown_epochs
    return int(epochs + (args.warmup_epochs if args.warmup_prefix else 0))


def _train(args: TimmArguments) -> Settings:
    if args.eval_metric not in METRICS:
        args.note_missing(f"eval_metric={args.eval_metric}", "written as val/acc")
    if args.dist_bn == "reduce" and not (args.sync_bn or args.no_ddp_bb):
        args.note(
            "each rank keeps its own BatchNorm averages until their mean; timm sends rank 0's in "
            "each step"
        )
    return {
        "task_name": args.experiment or f"timm_{re.sub(r'[^A-Za-z0-9_]', '_', args.model)}",
        "train.precision": ("bf16" if args.amp_dtype == "bfloat16" else "fp16")
        if args.amp
        else "tf32",
        "train.loss": "bce" if args.bce_loss else "ce",
        "parallel.dist_bn": None if args.sync_bn else args.dist_bn or None,
        "checkpoint.metric": METRICS.get(args.eval_metric, "val/acc")
        + "_ema" * bool(args.model_ema),
        "checkpoint.every_steps": args.recovery_interval or None,
    }


def _number(value: Any) -> Any:
    """Convert a text such as 5e-4 to a number. YAML reads it as text, but timm's argparse as a
    number.
    """
    return (
        float(value)
        if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value)
        else value
    )


def changes(settings: Settings) -> tuple[list[str], Settings]:
    """Return the config options to select (data=…, parallel=…), and the settings that differ from
    the defaults.
    """
    options = ["data=timm" if "data.name" in settings else "data=folder", "parallel=ddp"]
    composed = compose(*options, f"data.name={settings.get('data.name', 'folder')}", ROOT)
    bases: Any = [asdict(composed), asdict(Config())]

    def is_default(key: str) -> bool:
        return all(
            reduce(lambda tree, part: tree.get(part), key.split("."), base) == settings[key]
            for base in bases
        )

    return options, {
        key: value for key, value in settings.items() if key.endswith("name") or not is_default(key)
    }


def experiment(
    name: str, source: str, options: list[str], settings: Settings, args: TimmArguments
) -> str:
    """Build the YAML text of the experiment file."""
    lines = [
        "# @package _global_",
        f"# {args.model} as timm's train.py trained it; scripts/from_timm.py read {source}.",
        *(f"# {line}" for line in args.differences),
        f"#   torchrun --nproc-per-node N train.py experiment={name} data.root=<folder>",
        "# N: the number of GPUs of timm's run, because the learning rate and "
        "data.batch_size_per_device are for them.",
        "# Expected: what timm's run reached.",
        "defaults:",
        *(f"  - override /{option.replace('=', ': ')}" for option in options),
    ]
    tree: Settings = {}
    for key, value in settings.items():
        *groups, leaf = key.split(".")
        reduce(lambda group, part: group.setdefault(part, {}), groups, tree)[leaf] = value
    body = yaml.safe_dump(tree, sort_keys=False)
    return "\n".join([*lines, body])


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("file", type=Path, metavar="args.yaml")
    parser.add_argument(
        "--output", type=file_argument, help="default: conf/experiment/<name of the run>.yaml"
    )
    given = parser.parse_intermixed_args(argv)
    try:
        values = yaml.safe_load(given.file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{given.file}: not a readable YAML file ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{given.file}: expected `argument: value` lines, as timm's train.py writes them"
        )
    args = TimmArguments(values)
    options, settings = changes(convert(args))
    output = given.output or app.root / "conf" / "experiment" / f"{settings['task_name']}.yaml"
    if output.exists():
        raise ValueError(f"output={output}: exists already; remove it or give another file")
    output.write_text(
        experiment(output.stem, given.file.name, options, settings, args), encoding="utf-8"
    )
    print("\n".join([*args.differences, f"{output}: written"]))
    words = [
        f"{'+' * ('kwargs.' in key)}{key}={json.dumps(value)}" for key, value in settings.items()
    ]
    # Compose the written config, so that a setting that train.py would reject raises an error here.
    compose(*options, ROOT, *words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
