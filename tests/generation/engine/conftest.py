"""Triton's interpreter with products that sum in one order; shadows as on a GPU."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from spec_trl.generation.engine.network import fused_layers
from spec_trl.generation.engine.network.shadow import make_shadow


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter stores bfloat16 as integers of 16 bits, and tl.dot there multiplies these integers by
    NumPy, whose BLAS sums rows of one tile in different orders on some processors. Here k ascends, as on a device."""
    tl = pytest.importorskip("triton.language", reason="Triton is not installed")
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder, *operands_and_options):
        a, b, d = (builder.cast_impl(operand, tl.float32) for operand in operands_and_options[:3])
        total = d.data.copy()  # [M, N]
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return TensorHandle(total, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Makes shadows as on a GPU."""

    def shadow(model: PreTrainedModel) -> PreTrainedModel:
        with monkeypatch.context() as patch:
            patch.setattr(fused_layers, "run_on", lambda device: True)
            return make_shadow(model)

    return shadow
