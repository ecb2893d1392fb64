"""Dense layers of a shadow: products in C++ or by oneDNN, and nn.Linear's own result everywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from spec_trl import cpu_products, dense_linear
from spec_trl.dense_linear import DenseLinear
from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.native_code import compiler
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.skipif(not dense_linear.HAS_ONEDNN, reason="this torch has no oneDNN")
WIDE = 320


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, DenseLinear]:
    """A layer, and the one that stands for it in a shadow."""
    torch.manual_seed(0)
    theirs = nn.Linear(WIDE, WIDE, bias, dtype=dtype)
    ours = DenseLinear(WIDE, WIDE, bias, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows too go to oneDNN (test_cpu_products.py has ours)."""
    monkeypatch.setattr(cpu_products, "library", lambda: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What oneDNN was given."""
    given: list[Tensor] = []
    multiply = dense_linear.multiply_by_onednn

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.append(x)
        return multiply(x, weight, bias)

    monkeypatch.setattr(dense_linear, "multiply_by_onednn", noted)
    return given


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (6,), (3, 5), (2, 1, 3)])
def test_products_are_those_of_the_layer(calls: list[Tensor], shape: tuple[int, ...], bias: bool) -> None:
    theirs, ours = layers(bias)
    x = torch.randn(*shape, 2 * WIDE)[..., ::2]  # not contiguous
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


def test_what_onednn_is_not_asked_for(calls: list[Tensor]) -> None:
    theirs, ours = layers()
    x = torch.randn(2, WIDE)
    y = ours(x)  # is differentiated
    y.sum().backward()
    assert ours.weight.grad is not None and torch.equal(y, theirs(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(ours(x[:0]), theirs(x[:0]))
        theirs, ours = layers(dtype=torch.float64)
        assert torch.equal(ours(x.double()), theirs(x.double()))
        with pytest.raises(RuntimeError):
            ours(torch.ones(2, 2 * WIDE))  # as torch says it
    assert not calls


class _Elsewhere(Tensor):
    """A weight that keeps its numbers elsewhere, as quantized ones do."""


def test_weights_that_cpp_cannot_read_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    theirs, ours = layers()
    x = torch.randn(3, WIDE)
    given: list[Any] = []
    monkeypatch.setattr(dense_linear, "multiply", lambda *all: given.append(all))
    with torch.no_grad():
        for spoil in (
            lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.as_subclass(_Elsewhere))),
            lambda layer: setattr(layer.weight, "data", layer.weight.data.T.contiguous().T),
            lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.repeat_interleave(2)[::2])),
        ):
            _, ours = layers()
            spoil(ours)
            torch.testing.assert_close(ours(x), theirs(x))
    assert not given


def test_the_shadow_has_it_for_plain_layers_alone(fresh: LlamaForCausalLM) -> None:
    class Own(nn.Linear):
        pass

    fresh.lm_head = Own(64, 64, dtype=torch.float64)
    kinds = {
        name: type(module) for name, module in make_shadow(fresh).named_modules() if isinstance(module, nn.Linear)
    }
    assert kinds.pop("lm_head") is Own
    assert set(kinds.values()) == {DenseLinear}
    assert not any(isinstance(module, DenseLinear) for module in fresh.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generated_tokens_are_multiplied_in_cpp(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.undo()
    if compiler() is None:
        pytest.skip("no C++ compiler")
    theirs, ours = layers(dtype=dtype)
    given: list[int] = []
    multiply = cpu_products.multiply
    monkeypatch.setattr(cpu_products, "multiply", lambda matrix, x: (given.append(len(x)), multiply(matrix, x))[1])
    with torch.no_grad():
        for rows in (1, 17, 100):
            x = torch.randn(rows, WIDE).to(dtype)
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-2)
        assert given == [1, 17, 100]
        with cpu_products.reading_prompts():
            whole = ours(x)
            for rows in (1, 2, 7, 16, 17, 64):  # an element's sum has one order there too
                if dtype == torch.float32:
                    assert torch.equal(ours(x[:rows]), whole[:rows]), rows
    assert dtype == torch.bfloat16 or given == [1, 17, 100]


@pytest.mark.parametrize("strategy", ["self", "model", "ngram"])
def test_tokens_with_onednn_everywhere(calls: list[Tensor], strategy: str) -> None:
    """Those of plain decoding, and in greedy decoding those of transformers, all layers' products by oneDNN."""
    model, prompts = tiny_llama().float(), pad_left(random_rows([4, 9, 6]))
    more = {"assistant_model": tiny_llama(num_hidden_layers=1).float()} if strategy == "model" else {}
    plain = generate(model, prompts, max_new_tokens=40)
    assert calls
    assert outputs(generate(model, prompts, strategy, max_new_tokens=40, **more)) == outputs(plain)
    greedy = generate(model, prompts, strategy, max_new_tokens=40, do_sample=False, **more)
    theirs = model.generate(**prompts, max_new_tokens=40, do_sample=False)
    assert outputs(greedy) == theirs[:, prompts["input_ids"].shape[1] :].tolist()
