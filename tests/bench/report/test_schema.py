"""The schema accepts a complete record and names what is wrong with broken ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.report import compare

from .sample import row_of, sample

SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "bench" / "schema" / "results.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)

Break = Callable[[dict[str, Any]], object]


def refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def test_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_complete_record_is_valid_also_after_a_strict_round_trip() -> None:
    results = sample()
    results["paper"] = compare(results)
    text = json.dumps(results, allow_nan=False)
    CHECK.validate(json.loads(text, parse_constant=refuse))


def test_nulls_where_a_back_end_has_no_value() -> None:
    results = sample()
    nulls = ("wait_s", "mfu", "pools", "maximum", "exposed_by_kind_s", "wire_bytes_per_gpu", "spread")
    row_of(results, "tutel").update(dict.fromkeys(nulls))
    row_of(results, "tutel")["peak_memory_gib"] = None
    row_of(results, "tutel").update(variant=None, reason=None)
    CHECK.validate(results)


def test_additional_descriptions_are_welcome_where_things_describe_themselves() -> None:
    results = sample()
    for block in ("model", "cluster", "workload", "run"):
        results[block]["something_new"] = {"a": 1}
    results["views"] = {"native": {"transports": {}}}
    row_of(results, "tutel")["plan"]["degree"] = 4
    CHECK.validate(results)


BROKEN: dict[str, Break] = {
    "an unknown row key": lambda r: row_of(r, "tutel").update(step_time=1.0),
    "a missing row key": lambda r: row_of(r, "tutel").pop("spread"),
    "a missing block": lambda r: r.pop("depth"),
    "an unknown block": lambda r: r.update(extra=1),
    "another schema": lambda r: r.update(schema="disagmoe.results/2"),
    "an unknown status": lambda r: row_of(r, "tutel").update(status="OK"),
    "an unknown view": lambda r: row_of(r, "tutel").update(view="both"),
    "ok without a step": lambda r: row_of(r, "tutel").update(step_time_s=None),
    "ok with a step of zero": lambda r: row_of(r, "tutel").update(step_time_s=0.0),
    "ok without a plan": lambda r: row_of(r, "tutel").update(plan=None),
    "oom with a step": lambda r: row_of(r, "dualpipe").update(step_time_s=1.0),
    "oom without the memory it needs": lambda r: row_of(r, "dualpipe").update(peak_memory_gib=None),
    "not applicable without a reason": lambda r: row_of(r, "comet").update(reason=""),
    "a speed-up of a row that did not run": lambda r: row_of(r, "comet").update(speedup=1.0),
    "negative time": lambda r: row_of(r, "tutel").update(bubble_s=-0.1),
    "MFU above one": lambda r: row_of(r, "tutel").update(mfu=1.2),
    "a reduction above one": lambda r: row_of(r, "tutel").update(stall_reduction=1.1),
    "text for a number": lambda r: row_of(r, "tutel").update(tokens_per_s="fast"),
    "half a kind table": lambda r: row_of(r, "tutel")["exposed_by_kind_s"].pop("p2p"),
    "an unknown pool": lambda r: row_of(r, "disagmoe")["pools"].update(B={}),
    "contention below one": lambda r: row_of(r, "tutel").update(contention={"compute": 0.9, "comm": 1.0}),
    "a fractional micro-batch count": lambda r: row_of(r, "tutel").update(microbatches=1.5),
    "no rows": lambda r: r.update(rows=[]),
    "an id that is no hash": lambda r: r["run"].update(id="latest"),
    "an unknown back end": lambda r: r.update(backend="simulated"),
    "a verdict without a value": lambda r: r.update(paper=[claim(ours=None)]),
    "not comparable without a reason": lambda r: r.update(paper=[claim(verdict="not comparable", ours=None)]),
    "not comparable with a value": lambda r: r.update(paper=[claim(verdict="not comparable", note="why")]),
    "an unknown verdict": lambda r: r.update(paper=[claim(verdict="close")]),
}


def claim(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"claim": "c", "low": 1.0, "high": 2.0, "unit": "x", "ours": 1.5}
    return {**row, "verdict": "inside", "note": "", **changes}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_records_are_refused(what: str) -> None:
    results = sample()
    BROKEN[what](results)
    assert not CHECK.is_valid(results)


def test_claims_are_accepted() -> None:
    good = [claim(), claim(low=None, note="at most"), claim(verdict="not comparable", ours=None, note="why")]
    CHECK.validate(sample(paper=good))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_strict_json_refuses_what_a_schema_cannot_see(bad: float) -> None:
    results = sample()
    row_of(results, "tutel")["mfu"] = bad
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps(results, allow_nan=False)
