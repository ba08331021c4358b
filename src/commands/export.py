"""Export a trained model for other programs: as safetensors for timm, as ONNX, or as a folder for
the Hugging Face hub with a model card, which timm and transformers load.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jinja2
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.utils.onnx import onnx_export

from src.commands.load import Trained
from timm_parallel import (
    is_own_class,
    read_environment,
    read_metrics,
    read_result,
    write_json,
    write_text,
)

# Largest difference between the outputs of the exported program and those of the model that counts
# as rounding. It is relative to the largest score, or absolute if all scores are below 1.
ROUNDING = 1e-4
# Batch sizes with which an exported program is compared with the model. One size is not enough,
# because a program may work only with the batch size of its trace.
BATCHES = (1, 7)
# Entries of timm's pretrained_cfg that describe timm's weights, and are wrong for weights that this
# project trained.
OF_PRETRAINED_WEIGHTS = (
    "license",
    "origin_url",
    "paper_ids",
    "paper_name",
    "tag",
    "notes",
    "description",
)


def export_safetensors(trained: Trained, folder: Path, **more: Any) -> list[str]:
    """Write `model.safetensors` and `config.json` in the format of the Hugging Face hub. Return a
    list with the Python expression that loads the files.

    `more`: further entries of config.json. In config.json, the entries that describe timm's
    weights, such as their license, are left out. If the run started from timm's weights, the entry
    `base_model` names them. Raises RuntimeError if the exported model has other outputs than the
    checkpoint.
    """
    if is_own_class(trained.config.model.name):
        path = folder / "model.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: tensor.contiguous() for key, tensor in trained.model.state_dict().items()}, path
        )
        name = trained.config.model.name
        return [f"{name}(…).load_state_dict(safetensors.torch.load_file({str(path)!r}))"]
    save_for_hf(
        trained.model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        str(folder),
        model_config={"label_names": trained.task.names, **more},
        safe_serialization=True,
        data_config=dataclasses.asdict(trained.preprocessing),
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in OF_PRETRAINED_WEIGHTS:
        config["pretrained_cfg"].pop(key, None)
    # transformers passes num_classes to timm as well, and timm rejects two values.
    config["model_args"].pop("num_classes", None)
    if (origin := base_model(trained)) is not None:
        config["base_model"] = origin
    write_json(folder / "config.json", config)
    by_folder = f"local-dir:{folder.resolve()}"
    check_same(trained, timm.create_model(by_folder, pretrained=True).eval(), folder)
    return [f"timm.create_model({by_folder!r}, pretrained=True)"]


def base_model(trained: Trained) -> str | None:
    """Return the Hugging Face name of timm's weights from which the run started. Return None if it
    started from other weights.
    """
    is_pretrained, model = trained.config.model.pretrained, trained.model
    return getattr(model, "pretrained_cfg", {}).get("hf_hub_id") if is_pretrained else None


def export_onnx(trained: Trained, folder: Path) -> list[str]:
    """Write `model.onnx`, which accepts any batch size. Return a list with the Python expression
    that loads the file.

    The input of the ONNX model is `images`, and its output is `scores`. Its metadata stores the
    class names and the preprocessing as JSON. Raises ValueError if torch cannot trace the model,
    RuntimeError if the exported model has other outputs.
    """
    import onnx
    import onnxruntime

    path, images = folder / "model.onnx", _example(trained, 2)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        onnx_export(
            trained.model,
            str(path),
            images,
            use_dynamo=True,
            input_names=["images"],
            output_names=["scores"],
        )
    # torch and onnx raise exceptions of many types for a model that they cannot export.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"format=onnx: torch cannot trace {trained.config.model.name} ({reason}); use "
            "format=safetensors"
        ) from None
    metadata = {"class_names": trained.task.names, **dataclasses.asdict(trained.preprocessing)}
    # ONNX stores weights of more than 2 GB in a second file. The metadata is in the first file, so
    # the second one is not loaded.
    written = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(
        written, {key: json.dumps(value) for key, value in metadata.items()}
    )
    onnx.save(written, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    check_same(
        trained,
        lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
        path,
    )
    return [f"onnxruntime.InferenceSession({str(path)!r})"]


def _example(trained: Trained, batch: int) -> torch.Tensor:
    """Create a batch of random images with the model's input size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *trained.preprocessing.input_size, generator=generator)


@torch.inference_mode()
def check_same(trained: Trained, loaded: Any, path: Path) -> None:
    """Compare the outputs of an exported model with those of the trained model, for random images.
    Raise RuntimeError if they differ by more than rounding (ROUNDING).
    """
    for batch in BATCHES:
        images = _example(trained, batch)
        expected = trained.model(images)
        difference = float((expected - loaded(images)).abs().max())
        if not difference <= ROUNDING * max(1.0, float(expected.abs().max())):
            raise RuntimeError(
                f"{path}: the exported model's outputs differ from the checkpoint's by "
                f"{difference:.2g}; use another format"
            )


TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def export_hub(trained: Trained, folder: Path) -> list[str]:
    """Write the weights, `config.json` and the model card `README.md` of a run for the Hugging Face
    hub. Return Python expressions that load the folder.

    Raises ValueError if timm does not have the model, transformers does not have the task, or the
    run is not finished. Raises RuntimeError if the exported model has other outputs than the
    checkpoint.
    """
    name = trained.config.model.name
    if is_own_class(trained.config.model.name):
        raise ValueError(
            f"format=hub: model.name={name}: expected a model of timm; use another format"
        )
    status = read_result(trained.run).status
    if status != "done":
        raise ValueError(
            f"format=hub: run={trained.run}: its status is {status}, expected done; "
            f"finish the run with resume={trained.run}"
        )
    problem_type = trained.task.problem_type
    if problem_type is None and not _activation(trained.task):
        raise ValueError(
            f"format=hub: train.task={trained.config.train.task}: expected a task that "
            "the transformers library supports; use another format"
        )
    more = {} if problem_type is None else {"problem_type": problem_type}
    # transformers ignores all class names if there are fewer names than outputs of the model.
    outputs: Any = trained.model.num_classes
    names = list(trained.task.names)
    names += [f"unused_{number}" for number in range(len(names), outputs)]
    loaded_by = export_safetensors(trained, folder, label_names=names, **more)
    write_text(folder / "README.md", _model_card(trained))
    return [
        *loaded_by,
        f"transformers.AutoModelForImageClassification.from_pretrained({str(folder)!r})",
    ]


def _model_card(trained: Trained) -> str:
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
        result=read_result(trained.run),
        environment=read_environment(trained.run),
        metrics=_metrics(trained),
        activation=_activation(trained.task),
    )


def _activation(task: Any) -> str:
    """Return the Python call that turns outputs into probabilities, `.sigmoid()` or `.softmax(1)`.
    Return an empty text if the outputs are not class scores, as in regression.
    """
    probabilities = getattr(getattr(task, "loss", None), "probabilities", None)
    if probabilities is None:
        return ""
    return ".sigmoid()" if probabilities is torch.sigmoid else ".softmax(1)"


def _metrics(trained: Trained) -> list[tuple[str, str, float, int]]:
    """Return rows (split, metric, value, number of images) for the exported weights. The values of
    val are from the step of the checkpoint. Those of test are included only if the run tested this
    checkpoint.
    """
    numbers: dict[str, Any] = {}
    result = read_result(trained.run)
    for line in read_metrics(trained.run / "metrics.jsonl"):
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
