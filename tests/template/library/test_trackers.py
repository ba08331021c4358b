"""Trackers and files have all that a run recorded, and a failing tracker changes no run."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.schema import Config, ResolvedConfig
from tests.template.runs import resolved, train_run
from timm_parallel.checked_configs import evaluation_config
from timm_parallel.config.compose import load_config, save_config
from timm_parallel.config.validate import check_values
from timm_parallel.keys import TrackerConfig
from timm_parallel.machine import signals
from timm_parallel.machine.signals import Stopped
from timm_parallel.record import recorder
from timm_parallel.record.confusion import draw_confusion
from timm_parallel.run.run import Training
from timm_parallel.testing.commands import Finished, Refuse, Train
from timm_parallel.testing.configs import read_lines
from timm_parallel.trackers import tracker as trackers
from timm_parallel.trackers.mlflow import Mlflow
from timm_parallel.trackers.tensorboard import TensorBoard
from timm_parallel.trackers.tracker import Channel, Tracker

SHORT = (
    *("parallel=single", "parallel.accelerator=cpu"),
    *("train.log_every=1", "train.epochs=1", "train.max_steps=4"),
    *("data.limit_train=64", "data.batch_size=16", "print_config=false"),
)
ALL = "tracker=[tensorboard,wandb,mlflow]"
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_failure_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `exit_handlers_may_block` after each test. A failed tracker sets this flag. The
    process would then exit without exit handlers, which must not happen to pytest.
    """
    monkeypatch.setattr(signals, "exit_handlers_may_block", False)


class Kept(Tracker):
    """Tracker that records all calls in a list of the class."""

    calls: list[tuple[Any, ...]] = []

    def start(self) -> None:
        Kept.calls = [("start", self.resume_step)]

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        self.calls.append(("numbers", step, values))

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        self.calls.append(("image", name, pixels.shape, str(pixels.dtype)))

    def end(self, status: str, summary: dict[str, float]) -> None:
        self.calls.append(("end", status, summary))


class Unbuildable(Tracker):
    def __init__(self, *arguments: Any) -> None:
        raise ImportError("the accident of this test")


class Unstartable(Tracker):
    def start(self) -> None:
        raise SystemExit("the accident of this test")


class Failing(Tracker):
    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        raise ConnectionError("no answer from https://me:pass1234@example.org")


class FailingAtEnd(Tracker):
    def end(self, status: str, summary: dict[str, float]) -> None:
        raise ConnectionError("the accident of this test")


class Hanging(Tracker):
    released = threading.Event()

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        self.released.wait(60)


@pytest.fixture
def hanging() -> Iterator[None]:
    yield
    Hanging.released.set()


def config_with(**classes: type[Tracker]) -> ResolvedConfig:
    config = resolved(*SHORT)
    config.tracker.use = {name: f"{cls.__module__}.{cls.__name__}" for name, cls in classes.items()}
    return config


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == trackers.__name__]


def test_tracker_receives_start_all_logged_metrics_images_and_final_status(tmp_path: Path) -> None:
    train_run(config_with(kept=Kept), tmp_path)
    numbers = [
        (step, values)
        for kind, step, values in (call for call in Kept.calls if call[0] == "numbers")
    ]
    lines = read_lines(tmp_path / "metrics.jsonl")
    others = ("step", "epoch", "time")
    assert numbers == [
        (line["step"], {k: v for k, v in line.items() if k not in others}) for line in lines
    ]
    images = [call[1:] for call in Kept.calls if call[0] == "image"]
    assert [name for name, _, _ in images] == ["train/images", "val/confusion", "test/confusion"]
    assert {(shape[2], kind) for _, shape, kind in images} == {(3, "uint8")}
    assert Kept.calls[0] == ("start", 0)
    assert Kept.calls[-1][:2] == ("end", "done") and Kept.calls[-1][2]["images_per_sec"] > 0


