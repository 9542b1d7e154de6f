"""Steps of `disagmoe_plus`: every switch as it changes a ring's or a pipeline's Program, on a few ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from disagmoe.plan.af_mapped import Clock, mapped_program
from disagmoe.plan.colocated import without_waits
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dualpipe import dualpipev_program
from disagmoe.plan.early_gather import gather_early
from disagmoe.plan.lookahead import Window, look_ahead
from disagmoe.plan.plan import Plan, Worker
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.runtime.child import Context
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.step import StepRunner
from tests.runtime.colocated_cases import Colocated
from tests.runtime.training_cases import Case


@dataclass(frozen=True)
class Switched(Case):
    """A ring with switches: `put_off` -1 whole backwards, `rows` 0 no window, `early` gathering.

    `attn` names the A-worker of every layer and `p_f` the number of F-groups (0: p).
    With `shared_nodes` k the groups of a stage lie on the same k nodes (0: on nodes of their own).
    """

    put_off: int = -1
    rows: int = 0
    early: bool = False
    attn: tuple[int, ...] = ()
    p_f: int = 0
    shared_nodes: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * (self.p * self.m + (self.p_f or self.p) * self.n)

    @property
    def plan(self) -> Plan:
        plan = super().plan
        if self.attn or self.p_f:
            plan = self._mapped(plan)
        if self.shared_nodes:
            plan = self._on_shared_nodes(plan)
        return Plan(plan.layout, switched(plan.program, self.put_off, self.rows, self.early, self.seed))

    def _on_shared_nodes(self, plan: Plan) -> Plan:
        k, placement = self.shared_nodes, plan.layout.placement
        workers = tuple(
            replace(worker, nodes=k, node_ids=tuple(range(k * (i % self.p), k * (i % self.p + 1))))
            for i, worker in enumerate(placement.workers)
        )
        return Plan(replace(plan.layout, placement=replace(placement, workers=workers)), plan.program)

    def _mapped(self, plan: Plan) -> Plan:
        p_f = self.p_f or self.p
        attn = self.attn or tuple(layer % self.p for layer in range(self.layers))
        ffn = tuple(self.p + layer % p_f for layer in range(self.layers))
        heads = tuple(range(self.p, self.p + p_f)) if self.head == "spread" and p_f > 1 else (ffn[-1],)
        groups = [("A", self.m, i) for i in range(self.p)] + [("F", self.n, i) for i in range(p_f)]
        placement = replace(
            plan.layout.placement,
            workers=tuple(Worker(f"{pool}{i}", pool, gpus, 1, 1.0, (0,)) for pool, gpus, i in groups),
            attn=attn,
            ffn=ffn,
            embed=attn[0],
            head=heads[0],
            head_shards=heads if len(heads) > 1 else (),
        )
        clock = Clock(self.p, self.group or 4 * self.p, self.order)
        program = mapped_program(
            attn=attn, ffn=ffn, m=self.microbatches, clock=clock, head=self.head, recompute=self.recompute
        )
        return Plan(replace(plan.layout, placement=placement), program)


@dataclass(frozen=True)
class SwitchedPipeline(Colocated):
    """A pipeline with switches; `system` "plain" is 1F1B without waits and with backwards in two parts."""

    rows: int = 0
    early: bool = False

    @property
    def program(self) -> Program:
        moe = [self.model.is_moe(layer) for layer in range(self.layers)]
        shared = {"stage_layers": self.stages, "moe": moe, "recompute": self.recompute, "chunks": self.chunks}
        if self.system == "dualpipev":
            program = dualpipev_program(ranks=self.p, microbatches=self.microbatches, **shared)  # type: ignore[arg-type]
        elif self.system == "combined":
            program = combined_program(
                p=self.p,
                v=self.v,
                m=self.microbatches,
                group=None,
                **shared,  # type: ignore[arg-type]
            )
        else:
            program = split_backward(without_waits(super().program))
        return switched(program, -1, self.rows, self.early, self.seed)


def switched(program: Program, put_off: int, rows: int, early: bool, seed: int) -> Program:
    """The Program with its switches; the window sees random durations, which both ends of a transfer share."""
    program = program if put_off < 0 else split_backward(program, put_off)
    program = gather_early(program) if early else program
    if not rows:
        return program
    columns = ("kind", "phase", "layer", "microbatch", "chunk", "replica")
    keys = np.stack([getattr(program, name) for name in columns], axis=1)
    _, number = np.unique(keys, axis=0, return_inverse=True)
    seconds = np.random.default_rng(seed).uniform(0.5, 1.5, len(program))
    return look_ahead(program, Pricing.ideal(seconds[number.reshape(-1)]), Window(rows, 2, 3))


RECIPE = Recipe(lr=0.02, warmup=0, steps=10, clip=0.5)
STEPS = 3


def early_and_late(context: Context, case: Switched | SwitchedPipeline) -> float:
    """Largest difference of any parameter after some steps, whether gathered early or at the end of each step."""
    early, late = (_trained(context, replace(case, early=early)) for early in (True, False))
    return max(float((early[name] - late[name]).abs().max()) for name in late)


def _trained(context: Context, case: Switched | SwitchedPipeline) -> dict[str, Tensor]:
    options = replace(case.options, recipe=RECIPE)
    with StepRunner(context, case.plan, case.model, case.cut, options) as runner:
        for step in range(STEPS):
            tokens = case.tokens(step)
            runner.step(lambda wanted, tokens=tokens: tokens[wanted.start : wanted.stop])  # type: ignore[misc]
        return {name: value.clone() for name, value in runner.values().items()}
