"""Build the documentation site in site/: `make docs`, or `python scripts/maintain/site.py [<sweep
folder>]`.

On GitHub, README.md links to docs/x.md, and pages link to ../README.md. On the site, all pages are
in one folder. So the script copies the pages, adapts their links, and builds the copy. The sample
report has invented figures, or is that of the given sweep. A broken link makes the build fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.sample_report import ROOT, write_sample

AT_ROOT = {"README.md": "index.md", "README.zh-CN.md": "README.zh-CN.md"}
AT_ROOT |= {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")}
SAMPLE = """# A sample report

This is the page that a sweep ends with, on **invented figures** of eight GPUs:
<a href="sample_report/report.html">open the report</a>.
"""


NOTICE = (
    '<p style="background:#ffe0c2;color:#1f2328;padding:.6em">A sample with invented '
    "figures: no machine measured them.</p>"
)


def collect_pages(target: Path) -> None:
    """Copy all documentation pages into one folder, and adapt their links to this folder."""
    shutil.copytree(ROOT / "docs", target)
    shutil.copytree(
        ROOT / "examples", target / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, copied in AT_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
        (target / copied).write_text(text, encoding="utf-8")
    for page in target.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\.\./)?README\.md", "](index.md", text)
        page.write_text(re.sub(r"\]\(\.\./", "](", text), encoding="utf-8")


def add_sample(target: Path, sweep: Path | None) -> None:
    """Add a report to the site, with the files that it links to. Without a sweep folder, it is a
    sample with invented figures.
    """
    if sweep is None:
        write_sample(target / "sample_report")
        (target / "sample_report.md").write_text(SAMPLE, encoding="utf-8")
        report = target / "sample_report" / "report.html"
        text = report.read_text(encoding="utf-8")
        assert "<body>" in text
        report.write_text(text.replace("<body>", f"<body>\n{NOTICE}"), encoding="utf-8")
    else:
        shutil.copytree(
            sweep,
            target / "sample_report",
            ignore=shutil.ignore_patterns("checkpoints", "tensorboard"),
        )
        (target / "sample_report.md").write_text(
            SAMPLE.replace("invented figures** of eight GPUs", "a real sweep**")
        )
    # Remove Markdown files of the report, because the site would show each as a page.
    for page in (target / "sample_report").rglob("*.md"):
        page.unlink()


def build(target: Path, sweep: Path | None = None, extra: str = "") -> int:
    """Build the documentation site in a folder. `extra`: text to append to the first page. Return
    the exit code of mkdocs.
    """
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "docs"
        collect_pages(pages)
        with open(pages / "index.md", "a", encoding="utf-8") as file:
            file.write(extra)
        add_sample(pages, sweep)
        shutil.copy(ROOT / "mkdocs.yml", folder)
        # Do not pass --quiet, because it would hide the warnings that make --strict fail.
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    code = build(ROOT / "site", Path(arguments[0]) if arguments else None)
    if code == 0:
        print("site/index.html is built; with search: python -m http.server --directory site")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
