"""Claims about how a strategy behaves: counted or recorded by the runs themselves, so one run is enough."""

from __future__ import annotations

from src.engine.report.claims_measured import ddp_is_faster
from src.engine.report.evidence import Evidence, Ruling, missing, weigh
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED
from src.engine.report.wording import listing

DRIFTED = "different parameters"  # what a run says of itself that ended because its ranks had drifted apart


def replicas_stay_equal(e: Evidence) -> Ruling:
    """A run whose ranks drift apart fails, so failed runs are evidence too."""
    drifted = [r for r in e.runs if r.strategy == "ddp" and r.status == "failed" and DRIFTED in r.reason]
    what = "equal hashes of all parameters over the ranks, at the start and at the end"
    return e.in_every_run("ddp", what, lambda run: run.proof("hashes_equal"), failed=drifted)


def shares_are_disjoint(e: Evidence) -> Ruling:
    def counts(run: RunRecord) -> list[int | None]:
        return [run.proof(f"indices_{what}") for what in ("seen", "distinct", "expected")]

    return e.in_every_run(
        "ddp",
        "every index of the epoch read by exactly one rank",
        lambda run: None if None in counts(run) else len(set(counts(run))) == 1,
        lambda run: "{} read, {} distinct, {} expected".format(*counts(run)),
    )


def dp_needs_a_batch(e: Evidence) -> Ruling:
    ran, refused = e.finished("dp", 2), e.refused("dp", "batch")
    too_small = [run for run in ran if 0 < (run.integer("batch_size") or 0) < run.devices]
    if too_small:
        return Ruling(FAILS, f"{len(too_small)} runs with fewer images than devices", "they ran", tuple(too_small))
    recorded = [run for run in ran if run.chunk_sizes]
    unequal = [run for run in recorded if len(set(run.chunk_sizes)) > 1]
    shown = [f"chunks {run.chunk_sizes} on {run.devices} devices" for run in unequal or recorded]
    shown += [f"refused: {run.reason}" for run in refused]
    if unequal or refused:
        return Ruling(HOLDS, listing(shown), "", (*unequal, *refused))
    if not recorded:
        return missing("dp on 2 or more devices with its chunk sizes", "parallel=dp parallel.devices=2")
    remedy = "every batch divides evenly; data.batch_size=7 parallel.devices=2 would show it"
    return Ruling(UNMEASURED, listing(shown), remedy, tuple(recorded))


def dp_starts_sooner(e: Evidence) -> Ruling:
    rule = "here each is one key, parallel=…; weighed is the time from command to first step"
    return weigh(e.stated("first_step_seconds", "ddp", "dp"), "the time of dp to the first step", rule)


def first_rank_writes(e: Evidence) -> Ruling:
    def files(run: RunRecord) -> dict[str, int]:
        found = run.proof("files_per_rank")
        return found if isinstance(found, dict) else {}

    return e.in_every_run(
        "ddp",
        "ranks other than 0 wrote no file but their own log",
        lambda run: all(count <= 1 for rank, count in files(run).items() if rank != "0") if files(run) else None,
        lambda run: "files of " + ", ".join(f"rank {rank}: {count}" for rank, count in list(files(run).items())[:8]),
    )


def backend_follows_device(e: Evidence) -> Ruling:
    fitting = {"cuda": "nccl"}

    def example(run: RunRecord) -> str:
        reason = run.environment.get("backend_reason") or run.proof("backend_reason") or "reason not recorded"
        return f"{run.result['backend']} on {run.accelerator}: {reason}"

    return e.in_every_run(
        "ddp",
        "NCCL on CUDA, gloo elsewhere",
        lambda run: run.result["backend"] == fitting.get(run.accelerator, "gloo") if run.result["backend"] else None,
        example,
    )


def ddp_spans_machines(e: Evidence) -> Ruling:
    ddp, dp = ([run for run in e.finished(strategy) if run.nodes > 1] for strategy in ("ddp", "dp"))
    refused = e.refused("dp", "node")
    shown = [f"{run.strategy} on {run.nodes} nodes, world size {run.devices}" for run in ddp + dp]
    shown += [f"dp refused: {run.reason}" for run in refused]
    verdict = FAILS if dp else HOLDS if ddp else UNMEASURED
    reasons = {FAILS: "dp ran on several nodes", HOLDS: "" if refused else "dp on several nodes was not tried"}
    alone = "all runs here are on one node; add cluster.nodes=2, or start torchrun with --nnodes=2"
    return Ruling(verdict, listing(shown), reasons.get(verdict, alone), (*ddp, *dp, *refused))


def each_has_its_stage(e: Evidence) -> Ruling:
    faster = Ruling(UNMEASURED) if e.on_cpu else ddp_is_faster(e)
    parts = {11: dp_starts_sooner(e), 1: faster, 14: ddp_spans_machines(e)}
    words = [ruling.verdict for ruling in parts.values()]
    verdict = next(word for word in (FAILS, UNMEASURED, UNDECIDED, HOLDS) if word in words)
    basis = ", ".join(f"{number} ({ruling.verdict})" for number, ruling in parts.items())
    runs = tuple(dict.fromkeys(run for ruling in parts.values() for run in ruling.runs))
    return Ruling(verdict, reason=f"rests on claims {basis}", runs=runs)


def one_optimizer_per_process(e: Evidence) -> Ruling:
    found = {s: [r for r in e.finished(s, 2) if r.proof("optimizers") is not None] for s in ("dp", "ddp")}
    if not all(found.values()):
        return missing("dp and ddp on 2 or more devices with their optimizers counted")
    runs = found["dp"] + found["ddp"]
    fits = all(run.proof("optimizers") == (1 if run.strategy == "dp" else run.devices) for run in runs)
    shown = listing(f"{run.strategy} × {run.devices}: {run.proof('optimizers')}{_state(run)}" for run in runs)
    return Ruling(HOLDS if fits else FAILS, shown, "", tuple(runs))


def _state(run: RunRecord) -> str:
    states = run.proof("optimizer_state_bytes")
    if not isinstance(states, list) or not all(isinstance(state, int | float) for state in states):
        return ""
    return f" (state {', '.join(f'{state / 2**20:.1f}' for state in states[:8])} MiB by device)"
