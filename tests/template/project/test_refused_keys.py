"""Keys of models, data, augmentation, losses and optimizers that are invalid or have no effect are
refused by name.
"""

from __future__ import annotations

import re

import pytest

from tests.template.runs import parts_of, resolved
from timm_parallel.data.build import check_data

pytestmark = pytest.mark.usefixtures("examples")
MULTILABEL = "train=multilabel data=csv data.root=x"
REGRESSION = "train=regression data=csv data.root=x"
SEGMENTATION = "experiment=segmentation"
MASKS = f"{SEGMENTATION} model=segmenter +data.kwargs.num_samples=8"
CUTMIX = "data.augment.cutmix_minmax=[0.2,0.8]"
# Command lines that train.py refuses before it starts a run. The error names the last key.
BEFORE_A_RUN = [
    # Options with timm's names.
    "parallel=ddp parallel.devices=2 parallel.dist_bn=reduce parallel.broadcast_buffers=true",
    "optim.opt=adahessian",
    "optim.sched=plateau",
    "optim.sched=step",
    "optim.sched=multistep optim.decay_milestones=[1,9]",
    "optim.sched=step optim.decay_epochs=5",
    "optim.sched=wsd optim.cooldown_epochs=0.5 optim.decay_epochs=1.5",
    "optim.decay_epochs=1",
    "optim.sched=step optim.decay_epochs=1 +optim.sched_kwargs.cycle_limit=2",
    "+optim.sched_kwargs.num_epochs=9",
    "+optim.sched_kwargs.min_lr=0.1",
    "optim.sched=constant optim.warmup_prefix=false",
    "optim.clip_mode=agc",
    "+optim.of.lr=0.1",
    "checkpoint.metric=val/acc_ema",
    "data=timm data.root=. data.name=torch/cifar11",
    "data=timm data.root=. data.name=tfds/mnist",
    # Augmentation.
    "data.augment.remode=const",
    "data.augment.recount=2",
    "data.augment.color_jitter_prob=0.5",
    "data.augment.aa=v0 data.augment.color_jitter=0.4",
    "data.augment.mixup_prob=0.5",
    "data.augment.mixup_mode=elem",
    "data.augment.mixup=1 data.augment.mixup_switch_prob=0.2",
    "data.augment.mixup_off_epoch=1",
    "data.augment.mixup=1 data.augment.mixup_off_epoch=8",
    "data.augment.cutmix_minmax=[0.2,1.2]",
    "data.augment.cutmix_minmax=[0.5,0.5]",
    f"{CUTMIX} data.augment.cutmix=1",
    f"{CUTMIX} data.batch_size=15",
    "data.augment.train_crop_mode=rkrr data.augment.crop_padding=2",
    "data.augment.ratio=[0.9,1.1]",
    # Weights of a model, and images.
    "model.pretrained=true model.weights=README.md",
    "model.name=src.models.cifar_resnet.CifarResNet18 model.pretrained=true",
    "model.weights=nowhere.pt",
    "model.weights_strict=false",
    "model.freeze=0",
    'model.freeze="("',
    "data.eval_image_size=48",
    "data=csv data.root=null",
    "data=csv data.root=src",
    "data=segmentation train=segmentation data.root=null",
    # Losses, weights and sampling.
    "train.loss=asl",
    "train.bce_target_thresh=0.2",
    "checkpoint.metric=val/map",
    "train.class_weights=most",
    "train.class_weights=[1,-1]",
    "train.class_weights=auto data.balance=1",
    "data.augment.aug_repeats=2 data.balance=1",
    # Tasks.
    "train=multilabel train.task=multilabel",
    f"{MULTILABEL} train.loss=ce",
    f"{MULTILABEL} checkpoint.metric=val/acc",
    f"{MULTILABEL} data.augment.mixup=0.2",
    f"{MULTILABEL} data.balance=1",
    f"{REGRESSION} data=digits data.root=null train.task=regression",
    f"{REGRESSION} data.augment.mixup=0.2",
    f"{REGRESSION} train.smoothing=0.1",
    f"{REGRESSION} train.loss=ce",
    f"{REGRESSION} checkpoint.metric=val/acc",
    f"{SEGMENTATION} data=digits train.task=segmentation",
    f"{SEGMENTATION} data.augment.mixup=0.2",
    f"{SEGMENTATION} data.augment.aa=rand-m9",
    f"{SEGMENTATION} data.augment.reprob=0.2",
    f"{SEGMENTATION} data.balance=1",
    f"{SEGMENTATION} +train.task_kwargs.stride=0",
    f"{SEGMENTATION} +train.task_kwargs.evaluation=full",
    f"{SEGMENTATION} +train.task_kwargs.strid=4",
    f"{SEGMENTATION} +train.task_kwargs.stride=four",
    # Devices.
    "parallel.devices=1 parallel.accelerator=mps",
    "parallel=single parallel.device_ids=[0]",
    "parallel=ddp parallel.devices=2 +parallel.options={period:2}",
    # Own code, and misspelled names of it.
    "train.task=src.tasks.macro_f1.MacroF1 checkpoint.metric=val/f2",
    "train.loss=src.train.poly.PolyLoss train.class_weights=auto",
    "parallel.strategy=src.train.local_sgd.LocalSgt",
    "optim.opt=src.train.optim.Signs",
    "optim.sched=src.train.optim.Plateau",
    "optim.sched=src.train.nowhere.Plateau",
    "train.loop=src.train.run.loop",
    "train.loop=src.train.nowhere.loop",
    "train.loop=loop",
    "train.loop=src",
]
# Those that only the model, the task, the optimizer or the schedule of a run can refuse.
BY_THE_RUN = [
    "+optim.kwargs.nesterovv=true",
    "+optim.sched_kwargs.cycle=2",
    "data.image_size=4",
    "data=synthetic data.image_size=8 data.augment.gaussian_blur_prob=0.5",
    "+model.kwargs.depht=3",
    "model.num_classes=3",
    "model.in_chans=3",
    "data.std=[0.5,0.5,0.5] data.mean=[0.5,0.5,0.5]",
    "model=resnet18 model.name=vgg11 model.grad_checkpointing=true",
    "data=shapes train=segmentation data.batch_size=8 model.name=vit_tiny_patch16_224",
    f"{MASKS} data.crop_mode=border",
    f"{MASKS} data.crop_pct=0.9",
    f"{MASKS} data.augment.train_crop_mode=rkrc",
    f"{MASKS} data.batch_size=8 train.class_weights=[1,1]",
    f"{MASKS} +train.task_kwargs.evaluation=slide data.image_size=null",
    f"{MASKS} +train.task_kwargs.stride=4",
    f"{MASKS} data.image_size=[8,10] +train.task_kwargs.evaluation=slide "
    "+train.task_kwargs.stride=9",
]


def assert_names_key(refusal: pytest.ExceptionInfo[ValueError], line: str) -> None:
    """Check that the error is one line that starts with the last key, or the kwargs with it."""
    key = line.split()[-1].lstrip("+").partition("=")[0]
    message = str(refusal.value)
    expected = {key, key.rpartition(".")[0] if "kwargs" in key else key}
    assert re.split("[=:]", message)[0] in expected, message
    assert "\n" not in message


@pytest.mark.parametrize("line", BEFORE_A_RUN)
def test_key_that_is_invalid_or_without_effect_is_refused_before_a_run(line: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        check_data(resolved(*line.split()))
    assert_names_key(refusal, line)


@pytest.mark.parametrize("line", BY_THE_RUN)
def test_key_that_model_task_optimizer_or_schedule_reject_is_refused(line: str) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", *line.split())
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        parts_of(config)
    assert_names_key(refusal, line)
