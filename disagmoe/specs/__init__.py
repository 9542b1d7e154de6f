"""What is trained, on what: frozen descriptions of models, clusters and workloads."""

from disagmoe.specs.architecture import LatentAttention, ModelSpec
from disagmoe.specs.cluster import ClusterSpec, NodeGroup, cluster_from_mapping, cluster_names, load_cluster
from disagmoe.specs.devices import Device, device, device_names
from disagmoe.specs.hf import from_hf_config
from disagmoe.specs.model import load_model, model_from_mapping, model_names
from disagmoe.specs.params import (
    ParameterCount,
    attention_params,
    embedding_params,
    expert_params,
    ffn_shared_params,
    head_params,
    parameters,
    router_params,
    self_attention_params,
)
from disagmoe.specs.workload import Workload, context_warning, default_global_batch, parse_size

__all__ = [
    "ClusterSpec",
    "Device",
    "LatentAttention",
    "ModelSpec",
    "NodeGroup",
    "ParameterCount",
    "Workload",
    "attention_params",
    "cluster_from_mapping",
    "cluster_names",
    "context_warning",
    "default_global_batch",
    "device",
    "device_names",
    "embedding_params",
    "expert_params",
    "ffn_shared_params",
    "from_hf_config",
    "head_params",
    "load_cluster",
    "load_model",
    "model_from_mapping",
    "model_names",
    "parameters",
    "parse_size",
    "router_params",
    "self_attention_params",
]
