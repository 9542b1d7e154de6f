"""What a switch alone is tried on: plans in which it is on, of the split that `disagmoe` chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.config import RunConfig
from bench.evaluate import cost_model, problem_of
from bench.points import Answer, answer, asked
from bench.switch_trials import ALL, OF_THE_SPLIT, fastest, of_split, searched
from disagmoe.specs import load_cluster, load_model
from disagmoe.system import NotApplicable, Variant
from disagmoe.systems import DisagMoEPlus
from disagmoe.systems.disagmoe_plus import SWITCHES
from tests.bench.helpers import config
from tests.bench.test_sensitivity import row


@pytest.fixture(scope="module")
def place() -> RunConfig:
    small = config(transport="uniform", systems="disagmoe,disagmoe_plus")
    model = load_model("gpt_oss_20b").with_layers(6)
    return replace(small, model=model, cluster=load_cluster("h800_32"), calibration="h800", ep=8)


@pytest.fixture(scope="module")
def split(place: RunConfig) -> Answer:
    return answer(asked("base", place, "disagmoe"))[0]


def test_only_switches_about_the_split_are_searched_for(place: RunConfig) -> None:
    assert {s for s in SWITCHES if searched(place, "here", s, 4) is not None} == set(OF_THE_SPLIT)
    found = searched(place, "here", "hybrid", None)
    assert found is not None
    assert found.config.budget == place.budget
    every = searched(place, "here", ALL, 4)
    assert every is not None
    assert every.config.budget == place.budget


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_plan_on_the_split_has_the_switch_and_the_split(place: RunConfig, split: Answer, switch: str) -> None:
    task = of_split(place, "here", switch, split)
    if task is None:
        assert switch in OF_THE_SPLIT
        return
    assert task.known is not None
    system = DisagMoEPlus.with_switches(switch)
    problem = problem_of(place, cost_model(place), Variant("", system), "uniform")
    kept = {key: split.best[0][key] for key in ("nics", "p", "dp", "m", "n", "micro_batch")}
    for candidate in task.known[""]:
        assert {key: candidate[key] for key in kept} == kept
        if switch != "balanced_map":  # says itself where it means nothing
            try:
                options = system.layout(problem, candidate).options
            except NotApplicable:  # twice as many F-groups may find no place
                continue
            on: dict[str, Any] = {
                "spread_head": options["head"] == "spread",
                "split_backward": options["put_off"] >= 0,
                "look_ahead": options.get("rows", 0) > 0,
                "early_gather": options.get("gather") == "early",
                "other_depths": options["mapped"] == 1,
            }
            assert on.get(switch, True)
            assert not any(on[name] for name in on if name != switch)


def test_nothing_is_tried_without_a_split(place: RunConfig) -> None:
    assert of_split(place, "here", "look_ahead", Answer(row("disagmoe", None, "oom"))) is None


def test_the_faster_row_counts_and_a_reason_stands_for_none() -> None:
    plain = row("disagmoe", 3.0)
    rows = [row("disagmoe_plus", None, "oom"), row("disagmoe_plus", 2.0), row("disagmoe_plus", 1.5)]
    assert fastest("hybrid", plain, rows) is rows[2]
    assert fastest("hybrid", plain, rows[:1]) is rows[0]
    none = fastest("look_ahead", row("disagmoe", None, "oom"), [])
    assert (none["status"], none["reason"]) == ("not_applicable", "look_ahead: no split of disagmoe fits")
    assert none["step_time_s"] is None
