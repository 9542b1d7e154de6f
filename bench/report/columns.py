"""Decides what a results row shows: one definition per column, used by the terminal, Markdown and CSV alike.

A `Column` knows its CSV name (the path inside the row), its heading and how a
value is written for people. Numbers keep full precision in the CSV; an absent
or unusable number is an empty cell there and a dash elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report.facts import ORIGIN, Results, calibration_name, finite, notes, row_label, settings_text

Row = Mapping[str, Any]
DASH = "–"
KINDS = ("dispatch", "combine", "p2p", "grad_sync")
POOLS = ("A", "F")
PARTS = (
    ("compute", "compute_s"),
    ("overlapped", "overlapped_comm_s"),
    ("exposed", "exposed_comm_s"),
    ("bubble", "bubble_s"),
)
MEMORY_NOTE = ("activation memory", "not yet modelled")
"""While a note of the run says both, its memory column holds weights, gradients and optimizer state only."""


@dataclass(frozen=True)
class Units:
    """What all rows of one table share: the unit of time, the name of the memory column, how numbers came about."""

    time: str
    per_second: float
    decimals: int
    memory: str
    origin: str

    def seconds(self, value: float) -> str:
        return f"{value * self.per_second:,.{self.decimals}f}"

    def heading(self, text: str) -> str:
        """A title or heading with what it leaves open."""
        executed = "cut" if self.origin == "emulated" else "plan"
        names = {"origin": self.origin, "Origin": self.origin.capitalize(), "executed": executed}
        return text.format(time=self.time, memory=self.memory, **names)


def units(results: Results, rows: Sequence[Row]) -> Units:
    """Pick s, ms or µs so that the shortest step of the table keeps at least three digits."""
    steps = [s for s in (finite(row.get("step_time_s")) for row in rows) if s]
    shortest = min(steps, default=1.0)
    static = any(all(part in str(note) for part in MEMORY_NOTE) for note in results.get("notes") or ())
    memory, origin = "static memory" if static else "peak memory", ORIGIN[str(results["backend"])]
    if shortest >= 1.0:
        return Units("s", 1.0, 3, memory, origin)
    if shortest >= 1e-3:
        return Units("ms", 1e3, 2 if shortest >= 0.01 else 3, memory, origin)
    return Units("µs", 1e6, 1, memory, origin)


@dataclass(frozen=True)
class Column:
    """One column: heading ("\\n" where it may break, "{time}" for the unit), text of a cell, alignment."""

    heading: str
    text: Callable[[Row, Units], str]
    right: bool = True

    def title(self, unit: Units) -> str:
        return unit.heading(self.heading)


def dig(row: Row, path: str) -> Any:
    """The value at a dotted path of a row; None where any part is missing."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(path: str, write: Callable[[float, Units], str]) -> Callable[[Row, Units], str]:
    def text(row: Row, unit: Units) -> str:
        value = finite(dig(row, path))
        return DASH if value is None else write(value, unit)

    return text


def _exposed(row: Row, unit: Units) -> str:
    """Exposed time, starred where waiting for a peer could not be told apart from moving bytes."""
    value = finite(row.get("exposed_comm_s"))
    if value is None:
        return DASH
    return unit.seconds(value) + ("" if finite(row.get("wait_s")) is not None else "*")


def seconds(heading: str, path: str) -> Column:
    return Column(heading, _number(path, lambda value, unit: unit.seconds(value)))


def percent(heading: str, path: str) -> Column:
    return Column(heading, _number(path, lambda value, _: f"{100 * value:,.{0 if abs(value) >= 10 else 1}f} %"))


def ratio(heading: str, path: str) -> Column:
    return Column(heading, _number(path, lambda value, _: f"{value:.2f}×"))


