"""Claims about how a strategy behaves: counted or recorded by the runs themselves, so one run is enough."""

from __future__ import annotations

from collections.abc import Callable

from src.engine.report.advice import stages
from src.engine.report.claims_measured import ddp_is_faster
from src.engine.report.evidence import BOTH, FAILS, HOLDS, UNMEASURED, Evidence, Finding, listing, missing, weigh
from src.engine.report.measured import Run
from src.engine.report.ranges import compare, with_range

DDP_REMEDY = "parallel=ddp parallel.devices=2"


def replicas_stay_equal(e: Evidence) -> Finding:
    return _in_every_run(
        e.finished("ddp", 2),
        lambda run: run.proof("hashes_equal"),
        "equal hashes of all parameters over the ranks, at the start and at the end",
    )


def shares_are_disjoint(e: Evidence) -> Finding:
    def disjoint_and_whole(run: Run) -> bool | None:
        seen, distinct, expected = (run.proof(f"indices_{what}") for what in ("seen", "distinct", "expected"))
        return None if None in (seen, distinct, expected) else seen == distinct == expected

    found = _in_every_run(e.finished("ddp", 2), disjoint_and_whole, "every index of the epoch seen by exactly one rank")
    example = next((run for run in found.runs if run.proof("indices_seen") is not None), None)
    counts = example and (
        f"e.g. {example.proof('indices_seen')} seen, {example.proof('indices_distinct')} distinct, "
        f"{example.proof('indices_expected')} expected"
    )
    return Finding(found.verdict, f"{found.figure} ({counts})" if counts else found.figure, found.reason, found.runs)


def dp_needs_a_batch(e: Evidence) -> Finding:
    recorded = [run for run in e.finished("dp", 2) if isinstance(run.proof("chunk_sizes"), list)]
    unequal = [run for run in recorded if run.proof("chunk_sizes") != run.proof("chunk_sizes")[:1] * run.devices]
    refused = [run for run in e.runs if run.status == "skipped" and run.strategy == "dp" and "batch" in run.reason]
    shown = listing(
        [f"chunks {run.proof('chunk_sizes')} on {run.devices} devices" for run in unequal or recorded]
        + [f"refused: {run.reason}" for run in refused]
    )
    if unequal or refused:
        return Finding(HOLDS, shown, "", tuple(unequal + refused))
    if not recorded:
        return missing("dp on 2 or more devices with its chunk sizes", "parallel=dp parallel.devices=2")
    return Finding(
        UNMEASURED,
        shown,
        "every batch divides evenly; data.batch_size=7 parallel.devices=2 would show it",
        tuple(recorded),
    )


def dp_starts_sooner(e: Evidence) -> Finding:
    found = e.both("first_step_seconds")
    if not found:
        return missing("dp and ddp on the same devices with their start-up time", BOTH)
    verdict, reason = weigh(compare(ddp, dp) for _, dp, ddp in found)
    shown = listing(
        f"{place}: first step after {with_range(dp, ' s')} under dp, {with_range(ddp, ' s')} under ddp"
        for place, dp, ddp in found
    )
    basis = "here each is one key, parallel=…; weighed is the time from command to first step"
    return Finding(verdict, shown, f"{basis}; {reason}" if reason else basis, e.pair_runs)


def first_rank_writes(e: Evidence) -> Finding:
    def others_write_a_log_at_most(run: Run) -> bool | None:
        files = run.proof("files_per_rank")
        if not isinstance(files, dict) or not files:
            return None
        return all(count <= 1 for rank, count in files.items() if rank != "0")

    what = "ranks other than 0 wrote no file but their own log"
    found = _in_every_run(e.finished("ddp", 2), others_write_a_log_at_most, what)
    example = next((run.proof("files_per_rank") for run in found.runs if run.proof("files_per_rank")), None)
    counts = example and ", ".join(f"rank {rank}: {count}" for rank, count in list(example.items())[:8])
    shown = f"{found.figure} (files, e.g. {counts})" if counts else found.figure
    return Finding(found.verdict, shown, found.reason, found.runs)