def test_pictures_may_be_arrays_pil_images_and_matplotlib_figures() -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    figure = Figure(figsize=(2, 1), dpi=10)
    for image, shape in ((pixels, (4, 6)), (Image.new("L", (6, 4), 7), (4, 6)), (figure, (10, 20))):
        drawn = recorder.as_pixels(image)
        assert (drawn.dtype, drawn.shape) == (np.uint8, (*shape, 3))
    assert recorder.grid_of(torch.zeros(2, 5, 64, 64), torch.zeros(1), torch.ones(1)).shape[2] == 3


def test_image_that_cannot_be_drawn_causes_a_warning_and_trackers_still_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("the accident of this test")

    made = recorder.Recorder(config_with(kept=Kept), tmp_path, True, 0)
    result: Any = SimpleNamespace(steps=4, status="done", throughput={}, seconds={})
    made.pictures(4, "val", fail)
    made.pictures(4, "val/figure", lambda: {"": np.zeros((2, 2))})
    made.end(result)
    made.close()
    assert [call[0] for call in Kept.calls] == ["start", "end"]
    lines = [record.getMessage() for record in caplog.records if record.name == recorder.__name__]
    assert [line.split()[0] for line in lines] == ["val", "val/figure"]
    assert "the accident of this test" in lines[0]


@given(
    st.lists(
        st.text(max_size=30) | st.sampled_from(["red\nrose", "\x1b[31m", "\r\n", "\udce4", ""]),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_confusion_matrix_is_drawn_for_any_class_names(names: list[str]) -> None:
    """A folder or a CSV file may name a class with line breaks, control characters or bytes that
    are not UTF-8.
    """
    pixels = draw_confusion(np.eye(len(names), dtype=np.int64), names)
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3


def test_tracker_receives_status_failed_or_interrupted_when_the_run_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, status in (
        (RuntimeError("the accident"), "failed"),
        (Stopped(15), "interrupted"),
    ):

        def end_epoch(self: Training, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(Training, "_end_epoch", end_epoch)
        with pytest.raises(type(error)):
            train_run(config_with(kept=Kept), tmp_path)
        assert Kept.calls[-1] == ("end", status, {})


@pytest.mark.parametrize("kind", [Unbuildable, Unstartable, Failing, FailingAtEnd])
def test_run_continues_without_a_failing_tracker_and_logs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Tracker]
) -> None:
    train_run(config_with(first=kind, kept=Kept), tmp_path)
    assert (tmp_path / "result.json").exists() and Kept.calls[-1][:2] == ("end", "done")
    (line,) = warnings(caplog)
    assert line.startswith("tracker first: ") and "pass1234" not in line and "\n" not in line


@pytest.mark.slow(seconds=2)
def test_run_waits_a_limited_time_for_a_hanging_tracker_and_ends_the_other_trackers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hanging: None
) -> None:
    monkeypatch.setattr("timm_parallel.record.recorder.END_SECONDS", 0.8)
    Hanging.released.clear()
    waits: list[float] = []
    join = threading.Thread.join

    def recorded(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "tracker first" and timeout is not None:
            waits.append(timeout)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", recorded)
    train_run(config_with(first=Hanging, kept=Kept), tmp_path)
    # The run must wait only once for the tracker, although the run closes its files a second time.
    assert len(waits) == 1 and waits[0] <= 0.8
    assert warnings(caplog) == ["tracker first: did not end in time; the run continues without it"]
    assert signals.exit_handlers_may_block and Kept.calls[-1][:2] == ("end", "done")
    assert trackers.END_SECONDS <= 10


def test_tracker_is_dropped_with_one_warning_when_its_call_queue_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hanging: None
) -> None:
    monkeypatch.setattr(trackers, "LONGEST_QUEUE", 5)
    Hanging.released.clear()
    channel = Channel("first", f"{__name__}.Hanging", ResolvedConfig(), tmp_path, 0)
    for step in range(50):
        channel.put("numbers", step, 0.0, 0.0, {"train/loss": 1.0})
    assert len(channel._calls) <= 5
    assert warnings(caplog) == [
        "tracker first: is too slow: 5 calls are waiting; the run continues without it"
    ]


