"""Tests of searches whose trials are Slurm jobs, and of sweeps that run as one Slurm job array."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.template.runs import resolved, tiny
from timm_parallel.lab.jobs import slurm as submitted
from timm_parallel.lab.jobs.scheduler import Requirement
from timm_parallel.lab.jobs.slurm import SlurmJob, SlurmQueue, update
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.launch.job import RankExits, conclude, run_job
from timm_parallel.patches import hydra_parser
from timm_parallel.record.result import Job, Result, read_jobs, write_result

WORDS = ("cluster=slurm", "parallel=single", "search=optuna", "search.n_trials=3")
ONE = ("cluster=slurm", "cluster.submit=false", "parallel=single")


class Slurm:
    """Fake Slurm with a queue. Its jobs may end as soon as they are submitted."""

    def __init__(self) -> None:
        self.queue: dict[str, str] = {}
        # The paths of all submitted job scripts.
        self.scripts: list[str] = []
        self.answers = True
        # The status with which a job ends as soon as it is submitted. If None, the job stays in the
        # queue.
        self.at_once: str | None = None

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
    monkeypatch.setattr(submitted, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("timm_parallel.cluster.slurm.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(submitted, "FILES_SECONDS", 0.2)
    monkeypatch.setattr(
        "timm_parallel.cluster.slurm.shutil.which", lambda program: f"/usr/bin/{program}"
    )
    return made


def trial(folder: Path, config: object = None) -> SlurmJob:
    """Build a trial as a search does. `config`: save it in the folder first."""
    if config is not None:
        folder.mkdir()
        run_job(config, folder)  # type: ignore[arg-type]
    return SlurmJob(Job(0, "", ".", []), folder, None, SlurmQueue())


def started(folder: Path, config: object = None) -> SlurmJob:
    child = trial(folder, config)
    child.start(Requirement("slurm", 1), [])
    return child


def test_running_slurm_trial_is_not_submitted_again_when_its_search_is_resumed(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder = tmp_path / "0"
    child = started(folder, resolved(*ONE))
    assert not child.has_ended()
    # Delete job.id, as if the search had been killed before it wrote this file.
    (folder / "job.id").unlink()
    again = started(folder)
    assert (folder / "job.id").read_text() == "1\n" and not again.has_ended()
    write_result(folder, Result("failed", "lost a node"))
    assert not started(folder).has_ended(), (
        "a failed attempt that Slurm requeued must not end the trial"
    )
    write_result(folder, Result("done", seconds={"total": 7.0}))
    last = started(folder)
    assert last.has_ended() and last.conclude(None) is not None
    assert (last.job.status, last.job.seconds) == ("done", 7.0)
    assert len(slurm.scripts) == 1


def test_interrupted_slurm_trial_is_submitted_again_when_its_search_is_resumed(
    slurm: Slurm, tmp_path: Path
) -> None:
    config, folder = resolved(*ONE), tmp_path / "0"
    child = started(folder, config)
    child.send(15)
    conclude(config, folder, RankExits(signal=15))
    assert child.has_ended() and child.conclude(15) is not None
    assert child.job.status == "interrupted"
    assert child.job.seconds is not None and child.job.seconds > 0
    started(folder)
    assert len(slurm.scripts) == 2


def test_slurm_trial_fails_when_its_job_has_left_the_queue_without_a_result(
    slurm: Slurm, tmp_path: Path
) -> None:
    child = started(tmp_path / "0", resolved(*ONE))
    slurm.answers = False
    assert not child.has_ended(), (
        "a failed query while Slurm's controller restarts must not fail the trial"
    )
    with pytest.raises(ValueError, match="squeue"):
        started(tmp_path / "0")
    slurm.answers, slurm.queue = True, {}
    assert not child.has_ended(), (
        "the trial must not fail yet, because its files may become visible later"
    )
    time.sleep(0.2)
    assert child.has_ended() and child.conclude(None) is None
    assert child.job.status == "out_of_memory" and "job 1" in child.job.reason


def search(folder: Path, *words: str) -> int:
    arguments = hydra_parser().parse_args(
        ["-m", *tiny(f"hydra.sweep.dir={folder}", *WORDS, *words)]
    )
    return multirun(arguments)


@pytest.mark.nightly
@pytest.mark.slow
def test_search_submits_every_trial_as_a_slurm_job(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timm_parallel.lab.search.search.draw_study", lambda study, metric: "")
    slurm.at_once, folder = "done", tmp_path / "search"
    local = tmp_path / "slurm.sh"
    local.write_text("module load cuda\n")
    monkeypatch.setattr("timm_parallel.cluster.slurm.LOCAL_LINES", local)
    assert search(folder, "search.n_jobs=2") == 0
    assert [Path(script).parent.name for script in slurm.scripts] == ["0", "1", "2"]
    assert [job.status for job in read_jobs(folder).jobs] == ["done"] * 3
    assert "module load cuda" in Path(slurm.scripts[2]).read_text()
    local.write_text("module load rocm\n")
    more = ["-m", f"sweep.resume={folder}", "search.n_trials=4"]
    assert multirun(hydra_parser().parse_args(more)) == 0
    assert "module load rocm" in Path(slurm.scripts[3]).read_text(), (
        "expected the setup lines of the machine that resumes the search"
    )


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("words", "named"),
    [(("cluster.cpus=range(1,4)",), "cluster.cpus=range"), ((), "no such partition")],
)
def test_refused_search_on_slurm_leaves_no_folder_and_no_study(
    words: tuple[str, ...], named: str, slurm: Slurm, tmp_path: Path
) -> None:
    slurm.at_once = "refused"
    study = (f"search.storage=sqlite:///{tmp_path}/study.db", "search.study_name=mine")
    # The second search finds no study of its name.
    for _ in range(2):
        with pytest.raises(ValueError, match=named):
            search(tmp_path / "search", *study, *words)
        assert not (tmp_path / "search").exists()


SMALL = (
    "model=tiny",
    "print_config=false",
    "parallel=single",
    "cluster=slurm",
    "cluster.submit=false",
)


def script_of(folder: Path, *words: str) -> str:
    arguments = hydra_parser().parse_args(["-m", *SMALL, f"hydra.sweep.dir={folder}", *words])
    assert multirun(arguments) == 0
    return (folder / "job.sbatch").read_text()


def ended(folder: Path, job: int, status: str = "done") -> None:
    write_result(
        folder / str(job),
        Result(status, strategy="single", devices=1, world_size=1, seconds={"total": 1.0}),
    )


@pytest.mark.slow(seconds=2)
def test_sweep_job_script_has_one_slurm_array_task_per_job_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a sweep"
    script = script_of(folder, "seed=1,2,3", "sweep.jobs=2", "cluster.cpus=4")
    assert "#SBATCH --array=0,1,2%2" in script
    assert f"--output='{folder}/task_%a.log'" in script
    assert 'timm_parallel.launch.node src.app:app "$folder"' in script
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in script
    assert (folder / "array.txt").read_text().splitlines() == [
        f"{job} {folder}/{job}" for job in range(3)
    ]
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting"] * 3
    assert "#SBATCH --array=0,1\n" in script_of(tmp_path / "auto", "seed=1,2", "sweep.jobs=auto")


@pytest.mark.slow(seconds=4)
def test_slurm_array_tasks_update_jobs_json_and_resume_submits_the_unfinished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    script_of(folder, "seed=1,2,3", "sweep.jobs=2")
    ended(folder, 1)
    # An interrupted job has saved a checkpoint before its time limit, and Slurm runs it again.
    ended(folder, 2, "interrupted")
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting", "done", "waiting"]
    assert not (folder / "report.html").exists()
    arguments = hydra_parser().parse_args(["-m", f"sweep.resume={folder}"])
    assert multirun(arguments) == 0
    assert "#SBATCH --array=0,2%2" in (folder / "job.sbatch").read_text()
    local = tmp_path / "slurm.sh"
    local.write_text("module load cuda\n")
    monkeypatch.setattr("timm_parallel.cluster.slurm.LOCAL_LINES", local)
    assert multirun(arguments) == 0
    assert "\nmodule load cuda\n" in (folder / "job.sbatch").read_text(), (
        "expected the setup lines of the machine that submits the array"
    )
    for word in ("optim.lr=0.1", "sweep.dry_run=true"):
        changed = hydra_parser().parse_args(["-m", f"sweep.resume={folder}", word])
        with pytest.raises(ValueError, match=f"{word.partition('=')[0]}: .*sweep.resume="):
            multirun(changed)
    ended(folder, 0, "failed")
    ended(folder, 2)
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["failed", "done", "done"]
    assert read_jobs(folder).status == "done"
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("cluster.cpus=1,2",), "^cluster=slurm: "),
        (("search=optuna",), "cluster.submit=false"),
        (("sweep.timed=true", "sweep.jobs=2", "seed=1,2"), "sweep.jobs=2: sweep.timed=true"),
    ],
)
def test_slurm_sweep_is_refused_when_the_settings_do_not_allow_a_job_array(
    words: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        script_of(tmp_path / "sweep", *words)
    assert not (tmp_path / "sweep").exists()
