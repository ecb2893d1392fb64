"""The target's embedding and head for learned drafters: the current weights, under any wrapper (adapters and trained
copies of peft, quantization, torch.compile)."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engine.shadow import share_weights


def plain_embedding(target: PreTrainedModel) -> nn.Module:
    """The input embedding of `target`, on its live weights and in eval mode: plain rows `[..., H_t]` of tokens
    `[...]`, without the scaling of some families (Gemma)."""
    table: nn.Module = share_weights(target.get_input_embeddings())
    for module in table.modules():
        if isinstance(module, nn.Embedding) and type(module).__module__.startswith("transformers"):
            module.__class__ = nn.Embedding
            module._buffers = {}  # a new dict: that of the target does not change
            module.__dict__.pop("embed_scale", None)
    return table


def in_dtype_of(head: nn.Module, states: Tensor) -> Tensor:
    """Casts `states` to the dtype of the weight of `head`, unless that is quantized."""
    weight = next(head.parameters(), states)
    return states.to(weight.dtype) if weight.is_floating_point() else states
