"""Decides what of a run can be held against the published DisagMoE results (arXiv 2605.11005), and how it compares.

The published numbers live only here and are outputs of nothing and inputs to
nothing: they are printed beside ours. A claim about a system, model, sequence
or cluster that the run does not have is "not comparable", with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report.facts import Results, finite

SEQUENCES = (4096, 8192, 16384, 32768)
MODELS: Mapping[str, Mapping[str, int]] = {
    "DeepSeek-MoE": {"layers": 28, "experts": 64, "top_k": 4, "hidden": 2048, "expert_width": 1408},
    "GPT-OSS-120B": {"layers": 36, "experts": 128, "top_k": 4, "hidden": 2880, "expert_width": 2880},
    "Qwen3-235B-A22B": {"layers": 94, "experts": 128, "top_k": 8, "hidden": 4096, "expert_width": 1536},
}
"""The models of the paper's Table 2, by shape."""
TOP_KS = (2, 4, 8, 16)
GPUS, DEVICE = 128, "h800"

RATIO_ARITHMETIC = (
    "by the paper's own T_f = max(C_f/(N·P), V/(M_f·B)), taking F-GPUs away at fixed NICs cannot shorten the step;"
    " per GPU the most is (16+16)/(16+10) = 32/26 = 1.23×, below the 1.29× published"
)

Row = Mapping[str, Any]


class NotComparableError(Exception):
    """Why a claim cannot be held against this run; the message is the reason shown."""


@dataclass(frozen=True)
class Claim:
    """One published statement: a range (or one value), its unit and how ours is found.

    `ours` raises NotComparableError where the run has nothing to compare. `slack` is
    half of the last printed digit (or what "about" allows): a single published
    value is met when ours rounds to it.
    """

    text: str
    low: float | None
    high: float | None
    unit: str
    ours: Callable[[Results], float]
    note: str = ""
    slack: float = 0.005


def _paper_model(results: Results, *, ignore: Sequence[str] = ()) -> str:
    """Name of the paper's model this run has, recognised by shape (not by its name)."""
    model = results["model"]
    for name, shape in MODELS.items():
        if all(model.get(key) == value for key, value in shape.items() if key not in ignore):
            return name
    raise NotComparableError(f"the paper has {', '.join(MODELS)}; this run has {model['name']}")


def _setting(results: Results, model: str | None = None, seq: int | None = None) -> None:
    """The paper's set-up: its models and lengths, 128 H800, whole depth, native transports."""
    found, length = _paper_model(results), int(results["workload"]["seq"])
    if model is not None and found != model:
        raise NotComparableError(f"stated for {model}; this run has {found}")
    if length not in ((seq,) if seq is not None else SEQUENCES):
        wanted = f"{seq:,}" if seq is not None else ", ".join(f"{s:,}" for s in SEQUENCES)
        raise NotComparableError(f"stated for sequence length {wanted}; this run has {length:,}")
    check_hardware(results)


def check_hardware(results: Results) -> None:
    """Raises NotComparableError where a run is not on 128 H800, with all layers, even routing and no stragglers."""
    cluster, depth = results["cluster"], results["depth"]
    groups = cluster.get("groups") or ()
    gpus = sum(int(group["count"]) * int(group["gpus"]) for group in groups)
    device = str(cluster.get("device", "")).lower()
    if groups and (gpus != GPUS or DEVICE not in device):
        raise NotComparableError(f"the paper used {GPUS} H800; this run has {gpus} {device.upper()}")
    if not groups and not str(cluster["name"]).startswith(f"{DEVICE}_{GPUS}"):
        raise NotComparableError(f"the paper used {GPUS} H800; this run has {cluster['name']}")
    if depth["used"] != depth["of"]:
        raise NotComparableError(f"the paper trains all layers; this run has {depth['used']} of {depth['of']}")
    if (finite(results["workload"].get("skew")) or 1.0) != 1.0 or results["workload"].get("stragglers"):
        raise NotComparableError("the paper has neither routing skew nor stragglers")


