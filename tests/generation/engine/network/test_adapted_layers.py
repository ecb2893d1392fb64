"""Layers with LoRA adapters as on a GPU, against PEFT's forward. The kernels run in Triton's interpreter."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu.kernels_per_layer import per_layer
from spec_trl.generation import session
from spec_trl.generation.engine.network import adapted_layers, fused_layers
from spec_trl.generation.engine.network import shadow as shadow_module
from spec_trl.generation.engine.network.products import make_copies, refresh_copies
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.native import cpu_products
from spec_trl.quantization import quantize_projections
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.network.test_fused_layers import compare, model_of, run, slow
from tests.generation.engine.tape import install_tape


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels import adapters


def with_adapters(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LoraConfig(**dict(r=2, target_modules="all-linear", init_lora_weights=False) | options)
    model: PreTrainedModel = get_peft_model(model_of(family, dtype), config).base_model.model
    return model


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each kernel added adapters to."""
    found: list[int] = []
    add = adapters.lora_add
    monkeypatch.setattr(adapters, "lora_add", lambda *given: found.append(len(given[1])) or add(*given))
    return found


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.float32], ids=str)
def test_with_packed_weights_and_adapters(fused, added: list[int], dtype: torch.dtype) -> None:
    model = with_adapters("qwen3", dtype)
    network, plain = fused(model), make_shadow(model)
    expected = run(plain)
    compare(run(network), expected)
    assert added == ([3, 1, 2, 1] * 8 if dtype == torch.float32 else []), "q, k, v | o | gate, up | down"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapted_layers, "MOST_ROWS", 3)
        compare(run(network), expected)
    assert len(added) == (32 + 2 * 4 * 1 if dtype == torch.float32 else 0), "in the forward of two rows and one token"
    for shadow in (network, plain):
        quantize_projections(shadow, kernel="reference")
    compare(run(network), run(plain))


def _two_adapters(model: nn.Module) -> None:
    for layer in layers_with_adapters(model):
        layer.update_layer("second", 2, 2, config=LoraConfig(r=2, init_lora_weights=False))
        layer.set_adapter(["default", "second"])


def _watched(model: nn.Module) -> None:
    for layer in layers_with_adapters(model):
        layer.lora_A["default"].register_forward_hook(lambda _module, _given, output: -output)


def layers_with_adapters(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


OTHERS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Any]]] = {
    "DoRA": ({"use_dora": True}, lambda model: None),
    "a bias": ({"lora_bias": True}, lambda model: None),
    "a large rank": ({"r": 65}, lambda model: None),
    "two": ({}, _two_adapters),
    "watched": ({}, _watched),
    "merged": ({}, lambda model: [layer.merge() for layer in layers_with_adapters(model)]),
    "off": ({}, lambda model: [layer.enable_adapters(False) for layer in layers_with_adapters(model)]),
    "exact": ({}, lambda model: None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_run_in_pefts_forward(name: str, fused, added: list[int]) -> None:
    options, change = OTHERS[name]
    model = with_adapters("llama", **options)
    change(model)
    network = fused(model)
    if name == "exact":  # sums of these kernels depend on the number of rows
        assert any(isinstance(module, adapted_layers.AdaptedLinear) for module in network.modules())
        with pytest.MonkeyPatch.context() as patch:
            for module in (fused_layers, shadow_module):
                patch.setattr(module, "run_on", lambda device: True)
            for exact in (make_shadow(model, exact=True), make_shadow(network, exact=True)):
                assert type(exact.model.layers[0].mlp.up_proj) is LoraLinear
    else:
        compare(run(network), run(make_shadow(model)))
    assert not added


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(target_modules=["q_proj", "v_proj"], use_rslora=True), [2]),
        (dict(target_modules=["k_proj", "gate_proj"]), [1, 1]),
        (dict(target_modules=["q_proj", "k_proj"], rank_pattern={"q_proj": 3}), [1, 1]),
    ],
)
def test_some_projections_have_adapters(options: Any, expected: list[int], fused, added: list[int]) -> None:
    model = with_adapters("llama", **options)
    compare(run(fused(model)), run(make_shadow(model)))
    assert added == expected * 8


def test_adapters_under_autocast(fused, added: list[int]) -> None:
    """The kernels read their copies."""
    model = with_adapters("llama")
    network, plain = fused(model), make_shadow(model)
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        make_copies(network)
        with torch.no_grad():
            before = run(plain)
            for layer in layers_with_adapters(model):
                layer.lora_B["default"].weight.mul_(-1)
        expected = run(plain)
        refresh_copies(network)
        compare(run(network), expected)
    assert added == [3, 1, 2, 1] * 8 and (before - expected).abs().max() > 0.01


def test_captured_adapters_that_are_trained_and_scaled(added: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the model's own code with and without drafts; what was captured reads the adapters where they lie."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_llama(num_hidden_layers=1).float(), config).base_model.model
    prompts, tape = pad_left(random_rows([5, 3])), install_tape(monkeypatch)

    def tokens(strategy: str, runner: str) -> list[list[int]]:
        result = generate(model, prompts, strategy, {"runner": runner, "draft_length": 2}, max_new_tokens=6)
        assert result.statistics.drafter_failure is None
        assert (result.statistics.total.accepted > 0) == (strategy == "self")
        return outputs(result)

    def change() -> None:
        for layer in layers_with_adapters(model):
            layer.lora_B["default"].weight.data.mul_(-1)  # which version counters do not see
            layer.scale_layer(4)

    found = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(session, "_sessions", WeakKeyDictionary())
            expected = tokens("none", "eager")
        assert not added
        with monkeypatch.context() as patch:
            patch.setattr(fused_layers, "run_on", lambda device: True)
            assert tokens("none", "graph") == tokens("self", "graph") == expected
        assert added
        added.clear()
        found.append(expected)
        change()
    assert found[0] != found[1] and tape.replayed > tape.recorded > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what stands in for kernels on a CPU")
@pytest.mark.parametrize(("mixed", "tokens", "most"), [(False, 1, 17), slow((True, 9, 17)), slow((True, 2, 21))])
def test_at_most_eighteen_kernels_in_a_layer_with_adapters(
    mixed: bool, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more per group of siblings than without adapters, and that of silu less; where a group's input is large,
    its sums take another."""
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)  # what counts hears torch alone
    if most > 17:
        monkeypatch.setattr(adapters, "_MOST_NUMBERS", 0)
    found = per_layer("llama", mixed=mixed, adapted=True, tokens=tokens)
    assert found.total() == most and found["lora_add"] == 4 and found["lora_sums"] == most - 17, found
