"""AWQ: what the hooks collect, what the search chooses, and that only the drafter's precision depends on it."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.shadow import make_shadow as engine_shadow
from spec_trl.quantization import QuantizedLinear, awq, quantize_projections, rtn
from spec_trl.quantization.awq import (
    OBSERVED_ROWS,
    ActivationAware,
    ActivationStatistics,
    ChannelStatistics,
    candidate_scales,
)
from spec_trl.quantization.kernels import LayerSpec
from spec_trl.quantization.kernels.reference import ReferenceInt4
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


AWQ = "awq-w4-g128"
IDS = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5]])
TEXT = torch.randint(160, (8, 32), generator=torch.Generator().manual_seed(5))
Q_PROJ = "model.layers.0.self_attn.q_proj"


def statistics_of(x: torch.Tensor) -> ChannelStatistics:
    return ChannelStatistics(x.abs().mean(0).float(), x.square().mean(0).float())


def with_outliers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian input [rows, columns] in which every 16th channel is 30 times as large: what AWQ is for."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator, dtype=dtype)
    x[:, ::16] *= 30
    return x


def quantized_linear(weight: torch.Tensor, group: int, x: torch.Tensor | None) -> QuantizedLinear:
    """`weight` behind the reference kernel, refreshed with the statistics of `x`."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    dense.weight = nn.Parameter(weight)
    packed = ReferenceInt4(LayerSpec(*weight.shape, 4, group, weight.dtype, None, weight.device))
    layer = QuantizedLinear(dense, packed, activation_aware=True)
    with torch.no_grad():
        layer.refresh(ActivationAware(), None if x is None else statistics_of(x))
    return layer


def buffers_of(network) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{buffer}": value
        for name, layer in network.layers.items()
        for buffer, value in layer.packed.named_buffers()
    }


def observed(policy, network, ids=TEXT) -> ActivationStatistics:
    statistics = ActivationStatistics(policy, network.activation_aware_layers)
    with statistics.collect(0):
        policy(ids)
    return statistics


def output_error(layer: QuantizedLinear, x: torch.Tensor) -> float:
    exact = layer.dense(x)
    return float(((layer(x) - exact).square().mean() / exact.square().mean()).detach())


# ---- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", "torch_int4"])
@pytest.mark.parametrize("case", ["no statistics", "alpha 0"])
def test_alpha_zero_is_round_to_nearest_bit_for_bit(llama, make_shadow, never_dense, monkeypatch, kernel, case):
    shadow, plain = make_shadow(llama), make_shadow(llama)
    network = quantize_projections(shadow, AWQ, kernel, lm_head="packed")
    expected = quantize_projections(plain, "rtn-w4-g128", kernel, lm_head="packed")
    if case == "alpha 0":
        monkeypatch.setattr(awq, "ALPHAS", (0.0,))
        network.refresh(observed(llama, network))
    never_dense(shadow), never_dense(plain)
    assert len(network.activation_aware_layers) == len(network.layers) == 15
    assert expected.activation_aware_layers == []
    assert buffers_of(network).keys() == buffers_of(expected).keys()
    assert all(torch.equal(value, buffers_of(expected)[name]) for name, value in buffers_of(network).items())
    with torch.no_grad():
        assert torch.equal(shadow(IDS).logits, plain(IDS).logits)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    st.sampled_from([128, 64, 32]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 99)
)
def test_outlier_channels_are_rounded_with_less_error(group, dtype, seed):
    """Half of it at most; and where no channel stands out nothing is lost."""
    torch.manual_seed(seed)
    weight = torch.randn(96, 256).to(dtype)
    for x, share in ((with_outliers(64, 256).to(dtype), 0.5), (torch.randn(2048, 256).to(dtype), 1.1)):
        error, plain = (output_error(quantized_linear(weight, group, given), x) for given in (x, None))
        assert error < share * plain, (error, plain)