def backend_follows_device(e: Evidence) -> Finding:
    found = [run for run in e.finished("ddp") if run.result and run.result.backend]
    if not found:
        return missing("ddp with its backend", DDP_REMEDY)
    given = [run.environment.get("backend_reason") or run.proof("backend_reason") for run in found]
    reasons = {str(reason or "reason not recorded") for reason in given}
    chosen = {(run.result.backend, run.accelerator) for run in found if run.result}
    shown = listing(f"{backend} on {accelerator}" for backend, accelerator in sorted(chosen, key=str))
    fits = all(backend == ("nccl" if accelerator == "cuda" else "gloo") for backend, accelerator in chosen)
    return Finding(HOLDS if fits else FAILS, shown, listing(sorted(reasons)), tuple(found))


def ddp_spans_machines(e: Evidence) -> Finding:
    def nodes(run: Run) -> int:
        value = run.config.get("cluster.nodes")
        return value if isinstance(value, int) else 1

    several = [run for run in e.finished("ddp") if nodes(run) > 1]
    refused = [run for run in e.runs if run.strategy == "dp" and run.status == "skipped" and "node" in run.reason]
    shown = listing(
        [f"ddp on {nodes(run)} nodes, world size {run.devices}" for run in several]
        + [f"dp refused: {run.reason}" for run in refused]
    )
    if several:
        reason = "" if refused else "dp on several nodes was not asked for; it is refused"
        return Finding(HOLDS, shown, reason, tuple(several + refused))
    remedy = "all runs here are on one node; add cluster.nodes=2, or start torchrun with --nnodes=2"
    return Finding(UNMEASURED, shown, remedy, tuple(refused))


def each_has_its_stage(e: Evidence) -> Finding:
    start, speed = dp_starts_sooner(e), ddp_is_faster(e)
    shown = listing(f"{group.title}: {stages(group)}" for group in e.groups if stages(group))
    runs = tuple(dict.fromkeys(start.runs + speed.runs))
    basis = f"rests on claims 11 ({start.verdict}) and 1 ({speed.verdict}); the advice is at the end"
    verdicts = {start.verdict, speed.verdict}
    return Finding(FAILS if FAILS in verdicts else UNMEASURED if UNMEASURED in verdicts else HOLDS, shown, basis, runs)


def one_optimizer_per_process(e: Evidence) -> Finding:
    dp = [run for run in e.finished("dp", 2) if run.proof("optimizers") is not None]
    ddp = [run for run in e.finished("ddp", 2) if run.proof("optimizers") is not None]
    if not dp or not ddp:
        return missing("dp and ddp on 2 or more devices with their optimizers counted", BOTH)
    fits = all(run.proof("optimizers") == (1 if run.strategy == "dp" else run.devices) for run in dp + ddp)
    shown = listing(f"{run.strategy} × {run.devices}: {run.proof('optimizers')}{_state(run)}" for run in dp + ddp)
    return Finding(HOLDS if fits else FAILS, shown, "", tuple(dp + ddp))


def _state(run: Run) -> str:
    states = run.proof("optimizer_state_bytes")
    if not isinstance(states, list) or not all(isinstance(state, int | float) for state in states):
        return ""
    return f" (state {', '.join(f'{state / 2**20:.1f}' for state in states[:8])} MiB by device)"


def _in_every_run(runs: list[Run], fits: Callable[[Run], bool | None], what: str) -> Finding:
    """Holds when it fits every run that recorded it."""
    known = [(run, verdict) for run in runs if (verdict := fits(run)) is not None]
    if not known:
        return missing("ddp on 2 or more devices that recorded this", DDP_REMEDY)
    good = sum(bool(verdict) for _, verdict in known)
    failing = [run.name for run, verdict in known if not verdict]
    reason = f"not in {', '.join(failing[:6])}" if failing else ""
    shown = f"{what}: {good} of {len(known)} ddp runs"
    return Finding(FAILS if failing else HOLDS, shown, reason, tuple(run for run, _ in known))
