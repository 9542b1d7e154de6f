"""Which peers can run here, without importing them.

Decides how a peer is found, which versions were tried, what to install where one is
missing, and what its adapter covers; `python -m bench.capabilities` prints it. A peer is
imported by its adapter only, once it is asked to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True)
class Peer:
    """A system that an adapter runs.

    `module` is what its adapter imports, `distribution` what pip calls it. `systems`
    are our systems whose rows it stands beside. `tested` are versions whose losses and
    gradients equalled ours on CPU. `on_cpu` and `on_gpu` say what runs where, `limits`
    what the adapter leaves out.
    """

    name: str
    module: str
    distribution: str
    systems: tuple[str, ...]
    tested: tuple[str, ...]
    install: str
    covers: str
    on_cpu: str
    on_gpu: str
    limits: str

    @property
    def installed(self) -> str | None:
        """The version that is here, None where there is none."""
        try:
            found = find_spec(self.module)
        except ModuleNotFoundError:  # of the package above it
            found = None
        if found is None:
            return None
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "unknown version"

    @property
    def missing(self) -> str:
        """One line for a user who asked for it."""
        return f"{self.name} is not installed: {self.install}"

    def require(self) -> str:
        """The installed version. Raises ValueError that says what to install."""
        found = self.installed
        if found is None:
            raise ValueError(self.missing)
        return found


MEGATRON = Peer(
    name="Megatron-Core",
    module="megatron.core",
    distribution="megatron-core",
    systems=("megatron_1f1b", "megatron_1f1b_overlap"),
    tested=("0.15.3", "0.16.0", "0.16.1"),
    install="pip install -e '.[megatron]' (a wheel; nothing is compiled)",
    covers="GPTModel, all-to-all dispatcher, router, 1F1B plain and interleaved, EP overlap (combined 1F1B), DDP, "
    "distributed optimizer; pp, virtual stages, ep, expert replicas, uneven layer splits",
    on_cpu="fp32 and bf16, gloo, through baselines/native/megatron/compat.py; EP overlap changes the order, nothing is "
    "hidden",
    on_gpu="fp32 and bf16, NCCL, without the CPU answers; never run by us",
    limits="TP, CP, recompute, FP8, grouped GEMM, Transformer Engine layers",
)
TUTEL = Peer(
    name="Tutel",
    module="tutel",
    distribution="tutel",
    systems=("tutel",),
    tested=("0.4 (commit ac0e51b)",),
    install="python -m pip install -v --no-build-isolation git+https://github.com/microsoft/tutel@main (not on PyPI; "
    "compiles an extension)",
    covers="moe_layer with its gate, dispatch, llama_ffn experts and combine inside our block; overlap degree, "
    "capacity factor, 2DH; ep = all ranks, pp = 1",
    on_cpu="fp32 and bf16 (autocast), gloo; Tutel ignores the overlap degree there: every row is degree 1",
    on_gpu="fp32 and bf16 (autocast), NCCL, overlap degree by Tutel itself; never run by us",
    limits="pipelines, ep below the number of ranks (its all-to-all differentiates over the world)",
)
PEERS = (MEGATRON, TUTEL)


def peer_of(system: str) -> Peer | None:
    """The peer whose rows stand beside those of `system`."""
    return next((peer for peer in PEERS if system in peer.systems), None)


def require_some(systems: Iterable[str]) -> list[Peer]:
    """The installed peers of `systems`. Raises ValueError, one line with what to install, where there is none."""
    wanted = list(dict.fromkeys(peer for peer in map(peer_of, systems) if peer is not None))
    if not wanted:
        raise ValueError(f"none of {', '.join(systems)} has a native implementation; those that do: {_NATIVE}")
    found = [peer for peer in wanted if peer.installed is not None]
    if not found:
        raise ValueError("; ".join(peer.missing for peer in wanted))
    return found


_NATIVE = ", ".join(system for peer in PEERS for system in peer.systems)