def test_the_search_takes_the_smallest_weighted_error(monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(awq.SEARCH_ROWS, 256), with_outliers(64, 256)
    importance = x.square().mean(0)  # [256]

    def error() -> tuple[float, torch.Tensor]:
        layer = quantized_linear(weight, 128, x)
        stands_for = layer.packed.dequantize() * layer.inverse_scales  # [out, in]
        return float((stands_for - weight).square().sum(0) @ importance), layer.inverse_scales

    chosen, scales = error()
    each = []
    for alpha in awq.ALPHAS:
        with monkeypatch.context() as patch:
            patch.setattr(awq, "ALPHAS", (alpha,))
            each.append(error())
    best = min(each, key=lambda pair: pair[0])
    assert chosen == best[0] < 0.5 * each[0][0] and torch.equal(scales, best[1])
    assert not torch.equal(scales, each[0][1])


def test_candidates_are_powers_of_the_mean_magnitude():
    magnitude = torch.tensor([0.5, 2.0, 8.0, 1.0])
    scales, importance = candidate_scales(ChannelStatistics(magnitude, magnitude**2))
    for alpha, candidate in zip(awq.ALPHAS, scales, strict=True):
        torch.testing.assert_close(candidate, (magnitude / 2) ** alpha)  # 2: sqrt(0.5 * 8)
    assert torch.equal(importance, magnitude**2)
    assert awq.ALPHAS[0] == 0 and torch.equal(scales[0], torch.ones(4))


@pytest.mark.parametrize(
    ("channels", "value"),
    [
        (range(0, 128, 2), 0.0), (range(128), 0.0), ([7], float("nan")), (range(128), float("nan")),
        ([7], float("inf")), ([7], 1e18), ([7], 1e-18),
    ],
)  # fmt: skip
def test_scales_stay_finite(channels, value):
    torch.manual_seed(0)
    magnitude = (torch.rand(128) + 0.1).index_fill_(0, torch.tensor([*channels]), value)
    weight = torch.randn(32, 128)
    packed = ReferenceInt4(LayerSpec(32, 128, 4, 128, torch.float32, None, weight.device))
    inverse = torch.full((128,), float("nan"))
    ActivationAware().quantize_scaled_(weight, packed, inverse, ChannelStatistics(magnitude, magnitude**2))
    assert torch.isfinite(inverse).all() and (inverse > 0).all()
    assert torch.isfinite(packed.dequantize()).all()
    candidates, importance = candidate_scales(ChannelStatistics(magnitude, magnitude**2))
    assert candidates.amax() < 1.001 * awq.LARGEST_SPREAD  # no weight is scaled out of sight
    assert torch.isfinite(importance).all()
    if len(channels) == 128:
        assert torch.equal(inverse, torch.ones(128))


def test_chunks_and_strides_do_not_show(monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(23, 256), with_outliers(8, 256)
    monkeypatch.setattr(rtn, "CPU_CHUNK", 8 * 256)
    whole, strided = quantized_linear(weight, 128, x), quantized_linear(weight.T.contiguous().T, 128, x)
    assert torch.equal(whole.packed.dequantize(), strided.packed.dequantize())
    assert not torch.equal(whole.inverse_scales, torch.ones(256))
    steps = whole.packed.scales.repeat_interleave(128, dim=1)  # [out, in]
    assert ((whole.packed.dequantize() - weight / whole.inverse_scales).abs() <= steps * (0.5 + 1e-3)).all()


# ---- the layer ------------------------------------------------------------------------------------------------------


def test_every_kernel_multiplies_like_the_reference(llama, make_shadow):
    x = with_outliers(4, 128)
    fast, reference = (
        quantize_projections(make_shadow(llama), AWQ, kernel, activation_dtype=torch.bfloat16).layers[Q_PROJ]
        for kernel in ("torch_int4", "reference")
    )
    for layer in (fast, reference):
        layer.refresh(ActivationAware(), statistics_of(with_outliers(64, 128)))
    assert torch.equal(reference.inverse_scales, fast.inverse_scales)
    assert not torch.equal(reference.inverse_scales, torch.ones(128))
    y = reference(x)
    assert (fast(x) - y).std() < 0.02 * y.std()
    many = with_outliers(fast.max_rows + 1, 128)  # run the dense layer, unscaled
    with torch.no_grad():
        dense = llama.get_submodule(Q_PROJ)(many)
        assert torch.equal(fast(many), dense) and not torch.equal(fast(many[:-1]), dense[:-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_result_has_the_dense_layers_dtype(llama, make_shadow, dtype, autocast):
    llama.to(dtype)
    network = quantize_projections(make_shadow(llama), AWQ, "reference")
    network.refresh(observed(llama, network))
    x, layer = with_outliers(3, 128, dtype), network.layers[Q_PROJ]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y, dense = layer(x), llama.get_submodule(Q_PROJ)(x)
    assert y.dtype == (dense.dtype if dtype != torch.float64 else torch.float64)
    weight = layer.packed.dequantize().double() * layer.inverse_scales.double()  # [out, in]
    expected = x.double() @ weight.T + layer.dense.bias.double()  # [3, out]
    assert not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))
    assert (y - expected).std() < (0.02 if autocast or dtype == torch.bfloat16 else 1e-5) * expected.std()


def test_a_refresh_writes_in_place_and_never_into_the_policy(llama, make_shadow):
    network = quantize_projections(make_shadow(llama), AWQ, lm_head="packed")
    before = copy.deepcopy(llama.state_dict())
    plain = {name: value.clone() for name, value in buffers_of(network).items()}
    pointers = [buffer.data_ptr() for layer in network.layers.values() for buffer in layer.buffers()]
    network.refresh(observed(llama, network))
    assert not all(torch.equal(value, plain[name]) for name, value in buffers_of(network).items())
    network.refresh()
    assert all(torch.equal(value, plain[name]) for name, value in buffers_of(network).items())
    assert all((layer.inverse_scales == 1).all() for layer in network.layers.values())
    assert pointers == [buffer.data_ptr() for layer in network.layers.values() for buffer in layer.buffers()]
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


# ---- the statistics -------------------------------------------------------------------------------------------------


def captured_input(policy, name: str, ids: torch.Tensor) -> torch.Tensor:
    caught = []
    handle = policy.get_submodule(name).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach()))
    policy(ids)
    handle.remove()
    return caught[0].reshape(-1, caught[0].shape[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_statistics_are_means_over_all_rows_of_the_newest_step(llama, make_shadow, dtype):
    """In inference mode and out of it; forwards of one step add up."""
    llama.to(dtype)
    names = quantize_projections(make_shadow(llama), AWQ, lm_head="packed").activation_aware_layers
    statistics = ActivationStatistics(llama, names)
    with statistics.collect(0):
        llama(TEXT)
    with statistics.collect(1):
        with torch.inference_mode():
            llama(TEXT[:4])
        llama(TEXT[4:])
    for name in names:
        rows = torch.cat([captured_input(llama, name, part) for part in (TEXT[:4], TEXT[4:])])  # [n, in]
        found, expected = statistics.of(name), statistics_of(rows.float())
        assert found.mean_magnitude.dtype == found.mean_square.dtype == torch.float32
        torch.testing.assert_close(found.mean_magnitude, expected.mean_magnitude)
        torch.testing.assert_close(found.mean_square, expected.mean_square)
    with statistics.collect(2):
        pass
    assert statistics.of(Q_PROJ) is None


@pytest.mark.parametrize("rows", [OBSERVED_ROWS, OBSERVED_ROWS + 64, 2 * OBSERVED_ROWS, 10 * OBSERVED_ROWS])
def test_long_batches_are_sampled_at_mixed_positions(llama, rows):
    statistics = ActivationStatistics(llama, [Q_PROJ])
    columns = torch.arange(64).repeat(rows // 64)  # position of each row
    x = torch.nn.functional.one_hot(columns, 128).float()[None]  # [1, rows, 128]: channel = position
    x[0, 0, 100] = 1  # its mean tells the number of rows that are looked at
    with statistics.collect(0), torch.no_grad():
        llama.get_submodule(Q_PROJ)(x)
    seen = statistics.of(Q_PROJ).mean_magnitude  # [128]
    assert OBSERVED_ROWS / 3 <= 1 / seen[100] <= OBSERVED_ROWS
    assert (seen[:64] > 0).all() and seen[:64].amax() < 2 / 64


def test_hooks_come_and_go(llama):
    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in llama.modules())

    before = hooks()
    statistics = ActivationStatistics(llama, [Q_PROJ, "lm_head"])
    assert hooks() == before and statistics.of(Q_PROJ) is None
    with pytest.raises(RuntimeError, match="stop"), statistics.collect(0):
        assert hooks() == before + 2
        raise RuntimeError("stop")
    assert hooks() == before
    llama(IDS)
    assert statistics.of(Q_PROJ) is None


def test_a_shadow_made_inside_the_block_is_not_observed(llama):
    statistics = ActivationStatistics(llama, [Q_PROJ])
    with statistics.collect(0), torch.no_grad():
        engine_shadow(llama).get_submodule(Q_PROJ)(torch.ones(2, 128))  # it did inherit the hook
        assert statistics.of(Q_PROJ) is None
        llama(IDS)
        assert statistics.of(Q_PROJ) is not None


def test_no_reference_to_the_graph_is_kept(llama):
    statistics = ActivationStatistics(llama, [Q_PROJ])
    x = torch.ones(2, 128, requires_grad=True)
    with statistics.collect(0):
        h = x * 2
        y = llama.get_submodule(Q_PROJ)(h)
    assert y.requires_grad and not statistics.of(Q_PROJ).mean_square.requires_grad
    activation = weakref.ref(h)
    del y, h
    gc.collect()
    assert activation() is None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_unchanged(llama, checkpointing):
    llama.train()
    if checkpointing:
        llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    llama(IDS, labels=IDS).loss.backward()
    expected = {name: p.grad.clone() for name, p in llama.named_parameters()}
    llama.zero_grad()
    statistics = ActivationStatistics(llama, [Q_PROJ])
    with statistics.collect(0):
        llama(IDS, labels=IDS).loss.backward()  # with checkpoints runs the forwards a second time, hooks included
    assert all(torch.equal(p.grad, expected[name]) for name, p in llama.named_parameters())
    x = captured_input(llama.eval(), Q_PROJ, IDS)
    torch.testing.assert_close(statistics.of(Q_PROJ).mean_square, x.square().mean(0))


def test_names_and_widths_that_do_not_belong_to_the_policy_are_refused(llama, make_shadow):
    network = quantize_projections(make_shadow(llama), AWQ)
    with pytest.raises(ValueError, match=r"names: the policy has no module 'model\.layers\.0\.self_attn\.q_proj'"):
        ActivationStatistics(nn.Sequential(llama), network.activation_aware_layers)
    other = tiny_llama().float()
    with pytest.raises(ValueError, match=r"statistics: '.*q_proj' has 64 input channels there and 128 in the drafter"):
        network.refresh(observed(other, network, TEXT % 64))


# ---- whole models ---------------------------------------------------------------------------------------------------


def test_adapters(llama, make_shadow):
    llama.config.tie_word_embeddings = False
    llama.lm_head.weight = nn.Parameter(llama.lm_head.weight.detach().clone())
    peft_model = get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    merged = copy.deepcopy(peft_model).merge_and_unload()
    networks = []
    for policy, forward in ((peft_model.get_base_model(), peft_model), (merged, merged)):
        network = quantize_projections(shadow := make_shadow(policy), AWQ, "reference")
        statistics = ActivationStatistics(policy, network.activation_aware_layers)
        with statistics.collect(0), torch.no_grad():
            forward(TEXT)
        network.refresh(statistics)
        networks.append((network, shadow))
    (adapted, shadow), (expected, merged_shadow) = networks
    assert adapted.activation_aware_layers == expected.activation_aware_layers
    for name, layer in adapted.layers.items():
        torch.testing.assert_close(layer.inverse_scales, expected.layers[name].inverse_scales, rtol=1e-3, atol=0)
        assert not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))
    with torch.no_grad():
        logits = merged_shadow(IDS).logits
        assert (shadow(IDS).logits - logits).std() < 1e-2 * logits.std()


