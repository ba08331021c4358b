"""Test the outputs of a run: a single TensorBoard event file, the same values in metrics.jsonl,
and plain text when stdout is redirected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.schema import ResolvedConfig
from timm_parallel.testing.commands import Finished

CURVES = {
    *(
        "train/loss",
        "train/grad_norm",
        "lr",
        "val/loss",
        "val/acc",
        "val/acc5",
        "val/acc_best",
        "test/loss",
        "test/acc",
    ),
    *("train/images_per_sec", "train/images_per_sec_per_device", "train/data_wait"),
}


@pytest.fixture(scope="module")
def events(finished_run: Finished) -> EventAccumulator:
    sizes = {"scalars": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(finished_run.folder / "tensorboard"), sizes).Reload()


@pytest.mark.processes
def test_tensorboard_has_curves_of_loss_accuracy_lr_speed_and_memory(
    events: EventAccumulator,
) -> None:
    tags = set(events.Tags()["scalars"])
    assert tags >= CURVES
    assert any(tag.startswith("memory/") for tag in tags)


@pytest.mark.processes
def test_tensorboard_event_file_has_images_confusion_matrix_config_and_hparams(
    finished_run: Finished, events: EventAccumulator
) -> None:
    tags = events.Tags()
    assert any("train" in tag for tag in tags["images"]), tags["images"]
    assert any("confusion" in tag for tag in tags["images"]), tags["images"]
    assert any("config" in tag for tag in tags["tensors"]), tags["tensors"]
    plugins = {
        data.plugin_name
        for data in events.summary_metadata.values()
        if hasattr(data, "plugin_name")
    }
    plugins |= {
        data.plugin_data.plugin_name
        for data in events.summary_metadata.values()
        if hasattr(data, "plugin_data")
    }
    assert "hparams" in plugins
    assert len(list((finished_run.folder / "tensorboard").rglob("events.out.tfevents.*"))) == 1


@pytest.mark.processes
@pytest.mark.parametrize("tag", ["train/loss", "val/acc"])
def test_metrics_jsonl_has_the_same_values_as_tensorboard(
    finished_run: Finished, events: EventAccumulator, tag: str
) -> None:
    written = [(line["step"], line[tag]) for line in finished_run.metrics if tag in line]
    drawn = [(event.step, event.value) for event in events.Scalars(tag)]
    assert [step for step, _ in written] == [step for step, _ in drawn]
    assert [value for _, value in drawn] == pytest.approx([value for _, value in written], rel=1e-6)
    assert len(written) >= 2


@pytest.mark.processes
def test_result_json_has_the_last_logged_val_accuracy_and_test_accuracy(
    finished_run: Finished,
) -> None:
    last: dict[str, Any] = {}
    for line in finished_run.metrics:
        last.update(line)
    assert last["val/acc"] == finished_run.result["val"]["acc"]
    assert last["val/acc_best"] == finished_run.result["val"]["acc_best"]
    assert last["test/acc"] == finished_run.result["test"]["acc"]


@pytest.mark.processes
def test_stdout_redirected_to_a_file_has_one_line_per_epoch_and_no_control_codes(
    finished_run: Finished,
) -> None:
    assert not re.search(r"[\r\x1b]", finished_run.stdout + finished_run.stderr)
    epochs = [line for line in finished_run.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2"]
    names = [line.split()[0] for line in finished_run.stdout.splitlines()]
    for fact in ("model", "data", "strategy", "batch", "steps", "lr", "folder"):
        assert fact in names[:8], finished_run.stdout
    assert names[-4:] == ["folder", "metrics", "speed", "curves"]
    assert f"tensorboard --logdir {finished_run.folder}" in finished_run.stdout.splitlines()[-1]
    assert finished_run.stderr == ""


def test_printed_tensorboard_command_quotes_a_folder_name_with_a_space(tmp_path: Path) -> None:
    from timm_parallel.trackers.tensorboard import TensorBoard

    folder = tmp_path / "my runs"
    assert TensorBoard(ResolvedConfig(), folder, 0).view == f"tensorboard --logdir '{folder}'"
