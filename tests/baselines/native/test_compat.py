"""What is answered on CPU, and that nothing of it stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.baselines.native import needs_megatron

needs_megatron()

import torch  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.pipeline_parallel import utils as pipeline_utils  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402

from baselines.native.megatron import compat  # noqa: E402

TOUCHED: list[ModuleType | type] = [
    *(torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, tensor_parallel.random, moe_utils),
    *(token_dispatcher, token_dispatcher.MoEAlltoAllTokenDispatcher, pipeline_utils),
]


def state() -> list[dict[str, object]]:
    return [dict(vars(owner)) for owner in TOUCHED]


def test_everything_is_put_back_also_after_an_error() -> None:
    before = state()
    with compat.on_cpu():
        assert state() != before
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert state() == before
    with pytest.raises(KeyError), compat.on_cpu():
        raise KeyError
    assert state() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_every_owner_that_is_touched_is_watched() -> None:
    assert {id(owner) for owner, _, _ in compat._answers()} <= {id(owner) for owner in TOUCHED}


def test_a_cuda_device_means_the_cpu() -> None:
    with compat.on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.empty(2, device=torch.cuda.current_device()).cuda().device.type == "cpu"
        assert torch.ones(2, device=torch.device("cuda", 0)).sum() == 2
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_streams_keep_track_of_which_is_current() -> None:
    with compat.on_cpu():
        side, outer = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
            side.wait_stream(outer)
        assert torch.cuda.current_stream() is outer
        assert side.record_event().query()
        torch.zeros(1).record_stream(side)


def test_another_thread_enters_for_itself() -> None:
    """The interception of `device=` is the thread's own; the replaced names are the process's."""
    seen: list[str] = []

    def ask(enter: Callable[[], object]) -> None:
        with enter():  # type: ignore[attr-defined]
            seen.append(torch.zeros(1, device="cuda").device.type)

    with compat.on_cpu():
        worker = threading.Thread(target=ask, args=(compat._CudaMeansCpu,))
        worker.start()
        worker.join(30)
    assert seen == ["cpu"]


def test_random_state_is_the_cpu_generator_and_can_be_forked() -> None:
    with compat.on_cpu():
        tracker = tensor_parallel.random.CudaRNGStatesTracker()
        tracker.add("mine", 5)
        torch.manual_seed(1)
        first = torch.rand(1)
        torch.manual_seed(1)
        with tracker.fork("mine"):
            torch.rand(3)
        assert torch.equal(torch.rand(1), first)


def test_a_gpu_gets_only_the_name_that_is_missing() -> None:
    """On a GPU nothing but the name is put in place (asked without a GPU: nothing here touches one)."""
    before = state()
    with compat.on(torch.device("cuda", 0)):
        changed = [owner for owner, old in zip(TOUCHED, before, strict=True) if dict(vars(owner)) != old]
        assert changed == ([] if "te_general_gemm" in before[TOUCHED.index(moe_utils)] else [moe_utils])
    assert state() == before
