"""Published memory rows as Layouts and Programs of ours."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from disagmoe.cost.recompute import Recompute
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.memory import Recipe
from disagmoe.plan.memory_report import MemoryReport, memory_report
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.plan.program import Program
from disagmoe.specs import ModelSpec, Workload, load_model
from disagmoe.specs.model import LatentAttention

REFERENCE = Path(__file__).parent.parent / "reference"
Row = dict[str, str]


def points() -> list[Row]:
    with (REFERENCE / "memory-points.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def excluded() -> list[Row]:
    with (REFERENCE / "memory-excluded.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class DenseSpec(ModelSpec):
    """A dense model, for rows that were measured on one: the suite itself plans for experts only."""

    def _check_layers(self) -> None:
        pass


def llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, width: int) -> ModelSpec:
    return DenseSpec(
        name=name,
        title=name,
        family="llama",
        layers=layers,
        hidden=hidden,
        vocab=128256,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        experts=1,
        top_k=1,
        expert_width=1,
        dense_width=width,
        dense_layers=tuple(range(layers)),
    )


def moonlight(layers: int) -> ModelSpec:
    """Moonlight-16B-A3B (https://huggingface.co/moonshotai/Moonlight-16B-A3B/blob/main/config.json)."""
    return ModelSpec(
        name="moonlight",
        title="Moonlight-16B-A3B",
        family="deepseek_v3",
        layers=layers,
        hidden=2048,
        vocab=163840,
        heads=16,
        kv_heads=16,
        head_dim=128,
        mla=LatentAttention(None, 512, 128, 64, 128),
        experts=64,
        top_k=6,
        expert_width=1408,
        shared_width=2816,
        dense_width=11264,
        dense_layers=(0,),
        scoring="sigmoid",
        correction_bias=True,
    )


def proxy(name: str, hidden: int, width: int, experts: int, top_k: int) -> ModelSpec:
    """One MoE layer of Megatron-Core's moe_perf test."""
    return ModelSpec(
        name=name,
        title=name,
        family="proxy",
        layers=1,
        hidden=hidden,
        vocab=128,
        heads=8,
        kv_heads=8,
        head_dim=hidden // 8,
        experts=experts,
        top_k=top_k,
        expert_width=width,
    )


def model_of(name: str, layers: int) -> ModelSpec:
    if name == "llama3_70b":
        return llama(name, layers, 8192, 64, 8, 28672)
    if name == "llama3_405b":
        return llama(name, layers, 16384, 128, 16, 53248)
    if name == "moonlight_16b":
        return moonlight(layers)
    if name == "deepseek_proxy":
        return proxy(name, 7168, 2048, 32, 8)
    if name == "mixtral_proxy":
        return proxy(name, 4096, 14336, 8, 2)
    model = load_model(name).with_layers(layers)
    return replace(model, dense_layers=(0,)) if name == "deepseek_v3" else model


def plan_of(row: Row) -> tuple[Layout, Program, ModelSpec, Workload]:
    """A row's run: pp stages of equal numbers of layers, 1F1B or combined 1F1B."""
    tp, pp, ep, dp, cp, layers, m = (int(row[k]) for k in ("tp", "pp", "ep", "dp", "cp", "layers", "microbatches"))
    model = model_of(row["model"], layers)
    each = layers // pp
    stages = [range(s * each, (s + 1) * each) for s in range(pp)]
    moe = [model.is_moe(layer) for layer in range(layers)]
    generate = combined_program if row["combined"] == "yes" else colocated_program
    program = generate(p=pp, v=1, m=m, group=None, stage_layers=stages, moe=moe)
    owner = tuple(s for s in range(pp) for _ in range(each))
    gpus = tp * dp * cp
    layout = Layout(
        system="published",
        variant="",
        placement=Placement(
            tuple(Worker(f"P{r}", "AF", gpus, max(1, gpus // 8), 50.0) for r in range(pp)), owner, owner, 0, pp - 1
        ),
        batch=Batch(m, int(row["micro_batch"]), dp),
        ep=ep,
        transport=row["transport"],
        merge=row["merge"],
        options={"tp": tp, "cp": cp},
    )
    return layout, program, model, Workload(seq=int(row["seq"]), global_batch=m * dp)


def recipe_of(row: Row) -> Recipe:
    return Recipe(*(int(n) for n in row["recipe"].split("/")))


def report_of(row: Row) -> MemoryReport:
    layout, program, model, workload = plan_of(row)
    modules = tuple(row["recompute"].split("+")) if row["recompute"] else ()
    policy = Recompute("selective", "selective", modules=modules) if modules else Recompute()
    return memory_report(layout, program, model, workload, recompute=policy, optimizer=recipe_of(row), loss_chunk=None)
