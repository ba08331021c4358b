"""Tests of a sweep that runs as one Slurm job array."""

from __future__ import annotations

from pathlib import Path

import pytest

from timm_parallel.lab.jobs.slurm_array import update
from timm_parallel.lab.multirun import run_multirun
from timm_parallel.patches import hydra_parser
from timm_parallel.record.jobs import read_jobs
from timm_parallel.record.result import Result, write_result

SMALL = (
    "model=tiny",
    "print_config=false",
    "parallel=single",
    "cluster=slurm",
    "cluster.submit=false",
)


def submitted(folder: Path, *words: str) -> str:
    """Write the Slurm script of a sweep with cluster.submit=false, and return its text."""
    arguments = hydra_parser().parse_args(["-m", *SMALL, f"hydra.sweep.dir={folder}", *words])
    assert run_multirun(arguments, lambda data: None, lambda data: None) == 0
    return (folder / "job.sbatch").read_text()


def ended(folder: Path, job: int, status: str = "done") -> None:
    write_result(
        folder / str(job),
        Result(status, strategy="single", devices=1, world_size=1, seconds={"total": 1.0}),
    )


@pytest.mark.slow(seconds=2)
def test_sweep_job_script_has_one_slurm_array_task_per_job_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a sweep"
    script = submitted(folder, "seed=1,2,3", "sweep.jobs=2", "cluster.cpus=4")
    assert "#SBATCH --array=0,1,2%2" in script
    assert f"--output='{folder}/task_%a.log'" in script
    assert 'timm_parallel.launch.node src.app:app "$folder"' in script
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in script
    assert (folder / "array.txt").read_text().splitlines() == [
        f"{job} {folder}/{job}" for job in range(3)
    ]
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting"] * 3
    assert "#SBATCH --array=0,1\n" in submitted(tmp_path / "auto", "seed=1,2", "sweep.jobs=auto")


@pytest.mark.slow(seconds=2)
def test_slurm_array_tasks_update_jobs_json_and_last_task_writes_sweep_report(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    submitted(folder, "seed=1,2,3")
    ended(folder, 1)
    # An interrupted job has saved a checkpoint before its time limit, and Slurm runs it again.
    ended(folder, 2, "interrupted")
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["waiting", "done", "waiting"]
    assert not (folder / "report.html").exists()
    ended(folder, 0, "failed")
    ended(folder, 2)
    update(folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["failed", "done", "done"]
    assert read_jobs(folder).status == "done"
    assert (folder / "report.html").exists()


@pytest.mark.slow(seconds=5)
def test_sweep_resume_submits_slurm_array_of_unfinished_jobs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    submitted(folder, "seed=1,2,3", "sweep.jobs=2")
    ended(folder, 1)
    update(folder)
    arguments = hydra_parser().parse_args(["-m", f"sweep.resume={folder}"])
    assert run_multirun(arguments, lambda data: None, lambda data: None) == 0
    assert "#SBATCH --array=0,2%2" in (folder / "job.sbatch").read_text()
    local = tmp_path / "slurm.sh"
    local.write_text("module load cuda\n")
    monkeypatch.setattr("timm_parallel.cluster.slurm.local_lines", lambda: local)
    assert run_multirun(arguments, lambda data: None, lambda data: None) == 0
    assert "\nmodule load cuda\n" in (folder / "job.sbatch").read_text(), (
        "expected the setup lines of the machine that submits the array"
    )
    for word in ("optim.lr=0.1", "sweep.dry_run=true"):
        changed = hydra_parser().parse_args(["-m", f"sweep.resume={folder}", word])
        with pytest.raises(ValueError, match=f"{word.partition('=')[0]}: .*sweep.resume="):
            run_multirun(changed, lambda data: None, lambda data: None)


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
        submitted(tmp_path / "sweep", *words)
    assert not (tmp_path / "sweep").exists()
