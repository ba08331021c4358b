"""A sweep as one Slurm job array: a task per job, bound to its folder and requeued by its own number; the last one reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from src.engine.record.jobs import read_jobs
from src.engine.record.result import Result, write_result
from src.engine.sweep.array import update
from src.engine.sweep.sweep import run_sweep

SMALL = ("model=tiny", "print_config=false", "parallel=single", "cluster=slurm", "cluster.submit=false")


def submitted(folder: Path, *words: str) -> str:
    """job.sbatch of a sweep that is left for people to submit."""
    arguments = get_args_parser().parse_args(["-m", *SMALL, f"hydra.sweep.dir={folder}", *words])
    assert run_sweep(arguments, lambda data: None) == 0
    return (folder / "job.sbatch").read_text()


def ended(folder: Path, job: int, status: str = "done") -> None:
    write_result(folder / str(job), Result(status, strategy="single", devices=1, world_size=1, seconds={"total": 1.0}))


def test_one_array_whose_tasks_know_their_folders(tmp_path: Path) -> None:
    folder = tmp_path / "a sweep"
    script = submitted(folder, "seed=1,2,3", "sweep.jobs=2", "cluster.cpus=4")
    assert "#SBATCH --array=0,1,2%2" in script
    assert f"--output='{folder}/task_%a.log'" in script
    assert 'src.engine.launch.node "$folder"' in script
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in script
    assert (folder / "array.txt").read_text().splitlines() == [f"{folder}/{job}" for job in range(3)]
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting"] * 3
    assert "#SBATCH --array=0,1\n" in submitted(tmp_path / "auto", "seed=1,2", "sweep.jobs=auto")


def test_tasks_bring_jobs_json_up_to_date_and_the_last_one_reports(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    submitted(folder, "seed=1,2,3")
    ended(folder, 1)
    ended(folder, 2, "interrupted")  # saved before its time was up, and goes on
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting", "done", "waiting"]
    assert not (folder / "report.html").exists()
    ended(folder, 0, "failed")
    ended(folder, 2)
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["failed", "done", "done"]
    assert read_jobs(folder).status == "done"
    assert (folder / "report.html").exists()


def test_resume_submits_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    submitted(folder, "seed=1,2,3", "sweep.jobs=2")
    ended(folder, 1)
    update(folder)
    arguments = get_args_parser().parse_args(["-m", f"sweep.resume={folder}"])
    assert run_sweep(arguments, lambda data: None) == 0
    assert "#SBATCH --array=0,2%2" in (folder / "job.sbatch").read_text()
    arguments.overrides.append("cluster.setup='module load cuda'")
    assert run_sweep(arguments, lambda data: None) == 0
    assert "module load cuda" in (folder / "job.sbatch").read_text(), "code is this command's"
    for word in ("optim.lr=0.1", "sweep.dry_run=true"):
        changed = get_args_parser().parse_args(["-m", f"sweep.resume={folder}", word])
        with pytest.raises(ValueError, match=f"{word.partition('=')[0]}: what goes on keeps its settings"):
            run_sweep(changed, lambda data: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cluster.cpus=1,2",), "one size"),
        (("search=optuna",), "cluster.submit=false"),
        (("sweep.timed=true", "sweep.jobs=2", "seed=1,2"), "times its jobs"),
    ],
)
def test_what_no_array_can_be_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        submitted(tmp_path / "sweep", *words)
    assert not (tmp_path / "sweep").exists()
