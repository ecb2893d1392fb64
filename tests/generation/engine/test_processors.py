"""Every processor and criterion acts as in `generate`: against transformers itself, and against a plain loop."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import logits_process as hf

from spec_trl.generation.engine import processors
from spec_trl.generation.engine.noise import RoundNoise, draw, position_keys, stream_keys
from spec_trl.generation.engine.processors import Filters, LogitsPipeline, PrefixView
from spec_trl.generation.engine.rows import Request, Rows
from tests.conftest import tiny_llama
from tests.generation.calls import (
    Alternate,
    EndByPrefix,
    generate,
    outputs,
    pad_left,
    plain_decoding,
    random_rows,
)


def by_row(batch_id: int, prefix: Tensor) -> list[int]:
    """Tokens that row `batch_id` may say next; another set at each step, never the same for two rows."""
    return [3 + (7 * batch_id + len(prefix) + i) % 60 for i in range(12)]


EOS = dict(eos_token_id=[7, 11, 12])
BOTH: dict[str, dict[str, Any]] = {
    "nothing": EOS,
    "one eos": dict(eos_token_id=7),
    "max_length": dict(max_new_tokens=None, max_length=22),
    "max_time": EOS | dict(max_time=1e-9),
    "repetition_penalty": EOS | dict(repetition_penalty=1.4),
    "no_repeat_ngram_size": EOS | dict(no_repeat_ngram_size=2),
    "bad_words_ids": EOS | dict(bad_words_ids=[[44], [6, 56], [38, 45, 22]]),
    "min_new_tokens": EOS | dict(min_new_tokens=12),
    "min_length": EOS | dict(min_length=21),
    "sequence_bias": dict(eos_token_id=7, sequence_bias=[[[8], 2.0], [[9, 10], -3.0], [[4], -1.0]]),
    "exponential_decay_length_penalty": EOS | dict(exponential_decay_length_penalty=(4, 1.3)),
    "forced_eos_token_id": dict(forced_eos_token_id=11, eos_token_id=11),
    "suppress_tokens": EOS | dict(suppress_tokens=list(range(20, 50))),
    "begin_suppress_tokens": EOS | dict(begin_suppress_tokens=list(range(3, 40))),
    "encoder_repetition_penalty": EOS | dict(encoder_repetition_penalty=2.5),
    "encoder_no_repeat_ngram_size": EOS | dict(encoder_no_repeat_ngram_size=1),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=by_row),
    "renormalize_logits": EOS | dict(renormalize_logits=True, remove_invalid_values=True),
    "watermarking_config": EOS | dict(watermarking_config=WatermarkingConfig(bias=3.0)),
    "own processor": EOS | dict(logits_processor=LogitsProcessorList([Alternate()])),
    "own criterion": EOS | dict(stopping_criteria=StoppingCriteriaList([EndByPrefix(9)])),
    "several": EOS | dict(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=5, suppress_tokens=[40]),
}  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = BOTH | {
    "temperature": EOS | dict(temperature=0.6),
    "top_k": EOS | dict(top_k=4),
    "top_p": EOS | dict(top_p=0.7),
    "top_k=1": EOS | dict(top_k=1),
    "min_p": EOS | dict(min_p=0.2),
    "typical_p": EOS | dict(typical_p=0.6),
    "epsilon_cutoff": EOS | dict(epsilon_cutoff=0.03),
    "eta_cutoff": EOS | dict(eta_cutoff=0.03),
    "top_h": EOS | dict(top_h=0.5),
    "all warpers": EOS | dict(temperature=1.3, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def assistant() -> PreTrainedModel:
    """Agrees often with the target, not always."""
    found = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        found.lm_head.weight += 0.01 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    return found


PROMPTS = pad_left(random_rows([6, 1, 9, 4]))
ROWS_CHANGE_PLACES = {"draft_length": 2, "max_batch_size": 3}  # row-bound processors must follow
GREEDY = ["max_length", "max_time", "forced_eos_token_id", "prefix_allowed_tokens_fn", "own criterion", "several"]


def plainly(model: PreTrainedModel, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    sampled = dict(do_sample=True, top_k=0, max_new_tokens=16, pad_token_id=0)
    return model.generate(**PROMPTS, custom_generate=plain_decoding, **(sampled | options))


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_equals_transformers(name: str, tiny, assistant) -> None:
    options = dict(do_sample=False, max_new_tokens=16, pad_token_id=0) | BOTH[name]
    expected = tiny.generate(**PROMPTS, **options)
    result = generate(tiny, PROMPTS, "model", ROWS_CHANGE_PLACES, assistant_model=assistant, **options)
    assert result.sequences.tolist() == expected.tolist() and result.statistics.drafter_failure is None


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_equals_a_plain_loop(name: str, tiny, assistant) -> None:
    options = SAMPLED[name]
    tokens, logprobs = plainly(tiny, **options)
    more = {"max_new_tokens": 16, "assistant_model": assistant} | options
    result = generate(tiny, PROMPTS, "model", ROWS_CHANGE_PLACES, **more)
    assert outputs(result) == tokens and result.statistics.drafter_failure is None
    for row, expected in enumerate(logprobs):
        torch.testing.assert_close(result.logprobs[row, : len(expected)], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert name == "max_time" or result.statistics.total.accepted > 0
    if name not in ("nothing", "one eos", "renormalize_logits"):  # else the test would pass without the option
        assert (tokens, logprobs) != plainly(tiny, eos_token_id=options.get("eos_token_id"))


@pytest.mark.parametrize(
    "name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "prefix_allowed_tokens_fn"]
)
def test_row_bound_processors_with_several_sequences(name: str, tiny) -> None:
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if name == "encoder_repetition_penalty" and version < (5, 23):
        pytest.skip("transformers 5.17 itself penalises a copy by another row's prompt")
    options = dict(max_new_tokens=12, num_return_sequences=3) | BOTH[name]
    tokens, _ = plainly(tiny, **options)
    assert outputs(generate(tiny, PROMPTS, "ngram", {"max_batch_size": 4}, **options)) == tokens


def test_stop_strings(stories: PreTrainedModel, story_tokenizer) -> None:
    """As a keyword, and in a generation config, named or positional."""
    texts = ["Once upon a time, there was", "Lily and", "The big dog ran to the"]
    inputs = story_tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = dict(stop_strings=["was", ". The"], max_new_tokens=40, do_sample=False, pad_token_id=2)
    expected = stories.generate(**inputs, tokenizer=story_tokenizer, **options)
    result = generate(stories, inputs, "ngram", tokenizer=story_tokenizer, **options)
    assert result.sequences.tolist() == expected.tolist()
    assert len(set(result.lengths.tolist())) > 1 and min(result.lengths) < 40
    config = GenerationConfig(**options, eos_token_id=1)
    more = dict(tokenizer=story_tokenizer, assistant_strategy="ngram")
    named = stories.generate(**inputs, generation_config=config, **more)
    positional = stories.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"], **more)
    assert named.tolist() == positional.tolist() == expected.tolist()
    assert config.stop_strings == options["stop_strings"], "the caller's config is the caller's"


# ---- Stopping, by hand -----------------------------------------------------------------------------------------


@pytest.fixture
def view() -> PrefixView:
    """Two rows of prompts 3 and 1 long, with room for 6 and 2 new tokens, under a padded width of 5."""
    rows = Rows(2, 16, torch.device("cpu"))
    rows.admit([Request(0, torch.tensor([3]), 3, 0), Request(1, torch.tensor([4, 5, 6]), 9, 0)])
    return PrefixView(rows, torch.tensor([[60, 61, 62, 63, 3], [60, 61, 4, 5, 6]]))


TEMPERATURE, TOP_K, MIN_P, TOP_P = (
    hf.TemperatureLogitsWarper(0.6), hf.TopKLogitsWarper(7), hf.MinPLogitsWarper(0.05), hf.TopPLogitsWarper(0.8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("members", "filters"),
    [
        ([], Filters()),
        ([TEMPERATURE], Filters(0.6)),
        ([TEMPERATURE, TOP_K], Filters(0.6, top_k=7)),
        ([TOP_K, MIN_P], Filters(1.0, top_k=7, min_p=0.05)),
        ([TEMPERATURE, TOP_K, MIN_P], Filters(0.6, top_k=7, min_p=0.05)),
        ([TEMPERATURE, TOP_P], None),
        ([TOP_K, hf.TopKLogitsWarper(50)], None),
        ([MIN_P, hf.MinPLogitsWarper(0.01)], None),
        ([TOP_K, TEMPERATURE], None),
        ([MIN_P, TOP_K], None),
        ([hf.TopKLogitsWarper(7, filter_value=-5.0)], None),
        ([hf.MinPLogitsWarper(0.1, min_tokens_to_keep=2)], None),
        ([hf.InfNanRemoveLogitsProcessor()], None),
    ],
)
def test_filters(members: list[Any], filters: Filters | None) -> None:
    assert Filters.of(LogitsProcessorList(members)) == filters
    if filters is None:
        return
    logits = 3 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    processed = LogitsProcessorList(members)(None, logits.clone())
    floors = filters.floors(logits)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if floors is not None:
        kept = logits / filters.temperature >= floors[:, None]
    assert torch.equal(kept, processed > -torch.inf)


@pytest.mark.parametrize(
    ("members", "sampled"), [([], False), ([TEMPERATURE, TOP_K, MIN_P], True), ([TEMPERATURE, TOP_P], True)]
)
def test_drawing_in_one_pass(members: list[Any], sampled: bool, view: PrefixView, monkeypatch) -> None:
    """On CUDA a kernel draws, here in Triton's interpreter; temperature, top-k and min-p act in it."""
    pytest.importorskip("triton")
    pipeline = LogitsPipeline(LogitsProcessorList(members), view, 1)
    logits = 3 * torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    keys = position_keys(stream_keys(0, torch.arange(2)), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]]))  # [2, 4]
    noise = RoundNoise(keys, 64) if sampled else None
    expected = pipeline.draw(logits, noise, offset=1, want_logprobs=True)
    assert torch.equal(expected.tokens, draw(pipeline(logits, offset=1), noise, 1).tokens)
    monkeypatch.setattr(processors, "run_on", lambda device: True)
    drawn = pipeline.draw(logits, noise, offset=1, want_logprobs=True)
    assert torch.equal(drawn.tokens, expected.tokens)
    torch.testing.assert_close(drawn.scores, expected.scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert pipeline.draw(logits[:1, :1], None).logprobs is None
