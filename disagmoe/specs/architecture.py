"""ModelSpec: what is trained.

Decides which facts of a mixture-of-experts transformer matter for FLOPs, bytes
and routing, and which combinations of them are impossible. Sizes are elements,
windows are tokens. Nothing here knows of clusters, ranks or files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagmoe.specs.fields import check_name, require_positive

SCORINGS = ("softmax", "sigmoid", "softmax_after_topk")
"""Router score: softmax over all experts, sigmoid per expert, or softmax over the chosen logits."""

GROUP_SCORES = ("max", "top2_sum")
"""Score of an expert group: its best expert (DeepSeek-V2) or the sum of its two best (DeepSeek-V3; a group of one
expert scores that one)."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3.

    `q_lora_rank` is None where queries are projected directly (V2-Lite). A query
    or key head is `qk_nope_head_dim + qk_rope_head_dim` wide, a value head
    `v_head_dim`; the rotary part of the key is shared by all heads.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        require_positive(
            "mla",
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.q_lora_rank is not None:
            require_positive("mla", q_lora_rank=self.q_lora_rank)


@dataclass(frozen=True)
class ModelSpec:
    """One mixture-of-experts decoder. All MLPs are gated (three matrices).

    `experts` is the number of routed experts of a layer in the whole model, never
    per rank. `expert_width` is the inner width of one of them, `shared_width` the
    total inner width of the fused shared experts (0: none), `dense_width` that
    of the dense MLP of the layers in `dense_layers`. Layers in `windowed_layers`
    attend to the last `window_tokens` tokens, the token itself included; all
    others to the whole prefix. With `mla`, `head_dim` and `kv_heads` describe
    nothing: use `qk_dim` and `v_dim`. `mtp_layers` multi-token-prediction
    modules are not part of `layers` and not counted unless asked for.
    `assumptions` are printed wherever the model is.
    """

    name: str
    title: str
    family: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0
    dense_width: int = 0
    dense_layers: tuple[int, ...] = ()
    window_tokens: int | None = None
    windowed_layers: tuple[int, ...] = ()
    max_position: int | None = None
    tied: bool = False
    mla: LatentAttention | None = None
    attention_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    mtp_layers: int = 0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "model")
        require_positive(
            f"model {self.name}",
            layers=self.layers,
            hidden=self.hidden,
            vocab=self.vocab,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            experts=self.experts,
            expert_width=self.expert_width,
            routed_scaling_factor=self.routed_scaling_factor,
            n_group=self.n_group,
            topk_group=self.topk_group,
        )
        self._check_attention()
        self._check_router()
        self._check_layers()

    def _fail(self, message: str) -> ValueError:
        return ValueError(f"model {self.name}: {message}")

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise self._fail(f"heads {self.heads} not divisible by kv_heads {self.kv_heads}")
        if self.max_position is not None and self.max_position <= 0:
            raise self._fail(f"max_position must be positive, got {self.max_position}")
        if self.window_tokens is not None and self.window_tokens <= 0:
            raise self._fail(f"window_tokens must be positive, got {self.window_tokens}")
        if self.windowed_layers and self.window_tokens is None:
            raise self._fail("windowed_layers are given but window_tokens is not")

    def _check_router(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise self._fail(f"top_k {self.top_k} does not fit {self.experts} experts; allowed: 1 to {self.experts}")
        if self.experts % self.n_group:
            raise self._fail(f"experts {self.experts} not divisible by n_group {self.n_group}")
        if self.topk_group > self.n_group:
            raise self._fail(f"topk_group {self.topk_group} exceeds n_group {self.n_group}")
        reachable = self.experts // self.n_group * self.topk_group
        if self.top_k > reachable:
            raise self._fail(
                f"top_k {self.top_k} exceeds the {reachable} experts in {self.topk_group} of {self.n_group} groups"
            )
        if self.scoring not in SCORINGS:
            raise self._fail(f"unknown scoring {self.scoring!r}; known: {', '.join(SCORINGS)}")
        if self.group_score not in GROUP_SCORES:
            raise self._fail(f"unknown group_score {self.group_score!r}; known: {', '.join(GROUP_SCORES)}")

    def _check_layers(self) -> None:
        for key in ("dense_layers", "windowed_layers"):
            indices: tuple[int, ...] = getattr(self, key)
            if list(indices) != sorted(set(indices)):
                raise self._fail(f"{key} must be distinct and ascending, got {list(indices)}")
            if indices and (indices[0] < 0 or indices[-1] >= self.layers):
                raise self._fail(f"{key} must lie in 0 to {self.layers - 1}, got {list(indices)}")
        if len(self.dense_layers) == self.layers:
            raise self._fail(f"all {self.layers} layers are dense: not an MoE model")
        if self.dense_layers and self.dense_width <= 0:
            raise self._fail(f"dense_layers need a positive dense_width, got {self.dense_width}")
        for key in ("shared_width", "dense_width", "mtp_layers"):
            if getattr(self, key) < 0:
                raise self._fail(f"{key} must not be negative, got {getattr(self, key)}")

    def is_moe(self, layer: int) -> bool:
        """True where `layer` (0-based) has routed experts, False where its MLP is dense."""
        return layer not in self.dense_layers

    def window(self, layer: int) -> int | None:
        """Tokens that `layer` attends to, the token itself included; None = the whole prefix."""
        return self.window_tokens if layer in self.windowed_layers else None

    @property
    def moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.layers - len(self.dense_layers)

    @property
    def qk_dim(self) -> int:
        """Width of one query (and key) head in the scores."""
        return self.head_dim if self.mla is None else self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        """Width of one value head in the scores."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    def with_layers(self, layers: int) -> ModelSpec:
        """The same model cut to its first `layers` layers (1 to the present number)."""
        if not 1 <= layers <= self.layers:
            raise self._fail(f"cannot be cut to {layers} layers; allowed: 1 to {self.layers}")
        return replace(
            self,
            layers=layers,
            dense_layers=tuple(i for i in self.dense_layers if i < layers),
            windowed_layers=tuple(i for i in self.windowed_layers if i < layers),
        )
