"""A fork after `make fork`: its own checks pass, and its commands work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from test_extend_pages import EXAMPLES
from test_wheel import run_in

from scripts.maintain.fork import main
from tests.template.repositories import NEEDS_GIT, git
from tests.template.runs import ROOT

pytestmark = [NEEDS_GIT, pytest.mark.processes]
# A tiny run of a second.
TINY = ("model=tiny", "data.limit_train=128", "data.batch_size=32", "train.epochs=1")


@pytest.fixture
def mine(whole_template: Path, wheel: Path, tmp_path: Path) -> Path:
    """Make a fork whose README is its own."""
    git(tmp_path, "clone", "-q", str(whole_template), "mine")
    folder = tmp_path / "mine"
    assert main(["mine", "--holder=Ada", f"--wheel={wheel}", f"--root={folder}"]) == 0
    (folder / "README.md").write_text("Own words.\n", encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "mine")
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.slow(seconds=90)
def test_make_lint_test_of_a_fork_passes_with_all_examples_of_docs_extend_md(
    mine: Path, environment: Path
) -> None:
    # Copy the cache of mypy if `make lint` has left one, because mypy takes half a minute to check
    # torch.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", mine / ".mypy_cache")
    for example in EXAMPLES.values():
        example.follow(mine)
    python = str(environment / "bin" / "python")
    run_in(mine, python, "scripts/schema.py")
    # The recipe of docs/quickstart.md.
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    [recipe] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (mine / "conf" / "experiment" / "second.yaml").write_text(recipe, encoding="utf-8")
    shown = run_in(mine, python, "train.py", "experiment=second", "--cfg", "job")
    assert "name: resnet50" in shown
    # Start no workers, because other tests run at the same time.
    run_in(mine, "make", f"VENV={environment}", "lint", "test", "ARGS=-n0")


@pytest.mark.timeout(1800)
@pytest.mark.nightly
@pytest.mark.slow(seconds=120)
def test_commands_of_a_fork_work_with_the_library_as_a_wheel(mine: Path, environment: Path) -> None:
    python = str(environment / "bin" / "python")

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        return run_in(mine, python, *words, codes=codes)

    library = run("-c", "import timm_parallel; print(timm_parallel.__file__)")
    assert Path(library).is_relative_to(environment)
    run("train.py", *TINY, "parallel=ddp", "parallel.devices=2", "hydra.run.dir=outputs/two")
    result = json.loads((mine / "outputs/two/result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["world_size"]) == ("done", 2)
    run("train.py", *TINY, "parallel=single", "train.max_steps=2", "hydra.run.dir=outputs/one")
    run("train.py", "resume=outputs/one", "train.max_steps=4")
    assert json.loads((mine / "outputs/one/result.json").read_text())["steps"] == 4
    run("evaluate.py", "run=outputs/two")
    Image.new("L", (8, 8)).save(mine / "photo.png")
    run("scripts/predict.py", "run=outputs/two", "images=photo.png", "output=labels.csv")
    assert (mine / "labels.csv").exists()
    run("scripts/export.py", "run=outputs/two")
    # Use jobs with one rank, which are forked from one server that imports torch once.
    sweep = ("-m", "parallel=single", "seed=1,2", "hydra.sweep.dir=outputs/sweep")
    run("train.py", *TINY, *sweep)
    assert len([*mine.glob("outputs/sweep/*/result.json")]) == 2
    with open(mine / "src/models/build.py", "a") as code:
        code.write("# changed\n")
    words = (*TINY, "parallel=single", "sweep.repeats=2")
    run("scripts/verdict.py", "base=HEAD", *words, codes=(0, 3, 4))
    slurm = ("cluster=slurm", "cluster.cpus=2", "cluster.submit=false")
    run("train.py", *slurm, "hydra.run.dir=outputs/job")
    assert (mine / "outputs/job/job.sbatch").exists()
