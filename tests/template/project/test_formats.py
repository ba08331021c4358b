"""train.precision=auto and model.channels_last=auto: chosen by the ranks, kept by the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch

from src.models.build import build_model, is_convolutional
from src.schema import TrainConfig
from tests.template.runs import own, parts_of, resolved, tiny, train_run
from timm_parallel.checked_configs import check_task
from timm_parallel.config.compose import load_config
from timm_parallel.config.resolve import resolve
from timm_parallel.lab.sweep.points import expand
from timm_parallel.launch.job import prepare
from timm_parallel.launch.resume import (
    check_resumable,
    compose_run,
    folder_to_resume,
    keep_chosen,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice, Driver
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import choose_precision
from timm_parallel.record.result import Result, write_result
from timm_parallel.run.banner import show_banner
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import in_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RUN = ("data.limit_train=64", "train.epochs=1", "tracker=none", "parallel.accelerator=cpu")


@pytest.mark.parametrize(
    ("devices", "capability", "others", "expected"),
    [
        ([GPU], (9, 0), [True], "bf16"),
        ([GPU, GPU], (8, 0), [True, True], "bf16"),
        # A rank on another node has an older GPU.
        ([GPU], (8, 0), [True, False], "fp32"),
        ([GPU], (7, 5), [False], "fp32"),
        ([CPU], None, [False], "fp32"),
        ([torch.device("mps")], None, [False], "fp32"),
    ],
)
def test_precision_auto_is_bf16_if_all_devices_of_all_ranks_compute_it_in_hardware(
    monkeypatch: pytest.MonkeyPatch,
    devices: list[torch.device],
    capability: Any,
    others: list[bool],
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gathered: list[bool] = []

    def gather(own: bool) -> list[bool]:
        gathered.append(own)
        return others

    group = SimpleNamespace(gather=gather)
    strategy: Any = SimpleNamespace(devices=devices, group=group)
    train = TrainConfig()
    choose_precision(strategy, train)
    assert (train.precision, gathered) == (expected, [others[0]])
    given = TrainConfig(precision="fp16")
    choose_precision(strategy, given)
    assert given.precision == "fp16"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, True) for name in ("resnet18", "resnet50", "efficientnet_b0", "regnety_002")],
        *[(name, False) for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")],
    ],
)
def test_models_whose_parameters_are_mostly_in_convolutions_are_convolutional(
    name: str, expected: bool
) -> None:
    with torch.device("meta"):
        assert is_convolutional(timm.create_model(name)) is expected


@pytest.mark.parametrize("value", ["auto", True, False])
@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_channels_last_auto_depends_on_device_and_model(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: Any
) -> None:
    """The device of the test is a stand-in, because the model is not moved to it."""
    config = resolved("model=resnet18", f"model.name={name}").model
    config.channels_last, config.kwargs = value, {}
    moved: list[torch.memory_format] = []

    def to(model: torch.nn.Module, device: Any, memory_format: torch.memory_format) -> Any:
        moved.append(memory_format)
        return model

    monkeypatch.setattr(torch.nn.Module, "to", to)
    build_model(config, 3, 3, (32, 32), torch.device(kind))
    expected = kind == "cuda" and name == "resnet10t" if value == "auto" else value
    assert config.channels_last is expected
    assert moved == [torch.channels_last if expected else torch.preserve_format]


def train(ranks: Ranks, store: Any, folder: str, bf16: bool, *overrides: str) -> str:
    """Train on CPUs that count as devices with bf16, if `bf16`. Return the precision of the run."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm_parallel.parallel.strategy._computes_bf16", lambda device: bf16)
        config = resolved(*RUN, *overrides)
        if ranks.rank == 0 and not (Path(folder) / "config.yaml").exists():
            prepare(config, Path(folder))
        return train_run(config, Path(folder), ranks, store).parts.config.train.precision


@pytest.mark.parametrize("bf16", [False, True])
def test_banner_and_config_have_the_precision_that_auto_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bf16: bool
) -> None:
    precision = "bf16" if bf16 else "fp32"
    with caplog.at_level("INFO", logger="timm_parallel"):
        assert train(Ranks(), None, str(tmp_path), bf16, "parallel=single") == precision
    config = own(load_config(tmp_path))
    assert (config.train.precision, config.model.channels_last) == (precision, False)
    [line] = [line for line in caplog.messages if line.startswith("model ")]
    assert line.endswith(precision)


@pytest.mark.parametrize(("names", "lines"), [(["a", "b"], ["classes      2: a, b"]), ([], [])])
def test_banner_has_no_line_of_classes_when_the_dataset_has_no_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], lines: list[str]
) -> None:
    parts = parts_of(resolved(*RUN, "parallel=single"))
    parts.task.names = names
    with caplog.at_level("INFO", logger="timm_parallel"):
        show_banner(parts, tmp_path)
    assert [line for line in caplog.messages if line.startswith("classes")] == lines


@pytest.mark.slow(seconds=2)
def test_ranks_of_ddp_train_in_the_same_precision_that_auto_chose(tmp_path: Path) -> None:
    words = ("parallel=ddp", "parallel.devices=2")
    assert in_ranks(train, 2, str(tmp_path), True, *words) == ["bf16", "bf16"]
    assert load_config(tmp_path).train.precision == "bf16"


def test_resume_keeps_the_formats_that_the_run_has_chosen_for_auto(tmp_path: Path) -> None:
    """The resume composes the config again, in which the formats are auto."""
    outputs = f"paths.output_dir={tmp_path}"
    folder = tmp_path / "train" / "2026-01-01" / "00-00-00"
    train(Ranks(), None, str(folder), True, "parallel=single", outputs)
    write_result(folder, Result("interrupted"))
    given = tiny("resume=auto", "parallel=single", outputs, *RUN)
    for words in (given, ["resume=auto", outputs]):
        command = compose_run(parse(*words))
        config = resolve(command.config)
        check_task(config)
        assert folder_to_resume(config, command.config) == folder
        saved = load_config(folder)
        kept: Any = keep_chosen(config, saved, False)
        assert (kept.train.precision, kept.model.channels_last) == ("bf16", False)
        check_resumable(kept, folder)


def test_jobs_on_gpus_and_cpus_share_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0, "NVIDIA H200", 2**37, "GPU-0")
    monkeypatch.setattr(hardware, "cuda", lambda: Driver((device,)))
    swept = ("-m", "parallel=single", *(word for word in tiny() if word != "print_config=false"))
    for accelerators, precision in (("cuda", "auto"), ("cpu,cuda", "fp32")):
        points: Any = expand(parse(*swept, f"parallel.accelerator={accelerators}"))[1]
        assert {point.config.train.precision for point in points} == {precision}
        channels_last = False if precision == "fp32" else "auto"
        assert {point.config.model.channels_last for point in points} == {channels_last}
