"""DualPipe and DualPipeV: published gates, closed forms and their conditions, torch's order, rules, transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.combined import combined_stage_program
from disagmoe.plan.dualpipe import (
    dualpipe_orders,
    dualpipe_program,
    dualpipe_stage_program,
    dualpipe_stages,
    dualpipev_orders,
    dualpipev_program,
    dualpipev_stage_program,
    dualpipev_stages,
)
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.units import UnitOrder, peak_in_flight, unit_seconds
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline
from tests.plan.unit_loops import Unit, makespan, units


def run(program: Program, forward: float, backward: float, weight: float, pair: float) -> Timeline:
    seconds = unit_seconds(program, forward=forward, backward=backward, weight=weight, pair=pair)
    return simulate(program, Pricing.ideal(seconds))


def bubbles(timeline: Timeline, ranks: int) -> list[float]:
    busy = np.bincount(timeline.program.worker, weights=timeline.end_s - timeline.start_s, minlength=ranks)
    return [round(float(timeline.step_s - b), 9) for b in busy]


def dualpipe_form(p: int, n: int, f: float, b: float, w: float, fb: float) -> float:
    return (p + 1) * (f + b) + (n - p - 1) * fb + (p // 2 - 1) * (fb + b - 3 * w)


def dualpipev_form(r: int, n: int, f: float, b: float, w: float, fb: float) -> float:
    return (2 * r + 1) * (f + b) + (2 * n - 2 * r - 1) * fb + (r - 1) * (fb + b - 3 * w)


def test_gate_p8_n20() -> None:
    """F = 1, B = 2, W = 1 (https://github.com/deepseek-ai/DualPipe: bubble (P/2-1)(FB+B-3W), P+1 activations)."""
    program = dualpipe_stage_program(8, 20)
    verify(program)
    assert bubbles(run(program, 1, 2, 1, 3), 8) == [6.0] * 8
    overlapped = run(program, 1, 2, 1, 2.4)
    assert overlapped.step_s == pytest.approx(57.6, abs=1e-9)
    assert bubbles(overlapped, 8) == [3.0, 3.6, 4.2, 4.2, 4.2, 4.2, 3.6, 3.0]
    assert [peak_in_flight(o) for o in dualpipe_orders(8, 20)] == [9] * 8


def test_step_at_p16_n64_and_interleaving_beyond_it() -> None:
    """Interleaved 1F1B with the same overlap needs v >= 4 virtual stages to be at least as fast."""
    dualpipe = run(dualpipe_stage_program(16, 64), 1, 2, 1, 2.4).step_s
    assert dualpipe == pytest.approx(173.6, abs=1e-9)
    for v in (2, 4, 6, 8):
        combined = run(combined_stage_program(16, v, 64), 1 / v, 2 / v, 0, 2.4 / v).step_s
        assert (combined <= dualpipe) == (v >= 4)


@pytest.mark.parametrize(("ranks", "microbatches"), [(8, 20), (4, 8), (10, 32)])
def test_units_per_rank(ranks: int, microbatches: int) -> None:
    """N - 3P/2 + q + 1 pairs, one fewer in the middle, where one more W is pending as well."""
    for r, order in enumerate(dualpipe_orders(ranks, microbatches)):
        q = min(r, ranks - 1 - r)
        middle = q == ranks // 2 - 1
        assert order.paired.sum() == microbatches - 3 * ranks // 2 + q + 1 - middle
        assert peak_in_flight(order) == ranks + 1
        inputs, weights = (np.cumsum(order.phase == phase) for phase in (Phase.I, Phase.W))
        assert (inputs >= weights).all()
        assert inputs[-1] == weights[-1]


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 9), st.data())
def test_dualpipe_closed_form(half: int, more: int, forward: int, data: st.DataObject) -> None:
    """Exact where F = I, W <= F and a pair takes at least its backward."""
    ranks, weight = 2 * half, data.draw(st.integers(1, forward))
    backward = forward + weight
    pair = backward + data.draw(st.integers(0, 12))
    n = 2 * ranks + 2 * more
    found = run(dualpipe_stage_program(ranks, n), forward, backward, weight, pair).step_s
    assert found == dualpipe_form(ranks, n, forward, backward, weight, pair)


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 12), st.integers(1, 9), st.data())
def test_dualpipev_closed_form(ranks: int, more: int, forward: int, data: st.DataObject) -> None:
    weight = data.draw(st.integers(1, forward))
    backward = forward + weight
    pair = backward + data.draw(st.integers(0, 12))
    n = 2 * ranks + more
    found = run(dualpipev_stage_program(ranks, n), forward, backward, weight, pair).step_s
    assert found == dualpipev_form(ranks, n, forward, backward, weight, pair)


