"""A wider model that computes the same function (Net2WiderNet: Chen, Goodfellow and Shlens, 2016).

A small trained model decides at random speeds: its weights fit into a cache, and what surrounds the network counts
most. Made k times as wide it says the same, and is bound by reading its weights as a large model is. Its quantized
copy errs less than that of a model that was trained at this size, since errors average over the copies.

Every vector inside becomes k copies of itself: the embedding, the norms and the biases are repeated; heads stay as
long as they were and come k times, each query head with the key and value head of its own copy. A norm's mean square
stays what it was. A matrix W becomes blocks W/k + e, one for each pair of an output copy and an input copy. The noise
e sums to 0 over the input copies, which are equal, so it changes no output; without it all blocks of a row would have
the same codes in 4 bits.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights


FAMILIES = ("bitnet", "llama", "qwen2", "qwen3")  # nothing in them but what the text above speaks of
WIDENED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@torch.no_grad()
def widen(narrow: PreTrainedModel, by: int, seed: int) -> PreTrainedModel:
    """A model `by` times as wide as `narrow` with its logits, on its device; the head is not tied.

    Args:
        narrow: of one of `FAMILIES`.
        by: k.
        seed: of the noise.
    """
    config = copy.deepcopy(narrow.config)
    for name in WIDENED:
        setattr(config, name, by * getattr(config, name))
    config.tie_word_embeddings = False
    with no_init_weights(), torch.device(narrow.device):
        wide = AutoModelForCausalLM.from_config(config, dtype=narrow.dtype)
    generator = torch.Generator(narrow.device).manual_seed(seed)
    for name, module in wide.named_modules():
        source = narrow.get_submodule(name)
        for parameter, weight in module.named_parameters(recurse=False):
            small = source.get_parameter(parameter)
            if isinstance(module, nn.Linear) and parameter == "weight":
                weight.copy_(blocks(small, weight.shape[0], weight.shape[1], generator))
            else:
                weight.copy_(small.repeat([new // old for new, old in zip(weight.shape, small.shape, strict=True)]))
    wide.generation_config = copy.deepcopy(narrow.generation_config)
    return wide.eval()


def blocks(small: Tensor, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """`small` [out, in] as blocks of a matrix [rows, columns], divided by their number in a row, with the noise."""
    out, inputs = small.shape
    copies = columns // inputs
    noise = torch.empty(rows, copies, inputs, dtype=small.dtype, device=small.device)  # [rows, copies, in]
    noise.normal_(std=small.std().item(), generator=generator)
    noise -= noise.mean(1, keepdim=True)
    return (noise + small.repeat(rows // out, 1)[:, None]).div_(copies).view(rows, columns)
