"""Processors and criteria that may look at other rows or keep state meet what `generate` shows them: all rows of the
caller's batch, in the caller's order, once per step, whatever drafts."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation import EosTokenCriteria, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

from spec_trl import release
from spec_trl.generation.planner.control import Chain
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows
from tests.generation.conftest import KINDS as DRAFTERS
from tests.generation.conftest import Make
from tests.generation.engine.tape import Tape
from tests.generation.races import Knowing, Planned, Plans, random_plans
from tests.generation.test_token_identity import Fault
from tests.tiny_families import make


EOS = dict(eos_token_id=[7, 11, 12])
WIDTH = 12


class Counting:
    """Calls `function` with the number of calls so far, from 1 on, the prefixes and the scores."""

    def __init__(self, function: Callable[[int, Tensor, Any], Any]) -> None:
        self.function, self.calls = function, 0

    def act(self, input_ids: Tensor, scores: Any) -> Any:
        self.calls += 1
        return self.function(self.calls, input_ids, scores)


class Processor(Counting, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.act(input_ids, scores)


class Criterion(Counting, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return self.act(input_ids, scores)


class Seldom(TopKLogitsWarper):
    """A class of transformers with another behaviour."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(input_ids, scores) if self.calls % 2 else -scores


class OddEos(EosTokenCriteria):
    """EOS ends rows in odd places alone."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return super().__call__(input_ids, scores) & (torch.arange(len(input_ids)) % 2 == 1)


def by_row(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Each row of the batch has tokens of its own."""
    scores, row = scores.clone(), torch.arange(len(scores))
    scores[row, 3 + (11 * row + input_ids.shape[1]) % 61] += 6.0
    return scores


def by_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A row that has ended has no tokens at all."""
    ended = torch.isin(input_ids[:, WIDTH:], torch.tensor(EOS["eos_token_id"])).any(1)  # [B]
    return by_row(0, input_ids, scores).masked_fill(ended[:, None], -torch.inf)


def by_call(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores + 6.0 * (torch.arange(scores.shape[1]) == (5 * call) % 64)


def grammar() -> Processor:
    """An automaton for each row, which advances by the newest token at each call, as grammar libraries have it."""
    states: list[int] = []

    def advance(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
        newest = input_ids[:, -1].tolist()
        states[:] = [3 * s + t for s, t in zip(states, newest, strict=True)] if states else range(len(newest))
        only = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(states):
            only[row, [3 + (state + 7 * i) % 61 for i in range(20)]] = 0
        return scores + only

    return Processor(advance)


def patience(call: int, input_ids: Tensor, scores: Any) -> Tensor:
    """Ends each row after calls of its own number."""
    return call >= 3 + 2 * torch.arange(len(input_ids))


def ranked(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Rounds as the dtype of `scores` does."""
    return scores - scores.mean() + (torch.arange(scores.shape[1]) % 7).to(scores.dtype)


def by_prefix(function: Callable[[int, Tensor, Any], Any]) -> Processor:
    processor = Processor(function)
    processor.prefix_only = True  # type: ignore[attr-defined]
    return processor


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "counting": lambda: dict(logits_processor=[Processor(by_call)]),
    "grammar": lambda: dict(logits_processor=[grammar()]),
    "subclass": lambda: dict(logits_processor=[Seldom(9)]),
    "function": lambda: dict(logits_processor=[by_function]),
    "between others": lambda: dict(
        logits_processor=[Processor(by_call), Processor(by_row)], repetition_penalty=1.3, min_new_tokens=5),
    "other dtypes": lambda: dict(logits_processor=[Processor(lambda *args: args[2].bfloat16()), Processor(ranked)]),
    "another dtype by prefix": lambda: dict(logits_processor=[by_prefix(lambda *args: ranked(*args).half())]),
    "fewer words": lambda: dict(logits_processor=[Processor(lambda *args: args[2][:, :40])]),
    "fewer words by prefix": lambda: dict(logits_processor=[by_prefix(lambda *args: args[2][:, :40])]),
    "watermark": lambda: dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])),
    "criterion": lambda: dict(stopping_criteria=[Criterion(patience)]),
    "criterion for all": lambda: dict(stopping_criteria=[Criterion(lambda call, *_: call == 7)]),
    "criterion of a subclass": lambda: dict(stopping_criteria=[OddEos([*range(3, 20)])]),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([6, 1, 9, 4, WIDTH]))


