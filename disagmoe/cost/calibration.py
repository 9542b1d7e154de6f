"""Calibration: the measured numbers that turn FLOPs and bytes into seconds.

Decides which numbers a calibration must give, and that each of them states its
unit, its public source and its use. `calibrate` numbers are fitted to published
measurements (listed in `calibrated_on`, never used to validate), `assumption`
numbers are choices nobody measured for us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf

from disagmoe.specs import fields as read

USES = ("calibrate", "assumption")
TRANSPORTS = ("nccl", "deepep", "m2n_rdma")
MERGES = ("none", "rank", "node")


@dataclass(frozen=True)
class Contention:
    """Stretch factors >= 1 while a transfer runs beside compute on the same GPU.

    `compute` stretches the compute, `comm` the transfer itself; 1.0 means that
    the two do not disturb each other.
    """

    compute: float
    comm: float


@dataclass(frozen=True)
class Number:
    """One number of a calibration file, with its provenance."""

    name: str
    value: float
    unit: str
    source: str
    use: str
    note: str = ""


@dataclass(frozen=True)
class Rates:
    """The numbers of a calibration. Efficiencies are fractions of the device's peak.

    A GEMM of r rows runs at its efficiency x r / (r + `rows_half`): `projection`
    around attention (router included), `dense` for shared experts, dense MLPs
    and the output head, `grouped` for experts, where r counts one expert's rows.
    An attention kernel of head width d (mean of the query-key and the value
    width) runs at `attention_efficiency` x d / (d + `attention_dim_half`) and
    computes `attention_pad_keys` keys more per query than the mask lets through
    (whole tiles), the full square at most; its backward runs at `attention_backward_ratio` of that.
    `launch_us` is paid per kernel. `nvlink_efficiency` and `nic_efficiency` (of
    the line rate in one direction) hold for an exchange of many peers, `ring_*`
    for a ring collective; a transfer pays `nic_alpha_us` where bytes cross NICs,
    else `nvlink_alpha_us`.
    """

    projection_efficiency: float
    projection_rows_half: float
    dense_efficiency: float
    dense_rows_half: float
    grouped_efficiency: float
    grouped_rows_half: float
    attention_efficiency: float
    attention_dim_half: float
    attention_pad_keys: float
    attention_backward_ratio: float
    hbm_efficiency: float
    launch_us: float
    nvlink_efficiency: float
    nic_efficiency: float
    ring_nvlink_efficiency: float
    ring_nic_efficiency: float
    nic_alpha_us: float
    nvlink_alpha_us: float


@dataclass(frozen=True)
class Calibration:
    """A named set of rates for one device, with the provenance of every number."""

    name: str
    about: str
    device: str
    calibrated_on: tuple[str, ...]
    rates: Rates
    contention: Mapping[str, Contention]
    numbers: tuple[Number, ...]

    def with_rates(self, name: str, **values: float) -> Calibration:
        """The same calibration under another name with some rates replaced."""
        return replace(self, name=name, rates=replace(self.rates, **values))

    def with_contention(self, factors: Mapping[str, Contention]) -> Calibration:
        """The same calibration with other contention factors for some transports."""
        return replace(self, contention={**self.contention, **factors})

    def with_contention_scale(self, scale: float) -> Calibration:
        """The same calibration with every factor f turned into 1 + scale * (f - 1); scale 0 is ideal overlap."""
        if not (0.0 <= scale < inf):
            raise ValueError(f"contention_scale={scale!r}: must be a number of at least 0")
        scaled = {
            transport: Contention(1.0 + scale * (pair.compute - 1.0), 1.0 + scale * (pair.comm - 1.0))
            for transport, pair in self.contention.items()
        }
        return self if scale == 1.0 else self.with_contention(scaled)


def calibration_names() -> tuple[str, ...]:
    """Names of the shipped calibrations, sorted."""
    return tuple(read.shipped("calibration"))


@cache
def load_calibration(name: str) -> Calibration:
    """The calibration of a shipped name, of one of the user's own or of a YAML file. ValueError lists the names."""
    path = read.find(name, read.known("calibration"), "calibration")
    return calibration_from_mapping(read.read_file(path, "calibration"), path.stem)


