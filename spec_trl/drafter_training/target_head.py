"""A target's logits from its last hidden states, outside its forward, for losses that learn from them."""

import re

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..generation.drafters.borrowed import in_dtype_of
from ..generation.engine.shadow import share_weights


# What families do to their logits after the head, by the config's key.
_FACTORS = {"logit_scale", "lm_head_multiplier"}  # Cohere, Falcon-H1
_DIVISORS = {"logits_scaling"}  # Granite
_SOFTCAPS = {"final_logit_softcapping"}  # Gemma 2 and later
# Keys about attention, routers and other heads.
_ELSEWHERE = re.compile(r"att(n|ention)_|router|num_logits_to_keep|output_auxiliary_logits|mlp_|_init_value")
_LOGITS = re.compile(r"logit|softcap|soft_cap|lm_head_multiplier")


class FrozenHead(nn.Module):
    """A target's output embedding on its live weights and in eval mode, which passes gradients on and takes none; it
    is no part of this module's parameters or state."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        # In a tuple: a submodule would bring its parameters along. In eval mode: the dropout of an adapter would draw
        # from the random numbers of the policy's training.
        self._held = (share_weights(head),)

    def forward(self, states: Tensor) -> Tensor:
        """Scores `[..., V]` of `[..., H_t]`, in the head's dtype."""
        (head,) = self._held
        # Others need no detaching, and quantized ones would lose their scales by it.
        parameters = {name: weight.detach() for name, weight in head.named_parameters() if weight.requires_grad}
        scores: Tensor = functional_call(head, parameters, (in_dtype_of(head, states),))
        return scores


class TargetHead:
    """Logits as the target itself would give them: its head (`scores`), then a `factor`, then a `softcap`, if any.

    Raises:
        ValueError: its config has a key about its logits that is not known here, or it has no head.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        head = target.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(target).__name__} has no output embedding; a causal language model is needed.")
        self.scores = FrozenHead(head)
        self.factor: float = 1.0
        self.softcap: float | None = None
        settings = target.config.get_text_config(decoder=True).to_dict()
        self.vocabulary: int = settings["vocab_size"]
        for name, value in settings.items():
            if value is None or isinstance(value, bool) or not _LOGITS.search(name) or _ELSEWHERE.search(name):
                continue
            if name in _FACTORS:
                self.factor *= value
            elif name in _DIVISORS:
                self.factor /= value
            elif name in _SOFTCAPS:
                self.softcap = value
            else:
                raise ValueError(
                    f"the config of {type(target).__name__} has {name}={value!r}, which may change its logits and is "
                    "not known here; a drafter cannot be trained on this family."
                )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]`, at least float32, of last hidden states `[..., H_t]`, without gradients."""
        with torch.no_grad():
            logits = self.scores(hidden)  # [..., V]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.factor
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            return logits
