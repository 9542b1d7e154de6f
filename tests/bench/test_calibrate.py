"""`make calibrate`: what is read from steps, what is written, and that it is used."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from bench import at_hand
from bench.calibrate import Fitted, Measured, fit, main, read_arguments
from bench.calibration_file import UNITS, document, write
from bench.calibration_steps import MICRO_BATCHES, Case, case_of, op_samples, prices
from disagmoe.cost.calibration import Rates, calibration_from_mapping, load_calibration
from disagmoe.ops import Kind
from disagmoe.plan.pricing import price
from disagmoe.runtime.probe import Sample
from disagmoe.simulator import simulate
from disagmoe.specs import ClusterSpec, cluster_from_mapping, load_model
from disagmoe.specs import fields as read

TINY = load_model("tiny")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(read, "OWN_CONF", tmp_path / "conf.local")
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ())
    load_calibration.cache_clear()
    return tmp_path / "conf.local" / "calibration"


def four_ranks() -> ClusterSpec:
    return cluster_from_mapping({**at_hand.cluster_at_hand(4, "laptop"), "device": "cpu"})


COMPUTE = {Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD}


@pytest.mark.parametrize("device", MICRO_BATCHES)
@pytest.mark.parametrize("system", ["megatron_1f1b", "disagmoe"])
def test_samples_of_a_simulated_step_are_the_prices(system: str, device: str) -> None:
    """Without contention a step read back gives what it was priced with; exchanges only where nothing hides them."""
    calibration = load_calibration("laptop").with_contention_scale(0.0)
    wanted = MICRO_BATCHES[device][system]
    case = case_of(system, TINY, four_ranks(), calibration, 96, wanted)
    assert case.plan.layout.batch.microbatches == wanted
    timeline = simulate(case.plan.program, price(case.plan.layout, case.plan.program, case.problem.costs))
    found = op_samples(case, [timeline])
    kinds = {sample.kind for sample in found}
    hidden = system == "disagmoe" and device == "cpu"
    assert case.overlaps == hidden
    assert kinds == (COMPUTE if hidden else COMPUTE | {Kind.DISPATCH, Kind.COMBINE})
    assert sum(sample.share for sample in found) == pytest.approx(1.0)
    for sample, wanted in zip(found, prices(found, calibration), strict=True):
        assert sample.seconds == pytest.approx(wanted), (sample.kind, sample.phase)


def kernels() -> list[Sample]:
    """Multiplies at 0.1 of 1 TFLOP/s, attention at 0.05, rings at 1 GB/s, compute 1.5x and exchanges 2x slower."""
    found = []
    for what in ("gemm", "grouped"):
        for sizes in ((64, 64, 128), (256, 64, 128), (1024, 128, 128), (4096, 64, 64)):
            sizes = (sizes[0], 2, *sizes[1:]) if what == "grouped" else sizes
            flops = 2.0
            for size in sizes:
                flops *= size
            found += [Sample(what, phase, sizes, flops / 1e11) for phase in "FIW"]
    for seq, width in ((128, 16), (512, 16), (128, 64), (512, 64), (1024, 64)):
        forward = 4.0 * 4 * seq * width * seq / 2 / 5e10
        found += [
            Sample("scores", "F", (seq, 4, width), forward),
            Sample("scores", "I", (seq, 4, width), 2.5 * forward),
        ]
    found += [Sample("ring", "", (n, 4), 1e-3 + 3.0 * n / 1e9) for n in (1 << 12, 1 << 16, 1 << 20)]
    alone = [Sample("alone", "compute", (), 1.0), Sample("alone", "comm", (), 1.0)]
    return [*found, *alone, Sample("beside", "compute", (), 1.5), Sample("beside", "comm", (), 2.0)]


def measured(cases: list[Case]) -> Measured:
    """Steps as the nominal calibration prices them, on made-up kernels."""
    operations = []
    for case in cases:
        timeline = simulate(case.plan.program, price(case.plan.layout, case.plan.program, case.problem.costs))
        operations += op_samples(case, [timeline])
    return Measured(kernels(), operations)


def test_the_rates_explain_the_samples_and_the_file_carries_its_provenance(own: Path) -> None:
    cluster, nominal = four_ranks(), load_calibration("laptop")
    cases = [case_of("megatron_1f1b", TINY, cluster, nominal, seq, 2) for seq in (96, 256, 1024)]
    made = measured(cases)
    found = fit(made, nominal, cluster)
    assert found.rates["projection_efficiency"] == pytest.approx(0.1, rel=0.01)
    assert found.rates["grouped_efficiency"] == pytest.approx(0.1, rel=0.01)
    assert found.rates["attention_efficiency"] == pytest.approx(0.05, rel=0.01)
    assert found.rates["ring_nvlink_efficiency"] == pytest.approx(1e9 / 100e9, rel=0.01)
    assert found.rates["nvlink_alpha_us"] == pytest.approx(nominal.rates.nvlink_alpha_us, rel=0.01)
    assert found.contention == (1.5, 2.0)

    path = write("local", found, made, cluster, TINY)
    assert path == own / "local.yaml"
    loaded = load_calibration("local")
    assert loaded.device == "cpu" and loaded.contention["m2n_rdma"].comm == 2.0
    for number in loaded.numbers:
        if number.use == "calibrate":
            assert "torch" in number.source and "python -m bench.calibrate name=local processes=4" in number.source
    unmeasured = {number.name for number in loaded.numbers if number.use == "assumption"}
    assert unmeasured == {"nic_efficiency", "ring_nic_efficiency", "nic_alpha_us"}
    with (own / "local.csv").open() as file:
        lines = list(csv.DictReader(file))
    kinds = {line["what"].split()[0] for line in lines}
    assert kinds == {"gemm", "grouped", "scores", "ring", "alone", "beside", "megatron_1f1b"}
    assert at_hand.cluster_at_hand(4, None)["calibration"] == "local"  # runs with backend=measure use it by themselves


def test_every_rate_has_a_unit() -> None:
    assert set(UNITS) == {field.name for field in fields(Rates)}
    missing = Fitted({key: 0.5 for key in UNITS if key != "launch_us"}, {}, (1.0, 1.0))
    with pytest.raises(KeyError, match="launch_us"):
        document("x", missing, four_ranks(), TINY)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["name=h800"], "name=h800 is shipped; choose another name for your own calibration"),
        (["processes=0"], "processes=0: allowed: a positive integer"),
        (["model=nope"], "unknown model 'nope'"),
        (["seq=5"], "no setting 'seq'; settings: name, model, processes"),
        (["name=a/b"], "calibration: name 'a/b' may hold only letters"),
    ],
)
def test_a_wrong_argument_is_one_line(
    own: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1


def test_defaults() -> None:
    assert (read_arguments([]).name, read_arguments(["processes=2"]).processes) == ("local", 2)


@pytest.mark.slow
def test_this_machine(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["processes=2", "name=mine"]) == 0
    content = yaml.safe_load((own / "mine.yaml").read_text())
    assert calibration_from_mapping(content, "mine").device == "cpu"
    said = capsys.readouterr().out
    assert "rms error of the fit" in said and "use it with CALIBRATION=mine" in said
