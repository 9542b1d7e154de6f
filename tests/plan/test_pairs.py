"""Overlapped pairs: units of stages, start rules of a layer pair, DeepSeek's block, waits, mirrored gradients."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import KIND_LETTER, Kind, Phase, Stream
from disagmoe.plan.combined import combined_program, combined_stage_program, ring_stages
from disagmoe.plan.dependencies import PlanError, build_graph
from disagmoe.plan.pairs import PairedLayers
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.text import from_text, op_token, row_token, stage_text
from disagmoe.plan.units import UnitKey, unit_seconds
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline

OPS = ("Cb", "Af", "Mi", "Df", "Mw", "Db", "Mf", "Cf", "Ai", "Aw")
PHASE = {"f": Phase.F, "i": Phase.I, "w": Phase.W, "b": Phase.B}
KIND = {letter: kind for kind, letter in KIND_LETTER.items()}


def one_rank(layers: int, dense: tuple[int, ...] = ()) -> Program:
    """F_0, (F_1 beside B_0), B_1 on one worker."""
    moe = [layer not in dense for layer in range(layers)]
    program = combined_program(p=1, v=1, m=2, group=None, stage_layers=[list(range(layers))], moe=moe)
    verify(program)
    return program


def priced(program: Program, seconds: dict[str, float]) -> Timeline:
    """Simulate with seconds per operation name ("Af": attention forward), 0 for others."""
    table = np.zeros((len(Kind), len(Phase)))
    for name, value in seconds.items():
        table[KIND[name[0]], PHASE[name[1]]] = value
    return simulate(program, Pricing.ideal(table[program.kind, program.phase]))


def pair_times(timeline: Timeline) -> dict[tuple[str, int], tuple[float, float]]:
    """(start, end) of every layer operation of the pair, by name and layer."""
    program = timeline.program
    found = {}
    for row in np.flatnonzero((program.pair >= 0) & np.isin(program.kind, [KIND[x[0]] for x in OPS])):
        name = KIND_LETTER[Kind(program.kind[row])] + Phase(program.phase[row]).name.lower()
        found[name, int(program.layer[row])] = (float(timeline.start_s[row]), float(timeline.end_s[row]))
    return found


@settings(max_examples=60)
@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=10, max_size=10))
def test_start_rules_of_a_layer_pair(layers: int, lengths: list[int]) -> None:
    """Every rule of combined 1F1B's two streams, checked as an equality against the simulated pair."""
    timeline = priced(one_rank(layers), dict(zip(OPS, map(float, lengths), strict=True)))
    times = pair_times(timeline)
    begin = float(timeline.start_s[timeline.program.pair >= 0].min())

    def end(name: str, layer: int) -> float:
        return times[name, layer][1] if 0 <= layer < layers else begin

    for f in range(layers):
        b = layers - 1 - f
        before_f, before_b = f - 1, b + 1
        rules = {
            ("Cb", b): max(end("Cf", before_f), end("Ai", before_b)),
            ("Af", f): max(end("Aw", before_b), end("Cf", before_f)),
            ("Mi", b): max(end("Af", f), end("Cb", b)),
            ("Df", f): max(end("Af", f), end("Cb", b)),
            ("Mw", b): end("Mi", b),
            ("Db", b): max(end("Df", f), end("Mi", b)),
            ("Mf", f): max(end("Mw", b), end("Df", f)),
            ("Cf", f): max(end("Db", b), end("Mf", f)),
            ("Ai", b): max(end("Mf", f), end("Db", b)),
            ("Aw", b): end("Ai", b),
        }
        assert {key: times[key][0] for key in rules} == rules