@pytest.mark.parametrize(
    ("condition", "f", "i", "w", "fb", "wanted", "formula"),
    [
        ("F = I (I longer)", 2, 3, 1, 5, 125, 127),
        ("F = I (I shorter)", 3, 2, 1, 5, 127, 124),
        ("W <= F", 2, 2, 3, 6, 138, 135),
        ("FB >= B", 2, 2, 1, 2, 79, 73),
    ],
)
def test_closed_forms_fail_without(condition: str, f: int, i: int, w: int, fb: int, wanted: int, formula: int) -> None:
    """P = 8, N = 20, and V with the same stages, R = 4, N = 10: each condition alone is missed."""

    def seconds(unit: Unit) -> float:
        return fb if len(unit) == 2 else {"F": f, "I": i, "W": w, "B": i + w}[unit[0][0]]

    assert dualpipe_form(8, 20, f, i + w, w, fb) == dualpipev_form(4, 10, f, i + w, w, fb) == formula
    assert run(dualpipe_stage_program(8, 20), f, i + w, w, fb).step_s == wanted, condition
    assert run(dualpipev_stage_program(4, 10), f, i + w, w, fb).step_s == wanted, condition
    v = [units(o, r, dualpipev_stages(4)) for r, o in enumerate(dualpipev_orders(4, 10))]
    assert makespan(v, 8, seconds) == wanted


@settings(max_examples=60)
@given(
    st.integers(1, 5), st.integers(0, 6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 20)
)
def test_any_durations_run_as_the_reference(half: int, more: int, f: int, i: int, w: int, fb: int) -> None:
    """Directions are independent chains with micro-batches of their own, so the reference needs no notion of them."""
    ranks, n = 2 * half, 4 * half + 2 * more
    program = dualpipe_stage_program(ranks, n)
    verify(program)
    plain = [units(o, r, dualpipe_stages(ranks)) for r, o in enumerate(dualpipe_orders(ranks, n))]
    done = Counter(action[:2] + action[3:] for order in plain for unit in order for action in unit if action[0] != "W")
    forwards = {(s, c): n // 2 for s in range(ranks) for c in (0, 1)}
    assert {k[1:]: x for k, x in done.items() if k[0] == "F"} == forwards
    microbatches = {(a[2] >= n // 2, a[3]) for order in plain for unit in order for a in unit}
    assert microbatches == {(False, 0), (True, 1)}

    def seconds(unit: Unit) -> float:
        return fb if len(unit) == 2 else {"F": f, "I": i, "W": w, "B": i + w}[unit[0][0]]

    assert makespan(plain, ranks, seconds) == run(program, f, i + w, w, fb).step_s


def torch_order(ranks: int, microbatches: int, rank: int) -> list[str]:
    """One rank's order by torch's own generator, called without building stages or process groups."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(schedules.ScheduleDualPipeV)
    schedule.pp_group_size = ranks
    schedule._n_microbatches = microbatches
    names = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}

    def text(action: object) -> str:
        parts = getattr(action, "sub_actions", None)
        if parts:
            return "+".join(text(p) for p in parts)
        stage, kind, microbatch = action[:3]  # type: ignore[index]
        return f"{stage}{names[kind.name]}{microbatch}"

    return [text(a) for a in schedule._calculate_single_rank_operations(rank)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 10), (4, 20)])
def test_dualpipev_order_is_torchs(ranks: int, microbatches: int) -> None:
    for r, order in enumerate(dualpipev_orders(ranks, microbatches)):
        ours = ["+".join(f"{s}{f}{m}" for f, s, m, _ in unit) for unit in units(order, r, dualpipev_stages(ranks))]
        assert ours == torch_order(ranks, microbatches, r)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [
        (3, 8, "an even number of pipeline ranks, at least 2; got 3"),
        (0, 8, "an even number of pipeline ranks, at least 2; got 0"),
        (4, 7, "an even number of micro-batches, half per direction; got 7"),
        (4, 6, r"at least 2 x 4 ranks = 8 micro-batches; got 6"),
        (4, 0, r"at least 2 x 4 ranks = 8 micro-batches; got 0"),
    ],
)
def test_preconditions_name_the_rule(ranks: int, microbatches: int, message: str) -> None:
    assert len(dualpipe_orders(4, 8)) == 4
    with pytest.raises(ValueError, match=message):
        dualpipe_orders(ranks, microbatches)


def test_preconditions_of_the_v() -> None:
    assert len(dualpipev_orders(3, 7)) == 3
    with pytest.raises(ValueError, match=r"its 2 x 4 = 8 stages; got 7"):
        dualpipev_orders(4, 7)
    with pytest.raises(ValueError, match="at least 1 pipeline rank; got 0"):
        dualpipev_orders(0, 7)


def split(stages: int, layers: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(layers), stages)]


Build = Callable[..., Program]


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2), st.booleans(), st.booleans())
def test_layer_programs_are_sound(half: int, more: int, layers: int, dense: int, exposed: bool, folded: bool) -> None:
    """verify passes and all of it runs, whether ranks wait for their transfers or not."""
    if folded:
        build, ranks, stages, n = dualpipev_program, half, 2 * half, 2 * half + more
    else:
        build, ranks, stages, n = dualpipe_program, 2 * half, 2 * half, 4 * half + 2 * more
    stage_layers = split(stages, stages + layers)
    moe = [layer >= dense for layer in range(stages + layers)]
    program = build(ranks=ranks, microbatches=n, stage_layers=stage_layers, moe=moe, p2p_exposed=exposed)
    verify(program)
    timeline = simulate(program, Pricing.ideal(np.where(waits(program), 0.0, 1.0)))
    assert timeline.step_s > 0.0
    crossings = ranks - 1 if not folded else 2 * (ranks - 1)
    sends = np.isin(program.stream, (Stream.SEND, Stream.SEND_B))
    assert sends.sum() == 2 * crossings * n
    assert waits(program).sum() == (2 * sends.sum() if exposed else 0)


def waits(program: Program) -> np.ndarray:
    return (program.kind == Kind.P2P) & (program.stream == Stream.COMPUTE)


def two_ranks(exposed: bool, transfer: float) -> float:
    """P = 2, N = 4, one dense layer per stage, attention alone takes time: F = 4, I = 4, W = 2, B = 6."""
    program = dualpipe_program(ranks=2, microbatches=4, stage_layers=[[0], [1]], moe=[False] * 2, p2p_exposed=exposed)
    verify(program)
    by_phase = np.zeros(len(Phase))
    by_phase[[Phase.F, Phase.I, Phase.W, Phase.B]] = 4, 4, 2, 6
    seconds = np.where(program.kind == Kind.ATTN, by_phase[program.phase], 0.0)
    seconds[(program.kind == Kind.P2P) & ~waits(program)] = transfer
    return simulate(program, Pricing.ideal(seconds)).step_s


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.0, 1.5])
def test_transfers_that_are_waited_for(transfer: float) -> None:
    """Units F0 F1 F0 B1 (F1 beside B0) B1 I0 W of each rank: 4F + 4B = 40 without transfers.

    Waiting: before F1 for one transfer each way, before the pair for two in a row
    each way, before I0 for one. Else only F1 and I0 need what has just been sent.
    """
    assert two_ranks(True, transfer) == 40.0 + 4 * transfer
    assert two_ranks(False, transfer) == 40.0 + 2 * transfer


def test_a_pair_sends_only_when_it_is_over_if_transfers_are_waited_for() -> None:
    for exposed in (True, False):
        program = dualpipe_program(
            ranks=4, microbatches=8, stage_layers=split(4, 4), moe=[True] * 4, p2p_exposed=exposed
        )
        seconds = np.where(waits(program), 0.0, np.where(program.kind == Kind.P2P, 0.25, 1.0))
        timeline = simulate(program, Pricing.ideal(seconds))
        early = 0
        for pair in np.unique(program.pair[program.pair >= 0]):
            rows = np.flatnonzero((program.pair == pair) & (program.kind == Kind.ATTN))
            over = timeline.end_s[rows].max()
            worker, backward = program.worker[rows[0]], program.microbatch[rows[program.phase[rows] == Phase.I]][0]
            layer = program.layer[rows[program.phase[rows] == Phase.I]][0] - 1
            sent = (program.kind == Kind.P2P) & (program.worker == worker) & (program.layer == layer)
            sent &= (program.microbatch == backward) & (program.phase == Phase.B)
            sent &= np.isin(program.stream, (Stream.SEND, Stream.SEND_B))
            early += int((timeline.start_s[sent] < over).sum())
        assert (early == 0) == exposed  # free to go, the gradient leaves while the last W runs


def test_gradients_of_both_copies_are_reduced_together() -> None:
    """GRAD_SYNC of a layer starts after the last gradient of that layer in either direction."""
    program = dualpipe_program(ranks=4, microbatches=8, stage_layers=split(4, 6), moe=[True] * 6)
    speed = np.where(program.kind == Kind.P2P, 0.0, 1.0 + 0.1 * program.worker)  # ranks finish at different times
    timeline = simulate(program, Pricing.ideal(speed))
    gradient = np.isin(program.kind, (Kind.ATTN, Kind.FFN)) & np.isin(program.phase, (Phase.B, Phase.W))
    reduces = (program.kind == Kind.GRAD_SYNC) & (program.phase == Phase.B)
    for layer in range(6):
        mine = gradient & (program.layer == layer)
        assert len(np.unique(program.worker[mine])) == 2
        rows = np.flatnonzero(reduces & (program.layer == layer))
        assert sorted(program.worker[rows]) == sorted(np.unique(program.worker[mine]))
        assert (timeline.start_s[rows] >= timeline.end_s[mine].max()).all()


def test_mirrored_ranks_reduce_in_the_same_order() -> None:
    """A process group spans both, so its collectives must be issued alike."""
    program = dualpipe_program(ranks=6, microbatches=12, stage_layers=split(6, 9), moe=[True] * 9)
    orders = [program.layer[program.stream_rows(w, Stream.SYNC)].tolist() for w in range(6)]
    assert orders == orders[::-1]
    # Nine layers in stages of 2, 2, 2, 1, 1, 1. Rank 1 ends with its own stage 1 (layers 2 and 3).
    assert orders[1] == [7, 3, 2, -1]
    assert orders[0] == [8, 1, 0, -1, -1]  # with embedding and head


def last_chunk(orders: Sequence[UnitOrder]) -> list[int]:
    return [int(o.backward[-1]) for o in orders]


def test_directions_enter_at_either_end() -> None:
    """Rank 0 begins with direction 0, rank P-1 with direction 1; each ends with its own direction."""
    orders = dualpipe_orders(4, 8)
    assert [int(o.forward[0]) for o in orders] == [0, 0, 1, 1]
    assert last_chunk(orders) == [0, 0, 1, 1]
    assert [int(o.forward_microbatch[0]) for o in orders] == [0, 0, 4, 4]
