"""AWQ: what the hooks collect, what the search chooses, and that only the drafter's precision depends on it."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from spec_trl.generation.engine.network.shadow import share_weights
from spec_trl.quantization import QuantizedLinear, awq
from spec_trl.quantization.awq import (
    OBSERVED_ROWS,
    ActivationAware,
    ActivationStatistics,
    ChannelStatistics,
    candidate_scales,
)
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.quantized_copy import QuantizedNetwork
from tests.conftest import tiny_llama
from tests.quantization.conftest import (
    IDS,
    addresses,
    all_equal,
    layer_spec,
    logits,
    never_dense,
    packed_buffers,
    quantized,
    randomize_adapters,
)


AWQ = "awq-w4-g128"
TEXT = torch.randint(160, (8, 32), generator=torch.Generator().manual_seed(5))
Q_PROJ = "model.layers.0.self_attn.q_proj"
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def statistics_of(x: Tensor) -> ChannelStatistics:
    return ChannelStatistics(x.abs().mean(0).float(), x.square().mean(0).float())


def with_outliers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian input [rows, columns] in which every 16th channel is 30 times as large: what AWQ is for."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator, dtype=dtype)
    x[:, ::16] *= 30
    return x


def quantized_linear(weight: Tensor, group: int, x: Tensor | None) -> QuantizedLinear:
    """`weight` in the reference kernel, refreshed with the statistics of `x`."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    dense.weight = nn.Parameter(weight)
    packed = ReferenceInt4(layer_spec(*weight.shape, group, dtype=weight.dtype))
    layer = QuantizedLinear(dense, packed, activation_aware=True)
    with torch.no_grad():
        layer.refresh(ActivationAware(), None if x is None else statistics_of(x))
    return layer


def observed(
    policy: nn.Module, network: QuantizedNetwork, ids: Tensor = TEXT, forward: nn.Module | None = None
) -> ActivationStatistics:
    """Statistics of one forward of `ids`, through `forward` if it wraps the policy."""
    statistics = ActivationStatistics(policy, network.activation_aware_layers)
    with statistics.collect(0), torch.no_grad():
        (forward or policy)(ids)
    return statistics


def output_error(layer: QuantizedLinear, x: Tensor) -> float:
    exact = layer.dense(x)
    return float(((layer(x) - exact).square().mean() / exact.square().mean()).detach())


# ---- the search -----------------------------------------------------------------------------------------------------


