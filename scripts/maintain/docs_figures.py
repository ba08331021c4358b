"""Draws the figures of docs/: `make docs-figures`, or `python scripts/maintain/docs_figures.py [<sweep folder>]`.

docs/figures/step.<language>.svg draws one training step under dp and ddp. docs/figures/report.svg is the head of a report
with two of its plots: of the sample with invented figures, or of the sweep whose folder is given.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.sample_report import ROOT, write_sample

FIGURES = ROOT / "docs" / "figures"
# For light and dark pages. The background is part of the file, because the theme of a page may differ from the system's.
STYLE = """
svg { --ground: #ffffff; --ink: #1f2328; --quiet: #7d8590; --compute: #cfe6f7; --copy: #ffe0c2; --update: #d3efd0 }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --ink: #e6edf3; --quiet: #8b949e; --compute: #12476b; --copy: #70420f; --update: #1c5530 }
}
.ground { fill: var(--ground) }
"""
TEXT = """
text { font: 12px Helvetica, Arial, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; fill: var(--ink) }
.title { font-weight: bold; font-size: 14px } .quiet { fill: var(--quiet) } .middle { text-anchor: middle }
"""
DRAWING = """
.compute { fill: var(--compute) } .copy { fill: var(--copy) } .update { fill: var(--update) }
.idle { fill: none; stroke: var(--quiet); stroke-dasharray: 3 3 }
.arrow { stroke: var(--ink); stroke-width: 1.2; fill: none; marker-end: url(#head) } .both { marker-start: url(#head) }
.head { fill: var(--ink) }
"""
WORDS: dict[str, dict[str, Any]] = {
    "en": {
        "dp": "DataParallel: one process, a thread per device",
        "ddp": "DistributedDataParallel: a process per device",
        "device": "device {}",
        "rank": "rank {}",
        "scatter": "12 images",
        "chunk": "4 images",
        "replicate": "the model",
        "replica": "a replica",
        "forward": "forward, 4",
        "gather": "scores",
        "loss": "loss, 12",
        "own_loss": "loss, 4",
        "backward": "backward, 4",
        "reduce": "adds gradients",
        "send": "gradients",
        "step": "optimizer",
        "read": "own 4 images",
        "bucket": "bucket {}",
        "idle": "waits",
        "dropped": "dropped",
        "legend": ("computes", "is copied", "updates", "waits"),
        "ring": "all-reduce of each bucket as soon as its gradients are there: every rank sends and receives the same amount",
        "note": "One step with 12 images on three devices, from left to right; lengths are not to scale.",
    },
    "zh-CN": {
        "dp": "DataParallel：一个进程，每个设备一个线程",
        "ddp": "DistributedDataParallel：每个设备一个进程",
        "device": "设备 {}",
        "rank": "rank {}",
        "scatter": "12 张图像",
        "chunk": "4 张图像",
        "replicate": "模型",
        "replica": "副本",
        "forward": "前向，4 张",
        "gather": "输出",
        "loss": "损失，12",
        "own_loss": "损失，4",
        "backward": "反向，4 张",
        "reduce": "梯度相加",
        "send": "梯度",
        "step": "优化器",
        "read": "自己的 4 张",
        "bucket": "桶 {}",
        "idle": "等待",
        "dropped": "丢弃",
        "legend": ("计算", "复制", "更新", "等待"),
        "ring": "每个桶的梯度到齐后立即开始 all-reduce：各 rank 收发的数据量相同",
        "note": "三个设备、12 张图像的一个训练步，从左到右；长度不按比例。",
    },
}
LEFT, WIDTH, BOX, LANE = 84, 860, 28, 44  # pixels


@dataclass
class Drawing:
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, words: str, kind: str, height: float = BOX) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>')
        self.text(x + width / 2, y + height / 2 + 4, words, "middle quiet" if kind == "idle" else "middle")

    def path(self, way: str, kind: str = "arrow") -> None:
        self.parts.append(f'<path d="{way}" class="{kind}"/>')


def draw_step(language: str) -> str:
    """Draw a step under dp above one under ddp, as SVG text."""
    words, drawing = WORDS[language], Drawing()
    drawing.text(16, 28, str(words["dp"]), "title")
    draw_dp(drawing, words, top=44)
    drawing.text(16, 218, str(words["ddp"]), "title")
    draw_ddp(drawing, words, top=234)
    x = 16.0
    for kind, label in zip(("compute", "copy", "update", "idle"), words["legend"], strict=True):
        drawing.box(x, 446, 22, "", kind, height=14)
        drawing.text(x + 28, 457, label)
        x += 110
    drawing.text(16, 486, str(words["note"]), "quiet")
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>'
    )
    return framed(WIDTH, 500, head + "\n".join(drawing.parts), TEXT + DRAWING)


def draw_dp(drawing: Drawing, words: Mapping[str, object], top: float) -> None:
    columns = [("scatter", 90), ("replicate", 90), ("forward", 96), ("gather", 74), ("loss", 68), ("backward", 140)]
    columns += [("reduce", 114), ("step", 86)]
    others = {"scatter": "chunk", "replicate": "replica", "reduce": "send", "loss": "idle", "step": "dropped"}
    kinds = dict.fromkeys(("forward", "loss", "backward"), "compute") | {"step": "update"}
    for lane in range(3):
        y = top + lane * LANE
        drawing.text(16, y + 18, str(words["device"]).format(lane))
        x = float(LEFT)
        for name, width in columns:
            idle = lane > 0 and name in ("loss", "step")
            kind = "idle" if idle else kinds.get(name, "copy")
            bus = 16 if kind == "copy" else 6
            drawing.box(x, y, width - bus, str(words[others.get(name, name) if lane else name]), kind)
            # An arrow from or to device 0, next to the boxes between them.
            if lane and kind == "copy":
                right, middle, first = x + width - bus, y + BOX / 2, top + BOX / 2
                if name in ("scatter", "replicate"):
                    drawing.path(f"M{right:g} {first:g} h9 V{middle:g} h-9")
                else:
                    drawing.path(f"M{right:g} {middle:g} h9 V{first:g} h-9")
            x += width


def draw_ddp(drawing: Drawing, words: Mapping[str, object], top: float) -> None:
    lane_height, before_buckets = 62, 68
    columns = (("read", 90), ("forward", 96), ("own_loss", 68), ("backward", 160))
    for lane in range(3):
        y = top + lane * lane_height
        drawing.text(16, y + 18, str(words["rank"]).format(lane))
        x = float(LEFT)
        for name, width in columns:
            text = "" if name == "backward" else str(words[name])
            drawing.box(x, y, width - 6, text, "copy" if name == "read" else "compute")
            x += width
        begins = x - columns[-1][1]
        drawing.text(begins + 8, y + 18, str(words["backward"]))
        for bucket in range(3):
            left = begins + before_buckets + bucket * 56
            drawing.box(left, y + BOX + 4, 50, str(words["bucket"]).format(bucket + 1), "copy", height=17)
            if lane:
                drawing.path(f"M{left + 25:g} {y - lane_height + BOX + 23:g} V{y + BOX + 3:g}", "arrow both")
        drawing.box(begins + before_buckets + 3 * 56, y, 80, str(words["step"]), "update")
    drawing.text(LEFT, top + 3 * lane_height + 8, str(words["ring"]), "quiet")


def framed(width: float, height: float, contents: str, style: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">\n'
        f'<style>{STYLE}{style}</style>\n<rect width="{width:g}" height="{height:g}" rx="8" class="ground"/>\n'
        f"{contents}\n</svg>\n"
    )


def report_picture(sweep: Path) -> str:
    """Draw the first sentence of the report of `sweep` and two of its plots: speed, and the parts of a step."""
    lead = json.loads((sweep / "report.json").read_text(encoding="utf-8"))["lead"]
    drawing = Drawing()
    drawing.text(20, 34, lead["sentence"], "title")
    drawing.text(20, 56, f"{lead['group']}; {lead['hardware']}", "quiet")
    for x, name in ((14, "speed"), (506, "step")):
        plot = next((sweep / "report_plots").glob(f"*_{name}.svg")).read_text(encoding="utf-8")
        placed = re.sub("<svg", f'<svg x="{x}" y="72"', plot, count=1)
        drawing.parts.append(placed.replace("currentColor", "var(--ink)"))
    return framed(1000, 388, "\n".join(drawing.parts), TEXT)


def main() -> int:
    FIGURES.mkdir(exist_ok=True)
    for language in WORDS:
        (FIGURES / f"step.{language}.svg").write_text(draw_step(language), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        sweep = Path(sys.argv[1]) if len(sys.argv) > 1 else write_sample(Path(folder) / "sample").parent
        picture = report_picture(sweep)
    (FIGURES / "report.svg").write_text(picture, encoding="utf-8")
    print(f"{FIGURES}: {', '.join(sorted(path.name for path in FIGURES.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
