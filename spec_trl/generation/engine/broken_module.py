"""Finds where a network starts to return NaN."""

import torch
from torch import Tensor, nn

from .runner import EagerRunner


def first_broken_module(runner: EagerRunner, tokens: Tensor, positions: Tensor, columns: int) -> str:
    """Repeats a forward with hooks and says which module first returned a NaN or infinity, in words."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(f"the first non-finite values come out of '{name}' ({output.dtype})")

        handles.append(module.register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for name, module in runner.network.named_modules():
            if not module._modules:
                watch(name, module)
        EagerRunner(runner.network, runner.cache).forward(tokens, positions, columns)  # a replay calls no hooks
    finally:
        for handle in handles:
            handle.remove()
    return (
        found[0]
        if found
        else f"every module's output is finite ({runner.network.dtype}): the logits processors did it"
    )
