"""Which classes of modules are replaced in a shadow, by what, and why: one table, applied when the shadow is made.

A replacement is a subclass of the class that it replaces, so hooks, adapters and `isinstance` find what they know.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ....quantization.source_weight import WRAPPED
from .attention import attention_class, is_rewritten
from .fused_layers import AdaptedLinear, fused_class, fuses
from .products import ACTIVATIONS, Activation, Experts, Product, before, has_experts, is_linear
from .rewritten import is_rewritten_class, rewritten_class
from .scans import is_mixer, mixer_class


class Place(NamedTuple):
    """Where a shadow runs."""

    exact: bool  # on CUDA: with sums in one order
    on_cpu: bool


class Swap(NamedTuple):
    """A row of the table."""

    test: Callable[[Any, nn.Module, Place], bool | str]
    """Whether it replaces the class of a module; or why not, where that needs saying."""
    replacement: Callable[[Any], Any]
    """The class for a class."""
    reason: str


TABLE = (
    Swap(lambda kind, module, place: place.on_cpu and not place.exact and is_rewritten_class(kind), rewritten_class,
         "its own products sum in one order in C++, and its gates round all numbers alike"),
    Swap(lambda kind, module, place: is_mixer(kind), mixer_class,
         "it holds inputs of its states until drafts are accepted, for rows of different lengths"),
    Swap(lambda kind, module, place: is_linear(kind), partial(before, Product),
         "products sum in one order (in C++ or oneDNN on a CPU, in a kernel in an exact shadow on CUDA), and read "
         "16-bit copies under autocast"),
    Swap(lambda kind, module, place: has_experts(kind, module, place.exact), partial(before, Experts),
         "experts run one by one in C++, or in a kernel in an exact shadow on CUDA, in one order"),
    Swap(lambda kind, module, place: is_rewritten(kind), attention_class,
         "its family ignores the attention function of the config"),
    Swap(lambda kind, module, place: fuses(kind, module, place.exact, True), partial(fused_class, on_cpu=True),
         "C++ replaces many small operations, or computes a whole layer"),
    Swap(lambda kind, module, place: fuses(kind, module, place.exact, False), partial(fused_class, on_cpu=False),
         "kernels of Triton replace many small ones"),
    Swap(lambda kind, module, place: place.on_cpu and kind in ACTIVATIONS, partial(before, Activation),
         "numbers at the end of a thread's share round like the others"),
)  # fmt: skip
"""Applied in this order: a later row gets the class that an earlier one made."""


def class_in_shadow(module: nn.Module, place: Place) -> Any:
    """The class of the clone of `module` in a shadow."""
    kind = _kind_of(module, place)
    for row in TABLE:
        if row.test(kind, module, place) is True:
            kind = row.replacement(kind)
    return kind


def explain(model: PreTrainedModel) -> str:
    """Says what generation replaces in its copy of the module tree of `model`, a line per class of modules: how many
    there are, by what they are replaced and why, or why they stay. Changes nothing.

    Raises:
        ValueError: `model` is no PreTrainedModel, and wraps none.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(one, PreTrainedModel) for one in model.modules()):
        raise ValueError(f"model={type(model).__name__} is no model of transformers; pass a PreTrainedModel.")
    place = Place(exact=False, on_cpu=model.device.type == "cpu")
    counts: Counter[tuple[str, str, str]] = Counter()
    for module in model.modules():
        module = unwrapped(module)
        kind, new, why = plain_class(module), class_in_shadow(module, place), []
        for row in TABLE:
            found = row.test(kind, module, place)
            why += [row.reason] if found is True else [found] if found else []
        if why or module._parameters:
            counts[kind.__name__, new.__name__ if new is not kind else "", "; ".join(why)] += 1
    lines = [
        f"{name} ({count}) {f'-> {new}' if new else 'stays'}: {why or 'no row of the table is about it'}"
        for (name, new, why), count in counts.items()
    ]
    return "\n".join(lines)


def unwrapped(module: nn.Module) -> Any:
    """The module inside the wrappers of torch.compile and of FSDP's activation checkpointing, which are recognised by
    the names of their attributes: torch._dynamo takes seconds to import."""
    inside: Any = next((module._modules[name] for name in WRAPPED if name in module._modules), None)
    return module if inside is None else unwrapped(inside)


def plain_class(module: nn.Module) -> Any:
    """The class of the module inside the wrappers of :func:`unwrapped`, as its family has it."""
    kind: Any = type(unwrapped(module))
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind  # FSDP2 inserts a class before


def _kind_of(module: nn.Module, place: Place) -> Any:
    """The class to replace: sums of fused adapters, in a shadow of a shadow, depend on the number of rows."""
    kind = plain_class(module)
    return kind.__bases__[1] if place.exact and issubclass(kind, AdaptedLinear) else kind
