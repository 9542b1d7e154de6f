"""The sensitivity study: what is asked where, what is compared, and where DisagMoE stops winning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baselines.registry import REFERENCE, system_names
from bench import crossing, points, sensitivity
from bench.axes import AXES, sequences
from bench.config import RunConfig
from bench.crossing import crossings
from bench.points import Answer, Task
from bench.sensitivity import BEST, Place, Standing, based, competitors, measure, places
from bench.study import AXES as KINDS
from tests.bench.helpers import config

OWN = "disagmoe"
PAIRED = ["megatron_1f1b_overlap", "dualpipe", "dualpipe_v"]
STEPS: Mapping[str, float] = {REFERENCE: 2.0, "tutel": 1.5, OWN: 1.0}


def study(axes: dict[str, Any], plans: int | None = None, **changes: Any) -> RunConfig:
    mapping = {"kind": "sensitivity", "axes": axes, "plans": plans}
    systems = changes.pop("systems", "tutel,disagmoe")
    return config(study=mapping, transport="native", systems=systems, **changes)


def row(system: str, step_s: float | None, status: str = "ok") -> dict[str, Any]:
    empty = dict.fromkeys(
        ("exposed_comm_s", "bubble_s", "microbatches", "plan", "peak_memory_gib", "gpus_used", "pools")
    )
    reason = "" if status == "ok" else "why"
    empty |= {"contention": {"compute": 1.2, "comm": 1.3}, "transport": "nccl"}
    return {**empty, "system": system, "variant": "", "status": status, "reason": reason, "step_time_s": step_s}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Task]]:
    """Answers by a formula instead of a simulation; the tasks asked are noted."""

    def install(step: Callable[[Task], float | None]) -> list[Task]:
        seen: list[Task] = []

        def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
            seen.extend(tasks)
            found = []
            for task in tasks:
                value = step(task)
                status = "ok" if value is not None else "oom"
                candidates = tuple({"pp": i} for i in range(5))
                found.append((Answer(row(task.system, value, status), candidates[:3], candidates),))
            return found

        for module in (sensitivity, crossing):
            monkeypatch.setattr(module, "answers", answers)
        return seen

    return install


def test_every_axis_changes_what_it_says_and_nothing_else() -> None:
    base = config(transport="native")
    settings: dict[str, Any] = {"contention_scale": 2.0, "nic": 0.5, "skew": 1.5, "batch": 8.0}
    settings |= {"replay": "hidden", "merge": "rank", "head": "next_a", "nics": "own", "compute_streams": 1}
    assert list(AXES) == list(settings) == list(KINDS["sensitivity"])
    changed = {axis: AXES[axis].apply(base, setting) for axis, setting in settings.items()}
    assert changed["contention_scale"] == replace(base, contention_scale=2.0)
    assert changed["nic"].cluster.nic_gbs_per_gpu() == pytest.approx(base.cluster.nic_gbs_per_gpu() / 2)
    assert changed["skew"].workload == replace(base.workload, skew=1.5)
    assert changed["batch"].workload.global_batch == 256  # 8 x 32
    assert changed["merge"] == replace(base, merge="rank")
    for axis in ("head", "nics", "compute_streams"):
        assert changed[axis].system_options == {OWN: {axis: settings[axis]}}
        assert [name for name in system_names() if AXES[axis].changes(name)] == [OWN]
    assert changed["replay"].system_options == {name: {"replay": "hidden"} for name in PAIRED}
    assert [name for name in system_names() if AXES["replay"].changes(name)] == PAIRED
    assert all(AXES["skew"].changes(name) for name in system_names())
    assert sequences(replace(base, workload=replace(base.workload, global_batch=1024)), 0.4) == 384


def test_places_start_at_the_base_and_do_not_repeat_it() -> None:
    run = study({"skew": [1, 1.5], "head": ["last_f", "next_a"]})
    assert list(places(run)) == [
        Place("tiny"),
        Place("tiny", "skew", 1.5),
        Place("tiny", "head", "last_f"),
        Place("tiny", "head", "next_a"),
    ]


def test_an_axis_asks_only_the_systems_that_it_changes(answered: Callable[..., list[Task]]) -> None:
    seen = answered(lambda task: STEPS[task.system])
    standings = measure(study({"skew": [2], "merge": ["none"]}), print)
    asked = [(task.name.split()[1], task.system) for task in seen]
    everyone = [REFERENCE, "tutel", OWN]
    assert asked == [("base", s) for s in everyone] + [("skew=2", s) for s in everyone] + [("merge=none", OWN)]
    merged = standings[Place("tiny", "merge", "none")]
    assert (merged.speedup(REFERENCE), merged.speedup(BEST)) == (2.0, 1.5)
    assert merged.rival(BEST) == row("tutel", 1.5)


def test_baselines_may_try_plans_of_the_base_while_disagmoe_searches(answered: Callable[..., list[Task]]) -> None:
    seen = answered(lambda task: STEPS[task.system])
    measure(study({"skew": [2]}, plans=2), print)
    known = {(task.name.split()[1], task.system): task.known for task in seen}
    assert known["base", "tutel"] is None
    assert known["skew=2", "tutel"] == {"": ({"pp": 0}, {"pp": 1})}
    assert known["skew=2", OWN] is None


def test_what_did_not_run_has_no_gain_and_is_said(answered: Callable[..., list[Task]]) -> None:
    answered(lambda task: None if task.system == OWN and task.config.workload.skew > 1 else STEPS[task.system])
    run = study({"skew": [2]})
    standings = measure(run, print)
    lost = sensitivity.point(Place("tiny", "skew", 2.0), standings[Place("tiny", "skew", 2.0)])
    assert (lost["status"], lost["reason"], lost["speedup_over_best"]) == ("oom", "disagmoe: why", None)
    assert lost["best_baseline"] == "tutel"
    found = crossings(run, standings, print)
    assert [one.note for one in found] == ["did not run at 2", "did not run at 2"]
    assert found[0].values == ()
    assert found[0].ahead is True


def test_a_broken_baseline_fails_the_point() -> None:
    replies = {name: (Answer(row(name, step)),) for name, step in STEPS.items()}
    replies["tutel"] = (Answer(row("tutel", None, "failed")),)
    found = sensitivity.point(Place("tiny"), Standing(replies))
    assert (found["status"], found["reason"]) == ("failed", "tutel: why")


def test_a_transport_without_contention_is_remarked() -> None:
    def remarks(compute: float) -> list[str]:
        own = {**row(OWN, 1.0), "contention": {"compute": compute, "comm": 1.0}, "transport": "m2n_rdma"}
        return sensitivity.remarks({Place("tiny"): Standing({OWN: (Answer(own),)})})

    assert remarks(1.1) == []
    (line,) = remarks(1.0)
    assert "disagmoe on m2n_rdma has no contention to scale" in line


def test_crossings_are_found_to_their_tolerance(answered: Callable[..., list[Task]]) -> None:
    """DisagMoE takes skew^2 / 2 of the reference: even at skew sqrt(2)."""
    seen = answered(
        lambda task: (
            task.config.workload.skew ** (2 if task.system == OWN else 0) / (2.0 if task.system == OWN else 1.0)
        )
    )
    run = study({"skew": [1, 3]})
    standings = measure(run, print)
    over = {one.over: one for one in crossings(run, standings, print)}
    for one in over.values():
        assert one.tolerance == pytest.approx(0.02)
        (value,) = one.values
        assert abs(value - 2**0.5) <= one.tolerance / 2
        assert one.ahead is True
    between = [task for task in seen if "skew=1." in task.name]
    assert {task.system for task in between} == {REFERENCE, "tutel", OWN}
    assert all(task.known == {"": ({"pp": 0}, {"pp": 1}, {"pp": 2})} for task in between)


def test_no_crossing_and_two_of_them(answered: Callable[..., list[Task]]) -> None:
    def step(task: Task) -> float:
        skew = task.config.workload.skew
        return 1.0 if task.system == OWN else 0.9 if 1.5 < skew < 2.5 else 2.0

    answered(step)
    run = study({"skew": [1, 2, 3], "contention_scale": [0, 2]})
    found = crossings(run, measure(run, print), print)
    by = {(one.axis, one.over): one for one in found}
    assert by["contention_scale", BEST].values == ()
    assert by["contention_scale", BEST].ahead is True
    first, second = by["skew", BEST].values
    assert (first, second) == (pytest.approx(1.5, abs=0.02), pytest.approx(2.5, abs=0.02))


def test_between_points_only_baselines_that_come_close_are_run(answered: Callable[..., list[Task]]) -> None:
    steps = {REFERENCE: 2.3, "tutel": 2.0}
    seen = answered(lambda task: steps.get(task.system, task.config.workload.skew))
    run = study({"skew": [1, 3]})
    (_, over_best) = crossings(run, measure(run, print), print)
    assert over_best.values[0] == pytest.approx(2.0, abs=0.02)
    over_reference = {task.name for task in seen if task.system == REFERENCE and task.known}
    both = {task.name for task in seen if task.system == "tutel" and task.known}
    assert over_reference  # asked for its own crossing only, at 2.3
    assert both
    assert not {name.split()[1] for name in both} & {name.split()[1] for name in over_reference} - {"skew=2"}


def test_batches_are_halved_in_multiples_of_128(answered: Callable[..., list[Task]]) -> None:
    """Even at 700 sequences: the nearest multiples are 640 and 768."""
    seen = answered(lambda task: task.config.workload.global_batch / 700 if task.system == OWN else 1.0)
    run = study({"batch": [1, 4]}, batch=512)
    (over_reference, _) = crossings(run, measure(run, print), print)
    assert all(task.config.workload.global_batch % 128 == 0 for task in seen)
    (value,) = over_reference.values
    assert value == pytest.approx((640 + 768) / 2 / 512)
    assert over_reference.tolerance == 0.25


def test_refusals() -> None:
    with pytest.raises(ValueError, match="is about disagmoe"):
        competitors(study({"skew": [2]}, systems="tutel"))
    with pytest.raises(ValueError, match="transport=native"):
        based(config(), config().model)


def test_equal_questions_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def answer(task: Task) -> tuple[Answer, ...]:
        ran.append(task.system)
        return (Answer(row(task.system, 1.0)),)

    monkeypatch.setattr(points, "answer", answer)
    plain = config(transport="native")
    forced = AXES["head"].apply(plain, "next_a")
    tasks = [points.asked("a", plain, "tutel"), points.asked("b", forced, "tutel"), points.asked("c", forced, OWN)]
    replies = points.answers(tasks, processes=1)
    assert ran == ["tutel", OWN]
    assert replies[0] is replies[1]


def test_other_processes_give_the_same_answers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(config(transport="native"), system_options={})
    tasks = [points.asked(name, run, name) for name in (REFERENCE, "tutel")]
    here = points.answers(tasks, processes=1)
    assert points.answers(tasks, processes=2) == here
    assert [reply[0].row["system"] for reply in here] == [REFERENCE, "tutel"]
    for reply in here:
        assert reply[0].row["status"] in ("ok", "oom")
