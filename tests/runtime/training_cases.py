"""Whole training steps on several ranks against the single-process model: what runs on every rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagmoe.model import LossWeights, ReferenceModel
from disagmoe.model.init import standard_normal
from disagmoe.ops import Kind, Stream
from disagmoe.plan.plan import Plan
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.head_shard import Fragment
from disagmoe.runtime.step import PRECISIONS, RunOptions, StepRunner
from disagmoe.specs import ModelSpec
from disagmoe.train.plan import RingShape, ring_plan
from tests.model.shapes import FAMILIES, scramble


@dataclass(frozen=True)
class Case:
    """One step. `spec` overrides fields of the family's model."""

    family: str = "qwen3"
    layers: int = 2
    spec: tuple[tuple[str, object], ...] = ()
    p: int = 1
    m: int = 1
    n: int = 1
    dp: int = 1
    microbatches: int = 2
    sequences: int = 4
    seq: int = 5
    order: str = "comm_stage"
    group: int | None = None
    head: str = "last_f"
    streams: int = 1
    merge: str = "rank"
    transport: str = "pairs"
    node_size: int | None = None
    recompute: tuple[Kind, ...] = ()
    balance: float = 0.02
    z: float = 0.003
    precision: str = "fp64"
    skew: bool = False  # every token wants the first experts: the router's bias sees to it
    seed: int = 0

    @property
    def shape(self) -> RingShape:
        return RingShape(self.p, self.m, self.n, self.dp)

    @property
    def model(self) -> ModelSpec:
        base = FAMILIES[self.family]
        fields: dict[str, object] = {"layers": self.layers, **dict(self.spec)}
        for name in ("dense_layers", "windowed_layers"):
            fields.setdefault(name, tuple(i for i in getattr(base, name) if i < self.layers))
        return replace(base, **fields)  # type: ignore[arg-type]

    @property
    def plan(self) -> Plan:
        return ring_plan(
            self.model,
            self.shape,
            microbatches=self.microbatches,
            sequences=self.sequences,
            order=self.order,
            group=self.group,
            head=self.head,
            compute_streams=self.streams,
            merge=self.merge,
            recompute=frozenset(self.recompute),
        )

    @property
    def cut(self) -> Cut:
        return Cut(self.sequences, self.seq, self.dp, self.microbatches)

    @property
    def weights(self) -> LossWeights:
        return LossWeights(self.balance, self.z)

    @property
    def options(self) -> RunOptions:
        return RunOptions(
            precision=self.precision,
            weights=self.weights,
            transport=self.transport,
            node_size=self.node_size,
            timeout_s=20.0,
            chunk_tokens=7,
        )

    def make_reference(self) -> ReferenceModel:
        """The single-process model that a run of this case is compared with."""
        return ReferenceModel(self.model, 0, PRECISIONS[self.precision].parameters, chunk_tokens=7)

    def tokens(self, step: int = 0) -> Tensor:
        """All sequences of a step, [sequences, seq + 1]."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return torch.randint(0, self.model.vocab, (self.sequences, self.seq + 1), generator=generator)


@dataclass(frozen=True)
class Outcome:
    """What one rank found: largest differences to the reference, and whether it ran what was planned."""

    loss: float
    gradient: float
    worst: str
    names: int
    counts_equal: bool
    as_planned: bool
    wire_bytes: int
    dropped: int = 0
    expected_dropped: int = 0


def reference_of(case: Case, *, scrambled: bool = True) -> ReferenceModel:
    model = case.make_reference()
    if scrambled:
        for part in model.parts():
            scramble(part)
    if case.skew:
        skew(model.values())
    return model


def skew(values: dict[str, Tensor]) -> None:
    """Let every router prefer the experts with low numbers."""
    for name, value in values.items():
        if name.endswith("router.bias"):
            value.copy_(-10.0 * torch.arange(value.numel()))


def scramble_parts(runner: StepRunner) -> None:
    """The values of a scrambled reference model, in parts that may hold some rows of a matrix only."""
    for part in runner.holdings.parts():
        scramble(part)
        for piece in part.all_pieces():
            if isinstance(piece, Fragment):
                shape = (piece.rows, *piece.value.shape[1:])
                whole = standard_normal(piece.name, shape, seed=11).to(piece.value.dtype) * 0.3
                piece.value.copy_(whole[piece.first : piece.first + piece.value.shape[0]])


def rows_of(label: str, truth: dict[str, Tensor]) -> Tensor:
    """What `label`, a name or `name[first:last]`, means in the whole model."""
    name, _, rows = label.partition("[")
    first, _, last = rows.rstrip("]").partition(":")
    return truth[name][int(first) : int(last)] if rows else truth[name]


def one_step(context: Context, case: Case) -> Outcome:
    """Run one step of `case` and compare with the reference; collective."""
    tokens = case.tokens()
    with StepRunner(context, case.plan, case.model, case.cut, case.options) as runner:
        scramble_parts(runner)
        if case.skew:
            skew(runner.values())
        result = runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
        found = runner.gradients()
        planned = {stream: [task.row for task in tasks] for stream, tasks in runner.executor.script.streams.items()}
        sent = runner.exchanges.ledger.total().total
    reference = reference_of(case)
    expected = reference.accumulate([(tokens[:, :-1], tokens[:, 1:])], case.weights)
    truth = reference.gradients()
    differences = {name: float((gradient - rows_of(name, truth)).abs().max()) for name, gradient in found.items()}
    worst = max(differences, key=differences.__getitem__, default="")
    return Outcome(
        loss=abs(result.report.loss - expected.loss),
        gradient=differences.get(worst, 0.0),
        worst=worst,
        names=len(found),
        counts_equal=all(torch.equal(result.report.counts[i], n) for i, n in expected.counts.items()),
        as_planned=result.record.ran == planned and Stream.COMPUTE in planned,
        wire_bytes=sent,
        dropped=int(result.sums.dropped.sum()),
        expected_dropped=getattr(reference, "dropped", 0),
    )
