"""quantize_projections on whole models: what is replaced, what is not touched, what a refresh does."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import PreTrainedModel

from spec_trl.generation.engine.network.shadow import share_weights
from spec_trl.native.cpu_products import library
from spec_trl.quantization import QuantizedLinear, kernels, quantize_projections, quantized_copy
from spec_trl.quantization.kernels import LayerSpec, PackedWeight
from spec_trl.quantization.kernels.kernel_times import KernelChoice
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.linear import project
from spec_trl.quantization.quantized_copy import choose_scheme, layer_specs
from spec_trl.quantization.rtn import find_scheme
from tests.quantization.conftest import (
    IDS,
    addresses,
    logits,
    needs_nf4,
    needs_onnxruntime,
    never_dense,
    on_gpu,
    packed_buffers,
    quantized,
)  # fmt: skip


ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
FFN = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
PROJECTIONS = {f"model.layers.{i}.{name}" for i in range(2) for name in (*ATTENTION, *FFN)}
UP_PROJ = "model.layers.0.mlp.up_proj"


def fake_quantized(model: nn.Module, scheme: str = "rtn-w4-g128", lm_head: str = "dense") -> nn.Module:
    """The model with every projection replaced by what the reference kernel's codes stand for."""
    twin = copy.deepcopy(model).eval()
    if lm_head == "packed":
        twin.lm_head.weight = nn.Parameter(twin.lm_head.weight.detach().clone())  # untie
    _, network = quantized(model, scheme, "reference", lm_head=lm_head)
    with torch.no_grad():
        for name, layer in network.layers.items():
            weight, stands_for = twin.get_submodule(name).weight, layer.packed.dequantize()  # [out, in]
            weight.copy_(stands_for if isinstance(twin.get_submodule(name), nn.Linear) else stands_for.T)
    return twin


@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.float64, "rtn-w4-g128"), (torch.float32, "rtn-w8"), (torch.bfloat16, "rtn-w8")]
)
def test_the_drafter_is_the_fake_quantized_model(llama: PreTrainedModel, dtype: torch.dtype, scheme: str) -> None:
    llama.to(dtype)
    expected = logits(fake_quantized(llama, scheme, lm_head="packed"))
    reference, _ = quantized(llama, scheme, "reference", lm_head="packed")
    fast = never_dense(quantized(llama, scheme, lm_head="packed")[0])
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (logits(reference) - expected).std() <= exact * expected.std()
    assert logits(fast).dtype == dtype
    assert (logits(fast) - expected).std() <= 0.05 * expected.std()  # bfloat16 activations, and scales


def test_conv1d_of_gpt2(gpt2: PreTrainedModel) -> None:
    expected = logits(fake_quantized(gpt2))
    reference, network = quantized(gpt2, kernel="reference", lm_head="dense")
    groups = {name.rpartition("h.0.")[2]: layer.packed.layer.group for name, layer in network.layers.items()}
    assert groups == {"attn.c_attn": 32, "attn.c_proj": 32, "mlp.c_fc": 32, "mlp.c_proj": 128}
    torch.testing.assert_close(logits(reference), expected, rtol=0, atol=1e-12)
    fast, _ = quantized(gpt2, lm_head="dense")
    assert (logits(fast) - expected).std() < 0.05 * expected.std()


def test_what_is_replaced_and_what_is_not(llama: PreTrainedModel) -> None:
    drafter, network = quantized(llama, lm_head="dense")
    assert set(network.layers) == PROJECTIONS and network.dense_layers == []
    for name in PROJECTIONS:
        layer = drafter.get_submodule(name)
        assert type(layer) is QuantizedLinear and layer is network.layers[name]
        assert layer.packed.layer.group == (64 if "down" in name else 128)
        assert layer.weight is llama.get_submodule(name).weight
    assert drafter.lm_head.weight is llama.lm_head.weight is drafter.model.embed_tokens.weight
    assert isinstance(drafter.model.norm, type(llama.model.norm))
    in_bfloat16 = sum(2 * llama.get_submodule(name).weight.numel() for name in PROJECTIONS)
    assert 0.25 < network.packed_bytes / in_bfloat16 <= 0.28
    assert network.packed_bytes == sum(buffer.nbytes for buffer in packed_buffers(network))


