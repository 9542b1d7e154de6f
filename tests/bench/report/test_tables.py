"""The same numbers in three outputs, by hand from the sample's own arithmetic."""

from __future__ import annotations

import csv
import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report import csv_header, print_tables, records
from bench.report.tables import csv_text, markdown

from .sample import ID, row_of, sample

ROOT = Path(__file__).resolve().parents[3]


def printed(results: dict[str, Any]) -> str:
    out = io.StringIO()
    print_tables(results, out)
    return out.getvalue()


def md_row(text: str, heading: str, system: str, view: str = "native") -> list[str]:
    """Cells of one Markdown table line: the table under `heading`, the line of `system`."""
    section = text.split(f"## {view} view")[1].split(f"### {heading}")[1]
    line = next(line for line in section.splitlines() if line.startswith(f"| {system} "))
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_speed_table_by_hand() -> None:
    cells = md_row(markdown(sample()), "Speed and memory", "disagmoe")
    # 7.7 + 0.5 + 1.8 = 10 s; reference 8 + 6 + 2 = 16 s; 8,388,608 tokens / 10 s / 128 GPUs = 6,553.6
    assert cells == ["disagmoe", "ok", "10.000", "1.60×", "1.25×", "6,554", "32.0 %", "128", "16", "51.2 / 75.6"]


def test_breakdown_by_hand() -> None:
    cells = md_row(markdown(sample()), "Where the step goes", "tutel")
    # removed: 1 - 0.5/4 of the exposed time, 1 - 2.3/5.75 of the stall
    assert cells == ["tutel", "8.250", "2.000", "4.000", "1.750", "0.438", "5.750", "87.5 %", "60.0 %"]


def test_uniform_view_has_its_own_reference() -> None:
    assert md_row(markdown(sample()), "Speed and memory", "disagmoe", "uniform")[3] == "1.48×"  # 14.8 / 10


def test_pools_and_kinds() -> None:
    text = markdown(sample())
    assert md_row(text, "Attention (A) and FFN (F)", "disagmoe")[1:] == [
        *("8.100", "5.500", "0.300", "1.600"),
        *("7.300", "5.100", "0.700", "2.000"),
    ]
    assert md_row(text, "Exposed communication by kind", "tutel")[1:5] == ["2.000", "1.000", "0.500", "0.500"]


def test_no_pool_table_where_nothing_is_disaggregated() -> None:
    results = sample()
    for row in results["rows"]:
        row["pools"] = None
    assert "Attention (A)" not in markdown(results)


@pytest.mark.parametrize("render", [printed, markdown])
def test_rows_without_a_time_say_why(render: Any) -> None:
    flat = " ".join(render(sample()).replace("\\", "").split())
    assert "comet: not applicable: needs 2 nodes | the cluster has 1" in flat
    assert "dualpipe: out of memory: needs 92.3 GiB per GPU for weights; 75.6 GiB available" in flat
    assert flat.count("needs 92.3 GiB") == 2  # once per view, not repeated by the table itself


def test_oom_reason_without_sizes_gets_them() -> None:
    results = sample()
    row_of(results, "dualpipe")["reason"] = "two copies of the weights"
    assert "needs 92.3 GiB per GPU, 75.6 GiB available; two copies of the weights" in printed(results)


def test_header_names_everything() -> None:
    flat = " ".join(printed(sample()).split())
    for text in (
        *("Qwen3-235B-A22B (qwen3)", "94 of 94 layers", "235.1 B parameters total", "h800_128", "simulated"),
        *("calibration h800", "16 nodes × 8 H800 with 8 × 400 Gbit/s NICs each", "seq 32,768"),
        *("global batch 256 sequences (8,388,608 tokens)", "16–32 micro-batches"),
        *("nccl (merge none): megatron_1f1b, tutel", "m2n_rdma (merge node): disagmoe"),
        *("deepep (merge node) for every system", "nccl: compute × 1.07, communication × 1.31"),
        *("activation memory is not yet modelled", ID),
    ):
        assert text in flat, text


def test_assumptions_are_said_once() -> None:
    results = sample()
    results["model"]["assumptions"] = ["top-k 4 as in the paper"]
    results["notes"].append("qwen3: top-k 4 as in the paper")
    assert printed(results).count("top-k 4 as in the paper") == 1


def test_memory_is_called_static_only_while_activations_are_missing() -> None:
    results = sample()
    assert "static memory" in printed(results)
    results["notes"] = []
    assert "static memory" not in printed(results)
    assert "peak memory" in printed(results)