GREEDY = EOS | dict(do_sample=False, max_new_tokens=20, pad_token_id=0)


@pytest.fixture(scope="module")
def plain(tiny: PreTrainedModel, prompts: Prompts) -> list[list[int]]:
    return tiny.generate(**prompts, **GREEDY).tolist()


@pytest.mark.parametrize(
    ("strategy", "kind"), [("ngram", kind) for kind in KINDS] + [("self", "grammar"), ("none", "criterion")]
)
def test_greedy_equals_transformers(
    strategy: str, kind: str, tiny: PreTrainedModel, prompts: Prompts, plain: list[list[int]]
) -> None:
    expected = tiny.generate(**prompts, **GREEDY, **KINDS[kind]()).tolist()
    result = generate(tiny, prompts, strategy, **GREEDY, **KINDS[kind]())
    assert result.sequences.tolist() == expected != plain
    assert (result.statistics.total.drafted > 0) == (strategy != "none")
    assert result.statistics.tokens == int(result.lengths.sum())


# ---- what is shown --------------------------------------------------------------------------------------------------


class Shown:
    """Two processors, two criteria and a streamer, which write down what they are shown, in one list. The criteria end
    row `n` at step `n + 2`, or never."""

    def __init__(self, streams: bool, ends: bool = True) -> None:
        self.calls: list[Any] = []
        self.scores: list[Tensor] = []
        names = "first", "second"
        self.options: dict[str, Any] = dict(
            logits_processor=[Processor(partial(self._look, name)) for name in names],
            stopping_criteria=[Criterion(partial(self._stop, name, ends)) for name in names],
        )
        if streams:
            self.options["streamer"] = streamer = BaseStreamer()
            streamer.put = lambda value: self.calls.append((value.shape, value.dtype, value.tolist()))
            streamer.end = lambda: self.calls.append("end")

    def _look(self, name: str, call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((name, input_ids.dtype, input_ids.tolist(), scores.dtype, scores.shape))
        self.scores.append(scores.clone())
        return scores.mul_(1.5)  # in place, as some do

    def _stop(self, name: str, ends: bool, call: int, input_ids: Tensor, scores: Any) -> Tensor:
        self.calls.append((name, input_ids.dtype, input_ids.tolist(), scores))
        return ends & (name == "second") & (torch.arange(len(input_ids)) + 2 == call)

    def check(self, other: "Shown") -> None:
        assert self.calls == other.calls
        torch.testing.assert_close(self.scores, other.scores, rtol=1e-4, atol=1e-4)


NEW = 12
# Rows, whether they have an EOS, and copies of each.
BATCHES = {"one row": (1, EOS, 1), "rows": (5, EOS, 1), "copies without EOS": (5, {}, 2)}
Batch = tuple[Prompts, dict[str, Any], Shown, list[list[int]]]


@pytest.fixture(scope="module")
def batches(tiny: PreTrainedModel, prompts: Prompts) -> dict[str, Batch]:
    """By name: prompts, options, and what `generate` shows and writes. The caller's padding is of his own."""
    own = prompts | dict(input_ids=torch.where(prompts["attention_mask"] == 0, 60, prompts["input_ids"]))
    found: dict[str, Batch] = {}
    for name, (count, eos, copies) in BATCHES.items():
        some = {key: value[-count:] for key, value in own.items()}
        options = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None) | eos
        if copies > 1:  # transformers has copies in sampling only, and always the same ones there at top_k=1
            options |= dict(do_sample=True, top_k=1, num_return_sequences=copies)
        shown = Shown(streams=count == 1, ends=count > 1)
        sequences = tiny.generate(**some, **options, **shown.options)
        found[name] = some, options, shown, sequences.tolist()
    return found


def answers_of(sequences: list[list[int]]) -> list[list[int]]:
    return [row[WIDTH:] for row in sequences]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("who", ["none", "knowing", *DRAFTERS, "any plan", "planner"])
