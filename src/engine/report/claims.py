"""What articles claim about DataParallel (DP) and DistributedDataParallel (DDP), weighed with one machine's figures.

Here: the list of claims, those that runs bear out by what they counted themselves, so that one run is enough, and
corrections. Claims that are timed or measured, so that their figures have a spread, are in claims_measured.py.
"""

from __future__ import annotations

from dataclasses import replace

from src.engine.report import claims_measured as measured
from src.engine.report.evidence import Evidence, Ruling, missing, weigh
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED
from src.engine.report.wording import listing

# Words in the reasons of runs that ended, or were refused, because of what a claim is about.
DRIFTED = "different parameters"
BATCH_TOO_SMALL = "fewer images than"
ONE_NODE_ONLY = "cannot span the nodes"


def replicas_stay_equal(e: Evidence) -> Ruling:
    """A run whose ranks drift apart fails, so failed runs are evidence too."""
    drifted = [r for r in e.runs if r.strategy == "ddp" and r.status == "failed" and DRIFTED in r.reason]
    what = "equal hashes of all parameters over the ranks, at the start and at the end"
    return e.in_every_run("ddp", what, lambda run: run.result.get("proof.hashes_equal"), failed=drifted)


def shares_are_disjoint(e: Evidence) -> Ruling:
    def counts(run: RunRecord) -> list[float]:
        found = [run.number(f"proof.indices_{what}") for what in ("seen", "distinct", "expected")]
        return [count for count in found if count is not None]

    return e.in_every_run(
        "ddp",
        "every index of the epoch read by exactly one rank",
        lambda run: len(set(counts(run))) == 1 if len(counts(run)) == 3 else None,
        lambda run: "{:,.0f} read, {:,.0f} distinct, {:,.0f} expected".format(*counts(run)),
    )


def dp_needs_a_batch(e: Evidence) -> Ruling:
    ran, refused = e.finished("dp"), e.refused(BATCH_TOO_SMALL)
    too_small = [run for run in ran if 0 < (run.integer("batch_size") or 0) < run.devices]
    if too_small:
        return Ruling(FAILS, f"{len(too_small)} runs with fewer images than devices", "they ran", tuple(too_small))
    recorded = [run for run in ran if run.chunk_sizes]
    unequal = [run for run in recorded if len(set(run.chunk_sizes)) > 1]
    shown = [f"chunks {run.chunk_sizes} on {run.devices} devices" for run in unequal or recorded]
    shown += [f"refused: {run.reason}" for run in refused]
    if not shown:
        return missing("dp on 2 or more devices with its chunk sizes", "parallel=dp parallel.devices=2")
    if unequal or refused:
        return Ruling(HOLDS, listing(shown), "", (*unequal, *refused))
    remedy = "every batch here divides evenly; add data.batch_size=7 parallel.devices=2"
    return Ruling(UNMEASURED, listing(shown), remedy, tuple(recorded))


def dp_starts_sooner(e: Evidence) -> Ruling:
    rule = "here both are one key, parallel=…, so what is weighed is the time from the command to the first step"
    return weigh(e.stated("first_step_seconds", "ddp", "dp"), "the time of dp to the first step", rule)


def first_rank_writes(e: Evidence) -> Ruling:
    def files(run: RunRecord) -> dict[str, int]:
        found = [(key.removeprefix("proof.files_per_rank."), value) for key, value in run.result.items()]
        return {rank: n for rank, n in found if rank.isdigit() and isinstance(n, int)}

    return e.in_every_run(
        "ddp",
        "ranks other than 0 wrote no file but their own log",
        lambda run: all(n <= 1 for rank, n in files(run).items() if rank != "0") if files(run) else None,
        lambda run: "files of " + ", ".join(f"rank {rank}: {n}" for rank, n in list(files(run).items())[:8]),
    )


def backend_follows_device(e: Evidence) -> Ruling:
    return e.in_every_run(
        "ddp",
        "NCCL on CUDA, gloo elsewhere",
        lambda run: run.result["backend"] and run.result["backend"] == {"cuda": "nccl"}.get(run.accelerator, "gloo"),
        lambda run: f"{run.result['backend']} on {run.accelerator}",
    )


def ddp_spans_machines(e: Evidence) -> Ruling:
    ddp, dp = ([run for run in e.finished(strategy) if run.nodes > 1] for strategy in ("ddp", "dp"))
    refused = e.refused(ONE_NODE_ONLY)
    shown = [f"{run.strategy} on {run.nodes} nodes, world size {run.devices}" for run in ddp + dp]
    shown += [f"dp refused: {run.reason}" for run in refused]
    runs = (*ddp, *dp, *refused)
    if dp:
        return Ruling(FAILS, listing(shown), "dp ran on several nodes", runs)
    if ddp:
        return Ruling(HOLDS, listing(shown), "" if refused else "dp on several nodes was not tried", runs)
    alone = "no run of ddp on several nodes here; add cluster.nodes=2, or start torchrun with --nnodes=2"
    return Ruling(UNMEASURED, listing(shown), alone, runs)


def each_has_its_stage(e: Evidence) -> Ruling:
    faster = Ruling(UNMEASURED) if e.on_cpu else measured.ddp_is_faster(e)
    parts = {11: dp_starts_sooner(e), 1: faster, 14: ddp_spans_machines(e)}
    words = [ruling.verdict for ruling in parts.values()]
    verdict = next(word for word in (FAILS, UNMEASURED, UNDECIDED, HOLDS) if word in words)
    basis = ", ".join(f"claim {number} ({ruling.verdict})" for number, ruling in parts.items())
    runs = tuple(dict.fromkeys(run for ruling in parts.values() for run in ruling.runs))
    return Ruling(verdict, reason=f"rests on {basis}", runs=runs)


