"""evaluate.py worst=N writes a page of the images with the highest loss, on any number of ranks."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import evaluate as entry
from src.commands.evaluate import evaluate_config, worst_images
from src.commands.load import load_trained
from src.schema import ResolvedTrain
from src.tasks.images import find_task
from tests.template.runs import own, resolved, run_warm
from timm_parallel.checked_configs import compose_evaluation
from timm_parallel.data.build import build_dataset
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.task import Evaluation
from timm_parallel.testing.commands import Finished
from timm_parallel.testing.ranks import in_ranks

SEGMENTATION = (
    *("experiment=segmentation", "model=segmenter", "model.kwargs={backbone: resnet10t}"),
    *("data=shapes", "train=segmentation", "data.batch_size=8", "data.limit_train=16"),
    *("train.max_steps=1", "parallel=single", "parallel.accelerator=cpu"),
)


def pictures_of(page: Path) -> list[Image.Image]:
    codes = re.findall(r"base64,([^\"]+)", page.read_text(encoding="utf-8"))
    return [Image.open(io.BytesIO(base64.b64decode(code))) for code in codes]


def write_worst(ranks: Ranks, store: Any, run: str, page: str) -> None:
    words = [] if store is None else ["parallel=ddp", "parallel.devices=2"]
    config = own(compose_evaluation(Path(run), words, None if store is None else ranks))
    options: Any = {"worst": 7, "page": Path(page)}
    strategy = build_strategy(config, ranks, store)
    assert list(evaluate_config(config, strategy, Path(run), "val", "last", **options))


@pytest.mark.slow(seconds=3)
def test_page_has_the_images_with_the_highest_loss_on_one_and_two_ranks(
    finished_run: Finished, tmp_path: Path
) -> None:
    page = tmp_path / "single.html"
    write_worst(Ranks(), None, str(finished_run.folder), str(page))
    text = page.read_text(encoding="utf-8")
    # The losses of a loop of its own, from the highest.
    trained = load_trained(finished_run.folder, "last", "model", torch.device("cpu"))
    val = build_dataset(trained.config.data).val
    mean, std = (
        torch.tensor(of)[:, None, None]
        for of in (trained.preprocessing.mean, trained.preprocessing.std)
    )
    losses: list[Tensor] = []
    with torch.inference_mode():
        for index in range(len(val)):
            image, label = val[index]
            scores = trained.networks["model"](((image / 255 - mean) / std)[None])
            losses.append(torch.nn.functional.cross_entropy(scores, torch.tensor([label])))
    order = torch.stack(losses).argsort(descending=True)[:7].tolist()
    assert [int(index) for index in re.findall(r"path: (\d+)", text)] == order
    shown = [float(loss) for loss in re.findall(r"loss: ([\d.]+)", text)]
    assert shown == pytest.approx([float(losses[index]) for index in order], rel=1e-3)
    labels = re.findall(r"label: (\w+)", text)
    assert labels == [trained.task.names[int(val[index][1])] for index in order]
    assert len(re.findall("class_1: ", text)) == len(re.findall("probability_1: ", text)) == 7
    assert len(pictures_of(page)) == 7
    other = tmp_path / "ddp.html"
    in_ranks(write_worst, 2, str(finished_run.folder), str(other))
    assert re.findall(r"path: \d+", other.read_text()) == re.findall(r"path: \d+", text)


@pytest.mark.slow(seconds=3)
def test_page_of_a_segmentation_shows_image_mask_and_prediction_side_by_side(
    tmp_path: Path,
) -> None:
    run = run_warm(tmp_path / "run", *SEGMENTATION)
    assert entry.main([f"run={run}", "split=val", "worst=2"]) == 0
    page = run / "worst.html"
    pictures = pictures_of(page)
    assert [picture.size for picture in pictures] == [(192, 64)] * 2
    photo, mask, predicted = (pictures[0].crop((64 * k, 0, 64 * k + 64, 64)) for k in range(3))
    assert len({photo.tobytes(), mask.tobytes(), predicted.tobytes()}) == 3
    assert "miou: " in page.read_text()


def test_images_of_a_regression_are_described_by_their_numbers_and_nan_comes_first() -> None:
    config = resolved()
    config.train = ResolvedTrain(task="regression", loss="mse")
    task = find_task("regression")(config, ["age"])
    # Image 1 could not be read.
    indices, predicted = torch.tensor([0, 2, 3]), torch.tensor([[1.0], [5.0], [math.nan]])
    truth = torch.tensor([[1.0], [1.0], [2.5]])
    losses = torch.tensor([0.0, 16.0, math.nan])
    evaluation = Evaluation(3, {}, {}, (indices, predicted, truth), (losses,))
    split = [(torch.full((1, 4, 6), shade, dtype=torch.uint8), None) for shade in range(4)]
    (first, of_first), (second, of_second) = worst_images(evaluation, split, task, 2)
    assert of_first == ["loss: nan", "path: 3", "age: 2.500", "age_predicted: nan"]
    assert of_second == ["loss: 16", "path: 2", "age: 1.000", "age_predicted: 5.000"]
    assert (first.size, first.getpixel((0, 0)), second.getpixel((0, 0))) == (
        (6, 4),
        (3, 3, 3),
        (2, 2, 2),
    )


def test_page_without_a_number_of_images_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main([f"run={tmp_path}", "page=worst.html"]) == 2
    assert "page=worst.html" in capsys.readouterr().err