def test_without_statistics_or_with_alpha_zero_it_is_round_to_nearest_bit_for_bit(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refresh writes in place, and never into the policy."""
    drafter, network = quantized(llama, AWQ, lm_head="packed")
    plain, expected = quantized(llama, "rtn-w4-g128", lm_head="packed")
    assert len(network.activation_aware_layers) == len(network.layers) == 15
    assert expected.activation_aware_layers == []
    before, pointers = copy.deepcopy(llama.state_dict()), addresses(network)
    network.refresh(observed(llama, network))
    assert not all_equal(packed_buffers(network), packed_buffers(expected))
    network.refresh()
    assert all((layer.inverse_scales == 1).all() for layer in network.layers.values())
    assert all_equal(packed_buffers(network), packed_buffers(expected))
    assert torch.equal(logits(never_dense(drafter)), logits(never_dense(plain)))
    monkeypatch.setattr(awq, "ALPHAS", (0.0,))
    network.refresh(observed(llama, network))
    assert all_equal(packed_buffers(network), packed_buffers(expected))
    assert addresses(network) == pointers
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.sampled_from([128, 64, 32]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_outlier_channels_are_rounded_with_less_error(group: int, dtype: torch.dtype, seed: int) -> None:
    """Half of it at most; and where no channel stands out nothing is lost."""
    torch.manual_seed(seed)
    weight = torch.randn(96, 256).to(dtype)
    for x, share in ((with_outliers(64, 256).to(dtype), 0.5), (torch.randn(2048, 256).to(dtype), 1.1)):
        error, plain = (output_error(quantized_linear(weight, group, given), x) for given in (x, None))
        assert error < share * plain, (error, plain)


def test_the_search_takes_the_smallest_weighted_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(awq.SEARCH_ROWS, 256), with_outliers(64, 256)
    importance = x.square().mean(0)  # [256]

    def error() -> tuple[float, Tensor]:
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


def test_candidates_are_powers_of_the_mean_magnitude() -> None:
    magnitude = torch.tensor([0.5, 2.0, 8.0, 1.0])
    scales, importance = candidate_scales(ChannelStatistics(magnitude, magnitude**2))
    for alpha, candidate in zip(awq.ALPHAS, scales, strict=True):
        torch.testing.assert_close(candidate, (magnitude / 2) ** alpha)  # 2: sqrt(0.5 * 8)
    assert torch.equal(importance, magnitude**2)
    assert awq.ALPHAS[0] == 0 and torch.equal(scales[0], torch.ones(4))


def test_scales_stay_finite() -> None:
    torch.manual_seed(0)
    weight, packed = torch.randn(32, 128), ReferenceInt4(layer_spec(32, 128))
    every, nan, inf = range(128), float("nan"), float("inf")
    cases = [(range(0, 128, 2), 0.0), (every, 0.0), ([7], nan), (every, nan), ([7], inf), ([7], 1e18), ([7], 1e-18)]
    for channels, value in cases:
        magnitude = (torch.rand(128) + 0.1).index_fill_(0, torch.tensor([*channels]), value)
        inverse, statistics = torch.full((128,), nan), ChannelStatistics(magnitude, magnitude**2)
        ActivationAware().quantize_scaled_(weight, packed, inverse, statistics)
        candidates, importance = candidate_scales(statistics)
        assert all(torch.isfinite(found).all() for found in (inverse, packed.dequantize(), importance)), value
        assert (inverse > 0).all() and (channels is not every or torch.equal(inverse, torch.ones(128)))
        assert candidates.amax() < 1.001 * awq.LARGEST_SPREAD  # no weight is scaled out of sight


# ---- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_scaled_and_the_result_has_the_dense_layers_dtype(
    llama: PreTrainedModel, dtype: torch.dtype
) -> None:
    """But many rows run the dense layer, unscaled."""
    llama.to(dtype)
    _, network = quantized(llama, AWQ, "reference")
    network.refresh(observed(llama, network))
    x, layer, dense = with_outliers(3, 128, dtype), network.layers[Q_PROJ], llama.get_submodule(Q_PROJ)
    weight = layer.packed.dequantize().double() * layer.inverse_scales.double()  # [out, in]
    expected = x.double() @ weight.T + layer.dense.bias.double()  # [3, out]
    assert not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x)
            assert y.dtype == (dense(x).dtype if dtype != torch.float64 else torch.float64)
        assert (y - expected).std() < (0.02 if autocast or dtype == torch.bfloat16 else 1e-5) * expected.std()
    layer.packed.max_rows = 2
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x))


# ---- the statistics -------------------------------------------------------------------------------------------------


def captured_input(policy: nn.Module, name: str, ids: Tensor) -> Tensor:
    """What the module called `name` is given in a forward of `ids`, [n, in]."""
    caught = []
    handle = policy.get_submodule(name).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach()))
    policy(ids)
    handle.remove()
    return caught[0].reshape(-1, caught[0].shape[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_are_means_over_all_rows_of_the_newest_step(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    """In inference mode and out of it; forwards of one step add up."""
    llama.to(dtype)
    names = quantized(llama, AWQ, lm_head="packed")[1].activation_aware_layers
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


def test_long_batches_are_sampled_at_mixed_positions(llama: PreTrainedModel) -> None:
    statistics = ActivationStatistics(llama, [Q_PROJ])
    for rows in (OBSERVED_ROWS, OBSERVED_ROWS + 64, 2 * OBSERVED_ROWS, 10 * OBSERVED_ROWS):
        columns = torch.arange(64).repeat(rows // 64)  # position of each row
        x = torch.nn.functional.one_hot(columns, 128).float()[None]  # [1, rows, 128]: channel = position
        x[0, 0, 100] = 1  # its mean tells the number of rows that are looked at
        with statistics.collect(rows), torch.no_grad():
            llama.get_submodule(Q_PROJ)(x)
        seen = statistics.of(Q_PROJ).mean_magnitude  # [128]
        assert OBSERVED_ROWS / 3 <= 1 / seen[100] <= OBSERVED_ROWS
        assert (seen[:64] > 0).all() and seen[:64].amax() < 2 / 64


def test_only_the_policy_is_observed_and_only_inside_the_block(llama: PreTrainedModel) -> None:
    statistics = ActivationStatistics(llama, [Q_PROJ, "lm_head"])
    llama(IDS)
    with pytest.raises(RuntimeError, match="stop"), statistics.collect(0):
        raise RuntimeError("stop")
    llama(IDS)
    assert statistics.of(Q_PROJ) is None
    with statistics.collect(0), torch.no_grad():
        share_weights(llama).get_submodule(Q_PROJ)(torch.ones(2, 128))  # it did inherit the hook
        assert statistics.of(Q_PROJ) is None
        llama(IDS)
    assert statistics.of(Q_PROJ) is not None


def test_training_is_unchanged(llama: PreTrainedModel) -> None:
    llama.train()
    llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    llama(IDS, labels=IDS).loss.backward()
    expected = {name: p.grad.clone() for name, p in llama.named_parameters()}
    llama.zero_grad()
    statistics = ActivationStatistics(llama, [Q_PROJ])
    with statistics.collect(0):
        llama(IDS, labels=IDS).loss.backward()  # runs the forwards a second time, hooks included
    assert all(torch.equal(p.grad, expected[name]) for name, p in llama.named_parameters())
    x = captured_input(llama.eval(), Q_PROJ, IDS)
    torch.testing.assert_close(statistics.of(Q_PROJ).mean_square, x.square().mean(0))
    with statistics.collect(1):  # keeps no part of the graph
        h = torch.ones(2, 128, requires_grad=True) * 2
        y = llama.get_submodule(Q_PROJ)(h)
    assert y.requires_grad and not statistics.of(Q_PROJ).mean_square.requires_grad
    activation = weakref.ref(h)
    del y, h
    gc.collect()
    assert activation() is None


def test_names_and_widths_that_do_not_belong_to_the_policy_are_refused(llama: PreTrainedModel) -> None:
    _, network = quantized(llama, AWQ)
    with pytest.raises(ValueError, match=r"names: the policy has no module 'model\.layers\.0\.self_attn\.q_proj'"):
        ActivationStatistics(nn.Sequential(llama), network.activation_aware_layers)
    with pytest.raises(ValueError, match=r"statistics: '.*q_proj' has 64 input channels there and 128 in the drafter"):
        network.refresh(observed(tiny_llama().float(), network, TEXT % 64))


# ---- whole models ---------------------------------------------------------------------------------------------------


def test_adapters(untied: PreTrainedModel) -> None:
    peft_model = get_peft_model(untied, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    randomize_adapters(peft_model)
    merged = copy.deepcopy(peft_model).merge_and_unload()
    (drafter, adapted), (expected_drafter, expected) = (
        quantized(policy, AWQ, "reference") for policy in (peft_model.get_base_model(), merged)
    )
    adapted.refresh(observed(peft_model.get_base_model(), adapted, forward=peft_model))
    expected.refresh(observed(merged, expected))
    assert adapted.activation_aware_layers == expected.activation_aware_layers
    for name, layer in adapted.layers.items():
        torch.testing.assert_close(layer.inverse_scales, expected.layers[name].inverse_scales, rtol=1e-3, atol=0)
        assert not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))
    reference = logits(expected_drafter)
    assert (logits(drafter) - reference).std() < 1e-2 * reference.std()
