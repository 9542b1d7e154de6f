"""Decides how the advisor answers on one terminal screen: verdict, split, what binds, roofline.

At most 40 lines of at most 120 columns, whatever the model. The verdict comes
first; a gain within MARGIN is called a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench.advice import Advice, Roofline, Split, ViewAdvice
from bench.limits import BUBBLE
from bench.report.facts import REFERENCE, row_label
from bench.report.text import length
from disagmoe.allocator import Allocation

WIDTH = 118
MARGIN = 0.02
"""Gains closer to 1 than this are a draw."""


def verdict(gain: float | None) -> str:
    """One word for best colocated step ÷ best disaggregated step."""
    if gain is None:
        return "–"
    if gain > 1.0 + MARGIN:
        return "pays"
    return "a draw" if gain >= 1.0 - MARGIN else "does not pay"


def print_advice(advice: Advice, written: Sequence[Path], file: TextIO | None = None) -> None:
    """Print the screen; `written` are the files to point to."""
    console = Console(file=file, width=WIDTH, highlight=False)
    for part in _parts(advice, written):
        console.print(part)


def _parts(advice: Advice, written: Sequence[Path]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(_question(advice), style="bold"), Text(_setting(advice), style="dim")]
    parts.append(_views_table(advice.views))
    named = len(advice.views) > 1
    for view in advice.views:
        parts += [Padding(Text(line), (0, 0, 0, 1)) for line in _view_lines(view, named)]
    if advice.roofline is not None:
        parts += ["", _roofline_table(advice.roofline)]
        parts += [Text(f" {line}", style="dim") for line in _roofline_lines(advice.roofline)]
    parts += [Text(f"{path.suffix[1:].upper()}: {path}", style="dim", no_wrap=True) for path in written]
    return parts


def _question(advice: Advice) -> str:
    """The answer in one line."""
    config = advice.config
    what = f"{config.model.title} at {length(config.workload.seq)} on {config.cluster.name}"
    words = {view.view: verdict(view.gain) for view in advice.views}
    if len(set(words.values())) == 1:
        word = next(iter(words.values()))
        answer = {"–": "no disaggregated plan", "a draw": "a draw"}.get(word, f"disaggregation {word}")
    else:
        answer = "disaggregation " + ", ".join(f"{word} in the {view} view" for view, word in words.items())
    return f"{what}: {answer}"


def _setting(advice: Advice) -> str:
    config = advice.config
    nodes = " + ".join(
        f"{g.count} nodes × {g.gpus} {config.cluster.device}, {g.nics} × {g.nic_gbit:g} Gbit/s"
        for g in config.cluster.groups
    )
    return _cut(
        f"simulated, calibration {Path(config.calibration).stem}; {config.workload.global_batch:,} sequences per step, "
        f"{config.model.layers} layers; {nodes}",
        WIDTH,
    )


def _views_table(views: Sequence[ViewAdvice]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=True, padding=(0, 1))
    for heading in ("view", "disaggregated", "best colocated", "gain", REFERENCE, "speed-up", "disaggregation"):
        table.add_column(heading, justify="right" if heading in ("gain", "speed-up") else "left", no_wrap=True)
    for view in views:
        good = view.gain is not None and view.gain > 1.0 + MARGIN
        table.add_row(
            view.view,
            _named(view.own),
            _named(view.colocated),
            _times(view.gain),
            _named(view.reference, name=False),
            _times(view.speedup),
            Text(verdict(view.gain), style="bold green" if good else "bold"),
        )
    return table


def _named(row: Any, name: bool = True) -> str:
    if row is None:
        return "–"
    step = f"{float(row['step_time_s']):.4g} s"
    return f"{step}  {_cut(row_label(row), 24)}" if name else step


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _view_lines(view: ViewAdvice, named: bool) -> list[str]:
    """Split, what binds and the way to the split: five lines at most."""
    label = f"{view.view}: " if named else ""
    if view.own is None:
        lines = [f"{label}no disaggregated plan: {view.why_not}"]
        lines += _split_lines(view.split, None) if view.split is not None else []
        return [_cut(line, WIDTH - 2) for line in lines]
    plan = view.own["plan"]
    rates = f"{plan['A_nic_gbs_per_gpu']:.4g} and {plan['F_nic_gbs_per_gpu']:.4g} GB/s per GPU"
    lines = [
        f"{label}split A:F = {plan['A_gpus']}:{plan['F_gpus']} GPUs (groups {plan['A:F']}, p = {plan['p']}, "
        f"dp = {plan['dp']}), NICs {plan['nics']}: {rates}, micro-batch {plan['micro_batch']}"
    ]
    if view.limits is not None:
        ordered = sorted(view.limits.shares.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{_share_name(name)} {share:.0%}" for name, share in ordered if share >= 0.005)
        lines.append(f"binds: {_binds(view)}   (the step follows {shares})")
    if view.split is not None:
        lines += _split_lines(view.split, float(view.own["step_time_s"]))
    if view.together is not None:
        plan = f"{_named(view.together)}, on {view.together['transport']}"
        lines.append(f"faster still, attention and experts together: {plan}")
    return [_cut(line, WIDTH - 2) for line in lines]


def _share_name(name: str) -> str:
    return "filling and draining" if name == BUBBLE else name


def _binds(view: ViewAdvice) -> str:
    binds = view.limits.binds if view.limits is not None else "–"
    return f"{binds}, and memory" if view.split is not None and view.split.memory_binds else binds


def _split_lines(split: Split, tuned_s: float | None) -> list[str]:
    if split.seed is None:
        lines = [f"program: {split.why}"]
        if split.free is not None:
            lines.append(f"memory: without a limit it would take {_sizes(split.free)}, at least {_time(split.free)}")
        return lines
    seed = split.seed
    way = [("even split", split.even_s), ("program", split.seed_s), ("local search", split.found_s), ("tuner", tuned_s)]
    best = min((s for _, s in way if s is not None), default=inf)
    steps = " → ".join(f"{name} {_seconds(s, best)}" for name, s in way)
    lines = [f"way to it: {steps}; {split.trials} timed"]
    bound = f"{_sizes(seed)}, {seed.binds}, at least {_time(seed)}, {seed.status}"
    lines.append(f"program: {bound}" + (f"; {seed.notes[0]}" if seed.notes else ""))
    if split.memory_binds and split.free is not None:
        faster = 1.0 - split.free.bottleneck_s / seed.bottleneck_s
        words = _memory_words(seed, split.free)
        lines.append(f"memory: without a limit {_sizes(split.free)} would need {faster:.0%} less time; {words}")
    return lines


def _sizes(plan: Allocation) -> str:
    return f"{plan.attention.gpus}:{plan.expert.gpus}"


def _time(plan: Allocation) -> str:
    return f"{plan.bottleneck_s:.4g} s"


def _memory_words(seed: Allocation, free: Allocation) -> str:
    """Which way memory pushes the split."""
    share, wanted = (plan.attention.gpus / plan.gpus_used for plan in (seed, free))
    if wanted > share + 0.005:
        return "the memory of the experts forbids an attention-heavier split"
    if wanted < share - 0.005:
        return "memory forbids an expert-heavier split"
    return "memory forbids its depth or micro-batch"


def _seconds(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"{value:.4g} s" + ("" if value <= best * 1.0005 else f" (+{value / best - 1:.1%})")


def _roofline_table(roofline: Roofline) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=True, padding=(0, 1))
    headings = (
        "FLOPs per NIC byte",
        "intensity",
        "paper's I",
        "Î, even split",
        "Î, formula",
        "Î, tuned",
        "bound by (tuned)",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in (headings[0], headings[-1]) else "right", no_wrap=True)
    need, even, best = roofline.work, roofline.even, roofline.formula
    rows = (
        (
            "attention (A)",
            need.attention_intensity,
            "attention",
            even.attention_point,
            best.attention_point,
            roofline.attention_point,
        ),
        ("experts (F)", need.expert_intensity, "expert", even.expert_point, best.expert_point, roofline.expert_point),
    )
    for name, intensity, field, first, second, third in rows:
        paper = "–" if roofline.paper is None else f"{getattr(roofline.paper, field):,.0f}"
        tuned = "–" if third is None else f"{third:,.0f}"
        bound = "–" if third is None else "compute" if intensity >= third else "network"
        table.add_row(name, f"{intensity:,.0f}", paper, f"{first:,.0f}", f"{second:,.0f}", tuned, bound)
    return table


def _roofline_lines(roofline: Roofline) -> list[str]:
    where, best = roofline.machine, roofline.formula
    copies = {"none": "k copies per token", "rank": "one copy per rank", "node": "one copy per node"}[roofline.merge]
    even, ten = where.turning_point, roofline.ratios[-1]
    gbs = where.nics * where.nic_bytes_per_s / where.gpus / 1e9
    return [
        f"Î = {where.peak_flops / 1e12:,.0f} TFLOP/s ÷ {gbs:.4g} GB/s per GPU = {even:,.0f}; "
        f"intensity is our FLOP count over {copies}, forward and backward",
        f"formula's split: A:F = {best.attention_gpus}:{best.expert_gpus} with half of the NICs each "
        f"(Î_A = {best.attention_point / even:.2f} Î, Î_F = {best.expert_point / even:.2f} Î), bound by {best.binds}",
        f"16:10 GPUs on NICs 16:16 (the paper: 1.29× over 16:16): by the formula {ten.speedup:.2f}× per step, "
        f"{ten.per_gpu:.2f}× per GPU",
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
