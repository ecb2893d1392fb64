"""Every processor and criterion acts as in `generate`: against transformers itself, and against a plain loop."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import logits_process as hf

from spec_trl.generation.engine.rows import PrefixView, Request, Rows
from spec_trl.generation.engine.sampling import processors
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.filters import keep_top_p
from spec_trl.generation.engine.sampling.noise import RoundNoise, draw, position_keys, stream_keys
from spec_trl.generation.engine.sampling.processors import Filters, LogitsPipeline
from spec_trl.generation.engine.saved_row import SavedRow
from tests.conftest import TRANSFORMERS, tiny_llama
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
    if name == "encoder_repetition_penalty" and TRANSFORMERS < (5, 23):
        pytest.skip("transformers 5.17 itself penalises a copy by another row's prompt")
    options = dict(max_new_tokens=12, num_return_sequences=3) | BOTH[name]
    tokens, _ = plainly(tiny, **options)
    assert outputs(generate(tiny, PROMPTS, "ngram", {"max_batch_size": 4}, **options)) == tokens


def test_stop_strings(stories: PreTrainedModel, story_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Without an EOS `generate` writes on in rows that have ended; ours are padded.
    monkeypatch.setattr(stories.generation_config, "eos_token_id", None)
    written = stories.generate(**inputs, tokenizer=story_tokenizer, **options)
    result = generate(stories, inputs, "ngram", tokenizer=story_tokenizer, **options)
    assert result.statistics.total.drafted > 0 and written.shape == result.sequences.shape
    for row, length in enumerate(result.lengths.tolist()):
        theirs, ours = (ids[row, inputs["input_ids"].shape[1] :].tolist() for ids in (written, result.sequences))
        assert ours == theirs[:length] + [2] * (len(ours) - length)
    assert written.tolist() != result.sequences.tolist()


# ---- Stopping, by hand -----------------------------------------------------------------------------------------


@pytest.fixture
def view() -> PrefixView:
    """Two rows of prompts 3 and 1 long, with room for 6 and 2 new tokens, under a padded width of 5."""
    rows = Rows(2, 16, torch.device("cpu"))
    rows.admit([Request(0, torch.tensor([3]), 3, 0), Request(1, torch.tensor([4, 5, 6]), 9, 0)])
    return PrefixView(rows, torch.tensor([[60, 61, 62, 63, 3], [60, 61, 4, 5, 6]]))


# ---- Rows of different lengths ---------------------------------------------------------------------------------

VOCABULARY, PROMPTS_OF, GENERATED = 64, (4, 1, 7, 3, 5, 2), (3, 0, 5, 9, 1, 3)
PADDED = pad_left(random_rows(PROMPTS_OF, VOCABULARY, seed=3))  # [6, 7]
STOPS = torch.tensor([7, 11])
BY_TOKENS = {
    "penalty": hf.RepetitionPenaltyLogitsProcessor(1.3),
    "reward": hf.RepetitionPenaltyLogitsProcessor(0.7),
    "penalty without prompt": hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=7),
    "penalty of a part": hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=9),
    "n-grams": hf.NoRepeatNGramLogitsProcessor(2),
    "bad words": hf.NoBadWordsLogitsProcessor([[44], [6, 56]], STOPS),
    "bias": hf.SequenceBiasLogitsProcessor([[[8], 2.0], [[9, 10], -3.0]]),
    "allowed": hf.PrefixConstrainedLogitsProcessor(by_row, 1),
    "own": Alternate(),
}  # fmt: skip
if TRANSFORMERS >= (5, 23):  # earlier ones know no padding here
    without_padding = hf.RepetitionPenaltyLogitsProcessor(1.3, PADDED["attention_mask"].argmax(1))
    BY_TOKENS["penalty without padding"] = without_padding
BY_LENGTH = {
    "min_length": hf.MinLengthLogitsProcessor(11, STOPS),
    "min_new_tokens": hf.MinNewTokensLengthLogitsProcessor(7, 5, STOPS),
    "forced bos": hf.ForcedBOSTokenLogitsProcessor(5),
    "forced eos": hf.ForcedEOSTokenLogitsProcessor(15, STOPS),
    "decay": hf.ExponentialDecayLengthPenalty((2, 1.3), STOPS, 7),
    "no decay": hf.ExponentialDecayLengthPenalty((90, 1.3), STOPS, 7),
    "begin": hf.SuppressTokensAtBeginLogitsProcessor([*range(3, 40)], 7),
}
BY_SCORES = {
    "temperature": hf.TemperatureLogitsWarper(0.6),
    "top_k": hf.TopKLogitsWarper(20),
    "top_p": hf.TopPLogitsWarper(0.8),
    "min_p": hf.MinPLogitsWarper(0.02),
}
ALL = BY_TOKENS | BY_LENGTH | BY_SCORES


def ragged_rows() -> Rows:
    """Four of six requests, one of which another rank has begun, in rows that have changed places; and what follows
    their tokens is written already."""
    rows, generator = Rows(6, 24, torch.device("cpu")), torch.Generator().manual_seed(4)
    requests = []
    for index, (ids, mask) in enumerate(zip(PADDED["input_ids"], PADDED["attention_mask"].bool(), strict=True)):
        saved = None
        if index == 3:
            saved = SavedRow(torch.randint(3, VOCABULARY, (2,), generator=generator), None, 0, {})
        requests.append(Request(index, ids[mask], 20, index, saved))
    rows.admit(requests)
    rows.tokens[:, max(PROMPTS_OF) + 2 :] = 63  # nobody may look here
    done = torch.tensor([GENERATED[index] - (2 if index == 3 else 0) for index in rows.indices])
    rows.write(0, torch.randint(3, VOCABULARY, (6, 9), generator=generator))
    rows.commit(rows.host_lengths + done.numpy(), None)
    rows.drop([rows.indices.index(0), rows.indices.index(5)])
    rows.write(0, torch.randint(3, VOCABULARY, (4, 5), generator=generator))
    return rows


def shown_by_generate(names: list[str], rows: Rows, logits: Tensor, offset: int) -> Iterator[tuple[int, int, Tensor]]:
    """What transformers' own make of each place alone: row, place, scores."""
    for row, request in enumerate(rows.indices):
        for i in range(logits.shape[1]):
            output = rows.tokens[row, rows.generated_span(row).start : rows.host_lengths[row] + offset + i]
            prefix, scores = torch.cat([PADDED["input_ids"][request], output])[None], logits[row, i][None].clone()
            for name in names:
                processor = ALL[name]
                if name == "penalty without padding":
                    processor = hf.RepetitionPenaltyLogitsProcessor(1.3, ALL[name].prompt_ignore_length[[request]])
                if name == "allowed":
                    processor = hf.PrefixConstrainedLogitsProcessor(lambda _, p, own=request: by_row(own, p), 1)
                scores = processor(prefix, scores)
            yield row, i, scores[0]


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(
    tokens=st.permutations([*BY_TOKENS]), lengths=st.permutations([*BY_LENGTH]), count=st.integers(1, 6),
    scores=st.sampled_from([[], ["top_p"], [*BY_SCORES]]), parts=st.tuples(st.integers(0, 2), st.integers(0, 4)),
    offset=st.integers(0, 2), dtype=st.sampled_from([torch.float32, torch.float64]), elsewhere=st.booleans(),
)  # fmt: skip
def test_rows_of_different_lengths_bit_for_bit(
    tokens, lengths, count, scores, parts, offset, dtype, elsewhere
) -> None:
    if TRANSFORMERS < (5, 23):  # whose decay makes NaN of what others have ruled out
        lengths = [name for name in lengths if name != "decay"]
    names = tokens[: parts[0]] + lengths[: parts[1]] + scores
    check_bit_for_bit(names, min(count, 6 - offset), offset, dtype, elsewhere)


