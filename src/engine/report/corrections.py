"""Statements found in articles that are wrong whatever a machine measures, with the figures that show it here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.engine.report.comparison import Group
from src.engine.report.evidence import Evidence, gib
from src.engine.report.measured import Run
from src.engine.report.wording import listing


@dataclass(frozen=True)
class Correction:
    statement: str
    truth: str
    figure: str  # a dash where these runs do not show it


def correct(groups: Sequence[Group], runs: Sequence[Run]) -> list[Correction]:
    """From the groups and runs of one hardware."""
    e = Evidence(groups, runs)
    ddp, dp = e.finished("ddp", 2), e.finished("dp", 2)
    equal = [run for run in ddp if run.proof("hashes_equal")]
    replicas = f"all parameters equal on all ranks in {len(equal)} of {len(ddp)} runs" if ddp else "—"
    even = [run.imbalance for run in ddp if run.imbalance is not None and not e.on_cpu]
    centre = f"largest over mean peak memory under ddp at most {max(even):.2f}" if even else "—"
    worlds = ", ".join(map(str, sorted({run.devices for run in ddp if run.nodes == 1})))
    machines = f"world sizes {worlds} on one machine" if worlds else "—"
    peaks = listing(f"{e.place(g, p)}: {gib(p)} GiB" for g, p in e.points("dp") if p.peak_bytes and not p.stand_in)
    chunks = listing(
        f"{sizes} on {run.devices} devices"
        for run in dp
        if isinstance(sizes := run.proof("chunk_sizes"), list) and len(set(sizes)) > 1
    )
    gloo = {str(r.environment.get("platform") or "") for r in ddp if r.record.get("backend") == "gloo"}
    windows = listing(f"gloo ran here, on {name}" for name in sorted(gloo) if name.startswith("Windows"))
    accumulated = [r for r in e.runs if r.comparable and (r.config.get("train.accumulate") or 1) > 1]
    multi = listing(f"{run.strategy} × {run.devices}: {_processes(run)}" for run in dp + ddp)
    whose = listing(
        f"{r.strategy} × {r.devices} with train.accumulate={r.config['train.accumulate']}" for r in accumulated
    )
    found = (
        (
            "DDP holds a subset of the model on each machine",
            "Every rank has it all; only the data are divided.",
            replicas,
        ),
        ("DDP shares one model between processes", "Each process has a replica of its own.", replicas),
        (
            "Rank 0 averages the gradients and broadcasts them",
            "An all-reduce: every rank sends the same share.",
            centre,
        ),
        ("DataParallel is multi-process", "One process with one thread per device.", multi),
        ("DP needs equal chunks", "They may differ; only none may be empty.", chunks),
        ("Under DP only device 0 holds the model", "Every device holds a replica while a step runs.", peaks),
        ("DP passes parameters through the CPU", "They are copied from device 0 to the others.", "—"),
        ("DP scatters the loss", "It gathers the outputs; gradients flow back through the replicas.", "—"),
        ("DDP must have several machines", "One machine is enough: its ranks are processes.", machines),
        ("Windows has no DDP", "torch is built with gloo there; a run on Linux proves nothing.", windows),
        ("NCCL serves Windows", "NCCL is for Linux; on Windows the backend is gloo.", "—"),
        ("DDP saves memory by accumulation", "train.accumulate does, in every strategy, if asked for.", whose),
    )
    return [Correction(*texts) for texts in found]


def _processes(run: Run) -> str:
    count = run.integer("processes")
    return "not recorded" if count is None else "1 process" if count == 1 else f"{count} processes"