def test_conv1d(make_shadow):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=96, n_layer=1, n_head=4, vocab_size=64, initializer_range=0.1)).eval()
    with torch.no_grad():
        model.transformer.h[0].ln_2.weight[::16] *= 30  # outlier channels in front of c_fc
    network = quantize_projections(make_shadow(model), AWQ, "reference", lm_head="dense")
    layer = network.layers["transformer.h.0.mlp.c_fc"]
    x = captured_input(model, "transformer.h.0.mlp.c_fc", TEXT % 64)
    plain = output_error(layer, x)
    network.refresh(observed(model, network, TEXT % 64))
    assert output_error(layer, x) < 0.6 * plain


def test_stacked_experts_round_to_nearest(make_shadow):
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, initializer_range=0.1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")
    network = quantize_projections(make_shadow(model), AWQ, "reference", lm_head="dense")
    plain = quantize_projections(make_shadow(model), "rtn-w4-g128", "reference", lm_head="dense")
    experts = "model.layers.0.mlp.experts"
    assert experts in network.layers and experts not in network.activation_aware_layers
    assert "model.layers.0.mlp.shared_expert.up_proj" in network.activation_aware_layers
    network.refresh(observed(model, network, TEXT % 64))
    for buffer, value in network.layers[experts].named_buffers():
        assert torch.equal(value, dict(plain.layers[experts].named_buffers())[buffer])
    with torch.no_grad():
        network.layers[experts](*(torch.ones(2, 64).double(), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2) / 2))