@pytest.mark.parametrize("name", ALL)
def test_each_bit_for_bit(name: str) -> None:
    check_bit_for_bit([name], 5, 1, torch.float32, elsewhere=True)


def check_bit_for_bit(names: list[str], count: int, offset: int, dtype: torch.dtype, elsewhere: bool) -> None:
    rows = ragged_rows()
    logits = 3 * torch.randn(4, count, VOCABULARY, dtype=dtype, generator=torch.Generator().manual_seed(5))
    logits[0, :, 20:30] = -torch.inf
    before = logits.clone()
    other = Rows(6, 24, torch.device("cpu"))
    view = PrefixView(other if elsewhere else rows, PADDED["input_ids"])
    pipeline = LogitsPipeline(LogitsProcessorList([ALL[name] for name in names]), view, 6)
    if elsewhere and not {"allowed", "own"} & {*names}:
        pipeline = pipeline.over(rows)
    elif elsewhere:
        view.rows = rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "keep_top_p", functools.partial(keep_top_p, count=2))  # of a small vocabulary
        processed = pipeline(logits, offset)
    for row, i, expected in shown_by_generate(names, rows, logits, offset):
        assert torch.equal(processed[row, i], expected), (names, row, i)
    assert torch.equal(logits, before), "the model's own logits, which others read"


