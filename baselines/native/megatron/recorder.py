"""The order in which Megatron-Core ran, told by hooks that it calls itself.

Decides what counts as an action and when it begins: a forward when Megatron asks for the
input of a chunk, a backward when the gradient reaches the output of a chunk. Megatron's
timers (`config.timers`, which the recorder stands in for) bracket both, and an action
outside its bracket is an error: nothing of the order is assumed.

Combined 1F1B (`overlap_moe_expert_parallel_comm`) has no output to hook and brackets
forwards only; there a backward begins when the gradient reaches the last router of the
chunk, its first gradient that a module's own hook can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from baselines.native.result import Action
from disagmoe.ops import Phase

_BRACKET = {Phase.F: "forward-compute", Phase.B: "backward-compute"}


class Recorder:
    """Megatron's timers: called with a name, then started and stopped. `actions` are in the order of their starts."""

    def __init__(self, models: Sequence[Any], *, combined: bool) -> None:
        self.actions: list[Action] = []
        self._chunk_of = {id(model): chunk for chunk, model in enumerate(models)}
        self._combined = combined
        self._named = self._open = ""
        self._hooks = [self._watch(model) for model in models] if combined else []
        self._forward = Action(Phase.F, -1, -1)

    def __call__(self, name: str, log_level: int = 0) -> Recorder:
        self._named = name
        return self

    def start(self, barrier: bool = False) -> None:
        if self._named in _BRACKET.values():
            self._open = self._named

    def stop(self, barrier: bool = False) -> None:
        if self._named == self._open:
            self._open = ""

    def forward(self, model: Any, microbatch: int) -> None:
        """The forward of `microbatch` through the GPTModel `model` begins."""
        self._forward = Action(Phase.F, self._chunk_of[id(model)], microbatch)
        self._note(self._forward)

    def output(self, tensor: Tensor) -> None:
        """`tensor` is what the last forward gave; its gradient begins the backward."""
        tensor.register_hook(partial(self._begin_backward, self._forward._replace(phase=Phase.B)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the hooks out of the modules."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, model: Any) -> Any:
        routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        if not routers:
            raise ValueError("EP overlap: every model chunk needs a layer with experts")
        return routers[-1].register_forward_hook(self._routed)

    def _routed(self, router: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        self.output(outputs[0])

    def _begin_backward(self, action: Action, gradient: Tensor) -> Tensor:
        self._note(action)
        return gradient

    def _note(self, action: Action) -> None:
        bracketed = action.phase is Phase.F or not self._combined
        if bracketed and self._open != _BRACKET[action.phase]:
            raise RuntimeError(f"{action} began inside Megatron's timer {self._open!r}")
        self.actions.append(action)
