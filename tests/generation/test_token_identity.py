"""The lossless contract: whatever drafts, however rounds are planned and whatever fails, tokens, lengths and logprobs
are those of plain decoding with the same seed, in float32 and bfloat16 bit for bit; and what is said of the rounds
agrees with them."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl import release
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import guarded_drafters
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.forwards import runner
from spec_trl.generation.engine.sampling import processors
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.filters import keep_top_p
from spec_trl.generation.engine.statistics import DraftCounts, SpeculationStatistics
from spec_trl.generation.planner.control import Chain
from spec_trl.native.native_code import compiler
from tests.conftest import SHORT_PROMPT, WIDE, add_noise, tiny_llama
from tests.generation import grammars
from tests.generation.calls import Alternate, EndByPrefix, generate, outputs, pad_left, plain_decoding, random_rows
from tests.generation.conftest import Make, maker, write_checkpoints
from tests.generation.engine.pools import install_pool
from tests.generation.engine.tape import install_tape
from tests.generation.grammars import WIDTH, EndsOnce, Trie, grammar
from tests.generation.races import Knowing, Planned, Plans, raced, random_plans


NEW = 24
ROWS = random_rows((5, 1, 9, 12, 3, 9))
ROWS += [ROWS[2]] * 2  # three copies of one prompt
Answers = list[tuple[list[int], list[float]]]
Targets = dict[str, tuple[LlamaForCausalLM, Make]]
# Dtypes of targets whose bits are compared; "autocast": float32 weights. Without a compiler attention reads masks.
EXACT = ["float32", "bfloat16", "autocast"] if compiler() else []


SAMPLING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "greedy": dict(do_sample=False),
    "filters": dict(temperature=0.7, top_k=20, top_p=0.9),
    "penalty": dict(repetition_penalty=1.3, temperature=0.8),
    "penalty and top-p": dict(repetition_penalty=1.3, top_p=0.9, min_new_tokens=7),
    "greedy n-grams": dict(do_sample=False, no_repeat_ngram_size=2),
    "least tokens": dict(min_new_tokens=7),
    "bad words": dict(bad_words_ids=[[44], [6, 56], [38, 45]]),
    "own processor": dict(logits_processor=[Alternate()]),
    "own criterion": dict(stopping_criteria=[EndByPrefix()]),
    "criterion that refuses": {},
    **{f"grammar as {kind}": {} for kind in grammars.KINDS},
}


def sampling_options(name: str, rows: Sequence[int], lenient: bool = False) -> tuple[Trie | None, dict[str, Any]]:
    """The options of one of `SAMPLING`, with its grammar if it is one; `lenient`: for `generate`'s own loop."""
    if name == "criterion that refuses":
        return None, dict(stopping_criteria=[EndsOnce(lenient)])
    if name.startswith("grammar"):
        return grammar(name.removeprefix("grammar as "), rows, lenient)
    return None, SAMPLING[name]


def spoiled(**parts: Callable[[Tensor], Any]) -> Callable[[Proposal], Any]:
    """What makes other tensors of a proposal's."""

    def spoil(proposal: Proposal) -> Proposal:
        proposal = replace(proposal, lengths=proposal.drafted())  # some drafters name none
        return replace(proposal, **{name: part(getattr(proposal, name)) for name, part in parts.items()})

    return spoil


def throw(_: Any) -> Any:
    raise KeyError("the drafter's own trouble")


# What may come of a drafter's method in place of what should.
HARMLESS: dict[str, Callable[[Proposal], Any]] = {
    "ids out of range": spoiled(tokens=lambda tokens: tokens + 64),
    "huge ids": spoiled(tokens=lambda tokens: tokens * 0 + 2**62),
    "negative ids": spoiled(tokens=lambda tokens: -1 - tokens),
    "an id out of range at the end": spoiled(tokens=lambda tokens: torch.cat([tokens[:, :-1], tokens[:, :1] + 64], 1)),
    "huge lengths": spoiled(lengths=lambda lengths: lengths + 1000),
    "negative lengths": spoiled(lengths=lambda lengths: -1 - lengths),
    "ragged lengths": spoiled(lengths=lambda lengths: torch.arange(len(lengths)) % (lengths + 1)),
}
FATAL: dict[str, Callable[[Any], Any]] = {
    "throws": throw,
    "too few tokens": spoiled(tokens=lambda tokens: tokens[:, 1:]),
    "too many rows": spoiled(tokens=lambda tokens: torch.cat([tokens, tokens])),
    "too few lengths": spoiled(lengths=lambda lengths: lengths[1:]),
    "NaN": spoiled(tokens=lambda tokens: tokens * torch.nan),
    "NaN lengths": spoiled(lengths=lambda lengths: lengths * torch.nan),
    "int32": spoiled(tokens=lambda tokens: tokens.int()),
    "a list": spoiled(tokens=lambda tokens: tokens.tolist()),
    "None": lambda _: None,
    "logits of NaN": spoiled(broken=lambda _: torch.tensor(True)),
}


