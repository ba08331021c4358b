"""Export a run as a folder for the Hugging Face hub, which timm and transformers load, with a model
card.
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
    """Write weights, `config.json` and the model card `README.md`. Return Python expressions that
    load the folder.

    Raises ValueError for a model that is not timm's, a task that transformers does not have and an
    unfinished run, RuntimeError if outputs differ.
    """
    name, saved = trained.config.model.name, SavedRun(trained.run)
    if name.startswith("src."):
        raise ValueError(
            f"format=hub: model.name={name}: expected a model of timm; use another format"
        )
    if saved.result.status != "done":
        raise ValueError(
            f"format=hub: run={trained.run}: {saved.result.status}, expected done; continue it "
            "with resume"
        )
    if trained.task.problem_type is None and not _activation(trained.task):
        raise ValueError(
            f"format=hub: train.task={trained.config.train.task}: expected a task that "
            "transformers has; use another format"
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
    """Change config.json so that transformers loads it too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers passes num_classes as well, and two values are an error.
    config["model_args"].pop("num_classes", None)
    # With fewer names than outputs, transformers ignores all names.
    unnamed = range(len(trained.task.names), config["num_classes"])
    config["label_names"] = [*trained.task.names, *(f"unused_{number}" for number in unnamed)]
    if trained.task.problem_type is not None:
        config["problem_type"] = trained.task.problem_type
    write_json(path, config)


def _model_card(trained: Trained, saved: SavedRun) -> str:
    """Return the text of the model card, from the records of the run."""
    data, template = trained.config.data, TEMPLATE.read_text(encoding="utf-8")
    return jinja2.Template(
        template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).render(
        trained=trained,
        config=trained.config,
        base_model=base_model(trained),
        # Image folders and CSV files have no other name than that of their path.
        data=Path(str(data.root)).name if data.name in ("folder", "csv") else data.name,
        result=saved.result,
        environment=saved.environment,
        metrics=_metrics(trained, saved),
        activation=_activation(trained.task),
    )


def _activation(task: Any) -> str:
    """Return the call that makes probabilities of the outputs; empty if they are numbers."""
    probabilities = getattr(task.loss, "probabilities", None)
    if probabilities is None:
        return ""
    return ".sigmoid()" if probabilities is sigmoid else ".softmax(1)"


def _metrics(trained: Trained, saved: SavedRun) -> list[tuple[str, str, float, int]]:
    """Return (split, metric, value, images) of the exported weights: val at their step, test if the
    run tested them.
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
