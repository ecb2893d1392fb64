"""A second module tree over the same Parameters: the network that generation runs. And hooks on its hidden states.

Training changes a policy: train mode with live dropout, gradient checkpointing, patched forwards, an attention
    implementation for packed sequences. Generation must neither use nor undo this. A shadow has separate module
    objects, config and hooks dicts, and *shares* every Parameter and buffer dict, so it runs the live weights and
    costs no memory.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ..cuda.kernels import run_on
from .attention import EXACT_ATTENTION, RAGGED_ATTENTION, calls_attention
from .family_hooks import adapt
from .foreign_layers import finish_loading, is_foreign
from .fused_layers import launches
from .patches import rebind
from .products import Experts, Product, is_on_cpu
from .snapshot import lasting_attributes, patched_forward
from .swap import Place, class_in_shadow, unwrapped


def make_shadow(policy: PreTrainedModel, exact: bool = False) -> PreTrainedModel:
    """Returns an eval-mode twin of `policy` with separate modules and config and the same Parameters; layers of
    :mod:`~spec_trl.generation.engine.network.foreign_layers` keep the policy's mode.

    Its attention is :func:`~.ragged_attention` if the family supports attention
    backends, else the family's eager code.

    Args:
        policy: shares its weights; a shadow of an exact shadow is exact.
        exact: on CUDA a row gets the same bits whatever rows run beside it: dense layers and attention sum in one
            order. :func:`~.unordered_sums` names the rest. Without CUDA or Triton it has no effect.
    """
    finish_loading(policy)
    exact = policy.config._attn_implementation == EXACT_ATTENTION or (
        exact and run_on(policy.device) and launches(policy.device)
    )
    configs: dict[int, Any] = {}
    shadow = _cloned(policy, configs, Place(exact, policy.device.type == "cpu"))
    attention = (EXACT_ATTENTION if exact else RAGGED_ATTENTION) if calls_attention(policy) else "eager"
    if policy.config.model_type == "falcon":
        attention = "sdpa"  # the call that :func:`attention_class` makes ours
    text = shadow.config.get_text_config(decoder=True)
    parts = [getattr(shadow.config, name, None) for name in shadow.config.sub_configs]
    towers = [part for part in parts if part is not text]  # which read media with the attention that the policy has
    for config in configs.values():
        if isinstance(config, PreTrainedConfig) and not any(config is tower for tower in towers):
            config._attn_implementation_internal = attention
    adapt(shadow)
    return shadow


def share_weights(network: nn.Module) -> Any:
    """A second module tree over the Parameters and buffers of `network`, in eval mode, with separate hooks."""
    twin = _cloned(network, {}, Place(exact=False, on_cpu=False))  # its activations keep torch's gradients
    for module in twin.modules():
        if isinstance(module, Product):
            module.copies = None  # the twin may be trained, and outlive a generation
    return twin


def decoder_layers(network: PreTrainedModel) -> nn.ModuleList:
    """Returns the decoder's layers; raises ValueError unless it has a single list of them."""
    lists = [module for module in network.get_decoder().children() if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(f"{type(network).__name__} has no single list of decoder layers.")
    return lists[0]


def _cloned(network: nn.Module, config_memo: dict[int, Any], place: Place) -> Any:
    clones: dict[int, nn.Module] = {}
    twin = _clone(network, clones, config_memo, place)
    rebind(clones)
    return twin


def _clone(module: nn.Module, clones: dict[int, nn.Module], config_memo: dict[int, Any], place: Place) -> Any:
    module = unwrapped(module)
    if id(module) in clones:  # a module registered twice stays one module
        return clones[id(module)]
    kind = class_in_shadow(module, place)
    clone = object.__new__(kind)  # torch.fx's modules make a class without the traced forward in `__new__`
    clones[id(module)] = clone
    state = lasting_attributes(module)  # hooks are not cleared: `cast_lm_head_to_fp32` of TRL is one
    # `_parameters` and `_buffers` stay the same dicts: `.to(device)` and weight swaps reach the shadow.
    state["_modules"] = {
        name: None if child is None else _clone(child, clones, config_memo, place)
        for name, child in module._modules.items()
    }
    state["training"] = module.training and is_foreign(module)
    state["_compiled_call_impl"] = None  # of `module.compile()`: it would run the policy's forward
    state.pop("_is_fsdp_managed_module", None)
    if issubclass(kind, Product | Experts) and "routine" not in state:  # a shadow's shadow has it
        state["routine"] = "exact" if place.exact else "native" if is_on_cpu(module) else "torch"
    for name, value in list(state.items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, clone)
        elif isinstance(value, PreTrainedConfig):
            state[name] = copy.deepcopy(value, config_memo)  # one memo: sub-configs stay the same objects
    if (patch := patched_forward(module)) is not None:
        state["forward"] = patch
    clone.__dict__ = state
    return clone


def keep_states(network: PreTrainedModel, layers: Iterable[int], states: dict[int, Tensor]) -> list[RemovableHandle]:
    """Registers hooks by which every forward of `network` stores its hidden states `[B, q, hidden]` in `states`, over
    those of the forward before; returns the hooks, and raises ValueError where there is no such layer.

    `layers` are counted as in transformers: 0 is the embedding's output, i the input of layer i, and the number of
    layers the output of the final norm.
    """
    layers, blocks = list(dict.fromkeys(layers)), decoder_layers(network)
    beyond = [index for index in layers if not 0 <= index <= len(blocks)]
    if beyond:
        raise ValueError(
            f"layers={layers}: hidden states {beyond} are asked for, and {type(network).__name__} has those of 0 to "
            f"{len(blocks)}."
        )

    def keep_input(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[index] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        states[len(blocks)] = output.last_hidden_state

    return [
        blocks[index].register_forward_pre_hook(partial(keep_input, index), with_kwargs=True)
        if index < len(blocks)
        else network.get_decoder().register_forward_hook(keep_output)
        for index in layers
    ]


@torch.no_grad()
def observe(target: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Runs the target, in eval mode, over whole sequences `tokens` `[B, T]` int64 from position 0.

    They may be right-padded: attention is causal, so padding changes no real position.

    Returns:
        The hidden states of `layers` (in transformers' count, may be empty), concatenated,
        `[B, T, len(layers) * H_t]`, and the input of the output embedding, `[B, T, H_t]`.
    """
    states: dict[int, Tensor] = {}
    hidden: list[Tensor] = []

    def keep_hidden(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (args[0][:, -1:],)  # logits are computed later, in pieces

    hooks = keep_states(target, layers, states)
    hooks.append(target.get_output_embeddings().register_forward_pre_hook(keep_hidden))
    try:
        target(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    features = [states[index] for index in layers] or [hidden[0][..., :0]]
    return torch.cat(features, dim=-1), hidden[0]