# What may come of its network, which may then have written K/V in part, or broken ones.
OF_NETWORK = ("breaks off", "weights of NaN")


@dataclass(frozen=True)
class Fault:
    """What comes of the `nth` call of a drafter's `method`: `trouble`."""

    drafter: int
    method: str
    nth: int
    trouble: str

    @property
    def is_fatal(self) -> bool:
        return self.trouble not in HARMLESS

    def put_into(self, drafter: Drafter) -> list[int]:
        """Returns a list that has an entry once it has happened."""
        happened: list[int] = []
        if self.trouble in OF_NETWORK and not isinstance(drafter, SelfDrafter):
            return happened
        right, calls = getattr(drafter, self.method), itertools.count(1)

        def method(*arguments: Any) -> Any:
            if next(calls) != self.nth:
                return right(*arguments)
            happened.append(1)
            if self.trouble == "weights of NaN":
                next(iter(drafter.quantized.layers.values())).packed.scales.fill_(torch.nan)
            elif self.trouble == "breaks off":  # after two draft tokens
                forwards = itertools.count()
                drafter.network.register_forward_pre_hook(lambda *_: next(forwards) == 2 and throw(drafter) or None)
                if arguments[0] < 3:
                    throw(drafter)
            return (FATAL | HARMLESS).get(self.trouble, lambda made: made)(right(*arguments))

        setattr(drafter, self.method, method)
        return happened


@dataclass(frozen=True)
class Scenario:
    """One generation.

    Args:
        dtype: "float64", or of `EXACT`.
        rows: of `ROWS`, in the order of the batch; their places there are their request ids.
        split: the rows before it are one call, the others another.
        capacity: rows in flight at most.
        new_tokens: at most.
        sampling: of `SAMPLING`.
        eos: places (row, position) whose tokens, in a text without EOS, are the EOS ids.
        drafters: names; "right": knows what will be sampled, "half right": for a random number of tokens.
        rounds: the chains of each round, over and over; a chain's rows are every n-th one. None: a planner's choice.
        listened: draft tokens of each lookup that are compared with the text; 0: none.
        prefill: (queries, tokens) of one prefill forward at most.
        captured: forwards are captured and replayed, in a second call too.
        pages: columns of a page, where K/V lies in the pages of a pool; 0: it does where forwards are captured.
        fault: of one drafter.
    """

    dtype: str
    rows: tuple[int, ...]
    split: int
    capacity: int
    new_tokens: int
    sampling: str
    eos: tuple[tuple[int, int], ...]
    drafters: tuple[str, ...]
    rounds: tuple[tuple[Chain, ...], ...] | None
    listened: int
    prefill: tuple[int, int]
    captured: bool
    pages: int
    fault: Fault | None


LEARNING = [f"tts {kind} {how}" for kind in ("self", "model", "eagle3", "dflash")
            for how in ("request", "rollout", "rollout together", "request together")]  # fmt: skip