def test_it_is_shown_what_generate_shows(
    who: str, batch: str, tiny: PreTrainedModel, batches: dict[str, Batch], drafters: Make
) -> None:
    """Call by call: ended rows too, which go on with padding where there is an EOS, and the caller's own padding."""
    prompts, options, theirs, expected = batches[batch]
    if batch == "copies without EOS" and who not in ("none", "knowing", "self", "ngram", "planner"):
        pytest.skip("they draft as for other rows")
    knowing = Knowing(answers_of(expected), seed=1)
    members = {"none": [], "knowing": [knowing], "any plan": drafters()}
    members["planner"] = [*drafters("self", "ngram"), knowing]
    drafter = members[who] if who in members else drafters(who)
    if who in ("any plan", "planner"):
        options = options | dict(control=random_plans(len(drafter)) if who == "any plan" else Planned(drafter))
    ours = Shown(streams="streamer" in theirs.options, ends=batch != "one row")
    result = generate(tiny, prompts, "none" if who == "none" else "self", drafter=drafter, **options, **ours.options)
    ours.check(theirs)
    statistics = result.statistics
    assert statistics.drafter_failure is None
    # Rows that have ended go on in what generate returns, and are padded here.
    of_rows = zip(expected, result.sequences.tolist(), result.lengths.tolist(), strict=True)
    assert all(their[: WIDTH + length] == our[: WIDTH + length] for their, our, length in of_rows)
    assert (statistics.total.drafted > 0) == (who != "none")
    if who in ("knowing", "any plan", "planner"):
        assert statistics.total.accepted > 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_of_layers_with_states(family: str) -> None:
    """Their states go back to the last token that was shown."""
    model, rows = make(family), random_rows([5, 3, 9], make(family).config.vocab_size)
    prompts, options = pad_left(rows), dict(do_sample=False, max_new_tokens=16, pad_token_id=0, eos_token_id=None)
    theirs, ours = Shown(streams=False, ends=False), Shown(streams=False, ends=False)
    sequences = model.generate(**prompts, **options, **theirs.options)
    drafter = Knowing([row[9:] for row in sequences.tolist()], seed=2)
    result = generate(model, prompts, "self", drafter=drafter, **options, **ours.options)
    assert ours.calls == theirs.calls
    assert result.statistics.total.accepted > 3 and result.statistics.drafter_failure is None


@pytest.mark.parametrize("kind", ["grammar", "between others", "criterion"])
@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_sampled_tokens_are_those_of_none(
    verification: str, kind: str, tiny: PreTrainedModel, prompts: Prompts, drafters: Make
) -> None:
    """With rejection too: in step, drafts are verified by equality, whatever they were drawn from."""
    config = {"verification": verification}
    plain, drafted = (
        generate(tiny, prompts, "none", config, drafter=drafter, **EOS, **KINDS[kind]())
        for drafter in ([], drafters("self"))
    )
    assert outputs(drafted) == outputs(plain) and drafted.logprobs.equal(plain.logprobs)
    assert drafted.statistics.total.accepted > 0 == plain.statistics.total.drafted


