"""What a cross-check decides, on checks made by hand."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from bench.crosscheck import Check, main, swaps, verdicts
from bench.report.crosscheck import markdown, write_csv, write_parity
from bench.switches import DURATIONS

MACHINE = {"cores": 2, "device": "a processor", "torch": "2.0"}


def check(system: str, simulated: float, emulated: float, *, exposed: float = 0.0, **changes: object) -> Check:
    """`exposed` is the error of exposed communication, in seconds."""
    times = {"compute_s": 0.5 * simulated, "exposed_comm_s": 0.2 * simulated, "bubble_s": 0.3 * simulated}
    found = Check(
        system=system,
        variant="",
        view="native",
        processes=4,
        simulated={"step_time_s": simulated, **times},
        emulated={"step_time_s": emulated, **times, "exposed_comm_s": 0.2 * simulated + exposed},
        simulated_per_token_s=simulated,
        emulated_per_token_s=emulated,
        spread=0.01,
        tries=1,
        dilation=2.0,
        late_share=0.1,
        own_load=0.7,
        foreign_load=0.2,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def held(checks: list[Check]) -> dict[str, bool]:
    return {verdict.limit: verdict.holds for verdict in verdicts(checks)}


def test_errors_are_shares_of_the_simulated_step() -> None:
    one = check("tutel", 2.0, 2.1, exposed=-0.08)
    assert one.error("step_time_s") == pytest.approx(0.05)
    assert one.error("exposed_comm_s") == pytest.approx(-0.04)
    assert one.good
    assert not check("tutel", 2.0, 2.17).good
    assert not check("tutel", 2.0, 2.0, exposed=0.11).good
    assert not replace(one, control=True, emulated={**one.emulated, "step_time_s": 2.11}).good


def test_every_limit_can_fail_alone() -> None:
    good = [check("megatron_1f1b", 4.0, 4.1), check("tutel", 3.0, 2.95), check("disagmoe", 2.0, 2.02)]
    assert all(held(good).values())
    assert len(held(good)) == 4
    cases = {
        "mean error": [check("tutel", 3.0, 3.15), check("disagmoe", 2.0, 2.1)],
        "largest error of the step": [check("tutel", 3.0, 3.0), check("comet", 3.5, 3.5), check("disagmoe", 2.0, 1.83)],
        "exposed": [*good[:2], check("disagmoe", 2.0, 2.0, exposed=0.11)],
        "ranking": [check("megatron_1f1b", 4.0, 3.9), check("tutel", 3.94, 3.95)],
    }
    for word, checks in cases.items():
        failed = [limit for limit, holds in held(checks).items() if not holds]
        assert failed and all(word in limit for limit in failed), word
    assert held([]) == {}


def test_systems_as_good_as_equal_are_not_ranked() -> None:
    assert not swaps([check("megatron_1f1b", 4.0, 4.1), check("tutel", 4.02, 4.0)])
    assert swaps([check("megatron_1f1b", 4.0, 4.1), check("tutel", 4.1, 4.05)]) == ["tutel before megatron_1f1b"]
    elsewhere = check("tutel", 4.1, 4.05, view="uniform")
    assert not swaps([check("megatron_1f1b", 4.0, 4.1), elsewhere])


def test_the_control_must_be_slower_by_what_its_simulation_says() -> None:
    plain = check("disagmoe", 2.0, 2.02)
    control = check("disagmoe", 3.0, 3.1, control=True)
    (verdict,) = [v for v in verdicts([plain, control]) if "slower" in v.limit]
    assert verdict.holds
    assert verdict.found == "1.53× emulated, 1.50× simulated, step +3.3 %"
    for wrong in (2.7, 3.2):
        (verdict,) = [v for v in verdicts([plain, check("disagmoe", 3.0, wrong, control=True)]) if "slower" in v.limit]
        assert not verdict.holds


def test_limits_are_judged_for_each_number_of_processes() -> None:
    both = [check("tutel", 3.0, 3.0), check("tutel", 3.0, 3.5, processes=8)]
    failed = [limit for limit, holds in held(both).items() if not holds]
    assert failed and all(limit.startswith("8 processes") for limit in failed)


def test_switches_are_held_to_the_errors_and_not_ranked() -> None:
    order, other = (check("disagmoe_plus", 4.0, e, variant=v, shows="order") for v, e in (("a", 4.1), ("b", 4.0)))
    assert all(held([order, replace(other, simulated_per_token_s=4.2)]).values())
    assert len(held([order, other])) == 3
    assert not all(held([order, replace(other, emulated={**other.emulated, "step_time_s": 4.4})]).values())


def test_what_only_shows_durations_counts_for_nothing() -> None:
    """Its Program is the one without the switch."""
    far_off = check("disagmoe_plus", 4.0, 8.0, variant="shared_nodes", shows=DURATIONS)
    order = check("disagmoe_plus", 4.0, 4.1, variant="look_ahead", shows="order")
    assert all(held([order, far_off]).values())
    assert held([far_off]) == {"4 processes: what ran and counts": False}
    page = markdown("a model", [order, far_off], verdicts([order, far_off]), [], MACHINE)
    assert "| durations only |" in page and "counts for no limit" in page


def test_the_page_the_numbers_and_the_picture_tell_the_same(tmp_path: Path) -> None:
    checks = [
        check("megatron_1f1b", 4.0, 4.1),
        check("disagmoe", 2.0, 2.02, foreign_load=None, plan={"p": 3, "dp": 2}, cut={"p": 1, "A:F": "2:2"}),
        check("disagmoe", 3.0, 3.1, control=True),
        check("dualpipe", 3.0, 3.5, processes=8, variant="deepep"),
    ]
    page = markdown("a model", checks, verdicts(checks), ["comet: not applicable: why"], MACHINE)
    assert "differs in" not in page
    assert "| disagmoe | p=1, A:F=2:2 | – | p=3, dp=2 |" in page
    assert "| disagmoe, no overlap | 3 | 3.1 | +3.3 % |" in page
    assert "| dualpipe (deepep) | 3 | 3.5 | +16.7 % |" in page
    assert "**fails**: 8 processes: mean error" in page
    assert "comet: not applicable: why" in page
    write_csv(tmp_path / "table.csv", checks)
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["error_step_time_s"]) for row in rows] == pytest.approx([0.025, 0.01, 1 / 30, 1 / 6])
    paths = write_parity(tmp_path, "a model", checks)
    assert [path.name for path in paths] == ["parity.png", "parity.svg"]
    before = [path.read_bytes() for path in paths]
    assert before == [path.read_bytes() for path in write_parity(tmp_path, "a model", checks)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["backend=simulate"], "emulate"),
        (["processes=5"], "4, 8"),
        (["model=nope"], "nope"),
        (["impl=native"], "measure"),
        (["switches=spread"], "spread_head"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
