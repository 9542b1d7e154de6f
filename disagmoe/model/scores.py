"""Causal attention over whole sequences: full or windowed, with or without sinks, all by SDPA.

Decides how the two things SDPA does not know are put to it. A *sink* is a learned
logit per query head in the softmax denominator (GPT-OSS): it becomes one more
key, with an extra feature that only the sink key has, so that its score is the
logit, and a value of zero; no mask carries a gradient and every SDPA kernel
applies. A *window* (the token itself included) is cut into blocks of its own
length that see themselves and the block before: work grows with
sequence x window, not with the square.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """query [b, heads, seq, d], key [b, kv, seq, d], value [b, kv, seq, e] -> [b, heads, seq, e].

    `scale` multiplies the scores; `window` counts tokens, itself included (None:
    the whole prefix); `sinks` are logits [heads].
    """
    if window is not None and window < query.shape[2]:
        return _banded(query, key, value, scale, window, sinks)
    if sinks is None:
        return _sdpa(query, key, value, None, scale)
    query, key, value = _with_sink(query, key, value, scale, sinks)
    # A first query that sees only the sink keeps the mask a plain causal one.
    return _sdpa(pad(query, (0, 0, 1, 0)), key, value, None, scale)[:, :, 1:]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _with_sink(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the sink in front as key 0; the extra feature is the logit in queries, 1 in the sink, 0 in other keys."""
    logit = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    sink = key.new_zeros(*key.shape[:2], 1, key.shape[3] + 1)
    sink[..., -1] = 1
    key = torch.cat((sink, pad(key, (0, 1))), dim=2)
    return torch.cat((query, logit), dim=-1), key, pad(value, (0, 0, 1, 0))


def _banded(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    batch, heads, seq, _ = query.shape
    blocks = -(-seq // window)
    tail = blocks * window - seq
    query = _fold(pad(query, (0, 0, 0, tail)), blocks, window)
    key, value = (_fold_pairs(pad(x, (0, 0, window, tail)), blocks, window) for x in (key, value))
    mask = _band(blocks, window, query.device)
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scale, sinks)
        mask = pad(mask, (1, 0), value=True)
    mask = mask.expand(batch, *mask.shape).reshape(batch * blocks, 1, window, mask.shape[-1])
    out = _sdpa(query, key, value, mask, scale)
    width = out.shape[-1]
    out = out.view(batch, blocks, heads, window, width).transpose(1, 2)
    return out.reshape(batch, heads, blocks * window, width)[:, :, :seq]


def _fold(x: Tensor, blocks: int, window: int) -> Tensor:
    """[b, heads, blocks * window, d] -> [b * blocks, heads, window, d]."""
    batch, heads, _, width = x.shape
    return x.view(batch, heads, blocks, window, width).transpose(1, 2).reshape(batch * blocks, heads, window, width)


def _fold_pairs(x: Tensor, blocks: int, window: int) -> Tensor:
    """[b, heads, (blocks + 1) * window, d] -> [b * blocks, heads, 2 * window, d]: each block behind the one before."""
    batch, heads, _, width = x.shape
    parts = x.view(batch, heads, blocks + 1, window, width)
    pairs = torch.cat((parts[:, :, :-1], parts[:, :, 1:]), dim=3)
    return pairs.transpose(1, 2).reshape(batch * blocks, heads, 2 * window, width)


def _band(blocks: int, window: int, device: torch.device) -> Tensor:
    """Allowed keys [blocks, window, 2 * window]: query i of a block sees keys i + 1 to i + window of its pair.

    In the first block the first `window` keys are padding.
    """
    row = torch.arange(window, device=device).unsqueeze(1)
    column = torch.arange(2 * window, device=device).unsqueeze(0)
    band = (column > row) & (column <= row + window)
    mask = band.expand(blocks, window, 2 * window).clone()
    mask[0, :, :window] = False
    return mask
