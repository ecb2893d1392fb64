"""The door: the keyword, transformers' own `custom_generate`, streamers, outputs, adapters, and coming and going."""

import copy
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

import spec_trl
from spec_trl import SpeculativeConfig, SpeculativeOutput, speculative_decoding
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([4, 6, 1]))


OPTIONS = dict(do_sample=True, top_k=0, max_new_tokens=12, pad_token_id=0)


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """The keyword is gone during the test."""
    spec_trl.uninstall()
    yield
    spec_trl.install()


def test_uninstall_and_install(uninstalled: None, tiny: PreTrainedModel, prompts: Prompts) -> None:
    original = GenerationMixin.generate
    assert original.__module__.startswith("transformers")
    with pytest.raises(ValueError, match="assistant_strategy"):
        tiny.generate(**prompts, assistant_strategy="none", max_new_tokens=2)
    torch.manual_seed(0)
    plain = tiny.generate(**prompts, **OPTIONS)
    spec_trl.uninstall()  # twice is once
    spec_trl.install()
    spec_trl.install()
    assert generate(tiny, prompts).sequences.shape == (3, 30)
    torch.manual_seed(0)
    assert torch.equal(tiny.generate(**prompts, **OPTIONS), plain)
    assert GenerationMixin.generate.__doc__ == original.__doc__
    spec_trl.uninstall()
    assert GenerationMixin.generate is original


def by_hand(model: PreTrainedModel, prompts: Prompts, **options: Any) -> Any:
    config = SpeculativeConfig(seed=0, draft_kernel="reference", sd_toggle="always")
    options = OPTIONS | dict(custom_generate=speculative_decoding) | options
    return model.generate(**prompts, speculative_config=config, **options)


@pytest.mark.parametrize("strategy", [None, "none", "ngram"])
def test_custom_generate_with_and_without_the_keyword_installed(strategy, tiny, prompts, request) -> None:
    options = {} if strategy is None else dict(assistant_strategy=strategy)
    expected = generate(tiny, prompts, max_new_tokens=12).sequences
    found = by_hand(tiny, prompts, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, expected) and found.statistics.strategy == (strategy or "self")
    request.getfixturevalue("uninstalled")
    assert torch.equal(by_hand(tiny, prompts, request_ids=[0, 1, 2], **options), expected)
    assert not torch.equal(by_hand(tiny, prompts, request_ids=[5, 6, 7], **options), expected)


def test_assistants(tiny, tiny_assistant, prompts, tmp_path) -> None:
    """By path; through custom_generate, on whose way transformers drops it and the installed keyword does not; for
    several sequences, where transformers refuses it."""
    tiny_assistant.save_pretrained(tmp_path)
    result = generate(tiny, prompts, "model", assistant_model=str(tmp_path), max_new_tokens=12)
    found = by_hand(
        tiny, prompts, assistant_strategy="model", assistant_model=tiny_assistant, return_dict_in_generate=True
    )
    assert outputs(found) == outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=12))
    assert found.statistics.acceptance_rate > 0.3 < result.statistics.acceptance_rate
    result = generate(tiny, prompts, "model", num_return_sequences=2, assistant_model=tiny_assistant)
    assert result.sequences.shape[0] == 6


def test_configs_and_inputs_in_any_form(tiny, prompts) -> None:
    rows = pad_left(random_rows([5, 5]))["input_ids"]
    config = GenerationConfig(**OPTIONS, eos_token_id=None)
    expected = generate(tiny, {"input_ids": rows}, max_new_tokens=12).sequences
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((rows,), OPTIONS), ((), dict(inputs=rows) | OPTIONS), ((rows, config), {}),
        ((rows,), dict(generation_config=config)),
    ]  # fmt: skip
    for given, options in inputs:
        for speculative in (SpeculativeConfig(seed=0), {"seed": 0}):
            found = tiny.generate(*given, assistant_strategy="none", speculative_config=speculative, **options)
            assert torch.equal(found, expected)
    unseeded = []
    for speculative in (None, {}):
        torch.manual_seed(1)
        unseeded.append(tiny.generate(rows, assistant_strategy="none", speculative_config=speculative, **OPTIONS))
    assert torch.equal(*unseeded)