def test_deepseeks_overlapped_block() -> None:
    """4 + 4 MoE layers of DeepSeek-V3 on 64 H800, EP 64, from the mean lengths of its own operations.

    https://github.com/deepseek-ai/profile-data, train.json: the block takes 129.0 ms
    there, 4.2 ms (3.3 %) of it exposed communication. Replaying means loses the spread
    between instances: 122.5 ms. This checks order and start rules, it validates no cost.
    """
    means_us = {
        "Af": 4370, "Ai": 9341, "Aw": 2388, "Mf": 4604, "Mi": 5306, "Mw": 3540,
        "Df": 6690, "Cf": 8684, "Cb": 5769, "Db": 7487,
    }  # fmt: skip
    timeline = priced(one_rank(4), {name: us * 1e-6 for name, us in means_us.items()})
    times = pair_times(timeline).values()
    wall = max(end for _, end in times) - min(start for start, _ in times)
    assert wall == pytest.approx(122.5e-3, abs=0.5e-3)
    compute = 4 * sum(means_us[name] for name in means_us if name[0] in "AM") * 1e-6
    assert 0.03 < (wall - compute) / wall < 0.04  # no gap in which neither stream works


def stream_names(program: Program, stream: Stream, paired: bool = True) -> list[str]:
    rows = program.stream_rows(0, stream)
    return [op_token(program.op(int(r))) for r in rows if (program.pair[r] >= 0) == paired]


def test_the_ten_operations_in_order() -> None:
    program = one_rank(2)
    assert " ".join(stream_names(program, Stream.COMPUTE)) == (
        "E-F1 H-B0 A0F1 M1I0 M1W0 M0F1 A1I0 A1W0 A1F1 M0I0 M0W0 M1F1 A0I0 A0W0 H-F1 E-B0"
    )
    assert " ".join(stream_names(program, Stream.COLL)) == "C1B0 D0F1 D1B0 C0F1 C0B0 D1F1 D0B0 C1F1"
    # Alone, forward and backward keep the same order, and the backward's dispatch is beside the experts' W.
    assert " ".join(stream_names(program, Stream.COMPUTE, paired=False)) == (
        "E-F0 A0F0 M0F0 A1F0 M1F0 H-F0 H-B1 M1I1 M1W1 A1I1 A1W1 M0I1 M0W1 A0I1 A0W1 E-B1 O-F-"
    )
    assert " ".join(stream_names(program, Stream.COLL, paired=False)) == "D0F0 C0F0 D1F0 C1F0 C1B1 D1B1 C0B1 D0B1"


def test_dense_layers_have_no_exchange() -> None:
    program = one_rank(2, dense=(0,))
    assert " ".join(stream_names(program, Stream.COMPUTE)) == (
        "E-F1 H-B0 A0F1 M1I0 M1W0 M0F1 A1I0 A1W0 A1F1 M0I0 M0W0 M1F1 A0I0 A0W0 H-F1 E-B0"
    )
    assert " ".join(stream_names(program, Stream.COLL)) == "C1B0 D1B0 D1F1 C1F1"


def test_surplus_layers_run_alone_and_the_last_weights_come_late() -> None:
    """Stages of 3 and 1 layers (p = 1, v = 2): a pair of unequal sides, once either way."""
    program = combined_program(p=1, v=2, m=3, group=None, stage_layers=[[0, 1, 2], [3]], moe=[True] * 4)
    verify(program)
    texts = {}
    for pair in np.unique(program.pair[program.pair >= 0]):
        rows = np.flatnonzero((program.pair == pair) & (program.stream == Stream.COMPUTE))
        texts[int(pair)] = " ".join(op_token(program.op(int(r))) for r in rows)
    assert "E-F1 H-B0 A0F1 M3I0 M3W0 M0F1 A3I0 A1F1 M1F1 A2F1 M2F1 A3W0" in texts.values()
    assert "A3F1 M2I0 M2W0 M3F1 A2I0 A2W0 M1I0 M1W0 A1I0 A1W0 M0I0 M0W0 A0I0 A0W0 H-F1 E-B0" in texts.values()


def test_the_late_weights_run_beside_the_transfer() -> None:
    """The gradient of a stage's input leaves when the last attention's I is done; its W does not delay it."""
    program = combined_program(p=2, v=2, m=4, group=None, stage_layers=[[0], [1], [2], [3]], moe=[True] * 4)
    seconds = np.where(np.isin(program.kind, (Kind.ATTN, Kind.FFN)), 1.0, 0.25)
    timeline = simulate(program, Pricing.ideal(seconds))
    moves = np.flatnonzero((program.stream == Stream.SEND_B) & (program.layer == 2))
    inputs = {int(program.microbatch[r]): r for r in np.flatnonzero((program.kind == Kind.ATTN) & (program.layer == 3))
              if program.phase[r] == Phase.I}  # fmt: skip
    for row in moves:
        assert timeline.start_s[row] == timeline.end_s[inputs[int(program.microbatch[row])]]


def test_a_pair_of_stages_is_one_unit() -> None:
    """Both start when the inputs of both are there, and both results are there at the end."""
    program = combined_stage_program(2, 2, 4)
    timeline = simulate(program, Pricing.ideal(unit_seconds(program, forward=3.0, backward=5.0, pair=6.5)))
    graph = build_graph(program)
    ends = dict(
        zip((row_token(program, int(r)) for r in graph.first_row), timeline.end_s[graph.first_row], strict=True)
    )
    pairs = defaultdict(list)
    for row in np.flatnonzero(program.pair >= 0):
        pairs[int(program.pair[row])].append(int(row))
    assert len(pairs) == 2 * (8 - 4)  # two warm-ups of (2 + 2 + 1) and (2 + 1) forwards of 8
    for first, second in pairs.values():
        assert program.phase[first] == Phase.F
        assert timeline.end_s[first] == timeline.start_s[second] == timeline.end_s[second]
        assert timeline.end_s[first] - timeline.start_s[first] == 6.5
        layer, microbatch = int(program.layer[second]), int(program.microbatch[second])
        worker = (layer + 1) % 2
        needs = f"S{layer + 1}B{microbatch}@w{worker}" if layer < 3 else f"S3F{microbatch}@w1"
        assert timeline.start_s[first] >= ends[needs]


def test_stage_projection_of_layers_and_stages_agree() -> None:
    """A pair of layers prints as the pair of stages it is."""
    layers = combined_program(p=2, v=1, m=3, group=None, stage_layers=[[0, 1], [2]], moe=[True] * 3)
    wanted = [t for t in stage_text(combined_stage_program(2, 1, 3)).split() if "OVERLAP" in t]
    assert [t for t in stage_text(layers, [0, 0, 1]).split() if "OVERLAP" in t] == wanted == ["(1F1;1B0)OVERLAP_F_B",
        "(1F2;1B1)OVERLAP_F_B"]  # fmt: skip


def test_templates_are_made_once_per_kind_of_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More micro-batches ask for no more templates: rows are stamped out by array operations."""
    asked: list[UnitKey] = []
    original = PairedLayers.template

    def counted(self: PairedLayers, key: UnitKey) -> object:
        asked.append(key)
        return original(self, key)

    monkeypatch.setattr(PairedLayers, "template", counted)
    counts = []
    for m in (16, 64):
        asked.clear()
        combined_program(p=4, v=2, m=m, group=None, stage_layers=[[s] for s in range(8)], moe=[True] * 8)
        assert len(set(asked)) == len(asked)
        counts.append(len(asked))
    assert counts[0] == counts[1]


def test_weights_belong_to_a_pair_of_layers_but_not_of_stages() -> None:
    verify(one_rank(2))
    text = """
program workers=1 layers=1 microbatches=2 chunks=1
w0 COMPUTE: S0F0 S0I0 S0F1&0 S0W0&0 S0B1
"""
    with pytest.raises(PlanError, match="has a phase other than F, B and I"):
        verify(from_text(text))


WAITING = """
program workers=2 layers=2 microbatches=1 chunks=1
w0 COMPUTE: A0F0 M0F0 P0F0 P0B0 M0B0 A0B0
w0 SEND: P0F0>1
w0 RECV_B: P0B0<1
w1 COMPUTE: P0F0 A1F0 M1F0 M1B0 A1B0 P0B0
w1 RECV: P0F0<0
w1 SEND_B: P0B0>0
"""


def edges(text: str) -> set[tuple[str, str]]:
    program = from_text(text)
    graph = build_graph(program)
    names = [row_token(program, int(r)) for r in graph.first_row]
    return {
        (names[i], names[int(j)])
        for i in range(graph.n_nodes)
        for j in graph.succ[graph.succ_ptr[i] : graph.succ_ptr[i + 1]]
    }


def test_waits_are_batches_on_the_compute_stream() -> None:
    """Both transfers of worker 0's batch start after M0F0 and end before M0B0."""
    found = edges(WAITING)
    move_f, move_b = "P0F0 w0>w1", "P0B0 w1>w0"
    assert {e for e in found if move_f in e} == {
        ("M0F0@w0", move_f), (move_f, "P0F0@w0"), (move_f, "P0F0@w1"), (move_f, "A1F0@w1"),
    }  # fmt: skip
    assert {e for e in found if move_b in e} == {
        ("A1B0@w1", move_b), ("M0F0@w0", move_b), (move_b, "P0B0@w0"), (move_b, "P0B0@w1"), (move_b, "M0B0@w0"),
    }  # fmt: skip
    verify(from_text(WAITING))


def test_waits_take_no_time_and_are_no_work() -> None:
    program = from_text(WAITING)
    seconds = np.where(np.isin(program.stream, (Stream.SEND, Stream.RECV, Stream.SEND_B, Stream.RECV_B)), 0.5, 1.0)
    seconds[(program.kind == Kind.P2P) & (program.stream == Stream.COMPUTE)] = 0.0
    assert simulate(program, Pricing.ideal(seconds)).step_s == 2 + 0.5 + 4 + 0.5 + 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("P0B0 M0B0", "M0B0 P1F0", "unmatched wait: P1F0@w0 waits for a transfer that its worker has no part in"),
        ("w1 COMPUTE: P0F0", "w1 COMPUTE: P0F0 P0F0", "duplicated operation: P0F0@w1 and P0F0@w1"),
        ("A1B0 P0B0", "P0B0 A1B0", "deadlock: "),
    ],
)
def test_faulty_waits_are_named(old: str, new: str, complaint: str) -> None:
    assert old in WAITING
    with pytest.raises(PlanError, match=complaint):
        verify(from_text(WAITING.replace(old, new)))


def test_a_reduction_waits_for_every_replica_of_its_layer() -> None:
    text = """
program workers=2 layers=2 microbatches=2 chunks=1
w0 COMPUTE: A0F0 M0F0 A1F1~1 M1F1~1 M1B1~1 A1B1~1 M0B0 A0B0 O-F-
w0 SEND: P0F0>1
w0 RECV: P0F1~1<1
w0 SEND_B: P0B1~1>1
w0 RECV_B: P0B0<1
w0 SYNC: G0B- G1B- G-B-
w1 COMPUTE: A0F1~1 M0F1~1 A1F0 M1F0 M1B0 A1B0 M0B1~1 A0B1~1 O-F-
w1 SEND: P0F1~1>0
w1 RECV: P0F0<0
w1 SEND_B: P0B0>0
w1 RECV_B: P0B1~1<0
w1 SYNC: G0B- G1B- G-B-
"""
    verify(from_text(text))
    found = edges(text)
    for w in (0, 1):
        assert {a for a, b in found if b == f"G0B-@w{w}"} == {"M0B0@w0", "A0B0@w0", "M0B1~1@w1", "A0B1~1@w1"}
        assert {a for a, b in found if b == f"G1B-@w{w}"} == {"M1B0@w1", "A1B0@w1", "M1B1~1@w0", "A1B1~1@w0"}
        everything = {"M0B0@w0", "A0B0@w0", "M0B1~1@w1", "A0B1~1@w1", "M1B0@w1", "A1B0@w1", "M1B1~1@w0", "A1B1~1@w0"}
        assert {a for a, b in found if b == f"G-B-@w{w}"} == everything


def test_stages_of_a_ring() -> None:
    stages = ring_stages(3, 2)
    assert stages.of == ((0, 3), (1, 4), (2, 5))
    assert [stages.home(s, 0) for s in (-1, 0, 4, 5, 6)] == [-1, 0, 1, 2, -1]
