"""What a record says about settings that are not the default."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from bench.deviations import DEFAULTS, WORKLOAD_DEFAULTS, deviations
from bench.report.facts import settings_text
from disagmoe.allocator.tuner import DEFAULT_BUDGET
from disagmoe.specs import Workload
from tests.bench.helpers import config, group, values


def test_the_defaults_are_those_of_the_configuration_file() -> None:
    plain = values()
    plain |= {"ep": 16, "budget": DEFAULT_BUDGET}  # the tiny run has ep=2; null means the tuner's default
    for key, default in {**DEFAULTS, **WORKLOAD_DEFAULTS}.items():
        given = tuple(plain[key]) if isinstance(plain[key], list) else plain[key]
        assert given == default, key


def test_every_field_of_the_workload_is_named_somewhere() -> None:
    assert {field.name for field in fields(Workload)} == {*WORKLOAD_DEFAULTS, "seq", "global_batch"}


def test_nothing_to_say_by_default() -> None:
    assert deviations(config(ep=16)) == {}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"skew": 1.5}, {"skew": 1.5}),
        ({"stragglers": [[0, 1.5]]}, {"stragglers": [[0, 1.5]]}),
        ({"merge": "rank"}, {"merge": "rank"}),
        ({"optimizer": "precision_aware"}, {"optimizer": "precision_aware"}),
        ({"ep": "auto"}, {"ep": "auto"}),
        ({"ep": 2}, {"ep": 2}),
        ({"contention_scale": 0.5}, {"contention_scale": 0.5}),
        ({"plans_from": "default_batch"}, {"plans_from": "default_batch"}),
        ({"uniform_transport": "nccl"}, {"uniform_transport": "nccl"}),
        ({"uniform_transport": "nccl", "transport": "native"}, {}),
        ({"system": {"tutel": {"degree": 2}}}, {"system.tutel.degree": 2}),
        ({"model": {**group("model", "tiny"), "top_k": 1}}, {"model.top_k": 1}),
        ({"model": {**group("model", "tiny"), "layers": 2}}, {}),  # the record names the depth
        ({"cluster": {**group("cluster", "laptop"), "memory_gib": 7.0}}, {"cluster.memory_gib": 7.0}),
        ({"batch": 64, "seq": 1024, "transport": "native", "tag": "a", "force": True}, {}),  # named, or no numbers
    ],
)
def test_what_moves_numbers_is_named(changes: dict[str, Any], found: dict[str, Any]) -> None:
    assert deviations(config(**{"ep": 16, **changes})) == found


def test_as_text() -> None:
    settings = {"skew": 1.5, "contention_scale": 2.0, "stragglers": [[0, 1.5]], "merge": None}
    assert settings_text({"settings": settings}) == "contention_scale=2 merge=null skew=1.5 stragglers=[[0,1.5]]"
    assert settings_text({}) == ""


def test_a_study_varies_its_models_itself() -> None:
    run = config(ep=16, model={**group("model", "tiny"), "top_k": 1})
    assert deviations(replace(run, study=object())) == {}  # type: ignore[arg-type]
