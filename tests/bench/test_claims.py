"""The points that single claims need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench import claims
from bench.claims import conduct, points
from bench.points import Answer, Task
from bench.study import study_from_mapping
from disagmoe.specs import load_model
from tests.bench.helpers import config
from tests.bench.test_sensitivity import row

AXES = {
    "ratio": ["16:16", "16:10"],
    "ratio_nics": ["halves"],
    "ratio_seq": [4096],
    "top_k": [2, 4],
    "top_k_seq": [8192],
    "ep": [8, 16],
    "depth": [2, 5],
    "depth_seq": [8192],
}


def study(**axes: Any) -> Any:
    mapping = {"kind": "claims", "also": ["deepseek_moe"], "axes": {**AXES, **axes}}
    return config(transport="native", systems="disagmoe", study=mapping)


def test_points_fix_one_thing_each() -> None:
    found = points(study())
    ratio, top_k, depth = ([p for p in found if p.axis == axis] for axis in ("ratio", "top_k", "depth"))
    assert [(p.config.model.name, p.setting) for p in ratio] == [
        *(("tiny", "16:16"), ("tiny", "16:10"), ("deepseek_moe", "16:16"), ("deepseek_moe", "16:10")),
    ]
    assert ratio[1].config.system_options == {"disagmoe": {"m": 16, "n": 10, "nics": "halves"}}
    assert [(p.at["ratio"], p.at["nics"]) for p in ratio[:2]] == [("16:16", "halves"), ("16:10", "halves")]
    assert (ratio[0].config.workload.seq, ratio[0].config.workload.global_batch) == (4096, 2048)
    assert [p.setting for p in top_k] == ["top-2, EP 8", "top-2, EP 16", "top-4, EP 8", "top-4, EP 16"]
    assert {p.config.model.name for p in top_k} == {"deepseek_moe"}  # the one with 64 experts
    assert [(p.config.model.top_k, p.config.ep) for p in top_k] == [(2, 8), (2, 16), (4, 8), (4, 16)]
    # tiny has 4 layers: no ring of depth 5; deepseek_moe 28: ceil(28 / 5) = 6
    assert [p.setting for p in depth] == ["p=2, v=2", "p=2, v=14", "p=5, v=6"]
    assert [p.at["v"] for p in depth] == [2, 14, 6]


def test_each_point_is_held_against_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
        steps = {"disagmoe": 2.0, "megatron_1f1b": 3.0}
        lost = {"system": "disagmoe", "n": 10}
        found = []
        for task in tasks:
            n = task.config.system_options.get("disagmoe", {}).get("n")
            gone = {"system": task.system, "n": n} == lost
            found.append((Answer(row(task.system, None if gone else steps[task.system], "oom" if gone else "ok")),))
        return found

    monkeypatch.setattr(claims, "answers", answers)
    first, second = (p for p in conduct(study(), print)["points"] if (p["axis"], p["model"]) == ("ratio", "tiny"))
    assert (first["setting"], first["speedup_over_reference"]) == ("16:16", 1.5)
    assert (second["setting"], second["status"], second["speedup_over_reference"]) == ("16:10", "oom", None)


def of_kind(kind: str, axes: dict[str, Any], **changes: Any) -> Any:
    return config(transport="native", systems="disagmoe", study={"kind": kind, "axes": axes}, **changes)


def test_free_nics_leave_the_rule_to_the_tuner_and_the_ring_to_its_options() -> None:
    axes = {"ratio": ["2:1"], "ratio_nics": ["halves", "free"], "ratio_seq": [4096]}
    halves, free = points(of_kind("ratio_sweep", axes, system={"disagmoe": {"p": 1, "dp": 1}}))
    assert halves.config.system_options == {"disagmoe": {"p": 1, "dp": 1, "m": 2, "n": 1, "nics": "halves"}}
    assert free.config.system_options == {"disagmoe": {"p": 1, "dp": 1, "m": 2, "n": 1}}
    assert (halves.setting, free.setting) == ("2:1", "2:1, NICs free")


def test_batches_are_multiples_of_the_default_one() -> None:
    found = points(of_kind("microbatches", {"batch": [0.25, 2], "batch_seq": [4096]}))
    # 8,388,608 tokens / 4,096 = 2,048 sequences
    assert [(p.config.workload.global_batch, p.setting) for p in found] == [
        *((512, "0.25× (512 sequences)"), (4096, "2× (4,096 sequences)")),
    ]


def test_top_k_is_about_models_with_64_experts() -> None:
    axes = {"top_k": [2], "top_k_seq": [4096], "ep": [2]}
    with pytest.raises(ValueError, match="topk_ep is about models with 64 experts; tiny has 8"):
        points(of_kind("topk_ep", axes))


def test_a_study_may_leave_groups_out() -> None:
    mapping = {"kind": "claims", "axes": {"depth": [1], "depth_seq": [4096]}}
    run = config(transport="native", study=mapping)
    assert [p.axis for p in points(run)] == ["depth"]
    assert study_from_mapping(mapping, load_model("qwen3")).settings("top_k") == ()
