"""Makes the key under which times of a model are valid on this machine."""

import torch
from transformers import PreTrainedModel

from ..generation.engine.forwards.runner_choice import runner_mode
from ..generation.engine.kv.cache import autocast_dtype
from ..generation.options import SpeculativeConfig
from ..generation.planner.model_constants import ProfileKey
from ..hardware import hardware_name
from ..quantization.kernels import find_kernel
from ..quantization.quantized_copy import choose_scheme, layer_specs
from ..quantization.rtn import Scheme


NO_KERNEL = "none"


def profile_key(model: PreTrainedModel, config: SpeculativeConfig, measures: bool = False) -> ProfileKey:
    """Key of a profile for `model` on this machine. `measures`: whether times of kernels that are not known are
    measured (:func:`~.find_kernel`)."""
    shape = model.config.get_text_config(decoder=True)
    parameters = sum(p.numel() for p in model.parameters())
    return ProfileKey(
        hardware=hardware_name(model.device),
        shape=f"{type(model).__name__}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size}, {parameters} parameters",
        dtype=str(effective_dtype(model)).removeprefix("torch."),
        quantization=f"{_scheme(model, config).name}, lm_head {config.efficient_rollout.lm_head}",
        kernel=_kernel_name(model, config, measures),
        runner=runner_mode(config, model.device),
    )


def _scheme(model: PreTrainedModel, config: SpeculativeConfig) -> Scheme:
    return choose_scheme(config.draft_quantization, config.draft_kernel, model)


def effective_dtype(model: PreTrainedModel) -> torch.dtype:
    """Dtype in which forwards compute."""
    return autocast_dtype(model.device) or model.dtype


def _kernel_name(model: PreTrainedModel, config: SpeculativeConfig, measures: bool) -> str:
    """Names of the kernels of the drafter's projections."""
    scheme = _scheme(model, config)
    layers = [layer for parent in model.get_decoder().modules() for layer in layer_specs(parent, scheme).values()]
    found = [find_kernel(config.draft_kernel, layer, measures) for layer in layers if not isinstance(layer, str)]
    names = {kernel.name for kernel in found if not isinstance(kernel, str)}
    return "+".join(sorted(names)) or NO_KERNEL