def one_optimizer_per_process(e: Evidence) -> Ruling:
    found = {s: [r for r in e.finished(s) if r.result.get("proof.optimizers") is not None] for s in ("dp", "ddp")}
    if not all(found.values()):
        return missing("dp and ddp on 2 or more devices with their optimizers counted")

    def counted(run: RunRecord) -> str:
        state = ", ".join(f"{n / 2**20:.1f} MiB" for n in run.entries(int, "proof.optimizer_state_bytes")[:8])
        return f"{run.strategy} × {run.devices} has {run.result['proof.optimizers']}" + (state and f" (state: {state})")

    runs = found["dp"] + found["ddp"]
    fits = all(run.result["proof.optimizers"] == (1 if run.strategy == "dp" else run.devices) for run in runs)
    return Ruling(HOLDS if fits else FAILS, listing(map(counted, runs)), "", tuple(runs))


_THREADS = "dp on CPU is threads of one process: its speed, CPU use and memory say nothing about GPUs"
_ONE_MEMORY = "devices on CPU share one memory: what each holds, and what moves between them, cannot be told"
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
    (8, "Replicas under DDP start equal and stay equal", replicas_stay_equal),
    (9, "DistributedSampler gives the ranks disjoint shares that cover the epoch", shares_are_disjoint),
    (10, "DP needs a batch of at least as many images as devices; its chunks can be unequal", dp_needs_a_batch),
    (11, "DP is one line and starts easily; DDP needs set-up", dp_starts_sooner),
    (12, "Only rank 0 should log; DDP's output is otherwise scattered", first_rank_writes),
    (13, "Backends: NCCL for CUDA, gloo for CPU", backend_follows_device),
    (14, "DDP goes on to several machines; DP cannot", ddp_spans_machines),
    (15, "A stage for each: DP to try an idea, DDP to train, several nodes to produce", each_has_its_stage),
    (16, "Devices idle under DP", measured.devices_idle_under_dp),
    (17, "One optimizer under DP, one per process under DDP", one_optimizer_per_process),
)


def weigh_claims(e: Evidence) -> list[Ruling]:
    hidden = {n: Ruling(UNMEASURED, reason=why) for n, why in _NOT_ON_CPU.items() if e.on_cpu}
    return [replace(hidden.get(n) or rule(e), number=n, text=text) for n, text, rule in _CLAIMS]


def correct(e: Evidence) -> list[Ruling]:
    """On statements found in articles that are wrong whatever a machine measures. No figure where these runs show none."""
    ddp, dp = e.finished("ddp"), e.finished("dp")
    equal = [run for run in ddp if run.result.get("proof.hashes_equal")]
    replicas = f"all parameters equal on all ranks in {len(equal)} of {len(ddp)} runs" if ddp else ""
    even = [run.imbalance for run in ddp if run.imbalance is not None and not e.on_cpu]
    centre = f"under ddp the largest peak memory is at most {max(even):.2f} of the devices' mean" if even else ""
    ranks = sorted({run.devices for run in ddp if run.nodes == 1})
    machines = f"runs of {', '.join(map(str, ranks))} ranks on one machine" if ranks else ""
    peaks = "" if e.on_cpu else measured.peaks(e, "dp")
    chunks = listing(f"{r.chunk_sizes} on {r.devices} devices" for r in dp if len(set(r.chunk_sizes)) > 1)
    gloo = {str(r.environment.get("platform") or "") for r in ddp if r.result.get("backend") == "gloo"}
    windows = listing(f"gloo ran here, on {name}" for name in sorted(gloo) if name.startswith("Windows"))
    counts = [(r, count) for r in dp + ddp if (count := r.integer("processes")) is not None]
    processes = listing(f"{r.strategy} × {r.devices}: {n} process{'es' * (n != 1)}" for r, n in counts)
    steps = [(r, r.config.get("train.accumulate") or 1) for r in e.runs if r.comparable]
    asked = listing(f"{r.strategy} × {r.devices} with train.accumulate={n}" for r, n in steps if n > 1)
    found = (
        ("DDP holds a subset of the model on each machine", "Every rank has all of it; only data are split", replicas),
        ("DDP shares one model between processes", "Each process has a replica of its own", replicas),
        ("Rank 0 averages the gradients and broadcasts them", "An all-reduce: all ranks send equal shares", centre),
        ("DataParallel is multi-process", "One process with one thread per device", processes),
        ("DP needs equal chunks", "They may differ; only none may be empty", chunks),
        ("Under DP only device 0 holds the model", "Every device holds a replica while a step runs", peaks),
        ("DP passes parameters through the CPU", "They are copied from device 0 to the others", ""),
        ("DP scatters the loss", "It gathers the outputs; gradients flow back through the replicas", ""),
        ("DDP must have several machines", "One machine is enough: its ranks are processes", machines),
        ("Windows has no DDP", "torch is built with gloo there; a run on Linux proves nothing", windows),
        ("NCCL serves Windows", "NCCL is for Linux; on Windows the backend is gloo", ""),
        ("DDP saves memory by accumulation", "train.accumulate does, in every strategy, if asked for", asked),
    )
    return [Ruling(FAILS, figure, truth, text=statement) for statement, truth, figure in found]