def test_the_policy_is_untouched(llama: PreTrainedModel) -> None:
    before, modules = copy.deepcopy(llama.state_dict()), dict(llama.named_modules())
    parameters = dict(llama.named_parameters())
    drafter, network = quantized(llama, lm_head="packed")
    assert not drafter(IDS).logits.requires_grad
    network.refresh()
    after = llama.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in llama.parameters())
    assert not any(name.rpartition(".")[0] in PROJECTIONS for name in drafter.state_dict())
    assert not any("_proj.weight" in name for name, _ in drafter.named_parameters())
    assert not any(buffer.requires_grad for layer in network.layers.values() for buffer in layer.buffers())
    drafter.train().requires_grad_(False).to(torch.float64)
    assert dict(llama.named_modules()) == modules
    assert all(dict(llama.named_parameters())[name] is p for name, p in parameters.items())
    for name in PROJECTIONS:  # embeddings and norms are shared, and `.to` reached them by our own hand
        parameter = parameters[f"{name}.weight"]
        assert parameter.dtype == torch.float32 and parameter.requires_grad


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [  # of kernels that join no siblings, whose biases are copies
        ("rtn-w4-g128", "torch_int4"), ("rtn-w8", "torch_int8"),
        pytest.param("rtn-w4-g128", "onnxruntime", marks=needs_onnxruntime),
        pytest.param("nf4", "bitsandbytes", marks=needs_nf4),
    ],
)  # fmt: skip
def test_refresh_follows_the_weights_in_place(llama: PreTrainedModel, scheme: str, kernel: str) -> None:
    """Also where the drafter is made in inference mode, and refreshed in it and outside, and to new Parameters."""
    with torch.inference_mode():
        drafter, network = quantized(llama, scheme, kernel, lm_head="packed")
    pointers, stale = addresses(network), logits(drafter)
    assert not any(buffer.is_inference() for buffer in packed_buffers(network))
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    q_proj = llama.model.layers[0].self_attn.q_proj
    q_proj.weight = nn.Parameter(torch.zeros_like(q_proj.weight))
    network.refresh()
    fresh, _ = quantized(llama, scheme, kernel, lm_head="packed")
    assert torch.equal(logits(drafter), logits(fresh)) and not torch.equal(logits(drafter), stale)
    with torch.inference_mode():
        network.refresh()
    assert addresses(network) == pointers
    with torch.no_grad():
        q_proj.bias += 1  # biases are live
        torch.testing.assert_close(
            network.layers["model.layers.0.self_attn.q_proj"](torch.ones(1, 128))[0], q_proj.bias
        )


def test_many_rows_run_the_dense_layer(llama: PreTrainedModel) -> None:
    layer, dense = quantized(llama)[1].layers[UP_PROJ], llama.get_submodule(UP_PROJ)
    limit = layer.packed.max_rows
    few, many = torch.randn(2, limit // 2, 128), torch.randn(1, limit + 1, 128)
    torch.testing.assert_close(layer(many), dense(many), rtol=1e-5, atol=1e-5)
    assert layer.called
    assert not torch.allclose(layer(few), dense(few), rtol=1e-3, atol=1e-3)
    assert layer(few).shape == dense(few).shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(few).dtype == dense(few).dtype == torch.bfloat16
    # A layer that learns is the packed weight for any number of rows, with the dense weight's gradient.
    rows = few.flatten(0, 1).repeat(4, 1).requires_grad_()
    layer.passes_gradient = True
    y = layer(rows)
    torch.testing.assert_close(y.detach(), layer(few).flatten(0, 1).repeat(4, 1))
    (gradient,) = torch.autograd.grad(y.sum(), rows)
    torch.testing.assert_close(gradient, torch.ones_like(y) @ dense.weight.detach())
    assert not layer(few).requires_grad


def test_layers_that_were_idle_are_named(llama: PreTrainedModel) -> None:
    drafter, network = quantized(llama, lm_head="packed")
    with pytest.raises(RuntimeError, match="15 of 15 quantized layers did not run"):
        network.assert_all_called()
    logits(drafter)
    network.assert_all_called()
    network.refresh()
    drafter.model.layers[1].mlp.forward = lambda x: x  # a patch that goes around the packed layers
    logits(drafter)
    with pytest.raises(RuntimeError, match=r"3 of 15 .*model\.layers\.1\.mlp\.gate_proj, .*down_proj"):
        network.assert_all_called()


def test_lm_head_choices(llama: PreTrainedModel) -> None:
    drafter, network = quantized(llama, lm_head="packed")
    assert type(drafter.lm_head) is QuantizedLinear is type(network.layers["lm_head"])
    assert drafter.model.embed_tokens.weight is llama.model.embed_tokens.weight
    # packed projections: 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192) * 0.27 bytes; a third is met at 66 tokens
    for vocabulary, packed in ((48, False), (160, True)):
        llama.resize_token_embeddings(vocabulary)
        assert ("lm_head" in quantized(llama, lm_head="auto")[1].layers) is packed


def test_a_patched_lm_head_stays_dense(llama: PreTrainedModel) -> None:
    handle = llama.lm_head.register_forward_pre_hook(lambda module, args: args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "lm_head" not in quantized(llama, lm_head="auto")[1].layers
    with pytest.warns(UserWarning, match=r"lm_head \(its forward is patched or hooked"):
        assert quantized(llama, lm_head="packed")[1].dense_layers == ["lm_head"]
    handle.remove()
    llama.lm_head.forward = lambda x: x @ llama.lm_head.weight.T  # as TRL's cast_lm_head_to_fp32 does
    assert "lm_head" not in quantized(llama, lm_head="auto")[1].layers
    del llama.lm_head.forward
    assert "lm_head" in quantized(llama, lm_head="packed")[1].layers


def test_layers_that_nothing_fits_stay_dense_and_are_named_once(llama: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="has nothing for 8-bit weights on cpu"):
        _, network = quantized(llama, "rtn-w8", "torch_int4", lm_head="dense")
    assert network.layers == {} and set(network.dense_layers) == PROJECTIONS
    attention = llama.model.layers[0].self_attn
    attention.v_proj = nn.Linear(100, 64)
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.detach().to(torch.float8_e4m3fn), False)
    with pytest.warns(UserWarning) as caught:
        _, network = quantized(llama, lm_head="dense")
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "ov"]
    assert sorted(network.dense_layers) == names and set(network.layers) == PROJECTIONS - set(names)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("2 of 14 layers of the drafter stay dense under scheme 'rtn-w4-g128': ")
    assert "v_proj (100 input features are no multiple of 32)" in message
    assert "o_proj (its weight is already quantized (torch.float8_e4m3fn))" in message


