"""Durations and bytes of single operations on single GPUs."""

from disagmoe.cost.calibration import (
    MERGES,
    TRANSPORTS,
    Calibration,
    Contention,
    Number,
    Rates,
    calibration_names,
    load_calibration,
)
from disagmoe.cost.model import CostModel
from disagmoe.cost.network import GpuGroup, Transfer

__all__ = [
    "MERGES",
    "TRANSPORTS",
    "Calibration",
    "Contention",
    "CostModel",
    "GpuGroup",
    "Number",
    "Rates",
    "Transfer",
    "calibration_names",
    "load_calibration",
]