class Operations(TorchDispatchMode):
    """Counts aten operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


READS = ("_local_scalar_dense", "nonzero", "unique", "item", "equal")


@pytest.mark.parametrize("on_cuda", [False, True])
def test_operations_of_a_round_do_not_depend_on_its_lengths(on_cuda: bool, monkeypatch) -> None:
    """Nor does the host wait for the device; on a CPU, where it need not wait, it reads whether top-p is decided."""
    if on_cuda:
        pytest.importorskip("triton")
        from spec_trl.generation.engine.cuda.kernels import sampling

        def launch(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # the interpreter reads, and takes long
            return torch.zeros(len(logits)), torch.zeros(len(logits), dtype=torch.int32)

        monkeypatch.setattr(sampling, "top_p_floors", launch)
        monkeypatch.setattr(processors, "_is_fused", lambda logits: True)
    batch, gamma, width = 16, 5, 7
    generator = torch.Generator().manual_seed(6)
    prompts = torch.randint(3, VOCABULARY, (batch, width), generator=generator)
    names = ["penalty", "min_new_tokens", "decay", "temperature", "top_p"]
    counts = []
    for distinct in (1, 1, 4, 16):  # the first one makes what is kept
        rows = Rows(batch, 64, torch.device("cpu"))
        rows.admit([Request(i, prompts[i], 60, i) for i in range(batch)])
        rows.commit(rows.host_lengths + torch.arange(batch).numpy() % distinct, None)
        pipeline = LogitsPipeline(LogitsProcessorList([ALL[name] for name in names]), PrefixView(rows, prompts), batch)
        logits = torch.randn(batch, gamma + 1, VOCABULARY, generator=generator)
        noise = RoundNoise(rows.noise_keys(gamma + 1), VOCABULARY)
        proposal = Proposal(torch.zeros(batch, gamma, dtype=torch.int64), torch.full((batch,), gamma))
        with Operations() as seen:
            pipeline.draw_verified(logits, noise, proposal, want_logprobs=False)
        assert not on_cuda or not [name for name in seen.names if any(read in name for read in READS)]
        counts.append(len(seen.names))
    assert counts[1] == counts[2] == counts[3]


def test_groups_without_reading_the_device() -> None:
    rows = ragged_rows()
    view = PrefixView(rows, PADDED["input_ids"])
    with Operations() as seen:
        pipeline = LogitsPipeline(LogitsProcessorList([Alternate()]), view, 6)
        pipeline(torch.zeros(4, 3, VOCABULARY))
    assert not [name for name in seen.names if any(read in name for read in READS)]


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
        ([TEMPERATURE, TOP_P], Filters(0.6, top_p=0.8)),
        ([TEMPERATURE, TOP_K, TOP_P, MIN_P], Filters(0.6, top_k=7, top_p=0.8, min_p=0.05)),
        ([TOP_P, hf.MinPLogitsWarper(0.4)], Filters(top_p=0.8, min_p=0.4)),
        ([TOP_P, hf.MinPLogitsWarper(1e-6)], Filters(top_p=0.8, min_p=1e-6)),
        ([MIN_P, TOP_P], None),
        ([TOP_P, TOP_K], None),
        ([TOP_P, TOP_P], None),
        ([hf.TopPLogitsWarper(1.0)], None),
        ([hf.TopPLogitsWarper(0.8, min_tokens_to_keep=2)], None),
        ([hf.TopPLogitsWarper(0.8, filter_value=-5.0)], None),
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
    if filters.top_p is not None:
        pytest.importorskip("triton")
    logits = 3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    processed = LogitsProcessorList(members)(None, logits.clone())
    floors, first = filters.floors(logits)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if floors is not None:
        kept = logits / filters.temperature >= floors[:, None] - 1e-6
    assert first is None or first.max() < 64
    assert torch.equal(kept, processed > -torch.inf)


@pytest.mark.parametrize(
    ("members", "sampled"),
    [([], False), ([TEMPERATURE, TOP_K, MIN_P], True), ([TEMPERATURE, TOP_P], True),
     ([BY_TOKENS["penalty"], TEMPERATURE, TOP_P, MIN_P], True), ([TOP_P, TEMPERATURE], True)],
)  # fmt: skip
def test_drawing_in_one_pass(members: list[Any], sampled: bool, view: PrefixView, monkeypatch) -> None:
    """On CUDA a kernel draws, here in Triton's interpreter; temperature, top-k, top-p and min-p act in it."""
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
