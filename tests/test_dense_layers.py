"""Dense layers and activations of a shadow on a CPU, and the warning of a slow dtype."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.network import products
from spec_trl.generation.engine.network.products import ACTIVATIONS, Product
from spec_trl.generation.engine.network.shadow import make_shadow, share_weights
from spec_trl.native import cpu_products
from spec_trl.native.cpu_products import by_registers, float32_gain, has_instructions, warn_of_slow_dtype
from spec_trl.native.native_code import compiler
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.skipif(not cpu_products.HAS_ONEDNN, reason="this torch has no oneDNN")
WIDE = 320


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Any]:
    """A layer, and the one that stands for it in a shadow."""
    torch.manual_seed(0)
    theirs = nn.Linear(WIDE, WIDE, bias, dtype=dtype)
    return theirs, share_weights(copy.deepcopy(theirs))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows too go to oneDNN (test_cpu_products.py has ours)."""
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What oneDNN was given."""
    given: list[Tensor] = []
    multiply = cpu_products.multiply_by_onednn

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.append(x)
        return multiply(x, weight, bias)

    monkeypatch.setattr(cpu_products, "multiply_by_onednn", noted)
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
    monkeypatch.setattr(products, "multiply", lambda *all: given.append(all))
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


def test_the_shadow_has_it_for_layers_that_only_multiply(fresh: LlamaForCausalLM) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    fresh.lm_head = Own(64, 64, dtype=torch.float64)
    layers = {name: module for name, module in make_shadow(fresh).named_modules() if isinstance(module, nn.Linear)}
    assert type(layers.pop("lm_head")) is Own
    assert {isinstance(layer, Product) and layer.routine for layer in layers.values()} == {"native"}
    assert not any(isinstance(module, Product) for module in fresh.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generated_tokens_are_multiplied_in_cpp(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.undo()
    if compiler() is None:
        pytest.skip("no C++ compiler")
    theirs, ours = layers(dtype=dtype)
    given: list[int] = []
    multiply = cpu_products.multiply_matrix
    noted = lambda matrix, x: (given.append(len(x)), multiply(matrix, x))[1]  # noqa: E731
    monkeypatch.setattr(cpu_products, "multiply_matrix", noted)
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


@pytest.mark.instructions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_compiler", [True, False], ids=["compiler", "no compiler"])
def test_a_prompts_token_has_the_same_bits_in_narrow_layers(
    monkeypatch: pytest.MonkeyPatch, has_compiler: bool, dtype: torch.dtype
) -> None:
    """Whatever other tokens there are. torch leaves small products to other code than oneDNN's, which sums otherwise
    for some weights. [out, in]: heads of K/V, both matrices of LoRA, a gate, odd sizes."""
    if has_compiler:
        monkeypatch.undo()
    for shape in ((32, 64), (64, 32), (4, 64), (64, 4), (1, 64), (33, 100)):
        for seed in range(120):
            draws = torch.Generator().manual_seed(seed)
            weight = (torch.randn(shape, generator=draws) * 0.1).to(dtype)
            x = torch.randn(65, shape[1], generator=draws).to(dtype)
            with torch.no_grad(), cpu_products.reading_prompts():
                whole = cpu_products.multiply(x, weight, None)
                for rows in (1, 2, 7, 27):
                    found = cpu_products.multiply(x[:rows], weight, None)
                    assert torch.equal(found, whole[:rows]), (shape, seed, rows)


@pytest.mark.parametrize("strategy", ["self", "ngram", "model"])
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


# ---- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_number_has_the_same_bits_everywhere(function, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(70, 1370, generator=torch.Generator().manual_seed(0))  # of which three threads take parts
        whole = by_registers(function, x)
        assert torch.equal(by_registers(function, x[:, 100:300]), whole[:, 100:300])
        for rows in (1, 7, 31):
            assert torch.equal(by_registers(function, x[9 : 9 + rows]), whole[9 : 9 + rows])
        assert torch.equal(by_registers(function, x[:0]), x[:0])
        assert torch.allclose(whole, function(x))
    finally:
        torch.set_num_threads(before)


def test_which_modules_are_activations() -> None:
    assert nn.SiLU in ACTIVATIONS and nn.Softmax not in ACTIVATIONS and nn.Linear not in ACTIVATIONS


# ---- a slow dtype ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without any of the instructions."""
    monkeypatch.setattr(cpu_products, "seen", set())
    monkeypatch.setattr(cpu_products, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cpu_products.platform, "machine", lambda: "x86_64")


def test_a_generation_warns_once(lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "float32_gain", lambda weight: 3.456)
    prompts = pad_left(random_rows([4, 2]))
    with pytest.warns(UserWarning, match=r"no instructions for torch.bfloat16.* 3.5 times .*dtype=torch.float32"):
        generate(tiny_llama().bfloat16(), prompts, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(tiny_llama().bfloat16(), prompts, max_new_tokens=2)


@pytest.mark.parametrize(
    ("dtype", "gain", "supported", "smallest"),
    [
        (torch.float32, 9.0, False, 1),
        (torch.bfloat16, 1.1, False, 1),  # measured to be no slower
        (torch.bfloat16, 9.0, True, 1),
        (torch.bfloat16, 9.0, False, 1 << 30),  # no layer is large enough to tell
    ],
)
def test_otherwise_it_says_nothing(dtype, gain, supported, smallest, lacking, monkeypatch, recwarn) -> None:
    monkeypatch.setattr(cpu_products, "float32_gain", lambda weight: gain)
    monkeypatch.setattr(cpu_products, "MIN_WEIGHTS", smallest)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    warn_of_slow_dtype(tiny_llama().to(dtype))
    assert not recwarn.list


def test_capabilities(lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_instructions(torch.float32) and has_instructions(torch.float64) and not has_instructions(torch.bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert has_instructions(torch.bfloat16)
    for machine in ("x86_64", "aarch64"):  # as torch says on this machine
        monkeypatch.setattr(cpu_products.platform, "machine", lambda machine=machine: machine)
        assert has_instructions(torch.float16) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_the_gain_is_the_ratio_of_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[torch.dtype] = []

    def seconds(multiply) -> float:
        dtypes.append(multiply().dtype)
        return {torch.bfloat16: 6.0, torch.float32: 2.0}[dtypes[-1]]

    monkeypatch.setattr(cpu_products, "seconds", seconds)
    assert float32_gain(torch.randn(8, 16, dtype=torch.bfloat16)) == 3.0
    assert dtypes == [torch.bfloat16, torch.float32]
