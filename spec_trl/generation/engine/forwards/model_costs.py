"""Constants of a model that its times and memory depend on: bytes of weights and K/V, FLOP (ER App. E.3)."""

import torch
from torch import nn
from transformers import PreTrainedModel

from ....quantization import QuantizedNetwork
from ....quantization.experts import is_experts, matrix_names
from ....quantization.source_weight import under_adapters
from ...planner.model_constants import ModelConstants
from ..kv.row_memory import attention_shape, kv_bytes


def model_constants(
    model: PreTrainedModel, quantized: QuantizedNetwork | None = None, dtype: torch.dtype | None = None
) -> ModelConstants:
    """W_T, W_D, C_dense, C_attn and κ of `model` (ER App. E.3), which may be on the meta device. `quantized` is its
    drafter; None: W_D = 0. They are read off the modules of the text decoder and its head, of any architecture.

    Tied embeddings are one weight that is used twice: they count once in bytes and, through the head, in FLOP.
    Adapters count as the matrices they are. Forwards compute in `dtype`: autocast keeps its casts of wider weights for
    a whole rollout; None: the weights' dtype.
    """
    itemsize = (dtype or model.dtype).itemsize
    config = model.config.get_text_config(decoder=True)
    shape = vars(config)  # architectures leave out different keys
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    parameters = {id(p): p for module in (decoder, head) if module is not None for p in module.parameters()}
    weight_bytes = sum(p.numel() * min(p.element_size(), itemsize) for p in parameters.values())

    # Matrices are multiplied, tables (the input embedding among them) are looked up.
    tables = {id(p) for m in decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    experts_layers = [under_adapters(m) for m in decoder.modules() if is_experts(m)]
    stacks = {id(p): p for m in experts_layers for p in map(m.get_parameter, matrix_names(m))}
    matrices = sum(_count(p) for key, p in parameters.items() if p.ndim >= 2 and key not in tables | stacks.keys())
    if head is not None and id(head.weight) in tables:
        matrices += head.weight.numel()
    experts = next((p.shape[0] for p in stacks.values()), 0)
    per_token = shape.get("num_experts_per_tok", experts) if stacks else 0
    active = sum(_count(p) for p in stacks.values()) * per_token / max(experts, 1)
    expert_bytes = sum(p.numel() * min(p.element_size(), itemsize) for p in stacks.values())

    heads, layers, _kv_heads, head_dim = attention_shape(model)
    packed = saved = packed_experts = saved_experts = 0.0
    for layer in quantized.layers.values() if quantized is not None else ():
        dense = layer.weight_count * itemsize
        packed, saved = packed + layer.packed_bytes, saved + dense
        if is_experts(layer.dense):
            packed_experts, saved_experts = packed_experts + layer.packed_bytes, saved_experts + dense
    return ModelConstants(
        name=type(model).__name__,
        weight_bytes=float(weight_bytes),
        draft_weight_bytes=weight_bytes - saved + packed if quantized is not None else 0.0,
        dense_flops=2.0 * (matrices + active),
        attention_flops=4.0 * layers * heads * head_dim,
        kv_bytes=kv_bytes(model, dtype),
        expert_bytes=float(expert_bytes),
        draft_expert_bytes=expert_bytes - saved_experts + packed_experts if quantized is not None else 0.0,
        experts=experts,
        experts_per_token=per_token,
    )


def _count(parameter: nn.Parameter) -> int:
    """Weights of a matrix; bitsandbytes keeps two in a byte."""
    return parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
