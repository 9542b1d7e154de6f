"""A small but complete run made by hand: results with every status, and timelines to draw."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.plan.program import Program, Row
from disagmoe.timeline.timeline import Timeline

ID = "0123456789ab"

PLAN = {"pp": 8, "virtual_stages": 4, "dp": 16, "ep": 16, "micro_batch": 1, "layers_per_stage": "2-3"}
DISAGMOE_PLAN = {"p": 2, "virtual_stages": 47, "dp": 2, "A:F": "16:16", "nics": "halves", "A_nic_gbs_per_gpu": 50.0}


def ok_row(system: str, view: str, parts: tuple[float, float, float, float], **changes: Any) -> dict[str, Any]:
    """A row that ran; `parts` are compute, overlapped, exposed and bubble in seconds."""
    compute, overlapped, exposed, bubble = parts
    step = compute + exposed + bubble
    return {
        "system": system,
        "variant": "",
        "view": view,
        "transport": "nccl" if view == "native" else "deepep",
        "merge": "none" if view == "native" else "node",
        "contention": {"compute": 1.07, "comm": 1.31},
        "implementation": "equivalent",
        "status": "ok",
        "reason": "",
        "step_time_s": step,
        "tokens_per_s": 8388608 / step,
        "tokens_per_s_per_gpu": 65536 / step,
        "mfu": 3.2 / step,
        "speedup": None,
        "bound_s": 8.0,
        "bound_ratio": step / 8.0,
        "bound_by": "compute",
        "compute_s": compute,
        "overlapped_comm_s": overlapped,
        "exposed_comm_s": exposed,
        "bubble_s": bubble,
        "wait_s": 0.25 * bubble,
        "stall_s": exposed + bubble,
        "exposed_comm_reduction": None,
        "stall_reduction": None,
        "exposed_by_kind_s": {
            "dispatch": 0.5 * exposed,
            "combine": 0.25 * exposed,
            "p2p": 0.125 * exposed,
            "grad_sync": 0.125 * exposed,
        },
        "maximum": {
            "compute_s": compute + 0.5,
            "overlapped_comm_s": overlapped,
            "exposed_comm_s": exposed + 0.25,
            "bubble_s": bubble + 0.75,
        },
        "pools": None,
        "peak_memory_gib": 51.25,
        "memory_limit_gib": 75.6,
        "wire_bytes_per_gpu": 1.5e12,
        "gpus_used": 128,
        "microbatches": 16,
        "tokens_dropped": 0,
        "repeats": 1,
        "spread": 0.0,
        "plan": dict(PLAN),
        **changes,
    }


def lost_row(system: str, view: str, status: str, reason: str, needed_gib: float | None = None) -> dict[str, Any]:
    """A row without a step time."""
    row = ok_row(system, view, (1.0, 0.0, 0.0, 0.0))
    kept = ("system", "variant", "view", "transport", "merge", "contention", "implementation", "memory_limit_gib")
    return {
        **{key: value if key in kept else None for key, value in row.items()},
        "status": status,
        "reason": reason,
        "peak_memory_gib": needed_gib,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Speed-ups and reductions of one view, by their definitions."""
    ran = {row["system"]: row for row in rows if row["status"] == "ok"}
    base, own = ran["megatron_1f1b"], ran.get("disagmoe")
    for row in ran.values():
        row["speedup"] = base["step_time_s"] / row["step_time_s"]
        if own is not None and row is not own:
            share = 0.875  # without gradient sync
            row["exposed_comm_reduction"] = 1 - own["exposed_comm_s"] * share / (row["exposed_comm_s"] * share)
            row["stall_reduction"] = 1 - own["stall_s"] / row["stall_s"]


def view_rows(view: str, slower: float) -> list[dict[str, Any]]:
    pools = {
        "A": {"compute_s": 8.1, "overlapped_comm_s": 5.5, "exposed_comm_s": 0.3, "bubble_s": 1.6},
        "F": {"compute_s": 7.3, "overlapped_comm_s": 5.1, "exposed_comm_s": 0.7, "bubble_s": 2.0},
    }
    rows = [
        ok_row("megatron_1f1b", view, (8.0, 0.0, 6.0 * slower, 2.0)),
        ok_row("tutel", view, (8.25, 2.0, 4.0 * slower, 1.75), microbatches=32),
        lost_row("comet", view, "not_applicable", "needs 2 nodes | the cluster\nhas 1"),
        lost_row("dualpipe", view, "oom", "needs 92.3 GiB per GPU for weights; 75.6 GiB available", 92.34),
        ok_row(
            *("disagmoe", view, (7.7, 5.3, 0.5, 1.8)),
            transport="m2n_rdma" if view == "native" else "deepep",
            merge="node",
            contention={"compute": 1.0, "comm": 1.0},
            pools=pools,
            plan=dict(DISAGMOE_PLAN),
            gpus_used=128,
        ),
    ]
    compare(rows)
    return rows


