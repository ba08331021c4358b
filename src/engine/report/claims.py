"""What articles claim about DataParallel (DP) and DistributedDataParallel (DDP), weighed with one machine's figures."""

from __future__ import annotations

from dataclasses import dataclass

from src.engine.report import claims_counted as counted
from src.engine.report import claims_measured as measured
from src.engine.report.evidence import Evidence, Ruling, gib
from src.engine.report.statistics import UNMEASURED
from src.engine.report.wording import listing

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
class Claim(Ruling):
    number: int = 0
    text: str = ""

    @property
    def said(self) -> str:
        return "; ".join(words for words in (self.figure, self.reason) if words not in ("—", "n/a", ""))


@dataclass(frozen=True)
class Correction:
    """A statement found in articles that is wrong whatever a machine measures."""

    statement: str
    truth: str
    figure: str  # a dash where these runs do not show it

    @property
    def text(self) -> str:
        return f"“{self.statement}”"

    @property
    def said(self) -> str:
        return self.truth + (f" Here: {self.figure}." if self.figure != "—" else "")


def weigh_claims(e: Evidence) -> list[Claim]:
    hidden = _NOT_ON_CPU if e.on_cpu else {}
    found = [
        Ruling(UNMEASURED, "n/a", hidden[number]) if number in hidden else weigh(e) for number, _, weigh in _CLAIMS
    ]
    return [Claim(**vars(f), number=number, text=text) for (number, text, _), f in zip(_CLAIMS, found, strict=True)]


def correct(e: Evidence) -> list[Correction]:
    ddp, dp = e.finished("ddp", 2), e.finished("dp", 2)
    equal = [run for run in ddp if run.proof("hashes_equal")]
    replicas = f"all parameters equal on all ranks in {len(equal)} of {len(ddp)} runs" if ddp else "—"
    even = [run.imbalance for run in ddp if run.imbalance is not None and not e.on_cpu]
    centre = f"largest over mean peak memory under ddp at most {max(even):.2f}" if even else "—"
    worlds = ", ".join(map(str, sorted({run.devices for run in ddp if run.nodes == 1})))
    machines = f"world sizes {worlds} on one machine" if worlds else "—"
    peaks = listing(f"{e.place(g, p)}: {gib(p)} GiB" for g, p in e.points("dp") if p.peak_bytes and not p.stand_in)
    chunks = listing(f"{r.chunk_sizes} on {r.devices} devices" for r in dp if len(set(r.chunk_sizes)) > 1)
    gloo = {str(r.environment.get("platform") or "") for r in ddp if r.result.get("backend") == "gloo"}
    windows = listing(f"gloo ran here, on {name}" for name in sorted(gloo) if name.startswith("Windows"))
    multi = listing(
        f"{r.strategy} × {r.devices}: {count} process{'es' * (count != 1)}"
        for r in dp + ddp
        if (count := r.integer("processes")) is not None
    )
    steps = [(r, r.config.get("train.accumulate") or 1) for r in e.runs if r.comparable]
    whose = listing(f"{r.strategy} × {r.devices} with train.accumulate={n}" for r, n in steps if n > 1)
    whole, averaged = (
        "Every rank has it all; only the data are divided.",
        "An all-reduce: every rank sends the same share.",
    )
    return [
        Correction("DDP holds a subset of the model on each machine", whole, replicas),
        Correction("DDP shares one model between processes", "Each process has a replica of its own.", replicas),
        Correction("Rank 0 averages the gradients and broadcasts them", averaged, centre),
        Correction("DataParallel is multi-process", "One process with one thread per device.", multi),
        Correction("DP needs equal chunks", "They may differ; only none may be empty.", chunks),
        Correction("Under DP only device 0 holds the model", "Every device holds a replica while a step runs.", peaks),
        Correction("DP passes parameters through the CPU", "They are copied from device 0 to the others.", "—"),
        Correction("DP scatters the loss", "It gathers the outputs; gradients flow back through the replicas.", "—"),
        Correction("DDP must have several machines", "One machine is enough: its ranks are processes.", machines),
        Correction("Windows has no DDP", "torch is built with gloo there; a run on Linux proves nothing.", windows),
        Correction("NCCL serves Windows", "NCCL is for Linux; on Windows the backend is gloo.", "—"),
        Correction(
            "DDP saves memory by accumulation", "train.accumulate does, in every strategy, if asked for.", whose
        ),
    ]
