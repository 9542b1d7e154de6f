"""An independent model, token by token in fp64, on a mapping of global names to tensors.

Written from the papers and the published model code, with none of the code under
test: no fused or stacked storage, no SDPA, no masks, no sort by expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from disagmoe.specs import ModelSpec

Values = Mapping[str, Tensor]
THETA = {"qwen3_moe": 1e6, "mixtral": 1e6, "gpt_oss": 150000.0}
EPSILON = {"mixtral": 1e-5, "gpt_oss": 1e-5}
NEIGHBOURS = ("deepseek_v2", "deepseek_v3")


class SlowModel:
    def __init__(self, spec: ModelSpec, values: Values) -> None:
        self.spec = spec
        self.values = values
        self.balance = torch.zeros((), dtype=torch.float64)
        self.z = torch.zeros((), dtype=torch.float64)
        self.counts = {layer: [0] * spec.experts for layer in range(spec.layers) if spec.is_moe(layer)}

    def loss(self, tokens: Tensor, targets: Tensor, balance: float, z: float) -> Tensor:
        """Mean cross entropy plus the weighted router losses of whole sequences [n, seq]."""
        total = torch.zeros((), dtype=torch.float64)
        for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
            logits = self.logits(row)
            for i, target in enumerate(wanted):
                total = total - torch.log(torch.exp(logits[i])[target] / torch.exp(logits[i]).sum())
        return total / tokens.numel() + balance * self.balance / tokens.shape[0] + z * self.z / tokens.numel()

    def logits(self, tokens: list[int]) -> list[Tensor]:
        """Logits [vocab] of every position of one sequence."""
        embedding = self.values["embedding.weight"]
        rows = [embedding[token] for token in tokens]
        for layer in range(self.spec.layers):
            rows = self.layer(layer, rows)
        output = embedding if self.spec.tied else self.values["head.weight"]
        return [output @ self.norm(row, "head.norm") for row in rows]

    def layer(self, layer: int, rows: list[Tensor]) -> list[Tensor]:
        path = f"layers.{layer}."
        mixed = self.attention(layer, [self.norm(row, f"{path}attention_norm") for row in rows])
        rows = [row + more for row, more in zip(rows, mixed, strict=True)]
        normed = [self.norm(row, f"{path}ffn_norm") for row in rows]
        if not self.spec.is_moe(layer):
            return [row + self.mlp(f"{path}dense.", x) for row, x in zip(rows, normed, strict=True)]
        results = []
        choices: list[int] = []
        shares = torch.zeros(self.spec.experts, dtype=torch.float64)
        for row, x in zip(rows, normed, strict=True):
            chosen, weights, share = self.route(layer, x)
            choices += chosen
            shares = shares + share / len(rows)
            for expert, weight in zip(chosen, weights, strict=True):
                row = row + weight * self.mlp(f"{path}experts.{expert}.", x)
            if self.spec.shared_width:
                row = row + self.mlp(f"{path}shared.", x)
            results.append(row)
        for expert in range(self.spec.experts):
            self.counts[layer][expert] += choices.count(expert)
            fraction = choices.count(expert) / (self.spec.top_k * len(rows))
            self.balance = self.balance + self.spec.experts * fraction * shares[expert]
        return results

    def norm(self, x: Tensor, path: str) -> Tensor:
        epsilon = EPSILON.get(self.spec.family, 1e-6)
        return x / torch.sqrt((x * x).sum() / x.numel() + epsilon) * self.values[f"{path}.weight"]

    def mlp(self, path: str, x: Tensor) -> Tensor:
        value = self.values
        gate, up = value[f"{path}w1"] @ x, value[f"{path}w3"] @ x
        if f"{path}b1" in value:
            gate, up = gate + value[f"{path}b1"], up + value[f"{path}b3"]
        if self.spec.family == "gpt_oss":
            gate, up = (
                torch.minimum(gate, torch.tensor(7.0)),
                torch.maximum(torch.minimum(up, torch.tensor(7.0)), torch.tensor(-7.0)),
            )
            inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
        else:
            inner = gate / (1 + torch.exp(-gate)) * up
        out = value[f"{path}w2"] @ inner
        return out + value[f"{path}b2"] if f"{path}b2" in value else out

    def route(self, layer: int, x: Tensor) -> tuple[list[int], list[Tensor], Tensor]:
        """Chosen experts, their weights, and the score of every expert as a share."""
        spec, path = self.spec, f"layers.{layer}.router."
        logits = self.values[f"{path}weight"] @ x
        if spec.router_bias:
            logits = logits + self.values[f"{path}bias"]
        exponents = torch.exp(logits)
        self.z = self.z + torch.log(exponents.sum()) ** 2
        scores = 1 / (1 + torch.exp(-logits)) if spec.scoring == "sigmoid" else exponents / exponents.sum()
        ranking = (logits if spec.scoring == "softmax_after_topk" else scores).tolist()
        if spec.correction_bias:
            ranking = [a + b for a, b in zip(ranking, self.values[f"{path}correction_bias"].tolist(), strict=True)]
        chosen = sorted(self.allowed(ranking), key=lambda e: (-ranking[e], e))[: spec.top_k]
        if spec.scoring == "softmax_after_topk":
            weights = [exponents[e] / sum(exponents[i] for i in chosen) for e in chosen]
        elif spec.norm_topk_prob:
            weights = [scores[e] / sum(scores[i] for i in chosen) for e in chosen]
        else:
            weights = [scores[e] for e in chosen]
        return chosen, [w * spec.routed_scaling_factor for w in weights], scores / scores.sum()

    def allowed(self, ranking: list[float]) -> list[int]:
        spec = self.spec
        size = spec.experts // spec.n_group
        groups = [list(range(g * size, (g + 1) * size)) for g in range(spec.n_group)]

        def worth(group: list[int]) -> float:
            best = sorted((ranking[e] for e in group), reverse=True)
            return best[0] if spec.group_score == "max" else sum(best[:2])

        kept = sorted(range(spec.n_group), key=lambda g: (-worth(groups[g]), g))[: spec.topk_group]
        return [e for g in kept for e in groups[g]]

    def attention(self, layer: int, rows: list[Tensor]) -> list[Tensor]:
        spec, path = self.spec, f"layers.{layer}.attention."
        heads = self.latent_heads(path, rows) if spec.mla else self.grouped_heads(path, rows)
        window = len(rows) if spec.window(layer) is None else spec.window(layer)
        assert window is not None
        results = []
        for i in range(len(rows)):
            pieces = []
            for head, (queries, keys, values) in enumerate(heads):
                seen = range(max(0, i - window + 1), i + 1)
                terms = [torch.exp(queries[i] @ keys[j] / math.sqrt(spec.qk_dim)) for j in seen]
                total = sum(terms, torch.zeros((), dtype=torch.float64))
                if spec.sinks:
                    total = total + torch.exp(self.values[f"{path}sinks"][head])
                pieces.append(sum(t / total * values[j] for t, j in zip(terms, seen, strict=True)))
            results.append(self.affine(f"{path}", "o", torch.cat(pieces)))
        return results

    def affine(self, path: str, what: str, x: Tensor) -> Tensor:
        out = self.values[f"{path}w{what}"] @ x
        return out + self.values[f"{path}b{what}"] if f"{path}b{what}" in self.values else out

    def grouped_heads(self, path: str, rows: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        spec, width = self.spec, self.spec.head_dim

        def parts(what: str, norm: str | None) -> list[list[Tensor]]:
            """By position, by head."""
            found = []
            for position, row in enumerate(rows):
                heads = list(self.affine(path, what, row).split(width))
                if norm is not None and spec.qk_norm:
                    heads = [self.norm(head, f"{path}{norm}") for head in heads]
                if norm is not None:
                    heads = [self.turn(head, position) for head in heads]
                found.append(heads)
            return found

        queries, keys, values = parts("q", "q_norm"), parts("k", "k_norm"), parts("v", None)
        shared = spec.heads // spec.kv_heads
        return [
            ([q[h] for q in queries], [k[h // shared] for k in keys], [v[h // shared] for v in values])
            for h in range(spec.heads)
        ]

    def latent_heads(self, path: str, rows: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        spec, mla = self.spec, self.spec.mla
        assert mla is not None
        nope = mla.qk_nope_head_dim
        heads: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], []) for _ in range(spec.heads)]
        for position, row in enumerate(rows):
            if mla.q_lora_rank is None:
                query = self.affine(path, "q", row)
            else:
                query = self.affine(path, "q_b", self.norm(self.affine(path, "q_a", row), f"{path}q_norm"))
            down = self.affine(path, "kv_a", row)
            turned = self.turn(down[mla.kv_lora_rank :], position)
            up = self.affine(path, "kv_b", self.norm(down[: mla.kv_lora_rank], f"{path}kv_norm"))
            for head in range(spec.heads):
                own = query[head * spec.qk_dim : (head + 1) * spec.qk_dim]
                pair = up[head * (nope + mla.v_head_dim) : (head + 1) * (nope + mla.v_head_dim)]
                heads[head][0].append(torch.cat((own[:nope], self.turn(own[nope:], position))))
                heads[head][1].append(torch.cat((pair[:nope], turned)))
                heads[head][2].append(pair[nope:])
        return heads

    def turn(self, head: Tensor, position: int) -> Tensor:
        """Rotate the pairs of one head by position * theta^(-2 i / width)."""
        half = head.numel() // 2
        out = [torch.zeros(())] * head.numel()
        for i in range(half):
            angle = position * THETA.get(self.spec.family, 1e4) ** (-2 * i / head.numel())
            a, b = (2 * i, 2 * i + 1) if self.spec.family in NEIGHBOURS else (i, i + half)
            out[a] = head[a] * math.cos(angle) - head[b] * math.sin(angle)
            out[b] = head[b] * math.cos(angle) + head[a] * math.sin(angle)
        return torch.stack(out)
