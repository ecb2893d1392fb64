"""The door: the keyword, transformers' own `custom_generate`, streamers, outputs, adapters, and coming and going."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import spec_trl
from spec_trl import SpeculativeConfig, SpeculativeOutput, speculative_decoding
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([4, 6, 1]))


@pytest.fixture
def uninstalled():
    """The keyword is gone during the test."""
    spec_trl.uninstall()
    yield
    spec_trl.install()


def test_uninstall_and_install(uninstalled: None, tiny: PreTrainedModel, prompts: Prompts) -> None:
    assert GenerationMixin.generate.__module__.startswith("transformers")
    original = GenerationMixin.generate
    with pytest.raises(ValueError, match="assistant_strategy"):
        tiny.generate(**prompts, assistant_strategy="none", max_new_tokens=2)
    spec_trl.uninstall()  # twice is once
    spec_trl.install()
    spec_trl.install()
    assert generate(tiny, prompts).sequences.shape == (3, 30)
    assert GenerationMixin.generate.__doc__ == original.__doc__
    spec_trl.uninstall()
    assert GenerationMixin.generate is original


def test_without_the_keyword_generate_is_untouched(tiny: PreTrainedModel, prompts: Prompts) -> None:
    options = dict(max_new_tokens=5, do_sample=True, pad_token_id=0)
    torch.manual_seed(0)
    wrapped = tiny.generate(**prompts, **options)
    spec_trl.uninstall()
    torch.manual_seed(0)
    plain = tiny.generate(**prompts, **options)
    spec_trl.install()
    assert torch.equal(wrapped, plain)


OPTIONS = dict(do_sample=True, top_k=0, max_new_tokens=12, pad_token_id=0)


def by_hand(model: PreTrainedModel, prompts: Prompts, **options: Any) -> Any:
    config = SpeculativeConfig(seed=0, draft_kernel="reference")
    return model.generate(
        **prompts, custom_generate=speculative_decoding, speculative_config=config, **OPTIONS, **options
    )


@pytest.mark.parametrize("strategy", [None, "none", "ngram"])
def test_custom_generate_with_and_without_the_keyword_installed(strategy, tiny, prompts) -> None:
    options = {} if strategy is None else dict(assistant_strategy=strategy)
    expected = generate(tiny, prompts, max_new_tokens=12, return_dict_in_generate=False)
    assert torch.equal(by_hand(tiny, prompts, **options), expected)
    spec_trl.uninstall()
    try:
        assert torch.equal(by_hand(tiny, prompts, **options), expected)
        ids = [0, 1, 2]
        assert torch.equal(by_hand(tiny, prompts, request_ids=ids, **options), expected)
        assert not torch.equal(by_hand(tiny, prompts, request_ids=[5, 6, 7], **options), expected)
    finally:
        spec_trl.install()


def test_custom_generate_defaults_to_the_self_drafter(tiny, prompts) -> None:
    assert by_hand(tiny, prompts, return_dict_in_generate=True).statistics.strategy == "self"


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


def test_config_as_object_dict_or_nothing(tiny, prompts) -> None:
    def call(config: Any) -> Any:
        return tiny.generate(**prompts, assistant_strategy="ngram", speculative_config=config, **OPTIONS)

    assert torch.equal(call(SpeculativeConfig(seed=4)), call({"seed": 4}))
    torch.manual_seed(1)
    first = call(None)
    torch.manual_seed(1)
    assert torch.equal(call({}), first)


def test_positional_and_named_inputs(tiny, prompts) -> None:
    rows = pad_left(random_rows([5, 5]))["input_ids"]
    expected = generate(tiny, {"input_ids": rows}, max_new_tokens=12).sequences
    config = GenerationConfig(**OPTIONS, eos_token_id=None)
    options = dict(assistant_strategy="none", speculative_config={"seed": 0})
    assert torch.equal(tiny.generate(rows, **OPTIONS, **options), expected)
    assert torch.equal(tiny.generate(inputs=rows, **OPTIONS, **options), expected)
    assert torch.equal(tiny.generate(rows, config, **options), expected)
    assert torch.equal(tiny.generate(rows, generation_config=config, **options), expected)


# ---- What comes out --------------------------------------------------------------------------------------------


def test_output(tiny, prompts) -> None:
    result = generate(tiny, prompts, "self", eos_token_id=[7, 11, 12])
    assert isinstance(result, SpeculativeOutput)
    new = int(result.lengths.max())
    assert result.sequences.shape == (3, 6 + new) and result.sequences.dtype == torch.int64
    assert torch.equal(result.sequences[:, :6], prompts["input_ids"])
    assert result.logprobs.shape == (3, new) and result.logprobs.dtype == torch.float32
    assert result["sequences"] is result.sequences, "a ModelOutput, like transformers' own"
    for tokens in outputs(result):
        assert all(token not in (7, 11, 12) for token in tokens[:-1])


def test_pad_token_without_one_configured(prompts) -> None:
    model = tiny_llama(pad_token_id=None)
    sequences = model.generate(**prompts, assistant_strategy="none", max_new_tokens=5, eos_token_id=[7, 11])
    assert sequences.shape[0] == 3


def test_num_return_sequences(tiny, prompts) -> None:
    several = generate(tiny, prompts, "self", num_return_sequences=3)
    repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in prompts.items()}
    assert outputs(several) == outputs(generate(tiny, repeated))
    assert len({tuple(tokens) for tokens in outputs(several)}) == 9


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.received.append(value)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(("strategy", "eos"), [("none", None), ("self", [7, 11, 12]), ("ngram", None)])
def test_streamer(eos, strategy: str, tiny, prompts) -> None:
    recorder = Recorder()
    row = {name: tensor[1:2] for name, tensor in prompts.items()}
    result = generate(tiny, row, strategy, streamer=recorder, eos_token_id=eos)
    streamed = torch.cat([value.flatten() for value in recorder.received])
    assert streamed.tolist() == result.sequences[0].tolist()
    assert recorder.ended == 1
    assert len(recorder.received) == 1 + result.statistics.rounds


# ---- PEFT ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["lora", "dora"])
def adapted(request: pytest.FixtureRequest):
    model = tiny_llama()
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules="all-linear", use_dora=request.param
    )
    adapted = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # 0 at first, which would hide a lost adapter
                parameter += 0.1 * torch.randn_like(parameter)
    return adapted.double()


def test_adapters(adapted, tiny, prompts) -> None:
    adapted.eval()
    greedy = adapted.generate(**prompts, do_sample=False, max_new_tokens=24, pad_token_id=0)
    sampled = outputs(generate(adapted, prompts))
    assert sampled != outputs(generate(tiny, prompts)), "the adapter does nothing here"
    adapted.train()  # with live dropout, as TRL leaves it
    result = generate(adapted, prompts, "self")
    assert outputs(result) == sampled
    assert result.statistics.drafter_failure is None and result.statistics.acceptance_rate > 0.5
    assert torch.equal(generate(adapted, prompts, "ngram", do_sample=False).sequences, greedy)
    with adapted.disable_adapter():
        assert outputs(generate(adapted, prompts, "self")) == outputs(generate(tiny, prompts))
    assert outputs(generate(adapted, prompts, "self")) == sampled
