"""What articles claim about DataParallel (DP) and DistributedDataParallel (DDP), weighed with one machine's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.engine.report import claims_counted as counted
from src.engine.report import claims_measured as measured
from src.engine.report.comparison import Group
from src.engine.report.evidence import Evidence, Finding
from src.engine.report.measured import Run
from src.engine.report.statistics import UNMEASURED

_THREADS = "dp on CPU is threads of one process: its speed, CPU use and memory per device say nothing about GPUs"
_ONE_MEMORY = "devices on CPU share one memory: what one holds and what moves between them cannot be told"
_NOT_ON_CPU = dict.fromkeys((1, 3, 5, 6), _THREADS) | dict.fromkeys((4, 7), _ONE_MEMORY)
_NOT_ON_CPU[16] = "utilisation comes from NVML, which knows NVIDIA devices only"
_CLAIMS = (
    (1, "DDP is faster than DP on the same devices, more so with more of them", measured.ddp_is_faster),
    (2, "DDP's speed-up is close to linear", measured.ddp_is_close_to_linear),
    (3, "DP loads device 0 most; the others hold little", measured.dp_fills_device_0),
    (4, "Under DDP every device holds a full replica; memory is even", measured.ddp_holds_full_replicas),
    (5, "DDP uses the CPU cores better; DP is one process under the interpreter lock", measured.ddp_uses_the_cores),
    (6, "The interpreter lock hurts DP most where a model is many small operations", measured.lock_hurts_small_layers),
    (7, "DDP moves less data than DP, and hides part of it behind the backward pass", measured.ddp_moves_less),
    (8, "Replicas under DDP start equal and stay equal", counted.replicas_stay_equal),
    (9, "DistributedSampler gives the ranks disjoint shares that cover the epoch", counted.shares_are_disjoint),
    (10, "DP needs a batch of at least as many images as devices; its chunks can be unequal", counted.dp_needs_a_batch),
    (11, "DP is one line and starts easily; DDP needs set-up", counted.dp_starts_sooner),
    (12, "Only rank 0 should log; DDP's output is otherwise scattered", counted.first_rank_writes),
    (13, "Backends: NCCL for CUDA, gloo for CPU", counted.backend_follows_device),
    (14, "DDP goes on to several machines; DP cannot", counted.ddp_spans_machines),
    (15, "A stage for each: DP to try an idea, DDP to train, several nodes to produce", counted.each_has_its_stage),
    (16, "Devices idle under DP", measured.devices_idle_under_dp),
    (17, "One optimizer under DP, one per process under DDP", counted.one_optimizer_per_process),
)


@dataclass(frozen=True)
class Claim:
    number: int
    text: str
    figure: str
    verdict: str
    reason: str
    runs: tuple[Run, ...] = ()  # those the figure comes from


def judge(groups: Sequence[Group], runs: Sequence[Run]) -> list[Claim]:
    """All claims, from the groups and runs of one hardware."""
    evidence, claims = Evidence(groups, runs), []
    for number, text, weigh in _CLAIMS:
        hidden = _NOT_ON_CPU.get(number) if evidence.on_cpu else None
        found = Finding(UNMEASURED, "n/a", hidden) if hidden else weigh(evidence)
        claims.append(Claim(number, text, found.figure, found.verdict, found.reason, found.runs))
    return claims