NAMES = ["right", "half right", "self", "model", "ngram", "history", "eagle3", "pruned", "dflash", "mtp", "tts"]
LOOKUPS = {"right", "half right", "ngram", "history"}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    rows = draw(st.permutations(range(len(ROWS))))[: draw(st.integers(1, len(ROWS)))]
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    names = [draw(st.sampled_from(LEARNING)) if name == "tts" else name for name in names]
    subsets = [None, None, *(tuple(range(first, len(rows), step)) for first, step in ((0, 2), (1, 2), (1, 3)))]
    chain = st.builds(Chain, st.integers(0, len(names) - 1), st.integers(1, 8), st.sampled_from(subsets))
    fault = None
    if draw(st.sampled_from([False, False, True])):
        method = draw(st.sampled_from(["propose"] * 4 + ["begin", "admit", "move", "observe", "end"]))
        trouble = draw(st.sampled_from([*FATAL, *HARMLESS, *OF_NETWORK * 2])) if method == "propose" else "throws"
        fault = Fault(draw(st.integers(0, len(names) - 1)), method, draw(st.integers(1, 3)), trouble)
    rounds = tuple(map(tuple, draw(st.lists(st.lists(chain, max_size=4), min_size=1, max_size=4))))
    plans = draw(st.sampled_from([None, rounds, rounds, rounds]))
    dtype = draw(st.sampled_from(["float64", "float64", *EXACT]))
    is_capturable = fault is None or fault.trouble not in OF_NETWORK  # what is not says so in a warning of its own
    is_capturable = is_capturable and dtype == "float64"  # a tape hears torch alone, whose sums are not exact
    return Scenario(
        dtype=dtype,
        rows=tuple(rows),
        split=draw(st.sampled_from([0, 0, len(rows) // 2])),
        capacity=draw(st.integers(1, len(ROWS))),
        new_tokens=draw(st.sampled_from([NEW, NEW, NEW, 1, 2, 3, 6, 7])),
        sampling=draw(st.sampled_from([*SAMPLING])),
        eos=tuple(draw(st.lists(st.tuples(st.integers(0, len(ROWS) - 1), st.integers(0, NEW - 1)), max_size=3))),
        drafters=tuple(names),
        rounds=plans,
        listened=draw(st.sampled_from([0, 1, 3, 6])),
        prefill=draw(st.sampled_from([(1024, 8192), (1024, 8192), (4, 8), (5, 1000), (1, 1)])),
        captured=is_capturable and plans is not None and draw(st.sampled_from([False, False, False, True])),
        # Pools are GPUs'. On a CPU C++ computes whole layers under autocast, over K/V in rows.
        pages=draw(st.sampled_from([0, 4, 4, 8] if dtype != "autocast" else [0])),
        fault=fault,
    )


@pytest.fixture(scope="module", autouse=True)
def kinds_of_prompts() -> Iterator[None]:
    """Some prompts are short, and some are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_trl.generation.engine.rows.SHORT_PROMPT", SHORT_PROMPT)
        yield


@pytest.fixture(scope="module")
def targets(tiny, drafters, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """A target in each dtype, and what makes drafters for it."""
    found = {"float64": (tiny, drafters)}
    heads = dict(num_attention_heads=2)  # of 96, which attention reads in blocks of 32 columns: rows are longer
    folders = write_checkpoints(tmp_path_factory.mktemp("wide"), **WIDE | heads)
    for name in EXACT:
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        model, assistant = (tiny_llama(**WIDE | heads).to(dtype) for _ in range(2))
        found[name] = model, maker(model, add_noise(assistant), folders)
    return found


def autocast_of(dtype: str) -> torch.autocast:
    """In which a target of this dtype generates."""
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast")


@pytest.fixture(scope="module")
def plain(targets: Targets) -> Callable[..., tuple[Answers, list[int]]]:
    """Tokens and logprobs of all `ROWS`, and the EOS ids that end them: by :func:`plain_decoding`, or in `EXACT`,
    whose bits that has not, by "none"."""

    @functools.cache
    def decode(dtype: str, sampling: str, eos: tuple[int, ...]) -> Answers:
        model, _ = targets[dtype]
        options = dict(do_sample=True, top_k=0, max_new_tokens=NEW, pad_token_id=0, eos_token_id=list(eos) or None)
        _, own = sampling_options(sampling, range(len(ROWS)), lenient=dtype == "float64")
        if dtype == "float64":
            found = model.generate(**pad_left(ROWS, WIDTH), custom_generate=plain_decoding, **(options | own))
            return list(zip(*found, strict=True))
        with autocast_of(dtype):
            result = generate(model, pad_left(ROWS, WIDTH), **(options | own))
        assert result.statistics.exact is True
        texts = outputs(result)
        return [(text, own[: len(text)]) for text, own in zip(texts, result.logprobs.tolist(), strict=True)]

    def find(
        sampling: str, places: tuple[tuple[int, int], ...], dtype: str = "float64"
    ) -> tuple[Answers, list[int]]:
        always = {grammars.EOS} if sampling.startswith("grammar") else set()
        answers = decode(dtype, sampling, tuple(always))
        texts = [tokens for tokens, _ in answers]
        eos = sorted(always | {texts[row][min(position, len(texts[row]) - 1)] for row, position in places})
        if "min_new_tokens" in SAMPLING[sampling]:  # else a text is the same up to its first EOS
            return decode(dtype, sampling, tuple(eos)), eos
        ends = [next((end for end, token in enumerate(text, 1) if token in eos), len(text)) for text in texts]
        return [(text[:end], own[:end]) for (text, own), end in zip(answers, ends, strict=True)], eos

    return find


@settings(
    deadline=None, max_examples=140, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate], report_multiple_bugs=False,  # a scenario is short enough without minutes of shrinking
)  # fmt: skip
@given(scenario=scenarios())
def test_tokens_are_those_of_plain_decoding(scenario: Scenario, targets: Targets, plain) -> None:
    answers, eos = plain(scenario.sampling, scenario.eos, scenario.dtype)
    model, make = targets[scenario.dtype]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "QUERIES_PER_FORWARD", scenario.prefill[0])
        patch.setattr(runner, "TOKENS_PER_FORWARD", scenario.prefill[1])
        patch.setattr(guarded_drafters, "SHARE", 1e9)  # however long lookups take, they draft
        patch.setattr(processors, "keep_top_p", functools.partial(keep_top_p, count=2))  # of a small vocabulary
        if scenario.captured:
            release(model)
            install_tape(patch)
        if scenario.pages:
            install_pool(patch, scenario.pages)
        for part in (scenario.rows[: scenario.split], scenario.rows[scenario.split :]):
            for _ in range(1 + scenario.captured if part else 0):
                check(scenario, part, [answers[row] for row in part], eos, model, make)


@pytest.mark.parametrize("capacity", [3, 8])  # rows that end give way to others, or not
@pytest.mark.parametrize("sampling", ["greedy", "softmax"])
@pytest.mark.parametrize("rounds", [None, random_plans(5).planned])
def test_controls_that_listen(
    rounds: Any, sampling: str, capacity: int, tiny, drafters: Make, plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_drafters, "SHARE", 1e9)
    answers, eos = plain(sampling, ((0, 9), (3, 20)))
    names = ("half right", "history", "self", "model", "ngram")
    scenario = Scenario(
        "float64", tuple(range(len(ROWS))), 0, capacity, NEW, sampling, ((0, 9), (3, 20)), names, rounds,
        listened=3, prefill=(1024, 8192), captured=False, pages=0, fault=None,
    )  # fmt: skip
    control = check(scenario, scenario.rows, answers, eos, tiny, drafters)
    assert {which for which, _ in control.heard} == {0, 1, 4}
    assert {right > 0 for _, right in control.heard} == {False, True}
    assert raced(control) or (rounds, sampling, capacity) == (None, "greedy", 3)  # no plan of these races


def check(
    scenario: Scenario, rows: Sequence[int], expected: Answers, eos: list[int], model: LlamaForCausalLM, make: Make
) -> Plans:
    """Generates `rows`, compares, and returns the control."""
    texts = [tokens for tokens, _ in expected]
    members = [
        Knowing(texts, None if name == "right" else seed) if name.endswith("right") else make(name)[0]
        for seed, name in enumerate(scenario.drafters)
    ]
    happened = scenario.fault.put_into(members[scenario.fault.drafter]) if scenario.fault else []
    lookups = [which for which, member in enumerate(members) if not member.has_probabilities]
    control = Plans(len(members), scenario.rounds) if scenario.rounds else Planned(members)
    control.compared_lookups, control.compared_length = lookups if scenario.listened else (), scenario.listened
    trie, options = sampling_options(scenario.sampling, rows)
    with warnings.catch_warnings(record=True) as warned, autocast_of(scenario.dtype):
        warnings.simplefilter("always")
        result = generate(
            model,
            pad_left([ROWS[row] for row in rows], WIDTH),
            config={"max_batch_size": scenario.capacity, "runner": "graph" if scenario.captured else "compiled"},
            drafter=members,
            control=control,
            request_ids=rows,
            max_new_tokens=scenario.new_tokens,
            eos_token_id=eos or None,
            **options,
        )
    if trie is not None:
        trie.check()
        if LOOKUPS.issuperset(scenario.drafters):  # the drafts of others are shown while they draw them
            starts = [tokens[:count] for tokens in texts for count in range(NEW + 1)]
            assert all(output in starts for _, output in trie.shown), "shown a draft that the target did not take"
    assert outputs(result) == [tokens[: scenario.new_tokens] for tokens in texts]
    is_exact = scenario.dtype in EXACT
    assert result.statistics.exact is (True if is_exact else None)
    for row, (_, logprobs) in enumerate(expected):
        own = torch.tensor(logprobs[: scenario.new_tokens])
        torch.testing.assert_close(result.logprobs[row, : len(own)], own, rtol=0, atol=0 if is_exact else 1e-5)
        assert not result.logprobs[row, len(own) :].any()
    statistics = result.statistics
    assert statistics.logprob_sum == pytest.approx(float(result.logprobs.double().sum()), rel=1e-6)
    check_rounds(control, statistics, result.lengths.tolist(), [member.strategy for member in members])
    for which, name in enumerate(scenario.drafters):
        if name == "right" and trie is None and not (scenario.fault and scenario.fault.drafter == which):
            assert all(each["accepted"].get(which) == each["drafted"].get(which) for each in control.rounds)
            assert {accepted for own, accepted in control.heard if own == which} <= {scenario.listened}
    failures = [str(warning.message) for warning in warned if "failed" in str(warning.message)]
    lost = {scenario.fault.drafter} if happened and scenario.fault and scenario.fault.is_fatal else set()
    assert len(failures) == bool(statistics.drafter_failure) == len(lost), failures
    assert control.alive == set(range(len(members))) - lost
    return control


def check_rounds(control: Plans, found: SpeculationStatistics, lengths: list[int], names: list[str]) -> None:
    """Statistics, and what the control was told, agree with the rounds that it planned and with one another.

    Args:
        control: knows what it planned.
        found: of the generation.
        lengths: of the outputs.
        names: of the drafters.
    """
    decoded = {request for each in control.rounds for request in each["requests"]}
    # Those that never were in a round ended with their first token, and nobody has seen when.
    done, ended = [int(request not in decoded) for request in range(len(lengths))], list(found.ended_in)
    changes = [[] if request in decoded else [(ended[request], list[str]())] for request in range(len(lengths))]
    for number, each in enumerate(control.rounds):
        for request in each["requests"]:  # which has its first token of its prompt
            done[request] = done[request] or 1
        before = sum(done)
        for row, request in enumerate(each["requests"]):
            longest = max([0, *(own[row] for own in each["accepted"].values())])
            done[request] = min(done[request] + 1 + longest, lengths[request])
            ended[request] = number + 1
            chains = [chain for chain in each["plan"] if chain.rows is None or row in chain.rows]
            own = list(dict.fromkeys(names[chain.drafter] for chain in chains if each["width"]))
            if not changes[request] or changes[request][-1][1] != own:
                changes[request].append((number, own))
        assert each["tokens"] == sum(done) - before
    assert done == lengths and found.tokens == sum(lengths)
    assert found.ended_in == ended and found.rounds == len(control.rounds)
    assert sum(point.tokens for point in found.points) == sum(each["tokens"] for each in control.rounds)
    assert sum(point.rounds for point in found.points) == found.rounds
    assert sum(found.per_depth.values(), DraftCounts()) == sum(found.per_request, DraftCounts()) == found.total
    assert 0 <= found.total.accepted <= found.total.drafted and found.total.committed <= found.tokens
    assert (found.best_of_n.rounds if found.best_of_n else 0) == raced(control)
    counts = [count for _, count in found.completion_curve]
    assert counts == sorted(set(counts)) and {sum(end <= step for end in ended) for step in ended} <= set(counts)
    assert [timeline.request for timeline in found.timeline] == list(range(len(lengths)))
    assert [[(number, own) for _, number, own in timeline.changes] for timeline in found.timeline] == changes
    assert {timeline.ended for timeline in found.timeline} == {second for second, _ in found.completion_curve}
    for timeline in found.timeline:
        seconds = [second for second, _, _ in timeline.changes] + [timeline.ended]
        assert seconds == sorted(seconds) and seconds[0] > 0
