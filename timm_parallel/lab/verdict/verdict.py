"""Verdict on a change of the code: a sweep that compares two versions of the code, base and head.
Each version runs its own train.py, and only result.json connects the two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from timm_parallel.checked_configs import choose_headline, metric_of
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import Command, compose_command
from timm_parallel.config.resolve import resolve
from timm_parallel.keys import Config
from timm_parallel.lab.analysis.headline import Finding, finding
from timm_parallel.lab.analysis.sequential import (
    BETTER,
    EQUAL,
    FIRST,
    LEVEL,
    NO_DIFFERENCE,
    WORSE,
)
from timm_parallel.lab.analysis.verdict import (
    BASE,
    CODE,
    HEAD,
    REFUSED,
    Record,
    Verdict,
    code_of,
    refusal,
)
from timm_parallel.lab.code_copy import (
    LARGEST,
    Version,
    copy_code,
    find_commit,
)
from timm_parallel.lab.jobs.local_job import LocalJob, sync_from_result
from timm_parallel.lab.jobs.scheduler import Requirement, jobs_at_a_time, need_of
from timm_parallel.lab.report.collect import collect, flat, read_record
from timm_parallel.lab.report.report import compare, write_report
from timm_parallel.lab.report.sentences import sentence
from timm_parallel.lab.report.tables import verdict_table
from timm_parallel.lab.sweep.board import show_results
from timm_parallel.lab.sweep.points import keys_that_may_change
from timm_parallel.lab.sweep.runner import Runner
from timm_parallel.lab.sweep.sweep import append_block, append_shuffled
from timm_parallel.machine.files import claim_folder, finite, lock_folder, read_json, write_json
from timm_parallel.record.result import UNFINISHED, VERDICT, Job, Jobs, new_jobs, now, read_jobs

# Exit code for each verdict. Any other outcome, such as a failed job, has exit code 1.
EXIT_CODES = {BETTER: 0, REFUSED: 2, EQUAL: 3, NO_DIFFERENCE: 3, WORSE: 4}
# Config keys that define the metric. They must be equal in both versions of the code.
MEANING = ("checkpoint.metric", "train.task")
REQUIREMENTS = ("requirements.txt", "requirements.lock", "pyproject.toml")
# Folder with the copies of both versions of the code, in the sweep folder.
COPIES = "code"
# Name and format version of the file in the output folder that lists all verdicts on each base
# commit.
LEDGER, LEDGER_FORMAT = "verdicts.json", 1
# Fields of a record that are equal if the same question is asked again.
_OF_A_QUESTION = ("code", "on", "repeats", "max_repeats", "smallest", "overrides")
# Longest time to wait for another verdict that starts at the same time and locks the same file.
LOCK_SECONDS = 10.0

Values = dict[str, Any]


def start_verdict(overrides: list[str], base: str, head: str | None, on: str) -> tuple[int, Values]:
    """Copy both versions of the code, train each with the same seeds, and decide which is better.
    Two versions that were compared before, with the same settings, continue their earlier verdict.
    Return (exit code, the dictionary that `--json` prints).

    `overrides`: overrides of train.py. `base`: commit before the change. `head`: commit after the
    change, or None for the working tree. `on`: the measure that decides, metric or speed.
    """
    command = compose_command(parse_command_line(overrides))
    commits = find_commit(BASE, base), head and find_commit(HEAD, head)
    repeats, sweep = _repeats(command), command.config.sweep
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    try:
        notes = _copy(folder, *commits)
        record = Record(
            _name(base, commits[0]),
            _name(head, commits[1]),
            number=1,
            on=on,
            repeats=repeats,
            max_repeats=sweep.max_repeats,
            smallest=sweep.smallest,
            code=_hash(folder / COPIES),
            overrides=overrides,
            notes=notes,
        )
        outputs = Path(command.config.paths.output_dir)
        earlier = _find_earlier(outputs, commits[0], record)
        if earlier is None:
            choose_headline(command.config)
            _check(folder, overrides, command.config)
            record = dataclasses.replace(record, number=_enter(outputs, commits[0], folder))
            write_json(folder / VERDICT, dataclasses.asdict(record))
            jobs = _new_jobs(folder, record, command)
    # Remove the folder after a Ctrl-C too, because a verdict without jobs.json cannot be resumed.
    except BaseException:
        shutil.rmtree(folder)
        raise
    if earlier is not None:
        shutil.rmtree(folder)
        return _ask_again(earlier)
    return VerdictRun(jobs, record, command).conclude()


def _ask_again(folder: Path) -> tuple[int, Values]:
    """Continue a verdict on the same two versions. If it stopped because more pairs were unlikely
    to decide, add pairs up to the limit. Raises ValueError if it has decided, or cannot go on.
    """
    verdict = _judge(folder)
    if verdict.finding.numbers.get("is_futile"):
        record = dataclasses.replace(verdict.record, persists=True)
        write_json(folder / VERDICT, dataclasses.asdict(record))
    elif verdict.word in EXIT_CODES and not verdict.is_open:
        raise ValueError(
            f"{BASE}, {HEAD}: these two versions have a verdict, in {folder}: "
            f"{sentence(verdict.finding)} Use other seeds, such as seed=100, for another one"
        )
    print(f"continues    {folder}")
    return _continue(folder)


def _judge(folder: Path) -> Verdict:
    """Compare the runs of a verdict so far."""
    verdict = compare([folder]).verdict
    assert verdict is not None
    return verdict


def resume_verdict(overrides: list[str]) -> tuple[int, Values]:
    """Run the missing and failed jobs of an earlier verdict, in the folder that the key
    `sweep.resume` names. Return (exit code, the dictionary that `--json` prints). Raises ValueError
    if the key is not set.
    """
    command = compose_command(parse_command_line(["-m", *overrides]))
    if command.config.sweep.resume is None:
        raise ValueError(
            "base: required; give the commit to compare the code with, such as base=main"
        )
    return continue_verdict(Path(command.config.sweep.resume), command)


def continue_verdict(folder: Path, command: Command) -> tuple[int, Values]:
    """Run the missing and failed jobs of the verdict in `folder`, then decide which version is
    better. Return (exit code, the dictionary that `--json` prints).
    """
    keys_that_may_change(command, folder)
    return _continue(folder)


def _continue(folder: Path) -> tuple[int, Values]:
    record, jobs = read_record(folder), read_jobs(folder)
    assert record is not None
    for job in jobs.jobs:
        sync_from_result(job, folder / job.folder)
        # Do not repeat a run that diverged or ran out of memory, because its version of the code
        # caused that.
        if job.status in (*UNFINISHED, "failed") or not (folder / job.folder).is_dir():
            job.reset()
    jobs.status = "running"
    command = compose_command(parse_command_line(record.overrides))
    return VerdictRun(jobs, record, command).conclude()


def _repeats(command: Command) -> int | None:
    """Return the number of repeats of a verdict, or None if it stops by itself. Raises ValueError
    if a verdict cannot have the given settings of a sweep: one repeat, a cluster, or too many
    concurrent jobs.
    """
    repeats, scheduler = command.config.sweep.repeats, command.config.cluster.scheduler
    if repeats == 1:
        raise ValueError(
            f"sweep.repeats={repeats}: a verdict needs runs with 2 seeds or more; use "
            "sweep.repeats=auto"
        )
    if scheduler != "local":
        raise ValueError(f"cluster={scheduler}: a verdict runs on one machine; use cluster=local")
    jobs_at_a_time("sweep.jobs", command.config.sweep.jobs, command.config)
    return None if repeats == "auto" else int(repeats)


def _versions(folder: Path) -> list[Version]:
    return [Version(name, folder.resolve() / COPIES / name) for name in (BASE, HEAD)]


def _copy(folder: Path, base: str, head: str | None) -> list[str]:
    """Copy the files of both versions of the code. Return notes for the report, for example that
    the requirements of the versions differ.
    """
    old, new = _versions(folder)
    # Copy the working tree first, because it may contain the sweep folder.
    left_out = sorted({*copy_code(head, new.folder), *copy_code(base, old.folder)})
    notes = [
        f"{name} differs: both versions run in the current Python environment."
        for name in REQUIREMENTS
        if old.read(name) != new.read(name)
    ]
    if left_out:
        limit = f"larger than {LARGEST // 2**20} MiB, or no files"
        notes.append(f"Left out of the copies, because {limit}: {', '.join(left_out)}.")
    return notes


def _name(given: str | None, commit: str | None) -> str:
    if given is None or commit is None:
        return "working tree"
    return commit[:10] if commit.startswith(given) else f"{given} ({commit[:10]})"


def _check(folder: Path, overrides: list[str], config: Config) -> None:
    """Raise ValueError if the train.py of a code version rejects the overrides, or if the two
    versions measure different metrics. `config`: config of this code, with the headline metric.
    """
    base, head = _versions(folder)
    old, new = flat(base.compose(overrides)), flat(head.compose(overrides))
    for key in MEANING:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"{key}: {old.get(key)} in base, {new.get(key)} in head; a verdict needs the same "
                f"metric in both, so set {key} on the command line"
            )
    name = old["checkpoint.metric"]
    metric = metric_of(config.train.task, config.checkpoint.metric if name == "auto" else name)
    if base.code_of(metric) != head.code_of(metric):
        raise ValueError(
            f"checkpoint.metric={name}: the code of this metric differs between base and head, so "
            "its values cannot be compared; commit the change of the metric, and use that commit "
            "as base"
        )


def _hash(folder: Path) -> str:
    """Hash the names and contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file()):
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        name = os.fsencode(path.relative_to(folder))
        digest.update(b"%d %s %d %s" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _find_earlier(outputs: Path, commit: str, record: Record) -> Path | None:
    """Return the folder of the last verdict on a base commit that has the same code and settings as
    `record`. `outputs`: folder that holds the list of all verdicts.
    """
    for entry in reversed(_read_ledger(outputs)["bases"].get(commit, [])):
        folder = Path(entry["sweep"])
        known = read_record(folder) if (folder / "jobs.json").is_file() else None
        if known is not None and all(
            getattr(known, name) == getattr(record, name) for name in _OF_A_QUESTION
        ):
            return folder
    return None


def _enter(outputs: Path, commit: str, sweep: Path) -> int:
    """Enter a new verdict into the list of all verdicts, and return its number among those on its
    base commit.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    with lock_folder(outputs, LOCK_SECONDS):
        ledger = _read_ledger(outputs)
        entries = ledger["bases"].setdefault(commit, [])
        number = len(entries) + 1
        entries.append({"number": number, "sweep": str(sweep.resolve()), "started": now()})
        write_json(outputs / LEDGER, ledger)
    return number


def _read_ledger(outputs: Path) -> Values:
    path = outputs / LEDGER
    empty = {"format": LEDGER_FORMAT, "bases": {}}
    return read_json(path, LEDGER_FORMAT, "") if path.is_file() else empty


def _new_jobs(folder: Path, record: Record, command: Command) -> Jobs:
    """Write jobs.json of a verdict on a code change, with all repeats of a fixed number, or the
    first ones.
    """
    jobs = new_jobs(folder)
    jobs.order_seed = secrets.randbits(32)
    pair = [
        Job(
            0,
            f"{CODE}={name}",
            f"{number}_{name}_block_0",
            [f"{CODE}={name}", *record.overrides],
            seed=command.config.seed,
            configuration=number,
        )
        for number, name in enumerate((BASE, HEAD))
    ]
    append_shuffled(jobs, pair, block=0)
    for _ in range(1, record.repeats or FIRST):
        append_block(jobs, {0, 1})
    jobs.write()
    return jobs


class VersionJob(LocalJob):
    """Job of a verdict, which runs the train.py of one version of the code."""

    def __init__(self, job: Job, folder: Path, version: Version) -> None:
        super().__init__(job, folder.resolve(), None)
        self._version = version
        self._resumes = any((folder / "checkpoints").glob("*.pt"))
        # Remove the folder of a job without a checkpoint, because train.py starts a run only in a
        # new folder.
        if not self._resumes:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def console(self) -> Path:
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def environment(self) -> dict[str, str]:
        return self._version.environment

    def command(self) -> list[str]:
        if self._resumes:
            return [*self._version.train, f"resume='{self.folder}'"]
        where = [f"seed={self.job.seed}", f"hydra.run.dir='{self.folder}'"]
        return [*self._version.train, *self.job.overrides[1:], *where]

    def without_result(self, error: str) -> tuple[str, str]:
        if self.exit_code() != 2:
            return super().without_result(error)
        self.job.code = REFUSED
        return "failed", self.console.read_text(encoding="utf-8").strip().rpartition("\n")[2]


class VerdictRun(Runner):
    """Runner of the jobs of a verdict. It adds pairs of jobs until the verdict can decide. No
    further job starts if the two versions turn out not to be comparable.
    """

    def __init__(self, jobs: Jobs, record: Record, command: Command) -> None:
        config = command.config
        super().__init__(jobs, jobs_at_a_time("sweep.jobs", config.sweep.jobs, config))
        # Give the jobs of both versions of the code equal devices, so that their speeds can be
        # compared.
        self._record = record
        self._need_of_each = need_of(resolve(config))
        self._versions = {version.name: version for version in _versions(jobs.folder)}
        self._values: Values = {}

    def conclude(self) -> tuple[int, Values]:
        """Run the jobs of both versions, write the report and print the verdict. Return (exit code,
        the dictionary that `--json` prints).
        """
        return self.run(), self._values

    def waiting(self) -> list[Job]:
        if self._refusal():
            return []
        if self.jobs.have_ended and _judge(self.jobs.folder).is_open:
            append_block(self.jobs, {job.configuration for job in self.jobs.jobs})
            self.jobs.write()
        return [job for job in self.jobs.jobs if job.status == "waiting"]

    def need(self, job: Job) -> Requirement:
        return self._need_of_each

    def local_job(self, job: Job) -> LocalJob:
        return VersionJob(job, self.jobs.folder / job.folder, self._versions[code_of(job)])

    def _refusal(self) -> Finding | None:
        """Return the reason why the two versions cannot be compared, as far as it is known."""
        for job in self.jobs.jobs:
            if job.code == REFUSED:
                return finding("refused_by_code", code=code_of(job), reason=job.reason)
        return refusal(collect([self.jobs.folder]))

    def _close(self) -> int:
        folder = self.jobs.folder
        page = write_report([folder])
        verdict, refused = _judge(folder), self._refusal()
        word = REFUSED if refused else verdict.word
        text = sentence(refused or verdict.finding)
        notes = [sentence(note) for note in verdict.notes]
        print("\n".join([text, *notes]))
        show_results(verdict_table(verdict).rows)
        print(f"versions     base {self._record.base}, head {self._record.head}")
        print(f"report       {page}")
        code = EXIT_CODES.get(word, 1)
        measures = {name: contrast.fields for name, contrast in verdict.contrasts.items()}
        self._values = finite(
            {
                **dataclasses.asdict(self._record),
                "verdict": word,
                "exit_code": code,
                "sentence": text,
                "notes": notes,
                "level": LEVEL,
                "false_in_100": self._record.false_in_100,
                "measures": measures,
                "sweep": str(folder),
                "report": str(page),
            }
        )
        return code if self.stopped_by is None else self._say_stopped(self.stopped_by)
