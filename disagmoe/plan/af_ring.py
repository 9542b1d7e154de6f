"""Decides what every worker of the AF-Pipe ring does with a micro-batch, and where the output head is.

A micro-batch passes a chain of steps: attention and experts of layer 0, of layer
1, ..., the head, and all of it backwards. A step is what one worker does at one
go: the rows it receives, computes and sends. Layer l is on A_{l mod p} (worker
l mod p) and F_{l mod p} (worker p + l mod p), unless the ring maps layers to groups
otherwise (`af_mapped.py`). After the last layer, the F-ranks
hold partial rows of every token. The head is one of

- `last_f`: on the F-group of the last layer (the paper), which first reduces the
  partial rows inside the group (a collective);
- `next_a`: on A_{L mod p}, as if there were one more layer: the partial rows are
  combined on their way there, as between layers;
- `spread`: on every F-group, 1/p of the vocabulary each. The rows, reduced as for
  `last_f`, are passed on from group to group (one P2P each, so that no group sends
  them p - 1 times), and the gradients of the rows return along the same path, each
  group adding its own. Chunk g of HEAD is on F_g, chunk g of P2P leads there. The
  softmax statistics of all chunks are needed by every backward.

Forward and backward of a whole head are one step, so one micro-batch's logits live
at a time; the chunks of a spread head wait for each other in between.
"""

from __future__ import annotations

from typing import NamedTuple

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import Cell, TemplateKey

HEADS = ("last_f", "next_a", "spread")
"""Where the output head can be; see the module's docstring."""


class Step(NamedTuple):
    """One step of the chain: its key in the orders (worker, phase, chunk of the worker) and its rows."""

    key: TemplateKey
    cells: list[Cell]


def head_workers(p: int, layers: int, head: str) -> tuple[int, ...]:
    """Workers that hold the head, each 1/len of the vocabulary, in the order of its chunks."""
    if head == "spread":
        return tuple(range(p, 2 * p))
    return (layers % p,) if head == "next_a" else (p + (layers - 1) % p,)


class Ring(NamedTuple):
    """The shape that all steps depend on: depth, layers, placement of the head, stream of backward compute.

    `attn` and `ffn` name the worker of every layer's attention and experts, A-workers
    first; () is the paper's placement, p groups of either kind in turn.
    """

    p: int
    layers: int
    head: str
    backward: Stream
    attn: tuple[int, ...] = ()
    ffn: tuple[int, ...] = ()

    def attention(self, layer: int) -> int:
        """Worker of a layer's attention; of the layer behind the last one too, where `next_a` puts the head."""
        return self.attn[layer % self.layers] if self.attn else layer % self.p

    def experts(self, layer: int) -> int:
        """Worker of a layer's experts."""
        return self.ffn[layer] if self.ffn else self.first_f + layer % self.p

    def chunk(self, layer: int, side: tuple[int, ...]) -> int:
        """Which of its worker's layers this is, on the side (`attn` or `ffn`) given."""
        return side[:layer].count(side[layer]) if side else layer // self.p

    @property
    def first_f(self) -> int:
        """The first F-worker."""
        return min(self.ffn) if self.ffn else self.p

    @property
    def f_groups(self) -> int:
        """Number of F-groups."""
        return len(set(self.ffn)) if self.ffn else self.p

    @property
    def last_f(self) -> int:
        """Worker of the last layer's experts."""
        return self.experts(self.layers - 1)

    @property
    def spread(self) -> bool:
        """Several F-groups share the head; with one F-group `spread` is `last_f`."""
        return self.head == "spread" and self.f_groups > 1

    @property
    def head_workers(self) -> tuple[int, ...]:
        if self.head == "spread":
            return tuple(range(self.first_f, self.first_f + self.f_groups))
        return (self.attention(self.layers),) if self.head == "next_a" else (self.last_f,)

    def around(self, worker: int, steps: int) -> int:
        """The F-worker so many groups further on."""
        return self.first_f + (worker - self.first_f + steps) % self.f_groups

    @property
    def chunks(self) -> int:
        """Chunks of a worker, the padding included.

        A head that is not where the last layer is takes the places of layers behind it.
        """
        behind = {"next_a": 1, "spread": self.p if self.spread else 0}.get(self.head, 0)
        return -(-(self.layers + behind) // self.p)

    def slot(self, worker: int) -> int:
        """Chunk of this head worker that the head, were it a layer, would be."""
        if self.ffn:
            return self.ffn.count(worker)
        if not self.spread:
            return (self.layers - 1 + (self.head == "next_a")) // self.p
        return (self.layers + (worker - self.layers) % self.p) // self.p


def ring_steps(ring: Ring) -> list[Step]:
    """The chain of one micro-batch, forward and back."""
    forward, backward = [], []
    for layer in range(ring.layers):
        for worker, (there, back) in (
            (ring.attention(layer), _attention(ring, layer)),
            (ring.experts(layer), _experts(ring, layer)),
        ):
            chunk = ring.chunk(layer, ring.attn if worker < ring.first_f else ring.ffn)
            forward.append(Step((worker, int(Phase.F), chunk), there))
            backward.append(Step((worker, int(Phase.B), chunk), back))
    head = _spread_head(ring) if ring.spread else [_whole_head(ring)]
    return [*forward, *head, *reversed(backward)]


def _attention(ring: Ring, layer: int) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of attention of one layer."""
    experts, before = ring.experts(layer), ring.experts(max(layer - 1, 0))
    forward = [
        Cell(Stream.COMPUTE, Kind.ATTN, Phase.F, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.F, layer, peer=experts),
    ]
    backward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.B, layer, peer=experts),
        Cell(ring.backward, Kind.ATTN, Phase.B, layer),
    ]
    if layer == 0:
        embed = Cell(Stream.COMPUTE, Kind.EMBED, Phase.F, -1)
        return [embed, *forward], [*backward, Cell(ring.backward, Kind.EMBED, Phase.B, -1)]
    forward = [Cell(Stream.RECV, Kind.COMBINE, Phase.F, layer - 1, peer=before), *forward]
    return forward, [*backward, Cell(Stream.SEND, Kind.COMBINE, Phase.B, layer - 1, peer=before)]


def _experts(ring: Ring, layer: int) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of the experts of one layer; after the last one the rows go to the head."""
    attention, after = ring.attention(layer), ring.attention(layer + 1)
    forward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.F, layer, peer=attention),
        Cell(Stream.COMPUTE, Kind.FFN, Phase.F, layer),
    ]
    backward = [
        Cell(ring.backward, Kind.FFN, Phase.B, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.B, layer, peer=attention),
    ]
    inside = layer == ring.layers - 1 and ring.head != "next_a"
    out, back, peer = (Stream.COLL, Stream.COLL, -1) if inside else (Stream.SEND, Stream.RECV, after)
    forward.append(Cell(out, Kind.COMBINE, Phase.F, layer, peer=peer))
    backward.insert(0, Cell(back, Kind.COMBINE, Phase.B, layer, peer=peer))
    if inside and ring.spread:
        following = ring.around(ring.last_f, 1)
        forward.append(_pass(ring, Phase.F, following, sends=True))
        backward.insert(0, _pass(ring, Phase.B, following, sends=False))
    return forward, backward