def count(heading: str, path: str) -> Column:
    return Column(heading, _number(path, lambda value, _: f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"))


def memory_text(row: Row, unit: Units | None = None) -> str:
    """ "needed / limit" in GiB; for an out-of-memory row "needed" is what its best plan would take."""
    needed, limit = finite(row.get("peak_memory_gib")), finite(row.get("memory_limit_gib"))
    if needed is None and limit is None:
        return DASH
    return " / ".join(DASH if value is None else f"{value:.1f}" for value in (needed, limit))


def status_text(row: Row) -> str:
    """The status, in the words of the schema without the underscore."""
    return str(row["status"]).replace("_", " ")


def plan_text(row: Row) -> str:
    """The chosen plan on one line, in the planner's own order."""
    plan = (row.get("plan") or {}).items()
    return ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in plan)


def contention_text(row: Row) -> str:
    factors = row.get("contention") or {}
    compute, comm = finite(factors.get("compute")), finite(factors.get("comm"))
    return DASH if compute is None or comm is None else f"{compute:.3g} / {comm:.3g}"


def _beside(row: Row, unit: Units, path: str) -> str:
    """A value of a row that has a simulation beside it."""
    value = finite(row.get(path)) if row.get("simulated") else None
    if value is None:
        return DASH
    return f"{100 * value:.1f} %" if path == "spread" else unit.seconds(value)


def _error(row: Row) -> str:
    emulated, simulated = finite(row.get("step_time_s")), finite(dig(row, "simulated.step_time_s"))
    return DASH if emulated is None or not simulated else f"{emulated / simulated:.3f}"


def _plain(path: str) -> Callable[[Row, Units], str]:
    def text(row: Row, unit: Units) -> str:
        value = dig(row, path)
        return DASH if value in (None, "") else str(value)

    return text


SYSTEM = Column("system", lambda row, _: row_label(row), right=False)

SPEED = (
    SYSTEM,
    Column("status", lambda row, _: status_text(row), right=False),
    seconds("step\n[{time}]", "step_time_s"),
    ratio("speedup over\nmegatron_1f1b", "speedup"),
    ratio("step ÷\nbound", "bound_ratio"),
    count("tokens/s\nper GPU", "tokens_per_s_per_gpu"),
    percent("MFU", "mfu"),
    count("GPUs\nused", "gpus_used"),
    count("micro-\nbatches", "microbatches"),
    Column("{memory} /\nlimit [GiB]", memory_text),
)
"""How fast, on what and whether it fits."""

BREAKDOWN = (
    SYSTEM,
    seconds("compute\n[{time}]", "compute_s"),
    seconds("overlapped\ncomm [{time}]", "overlapped_comm_s"),
    Column("exposed\ncomm [{time}]", _exposed),
    seconds("bubble\n[{time}]", "bubble_s"),
    seconds("of which\nwait [{time}]", "wait_s"),
    seconds("stall\n[{time}]", "stall_s"),
    percent("exposed comm removed\nby DisagMoE", "exposed_comm_reduction"),
    percent("stall removed\nby DisagMoE", "stall_reduction"),
)
"""Where the step goes."""

BY_KIND = (
    SYSTEM,
    seconds("exposed\ndispatch [{time}]", "exposed_by_kind_s.dispatch"),
    seconds("exposed\ncombine [{time}]", "exposed_by_kind_s.combine"),
    seconds("exposed\nP2P [{time}]", "exposed_by_kind_s.p2p"),
    seconds("exposed grad\nsync [{time}]", "exposed_by_kind_s.grad_sync"),
    *(seconds(f"largest\n{word} [{{time}}]", f"maximum.{key}") for word, key in PARTS),
)
"""Exposed communication by kind, and the worker where each part is largest."""

POOL = (
    SYSTEM,
    *(seconds(f"{pool}: {word}\n[{{time}}]", f"pools.{pool}.{key}") for pool in POOLS for word, key in PARTS),
)
"""The pools of a disaggregated system apart."""

EXECUTED = (
    SYSTEM,
    Column("{origin}\nstep [{time}]", lambda row, unit: _beside(row, unit, "step_time_s")),
    seconds("simulated\nstep [{time}]", "simulated.step_time_s"),
    Column("{origin} ÷\nsimulated", lambda row, _: _error(row)),
    Column("{origin}\nexposed [{time}]", lambda row, unit: _beside(row, unit, "exposed_comm_s")),
    seconds("simulated\nexposed [{time}]", "simulated.exposed_comm_s"),
    Column("{origin}\nbubble [{time}]", lambda row, unit: _beside(row, unit, "bubble_s")),
    seconds("simulated\nbubble [{time}]", "simulated.bubble_s"),
    Column("spread of\nrepeats", lambda row, unit: _beside(row, unit, "spread")),
)
"""An emulated cut, or a measured plan, beside the simulation of the very same one; empty for simulated runs."""

PLAN = (
    SYSTEM,
    Column("transport", _plain("transport"), right=False),
    Column("merge", _plain("merge"), right=False),
    Column("contention\ncompute / comm", lambda row, _: contention_text(row), right=False),
    Column("implementation", _plain("implementation"), right=False),
    Column("plan", lambda row, _: plan_text(row) or DASH, right=False),
)
"""What each system chose, one line per system."""

TABLES = (
    ("Speed and memory", SPEED),
    ("Where the step goes", BREAKDOWN),
    ("Exposed communication by kind, and the largest value of any worker", BY_KIND),
    ("Attention (A) and FFN (F) workers apart", POOL),
    ("{Origin} beside the simulation of the same {executed}", EXECUTED),
    ("Plans", PLAN),
)

STAR = "* includes waiting for a peer: when the peer was ready is not known here"

LEGEND = (
    "bound = the least step that compute, NICs and NVLink allow any schedule on this transport and EP size",
    "step = compute + exposed + bubble (means over GPUs); overlapped communication runs inside compute;"
    " wait (for a peer) is part of the bubble; stall = exposed + bubble",
    "MFU = model FLOPs (causal attention counted half) ÷ peak of the whole cluster;"
    " tokens/s per GPU likewise counts every GPU, idle ones too",
    "charged_padding in a plan = sequences that the last micro-batch is charged beyond the batch ÷ the batch, where it"
    " does not divide; they count as time and memory, never as tokens",
    "removed by DisagMoE = 1 − DisagMoE's time ÷ this system's time, same view;"
    " exposed comm there counts dispatch, combine and P2P",
)

CONTEXT = (
    *("run_id", "config_id", "backend", "model", "seq", "global_batch"),
    *("depth_used", "depth_of", "cluster", "calibration", "settings"),
)
"""Columns that say what a CSV line is about; the same on every line of one run."""

VALUES = (
    *("view", "system", "variant", "status", "reason", "transport", "merge"),
    *("contention.compute", "contention.comm", "implementation"),
    *("step_time_s", "speedup", "bound_s", "bound_ratio", "bound_by", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"),
    *("compute_s", "overlapped_comm_s", "exposed_comm_s", "bubble_s", "wait_s", "stall_s"),
    *("exposed_comm_reduction", "stall_reduction"),
    *(f"exposed_by_kind_s.{kind}" for kind in KINDS),
    *(f"maximum.{key}" for _, key in PARTS),
    *(f"pools.{pool}.{key}" for pool in POOLS for _, key in PARTS),
    *("peak_memory_gib", "memory_limit_gib", "wire_bytes_per_gpu", "gpus_used", "microbatches"),
    *("tokens_dropped", "repeats", "spread"),
    *(f"simulated.{key}" for key in ("step_time_s", "compute_s", "exposed_comm_s", "bubble_s")),
)
"""Paths of a row that become CSV columns; "." turns into "_" in the name."""


def csv_header() -> list[str]:
    """Names of the CSV columns."""
    return [*CONTEXT, *(path.replace(".", "_") for path in VALUES), "plan", "notes"]


def records(results: Results) -> list[dict[str, str | int | float | None]]:
    """Rows of a run as flat records, keys as in `csv_header`; absent or unusable values are None."""
    run, workload, depth = results["run"], results["workload"], results["depth"]
    context = (
        *(run["id"], run["config_id"], results["backend"], results["model"]["name"], workload["seq"]),
        *(workload["global_batch"], depth["used"], depth["of"], results["cluster"]["name"], calibration_name(results)),
        settings_text(results),
    )
    said = " | ".join(notes(results)) or None
    flat = []
    for row in results["rows"]:
        values = [_scalar(dig(row, path)) for path in VALUES]
        ends = (plan_text(row) or None, said)
        flat.append(dict(zip(csv_header(), (*context, *values, *ends), strict=True)))
    return flat


def _scalar(value: Any) -> str | int | float | None:
    """A text, an exact integer or a finite float; everything else is absent."""
    if isinstance(value, str):
        return " ".join(value.split()) or None
    return value if isinstance(value, int) else finite(value)