def calibration_from_mapping(mapping: Mapping[str, object], name: str) -> Calibration:
    """A Calibration from the plain mapping of its file."""
    what = f"calibration {name}"
    keys = ("about", "device", "calibrated_on", "rates", "contention")
    read.check_keys(mapping, keys, keys, what)
    rates = _numbers(mapping["rates"], [field.name for field in fields(Rates)], f"{what}: rates")
    factors = read.as_mapping(mapping["contention"], f"{what}: contention")
    read.check_keys(factors, TRANSPORTS, TRANSPORTS, f"{what}: contention")
    stretch = {
        transport: _numbers(factors[transport], ("compute", "comm"), f"{what}: contention {transport}")
        for transport in TRANSPORTS
    }
    _check(rates, stretch, what)
    return Calibration(
        name=name,
        about=" ".join(read.as_str(mapping["about"], f"{what}: about").split()),
        device=read.as_str(mapping["device"], f"{what}: device"),
        calibrated_on=tuple(read.as_str(row, f"{what}: calibrated_on") for row in _rows(mapping, what)),
        rates=Rates(**{key: number.value for key, number in rates.items()}),
        contention={
            transport: Contention(compute=pair["compute"].value, comm=pair["comm"].value)
            for transport, pair in stretch.items()
        },
        numbers=tuple(rates.values())
        + tuple(
            replace(number, name=f"{transport}_{key}")
            for transport, pair in stretch.items()
            for key, number in pair.items()
        ),
    )


def _rows(mapping: Mapping[str, object], what: str) -> list[object]:
    rows = read.as_list(mapping["calibrated_on"], f"{what}: calibrated_on")
    if len(rows) != len({str(row) for row in rows}):
        raise ValueError(f"{what}: calibrated_on names a row twice")
    return rows


def _numbers(value: object, names: list[str] | tuple[str, ...], what: str) -> dict[str, Number]:
    """Exactly the numbers called `names`, each {value, unit, source, use[, note]}."""
    entries = read.as_mapping(value, what)
    read.check_keys(entries, names, names, what)
    return {name: _number(name, entries[name], f"{what}: {name}") for name in names}


def _number(name: str, value: object, what: str) -> Number:
    entry = read.as_mapping(value, what)
    required = ("value", "unit", "source", "use")
    read.check_keys(entry, (*required, "note"), required, what)
    use = read.as_str(entry["use"], f"{what}: use")
    if use not in USES:
        raise ValueError(f"{what}: unknown use {use!r}; known: {', '.join(USES)}")
    note = read.as_str(entry["note"], f"{what}: note") if "note" in entry else ""
    return Number(
        name=name,
        value=read.as_float(entry["value"], f"{what}: value"),
        unit=read.as_str(entry["unit"], f"{what}: unit"),
        source=" ".join(read.as_str(entry["source"], f"{what}: source").split()),
        use=use,
        note=" ".join(note.split()),
    )


def _check(rates: Mapping[str, Number], stretch: Mapping[str, Mapping[str, Number]], what: str) -> None:
    for name, number in rates.items():
        if number.value < 0.0 or (number.value == 0.0 and not name.endswith(("_half", "_keys", "_us"))):
            raise ValueError(f"{what}: {name} must be positive, got {number.value!r}")
        if name.endswith(("_efficiency", "_ratio")) and number.value > 1.0:
            raise ValueError(f"{what}: {name} is a fraction of a peak and at most 1, got {number.value!r}")
    for transport, pair in stretch.items():
        for key, number in pair.items():
            if number.value < 1.0:
                raise ValueError(f"{what}: contention {transport} {key} must be at least 1, got {number.value!r}")