def _whole_head(ring: Ring) -> Step:
    """The head on one worker, forward and backward."""
    (worker,) = ring.head_workers
    cells = [
        Cell(Stream.COMPUTE, Kind.HEAD, Phase.F, -1),
        Cell(ring.backward, Kind.HEAD, Phase.B, -1),
    ]
    if ring.head == "next_a":
        from_experts = Cell(Stream.RECV, Kind.COMBINE, Phase.F, ring.layers - 1, peer=ring.last_f)
        to_experts = Cell(Stream.SEND, Kind.COMBINE, Phase.B, ring.layers - 1, peer=ring.last_f)
        cells = [from_experts, *cells, to_experts]
    chunk = ring.slot(worker) if ring.ffn else ring.chunks
    return Step((worker, int(Phase.F), chunk), cells)


def _spread_head(ring: Ring) -> list[Step]:
    """The chunks of the head on all F-groups, from the one behind the last layer's round to that itself, and back."""
    forward, backward = [], []
    for place in range(1, ring.f_groups + 1):
        worker = ring.around(ring.last_f, place)
        group = worker - ring.first_f
        there = [Cell(Stream.COMPUTE, Kind.HEAD, Phase.F, -1, chunk=group)]
        back = [Cell(ring.backward, Kind.HEAD, Phase.B, -1, chunk=group)]
        if worker != ring.last_f:
            there.insert(0, _pass(ring, Phase.F, worker, sends=False))
            back.append(_pass(ring, Phase.B, worker, sends=True))
            following = ring.around(worker, 1)
            if following != ring.last_f:
                there.append(_pass(ring, Phase.F, following, sends=True))
                back.insert(0, _pass(ring, Phase.B, following, sends=False))
        forward.append(Step((worker, int(Phase.F), ring.slot(worker)), there))
        backward.append(Step((worker, int(Phase.B), ring.slot(worker)), back))
    return [*forward, *reversed(backward)]


def _pass(ring: Ring, phase: Phase, to: int, *, sends: bool) -> Cell:
    """One end of the P2P that leads the final rows to F-worker `to` (forward) or their gradients back from it."""
    group = to - ring.first_f
    before = ring.around(to, -1)
    sender = before if phase == Phase.F else to
    peer = (to if phase == Phase.F else before) if sends else sender
    return Cell(Stream.SEND if sends else Stream.RECV, Kind.P2P, phase, ring.layers - 1, chunk=group, peer=peer)