def test_bad_names_are_refused_before_any_work(llama: PreTrainedModel) -> None:
    drafter = share_weights(llama)
    for name, value, valid in (
        ("scheme", "rtn-w3", "rtn-w4-g128', 'rtn-w4-g64', 'rtn-w4-g32', 'rtn-w8"),
        (
            "kernel",
            "marlln",
            "auto', 'torch_int4', 'onnxruntime', 'native', 'triton', 'humming', 'marlin', 'torch_int8', "
            "'bitsandbytes', 'reference",
        ),
        ("lm_head", "tied", "auto', 'dense', 'packed"),
    ):
        with pytest.raises(ValueError, match=f"{name}='{value}'.*{valid}"):
            quantize_projections(drafter, **{name: value})
    assert not any(isinstance(module, QuantizedLinear) for module in drafter.modules())


def test_projections_of_one_input_share_one_product(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights and biases are slices of one, which a refresh writes; shadows of the drafter keep them."""
    drafter, network = quantized(llama.double(), kernel="reference")
    products: list[int] = []
    multiply = ReferenceInt4.linear
    monkeypatch.setattr(
        ReferenceInt4, "linear", lambda packed, x: products.append(packed.layer.out_features) or multiply(packed, x)
    )
    x = torch.randn(2, 3, 128, dtype=torch.float64)
    for network_of_layers in (drafter, share_weights(drafter)):
        attention, mlp = network_of_layers.model.layers[1].self_attn, network_of_layers.model.layers[1].mlp
        groups = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        with torch.no_grad():
            for parameter in llama.parameters():
                parameter.mul_(1.5)
        network.refresh()
        for layers, width in zip(groups, (256, 384), strict=True):
            apart = [layer(x) for layer in layers]
            products.clear()
            together = project(x, *layers)
            assert products == [width]
            for ours, theirs in zip(together, apart, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        for others in ((attention.q_proj, attention.k_proj), (attention.k_proj, attention.q_proj, attention.v_proj)):
            assert all(map(torch.equal, project(x, *others), [layer(x) for layer in others]))  # not all, or not so
        attention.q_proj.register_forward_hook(lambda module, args, output: output * 0)
        assert not project(x, *groups[0])[0].any()
    assert network.packed_bytes == sum(buffer.nbytes for buffer in packed_buffers(network))


def test_what_differs_is_not_joined(llama: PreTrainedModel) -> None:
    llama.model.layers[0].self_attn.k_proj.bias = None
    drafter, _ = quantized(llama, kernel="reference")
    assert [layer.self_attn.q_proj.joined is None for layer in drafter.model.layers] == [True, False]
    scaled, _ = quantized(llama, "awq-w4-g128", "reference")
    assert all(layer.mlp.up_proj.joined is None for layer in scaled.model.layers)
    without_slices, _ = quantized(llama, "rtn-w8", "reference")
    assert all(layer.mlp.up_proj.joined is None for layer in without_slices.model.layers)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a pretended GPU, layers of fewer than 100 rows choose "small" by their tables, others "large"; the list has
    the shapes of the tables."""
    shapes: list[str] = []

    def choose(layer: LayerSpec, fitting: list[type[PackedWeight]]) -> KernelChoice:
        shapes.append(layer.shape)
        is_small = sum(part.out_features for part in layer.parts) < 100
        return KernelChoice("small" if is_small else "large", 8 if is_small else 16)

    def inspect(module: nn.Module) -> object:
        return dataclasses.replace(inspected(module), device=torch.device("cuda"))

    inspected = quantized_copy.inspect_projection
    monkeypatch.setattr(quantized_copy, "inspect_projection", inspect)
    monkeypatch.setattr(kernels, "choose_measured", choose)
    monkeypatch.setattr(kernels, "known_table", lambda *_: True)
    monkeypatch.setattr(kernels, "FAST_KERNELS", (on_gpu("small"), on_gpu("large")))
    return shapes


def test_siblings_get_one_kernel_and_are_joined(llama: PreTrainedModel, chosen: list[str]) -> None:
    """Alone k and v, of 64 rows, would choose otherwise than q."""
    drafter, network = quantized(llama, lm_head="dense")
    names = {name.rpartition(".")[2]: layer.packed.name for name, layer in network.layers.items()}
    assert set(names.values()) == {"large"} and set(chosen) == {"128+64+64x128", "128x128", "192+192x128", "128x192"}
    for layer in drafter.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert attention.k_proj.joined is attention.v_proj.joined is attention.q_proj.joined is not None
        assert attention.q_proj.joined.packed.max_rows == 16 and mlp.up_proj.joined is mlp.gate_proj.joined is not None
        assert attention.o_proj.joined is None


def test_layers_that_are_no_siblings_keep_their_choice(llama: PreTrainedModel, chosen: list[str]) -> None:
    """Where one has no bias, another width, or scales of its own for its input."""
    attention = llama.model.layers[0].self_attn
    attention.k_proj.bias = None
    _, network = quantized(llama, lm_head="dense")
    found = [network.layers[f"model.layers.{i}.self_attn.k_proj"].packed for i in range(2)]
    assert [packed.name for packed in found] == ["small", "large"] and [packed.max_rows for packed in found] == [8, 16]
    rtn, awq = find_scheme("rtn-w4-g128"), find_scheme("awq-w4-g128")
    mlp = llama.model.layers[0].mlp
    assert [spec.siblings for spec in layer_specs(mlp, rtn).values()] == [(192, 192), (192, 192), ()]
    assert not any(spec.siblings for spec in layer_specs(mlp, awq).values())
    mlp.up_proj = nn.Linear(64, 192, bias=True)
    assert not any(spec.siblings for spec in layer_specs(mlp, rtn).values())


def test_siblings_that_no_kernel_holds_all_are_chosen_for_alone(
    llama: PreTrainedModel, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FAST_KERNELS", (on_gpu("small", refuses=128), on_gpu("large", refuses=64)))
    _, network = quantized(llama, lm_head="dense")
    names = [network.layers[f"model.layers.0.self_attn.{name}_proj"].packed.name for name in "qkv"]
    assert names == ["large", "small", "small"] and "128+64+64x128" not in chosen


@pytest.mark.skipif(library(32, torch.float32) is None, reason="no C++ compiler")
def test_auto_takes_a_quarter_of_the_policys_bytes(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    network = quantized(llama.float(), "auto", lm_head="dense")[1]
    assert network.packed_bytes < 0.27 * sum(layer.weight.nbytes for layer in network.layers.values())
    assert choose_scheme("auto", "reference", llama).name == "rtn-w4-g128"
    assert choose_scheme("rtn-w4-g64", "auto", llama).name == "rtn-w4-g64"
    assert choose_scheme("auto", "auto", llama.bfloat16()).name == "rtn-w8"
    assert choose_scheme("auto", "auto", llama.half()).name == "rtn-w8"
    assert choose_scheme("auto", "auto", llama.double()).name == "rtn-w4-g128"
    monkeypatch.setattr(quantized_copy, "library", lambda *_: None)
    assert choose_scheme("auto", "auto", llama.float()).name == "rtn-w4-g128"


def test_weights_that_hooks_compute_stay_dense(llama: PreTrainedModel) -> None:
    """They are attributes, which a refresh would read as the last forward left them."""
    prune.l1_unstructured(llama.model.layers[0].mlp.up_proj, "weight", 0.5)
    nn.utils.weight_norm(llama.model.layers[1].mlp.up_proj)
    parametrizations.weight_norm(llama.model.layers[1].mlp.down_proj)  # is computed when it is read
    with pytest.warns(UserWarning, match="hooks compute its weight"):
        _, network = quantized(llama)
    assert network.dense_layers == [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
