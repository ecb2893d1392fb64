"""quantize_projections on whole models: what is replaced, what is not touched, what a refresh does."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from spec_trl.quantization import QuantizedLinear, quantize_projections
from tests.conftest import STORY_MODEL


PROJECTIONS = {
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
}
IDS = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5]])


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def fake_quantized(model, scheme="rtn-w4-g128", lm_head=False):
    """The model with every projection replaced by what the reference kernel's codes stand for."""
    twin = copy.deepcopy(model).eval()
    if lm_head:
        twin.lm_head.weight = nn.Parameter(twin.lm_head.weight.detach().clone())  # untie
    quantized = quantize_projections(
        copy.deepcopy(model), scheme=scheme, kernel="reference", lm_head="packed" if lm_head else "dense"
    )
    with torch.no_grad():
        for name, layer in quantized.layers.items():
            twin.get_submodule(name).weight.copy_(layer.packed.dequantize())
    return twin


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [
        (torch.float64, "rtn-w4-g128"), (torch.float32, "rtn-w4-g32"), (torch.float32, "rtn-w8"),
        (torch.bfloat16, "rtn-w8"),
    ],
)  # fmt: skip
def test_the_drafter_is_the_fake_quantized_model(llama, make_shadow, never_dense, dtype, scheme):
    llama.to(dtype)
    expected = logits(fake_quantized(llama, scheme, lm_head=True))
    reference, fast = make_shadow(llama), make_shadow(llama)
    quantize_projections(reference, scheme=scheme, kernel="reference", lm_head="packed")
    quantize_projections(fast, scheme=scheme, lm_head="packed")
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (logits(reference) - expected).std() <= exact * expected.std()
    assert logits(never_dense(fast)).dtype == dtype
    assert (logits(fast) - expected).std() <= 0.05 * expected.std()  # bfloat16 activations, and scales


def test_what_is_replaced_and_what_is_not(llama, make_shadow):
    shadow = make_shadow(llama)
    quantized = quantize_projections(shadow, lm_head="dense")
    assert set(quantized.layers) == PROJECTIONS and quantized.dense_layers == []
    for name in PROJECTIONS:
        layer = shadow.get_submodule(name)
        assert type(layer) is QuantizedLinear and layer is quantized.layers[name]
        assert layer.packed.layer.group == (64 if "down" in name else 128)
        assert layer.weight is llama.get_submodule(name).weight
    assert shadow.lm_head.weight is llama.lm_head.weight is shadow.model.embed_tokens.weight
    assert type(shadow.model.norm) is type(llama.model.norm)


def test_the_policy_is_untouched(llama, make_shadow):
    before, modules = copy.deepcopy(llama.state_dict()), dict(llama.named_modules())
    parameters = dict(llama.named_parameters())
    shadow = make_shadow(llama)
    quantized = quantize_projections(shadow, lm_head="packed")
    assert not shadow(IDS).logits.requires_grad
    quantized.refresh()
    after = llama.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in llama.parameters())
    assert not any(name.rpartition(".")[0] in PROJECTIONS for name in shadow.state_dict())
    assert not any("_proj.weight" in name for name, _ in shadow.named_parameters())
    assert not any(buffer.requires_grad for layer in quantized.layers.values() for buffer in layer.buffers())
    shadow.train().requires_grad_(False).to(torch.float64)
    assert dict(llama.named_modules()) == modules
    assert all(dict(llama.named_parameters())[name] is p for name, p in parameters.items())
    for name in PROJECTIONS:  # embeddings and norms are shared, and `.to` reached them by our own hand
        parameter = parameters[f"{name}.weight"]
        assert parameter.dtype == torch.float32 and parameter.requires_grad


@pytest.mark.parametrize(("scheme", "kernel"), [("rtn-w4-g128", "auto"), ("rtn-w8", "auto"), ("rtn-w8", "reference")])
def test_refresh_follows_the_weights_in_place(llama, make_shadow, scheme, kernel):
    """Also where the drafter is made in inference mode, and refreshed in it and outside."""
    shadow = make_shadow(llama)
    with torch.inference_mode():
        quantized = quantize_projections(shadow, scheme=scheme, kernel=kernel, lm_head="packed")
    buffers = [buffer for layer in quantized.layers.values() for buffer in layer.buffers()]
    pointers, stale = [buffer.data_ptr() for buffer in buffers], logits(shadow)
    assert not any(buffer.is_inference() for buffer in buffers)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    quantized.refresh()
    fresh = make_shadow(llama)
    quantize_projections(fresh, scheme=scheme, kernel=kernel, lm_head="packed")
    assert torch.equal(logits(shadow), logits(fresh)) and not torch.equal(logits(shadow), stale)
    with torch.inference_mode():
        quantized.refresh()
    assert pointers == [buffer.data_ptr() for layer in quantized.layers.values() for buffer in layer.buffers()]