def test_piped_output_fits_140_columns() -> None:
    results = sample()
    row_of(results, "tutel").update(system="a_rather_long_name", variant="deepep", implementation="native")
    lines = printed(results).splitlines()
    assert max(map(len, lines)) <= 140
    assert any("a_rather_long_name (deepep, native)" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_units_in_brackets_survive_the_terminal() -> None:
    assert printed(sample()).count("[s]") >= 10


@pytest.mark.parametrize(
    ("scale", "unit", "text"),
    [(1.0, "s", "10.000"), (0.01, "ms", "100.00"), (1e-4, "ms", "1.000"), (1e-6, "µs", "10.0")],
)
def test_time_unit_follows_the_shortest_step(scale: float, unit: str, text: str) -> None:
    results = sample()
    for row in results["rows"]:
        row["step_time_s"] = row["step_time_s"] and row["step_time_s"] * scale
    assert f"step [{unit}]" in markdown(results)
    assert md_row(markdown(results), "Speed and memory", "disagmoe")[2] == text


@pytest.mark.parametrize(("backend", "word", "what"), [("emulate", "emulated", "cut"), ("measure", "measured", "plan")])
def test_executed_rows_are_headed_by_how_they_ran(backend: str, word: str, what: str) -> None:
    results = sample(backend=backend)
    row_of(results, "tutel")["simulated"] = {"step_time_s": 2.0, "exposed_comm_s": 0.5, "bubble_s": 0.1}
    text = markdown(results)
    assert f"### {word.capitalize()} beside the simulation of the same {what}" in text
    assert f"| {word} step [s] | simulated step [s] | {word} ÷ simulated |" in " ".join(text.split())
    assert "beside the simulation" not in markdown(sample())


def test_unknown_waits_are_starred() -> None:
    results = sample()
    assert "*" not in printed(results)
    row_of(results, "tutel")["wait_s"] = None
    assert "4.000*" in printed(results)
    assert "* includes waiting for a peer" in printed(results)


def test_csv_has_one_header_and_exact_numbers() -> None:
    results = sample()
    lines = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert len(lines) == len(results["rows"]) == 10
    assert csv_text(results).count("run_id") == 1
    by_name = {(line["view"], line["system"]): line for line in lines}
    own = by_name["native", "disagmoe"]
    assert float(own["step_time_s"]) == results["rows"][4]["step_time_s"]
    assert float(own["speedup"]) == pytest.approx(1.6, abs=1e-12)
    assert own["pools_F_bubble_s"] == "2.0"
    assert own["exposed_by_kind_s_dispatch"] == "0.25"
    assert own["contention_comm"] == "1.0"
    assert (own["run_id"], own["model"], own["seq"], own["cluster"]) == (ID, "qwen3", "32768", "h800_128")
    assert own["gpus_used"] == "128"
    assert own["plan"].startswith("p=2, virtual_stages=47, dp=2, A:F=16:16")


def test_csv_is_empty_where_there_is_no_value() -> None:
    line = list(csv.DictReader(io.StringIO(csv_text(sample()))))[3]
    assert (line["system"], line["status"], line["peak_memory_gib"]) == ("dualpipe", "oom", "92.34")
    for name in ("step_time_s", "speedup", "mfu", "pools_A_compute_s", "plan", "exposed_by_kind_s_p2p"):
        assert line[name] == "", name
    comet = list(csv.DictReader(io.StringIO(csv_text(sample()))))[2]
    assert comet["reason"] == "needs 2 nodes | the cluster has 1"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_output_shows_what_is_not_a_number(bad: float) -> None:
    results = sample()
    row_of(results, "tutel").update(speedup=bad, mfu=bad, stall_reduction=bad)
    for text in (csv_text(results), markdown(results), printed(results)):
        assert not {"nan", "inf", "-inf"} & set(text.lower().replace("|", " ").replace(",", " ").split())
    assert records(results)[1]["speedup"] is None


def test_records_have_the_csv_columns() -> None:
    assert all(list(record) == csv_header() for record in records(sample()))
    assert len(set(csv_header())) == len(csv_header())


def test_markdown_tables_are_rectangular() -> None:
    width = 0
    for line in markdown(sample()).splitlines():
        cells = line.replace("\\|", "").count("|") - 1
        if not line.startswith("|"):
            width = 0
            continue
        width = width or cells
        assert cells == width, line


def test_paper_section_says_how_each_side_came_about() -> None:
    results = sample()
    results["paper"] = [
        {"claim": "c", "low": 1.59, "high": 1.81, "unit": "x", "ours": 1.6, "verdict": "inside", "note": ""},
        {"claim": "d", "low": 0.88, "high": 0.88, "unit": "%", "ours": None, "verdict": "not comparable", "note": "w"},
    ]
    text = markdown(results)
    assert "| claim | paper, measured | ours, simulated | verdict | note |" in text
    assert "| c | 1.59–1.81× | 1.60× | inside |  |" in text
    assert "| d | 88 % | – | not comparable | w |" in text


def test_ascii_pipe_and_comma_locale() -> None:
    """A pipe that cannot show "×" and a locale with decimal commas change no number and break nothing."""
    code = (
        "import sys, locale\n"
        "try: locale.setlocale(locale.LC_ALL, '')\n"
        "except locale.Error: pass\n"
        "from tests.bench.report.sample import sample\n"
        "from bench.report import print_tables\n"
        "from bench.report.tables import csv_text\n"
        "print_tables(sample()); print(csv_text(sample()).encode().decode('ascii'))\n"
    )
    env = {**os.environ, "LC_ALL": "de_DE.UTF-8", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"1.60?" in done.stdout
    assert b"16.0,1.0,8.0,2.0,compute,524288.0" in done.stdout


def test_small_and_odd_hardware_reads_well() -> None:
    results = sample()
    results["cluster"].update(
        name="laptop", device="laptop", groups=[{"count": 1, "gpus": 8, "nics": 1, "nic_gbit": 64.0}]
    )
    results["model"].update(parameters_total=1234567, parameters_active=None)
    results["workload"].update(skew=1.5, stragglers=[[3, 1.2]])
    flat = " ".join(printed(results).split())
    assert "1 node × 8 laptop devices with 1 × 64 Gbit/s NIC each" in flat
    assert "1.23 M parameters total" in flat
    assert "parameters active" not in flat
    assert "routing skew 1.5 (max/mean expert load), stragglers GPU 3 × 1.2" in flat


def test_large_negative_reductions_stay_short() -> None:
    results = sample()
    row_of(results, "tutel").update(exposed_comm_reduction=-12.585, stall_reduction=-0.374)
    assert md_row(markdown(results), "Where the step goes", "tutel")[-2:] == ["-1,258 %", "-37.4 %"]


def test_only_disaggregated_systems_stand_in_the_pool_table() -> None:
    pools = markdown(sample()).split("### Attention (A)")[1].split("###")[0]
    assert "| disagmoe " in pools
    assert "tutel" not in pools
