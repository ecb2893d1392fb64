"""The synthetic models must be what the results made with them say they are."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.models import (
    SHAPES,
    build,
    load_model,
    measure_agreement,
    quantized_copy,
    round_trip,
    shape_config,
    shape_model,
)


@pytest.fixture(scope="module")
def exact_tiny() -> PreTrainedModel:
    return build(shape_config("tiny"), noise=0.0, seed=0, dtype=torch.bfloat16, device="cpu")


def test_without_noise_the_quantized_copy_is_exact(exact_tiny: PreTrainedModel) -> None:
    twin = quantized_copy(exact_tiny)
    for (name, original), copied in zip(exact_tiny.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(original, copied), name
    assert measure_agreement(exact_tiny, rows=4, new_tokens=16).overlap_packed_head == pytest.approx(1.0, abs=1e-5)


def test_more_noise_means_less_overlap(exact_tiny: PreTrainedModel) -> None:
    overlaps = [
        measure_agreement(build(shape_config("tiny"), noise, 0, torch.float32, "cpu")).overlap_packed_head
        for noise in (0.02, 0.1, 0.4)
    ]
    assert overlaps[0] > overlaps[1] + 0.03 > overlaps[2] + 0.06


@pytest.mark.parametrize("agreement", [0.93, 0.85])
def test_the_small_shape_has_the_agreement_and_entropy_it_claims(agreement: float) -> None:
    measured = measure_agreement(shape_model("tiny", agreement, 0, torch.bfloat16, "cpu"), new_tokens=64)
    assert measured.overlap_packed_head == pytest.approx(agreement, abs=0.03)
    assert 0.7 < measured.entropy < 2.0
    assert measured.distinct_tokens > 0.2  # no loop


def test_the_copy_leaves_the_model_and_the_tied_embedding_alone() -> None:
    model = build(shape_config("tiny"), 0.3, 0, torch.float32, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = quantized_copy(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    embedding = twin.get_input_embeddings().weight
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert not torch.equal(embedding, twin.get_output_embeddings().weight)


def test_round_trip_stays_within_half_a_step() -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))  # [out, in]
    weight[0, :128] = weight[0, :128].abs() + 1  # one-signed group: the range still reaches to zero
    weight[1] = 0
    groups = weight.view(6, 2, 128)
    step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15  # [6, 2]
    error = (round_trip(weight) - weight).view(6, 2, 128).abs().amax(-1)  # [6, 2]
    assert (error <= step * (1 + 1e-4)).all()  # half a step for the weight, half for the rounded zero point
    assert torch.equal(round_trip(weight)[1], weight[1])
    inside = (round_trip(weight) - weight).view(6, 2, 128)[2:].abs().mean(-1)  # [4, 2]
    assert (inside < step[2:] * 0.3).all()  # uniform rounding: a quarter of a step on average


def test_a_config_file_is_a_shape(tmp_path) -> None:
    SHAPES["tiny"].save_pretrained(tmp_path)
    config = shape_config(str(tmp_path / "config.json"))
    assert config.hidden_size == SHAPES["tiny"].hidden_size
    assert config.eos_token_id is None
    assert SHAPES["tiny"].get_text_config() is not config


def test_the_built_shape_is_the_one_asked_for() -> None:
    config = shape_config("qwen2.5-0.5b")
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (24, 896, 4864)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (14, 2, 151936)
    assert config.tie_word_embeddings


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="'qwen' is neither one of"):
        load_model("shape:qwen", torch.float32, "cpu")
    config = shape_config("tiny")
    config.hidden_size = 192
    with pytest.raises(ValueError, match="192 inputs, no multiple of 128"):
        build(config, 0.0, 0, torch.float32, "cpu")
    with pytest.raises(ValueError, match="agreement is 0.2"):
        shape_model("tiny", 0.2, 0, torch.float32, "cpu")
