"""Methods of transformers' modules with our products and gates: the same numbers, whatever other tokens there are."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeMLP
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

from spec_trl.generation.engine.network.rewritten import is_rewritten_class, rewritten_class
from spec_trl.native.native_code import compiler
from tests.tiny_families import ODD_SIZES, make


KINDS = [Llama4Router, Lfm2MoeMLP, MambaMixer, MixtralTopKRouter, Qwen3_5Attention, Qwen3_5GatedDeltaNet]


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_stays_where_it_was(kind: Any) -> None:
    """A traceback leads to transformers' file."""
    assert is_rewritten_class(kind)
    ours, theirs = rewritten_class(kind).forward.__code__, inspect.unwrap(kind.forward).__code__
    assert (ours.co_filename, ours.co_varnames) == (theirs.co_filename, theirs.co_varnames)
    assert 0 <= ours.co_firstlineno - theirs.co_firstlineno <= 1  # without decorators
    assert any(name.startswith("_spec_trl_") for name in ours.co_freevars)
    assert not is_rewritten_class(rewritten_class(kind))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("family, name", [("lfm2_moe", "Lfm2MoeMLP"), ("mixtral", "MixtralTopKRouter")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_equal_bits(family: str, name: str, dtype: torch.dtype) -> None:
    model = make(family, sizes=ODD_SIZES).to(dtype)
    module: Any = next(each for each in model.modules() if type(each).__name__ == name)
    for linear in (each for each in module.modules() if isinstance(each, nn.Linear)):
        linear.forward = lambda x: x  # its products are those of `Product`
    x = torch.randn(9, 80 if name == "MixtralTopKRouter" else 72, dtype=dtype)
    theirs, kind = module(x), type(module)
    module.__class__ = rewritten_class(kind)
    with torch.no_grad():
        ours = module(x)
        alone = [module(x[row : row + 1]) for row in range(9)]
    by_tensor = zip(*map(_tensors, alone), strict=True)
    for own, plain, rows in zip(_tensors(ours), _tensors(theirs), by_tensor, strict=True):
        assert torch.allclose(own.double(), plain.double(), atol=0.02 if dtype == torch.bfloat16 else 1e-5)
        assert torch.equal(torch.cat(rows), own)


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def test_a_method_that_a_program_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lfm2MoeMLP, "forward", lambda self, x: self.w2(self.w1(x).sigmoid()))
    assert not is_rewritten_class(Lfm2MoeMLP)


def test_a_function_that_a_program_replaces_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger replaces rotations."""
    forward = rewritten_class(Qwen3_5Attention).forward
    monkeypatch.setattr(modeling_qwen3_5, "apply_rotary_pos_emb", print)
    assert forward.__globals__["apply_rotary_pos_emb"] is print


def test_modules_with_names_of_functions_are_called() -> None:
    """`self.activation(x)` and `self.linear(x)` are modules, not torch's functions."""
    model = make("electra")
    assert not any(is_rewritten_class(type(each)) for each in model.modules() if "Intermediate" in type(each).__name__)