def test_tracker_keeps_its_run_id_in_the_run_folder_and_names_a_sweep_after_task_and_folder(
    tmp_path: Path,
) -> None:
    sweep = tmp_path / "2026-01-01" / "12-00-00"
    folder = sweep / "0"
    folder.mkdir(parents=True)
    job = Tracker(ResolvedConfig(task_name="flowers"), folder, 0)
    assert [job.run_id(partial(str, name)) for name in ("a1", "b2")] == ["a1", "a1"]
    assert (folder / "trackers" / "tracker.txt").read_text() == "a1"
    assert job.sweep is None
    (sweep / "jobs.json").write_text("{}")
    assert job.sweep == "flowers 2026-01-01 12-00-00"
    view = TensorBoard(ResolvedConfig(), tmp_path / "my runs", 0).view
    assert view == f"tensorboard --logdir '{tmp_path}/my runs'"


def set_installed(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """Make wandb and mlflow look installed or missing. A missing package gets a spec without
    origin, as Python returns for a plain folder with the name wandb.
    """
    actual = importlib.util.find_spec

    def find_spec(name: str) -> object:
        if name not in ("wandb", "mlflow"):
            return actual(name)
        return SimpleNamespace(origin="file" if name in installed else None)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["tensorboard"]),
        (("tracker=none",), []),
        (("tracker=wandb",), ["wandb"]),
        (("tracker=[tensorboard,mlflow]",), ["tensorboard", "mlflow"]),
    ],
)
def test_tracker_override_selects_the_trackers_in_use(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: list[str]
) -> None:
    set_installed(monkeypatch, "wandb", "mlflow")
    assert list(resolved(*overrides).tracker.classes()) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tracker=wnadb", "tracker=wnadb: "),
        ("tracker.entity=lab", "tracker.entity=lab: "),
        ("tracker.mode=offline", "tracker.mode=offline: "),
        ("tracker.uri=http://localhost:5000", "tracker.uri=http://localhost:5000: "),
        ("tracker.uri=http://me:pass1234@localhost:5000", "tracker.uri: "),
        ("tracker=[tensorboard,wandb]", "tracker=wandb: .*-r requirements-trackers.txt"),
        ("tracker=[tensorboard,mlflow]", "tracker=mlflow: .*-r requirements-trackers.txt"),
    ],
)
def test_tracker_option_is_refused_when_it_is_unused_or_its_package_is_not_installed(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    set_installed(monkeypatch)
    line = refuse(override)
    assert re.match(f"train.py: {message}", line) and "pass1234" not in line


def test_tracker_use_is_refused_when_the_named_class_does_not_exist() -> None:
    config = Config()
    config.tracker.use = {"csv": "src.train.no_tracker.NoTracker"}
    with pytest.raises(
        ValueError, match=r"tracker\.use\.csv=src\.train\.no_tracker\.NoTracker: no such class"
    ):
        check_values(config)


def test_evaluation_of_a_run_that_used_mlflow_uses_the_default_tracker_instead(
    tmp_path: Path,
) -> None:
    config = resolved(*SHORT)
    config.tracker.use = {"mlflow": True}
    save_config(config, tmp_path)
    assert evaluation_config(tmp_path, []).tracker == TrackerConfig()


class RecordingMlflow:
    """Client of MLflow that keeps the metrics of each request."""

    def __init__(self, tracking_uri: str) -> None:
        self.requests: list[list[tuple[str, float, int, int]]] = []

    def create_experiment(self, name: str, artifact_location: str) -> str:
        return name

    def create_run(self, experiment: str, **given: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="1"))

    def log_batch(self, run: str, params: Any = (), metrics: Any = ()) -> None:
        if metrics:
            self.requests.append(list(metrics))

    def update_run(self, run: str, status: str) -> None: ...

    def set_terminated(self, run: str, status: str) -> None: ...


