"""How many layers each virtual stage of a colocated pipeline gets.

Layers are dealt out one at a time to the rank with the least load so far, the
output head and the embedding counting as load of the last and the first rank;
inside a rank the emptiest virtual stage takes the layer. A pipeline whose head
is ignored here has its slowest rank chosen by accident.
"""

from __future__ import annotations


def split_layers(
    layers: int, p: int, v: int, *, head_load: float = 0.0, embed_load: float = 0.0
) -> tuple[tuple[int, ...], ...]:
    """Contiguous layers of every virtual stage; stage s = chunk * p + rank.

    Loads are in units of one layer's time. Every virtual stage gets at least one
    layer. Raises ValueError where there are fewer layers than virtual stages.
    """
    if layers < p * v:
        raise ValueError(f"{layers} layers cannot fill pp {p} x virtual {v} = {p * v} stages: at least one layer each")
    counts = [1] * (p * v)
    load = [float(v)] * p
    load[0] += embed_load
    load[p - 1] += head_load
    for _ in range(layers - p * v):
        rank = min(range(p), key=lambda r: (load[r], r))
        # The last chunk ends with the head, so it is filled last among equals.
        chunk = min(range(v), key=lambda c: (counts[c * p + rank], c))
        counts[chunk * p + rank] += 1
        load[rank] += 1.0
    stages = []
    first = 0
    for count in counts:
        stages.append(tuple(range(first, first + count)))
        first += count
    return tuple(stages)
