"""Files of a report: contents, location and error messages."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import report as script
from tests.template.runs import run_python
from timm_parallel.lab.report.report import write_report
from timm_parallel.record.result import FORMAT
from timm_parallel.testing.report_sweeps import GIB, Sweep, full_sweep, read

pytestmark = pytest.mark.usefixtures("without_plots")


def test_report_shows_median_and_range_of_speed_over_repeats(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s", {("single", 1): 1000})
    sweep.repeat("ddp", 2, [1900, 1881, 1919])
    point = read(sweep.write())[2]["points"][1]
    assert point["images_per_sec"] == {"median": 1900, "low": 1881.0, "high": 1919.0, "count": 3}
    assert point["over_single"]["ratio"] == pytest.approx(1.9, rel=0.01)
    assert point["efficiency"] == pytest.approx(0.95, rel=0.01)
    assert [peak["median"] for peak in point["peak_bytes"]] == [4 * GIB, 4 * GIB]


def test_report_explains_that_dp_on_cpu_uses_threads_and_omits_the_speed_of_dp(
    tmp_path: Path,
) -> None:
    sweep = full_sweep(tmp_path / "s", accelerator="cpu")
    html, markdown, _ = read(sweep.write())
    assert "threads on CPU" in html
    row = next(line for line in markdown.splitlines() if line.startswith("| dp × 2"))
    # Five columns of the table depend on speed: images/s, the speed ratio, the median and the 95 %
    # quantile of the step time, and the exposed communication time.
    assert row.count("n/a") == 5


def test_report_marks_configurations_with_more_threads_than_cores_of_a_node(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s", accelerator="cpu", cores=2)
    # Four devices on two nodes have a core each.
    sweep.repeat("ddp", 4, [3600, 3610, 3590], nodes=2)
    html, _, plain = read(sweep.write())
    assert "4 threads on 2 cores" in html
    crowded = {p["label"]: p["needless_threads"] for p in plain["points"] if p["needless_threads"]}
    assert crowded == {"dp × 4": [4, 2], "ddp × 4": [4, 2]}
    assert "ddp × 4 †" in html and "ddp × 2 †" not in html


def test_report_puts_strong_and_weak_scaling_runs_into_separate_groups(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    for devices, speed in ((1, 1000), (2, 1980)):
        sweep.repeat(
            "single" if devices == 1 else "ddp",
            devices,
            [speed, speed + 1, speed - 1],
            per_device=64,
        )
    html, markdown, plain = read(sweep.write())
    assert [(g["kind"], g["batch"]) for g in plain["groups"]] == [("strong", 64), ("weak", 64)]
    assert [len(g["points"]) for g in plain["groups"]] == [5, 2]
    for text in (html, markdown):
        assert "strong scaling, global batch 64" in text
        assert "weak scaling, batch 64 per device" in text


def test_report_groups_runs_by_machine_and_evaluates_dp_and_ddp_claims_for_each_machine(
    tmp_path: Path,
) -> None:
    first, second = full_sweep(tmp_path / "a"), full_sweep(tmp_path / "b", accelerator="cpu")
    html, _, plain = read(first.write(), second.write())
    assert {g["hardware"].split(";")[0] for g in plain["groups"]} == {
        "CPU: EPYC 9554, 16 cores",
        "NVIDIA H200",
    }
    numbers = [claim["number"] for claim in plain["claims"]]
    assert numbers == 2 * numbers[: len(numbers) // 2] and len(set(numbers)) > 1
    assert all(len(g["points"]) == 5 for g in plain["groups"])
    assert 'href="../b/0/result.json"' in html


def test_report_groups_runs_by_training_settings_and_compares_parallel_options_per_group(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.add("single", 1, 1000)
    for bucket in (1, 25):
        sweep.add("ddp", 2, 1900, options={"bucket_cap_mb": bucket})
    sweep.add(
        "ddp", 2, 1000, config={"train": {"precision": "bf16"}}, options={"bucket_cap_mb": 25}
    )
    _, _, plain = read(sweep.write())
    assert [g["points"] for g in plain["groups"]] == [
        ["single × 1", "ddp × 2 (bucket_cap_mb=1)", "ddp × 2 (bucket_cap_mb=25)"],
        ["ddp × 2"],
    ]
    assert [p["options"] for p in plain["points"]] == [
        "",
        "bucket_cap_mb=1",
        "bucket_cap_mb=25",
        "",
    ]
    assert plain["groups"][1]["settings"] == "train.precision=bf16"


def test_report_does_not_count_runs_on_different_images_as_repeats(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    for block, data in enumerate(("aaaa", "aaaa", "bbbb")):
        sweep.add("single", 1, block=block, data={"all": data})
    _, _, plain = read(sweep.write())
    assert {group["settings"] for group in plain["groups"]} == {"data aaaa", "data bbbb"}


def test_report_of_an_unfinished_sweep_counts_the_jobs_by_status(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1001, 999])
    sweep.add("ddp", 2, status="out_of_memory", reason="CUDA out of memory on rank 1 <b>&")
    sweep.row("parallel=ddp", "parallel.devices=4", status="running")
    sweep.row(
        "parallel=single", "parallel.devices=2", status="skipped", reason="single has 1 device"
    )
    sweep.row("parallel=ddp", "parallel.devices=8", status="waiting")
    html, markdown, plain = read(sweep.write("running"))
    assert plain["counts"] == "3 of 7 jobs done, 1 out of memory, 1 running, 1 skipped, 1 waiting"
    assert plain["counts"] in html and plain["counts"] in markdown
    assert "single has 1 device" in html
    links = set(re.findall(r'<a href="([^"]+)"', html))
    # Only four of the seven jobs have a folder. The report must not link to folders that do not
    # exist.
    assert links == {f"{number}/result.json" for number in range(4)}
    assert "CUDA out of memory on rank 1 &lt;b&gt;&amp;" in html
    none_done = Sweep(tmp_path / "none_done")
    none_done.row("parallel=ddp", status="waiting")
    html, markdown, plain = read(none_done.write("running"))
    assert plain["lead"] is None and plain["counts"] in html and plain["counts"] in markdown
    assert plain["counts"] == "0 of 1 jobs done, 1 waiting"


@pytest.mark.usefixtures("plots")
def test_report_shows_a_dash_for_a_finished_run_of_an_older_version_without_throughput(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    path = sweep.add("ddp", 2) / "result.json"
    older = {"format": 0, "status": "done", "strategy": "ddp", "devices": 2, "gone": 1}
    path.write_text(json.dumps(older))
    _, markdown, plain = read(sweep.write())
    assert plain["counts"] == "1 of 1 jobs done"
    row = next(line for line in markdown.splitlines() if line.startswith("| ddp × 2"))
    # The table has a dash only in the column images/s. The report omits all other columns, because
    # no run has a value for them.
    assert row.count("—") == 1
    point = plain["points"][0]
    assert point["images_per_sec"] is None and point["peak_bytes"] == []


@pytest.mark.usefixtures("plots")
def test_report_ignores_result_json_fields_of_wrong_type(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    none = ("memory", "communication", "seconds", "cpu", "val")
    ranks: list[Any] = [1, {"rank": 0}, {"data_ms": "a"}]
    measured = {"data_ms": 1.0, "compute_ms": 2.0}
    wrong: list[dict[str, Any]] = [
        dict.fromkeys(none),
        {"throughput": {"images_per_sec": "fast"}, "memory": [{"device": 0}], "proof": None},
        {"throughput": [], "step": "x", "ranks": ranks, "flags": "busy", "hosts": "a"},
        {"step": {"data_ms": -1}, "nodes": "two", "neighbours": "no", "guard": 3, "seconds": []},
        {"reason": ["x"], "ranks": [{"rank": [0], "host": {}, **measured}]},
        {"proof": {"chunk_sizes": [[1], "x"]}, "memory": [{"device": []}], "data_wait": None},
        {"proof": {"chunk_sizes": 3, "hashes_equal": "x", "parameters_hash_start": []}},
        {"world_size": "two", "batch_size": "64", "threads_per_device": [], "flags": [1]},
    ]
    for number, fields in enumerate(wrong):
        changes = {"throughput": None, **fields}
        sweep.add("ddp", 2, options={"bucket_cap_mb": number}, **changes)
    plain = read(sweep.write())[2]
    assert len(plain["runs"]) == len(wrong)
    assert {point["images_per_sec"] for point in plain["points"]} == {None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": 1}, "2 devices requested, world size 1 measured"),
        ({"devices": "two", "world_size": None}, "devices is &#39;two&#39;"),
    ],
)
def test_report_excludes_a_run_without_the_requested_number_of_devices(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    sweep = full_sweep(tmp_path / "s")
    path = sweep.add("ddp", 2, 9999) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    html, _, plain = read(sweep.write())
    assert f"not compared: {reason}" in html
    assert plain["runs"][-1]["compared"] is False
    assert all(p["images_per_sec"]["high"] < 9999 for p in plain["points"])


def test_report_accepts_the_folder_of_one_run_instead_of_a_sweep(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    run = sweep.add("single", 1)
    html, _, plain = read(run)
    assert plain["counts"] == "1 of 1 jobs done"
    assert 'href="result.json"' in html
    assert "--config-path" in plain["lead"]["command"]


@pytest.mark.parametrize(
    ("name", "content", "named", "words"),
    [
        ("jobs.json", None, "", "no jobs.json and no result.json"),
        ("jobs.json", "[]", "jobs.json", "not of this project"),
        ("jobs.json", '{"jobs": 3}', "jobs.json", "not of this project"),
        ("jobs.json", '{"format": 1, "jobs": ["x"]}', "jobs.json", "not of this project"),
        ("jobs.json", '{"format": "x"}', "jobs.json", "not of this project"),
        ("jobs.json", {"jobs": []}, "jobs.json", "lists no jobs"),
        ("jobs.json", '{"format": 1, "jobs": [{"id"', "jobs.json", "damaged"),
        ("0/config.yaml", "a: [1", "0/config.yaml", "as YAML"),
        ("jobs.json", {"format": FORMAT + 1}, "jobs.json", "newer than this code reads"),
    ],
)
def test_report_error_names_the_invalid_sweep_file_in_one_line(
    tmp_path: Path, name: str, content: str | dict[str, Any] | None, named: str, words: str
) -> None:
    """`content`: what is written to the file, or the fields to change in it. None: it is gone."""
    sweep = Sweep(tmp_path / "s")
    sweep.add("single", 1)
    path = sweep.write() / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content or "")
    if content is None:
        path.unlink()
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        write_report([sweep.folder])
    assert str(sweep.folder / named) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (sweep.folder / "report.html").exists()


@pytest.mark.slow(seconds=3)
@pytest.mark.usefixtures("plots")
def test_report_has_plots_with_data_loads_no_external_files_and_is_the_same_when_written_twice(
    tmp_path: Path,
) -> None:
    folder = full_sweep(tmp_path / "s").write()
    written = read(folder)
    assert read(folder) == written
    html = written[0]
    assert html.count("<svg") == 3
    # In dark mode the text must not stay black, so plots must use the text color of the page.
    assert "currentColor" in html and "#010101" not in html
    assert not re.search(r"<script|<link|@import|url\((?!#)", html)
    assert not [
        address for address in re.findall(r'(?:href|src)="([^"#]+)"', html) if "//" in address
    ]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert ids and len(ids) == len(set(ids))
    plots = folder / "report_plots"
    names = ("memory", "ratios", "speed")
    files = sorted(path.name for path in plots.iterdir())
    assert files == [f"1_{name}.{kind}" for name in names for kind in ("csv", "svg")]
    # The CSV must have all 15 runs, not one row per configuration.
    assert len(list(csv.DictReader((plots / "1_speed.csv").open(encoding="utf-8")))) == 15
    ratios = list(csv.DictReader((plots / "1_ratios.csv").open(encoding="utf-8")))
    assert {"ratio", "low", "high", "detectable"} <= set(ratios[0])


def test_every_link_in_a_report_points_to_an_existing_file(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "a sweep")
    html, markdown, plain = read(sweep.write())
    links = set(re.findall(r'<a href="([^"]+)"', html))
    assert {link for link in links if "dp_and_ddp" not in link} == {
        f"{n}/result.json" for n in range(15)
    }
    assert all((sweep.folder / link).is_file() for link in links)
    assert "[0](0/result.json)" in markdown
    assert all(p["runs"] for p in plain["points"])
    claims = html[html.index("<dl>") :]
    # The tables already link to the runs. The claims must not repeat these links.
    assert "<a " not in claims[: claims.index("</dl>")]


def test_report_in_another_folder_links_to_the_runs_and_has_a_csv_with_one_row_per_run(
    tmp_path: Path,
) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.row("parallel=single", "parallel.devices=2", status="skipped", reason="one, two\nthree")
    html = write_report([sweep.write()], tmp_path / "elsewhere")
    assert html == tmp_path / "elsewhere" / "report.html"
    assert "../s/0/result.json" in html.read_text()
    assert {path.name for path in html.parent.iterdir()} == {
        f"report.{kind}" for kind in ("html", "md", "csv", "json")
    }
    rows = list(csv.DictReader(html.with_suffix(".csv").open(encoding="utf-8")))
    assert len(rows) == 16
    assert float(rows[0]["images_per_sec"]) == 990
    assert rows[-1]["images_per_sec"] == "" and rows[-1]["reason"] == "one, two three"
    assert (rows[0]["host"], rows[0]["commit"], rows[0]["steps_timed"]) == (
        "node1",
        "0123abc",
        "250.0",
    )
    # Whole numbers must be written without a decimal point.
    assert (rows[0]["seed"], rows[0]["block"], rows[0]["batch_size"]) == (
        "42",
        "0",
        "64",
    )
    assert {"precision", "flags", "started", "workers", "block", "seed"} <= set(rows[0])


@pytest.mark.usefixtures("plots")
@pytest.mark.slow(seconds=2)
def test_every_report_plot_shows_the_fastest_of_many_configurations(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010])
    for number in range(9):
        speed = 1200 + 20 * number
        sweep.repeat("ddp", 2, [speed, speed + 5], options={"bucket_cap_mb": number})
    read(sweep.write())
    for name, strategy in (("ratios", "ddp × 2"), ("memory", "ddp × 2"), ("speed", "ddp")):
        svg = (sweep.folder / "report_plots" / f"1_{name}.svg").read_text(encoding="utf-8")
        assert f"{strategy} (bucket_cap_mb=8)" in svg, name


@pytest.mark.usefixtures("plots")
def test_report_on_one_cpu_run_has_no_plot(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s", accelerator="cpu")
    # A single run cannot be compared, and a CPU run has no memory per device.
    sweep.add("single", 1)
    assert "<svg" not in read(sweep.write())[0]


@pytest.mark.parametrize(
    ("config", "is_shown"),
    [
        ({"train": {"max_steps": 40}}, True),
        ({"train": {"max_steps": None, "evaluate_every": 0}}, True),
        ({"train": {"max_steps": 40, "evaluate_every": 0}}, False),
        ({"train": {"max_steps": 40}, "sweep": {"timed": True}}, False),
    ],
)
def test_report_shows_no_val_acc_for_runs_that_only_measured_speed(
    tmp_path: Path, config: dict[str, Any], is_shown: bool
) -> None:
    sweep = full_sweep(tmp_path / "s", {})
    sweep.repeat("single", 1, [1000, 1010], config=config)
    plain = read(sweep.write())[2]
    metrics = {"val/acc": {"median": 0.957, "low": 0.957, "high": 0.957, "count": 2}}
    assert plain["points"][0]["metrics"] == (metrics if is_shown else {})


def test_report_shows_the_metric_by_which_each_run_selected_its_checkpoint(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    by_loss = {"checkpoint": {"metric": "val/loss"}}
    sweep.repeat("single", 1, [1000, 1010], config=by_loss, val={"loss": 0.25, "acc": 0.5})
    sweep.repeat(
        "ddp",
        2,
        [1900, 1910],
        config={"checkpoint": {"metric": "val/f1_ema"}},
        val={"loss": 1, "f1_ema": 0.75},
    )
    html, markdown, plain = read(sweep.write())
    assert [
        {name: value["median"] for name, value in point["metrics"].items()}
        for point in plain["points"]
    ] == [
        {"val/loss": 0.25},
        {"val/f1_ema": 0.75},
    ]
    assert [(run["metric"], run["metric_value"]) for run in plain["runs"]] == [
        ("val/loss", 0.25)
    ] * 2 + [("val/f1_ema", 0.75)] * 2
    assert ">val/loss (lower is better)<" in html and ">val/f1_ema<" in html
    [header] = [line for line in markdown.splitlines() if line.startswith("| point | runs")]
    assert "val/loss" in header and "val/acc" not in header


@pytest.mark.slow(seconds=2)
def test_report_py_prints_the_path_of_the_report_or_exits_2_for_an_unusable_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full_sweep(tmp_path / "s", {("single", 1): 1000}).write()
    done = run_python("scripts/report.py", str(folder))
    assert (done.returncode, done.stdout.strip()) == (0, str(folder / "report.html"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for words in (
        [f"{tmp_path}"],
        [f"{tmp_path}/loop"],
        [f"{folder}", f"out={tmp_path}/loop"],
        [f"{folder}", "out=/proc/nowhere"],
        [f"{folder}", f"out={folder}/jobs.json"],
    ):
        assert script.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words[-1] in line


@pytest.mark.parametrize(
    ("kwargs", "title"), [({"depth": 2}, "vit_tiny (999 parameters)"), ({}, "vit_tiny")]
)
def test_report_title_of_a_changed_model_has_its_parameter_count(
    tmp_path: Path, kwargs: dict[str, int], title: str
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    config = {"model": {"name": "vit_tiny", "kwargs": kwargs}}
    sweep.add("single", 1, config=config, model="vit_tiny", parameters=999)
    html, markdown, plain = read(sweep.write())
    [group] = plain["groups"]
    assert group["title"] == f"{title}, strong scaling, global batch 64"
    assert group["title"] in html and group["title"].replace("_", "\\_") in markdown
    assert group["model"] == "vit_tiny"