def test_mlflow_gets_all_metrics_in_at_most_one_request_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entities = SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given)
    stub = SimpleNamespace(entities=entities, MlflowClient=RecordingMlflow)
    monkeypatch.setitem(sys.modules, "mlflow", cast(ModuleType, stub))
    tracker = Mlflow(resolved(*SHORT), tmp_path, 0)
    tracker.start()
    for step in range(3000):
        tracker.numbers(step, 0.0, 100 + step / 1000, {"train/loss": float(step)})
    tracker.end("done", {})
    client = cast(RecordingMlflow, tracker._client)
    assert [len(request) for request in client.requests] == [1, 1000, 1000, 999]
    assert [metric[3] for request in client.requests for metric in request] == list(range(3000))


def wandb_records(folder: Path) -> list[Any]:
    """Read the records in all .wandb files, which have the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            # Skip the last bytes of a block of 32 KiB if they are too few for the header of a
            # record.
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                records.append(Record.FromString(whole))
                whole = b""
    return records


def curve_of_wandb(folder: Path, name: str) -> list[tuple[int, float]]:
    curve = []
    for record in wandb_records(folder):
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if name in items:
            curve.append((int(items["step"]), float(items[name])))
    return curve


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
def test_wandb_and_mlflow_hold_the_whole_run_and_no_api_key_after_a_resume(
    train: Train, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": SECRET,
        "MLFLOW_TRACKING_PASSWORD": f"{SECRET}1",
    }
    output = f"paths.output_dir={tmp_path / 'out'}"
    first = train(*SHORT[:-3], ALL, output, "tracker.project=flowers", environment=environment)
    assert first.returncode == 0, first.output
    second = train(
        f"resume={first.folder}", "train.max_steps=6", environment=environment, defaults=False
    )
    assert second.returncode == 0, second.output
    lines = [(line["step"], line["train/loss"]) for line in first.metrics if "train/loss" in line]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 5, 6]
    # Check the curve and the run that wandb has recorded.
    assert curve_of_wandb(first.folder, "train/loss") == lines
    runs = [record.run for record in wandb_records(first.folder) if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1 and {run.project for run in runs} == {"flowers"}
    # On a busy machine, a tracker that does not end in time prints no command for its curves.
    # Therefore the command may be in the output of either attempt.
    assert (
        "wandb sync" in first.stdout + second.stdout and "mlflow ui" in first.stdout + second.stdout
    )
    # Check the curve, the settings and the images that MLflow has recorded.
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'out' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("flowers").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == str(load_config(first.folder).optim.lr)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == lines
    pictures = {
        Path(item.path).name.split("+")[0]
        for item in client.list_artifacts(run.info.run_id, "images")
    }
    assert pictures == {"train~images", "val~confusion", "test~confusion"}
    # No file of wandb or MLflow may contain the API key.
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


CURVES = {
    *("train/loss", "train/grad_norm", "lr", "val/loss", "val/acc", "val/acc5", "val/acc_best"),
    *("test/loss", "test/acc"),
    *("train/images_per_sec", "train/data_wait"),
}


@pytest.mark.processes
def test_tensorboard_has_all_that_a_run_recorded_and_metrics_jsonl_and_result_json_its_values(
    finished_run: Finished,
) -> None:
    sizes = {"scalars": 0, "images": 0, "tensors": 0}
    folder = finished_run.folder / "tensorboard"
    events = EventAccumulator(str(folder), sizes).Reload()
    tags = events.Tags()
    assert {*tags["scalars"]} >= CURVES
    assert any(tag.startswith("memory/") for tag in tags["scalars"])
    assert any("train" in tag for tag in tags["images"]), tags["images"]
    assert any("confusion" in tag for tag in tags["images"]), tags["images"]
    assert any("config" in tag for tag in tags["tensors"]), tags["tensors"]
    assert "hparams" in {data.plugin_data.plugin_name for data in events.summary_metadata.values()}
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1
    for tag in ("train/loss", "val/acc"):
        written = [(line["step"], line[tag]) for line in finished_run.metrics if tag in line]
        drawn = [(event.step, event.value) for event in events.Scalars(tag)]
        assert drawn == [(step, pytest.approx(value, rel=1e-6)) for step, value in written]
        assert len(written) >= 2
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