def on_its_device(cluster: Mapping[str, Any]) -> bool:
    """Whether a cluster has the paper's kind of GPU."""
    return DEVICE in str(cluster.get("device") or cluster["name"]).lower()


def _row(results: Results, system: str) -> Row:
    """The row of a system in the paper's setting: native view, its plain form, or else the fastest of its forms."""
    rows = [row for row in results["rows"] if row["system"] == system and row["view"] == "native"]
    if not rows:
        if any(row["system"] == system for row in results["rows"]):
            raise NotComparableError("the paper's setting is the native view, which this run leaves out")
        raise NotComparableError(f"{system} is not in this run")
    fine = [row for row in rows if row["status"] == "ok"]
    if not fine:
        raise NotComparableError(f"{system} did not run here: {str(rows[0]['status']).replace('_', ' ')}")
    plain = [row for row in fine if not row.get("variant")]
    fastest: Row = min(plain or fine, key=lambda row: float(row["step_time_s"]))
    return fastest


def _step(results: Results, system: str) -> float:
    step = finite(_row(results, system).get("step_time_s"))
    if not step:
        raise NotComparableError(f"{system} has no step time")
    return step


def _speedup(over: str) -> Callable[[Results], float]:
    def ours(results: Results) -> float:
        _setting(results)
        return _step(results, over) / _step(results, "disagmoe")

    return ours


def _removed(system: str) -> Callable[[Results], float]:
    def ours(results: Results) -> float:
        _setting(results, "DeepSeek-MoE", 8192)
        _row(results, "disagmoe")
        value = finite(_row(results, system).get("exposed_comm_reduction"))
        if value is None:
            raise NotComparableError(f"{system} exposes no communication here")
        return value

    return ours


def _baseline_exposed(results: Results) -> float:
    _setting(results, "DeepSeek-MoE", 8192)
    exposed = finite(_row(results, "megatron_1f1b").get("exposed_comm_s"))
    if exposed is None:
        raise NotComparableError("exposed communication is not known here")
    return exposed / _step(results, "megatron_1f1b")


def _top_k(results: Results) -> float:
    model = results["model"]
    if model.get("experts") != 64 or model.get("top_k") not in TOP_KS:
        wanted = "/".join(map(str, TOP_KS))
        ours = f"{model.get('experts')} with top-k {model.get('top_k')}"
        raise NotComparableError(f"stated for 64 experts with top-k {wanted}; this run has {ours}")
    _paper_model(results, ignore=("top_k",))
    check_hardware(results)
    return _step(results, "megatron_1f1b") / _step(results, "disagmoe")


def _af_ratio(results: Results) -> float:
    """GPUs of the A pool over GPUs of the F pool in the plan chosen at 4K."""
    _setting(results, seq=4096)
    plan = _row(results, "disagmoe").get("plan") or {}
    attention, _, experts = str(plan.get("A:F") or "").partition(":")
    if not (attention.isdigit() and experts.isdigit() and int(experts)):
        raise NotComparableError("the plan does not say how many GPUs A and F have")
    if plan.get("nics") != "halves":
        raise NotComparableError(f"stated with NICs 16:16; the plan has nics={plan.get('nics')}")
    return int(attention) / int(experts)


def _never(reason: str) -> Callable[[Results], float]:
    def ours(results: Results) -> float:
        raise NotComparableError(reason)

    return ours


_DUALPIPE = "whether the paper's DualPipe used DeepEP is not known"
_BEST = "elsewhere the paper is summarised as up to 1.34× over the best overlap system"

