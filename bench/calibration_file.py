"""The file of a calibration that was measured here: every rate with its unit, its source and its use.

Decides where it lies (conf.local/calibration/<name>.yaml, with the samples it was
read from beside it) and what is said of numbers that were not measured.
"""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.machine import machine
from disagmoe.cost.calibration import TRANSPORTS, calibration_from_mapping
from disagmoe.specs import ClusterSpec, ModelSpec
from disagmoe.specs import fields as read

if TYPE_CHECKING:
    from bench.calibrate import Fitted, Measured

UNITS = {
    "projection_efficiency": "fraction of the device's peak", "projection_rows_half": "rows",
    "dense_efficiency": "fraction of the device's peak", "dense_rows_half": "rows",
    "grouped_efficiency": "fraction of the device's peak", "grouped_rows_half": "rows per expert",
    "attention_efficiency": "fraction of the device's peak, asymptote at infinite head width",
    "attention_dim_half": "head width", "attention_pad_keys": "keys per query",
    "attention_backward_ratio": "backward over forward FLOP/s",
    "hbm_efficiency": "fraction of the device's memory bandwidth", "launch_us": "us per kernel",
    "nvlink_efficiency": "fraction of line rate", "nic_efficiency": "fraction of line rate",
    "ring_nvlink_efficiency": "fraction of line rate", "ring_nic_efficiency": "fraction of line rate",
    "nic_alpha_us": "us per transfer", "nvlink_alpha_us": "us per transfer",
}  # fmt: skip
NOTES = {
    "launch_us": "The host's time per kernel, Python included.",
    "nvlink_alpha_us": "From the end of the compute before an exchange to the start of the compute behind it.",
}
UNMEASURED = {
    "nic_efficiency": "All ranks were on one node: the line rate, until someone measures it.",
    "ring_nic_efficiency": "All ranks were on one node: the line rate, until someone measures it.",
    "nic_alpha_us": "All ranks were on one node: taken from the exchange inside it.",
}


def write(name: str, found: Fitted, measured: Measured, cluster: ClusterSpec, model: ModelSpec) -> Path:
    """Write a calibration, checked as it will be read, and its samples; the path of the former."""
    content = document(name, found, cluster, model)
    calibration_from_mapping(content, name)
    folder = read.OWN_CONF / "calibration"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    about = (
        "# Written by `make calibrate`; the samples are beside it (.csv). Delete it to go back to nominal numbers.\n"
    )
    path.write_text(about + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110), encoding="utf-8")
    write_samples(path.with_suffix(".csv"), measured)
    return path


def document(name: str, found: Fitted, cluster: ClusterSpec, model: ModelSpec) -> dict[str, Any]:
    """The content of the file."""
    here, day = machine(gpus=True), datetime.now(UTC).date().isoformat()
    command = f"python -m bench.calibrate name={name} processes={cluster.gpus}"
    source = f"measured on {here.host} ({here.device}, {here.cores} cores), torch {here.torch}, {day}, {command}"

    def number(key: str, value: float, unit: str) -> dict[str, Any]:
        entry = {"value": float(f"{value:.4g}"), "unit": unit, "use": "calibrate", "source": source}
        if key in UNMEASURED:
            entry |= {"use": "assumption", "source": "not measured here", "note": UNMEASURED[key]}
        return entry | ({"note": NOTES[key]} if key in NOTES else {})

    pair = dict(zip(("compute", "comm"), found.contention, strict=True))
    return {
        "about": f"rates of {cluster.gpus} ranks of {here.device} at once, steps of {model.name}",
        "device": cluster.device,
        "calibrated_on": [],
        "rates": {key: number(key, found.rates[key], unit) for key, unit in UNITS.items()},
        "contention": {
            transport: {key: number(key, value, "factor") for key, value in pair.items()} for transport in TRANSPORTS
        },
    }


def write_samples(path: Path, measured: Measured) -> None:
    """What was measured, one line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["what", "phase", "sizes", "seconds"])
        for sample in measured.kernels:
            rows.writerow([sample.what, sample.phase, "x".join(map(str, sample.sizes)), f"{sample.seconds:.6g}"])
        for op in measured.operations:
            system, seq = op.case.plan.layout.system, op.case.problem.workload.seq
            rows.writerow([f"{system} {op.kind.name}", op.phase.name, f"seq {seq}", f"{op.seconds:.6g}"])
