"""Drafts with a smaller causal language model with the target's tokenizer (SA's 0.5 B and 1.5 B).

One tokenizer may have vocabularies of two sizes, padded for the hardware: Qwen2.5 has 151,936 rows up to 3 B and
152,064 beyond. The drafter's scores are cut, or padded with -inf, to the target's size, and the drafter reads its last
token in place of one without a row: neither can change an output.
"""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from ...value_checks import require_folder_or_id
from ..engine.drafter import DraftCost
from ..engine.forwards.model_costs import model_constants
from ..engine.kv.cache import autocast_dtype
from ..engine.network.family import Family
from ..engine.network.shadow import make_shadow
from ..engine.network.snapshot import addresses, structure
from ..engine.requirements import check_model, policy_in
from ..options import SpeculativeConfig
from ..registry import register_drafter
from .autoregressive import NetworkDrafter
from .checkpoints import state_of
from .target_parts import check_sizes
from .trainable_drafter import Canvas


@register_drafter
class SmallModelDrafter(NetworkDrafter):
    """Drafts with `assistant`, a causal LM that is neither copied nor changed, over a separate K/V cache.

    Raises:
        ValueError: the assistant's family, vocabulary or device does not fit the target's.
    """

    strategy = "model"
    assistant = "required"

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel) -> None:
        try:
            check_model(assistant)
        except ValueError as error:
            raise ValueError(f"assistant_model cannot draft: {error}") from error
        size, wanted = (m.config.get_text_config(decoder=True).vocab_size for m in (assistant, target))
        check_sizes("assistant_model", size, wanted)
        if assistant.device != target.device:
            move = f"assistant_model.to({str(target.device)!r})"
            raise ValueError(f"assistant_model is on {assistant.device}, the target on {target.device}; call {move}.")
        made_of = (*structure(assistant), *addresses(assistant))
        super().__init__(make_shadow(assistant), shares_target_cache=False, made_of=made_of)
        self._vocabulary, self._shared = wanted, min(size, wanted)
        if size != wanted:
            feed, fit = _fit_to(size, wanted)
            self.network.register_forward_pre_hook(feed, with_kwargs=True)
            self.network.register_forward_hook(fit)
        if size < wanted:
            self.target_ids = torch.arange(size, device=target.device)
        constants = model_constants(assistant)
        self.cost = DraftCost(constants.weight_bytes, constants.dense_flops)

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "SmallModelDrafter":
        return cls(load_assistant(assistant, model), model)

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...] | None:
        if not isinstance(assistant, str):
            return None  # a caller's module may change its structure, and costs nothing to take again
        return *state_of(assistant), autocast_dtype(model.device) or model.dtype, model.device

    @classmethod
    def make_student(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "SmallModelDrafter":
        loaded = load_assistant(assistant, model)
        return cls(copy.deepcopy(loaded) if isinstance(assistant, nn.Module) else loaded, model)

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        if not isinstance(assistant, str):
            as_assistant(argument, assistant)
            return
        require_folder_or_id(argument, assistant)
        try:
            read = read_assistant_config(assistant)
        except (OSError, ValueError) as error:
            raise ValueError(f"{argument}={assistant!r} is no causal LM that can be loaded: {error}") from error
        size = read.get_text_config(decoder=True).vocab_size
        check_sizes(f"{argument}={assistant!r}", size, target.config.get_text_config(decoder=True).vocab_size)

    def replay(self, network: PreTrainedModel, canvas: Canvas) -> Tensor:
        return super().replay(network, canvas)[..., : self._shared]


@functools.cache  # cached: captured forwards are identified by hooks
def _fit_to(size: int, wanted: int) -> tuple[Any, Any]:
    """Hooks of a network with `size` tokens, for a target with `wanted`: before its forward and after."""

    def feed(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, keywords | {"input_ids": keywords["input_ids"].clamp(max=size - 1)}

    def fit(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        output.logits = F.pad(output.logits[..., :wanted], (0, max(wanted - size, 0)), value=-torch.inf)  # [B, q, V]
        return output

    return feed, fit


def read_assistant_config(name: str) -> PreTrainedConfig:
    """Reads the config of the causal LM at a path or hub id; of a PEFT adapter that of its base model."""
    if (adapter := find_adapter_config_file(name)) is not None:
        base = json.loads(Path(adapter).read_text()).get("base_model_name_or_path")
        if not base:
            raise ValueError(f"{adapter} names no base_model_name_or_path")
        name = base
    return AutoConfig.from_pretrained(name)


def as_assistant(argument: str, assistant: object) -> PreTrainedModel:
    """Returns the transformers model in `assistant`, without wrappers of torch.compile and PEFT; raises ValueError,
    naming the `argument`, without one."""
    model = policy_in(assistant) if isinstance(assistant, nn.Module) else assistant
    if not isinstance(model, PreTrainedModel):
        shown = type(model).__name__ if isinstance(model, nn.Module) else repr(model)
        raise ValueError(f"{argument}={shown} is neither a transformers model nor a path or hub id.")
    return model


def states_of(argument: str, assistant: "PreTrainedModel | str") -> str:
    """Describes the `argument` for :func:`~.refusals.check` if the `assistant` has states; else ""."""
    is_name = isinstance(assistant, str)
    config = read_assistant_config(assistant) if is_name else as_assistant(argument, assistant).config
    return (words := Family(config).stateful) and f"{argument} {words}"


def load_assistant(assistant: "PreTrainedModel | str | None", target: PreTrainedModel) -> PreTrainedModel:
    """Returns the assistant module, or loads it from a path or hub id onto the target's device, in the dtype of the
    target's forwards."""
    if assistant is None:
        raise ValueError('assistant_strategy="model" needs assistant_model: a smaller causal LM, its path or hub id.')
    if not isinstance(assistant, str):
        return as_assistant("assistant_model", assistant)
    dtype = autocast_dtype(target.device) or target.dtype
    try:
        return AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype).to(target.device).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"assistant_model={assistant!r} cannot be loaded as a causal LM: {error}") from error
