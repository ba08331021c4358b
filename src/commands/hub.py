"""Export a run as a folder for the Hugging Face hub, with a model card. timm and transformers can
load this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import timm

from src.commands.export import base_model, check_same, export_safetensors
from src.commands.load import Trained
from src.tasks.classification import sigmoid
from timm_parallel import SavedRun, write_json, write_text

TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def export_hub(trained: Trained, folder: Path) -> list[str]:
    """Write the weights, `config.json` and the model card `README.md` of a run for the Hugging Face
    hub. Return Python expressions that load the folder.

    Raises ValueError if timm does not have the model, transformers does not have the task, or the
    run is not finished. Raises RuntimeError if the exported model has other outputs than the
    checkpoint.
    """
    name, saved = trained.config.model.name, SavedRun(trained.run)
    if trained.config.model.is_own:
        raise ValueError(
            f"format=hub: model.name={name}: expected a model of timm; use another format"
        )
    if saved.result.status != "done":
        raise ValueError(
            f"format=hub: run={trained.run}: its status is {saved.result.status}, expected done; "
            f"finish the run with resume={trained.run}"
        )
    if _problem_type(trained) is None and not _activation(trained.task):
        raise ValueError(
            f"format=hub: train.task={trained.config.train.task}: expected a task that "
            "the transformers library supports; use another format"
        )
    export_safetensors(trained, folder)
    _complete_config(trained, folder / "config.json")
    by_folder = f"local-dir:{folder.resolve()}"
    check_same(trained, timm.create_model(by_folder, pretrained=True), folder)
    write_text(folder / "README.md", _model_card(trained, saved))
    return [
        f"timm.create_model({by_folder!r}, pretrained=True)",
        f"transformers.AutoModelForImageClassification.from_pretrained({str(folder)!r})",
    ]


def _complete_config(trained: Trained, path: Path) -> None:
    """Change config.json, which timm wrote, so that transformers can load the model too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers passes num_classes to timm as well, and timm rejects two values.
    config["model_args"].pop("num_classes", None)
    # transformers ignores all class names if there are fewer names than outputs of the model.
    unnamed = range(len(trained.task.names), config["num_classes"])
    config["label_names"] = [*trained.task.names, *(f"unused_{number}" for number in unnamed)]
    if _problem_type(trained) is not None:
        config["problem_type"] = _problem_type(trained)
    write_json(path, config)


def _model_card(trained: Trained, saved: SavedRun) -> str:
    """Build the text of the model card from the records of the run."""
    data, template = trained.config.data, TEMPLATE.read_text(encoding="utf-8")
    return jinja2.Template(
        template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).render(
        trained=trained,
        config=trained.config,
        base_model=base_model(trained),
        # An image folder or a CSV file has no name, so the model card names the last part of its
        # path.
        data=Path(str(data.root)).name if data.name in ("folder", "csv") else data.name,
        result=saved.result,
        environment=saved.environment,
        metrics=_metrics(trained, saved),
        activation=_activation(trained.task),
        problem_type=_problem_type(trained),
    )


def _problem_type(trained: Trained) -> str | None:
    """Return the name of the task in transformers, or None if it needs none."""
    name: str | None = getattr(trained.task, "problem_type", None)
    return name


def _activation(task: Any) -> str:
    """Return the Python call that turns outputs into probabilities, `.sigmoid()` or `.softmax(1)`.
    Return an empty text if the outputs are not class scores, as in regression.
    """
    probabilities = getattr(getattr(task, "loss", None), "probabilities", None)
    if probabilities is None:
        return ""
    return ".sigmoid()" if probabilities is sigmoid else ".softmax(1)"


def _metrics(trained: Trained, saved: SavedRun) -> list[tuple[str, str, float, int]]:
    """Return rows (split, metric, value, number of images) for the exported weights. The values of
    val are from the step of the checkpoint. Those of test are included only if the run tested this
    checkpoint.
    """
    numbers: dict[str, Any] = {}
    result = saved.result
    for line in saved.metrics:
        if line["step"] == trained.step:
            numbers |= {key: value for key, value in line.items() if key.startswith("val/")}
    if (
        result.checkpoint
        and trained.checkpoint.resolve() == (trained.run / result.checkpoint).resolve()
    ):
        numbers |= {f"test/{name}": value for name, value in result.test.items()}
    suffix, rows = "_ema" if trained.weights == "ema" else "", []
    for split, evaluated in (("val", result.val), ("test", result.test)):
        for name in trained.task.metrics:
            if (value := numbers.get(f"{split}/{name}{suffix}")) is not None:
                rows.append((split, name, value, evaluated["samples"]))
    return rows
