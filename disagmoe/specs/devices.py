"""Devices: peak rates of one GPU, as its vendor states them.

Decides what 100 % means in every utilisation figure: dense bf16 peaks (never
the doubled figure with structured sparsity). An unknown device is an error: a
borrowed peak would make every MFU wrong without a sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.specs.fields import require_positive


@dataclass(frozen=True)
class Device:
    """One GPU. TFLOP/s are dense bf16; GB/s are 1e9 bytes/s; NVLink counts one direction.

    `memory_gib` is what the driver reports, not the marketing size.
    """

    name: str
    peak_bf16_tflops: float
    hbm_gbs: float
    memory_gib: float
    sms: int
    nvlink_gbs: float

    def __post_init__(self) -> None:
        require_positive(
            f"device {self.name}",
            peak_bf16_tflops=self.peak_bf16_tflops,
            hbm_gbs=self.hbm_gbs,
            memory_gib=self.memory_gib,
            sms=self.sms,
            nvlink_gbs=self.nvlink_gbs,
        )


# Peaks, HBM and NVLink rates: NVIDIA data sheets (SXM parts). The A800 and H800 are
# the A100 and H100 with NVLink cut to 400 GB/s both ways together.
# Memory: total reported by nvidia-smi (MiB / 1024).
# `laptop` is no product but a nominal assumption: one of eight processes that share
# one CPU. It makes tiny models run everywhere and claims nothing about any machine.
# `cpu` is a yardstick: round rates above those of any process on a CPU, in fractions of
# which `make calibrate` states what it measured.
_DEVICES = (
    Device("A100", peak_bf16_tflops=312.0, hbm_gbs=2039.0, memory_gib=80.0, sms=108, nvlink_gbs=300.0),
    Device("A800", peak_bf16_tflops=312.0, hbm_gbs=2039.0, memory_gib=80.0, sms=108, nvlink_gbs=200.0),
    Device("H100", peak_bf16_tflops=989.0, hbm_gbs=3350.0, memory_gib=79.6, sms=132, nvlink_gbs=450.0),
    Device("H800", peak_bf16_tflops=989.0, hbm_gbs=3350.0, memory_gib=79.6, sms=132, nvlink_gbs=200.0),
    Device("H20", peak_bf16_tflops=148.0, hbm_gbs=4000.0, memory_gib=95.6, sms=78, nvlink_gbs=450.0),
    Device("H200", peak_bf16_tflops=989.0, hbm_gbs=4800.0, memory_gib=140.4, sms=132, nvlink_gbs=450.0),
    Device("B200", peak_bf16_tflops=2250.0, hbm_gbs=8000.0, memory_gib=179.1, sms=148, nvlink_gbs=900.0),
    Device("cpu", peak_bf16_tflops=1.0, hbm_gbs=100.0, memory_gib=8.0, sms=1, nvlink_gbs=100.0),
    Device("laptop", peak_bf16_tflops=0.05, hbm_gbs=5.0, memory_gib=2.0, sms=1, nvlink_gbs=5.0),
)
_BY_NAME = {entry.name.lower(): entry for entry in _DEVICES}


def device_names() -> tuple[str, ...]:
    """Names of the known devices."""
    return tuple(entry.name for entry in _DEVICES)


def device(name: str) -> Device:
    """The device called `name` (case does not matter). Raises ValueError listing the known ones."""
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(device_names())}") from None