CLAIMS = (
    Claim("speed-up over Megatron-1F1B", 1.59, 1.81, "x", _speedup("megatron_1f1b")),
    Claim("speed-up over Tutel", 1.2, 1.5, "x", _speedup("tutel"), _BEST),
    Claim("speed-up over Comet", 1.2, 1.5, "x", _speedup("comet"), _BEST),
    Claim("speed-up over DualPipe", 1.05, 1.13, "x", _speedup("dualpipe"), _DUALPIPE),
    Claim("exposed comm removed vs Tutel (DeepSeek-MoE, 8K)", 0.88, 0.88, "%", _removed("tutel")),
    Claim("exposed comm removed vs Comet (DeepSeek-MoE, 8K)", 0.75, 0.75, "%", _removed("comet")),
    Claim("exposed comm removed vs DualPipe (DeepSeek-MoE, 8K)", 0.45, 0.45, "%", _removed("dualpipe")),
    Claim(
        *("exposed share of Megatron-1F1B's step (DeepSeek-MoE, 8K)", 1 / 3, 1 / 3, "%", _baseline_exposed),
        *('"about a third", read as within 5 points', 0.05),
    ),
    Claim(
        *("speed-up over Megatron-1F1B, 64 experts, top-k 2–16 or other EP", 1.08, 1.92, "x", _top_k),
        "range over all its top-k and EP sizes; the sequence length is not stated",
    ),
    Claim(
        *("best A:F GPU ratio at 4K, NICs 16:16", 1.0, 1.0, "ratio", _af_ratio),
        *('"about 16:16"; ours is the tuned plan\'s A:F, read as met within 16:14 and 14:16', 0.15),
    ),
    Claim(
        *("A:F 16:10 over Megatron-1F1B at 16K, NICs 16:16", 1.56, 1.56, "x"),
        *(_never("needs a run with the split fixed at 16:10, on a model that is not stated"),),
    ),
    Claim("A:F 16:10 over 16:16 at 16K, NICs 16:16", 1.29, 1.29, "x", _never(RATIO_ARITHMETIC)),
    Claim("virtual stages: throughput grows up to", 16.0, 16.0, "stages", _never("needs a sweep over virtual stages")),
)

FALL = Claim(
    *("A:F 16:8 and 8:16 over Megatron-1F1B, NICs 16:16", 1.0, 1.0, "x", _never("needs runs with the split fixed")),
    *('"about 1×", read as within 0.1; length not stated', 0.1),
)
ABOVE = Claim("virtual stages above 16: out of memory", 1.0, 1.0, "%", _never("needs a sweep over virtual stages"))
"""Stated beside others of CLAIMS; only studies with points of their own are held against them."""


def compare(results: Results) -> list[dict[str, Any]]:
    """The `paper` rows of a results record: claim, low, high, unit, ours, verdict, note."""
    return [_compare(results, claim) for claim in CLAIMS]


def _compare(results: Results, claim: Claim) -> dict[str, Any]:
    row: dict[str, Any] = {"claim": claim.text, "low": claim.low, "high": claim.high, "unit": claim.unit}
    try:
        ours = claim.ours(results)
    except NotComparableError as reason:
        return {**row, "ours": None, "verdict": "not comparable", "note": str(reason)}
    return {**row, "ours": ours, "verdict": verdict(ours, claim.low, claim.high, claim.slack), "note": claim.note}


def verdict(ours: float, low: float | None, high: float | None, slack: float) -> str:
    """Whether a value lies in a published range, up to the rounding of what was printed."""
    above_low = low is None or ours >= low - slack
    below_high = high is None or ours <= high + slack
    return "inside" if above_low and below_high else "outside"


def check_setting(results: Results) -> None:
    """Raises NotComparableError where a run is not in the paper's setting: a model, a length, 128 H800, all layers."""
    _setting(results)


def value_text(value: float | None, unit: str) -> str:
    """A value of the comparison as people write it."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.0f} %"
    return f"{value:.2f}×" if unit == "x" else f"{value:.4g}"


def range_text(row: Mapping[str, Any]) -> str:
    """The published range, or the one published value."""
    low, high, unit = row["low"], row["high"], str(row.get("unit", "x"))
    if low is None:
        return f"≤ {value_text(high, unit)}"
    if high is None:
        return f"≥ {value_text(low, unit)}"
    if low == high:
        return value_text(low, unit)
    return f"{value_text(low, unit).removesuffix('×')}–{value_text(high, unit)}"
