"""Runs a checkpoint's multi-token-prediction head as a drafting network (arXiv 2412.19437 §2.2)."""

import copy
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...engine.network.attention import FULL, RAGGED_ATTENTION, calls_attention
from ...engine.network.family_hooks import cache_name
from ...engine.network.shadow import decoder_layers
from ...engine.network.swap import plain_class
from ..feature_network import FeatureConfig, FeatureNetwork, Store
from ..target_parts import changed, in_dtype_of, logit_changes


_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, kw_only=True)
class MtpConfig(FeatureConfig):
    """The head of a target: `decoder` is the target's text config, changed so that its layer 0 is the head's."""

    @property
    def position_limit(self) -> int | None:
        """Its RoPE is the target's."""
        return None

    @classmethod
    def parse(cls, target: PreTrainedConfig, is_sparse: bool) -> "MtpConfig":
        """Of a `target`, given by its text config; `is_sparse`: the head's block is a mixture of experts."""
        decoder = copy.deepcopy(target)
        first_dense = int(not is_sparse)
        of_layers = {
            "num_hidden_layers": 1, "layer_types": [FULL], "mlp_layer_types": ["sparse" if is_sparse else "dense"],
            "first_k_dense_replace": first_dense, "moe_layer_start_index": first_dense, "moe_layer_interval": 1,
            "mlp_only_layers": [0] * first_dense, "decoder_sparse_step": 1,
        }  # fmt: skip
        for name, value in of_layers.items():
            if getattr(decoder, name, None) is not None:
                setattr(decoder, name, value)
        layers = (target.num_hidden_layers,)  # the state after the final norm
        return cls(decoder=decoder, feature_layers=layers, draft_vocabulary=target.vocab_size)


class _AsCache:
    def __init__(self, store: Store) -> None:
        self._store = store

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        return self._store(keys, values, layer)

    def layer_at(self, _: int) -> None:
        """Not a ragged cache: fused layers must not write into it."""


class MtpNetwork(FeatureNetwork):
    """One decoder layer of the target's family over pairs of a token and the target's state at the token before it:

        x = fc [norm_e(embedding) ; norm_h(state)],   y = layer(x),   z = norm(y),   logits = the target's head(z)

    After the target's last state, z replaces the state. Parameters have the names of Qwen's format; experts are
    separate modules if `stored` names of the checkpoint are.
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig, target: PreTrainedModel, stored: Collection[str], has_norm: bool) -> None:
        decoder, hidden, eps = target.get_decoder(), config.decoder.hidden_size, config.decoder.rms_norm_eps
        norm = plain_class([module for module in decoder.children() if "Norm" in type(module).__name__][-1])
        kind = plain_class(decoder_layers(target)[-1])
        config.decoder._attn_implementation_internal = RAGGED_ATTENTION if calls_attention(target) else "eager"
        super().__init__(config, 2 * hidden, [kind(config.decoder, 0)], ())
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.norm: nn.Module = norm(hidden, eps=eps) if has_norm else nn.Identity()  # type: ignore[assignment]
        self._factor, self._softcap = logit_changes(target)
        # In a tuple: a submodule's frequencies would be cast with the weights. Another one than the target's: some
        # kinds of RoPE remember the positions that they have seen.
        self._rotary = (copy.deepcopy(decoder.rotary_emb),)
        self._cache_name = cache_name(kind)
        self._splits_experts = not any(_EXPERTS.fullmatch(name) for name in stored)

    def project(self, features: Tensor) -> Tensor:
        """The target's state `[..., H]`, as it is."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, store: Store) -> Tensor:
        """The layer's output y `[B, q, H]`; arguments are those of `Eagle3Network.forward`."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], dim=-1))
        output = self.layers[0](
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary[0](x, positions),
            **{self._cache_name: _AsCache(store)},
        )
        y: Tensor = output[0] if isinstance(output, tuple) else output
        return y

    def fed_back(self, y: Tensor) -> Tensor:
        """z `[..., H]`."""
        z: Tensor = self.norm(y)
        return z

    def logits(self, y: Tensor, target: nn.Module) -> Tensor:
        """Logits `[..., V]` of y `[..., H]` by the `target`'s head."""
        z = self.norm(y)
        return changed(target(in_dtype_of(target, z)), self._factor, self._softcap)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return dict(self._one_by_one(state)) if self._splits_experts else state

    @staticmethod
    def _one_by_one(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """`state` with views of the experts that transformers stacks, `[E, 2I, H]` and `[E, H, I]`."""
        for name, tensor in state.items():
            if (match := _EXPERTS.fullmatch(name)) is None:
                yield name, tensor
                continue
            for expert, weight in enumerate(tensor):
                if match[2] == "down_proj":
                    yield f"{match[1]}.{expert}.down_proj.weight", weight
                else:
                    gate, up = weight.chunk(2)
                    yield f"{match[1]}.{expert}.gate_proj.weight", gate
                    yield f"{match[1]}.{expert}.up_proj.weight", up
