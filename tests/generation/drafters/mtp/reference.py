"""An MTP head of a Llama over a whole row, without a cache; nothing of the package."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm


@torch.no_grad()
def straight_line(target: PreTrainedModel, weights: Mapping[str, Tensor], row: list[int], drafts: list[int]) -> Tensor:
    """Logits `[γ, V]` that `drafts` were drawn from after the committed `row`."""
    config = copy.deepcopy(target.config)
    config._attn_implementation = "sdpa"  # "eager" rounds its softmax to float32
    layer, tokens = LlamaDecoderLayer(config, 0).to(target.dtype).eval(), torch.tensor([row])
    start = "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)})

    def norm(name: str, x: Tensor) -> Tensor:
        made = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps).to(target.dtype)
        made.weight.data = weights[f"mtp.{name}.weight"]
        return made(x)

    states = target.model(tokens).last_hidden_state[:, :-1]  # [1, n - 1, H], of the pairs' first tokens
    logits = []
    for step in range(len(drafts)):
        pairs = torch.tensor([row[1:] + drafts[:step]])  # [1, N]
        embedded = target.get_input_embeddings()(pairs)  # [1, N, H]
        both = [norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", states)]
        x = torch.cat(both, dim=-1) @ weights["mtp.fc.weight"].T  # [1, N, H]
        count = pairs.shape[1]
        mask = torch.full((1, 1, count, count), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        rotation = target.model.rotary_emb(x, torch.arange(count)[None])
        y = layer(x, attention_mask=mask, position_embeddings=rotation)
        z = norm("norm", (y[0] if isinstance(y, tuple) else y)[:, -1:])  # [1, 1, H]
        logits.append(target.lm_head(z)[0, 0])
        states = torch.cat([states, z], dim=1)
    return torch.stack(logits)