def test_new_parameter_objects_are_followed_and_biases_are_live(llama, make_shadow):
    quantized = quantize_projections(make_shadow(llama))
    q_proj, packed = llama.model.layers[0].self_attn.q_proj, quantized.layers["model.layers.0.self_attn.q_proj"]
    q_proj.weight = nn.Parameter(torch.zeros_like(q_proj.weight))
    quantized.refresh()
    with torch.no_grad():
        q_proj.bias += 1
        torch.testing.assert_close(packed(torch.ones(1, 128)), q_proj.bias[None])


def test_many_rows_run_the_dense_layer(llama, make_shadow):
    layer = quantize_projections(make_shadow(llama)).layers["model.layers.0.mlp.up_proj"]
    dense = llama.model.layers[0].mlp.up_proj
    limit = layer.packed.max_rows
    few, many = torch.randn(2, limit // 2, 128), torch.randn(1, limit + 1, 128)
    assert torch.equal(layer(many), dense(many))
    assert not torch.allclose(layer(few), dense(few), rtol=1e-3, atol=1e-3)
    assert layer(few).shape == dense(few).shape
    layer.called = False
    layer(many)
    assert layer.called


def test_passes_a_gradient_for_learning(llama, make_shadow):
    """Through the packed weight for any number of rows, with the dense weight's gradient."""
    layer = quantize_projections(make_shadow(llama)).layers["model.layers.0.mlp.up_proj"]
    dense = llama.model.layers[0].mlp.up_proj
    few = torch.randn(layer.packed.max_rows // 2, 128)
    many = few.repeat(4, 1).requires_grad_()  # more rows than the packed weight is the faster for
    layer.passes_gradient = True
    y = layer(many)
    torch.testing.assert_close(y.detach(), layer(few).repeat(4, 1))
    (gradient,) = torch.autograd.grad(y.sum(), many)
    torch.testing.assert_close(gradient, torch.ones_like(y) @ dense.weight.detach())
    assert not layer(few).requires_grad


def test_autocast_gives_the_dtype_of_a_dense_layer(llama, make_shadow):
    layer = quantize_projections(make_shadow(llama)).layers["model.layers.0.mlp.up_proj"]
    x = torch.randn(2, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == layer.dense(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_canary_names_the_idle_layers(llama, make_shadow):
    shadow = make_shadow(llama)
    quantized = quantize_projections(shadow, lm_head="packed")
    with pytest.raises(RuntimeError, match="15 of 15 quantized layers did not run"):
        quantized.assert_all_called()
    logits(shadow)
    quantized.assert_all_called()
    quantized.refresh()
    shadow.model.layers[1].mlp.forward = lambda x: x  # a patch that goes around the packed layers
    logits(shadow)
    with pytest.raises(RuntimeError, match=r"3 of 15 .*model\.layers\.1\.mlp\.gate_proj, .*down_proj"):
        quantized.assert_all_called()


def test_bytes(llama, make_shadow):
    quantized = quantize_projections(make_shadow(llama), scheme="rtn-w4-g128", lm_head="dense")
    assert quantized.source_bytes == sum(2 * llama.get_submodule(name).weight.numel() for name in PROJECTIONS)
    assert 0.25 < quantized.packed_bytes / quantized.source_bytes <= 0.28
    buffers = {b.data_ptr(): b.nbytes for layer in quantized.layers.values() for b in layer.packed.buffers()}
    assert quantized.packed_bytes == sum(buffers.values())


def test_lm_head_choices(llama, make_shadow):
    def packs_head(shadow, choice):
        return "lm_head" in quantize_projections(shadow, lm_head=choice).layers

    shadow = make_shadow(llama)
    assert packs_head(shadow, "packed") and type(shadow.lm_head) is QuantizedLinear
    assert shadow.model.embed_tokens.weight is llama.model.embed_tokens.weight
    assert not packs_head(make_shadow(llama), "dense")
    # packed projections: 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192) * 0.27 bytes; a third is met at 66 tokens
    for vocabulary, packed in ((48, False), (160, True)):
        llama.resize_token_embeddings(vocabulary)
        assert packs_head(make_shadow(llama), "auto") is packed


def test_a_patched_lm_head_stays_dense(llama, make_shadow):
    handle = llama.lm_head.register_forward_pre_hook(lambda module, args: args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "lm_head" not in quantize_projections(make_shadow(llama), lm_head="auto").layers
    with pytest.warns(UserWarning, match=r"lm_head \(its forward is patched or hooked"):
        quantized = quantize_projections(make_shadow(llama), lm_head="packed")
    assert quantized.dense_layers == ["lm_head"]
    handle.remove()
    llama.lm_head.forward = lambda x: x @ llama.lm_head.weight.T  # as TRL's cast_lm_head_to_fp32 does
    assert "lm_head" not in quantize_projections(make_shadow(llama), lm_head="auto").layers
    del llama.lm_head.forward
    assert "lm_head" in quantize_projections(make_shadow(llama), lm_head="packed").layers


def test_conv1d_of_gpt2(make_shadow):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=96, n_layer=2, n_head=4, vocab_size=64, n_positions=32, initializer_range=0.1)
    model = GPT2LMHeadModel(config).to(torch.float64).eval()
    twin, shadow = copy.deepcopy(model), make_shadow(model)
    quantized = quantize_projections(shadow, kernel="reference", lm_head="dense")
    assert len(quantized.layers) == 8
    with torch.no_grad():
        for name, layer in quantized.layers.items():
            assert layer.packed.layer.group == (128 if name.endswith("mlp.c_proj") else 32)
            twin.get_submodule(name).weight.copy_(layer.packed.dequantize().T)
    torch.testing.assert_close(logits(shadow), logits(twin), rtol=0, atol=1e-12)
    quantize_projections(fast := make_shadow(model), lm_head="dense")
    assert (logits(fast) - logits(twin)).std() < 0.05 * logits(twin).std()


def test_layers_that_nothing_fits_stay_dense_and_are_named_once(llama, make_shadow):
    attention = llama.model.layers[0].self_attn
    attention.v_proj = nn.Linear(100, 64)
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.detach().to(torch.float8_e4m3fn), False)
    with pytest.warns(UserWarning) as caught:
        quantized = quantize_projections(make_shadow(llama), lm_head="dense")
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "ov"]
    assert sorted(quantized.dense_layers) == names and set(quantized.layers) == PROJECTIONS - set(names)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith("2 of 14 layers of the drafter stay dense under scheme 'rtn-w4-g128': ")
    assert "v_proj (100 input features are no multiple of 32)" in message
    assert "o_proj (its weight is already quantized (torch.float8_e4m3fn))" in message


def test_a_named_kernel_for_another_width_packs_nothing(llama, make_shadow):
    with pytest.warns(UserWarning, match="has nothing for 8-bit weights on cpu"):
        quantized = quantize_projections(make_shadow(llama), scheme="rtn-w8", kernel="torch_int4", lm_head="dense")
    assert quantized.layers == {} and set(quantized.dense_layers) == PROJECTIONS


@pytest.mark.parametrize(
    ("argument", "valid"),
    [
        ({"scheme": "rtn-w3"}, "rtn-w4-g128', 'rtn-w4-g64', 'rtn-w4-g32', 'rtn-w8"),
        ({"kernel": "int4"}, "auto', 'torch_int4', 'triton', 'humming', 'marlin', 'torch_int8', 'reference"),
        ({"lm_head": "tied"}, "auto', 'dense', 'packed"),
    ],
)
def test_bad_names_are_refused_before_any_work(llama, make_shadow, argument, valid):
    shadow = make_shadow(llama)
    (name, value), *_ = argument.items()
    with pytest.raises(ValueError, match=f"{name}='{value}'.*{valid}"):
        quantize_projections(shadow, **argument)
    assert not any(isinstance(module, QuantizedLinear) for module in shadow.modules())


def test_a_trained_model_keeps_its_predictions(make_shadow, never_dense):
    model = AutoModelForCausalLM.from_pretrained(STORY_MODEL).eval()
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = AutoTokenizer.from_pretrained(STORY_MODEL)(text, return_tensors="pt").input_ids
    target = logits(model, ids).softmax(-1)
    overlaps = {}
    for scheme in ("rtn-w4-g64", "rtn-w4-g32", "rtn-w8"):
        with pytest.warns(UserWarning, match="down_proj"):  # rows of 172 fit no group and no kernel
            quantize_projections(shadow := make_shadow(model), scheme=scheme, lm_head="dense")
        overlaps[scheme] = torch.minimum(logits(never_dense(shadow), ids).softmax(-1), target).sum(-1).mean().item()
    assert overlaps["rtn-w8"] > 0.97 and overlaps["rtn-w4-g32"] > 0.8 and overlaps["rtn-w4-g64"] > 0.75, overlaps
