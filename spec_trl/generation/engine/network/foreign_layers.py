"""Linear layers of other libraries, most of them quantized: in which mode a shadow runs them, and which are refused.

Some compute otherwise in eval mode than in train mode, and store what they computed in their weights. On a CPU
bitsandbytes' `Linear4bit` packs its weight anew and rounds its scales, in the first forward in eval mode; its
`Linear8bitLt` quantizes its input in eval mode alone. A shadow shares weights with its policy. So it runs such a layer
in the mode that the policy's layer is in, as `generate` does: a policy in train mode, as in TRL's rollouts, stays as
it is.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel


# Libraries whose linear layers compute alike in both modes, and write nothing.
_KNOWN = ("torch.", "transformers.", "peft.", "spec_trl.")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)

rewriting: dict[tuple[type, bool], bool] = {}
"""Whether each forward of a class of layers, in train mode or not, changes what it stores; tried in this process."""


def is_foreign(module: Any) -> bool:
    """Whether `module` is a linear layer of another library, without modules below, such as a dropout."""
    return (
        "in_features" in vars(module) and not module._modules and not f"{type(module).__module__}.".startswith(_KNOWN)
    )


def finish_loading(model: nn.Module) -> None:
    """Runs what compressed-tensors leaves to the first forward of a loaded model: a hook that decompresses the weights
    and removes itself. In a shadow it would remove the weights of the policy."""
    for hook in list(model._forward_pre_hooks.values()):
        if getattr(hook, "__name__", "") == "ct_decompress_hook":
            with torch.inference_mode(False), torch.no_grad():  # a later training needs plain tensors
                hook(model, ())


def check_foreign_layers(model: PreTrainedModel) -> None:
    """Raises ValueError if each forward of a foreign layer, in its present mode, changes what it stores: the number of
    forwards depends on drafts. One layer of each class is tried, once per process, on a copy.

    What the first forward alone changes is no obstacle: it is changed under `generate` too."""
    for name, module in model.named_modules():
        if not is_foreign(module):
            continue
        key = type(module), module.training
        if key not in rewriting:
            rewriting[key] = _rewrites(module, model.dtype)
        if rewriting[key]:
            modes = ("train", "eval") if module.training else ("eval", "train")
            raise ValueError(
                f"{name!r} ({type(module).__name__}) changes what it stores in each forward in {modes[0]} mode, and "
                "drafts would change the model. Generate without `assistant_strategy`, or call "
                f"model.{modes[1]}() if it stores nothing there."
            )


def mixing_layers(model: nn.Module) -> list[str]:
    """Names bitsandbytes' `Linear8bitLt` where its result for a row depends on other rows by design: input features
    with an outlier in any row are multiplied in 16 bits, the others in 8. In train mode on a CPU it has none."""
    for module in model.modules():
        if is_foreign(module) and type(module).__name__ == "Linear8bitLt" and vars(module)["state"].threshold > 0:
            if not module.training or module.weight.device.type != "cpu":
                return ["outliers of other rows in Linear8bitLt"]
    return []


def _rewrites(module: Any, dtype: torch.dtype) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    x = torch.ones(1, module.in_features, dtype=dtype, device=tensors[0].device if tensors else None)
    states = []
    with torch.inference_mode(False), torch.no_grad():
        try:
            copied = copy.deepcopy(module)
            for _ in range(2):
                type(copied).forward(copied, x)  # without hooks and patches, which may lead to the policy
                states.append(list(stored(copied)))
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            return False  # Quanto's weights cannot be copied; and a layer that cannot run shows it in a rollout
    return not alike(*states)


def stored(module: nn.Module) -> Iterator[Any]:
    """Copies of all numbers that a layer shares with the layer of a shadow: of its tensors, and of objects that its
    attributes lead to, such as the `quant_state` of a Parameter. Plain attributes are not shared."""
    left = [value for value in vars(module).values() if not isinstance(value, _PLAIN)]
    seen: dict[int, Any] = {}  # holds the objects, so that ids stay unique
    while left:
        value = left.pop()
        if isinstance(value, _PLAIN):
            yield value
        if isinstance(value, (*_PLAIN, type, nn.Module)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
            plain = value.detach().as_subclass(Tensor)
            yield plain.dtype
            yield plain.clone()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += sorted(value, key=repr) if isinstance(value, set) else value  # a copy of a set has another order
        else:
            left += getattr(value, "__dict__", {}).values()


def alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )
