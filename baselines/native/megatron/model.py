"""Megatron-Core's GPTModel for a ModelSpec of ours.

Decides the Megatron configuration of the models that are covered (`coverage.py`):
RMSNorm, rotary positions, grouped queries with or without head norms, gated MLPs without
biases, softmax or sigmoid routers, shared experts, dense layers anywhere, the all-to-all
dispatcher, local experts one after the other (SequentialMLP: the grouped kernels need
CUDA and Transformer Engine), layers split over stages exactly as our Program splits them.
Megatron is given every fact explicitly: its defaults differ between versions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.nn.functional import silu

from baselines.native.coverage import normalised, require_covered
from baselines.native.megatron.shape import TYPES, Shape
from baselines.native.peers import MEGATRON
from disagmoe.model.conventions import conventions_of
from disagmoe.specs import ModelSpec

_MINUTES = 2  # longest wait inside one collective: Megatron takes whole minutes


def transformer_config(
    spec: ModelSpec, shape: Shape, device: torch.device, precision: str = "fp32"
) -> TransformerConfig:
    """Megatron's configuration of `spec`, to run on `device`."""
    require_covered(MEGATRON, spec)
    if [layer for stage in shape.stage_layers for layer in stage] != list(range(spec.layers)):
        raise ValueError(f"the stages must hold layers 0 to {spec.layers - 1} once each, in order")
    rules = conventions_of(spec)
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.dense_width or spec.expert_width,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=rules.norm_epsilon,
        rotary_interleaved=rules.rope_interleaved,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_experts(spec, shape),
        **_pipeline(shape, device),
        **_precision(precision),
        **_plain_kernels(),
    )
    # Its check asks for bf16 or fp16; fp32 is what can be compared to the last digits, so it is set afterwards.
    config.overlap_moe_expert_parallel_comm = shape.overlap
    return config


def _experts(spec: ModelSpec, shape: Shape) -> dict[str, object]:
    return {
        "num_moe_experts": spec.experts,
        "moe_ffn_hidden_size": spec.expert_width,
        "moe_shared_expert_intermediate_size": spec.shared_width or None,
        "moe_layer_freq": [int(spec.is_moe(layer)) for layer in range(spec.layers)],
        "moe_router_topk": spec.top_k,
        "moe_router_score_function": "sigmoid" if spec.scoring == "sigmoid" else "softmax",
        # Softmax over the chosen logits is softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not normalised(spec),
        "moe_router_topk_scaling_factor": None if spec.routed_scaling_factor == 1.0 else spec.routed_scaling_factor,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": shape.ep,
    }


def _pipeline(shape: Shape, device: torch.device) -> dict[str, object]:
    stages: list[list[str]] = [["decoder"] * len(layers) for layers in shape.stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {
        "pipeline_model_parallel_size": shape.pp,
        "virtual_pipeline_model_parallel_size": shape.virtual if shape.interleaved else None,
        "pipeline_model_parallel_layout": stages if shape.pp > 1 else None,
        "microbatch_group_size_per_vp_stage": shape.group or shape.pp,
        # gloo sends from where the output lies, which this would free while an asynchronous send still reads it.
        "deallocate_pipeline_outputs": device.type == "cuda",
        # Batched P2P with pp = 2 and virtual stages matches the wrong messages: losses are wrong and nothing says so.
        "overlap_p2p_comm": shape.interleaved,
        "batch_p2p_comm": not shape.interleaved,
    }


def _precision(precision: str) -> dict[str, object]:
    dtype = TYPES[precision]
    return {
        "bf16": precision == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "moe_router_dtype": "fp32",  # as ours: the router never runs in less
    }


def _plain_kernels() -> dict[str, object]:
    """Nothing that needs a GPU, apex or Transformer Engine."""
    return {
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "persist_layer_norm": False,
        "barrier_with_L1_time": False,
    }


def start_parallel(shape: Shape) -> None:
    """Make Megatron's process groups (which are global to the process). Collective over the world."""
    if parallel_state.model_parallel_is_initialized():  # an earlier run in this process failed
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.virtual if shape.interleaved else None,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=_MINUTES,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # forked around every attention, though nothing is drawn


def build_chunks(spec: ModelSpec, config: TransformerConfig, shape: Shape, seq: int, device: torch.device) -> list[Any]:
    """The GPTModel of every virtual stage of this rank, each in Megatron's DDP."""
    chunks = [_chunk(spec, config, shape, seq, index).to(device) for index in range(shape.virtual)]
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [each.no_sync for each in wrapped] if shape.interleaved else wrapped[0].no_sync
    return wrapped


def _chunk(spec: ModelSpec, config: TransformerConfig, shape: Shape, seq: int, index: int) -> nn.Module:
    stage = index if shape.interleaved else None
    whole = {"ignore_virtual": not shape.interleaved, "vp_stage": stage}
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    model: nn.Module = GPTModel(
        config,
        block,
        vocab_size=spec.vocab,
        max_sequence_length=seq,
        pre_process=parallel_state.is_pipeline_first_stage(**whole),
        post_process=parallel_state.is_pipeline_last_stage(**whole),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=conventions_of(spec).rope_theta,
        vp_stage=stage,
    )
    return model


def unwrapped(model: Any) -> Any:
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def local_experts(spec: ModelSpec, shape: Shape) -> range:
    """Global ids of the experts of this rank: consecutive."""
    number = spec.experts // shape.ep
    first = parallel_state.get_expert_model_parallel_rank() * number
    return range(first, first + number)
