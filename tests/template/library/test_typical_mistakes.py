"""Test typical mistakes of users of Lightning, timm and Hydra."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from evaluate import main as evaluate
from scripts.predict import main as predict
from src.schema import Config
from timm_parallel.config.explain import OTHER_NAMES, is_declared, is_known, key_hint
from timm_parallel.keys import leaves
from timm_parallel.testing.commands import Refuse

ROOT = Path(__file__).resolve().parents[3]
KEYS = {key for key, _, _ in leaves(Config())}
GROUPS = {
    path.name: {file.stem for file in path.glob("*.yaml")}
    for path in (ROOT / "conf").iterdir()
    if path.is_dir()
}

# Dictionary from arguments of train.py to the suggestion in the error message. This suggestion must
# come before the name of any other key.
MISTAKES = {
    # Options with dashes are in the style of argparse, which train.py does not use.
    "--lr 0.1": "optim.lr",
    "--resume outputs/x": "resume",
    "--config configs/x.yaml": "experiment=<name in conf/experiment>",
    "--config-name foo": "'foo'",
    "-c conf/train.yaml": "'job'",
    "--drop-path 0.1": "+model.kwargs.drop_path_rate",
    "-c job --lr 0.1": "optim.lr",
    # These names lack the config group, as in optim.lr, or come from another program.
    "lr=0.1": "optim.lr",
    "parallel=ddp devices=2": "parallel.devices",
    "task=foo": "task_name",
    "logger=wandb": "tracker=wandb",
    "run=outputs/x": "resume=<run folder>",
    "test=False": "test split",
    # These keys are in the wrong config group, are misspelled, or come from another program.
    "trainer.max_epochs=3": "train.epochs",
    "trainer=ddp_sim": "parallel=ddp parallel.accelerator=cpu",
    "optim.weight-decay=0.1": "optim.weight_decay",
    "optim.betas=[0.9,0.95]": "+optim.kwargs.betas",
    "+model.drop_rate=0.1": "+model.kwargs.drop_rate",
    "model.kwargs.drop_rate=0.1 --cfg job -p model": "+model.kwargs.drop_rate",
    "+foo=1": "unknown key foo",
    "+optim.lr=0.1": "optim.lr=0.1",
    # These options of config groups do not exist, or lack a required key.
    "model=resnet50": "model.name=resnet50",
    "model=resnet-18": "resnet18",
    "data=cifar10": "data=timm data.name=torch/cifar10",
    "tracker=csv": "tracker=none",
    "tracker=none,tensorboard": "[a,b]",
    "model=tiny,resnet18": "-m",
    "experiment=finetune": "data.root=???: required",
    "experiment=finetune data.root=null": "set it to a folder with <class>/<image>",
    "data=folder": "data.root=???: required",
    "debug=true": "debug=fast",
    "debug": "debug=fast",
    "train=False": "python evaluate.py run=<run folder>",
    # The sign ~ deletes a key or a config group, which train.py does not allow.
    "~optim.lr": "leave it out",
    "~tracker": "tracker=none",
    # These values have a wrong notation or a wrong type.
    "optim.lr = 0.1": "optim.lr=…",
    "optim.lr": "optim.lr=…",
    "optim.lr=1,e-3": "one value",
    "optim.lr=0.1,0.2": "-m",
    "optim.lr=true": "a number",
    "-m optim.lr=0.1:0.5": "a number",
    "train.epochs=3.5": "an integer; the default is train.epochs=8",
    "data.root=~/data": "data.root=$HOME/data",
    "data.augment=[]": "data.augment.scale=",
    "data.augment.scale=0.5": "[0.5,1.0]",
    "model.pretrained=ture": "true or false",
    "model.compile=yes": "True",
    "resume=true": "auto",
    # These values are misspelled names, such as the name of a model.
    "model.name=resnet51": "resnet51q",
    "optim.opt=Adam": "adam",
    "train.precision=bf16-mixed": "bf16",
    "train.loss=focal": "train.task=classification; use ce, bce",
    # Each value is valid, but the combination is not.
    "optim.sched=rsqrt optim.warmup_epochs=0": "optim.warmup_epochs=0",
    "parallel=ddp parallel.devices=3": "data.batch_size=64",
}
OF_EVALUATE = {
    "outputs/train/x": "run=outputs/train/x",
    "run=outputs/nope": "a run folder",
    "ckpt_path=x": "run=<run folder>",
    "--run": "one argument",
    "data.num_workers=4": "data.workers",
}


def first_in(message: str, command: str, expected: str) -> bool:
    """Return True if `message` contains `expected`, and names no other key before it. Keys that
    the command itself contains may come before.
    """
    found = re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\w)", message) or re.search(
        re.escape(expected), message
    )
    if found is None:
        return False
    before = re.findall(r"[a-z]\w*(?:\.\w+)+", message[: found.start()])
    return [name for name in before if name in KEYS and name not in command] == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", MISTAKES)
def test_error_of_train_py_names_the_right_key_first_for_a_typical_mistake(
    refuse: Refuse, command: str
) -> None:
    line = refuse(*shlex.split(command))
    # Remove the start of the message, which repeats the mistake of the user.
    message = line.removeprefix("train.py: ").removeprefix(shlex.split(command)[0])
    assert first_in(message, command, MISTAKES[command]), line


@pytest.mark.parametrize("command", OF_EVALUATE)
def test_error_of_evaluate_py_names_the_right_key_first_for_a_typical_mistake(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert evaluate([command]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert first_in(line.removeprefix(f"evaluate.py: {command}"), command, OF_EVALUATE[command]), (
        line
    )


def test_error_of_predict_py_suggests_the_option_images_for_the_unknown_key_image(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert predict(["run=outputs/x", "image=foo.jpg"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--images" in line


def tables() -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    return loaded


def test_table_of_names_from_other_programs_suggests_only_existing_keys_and_options() -> None:
    def exists(word: str) -> bool:
        key, _, value = word.lstrip("+").partition("=")
        if key in GROUPS:
            return not value or {*value.strip("[]").split(",")} <= GROUPS[key]
        return is_known(key) or key in ("run", "predictions")

    named = {
        (name, word)
        for name, suggestions in (tables()["names"] | tables()["evaluate"]).items()
        for word in re.split(
            r",? ",
            suggestions.replace("<name in conf/experiment>", "tune").replace("<run folder>", "x"),
        )
    }
    no_keys = {"python", "evaluate.py", "with"}
    assert [
        (name, word) for name, word in sorted(named) if word not in no_keys and not exists(word)
    ] == []


def suggestions_for(word: str) -> tuple[list[str], bool]:
    """Return the suggestions for a word such as `gpus=2`, and if it says that none exists."""
    key, _, value = word.lstrip("+").partition("=")
    text = key_hint(key, GROUPS, value)
    found = re.search(r"did you mean (.*)\?", text)
    return (found.group(1).split(", ") if found else []), "no such key" in text


def test_error_for_a_timm_argument_suggests_the_key_that_from_timm_py_would_write() -> None:
    same = yaml.safe_load((ROOT / "scripts" / "from_timm.yaml").read_text(encoding="utf-8"))["same"]
    names = {name: entry[1] for name, entry in same.items() if not is_declared(name)}
    assert len(names) > 45
    # The batch size of timm is per device, so from_timm.py writes another key. The message suggests
    # data.batch_size, which most users want.
    found = {name: suggestions_for(name)[0][0].lstrip("+") for name in names}
    wrong = {name for name in names if found[name] != names[name].lstrip("+")}
    assert wrong == {"batch_size"} and found["batch_size"] == "data.batch_size"
