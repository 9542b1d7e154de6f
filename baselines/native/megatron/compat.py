"""What Megatron-Core asks of CUDA, answered on CPU. Nothing here is needed on a GPU.

Decides the smallest set of answers with which Megatron-Core's own model, dispatcher,
schedules and optimizer run unchanged on CPU with gloo. Its files stay as they are:
`on_cpu` replaces names from outside and puts everything back when it ends, also after
an error. Three kinds of places need an answer:

- the device: `torch.cuda.current_device()`, `device="cuda"` and `Tensor.cuda()` name a
  GPU nearly everywhere; the type name of an fp32 tensor is compared with the CUDA one;
- streams, events and NVTX ranges: with nothing asynchronous on CPU they do nothing,
  so overlap options change the order of the work and hide nothing;
- the random generator of dropout and initialisation, which is the CPU one.

One answer is not about CUDA: 0.16 uses the name of a Transformer Engine function that it
only imports where Transformer Engine is installed (`moe_utils.te_general_gemm`); None is
what its own code takes for "not there".

The interception of `device=` is thread-local: another thread enters `on_cpu` itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_ABSENT = object()


class _CudaMeansCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device gets the CPU instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if device is not None and device != CPU and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """A stream whose work is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Streams(threading.local):
    """The current stream of this thread."""

    def __init__(self) -> None:
        self.default = self.current = _Stream()

    @contextmanager
    def use(self, stream: _Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


def _host_copy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` for tensors that are there already; split sizes become lists c10d takes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _cpu_state(*args: object, **kwargs: object) -> Tensor:
    return torch.get_rng_state()


Answer = tuple[object, str, object]
"""Owner and name of what is replaced, and by what."""


def _without_transformer_engine() -> Answer:
    return (moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None))


def _answers() -> list[Answer]:
    streams = _Streams()
    cuda, random = torch.cuda, tensor_parallel.random
    return [
        (cuda, "current_device", lambda: CPU),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda device=None: streams.current),
        (cuda, "default_stream", lambda device=None: streams.default),
        (cuda, "stream", streams.use),
        (cuda, "synchronize", _nothing),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", _cpu_state),
        (cuda.random, "get_rng_state", _cpu_state),
        (Tensor, "record_stream", _nothing),
        (cuda.nvtx, "range_push", _nothing),
        (cuda.nvtx, "range_pop", _nothing),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _host_copy),
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _Stream()),  # these three are kept for good,
        (pipeline_utils, "_COMP_STREAM", None),  # so that a stream made here would outlive us
        (pipeline_utils, "_COMM_STREAM", None),
        _without_transformer_engine(),
    ]


@contextmanager
def _replaced(answers: list[Answer]) -> Iterator[None]:
    with ExitStack() as restore:
        for owner, name, answer in answers:
            restore.callback(_put_back, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, answer)
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-Core runs on CPU inside; everything is as before afterwards. Wrap building, stepping and closing."""
    # Its jit_fuser is torch.compile, which would want a compiler here.
    with _replaced(_answers()), torch.compiler.set_stance("force_eager"), _CudaMeansCpu():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Megatron's warnings about its own defaults and torch's about the names that Megatron uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield


def _put_back(owner: object, name: str, value: object) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """The context in which Megatron-Core runs on `device`; on a GPU only the missing name is put there."""
    with on_cpu() if device.type == "cpu" else _replaced([_without_transformer_engine()]), _quiet():
        yield
