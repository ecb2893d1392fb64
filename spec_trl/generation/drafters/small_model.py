"""A smaller causal language model with the target's tokenizer as drafter (SA's 0.5 B and 1.5 B)."""

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..engine.drafter import DraftCost
from ..engine.model_costs import model_constants
from ..engine.requirements import check_model
from ..engine.shadow import fingerprint, make_shadow
from .autoregressive import NetworkDrafter


class SmallModelDrafter(NetworkDrafter):
    """Drafts with `assistant`, a causal LM that is neither copied nor changed, over a K/V cache of its own.

    Raises:
        ValueError: the assistant's family, vocabulary or device does not fit the target's.
    """

    strategy = "model"

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel) -> None:
        try:
            check_model(assistant)
        except ValueError as error:
            raise ValueError(f"assistant_model cannot draft: {error}") from error
        config, target_config = (m.config.get_text_config(decoder=True) for m in (assistant, target))
        if config.vocab_size != target_config.vocab_size:
            raise ValueError(
                f"assistant_model has a vocabulary of {config.vocab_size} tokens and the target one of "
                f"{target_config.vocab_size}; a drafter must use the target's tokenizer. Choose an assistant of the "
                'same family, or assistant_strategy="self".'
            )
        if assistant.device != target.device:
            move = f"assistant_model.to({str(target.device)!r})"
            raise ValueError(f"assistant_model is on {assistant.device}, the target on {target.device}; call {move}.")
        super().__init__(make_shadow(assistant), shares_target_cache=False, made_of=fingerprint(assistant))
        constants = model_constants(assistant)
        self.cost = DraftCost(constants.weight_bytes, constants.dense_flops)


def load_assistant(assistant: "PreTrainedModel | str | None", target: PreTrainedModel) -> PreTrainedModel:
    """Returns the assistant module itself, or loads it from a path or hub id in the target's dtype and device."""
    if assistant is None:
        raise ValueError('assistant_strategy="model" needs assistant_model: a smaller causal LM, its path or hub id.')
    if isinstance(assistant, PreTrainedModel):
        return assistant
    if not isinstance(assistant, str):
        shown = type(assistant).__name__ if isinstance(assistant, nn.Module) else repr(assistant)
        raise ValueError(f"assistant_model={shown} is neither a transformers model nor a path or hub id.")
    try:
        return AutoModelForCausalLM.from_pretrained(assistant, dtype=target.dtype).to(target.device).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"assistant_model={assistant!r} cannot be loaded as a causal LM: {error}") from error