def test_a_strategy_in_a_config(tiny, tiny_assistant, prompts, tmp_path) -> None:
    """Of the call or of the model, read like all others: what comes nearer to the call counts, and no other setting
    is lost. A saved config says the same."""
    speculative = {"seed": 0, "draft_kernel": "reference", "sd_toggle": "always"}
    options = OPTIONS | dict(return_dict_in_generate=True)
    expected = outputs(generate(tiny, prompts, max_new_tokens=12))
    config = GenerationConfig(**options, assistant_strategy="self", speculative_config=speculative)
    config.save_pretrained(tmp_path)
    options_of_own = SpeculativeConfig(seed=0, draft_length=2, sd_toggle="always")
    own = GenerationConfig(assistant_strategy="ngram", speculative_config=options_of_own)
    model = copy.copy(tiny)
    calls: list[tuple[str, GenerationConfig, dict[str, Any]]] = [
        ("self", GenerationConfig(), dict(generation_config=config)),
        ("self", own, dict(generation_config=config)),
        ("self", GenerationConfig(), dict(generation_config=GenerationConfig.from_pretrained(tmp_path))),
        ("self", config, {}),
        ("ngram", own, options),
        ("model", own, options | dict(assistant_strategy="model", assistant_model=tiny_assistant)),
        ("none", own, dict(generation_config=config, assistant_strategy="none")),
    ]
    for strategy, model.generation_config, given in calls:
        found = model.generate(**prompts, **given)
        assert outputs(found) == expected and found.statistics.strategy == strategy
        assert found.statistics.total.drafted > 0 or strategy in ("none", "ngram")
    model.generation_config = own
    drawn = []
    plain = by_hand(model, prompts, custom_generate=lambda *_, **given: drawn.append(given))
    assert plain is None and drawn  # an argument comes before a config
    own.num_return_sequences, own.do_sample, own.stop_strings = 3, True, ["x"]
    with pytest.raises(ValueError, match=r"stop_strings=\['x'\] needs tokenizer="):
        model.generate(**prompts, generation_config=GenerationConfig(max_new_tokens=2))
    own.stop_strings = None
    assert len(model.generate(**prompts, generation_config=GenerationConfig(max_new_tokens=2))) == 9
    own.save_pretrained(tmp_path / "own")  # JSON has no tuples
    model.generation_config = GenerationConfig.from_pretrained(tmp_path / "own")
    assert len(model.generate(**prompts, max_new_tokens=2, num_return_sequences=1)) == 3
    model.generation_config.assistant_strategy = None
    assert len(model.generate(**prompts, max_new_tokens=2, num_return_sequences=1)) == 3  # plainly
    restored = GenerationConfig.from_dict(json.loads(own.to_json_string()))
    assert SpeculativeConfig.coerce(restored.speculative_config).draft_length == 2
    # What docs/how_to.md says of reloading: transformers drops it from a config that it made of the model's.
    for made_by_itself in (True, False):
        saved = tiny_llama()
        if made_by_itself:
            saved.generation_config = GenerationConfig()
        saved.generation_config.assistant_strategy = "self"
        saved.save_pretrained(tmp_path / str(made_by_itself))
        again = type(saved).from_pretrained(tmp_path / str(made_by_itself))
        assert hasattr(again.generation_config, "assistant_strategy") is made_by_itself
    with pytest.raises(ValueError, match="assistant_strategy='' is unknown; choose one of"):
        tiny.generate(**prompts, assistant_strategy="")


# ---- What comes out --------------------------------------------------------------------------------------------


def test_output(tiny, prompts) -> None:
    result = generate(tiny, prompts, "self", eos_token_id=[7, 11, 12])
    assert isinstance(result, SpeculativeOutput)
    new = int(result.lengths.max())
    assert result.sequences.shape == (3, 6 + new) and result.sequences.dtype == torch.int64
    assert torch.equal(result.sequences[:, :6], prompts["input_ids"])
    assert result.logprobs.shape == (3, new) and result.logprobs.dtype == torch.float32
    assert result["sequences"] is result.sequences is result[0] and result[1] is result.logprobs
    plain = tiny.generate(**prompts, max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(result, type(plain)), "what reads generate's output can read it"
    empty = {field.name for field in fields(plain)} - {"sequences"}
    assert "scores" in empty and all(vars(result)[name] is None for name in empty)
    assert result.past_key_values is None  # from transformers 5.24 on an old name of `cache`
    assert vars(copy.copy(result)).keys() == vars(result).keys()
    for tokens in outputs(result):
        assert all(token not in (7, 11, 12) for token in tokens[:-1])


def test_num_return_sequences(tiny, prompts) -> None:
    several = generate(tiny, prompts, "self", num_return_sequences=3)
    repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in prompts.items()}
    assert outputs(several) == outputs(generate(tiny, repeated))
    assert len({tuple(tokens) for tokens in outputs(several)}) == 9


@pytest.mark.parametrize(("strategy", "eos"), [("none", None), ("self", [7, 11, 12])])
def test_streamer(eos, strategy: str, tiny, prompts) -> None:
    streamer = Mock()
    row = {name: tensor[1:2] for name, tensor in prompts.items()}
    result = generate(tiny, row, strategy, streamer=streamer, eos_token_id=eos)
    *puts, end = streamer.mock_calls
    assert torch.cat([put.args[0].flatten() for put in puts]).tolist() == result.sequences[0].tolist()
    assert {tuple(put.args[0].shape) for put in puts[1:]} == {(1,)} and end[0] == "end", "one at a time, as generate"


def test_a_model_without_a_pad_token() -> None:
    rows = pad_left(random_rows([4, 6, 1]))
    sequences = tiny_llama(pad_token_id=None).generate(**rows, assistant_strategy="none", eos_token_id=[7, 11])
    assert sequences.shape[0] == 3


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters(use_dora: bool, tiny, prompts) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules="all-linear", use_dora=use_dora)
    adapted = get_peft_model(tiny_llama(), config).double().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # 0 at first, which would hide a lost adapter
                parameter += 0.1 * torch.randn_like(parameter)
    greedy = adapted.generate(**prompts, do_sample=False, max_new_tokens=24, pad_token_id=0)
    sampled, plain = (outputs(generate(model, prompts)) for model in (adapted, tiny))
    assert sampled != plain, "the adapter does nothing here"
    adapted.train()  # with live dropout, as TRL leaves it
    result = generate(adapted, prompts, "self")
    assert outputs(result) == sampled
    assert result.statistics.drafter_failure is None and result.statistics.acceptance_rate > 0.5
    assert torch.equal(generate(adapted, prompts, "ngram", do_sample=False).sequences, greedy)
    with adapted.disable_adapter():
        assert outputs(generate(adapted, prompts, "self")) == plain
    assert outputs(generate(adapted, prompts, "self")) == sampled
