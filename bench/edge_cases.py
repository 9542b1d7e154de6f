"""`python -m bench.edge_cases > docs/peer-edge-cases.md`: what peers and we do where routing or batches are uneven.

Decides the words for what was observed: every cell comes from a run on two processes of
this machine. A peer that is not installed has a column that says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

from baselines.native import edges
from baselines.native.edges import RANKS, SCENES, SEQ, Observation, Scene
from baselines.native.peers import MEGATRON, TUTEL, Peer
from bench.capabilities import markdown
from disagmoe.runtime.errors import RankError
from disagmoe.runtime.launch import spawn

EQUAL = 1e-5
TIMEOUT_S = 60.0
LONGEST = 80

HEAD = f"""# Uneven routing and uneven batches: what peers do

Written by `python -m bench.edge_cases`; every cell was run. Two processes of one CPU share the experts (expert
parallelism 2, one pipeline stage) of a model of 2 layers, 8 experts, top-2, fp32; sequences of {SEQ} tokens, 2 on each
rank unless the row says otherwise. "Equal" means that loss and all gradients are those of the single-process model
within 1e-5 relative. Rows: what the experts of the two ranks were given in the first layer.
"""
NOTES = """
- **Zero-token expert, skewed routing.** Megatron-Core and this suite move and compute the rows there are; Tutel pads
  every expert to the fullest one (dropless) or to the capacity, so rows are more than choices, or choices are dropped.
- **Uneven tokens per rank.** Megatron-Core averages over the means of ranks and micro-batches, so tokens of a rank with
  fewer weigh more (`calculate_per_token_loss` weighs tokens alike); with a pipeline its receive buffers have one shape.
  Tutel's exchange needs buffers of one size: with a fixed capacity they follow the rank's own tokens unless
  `inequivalent_tokens=True` is given (gloo aborts; what NCCL does was not run). The adapters refuse such batches.
- **A rank without tokens.** The adapters refuse this as well; the errors are the peers' own. Tutel's comes from its
  GShard loss, which divides by the number of tokens.
"""
WORDS = {
    "zero-token expert": "no token chooses expert 5",
    "skewed routing": "every token chooses experts 0 and 1, both on rank 0",
    "uneven tokens per rank": f"rank 0 has {2 * SEQ} tokens, rank 1 {SEQ}",
    "a rank without tokens": f"rank 0 has {SEQ} tokens, rank 1 none",
}
Run = Callable[..., Observation]


def columns() -> list[tuple[str, Peer | None, Run]]:
    """Title, peer (None: ours) and function of every column."""
    return [
        ("this suite", None, edges.ours),
        ("Megatron-Core", MEGATRON, edges.megatron),
        ("Tutel, dropless", TUTEL, partial(edges.tutel, capacity_factor=0.0)),
        ("Tutel, capacity factor 1", TUTEL, partial(edges.tutel, capacity_factor=1.0)),
    ]


def cell(run: Run, scene: Scene) -> str:
    """What happened."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = spawn(RANKS, run, [scene], timeout_s=TIMEOUT_S, group_timeout_s=TIMEOUT_S / 4)
    except RankError as error:
        reason = error.reason.removeprefix("failed: ")
        return f"fails: {reason[:LONGEST] + '…' if len(reason) > LONGEST else reason}"
    return told(scene, seen)


def told(scene: Scene, seen: Sequence[Observation]) -> str:
    """The observations of all ranks in words."""
    loss = max(each.loss_error for each in seen)
    gradient = max(each.gradient_error for each in seen)
    words = ["equal" if max(loss, gradient) < EQUAL else f"differs: loss by {loss:.1e}, gradients by {gradient:.1e}"]
    idle = [each.idle_gradient for each in seen if each.idle_gradient is not None]
    if idle:
        words.append("gradient of the idle expert exactly 0" if max(idle) == 0.0 else f"idle expert: {max(idle):.1e}")
    words.append(f"rows {', '.join(str(each.rows) for each in seen)}")
    if any(each.dropped for each in seen):
        words.append(f"{seen[0].dropped} of {_pairs(scene)} choices dropped")
    return "; ".join(words)


def _pairs(scene: Scene) -> int:
    """Choices of an expert over all tokens and layers."""
    return sum(scene.sequences) * SEQ * scene.spec.top_k * scene.spec.layers


def main() -> None:
    """Run every scene with every column and print the document."""
    there = [(title, peer, run) for title, peer, run in columns()]
    if MEGATRON.installed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import baselines.native.megatron.schedule  # noqa: F401 - once, before ranks are forked
    rows = [
        (
            f"{scene.name}: {WORDS[scene.name]}",
            *("not run: not installed" if peer and not peer.installed else cell(run, scene) for _, peer, run in there),
        )
        for scene in SCENES
    ]
    print(HEAD)
    versions = [f"{peer.name} {peer.installed or 'not installed'}" for peer in (MEGATRON, TUTEL)]
    print(f"Versions: torch {version('torch')}, {', '.join(versions)}.\n")
    print(markdown(("scene", *(title for title, _, _ in there)), rows))
    print(NOTES, end="")


if __name__ == "__main__":
    main()