def test_a_grammar_sees_no_token_that_it_forbids(tiny: PreTrainedModel, prompts: Prompts, drafters: Make) -> None:
    """An automaton that accepts the newest token when it is called next, and knows no other text: one draft shown too
    many raises. An error of its own comes out as from generate."""

    def automaton(most: int) -> Processor:
        allowed: list[set[int]] = []

        def advance(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
            newest = input_ids[:, -1].tolist()
            if not all(token in each for token, each in zip(newest, allowed or [set(newest)] * 5, strict=True)):
                raise KeyError("a token that was not allowed")
            if call > most:
                raise RuntimeError("the text is too long")
            allowed[:] = [{3 + (7 * call + 5 * row + n) % 61 for n in range(9)} for row in range(len(scores))]
            only = torch.full_like(scores, -torch.inf)
            for row, each in enumerate(allowed):
                only[row, list(each)] = 0
            return scores + only

        return Processor(advance)

    options = dict(do_sample=False, max_new_tokens=20, pad_token_id=0, eos_token_id=None)
    expected = tiny.generate(**prompts, **options, logits_processor=[automaton(99)]).tolist()
    for drafter in (Knowing(answers_of(expected), seed=3), *drafters("self", "ngram")):
        result = generate(tiny, prompts, "self", drafter=drafter, **options, logits_processor=[automaton(99)])
        assert result.sequences.tolist() == expected and result.statistics.total.drafted > 0
    with pytest.raises(RuntimeError, match="the text is too long"):
        generate(tiny, prompts, "ngram", **options, logits_processor=[automaton(9)])


@pytest.mark.parametrize("trouble", ["throws", "NaN lengths", "ragged lengths", "negative ids", "logits of NaN"])
def test_bad_drafts_change_nothing(trouble: str, tiny: PreTrainedModel, batches: dict[str, Batch]) -> None:
    prompts, options, theirs, expected = batches["rows"]
    ours, drafter = Shown(streams=False), Knowing(answers_of(expected), seed=4)
    fault = Fault(0, "propose", 2, trouble)
    assert not fault.put_into(drafter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = generate(tiny, prompts, "self", drafter=drafter, **options, **ours.options)
    ours.check(theirs)
    assert bool(result.statistics.drafter_failure) == fault.is_fatal


@pytest.mark.parametrize(
    ("who", "config"),
    [
        ("self", {"specactor": {"decoupled_execution": "always"}}), ("self", {"runner": "graph"}),
        ("mtp", {"runner": "graph"}),
    ],
)
def test_who_drafts_ahead_or_in_captured_forwards(
    who: str, config: dict[str, Any], tiny: PreTrainedModel, batches: dict[str, Batch], drafters: Make, tape: Tape
) -> None:
    prompts, options, theirs, _ = batches["rows"]
    for _ in range(2 if "runner" in config else 1):  # captured, then kept
        ours, (drafter,) = Shown(streams=False), drafters(who)
        result = generate(tiny, prompts, "self", config, drafter=drafter, **options, **ours.options)
        ours.check(theirs)
        assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    release(tiny)


def test_a_draft_counts_as_far_as_it_was_looked_at(tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Rows commit what the row with least agreement does; its mismatch is no other row's. Ended rows draft nothing."""
    options = EOS | dict(do_sample=False, max_new_tokens=NEW, pad_token_id=9, stopping_criteria=[Criterion(patience)])
    answers = outputs(generate(tiny, prompts, **options))
    options["stopping_criteria"] = [Criterion(patience)]
    drafter, control = Knowing(answers, seed=5), Plans(1, [[Chain(0, 3)]])
    result = generate(tiny, prompts, "self", drafter=drafter, control=control, **options)
    assert outputs(result) == answers
    done, total, in_rounds = 1, [0, 0, 0], 0
    for round_, right in zip(control.rounds, drafter.right, strict=False):
        going = {n for n, answer in enumerate(answers) if len(answer) > done}
        assert {request for request in round_["requests"] if request >= 0} == going
        most = min([len(answers[n]) - done for n in going] + [round_["width"] + 1])  # until some row ends
        steps = min(min(right[n] for n in going) + 1, most)
        assert round_["tokens"] == steps * len(going)
        for request, accepted, drafted in zip(
            round_["requests"], round_["accepted"][0], round_["drafted"][0], strict=True
        ):
            if request < 0:
                assert accepted == drafted == -1 or accepted == drafted == 0
                continue
            assert drafted == min(steps, round_["width"]) and accepted == min(right[request], drafted)
            total = [total[0] + drafted, total[1] + accepted, total[2] + 1]
        done, in_rounds = done + steps, in_rounds + round_["tokens"]
    counts = result.statistics.total
    assert [counts.drafted, counts.accepted, counts.blocks] == total and total[1] > 5
    assert counts.committed == in_rounds == result.statistics.tokens - 5


def test_statistics_know_when_each_row_ended(tiny: PreTrainedModel, prompts: Prompts) -> None:
    result = generate(tiny, prompts, **KINDS["criterion"](), **EOS, do_sample=False)
    statistics, ended = result.statistics, result.statistics.ended_in
    assert ended == (result.lengths - 1).tolist() and len(set(ended)) > 2
    done = [sum(end <= step for end in ended) for step in sorted(set(ended))]
    assert [count for _, count in statistics.completion_curve] == done
    assert statistics.target_forwards == int(result.lengths.max()), "a prefill, and one for each further step"
    (point,) = statistics.points
    assert point.tokens == statistics.tokens - 5 == sum(ended) and point.batch == 5
    assert point.length == prompts["attention_mask"].sum() / 5 + (max(ended) + 1) / 2, "ended rows are rows"


@pytest.mark.parametrize(
    "options", [{"logits_processor": [Processor(by_call)]}, {"stopping_criteria": [Criterion(patience)]}]
)
def test_all_rows_must_run_at_once(options: dict[str, Any], tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match="(Processor|Criterion).* with max_batch_size=2 for 5 .*prefix_only"):
        generate(tiny, prompts, "ngram", {"max_batch_size": 2}, **options)