def test_outputs_do_not_depend_on_the_scales():
    policy = tiny_llama()
    with torch.no_grad():  # outlier channels, so that there is something to scale
        for layer in policy.model.layers:
            layer.input_layernorm.weight[::16] *= 8
            layer.post_attention_layernorm.weight[::16] *= 8
    prompts = pad_left(random_rows([4, 7, 2]))
    drafter = SelfDrafter(policy, AWQ, "reference")
    drafter.refresh(observed(policy, drafter.quantized, TEXT % 64))
    scaled = [layer for layer in drafter.quantized.layers.values() if not (layer.inverse_scales == 1).all()]
    assert len(scaled) > 7
    result = generate(policy, prompts, "self", drafter=drafter)
    assert result.statistics.drafter_failure is None and result.statistics.acceptance_rate > 0.5
    assert outputs(result) == outputs(generate(policy, prompts))


def test_a_trained_model_agrees_better(stories):
    policy = copy.deepcopy(stories).float()
    ids = torch.cat([TEXT, TEXT.flip(0), TEXT.flip(1)]) % 64 + 400  # common pieces of words, in no order
    with pytest.warns(UserWarning, match="172 input features are no multiple of 32"):
        drafter = SelfDrafter(policy, AWQ, "reference")
    positions = torch.arange(ids.shape[1]).expand_as(ids)

    def overlap() -> float:
        with torch.no_grad():
            p = policy(ids).logits.softmax(-1)  # [B, T, V]
            q = twin(ids, position_ids=positions).logits.softmax(-1)  # [B, T, V]
        return float(torch.minimum(p, q).sum(-1).mean())

    twin = drafter.network
    twin.config._attn_implementation_internal = "eager"  # outside the engine
    plain = overlap()
    drafter.refresh(observed(policy, drafter.quantized, ids))
    assert overlap() > plain + 0.005, (overlap(), plain)
