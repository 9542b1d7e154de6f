"""`python -m bench.capabilities`: which peers can run here, what their adapters cover, and which models.

Decides nothing: it prints what the adapters say of themselves, as Markdown.
"""

from __future__ import annotations

from importlib.util import find_spec

from baselines.native.peers import PEERS, Peer
from disagmoe.specs import load_model, model_names

COLUMNS = ("peer", "here", "tested", "beside", "covers", "on CPU", "on GPUs", "not covered")


def peers_table() -> list[tuple[str, ...]]:
    """One row per peer."""
    return [
        (
            peer.name,
            peer.installed or "not installed",
            ", ".join(peer.tested),
            ", ".join(peer.systems),
            peer.covers,
            peer.on_cpu,
            peer.on_gpu,
            peer.limits,
        )
        for peer in PEERS
    ]


def models_table() -> list[tuple[str, ...]]:
    """One row per shipped model: covered by each adapter, or what it lacks."""
    from baselines.native.coverage import LACKS  # loads torch

    def cell(peer: Peer, name: str) -> str:
        missing = LACKS[peer](load_model(name))
        return f"no: {', '.join(missing)}" if missing else "yes"

    return [(name, *(cell(peer, name) for peer in PEERS)) for name in model_names()]


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def main() -> None:
    """Print both tables, and what to install where something is missing."""
    print(markdown(COLUMNS, peers_table()))
    if find_spec("torch") is None:
        print("\nWhich models are covered is told where torch is installed: pip install -e '.[megatron]'")
    else:
        print("\n" + markdown(("model", *(peer.name for peer in PEERS)), models_table()))
    for peer in PEERS:
        if peer.installed is None:
            print(f"\n{peer.missing}")


if __name__ == "__main__":
    main()
