"""Run the commands whose output the pages show, and write their new output into the pages: `make
docs-outputs`, or `python scripts/maintain/docs_outputs.py docs/resume.md`.

In a page, a comment with the command is directly above a block with the output. The regular
expression `lines` selects the lines of the output to show:

    <!-- output of: make -s train
         lines: epoch|metrics -->

The commands run in a copy of the project, in the order of the page, so a command finds the runs of
earlier commands. In a command, `<run>` stands for the newest run and `<sweep>` for the newest
sweep. `/data/flowers` is a folder of drawn images with a folder for each class, and `/data/new` a
folder of a few images without labels.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = r"<!-- output of: (?P<command>.*?)(?:\n +lines: (?P<lines>.*?))? -->"
OUTPUT = re.compile(rf"(?P<mark>{MARK}\n```\n)(?P<shown>.*?)(?=```)", re.DOTALL)
# Dictionary from the class of a drawn flower to its number of petals.
FLOWERS = {"daisy": 12, "rose": 6, "tulip": 3}
# Exit codes: done, wrong argument, stopped by the command timeout.
EXPECTED_CODES = (0, 2, 124)


def draw_flowers(root: Path) -> None:
    """Draw a dataset of flower images: for each class, 100 images in its folder, and two more in a
    folder without labels.
    """
    draws = random.Random(0)
    for name, petals in FLOWERS.items():
        for number in range(102):
            image = Image.new("RGB", (96, 96), tuple(draws.randrange(30, 130) for _ in range(3)))
            canvas, color = (
                ImageDraw.Draw(image),
                tuple(draws.randrange(100, 256) for _ in range(3)),
            )
            turn = draws.uniform(0, math.tau)
            # Many petals are thin, so that they do not overlap.
            radius = min(12, 72 / petals)
            for petal in range(petals):
                angle = turn + petal * math.tau / petals
                x, y = 48 + 24 * math.cos(angle), 48 + 24 * math.sin(angle)
                canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
            path = (
                root / "flowers" / name / f"{number}.jpg"
                if number < 100
                else root / "new" / f"{name}_{number - 100}.jpg"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def copy_project(target: Path) -> None:
    """Copy the files of the working tree, except those that git ignores, and link the virtual
    environment.
    """
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / ".venv").symlink_to(Path(sys.prefix))


def captured(command: str, lines: str | None, project: Path, data: Path) -> str:
    """Run a shell command in the copy of the project. Return the lines of its output that match a
    regular expression.
    """
    for task, name in (("[!s]*", "<run>"), ("sweeps", "<sweep>")):
        folders = project.glob(f"outputs/{task}/*/*/")
        newest = sorted(folders, key=lambda folder: folder.parts[-2:])[-1:]
        command = command.replace(name, str(newest[0].relative_to(project)) if newest else name)
    command = command.replace("/data/", f"{data}/")
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
    shell = ["bash", "-c", f"exec 2>&1; {command}"]
    done = subprocess.run(
        shell, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode not in EXPECTED_CODES:
        raise RuntimeError(
            f"{command}: exited with code {done.returncode}, expected one of {EXPECTED_CODES}\n"
            f"{done.stdout}"
        )
    text = done.stdout.replace(f"{data}/", "/data/").replace(f"{project}/", "")
    shown = [
        line.rstrip() for line in text.splitlines() if line.strip() and re.search(lines or "", line)
    ]
    if not shown:
        raise RuntimeError(
            f"{command}: no line of the output matches the pattern {lines}\n{done.stdout}"
        )
    return "".join(f"{line}\n" for line in shown)


def main(names: list[str]) -> int:
    pages = [Path(name).resolve() for name in names] or PAGES
    with tempfile.TemporaryDirectory() as folder:
        project, data, results = (
            Path(folder) / "project",
            Path(folder) / "data",
            dict[tuple[str, str | None], str](),
        )
        copy_project(project)
        draw_flowers(data)
        for page in pages:
            text = page.read_text(encoding="utf-8")
            for block in OUTPUT.finditer(text):
                key = (block["command"], block["lines"])
                # Run a command only once, even if several pages show it, such as both languages of
                # the README.
                results[key] = results.get(key) or captured(*key, project, data)
                print(f"{page.name}: {key[0]}", flush=True)
            page.write_text(
                OUTPUT.sub(lambda m: m["mark"] + results[m["command"], m["lines"]], text),
                encoding="utf-8",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
