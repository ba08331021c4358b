"""A search whose trials are Slurm jobs: each submitted once and found again, whatever happened while nobody looked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import resolved, tiny
from hydra._internal.utils import get_args_parser

from src.engine.launch.job import run_job
from src.engine.record.jobs import Job, read_jobs
from src.engine.record.result import Result, write_result
from src.engine.sweep import submitted
from src.engine.sweep.packing import Need
from src.engine.sweep.submitted import SlurmQueue, Submitted
from src.engine.sweep.sweep import run_sweep
from src.schema import ClusterConfig

WORDS = ("cluster=slurm", "parallel=single", "search=optuna", "search.n_trials=3")


class Slurm:
    """Stands for the real one: a queue, and what becomes of a job at once."""

    def __init__(self) -> None:
        self.queue: dict[str, str] = {}
        self.scripts: list[str] = []  # submitted
        self.answers = True
        self.at_once: str | None = None  # how a job ends as soon as it is submitted

    def sbatch(self, script: Path) -> str:
        if self.at_once == "refused":
            raise ValueError("cluster=slurm: sbatch refuses the job: no such partition")
        self.scripts.append(str(script))
        if self.at_once is not None:
            write_result(script.parent, Result(self.at_once, objective=0.1 * len(self.scripts)))
        else:
            self.queue[str(script)] = str(len(self.scripts))
        return str(len(self.scripts))

    def jobs_in_queue(self) -> dict[str, str]:
        if not self.answers:
            raise ValueError("squeue: no answer")
        return dict(self.queue)

    def cancel(self, job: str) -> None:
        self.queue = {script: number for script, number in self.queue.items() if number != job}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    for name in ("sbatch", "jobs_in_queue", "cancel"):
        monkeypatch.setattr(submitted, name, getattr(made, name))
    monkeypatch.setattr(submitted, "state_of", lambda job: "OUT_OF_MEMORY")
    for name in ("LOOK_SECONDS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(submitted, name, 0.0)
    monkeypatch.setattr(submitted, "FILES_SECONDS", 0.2)
    monkeypatch.setattr("src.engine.launch.slurm.shutil.which", lambda program: f"/usr/bin/{program}")
    return made


def trial(folder: Path, config: object = None) -> Submitted:
    """A trial as a search that has just been started sees it; `config` is frozen into its folder."""
    if config is not None:
        folder.mkdir()
        run_job(config, folder)  # type: ignore[arg-type]
    return Submitted(Job(0, "", ".", []), folder, None, SlurmQueue(ClusterConfig(setup="module load cuda")))


def started(folder: Path, config: object = None) -> Submitted:
    child = trial(folder, config)
    child.start(Need("slurm", 1), [])
    return child


def test_a_trial_is_submitted_once_and_found_again(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "0"
    child = started(folder, resolved("cluster=slurm", "cluster.submit=false", "parallel=single"))
    assert "module load cuda" in Path(slurm.scripts[0]).read_text(), "the shell code of the command"
    assert "module load cuda" not in (folder / "config.yaml").read_text()
    assert not child.has_ended()
    (folder / "job.id").unlink()  # killed before it was written
    again = started(folder)
    assert (folder / "job.id").read_text() == "1\n" and not again.has_ended()
    write_result(folder, Result("failed", "lost a node"))
    assert not started(folder).has_ended(), "Slurm has queued it again"
    write_result(folder, Result("done", seconds={"total": 7.0}))
    last = started(folder)
    assert last.has_ended() and last.conclude(None) is not None
    assert (last.job.status, last.job.seconds) == ("done", 7.0)
    assert len(slurm.scripts) == 1


def test_what_was_interrupted_is_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "0"
    child = started(folder, resolved("cluster=slurm", "cluster.submit=false", "parallel=single"))
    child.send(15)
    write_result(folder, Result("interrupted", "stopped by SIGTERM"))
    assert child.has_ended() and child.conclude(15) is not None
    assert child.job.status == "interrupted"
    started(folder)
    assert len(slurm.scripts) == 2


def test_one_that_left_without_a_word_is_a_row_and_silence_is_no_end(slurm: Slurm, tmp_path: Path) -> None:
    child = started(tmp_path / "0", resolved("cluster=slurm", "cluster.submit=false", "parallel=single"))
    slurm.answers = False
    assert not child.has_ended(), "Slurm's controller restarts"
    with pytest.raises(ValueError, match="squeue"):
        started(tmp_path / "0")
    slurm.answers, slurm.queue = True, {}
    assert not child.has_ended(), "its files may come later"
    time.sleep(0.2)
    assert child.has_ended() and child.conclude(None) is None
    assert child.job.status == "out_of_memory" and "job 1 left Slurm's queue" in child.job.reason


def search(folder: Path, *words: str) -> int:
    arguments = get_args_parser().parse_args(["-m", *tiny(f"hydra.sweep.dir={folder}", *WORDS, *words)])
    return run_sweep(arguments, lambda data: None)


@pytest.mark.slow
def test_a_whole_search(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.engine.sweep.search_page.draw_study", lambda study, metric: [])
    slurm.at_once, folder = "done", tmp_path / "search"
    assert search(folder, "search.n_jobs=2", "cluster.setup='module load cuda'") == 0
    assert [Path(script).parent.name for script in slurm.scripts] == ["0", "1", "2"]
    assert [job.status for job in read_jobs(folder).jobs] == ["done"] * 3
    assert "module load" in Path(slurm.scripts[2]).read_text()
    assert "module load" not in (folder / "2" / ".hydra" / "overrides.yaml").read_text()
    frozen = (folder / "search.yaml").read_text()
    (folder / "search.yaml").write_text(frozen.replace("setup: null", "setup: rm -r /"))
    more = ["-m", f"sweep.resume={folder}", "search.n_trials=4", "cluster.setup='module load rocm'"]
    assert run_sweep(get_args_parser().parse_args(more), lambda data: None) == 0
    script = Path(slurm.scripts[3]).read_text()
    assert "module load rocm" in script and "rm -r" not in script, "a frozen config holds no code"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search.n_jobs=auto",), "how many are submitted"),
        (("cluster.submit=false",), "submits its trials"),
        (("cluster.cpus=range(1,4)",), "cannot be searched"),
        ((), "no such partition"),
    ],
)
def test_what_cannot_be_submitted_leaves_no_folder(
    words: tuple[str, ...], said: str, slurm: Slurm, tmp_path: Path
) -> None:
    slurm.at_once = "refused"
    with pytest.raises(ValueError, match=said):
        search(tmp_path / "search", *words)
    assert not (tmp_path / "search").exists()
