"""Sweeps that never ran, with figures chosen by the test, and what the report says of them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.engine.machine.files import write_json
from src.engine.record.result import FORMAT, Result, write_result
from src.engine.report.claims import judge
from src.engine.report.collect import collect
from src.engine.report.comparison import group
from src.engine.report.evidence import FAILS, HOLDS, UNMEASURED
from src.engine.report.measured import Run
from src.engine.report.report import write_report

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
SPEEDS = {("single", 1): 1000, ("dp", 2): 1500, ("dp", 4): 1750, ("ddp", 2): 1900, ("ddp", 4): 3600}


class Sweep:
    """A sweep folder under construction; `write` makes it readable."""

    def __init__(self, folder: Path, accelerator: str = "cuda", cores: int = 16) -> None:
        self.folder, self.accelerator, self.cores = folder, accelerator, cores
        self.jobs: list[dict[str, Any]] = []
        folder.mkdir(parents=True)

    def add(
        self,
        strategy: str,
        devices: int,
        speed: float = 1000.0,
        per_device: int | None = None,
        config: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        """One finished job. `changes` replace fields of its Result; `config` and `options` keys of its config."""
        name = str(len(self.jobs))
        folder = self.folder / name
        batch = per_device * devices if per_device else 64
        result = self._result(strategy, devices, speed, batch)
        for key, value in changes.items():
            setattr(result, key, value)
        write_result(folder, result)
        write_json(folder / "environment.json", self._environment())
        data = {"batch_size": None, "batch_size_per_device": per_device} if per_device else {"batch_size": batch}
        frozen = {
            "seed": 42,
            "model": {"name": "resnet18", "kwargs": {}},
            "data": {"name": "digits", **data},
            "parallel": {"strategy": strategy, "devices": devices, "accelerator": self.accelerator, **(options or {})},
            "optim": {"lr": 0.001},
            **(config or {}),
        }
        (folder / "config.yaml").write_text(yaml.safe_dump({"defaults": ["schema", "_self_"], **frozen}))
        lines = [
            {"step": 25 * n, "epoch": n, "time": n * 64000 / speed, "val/loss": 1 / n, "val/acc": 0.97 - 0.5 / n**1.5}
            for n in range(1, 13)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.row(f"parallel={strategy}", f"parallel.devices={devices}", status=result.status, reason=result.reason)
        return folder

    def repeat(self, strategy: str, devices: int, speeds: Iterable[float], **changes: Any) -> None:
        for speed in speeds:
            self.add(strategy, devices, speed, **changes)

    def row(self, *overrides: str, status: str, reason: str = "") -> None:
        """A job of jobs.json; without a folder unless `add` made one."""
        number = len(self.jobs)
        self.jobs.append(
            {"id": number, "name": f"{number}_x", "folder": str(number), "overrides": overrides, "repeat": 0}
            | {"config_hash": "ab12", "status": status, "reason": reason, "started": None, "ended": None}
        )

    def write(self, status: str = "done") -> Path:
        command = "python train.py -m parallel=single,dp,ddp parallel.devices=1,2,4"
        record = {"format": 1, "command": command, "created": "2026-11-20T21:00:00", "status": status}
        write_json(self.folder / "jobs.json", record | {"jobs": self.jobs})
        return self.folder

    def _result(self, strategy: str, devices: int, speed: float, batch: int) -> Result:
        ranks = devices if strategy == "ddp" else 1
        step_ms = 1000 * batch / speed
        threads_only = strategy == "dp" and self.accelerator == "cpu"
        peaks = [4 * GIB] * devices if strategy != "dp" else [6 * GIB] + [2 * GIB] * (devices - 1)
        utilisation = 0.9 if strategy != "dp" else 0.4
        proof: dict[str, Any] = {"optimizers": ranks, "files_per_rank": {"0": 9} | {str(r): 1 for r in range(1, ranks)}}
        if strategy == "ddp":
            proof |= {"hashes_equal": True, "parameters_hash_start": "11", "backend_reason": "fits the accelerator"}
            proof |= {"indices_seen": 1440, "indices_distinct": 1440, "indices_expected": 1440}
        if strategy == "dp":
            proof |= {"chunk_sizes": [batch // devices] * devices}
        return Result(
            status="done",
            strategy=strategy,
            accelerator=self.accelerator,
            devices=devices,
            threads_per_device=1,
            world_size=devices,
            processes=ranks,
            backend={"cuda": "nccl", "cpu": "gloo"}[self.accelerator] if strategy == "ddp" else None,
            model="resnet18",
            parameters=11_000_000,
            batch_size=batch,
            steps=300,
            epochs=12,
            val={"loss": 0.1, "acc": 0.957},
            throughput={"images_per_sec": speed, "spread": 0.01, "step_ms": step_ms, "steps_timed": 250},
            memory=[
                {"device": n, "peak_bytes": peak, "utilisation": utilisation}
                | ({"shared": True} if threads_only else {})
                for n, peak in enumerate(peaks)
            ],
            cpu={"seconds_per_second": 1.0 * ranks},
            data_wait=0.06,
            communication={
                "bytes_per_step": {"single": None, "dp": 9e7 * devices, "ddp": 4.4e7}[strategy],
                "ms_per_step": step_ms * 0.3 if strategy == "ddp" else None,
                "exposed_ms_per_step": step_ms * 0.08 if strategy == "ddp" else None,
            },
            seconds={"start_to_first_step": 4.0 + 0.02 * speed / 1000 + 3 * (ranks > 1), "total": 80.0},
            proof=proof,
        )

    def _environment(self) -> dict[str, Any]:
        device = {"name": "NVIDIA H200", "memory_bytes": 140 * GIB}
        return {
            "format": 1,
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "host": "node1",
            "commit": "0123abc",
            "dirty": False,
            "libraries": {"torch": "2.14.1", "timm": "1.0.31"},
            "cpu": {"model": "EPYC 9554", "cores": self.cores, "memory_bytes": 128 * GIB},
            "devices": [{"index": n, **device} for n in range(4)] if self.accelerator == "cuda" else [],
            "cuda": "13.0",
        }


@pytest.fixture(autouse=True)
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are most of a report's time: drawn only where a test asks for `plots`."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("src.engine.report.plots.draw", lambda members: [])


@pytest.fixture
def plots() -> None:
    pass


def full_sweep(folder: Path, speeds: dict[tuple[str, int], float] | None = None, **kwargs: Any) -> Sweep:
    """Three repeats of every point, 1 % apart."""
    sweep = Sweep(folder, **kwargs)
    for (strategy, devices), speed in (speeds or SPEEDS).items():
        sweep.repeat(strategy, devices, [speed, speed * 0.99, speed * 1.01])
    return sweep


def verdicts(*folders: Path) -> dict[int, str]:
    runs = collect(list(folders))
    return {claim.number: claim.verdict for claim in judge(group(runs), runs)}


def read(folder: Path, *more: Path) -> tuple[str, str, dict[str, Any]]:
    """(HTML, Markdown, JSON) of the report on `folder` and `more`."""
    html = write_report([folder, *more])
    markdown = html.with_suffix(".md").read_text(encoding="utf-8")
    return html.read_text(encoding="utf-8"), markdown, json.loads(html.with_suffix(".json").read_text(encoding="utf-8"))


def test_first_sentence_names_the_fastest_point_and_its_command(tmp_path: Path) -> None:
    _, markdown, plain = read(full_sweep(tmp_path / "s").write())
    first = plain["recommendations"][0]
    assert first["sentence"].startswith("Use ddp on 4 devices: expect 3,600")
    assert "3.60× single on 1 device (efficiency 0.900)" in first["sentence"]
    assert first["command"] == "python train.py parallel=ddp parallel.devices=4"
    assert first["sentence"].split(":")[0] in markdown


def test_first_sentence_follows_the_figures(tmp_path: Path) -> None:
    speeds = SPEEDS | {("ddp", 4): 500.0, ("ddp", 2): 600.0, ("dp", 2): 700.0, ("dp", 4): 800.0}
    _, _, plain = read(full_sweep(tmp_path / "s", speeds).write())
    assert plain["recommendations"][0]["sentence"].startswith("Use single on 1 device: expect 1,000")


def test_figures_of_a_point_are_medians_of_its_repeats(tmp_path: Path) -> None:
    _, _, plain = read(full_sweep(tmp_path / "s").write())
    point = next(p for p in plain["groups"][0]["points"] if (p["strategy"], p["devices"]) == ("ddp", 2))
    assert point["images_per_sec"] == {"median": 1900, "low": 1881.0, "high": 1919.0, "count": 3}
    assert point["speed_up"]["median"] == pytest.approx(1.9)
    assert point["efficiency"]["median"] == pytest.approx(0.95)
    assert [peak["median"] for peak in point["peak_bytes"]] == [4 * GIB, 4 * GIB]


def test_overlapping_ranges_are_not_ranked(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010, 990])
    sweep.repeat("dp", 2, [1500, 1700, 1600])
    sweep.repeat("ddp", 2, [1550, 1800, 1650])
    html, _, plain = read(sweep.write())
    assert "ranges overlap: no order among them" in html
    assert plain["groups"][0]["ranking"] == [["ddp × 2", "dp × 2"], ["single × 1"]]
    assert "overlaps with that of ddp on 2 devices" in plain["recommendations"][0]["sentence"]
    assert verdicts(sweep.folder)[1] == UNMEASURED


@pytest.mark.parametrize("repeats", [1, 2])
def test_too_few_repeats_are_not_ranked(tmp_path: Path, repeats: int) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000] * repeats)
    sweep.repeat("dp", 2, [1500] * repeats)
    sweep.repeat("ddp", 2, [1900] * repeats)
    html, _, plain = read(sweep.write())
    assert "Too few repeats to rank" in html
    assert f"ddp × 2 has {repeats}" in html
    assert plain["groups"][0]["ranking"] == []
    assert verdicts(sweep.folder)[1] == verdicts(sweep.folder)[2] == UNMEASURED


def test_all_claims_are_there_once_and_in_order(tmp_path: Path) -> None:
    _, _, plain = read(full_sweep(tmp_path / "s").write())
    claims = plain["machines"][0]["claims"]
    assert [claim["number"] for claim in claims] == list(range(1, 18))
    assert {claim["verdict"] for claim in claims} <= {HOLDS, FAILS, UNMEASURED}
    assert all(claim["runs"] for claim in claims if claim["verdict"] != UNMEASURED)
    assert all(claim["reason"] for claim in claims if claim["verdict"] == UNMEASURED)


def test_claims_hold_on_figures_that_bear_them_out(tmp_path: Path) -> None:
    found = verdicts(full_sweep(tmp_path / "s").write())
    expected = dict.fromkeys(range(1, 18), HOLDS) | {6: UNMEASURED, 10: UNMEASURED, 14: UNMEASURED}
    assert found == expected


# claim -> what is changed in the runs of which strategy, so that the claim no longer holds
FLIPS: dict[int, tuple[str, dict[str, Any]]] = {
    3: ("dp", {"memory": [{"device": n, "peak_bytes": GIB} for n in range(2)]}),
    4: ("ddp", {"memory": [{"device": n, "peak_bytes": (n + 1) * GIB} for n in range(2)]}),
    5: ("ddp", {"cpu": {"seconds_per_second": 0.5}}),
    7: ("ddp", {"communication": {"bytes_per_step": 1e9}}),
    8: ("ddp", {"proof": {"hashes_equal": False}}),
    9: ("ddp", {"proof": {"indices_seen": 10, "indices_distinct": 9, "indices_expected": 10}}),
    11: ("ddp", {"seconds": {"start_to_first_step": 0.1}}),
    12: ("ddp", {"proof": {"files_per_rank": {"0": 5, "1": 5}}}),
    13: ("ddp", {"backend": "gloo"}),
    16: ("ddp", {"memory": [{"device": n, "peak_bytes": GIB, "utilisation": 0.1} for n in range(2)]}),
    17: ("dp", {"proof": {"optimizers": 2}}),
}


@pytest.mark.parametrize("number", FLIPS)
def test_verdict_flips_with_its_figure(tmp_path: Path, number: int) -> None:
    changed, changes = FLIPS[number]
    for name, altered in (("as_claimed", {}), ("against", changes)):
        sweep = Sweep(tmp_path / name)
        for strategy, devices, speed in (("single", 1, 1000), ("dp", 2, 1500), ("ddp", 2, 1900)):
            sweep.repeat(strategy, devices, [speed, speed + 9, speed - 9], **(altered if strategy == changed else {}))
        sweep.write()
    assert verdicts(tmp_path / "as_claimed")[number] == HOLDS
    assert verdicts(tmp_path / "against")[number] == FAILS


@pytest.mark.parametrize(
    ("speeds", "number", "expected"),
    [
        ({("ddp", 2): 1400, ("ddp", 4): 1600}, 1, FAILS),
        ({("ddp", 4): 1800}, 1, FAILS),  # faster on 4 devices, but its lead has shrunk
        ({("ddp", 4): 2000}, 2, FAILS),
        ({("ddp", 2): 1900, ("ddp", 4): 3600}, 2, HOLDS),
    ],
)
def test_speed_claims_flip_with_speed(
    tmp_path: Path, speeds: dict[tuple[str, int], float], number: int, expected: str
) -> None:
    assert verdicts(full_sweep(tmp_path / "s", SPEEDS | speeds).write())[number] == expected


def test_small_layers_are_weighed_against_large_ones(tmp_path: Path) -> None:
    def deep(depth: int) -> dict[str, Any]:
        return {"model": {"name": "vit", "kwargs": {"depth": depth}}}

    for name, many in (("slow", 1100), ("fast", 1990)):
        sweep = Sweep(tmp_path / name)
        for depth, speed in ((24, many), (2, 1800)):
            sweep.repeat("single", 1, [1000, 1001, 999], config=deep(depth))
            sweep.repeat("dp", 2, [speed, speed + 1, speed - 1], config=deep(depth))
        sweep.write()
    assert verdicts(tmp_path / "slow")[6] == HOLDS
    assert verdicts(tmp_path / "fast")[6] == FAILS


def test_unequal_chunks_and_refused_batches_show_claim_10(tmp_path: Path) -> None:
    unequal = Sweep(tmp_path / "unequal")
    unequal.add("dp", 2, proof={"chunk_sizes": [4, 3]})
    assert verdicts(unequal.write())[10] == HOLDS
    refused = Sweep(tmp_path / "refused")
    refused.add("dp", 2)
    refused.row("parallel=dp", "parallel.devices=4", status="skipped", reason="data.batch_size=2: fewer than 4 devices")
    assert verdicts(refused.write())[10] == HOLDS


@pytest.mark.usefixtures("plots")
def test_dp_on_cpu_is_not_measured(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s", accelerator="cpu")
    html, markdown, plain = read(sweep.write())
    found = verdicts(sweep.folder)
    assert {found[n] for n in (1, 3, 5, 6, 7, 16)} == {UNMEASURED}
    assert found[2] == HOLDS  # ddp on CPU is processes: its speed is its own
    assert "threads on CPU" in html
    row = next(line for line in markdown.splitlines() if line.startswith("| dp × 2"))
    assert row.count("n/a") == 5  # images/s, speed-up, efficiency, ms per step, exposed communication
    assert not any("dp × 2" in tier for tier in plain["groups"][0]["ranking"])


def test_more_threads_than_cores_are_marked(tmp_path: Path) -> None:
    html, _, _ = read(full_sweep(tmp_path / "s", accelerator="cpu", cores=2).write())
    assert "ddp × 4 †" in html
    assert "4 threads on 2 cores" in html
    assert "ddp × 2 †" not in html


def test_strong_and_weak_scaling_share_no_table(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    for devices, speed in ((1, 1000), (2, 1980)):
        sweep.repeat("single" if devices == 1 else "ddp", devices, [speed, speed + 1, speed - 1], per_device=64)
    html, markdown, plain = read(sweep.write())
    assert [(g["kind"], g["batch"]) for g in plain["groups"]] == [("strong", 64), ("weak", 64)]
    assert [len(g["points"]) for g in plain["groups"]] == [5, 2]
    for text in (html, markdown):
        assert "strong scaling, global batch 64" in text
        assert "weak scaling, batch 64 per device" in text


def test_machines_are_kept_apart(tmp_path: Path) -> None:
    first, second = full_sweep(tmp_path / "a"), full_sweep(tmp_path / "b", accelerator="cpu")
    html, _, plain = read(first.write(), second.write())
    assert [machine["hardware"].split(";")[0] for machine in plain["machines"]] == [
        "CPU: EPYC 9554, 16 cores",
        "NVIDIA H200",
    ]
    assert all(len(g["points"]) == 5 for g in plain["groups"])
    assert 'href="../b/0/result.json"' in html


@pytest.mark.usefixtures("plots")
def test_options_make_points_and_settings_make_groups(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.add("single", 1, 1000)
    for bucket in (1, 25):
        sweep.add("ddp", 2, 1900, options={"bucket_cap_mb": bucket})
    sweep.add("ddp", 2, 1000, config={"train": {"precision": "bf16"}}, options={"bucket_cap_mb": 25})
    _, _, plain = read(sweep.write())
    assert [[p["options"] for p in g["points"]] for g in plain["groups"]] == [
        ["", "bucket_cap_mb=1", "bucket_cap_mb=25"],
        [""],
    ]
    assert plain["groups"][1]["settings"] == "train.precision=bf16"


def test_unfinished_sweep_says_how_much_is_done(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1001, 999])
    sweep.add("ddp", 2, status="out_of_memory", reason="CUDA out of memory on rank 1 <b>&")
    sweep.row("parallel=ddp", "parallel.devices=4", status="running")
    sweep.row("parallel=single", "parallel.devices=2", status="skipped", reason="single has 1 device")
    sweep.row("parallel=ddp", "parallel.devices=8", status="waiting")
    html, markdown, plain = read(sweep.write("running"))
    assert plain["counts"] == "3 of 7 jobs done, 1 out of memory, 1 running, 1 skipped, 1 waiting"
    assert plain["counts"] in html and plain["counts"] in markdown
    assert "single has 1 device" in html
    assert "CUDA out of memory on rank 1 &lt;b&gt;&amp;" in html


def test_sweep_of_which_nothing_is_done_has_a_report(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.row("parallel=ddp", status="waiting")
    html, markdown, plain = read(sweep.write("running"))
    assert "No job has finished" in html and "No job has finished" in markdown
    assert plain["counts"] == "0 of 1 jobs done, 1 waiting"


@pytest.mark.usefixtures("plots")
def test_missing_fields_are_dashes(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.row("parallel=ddp", "parallel.devices=2", status="done")
    folder = sweep.write() / "0"
    write_result(folder, Result(status="done", strategy="ddp", devices=2, accelerator="cpu"))
    _, markdown, plain = read(sweep.folder)
    row = next(line for line in markdown.splitlines() if line.startswith("| ddp × 2"))
    assert row.count("—") == 7  # images/s to first step
    point = plain["groups"][0]["points"][0]
    assert point["images_per_sec"] is None and point["peak_bytes"] == []


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize(
    "values",
    [
        {"throughput": None, "memory": None, "communication": None, "seconds": None, "cpu": None, "val": None},
        {"throughput": {"images_per_sec": "fast"}, "memory": [{"device": 0}], "proof": None, "data_wait": None},
    ],
)
def test_fields_of_other_types_are_not_numbers(tmp_path: Path, values: dict[str, Any]) -> None:
    sweep = Sweep(tmp_path / "s")
    path = sweep.add("ddp", 2) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    _, _, plain = read(sweep.write())
    assert plain["groups"][0]["points"][0]["images_per_sec"] is None


def test_wrong_world_size_is_not_compared(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.add("ddp", 2, 9999, world_size=1)
    html, _, plain = read(sweep.write())
    assert "2 devices asked, world size 1 measured: not compared" in html
    assert all(p["images_per_sec"]["high"] < 9999 for g in plain["groups"] for p in g["points"])


def test_single_run_folder_is_a_report_of_one(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    run = sweep.add("single", 1)
    html, _, plain = read(run)
    assert plain["counts"] == "1 of 1 jobs done"
    assert 'href="result.json"' in html
    assert "--config-path" in plain["recommendations"][0]["command"]


def _cut_off(folder: Path) -> None:
    (folder / "jobs.json").write_text('{"format": 1, "jobs": [{"id"')


def _no_jobs(folder: Path) -> None:
    path = folder / "jobs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jobs": []}))


def _half_result(folder: Path) -> None:
    path = folder / "0" / "result.json"
    path.write_text(path.read_text()[:40])


def _newer(name: str) -> Any:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))

    return change


@pytest.mark.parametrize(
    ("damage", "named", "words"),
    [
        (lambda folder: (folder / "jobs.json").unlink(), "", "no jobs.json and no result.json"),
        (lambda folder: (folder / "jobs.json").write_text("[]"), "jobs.json", "not of this project"),
        (lambda folder: (folder / "jobs.json").write_text('{"jobs": 3}'), "jobs.json", "not of this project"),
        (_no_jobs, "", "a sweep without jobs"),
        (_cut_off, "jobs.json", "damaged"),
        (_half_result, "0/result.json", "cannot be read as JSON"),
        (lambda folder: (folder / "0" / "config.yaml").write_text("a: [1"), "0/config.yaml", "as YAML"),
        (_newer("jobs.json"), "jobs.json", "newer than this code reads"),
        (_newer("0/result.json"), "0/result.json", "newer than this code reads"),
    ],
)
def test_bad_folder_is_one_line_with_its_path(tmp_path: Path, damage: Any, named: str, words: str) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.add("single", 1)
    damage(sweep.write())
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        write_report([sweep.folder])
    assert str(sweep.folder / named) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (sweep.folder / "report.html").exists()


def test_older_result_is_read(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    path = sweep.add("single", 1) / "result.json"
    path.write_text(json.dumps({"status": "done", "format": 0, "strategy": "single", "devices": 1, "gone": 1}))
    assert read(sweep.write())[2]["counts"] == "1 of 1 jobs done"


@pytest.mark.usefixtures("plots")
def test_html_stands_alone(tmp_path: Path) -> None:
    html, _, _ = read(full_sweep(tmp_path / "s").write())
    assert html.count("<svg") == 5
    assert not re.search(r"<script|<link|@import|url\((?!#)", html)
    outside = {address for address in re.findall(r'(?:href|src)="([^"#]+)"', html) if "//" in address}
    assert not outside
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert ids and len(ids) == len(set(ids))


def test_every_link_leads_to_a_result(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "a sweep")
    html, markdown, plain = read(sweep.write())
    links = set(re.findall(r'<a href="([^"]+)"', html))
    assert links == {f"{n}/result.json" for n in range(15)}
    assert all((sweep.folder / link).is_file() for link in links)
    assert "[0](0/result.json)" in markdown
    assert all(p["runs"] for g in plain["groups"] for p in g["points"])


def test_csv_has_one_row_per_run(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.row("parallel=single", "parallel.devices=2", status="skipped", reason="one, two\nthree")
    rows = list(csv.DictReader(write_report([sweep.write()]).with_suffix(".csv").open(encoding="utf-8")))
    assert len(rows) == 16
    assert float(rows[0]["images_per_sec"]) == 1000
    assert rows[-1]["images_per_sec"] == "" and rows[-1]["reason"] == "one, two three"


def test_report_goes_where_it_is_told(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    html = write_report([sweep.write()], tmp_path / "elsewhere")
    assert html == tmp_path / "elsewhere" / "report.html"
    assert "../s/0/result.json" in html.read_text()
    assert {path.name for path in html.parent.iterdir()} == {f"report.{kind}" for kind in ("html", "md", "csv", "json")}


@pytest.mark.usefixtures("plots")
def test_report_is_the_same_twice(tmp_path: Path) -> None:
    folder = full_sweep(tmp_path / "s").write()
    assert read(folder) == read(folder)


@pytest.mark.usefixtures("plots")
def test_time_is_linear_in_runs_and_size_bounded(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    for number in range(150):  # a search: every run has settings of its own
        sweep.add("ddp", 2, 1000 + number, config={"optim": {"lr": number / 1000}})
    started = time.monotonic()
    html = write_report([sweep.write()])
    assert time.monotonic() - started < 12
    assert html.stat().st_size < 2e6


def test_script_prints_the_place_or_refuses_with_2(tmp_path: Path) -> None:
    folder = full_sweep(tmp_path / "s", {("single", 1): 1000}).write()

    def script(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/report.py", str(path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = script(folder)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder / "report.html"))
    refused = script(tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and str(tmp_path) in refused.stderr


def test_run_without_a_record_has_no_number(tmp_path: Path) -> None:
    run = Run("0", tmp_path, "waiting", overrides=("parallel=ddp", "parallel.devices=2"))
    assert (run.strategy, run.devices, run.comparable) == ("ddp", 2, False)
    assert run.images_per_sec is None and run.accuracy is None and run.peak_bytes == []