def sample(**changes: Any) -> dict[str, Any]:
    """A valid results record; keyword arguments replace top-level blocks."""
    record: dict[str, Any] = {
        "schema": "disagmoe.results/1",
        "run": {
            "id": ID,
            "config_id": ID[::-1].replace("b", "f"),
            "command": "python -m bench model=qwen3 seq=32k",
            "git": None,
            "versions": {"python": "3.11.0", "numba": None},
            "host": {"name": "here"},
            "created": "2026-01-02T03:04:05+00:00",
        },
        "model": {
            "name": "qwen3",
            "title": "Qwen3-235B-A22B",
            "layers": 94,
            "hidden": 4096,
            "experts": 128,
            "top_k": 8,
            "expert_width": 1536,
            "assumptions": [],
            "parameters_total": 235093634560,
            "parameters_active": 22190000000,
        },
        "cluster": {
            "name": "h800_128",
            "device": "h800",
            "groups": [{"count": 16, "gpus": 8, "nics": 8, "nic_gbit": 400.0}],
            "nvlink_gbs": 200.0,
            "memory_gib": 79.6,
            "reserve_gib": 4.0,
            "spine_oversubscription": 1.0,
        },
        "workload": {"seq": 32768, "global_batch": 256, "micro_batch": None, "skew": 1.0, "stragglers": []},
        "backend": "simulate",
        "calibration": "h800",
        "depth": {"used": 94, "of": 94},
        "notes": ["activation memory is not yet modelled: only weights, gradients and optimizer state bound what fits"],
        "rows": [*view_rows("native", 1.0), *view_rows("uniform", 0.8)],
        "paper": [],
    }
    record.update(changes)
    return copy.deepcopy(record)


def row_of(results: dict[str, Any], system: str, view: str = "native") -> dict[str, Any]:
    """The (mutable) row of a system in a view."""
    found: dict[str, Any] = next(row for row in results["rows"] if (row["system"], row["view"]) == (system, view))
    return found


@dataclass(frozen=True)
class Outcome:
    layout: Layout | None
    timeline: Timeline | None
    memory: None = None


@dataclass(frozen=True)
class Evaluation:
    outcomes: list[Outcome]


def layout(pools: tuple[str, ...]) -> Layout:
    """A layout whose workers are of the given pools, one after the other."""
    workers = tuple(Worker(f"{pool}{i // len(set(pools))}", pool, 16, 2, 50.0) for i, pool in enumerate(pools))
    return Layout(
        system="toy",
        variant="",
        placement=Placement(workers, attn=(0,), ffn=(0,), embed=0, head=0),
        batch=Batch(4, 1, 16),
        ep=16,
        transport="nccl",
        merge="none",
    )


def pipeline(workers: int, microbatches: int) -> Timeline:
    """Forward and backward of every micro-batch on every worker, one after the other: F 2 ms, B 4 ms, dispatch 1 ms."""
    rows, times = [], []
    for worker in range(workers):
        for mb in range(microbatches):
            begin = (worker + mb * workers) * 0.007
            rows.append(Row(worker, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, mb)))
            rows.append(Row(worker, Stream.COLL, Op(Kind.DISPATCH, Phase.F, 0, mb)))
            rows.append(Row(worker, Stream.COMPUTE, Op(Kind.ATTN, Phase.B, 0, mb)))
            times += [(begin, begin + 0.002), (begin + 0.002, begin + 0.003), (begin + 0.003, begin + 0.007)]
    program = Program.from_rows(rows, n_workers=workers, n_layers=1, n_microbatches=microbatches)
    spans = np.array(times)
    order = np.argsort([row.worker * len(Stream) + row.stream for row in rows], kind="stable")
    return Timeline(program, spans[order, 0], spans[order, 1], spans[order, 0])


def evaluation(results: dict[str, Any]) -> Evaluation:
    """An outcome per row; rows that did not run have none."""
    return Evaluation(
        [
            Outcome(layout(("AF",) * 4), pipeline(4, 30)) if row["status"] == "ok" else Outcome(None, None)
            for row in results["rows"]
        ]
    )
