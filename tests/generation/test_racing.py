"""Several drafters in one round: which chain a row goes on with is a matter of time alone."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.generation import graphs
from spec_trl.generation.attention import MaskPlan
from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.base import Drafter, DraftSession
from spec_trl.generation.drafters.checkpoints import read_checkpoint
from spec_trl.generation.drafters.distillation import DistilledDrafter
from spec_trl.generation.drafters.self_draft import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.racing import Lanes, draft_lengths
from spec_trl.generation.rows import Request, Rows
from spec_trl.generation.sampling import RoundNoise
from spec_trl.generation.verification import Proposal
from spec_trl.scheduling.toggle import AlwaysSpeculate, Candidate, Chain, NeverSpeculate, OneDrafter, Tally
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters import eagle3_reference
from tests.generation.tape import Tape
from tests.generation.test_families import build


ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])
EOS = dict(eos_token_id=[7, 11])
EAGLE3 = eagle3_reference.safeai(vocab_size=64, draft_vocab_size=64)


class RandomPlans:
    """Up to `chains` chains of random drafters, γ and rows in each round; now and then none.

    Args:
        count: of drafters.
        seed: of the plans.
        chains: at most, in one round.
        longest: γ.
    """

    races = True

    def __init__(self, count: int, seed: int = 0, chains: int = 4, longest: int = 4) -> None:
        self.candidates = [Candidate(f"c{i}", longest, 1.0, 1 << 30) for i in range(count)]
        self.tallies = [Tally() for _ in self.candidates]
        self._chains, self._longest, self._seed = chains, longest, seed

    @property
    def most_drafted(self) -> int:
        return self._chains * self._longest

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._random = random.Random(self._seed)
        self._alive = set(range(len(self.candidates)))
        self.rounds: list[dict[str, Any]] = []

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        count = self._random.randint(0, min(self._chains, len(self._alive)))
        plan = []
        for which in self._random.sample(sorted(self._alive), count):
            some = self._random.sample(range(len(requests)), self._random.randint(1, len(requests)))
            plan.append(Chain(which, self._random.randint(1, self._longest), self._random.choice([None, tuple(some)])))
        self.rounds.append({"requests": list(requests), "plan": plan, "accepted": {}, "drafted": {}})
        return plan

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        assert list(requests) == self.rounds[-1]["requests"]
        self.rounds[-1] |= {"accepted": dict(accepted), "drafted": dict(drafted)}

    def record(self, draft_length: int, seconds: float, tokens: int) -> None:
        self.rounds[-1] |= {"width": draft_length, "tokens": tokens}

    def drop(self, index: int) -> None:
        self._alive.discard(index)

    def finish(self) -> None: ...


class Knowing(Drafter):
    """Knows what will be sampled, and says it right for a random number of tokens."""

    has_probabilities = False

    def __init__(self, answers: list[list[int]], seed: int, name: str = "custom") -> None:
        self.answers, self.random, self.strategy = answers, random.Random(seed), name
        self.right: list[dict[int, int]] = []  # by round and request

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        self.right.append({})
        drafts = []
        for request, done in zip(rows.indices, rows.generated.tolist(), strict=True):
            answer = (self.answers[request][done : done + draft_length] + [0] * draft_length)[:draft_length]
            right = self.random.randint(0, draft_length)
            drafts.append(answer[:right] + [(token + 1) % 64 for token in answer[right:]])
            self.right[-1][request] = right
        return Proposal(torch.tensor(drafts), torch.full_like(rows.lengths, draft_length))


def raced(control: RandomPlans) -> int:
    """Rounds in which some row had several chains."""
    return sum(
        any(sum(own[row] >= 0 for own in each["accepted"].values()) > 1 for row in range(len(each["requests"])))
        for each in control.rounds
    )


# ---- losslessness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "capacity", "options"),
    [
        (0, None, {}),
        (1, 3, EOS),
        (2, 3, dict(do_sample=False, **EOS)),
        (3, None, dict(repetition_penalty=1.3, temperature=0.8, top_p=0.95, **EOS)),
        (4, 2, dict(no_repeat_ngram_size=3, do_sample=False)),
    ],
)
def test_any_mixture_keeps_the_tokens(
    seed: int, capacity: int | None, options: dict[str, Any], tiny, drafters
) -> None:
    members = drafters()
    control = RandomPlans(len(members), seed)
    config = {"max_batch_size": capacity}
    result = generate(tiny, PROMPTS, config=config, drafter=members, control=control, max_new_tokens=30, **options)
    none = generate(tiny, PROMPTS, max_new_tokens=30, **options)
    assert outputs(result) == outputs(none)
    torch.testing.assert_close(result.logprobs, none.logprobs, rtol=0, atol=1e-6)
    statistics = result.statistics
    assert statistics.drafter_failure is None
    assert raced(control) == statistics.racing.rounds > 2
    assert {name for name, counts in statistics.per_drafter.items() if counts.drafted} >= {"self", "model", "eagle3"}


@pytest.mark.parametrize(
    "family", ["llama", "mistral with window", "gemma3_text", "llama4_text", "gpt2", "deepseek_v3", "gemma2"]
)
def test_families(family: str) -> None:
    """Windows and chunks go by position: long accepted chains cross the borders of both, wherever they lie."""
    model = build(family)
    prompts = pad_left(random_rows([3, 11, 7, 1]))
    expected = generate(model, prompts, max_new_tokens=20)
    members = [Knowing(outputs(expected), seed, f"k{seed}") for seed in range(4)]
    control = RandomPlans(4, 1)
    result = generate(model, prompts, drafter=members, control=control, max_new_tokens=20)
    assert outputs(result) == outputs(expected)
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert raced(control) > 2 and result.statistics.total.accepted > 20


def test_captured_forwards(tiny, drafters, monkeypatch) -> None:
    """Rounds with one chain per row are replayed, races run eagerly, and all drafters find their own runner again."""
    tape = Tape()
    names = "self", "model", "eagle3", "tts"
    expected = generate(tiny, PROMPTS, drafter=drafters(*names), control=RandomPlans(4, 5), max_new_tokens=60)
    graphs.release(tiny)
    monkeypatch.setattr(graphs, "recorder_for", lambda device: tape)
    members = drafters(*names)
    for recorded in (10**9, 40):
        before = tape.recorded
        result = generate(
            tiny, PROMPTS, config={"runner": "graph"}, drafter=members, control=RandomPlans(4, 5), max_new_tokens=60
        )
        assert outputs(result) == outputs(expected)
        assert result.statistics.per_drafter["eagle3"] == expected.statistics.per_drafter["eagle3"]
        assert tape.recorded - before < recorded
    assert tape.replayed > 40
    graphs.release(tiny)


def test_rejection_verification_is_not_raced(tiny, drafters, monkeypatch) -> None:
    members = drafters("self", "model")
    config = {"verification": "rejection"}
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match='verification="rejection" cannot be raced'):
        generate(tiny, PROMPTS, config=config, drafter=members, control=RandomPlans(2))


def test_rejection_verification_of_rows_with_different_drafters(tiny, drafters) -> None:
    """One chain per row is no race: each row's coins are tossed for the drafter that it had."""

    class Halves(OneDrafter):
        candidates = [Candidate("self", 4, 4.0, 100), Candidate("model", 2, 4.0, 100)]
        tallies = [Tally(), Tally()]

        def begin(self, capacity: int, prompts: Sequence[str]) -> None: ...

        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]: ...

        def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
            odd = tuple(row for row, request in enumerate(requests) if request % 2)
            even = tuple(row for row, request in enumerate(requests) if not request % 2)
            return (Chain(0, 4, odd), Chain(1, 2, even))

        def record(self, draft_length: int, seconds: float, tokens: int) -> None: ...

        def drop(self, index: int) -> None: ...

    config = {"verification": "rejection"}
    result = generate(tiny, PROMPTS, config=config, drafter=drafters("self", "model"), control=Halves())
    assert result.statistics.drafter_failure is None and result.lengths.tolist() == [24] * 7
    counts = result.statistics.per_drafter
    assert counts["self"].acceptance_rate > 0.3 < counts["model"].acceptance_rate
    assert result.statistics.racing is None
    assert {point.drafter for point in result.statistics.points if point.batch == 7} == {"self+model"}


# ---- who wins -----------------------------------------------------------------------------------------------------


def test_the_longest_accepted_chain_wins(tiny) -> None:
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    control = RandomPlans(4, 2)
    result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=40)
    assert outputs(result) == expected
    asked = [iter(member.right) for member in members]
    wins = [dict.fromkeys([f"k{i}" for i in range(4)], 0) for _ in range(7)]
    wasted = dict.fromkeys(wins[0], 0)
    done = [0] * 7
    for each in control.rounds:
        accepted, drafted = each["accepted"], each["drafted"]
        right = {which: next(asked[which]) for which in accepted}
        total = 0
        for row, request in enumerate(each["requests"]):
            room = 40 - done[request]
            chains: dict[int, int] = {}
            for chain in each["plan"]:
                if chain.rows is None or row in chain.rows:
                    chains[chain.which] = min(chain.draft_length, room - 1)
            assert {which for which in accepted if accepted[which][row] >= 0} == {
                w for w, n in chains.items() if n
            } | {which for which in accepted if which in chains}
            for which, length in chains.items():
                if which in accepted:
                    assert accepted[which][row] == min(right[which][request], length), "its own chain, and no other's"
                    assert drafted[which][row] == length
            found = {which: accepted[which][row] for which in chains if which in accepted}
            best = max(found, key=found.__getitem__, default=None)  # the first of the largest
            if len(found) > 1:
                wins[request][f"k{best}"] += 1
                for which, count in found.items():
                    wasted[f"k{which}"] += drafted[which][row] - (count if which == best else 0)
            kept = 1 + (0 if best is None else found[best])
            done[request] += kept
            total += kept
        assert each["tokens"] == total
    statistics = result.statistics
    assert done == [40] * 7
    assert statistics.racing.winners == wins
    assert statistics.racing.wasted == wasted
    chains = {name: statistics.racing.wins[name] + statistics.racing.losses[name] for name in wasted}
    assert all(
        0 < statistics.racing.wins[name] < count <= statistics.per_drafter[name].blocks
        for name, count in chains.items()
    )
    assert statistics.racing.wins == {name: sum(own[name] for own in wins) for name in wasted}
    assert max(statistics.ended_in) == statistics.rounds == len(control.rounds)
    for name, counts in statistics.per_drafter.items():
        which = int(name[1])
        heard = [each for each in control.rounds if which in each["accepted"]]
        pairs = [pair for each in heard for pair in zip(each["accepted"][which], each["drafted"][which], strict=True)]
        rows = [pair for pair in pairs if pair[0] >= 0]
        assert counts.accepted == sum(accepted for accepted, _ in rows)
        assert counts.drafted == sum(drafted for _, drafted in rows)
        assert counts.blocks == len(rows) and counts.committed == counts.accepted + counts.blocks


class Fixed(RandomPlans):
    """The same chains in every round."""

    def __init__(self, *plan: Chain) -> None:
        super().__init__(
            1 + max(chain.which for chain in plan), chains=len(plan), longest=max(c.draft_length for c in plan)
        )
        self._plan = plan

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        super().plan(requests, length, waiting)
        self.rounds[-1]["plan"] = list(self._plan)
        return self._plan


def test_a_race_needs_no_more_forwards_than_either(tiny, drafters) -> None:
    """Networks: whether they guess a token depends on nothing but its position, so who is ahead stays ahead."""
    prompts, options = pad_left(ROWS[:1]), dict(max_new_tokens=60)
    rounds = {}
    for plan in ([Chain(0, 3)], [Chain(1, 4)], [Chain(0, 3), Chain(1, 4)]):
        members = drafters("self", "model")
        result = generate(tiny, prompts, drafter=members, control=Fixed(*plan), **options)
        rounds[len(plan), plan[0].which] = result.statistics.rounds
    assert rounds[2, 0] < min(rounds[1, 0], rounds[1, 1])


# ---- what a race leaves behind ------------------------------------------------------------------------------------


class Spy(Drafter):
    """Never drafts, and looks: K/V and hidden states of the target, as long as all rows are there."""

    has_probabilities = False

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        rows = session.rows
        self.features = torch.full((rows.capacity, rows.columns, 3 * 64), torch.nan, dtype=torch.float64)
        session.target.listen([2, 0, 1], self.hear)
        self.on = True

    def hear(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        if self.on:
            self.features[torch.arange(first_row, first_row + len(positions))[:, None], positions] = features

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        raise NotImplementedError

    def observe(self, tokens: int) -> None:
        rows, layers = self.session.rows, self.session.target.cache.layers
        if rows.active == rows.capacity and self.on:
            self.lengths = rows.lengths.tolist()
            self.kept = torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers]).clone()
            self.seen = self.features.clone()

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        self.on = False


@pytest.mark.parametrize("seed", range(3))
def test_cache_and_hidden_states_are_those_of_a_plain_run(seed: int, tiny, drafters) -> None:
    options = dict(max_new_tokens=40)
    plain, spy = Spy(), Spy()
    expected = generate(tiny, PROMPTS, drafter=[plain], control=NeverSpeculate(), **options)
    members = [
        *drafters("self", "model", "eagle3", "ngram"),
        Knowing(outputs(expected), 1),
        Knowing(outputs(expected), 2),
    ]
    control = RandomPlans(6, seed, chains=5)
    result = generate(tiny, PROMPTS, drafter=[*members, spy], control=control, **options)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    assert raced(control) > 3 and min(spy.lengths) > 20
    for row, (ours, theirs) in enumerate(zip(spy.lengths, plain.lengths, strict=True)):
        count = min(ours, theirs) - 1
        kept, other = (each.kept[:, :, row, :, :count] for each in (spy, plain))  # [layers, 2, kv, count, d]
        torch.testing.assert_close(kept, other, rtol=0, atol=1e-9)
        # NaN: of a prompt that is there twice, nobody is told again.
        heard, told = spy.seen[row, :count], plain.seen[row, :count]  # [count, F]
        torch.testing.assert_close(heard, told, rtol=0, atol=1e-9, equal_nan=True)


# ---- drafters whose drafts were not taken -------------------------------------------------------------------------


@torch.no_grad()
def test_a_small_model_drafts_as_from_scratch(tiny, tiny_assistant, monkeypatch) -> None:
    """Greedy, so that a full forward over the committed text says what it should draft."""
    seen: list[tuple[Tensor, Tensor]] = []
    propose = SmallModelDrafter.propose

    def watch(self: SmallModelDrafter, draft_length: int, noise: RoundNoise | None) -> Proposal:
        proposal, rows = propose(self, draft_length, noise), self.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            seen.append((rows.tokens[row, :length].clone(), proposal.tokens[row].clone()))
        return proposal

    monkeypatch.setattr(SmallModelDrafter, "propose", watch)
    options = dict(do_sample=False, max_new_tokens=30)
    expected = outputs(generate(tiny, PROMPTS, **options))
    other = tiny_llama(seed=1)  # agrees with the target hardly ever: what it was fed is not what is committed
    members = [SmallModelDrafter(other, tiny), SmallModelDrafter(tiny_assistant, tiny), Knowing(expected, 0)]
    for seed in range(2):
        seen.clear()
        config = {"max_batch_size": 3}
        result = generate(
            tiny, PROMPTS, config=config, drafter=[members[seed], members[2]], control=RandomPlans(2, seed), **options
        )
        assert outputs(result) == expected
        assistant = (other, tiny_assistant)[seed]
        for committed, drafts in seen[::3]:
            logits = assistant(torch.cat([committed, drafts])[None]).logits[0]  # [n, V]
            assert logits[len(committed) - 1 : -1].argmax(-1).tolist() == drafts.tolist()


@torch.no_grad()
def test_eagle3_drafts_as_from_scratch(tiny, drafters, checkpoints) -> None:
    (drafter,) = drafters("eagle3")
    seen = eagle3_reference.watch(drafter)
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    members = [drafter, Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    config = {"max_batch_size": 3}
    result = generate(tiny, PROMPTS, config=config, drafter=members, control=RandomPlans(3, 1), max_new_tokens=30)
    assert outputs(result) == outputs(expected) and len(seen) > 20
    reference = eagle3_reference.Reference(EAGLE3, read_checkpoint(Path(checkpoints["eagle3"]))[1], tiny)
    for tokens, drafts, logits in seen[:: max(len(seen) // 12, 1)]:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-5)


def test_dflash_drafts_as_if_alone(tiny, drafters) -> None:
    """After any round a block depends on the committed text alone: what is drafted in a race is what is drafted when
    nothing else ever drafts, text by text."""
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    seen: dict[tuple[int, ...], list[int]] = {}

    def watched(collect: dict[tuple[int, ...], list[int]]) -> Drafter:
        (drafter,) = drafters("dflash")
        propose = drafter.propose

        def watch(draft_length: int, noise: RoundNoise | None) -> Proposal:
            proposal, rows = propose(draft_length, noise), drafter.session.rows
            for row, length in enumerate(rows.lengths.tolist()):
                text = (rows.indices[row], *rows.tokens[row, :length].tolist())
                collect[text] = proposal.tokens[row, : int(proposal.lengths[row])].tolist()
            return proposal

        drafter.propose = watch  # type: ignore[method-assign]
        return drafter

    generate(
        tiny,
        PROMPTS,
        drafter=watched(seen),
        control=AlwaysSpeculate(Candidate("dflash", 4, 1.0, 99)),
        max_new_tokens=30,
    )
    raced_: dict[tuple[int, ...], list[int]] = {}
    members = [watched(raced_), Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(3, 1), max_new_tokens=30)
    assert outputs(result) == outputs(expected)
    shared = [text for text in raced_ if text in seen]
    assert len(shared) > 15
    for text in shared:
        count = min(len(raced_[text]), len(seen[text]))
        assert raced_[text][:count] == seen[text][:count]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_learner_hears_of_its_own_chain(kind: str, tiny, drafters) -> None:
    """What the target would say to the committed text and its own drafts, whatever was drafted beside it."""
    (student,) = drafters(kind)
    checked = []

    class Comparing(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            rows = self.session.rows
            for row in verified.nonzero().flatten().tolist():
                text = rows.tokens[row, : int(rows.lengths[row])]
                drafts = self._proposal.tokens[row, : logits.shape[1] - 1]
                said = tiny(torch.cat([text, drafts])[None]).logits[0, len(text) - 1 :]  # [γ + 1, V]
                torch.testing.assert_close(logits[row], said, rtol=0, atol=1e-9)
                canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
                assert canvas.tokens_behind(0, len(drafts))[row].tolist() == drafts.tolist()
                checked.append(len(verified) - int(verified.sum()))

    learner = Comparing(student, Distillation(1e-3, scope="rollout"))
    expected = generate(tiny, PROMPTS, max_new_tokens=20)
    members = [learner, Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(3, 3), max_new_tokens=20)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    assert len(checked) > 10 and max(checked) > 0


# ---- drafters that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["throws", "form", "ids", "NaN", "NaN of its own"])
def test_a_drafter_that_fails_in_a_race_leaves_the_others(trouble: str, tiny, drafters, fresh) -> None:
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    (bad,) = drafters("self") if trouble != "NaN of its own" else [SmallModelDrafter(fresh, tiny)]
    if trouble == "NaN":  # into the shared cache
        next(iter(bad.quantized.layers.values())).packed.scales.fill_(torch.nan)
    elif trouble == "NaN of its own":
        fresh.lm_head.weight.data.fill_(torch.nan)
    else:
        propose, calls = bad.propose, []

        def broken(draft_length: int, noise: RoundNoise | None) -> Any:
            calls.append(1)
            proposal = propose(draft_length, noise)
            if len(calls) < 3:
                return proposal
            if trouble == "throws":
                raise KeyError("out of luck")
            if trouble == "form":
                return Proposal(proposal.tokens[:-1], proposal.lengths)
            return Proposal(proposal.tokens + 10**6, proposal.lengths)

        bad.propose = broken
    members = [Knowing(outputs(expected), 0, "k0"), bad, Knowing(outputs(expected), 1, "k1")]
    control = Fixed(Chain(0, 3), Chain(1, 4), Chain(2, 4))
    if trouble == "ids":
        result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=30)
    else:
        with pytest.warns(UserWarning, match="failed and is not used for the rest") as caught:
            result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=30)
        assert len(caught) == 1 and control._alive == {0, 2}
        assert set(control.rounds[-1]["accepted"]) <= {0, 2}
    assert outputs(result) == outputs(expected)
    racing = result.statistics.racing
    assert racing.rounds > 4 and racing.wins["k0"] and racing.wins["k1"]


# ---- layout and masks ---------------------------------------------------------------------------------------------


def test_layout_by_hand() -> None:
    rows = Rows(3, 40, torch.device("cpu"))
    rows.admit([Request(i, torch.arange(1, 4 + i), 30, i) for i in range(3)])  # lengths 3, 4, 5
    plan = [Chain(4, 2), Chain(7, 3, (1, 2)), Chain(4, 1, (0,)), Chain(9, 1, (1,))]
    lengths = draft_lengths(plan, 3)
    assert lengths == {4: [2, 2, 2], 7: [0, 3, 3], 9: [0, 1, 0]}
    drafted = {
        which: Proposal(10 * which + torch.arange(max(own)).expand(3, -1), torch.tensor([1, 2, 3]))
        for which, own in lengths.items()
    }
    lanes = Lanes.of(rows, lengths, drafted)
    layout = lanes.layout
    assert layout is not None and lanes.width == 6
    assert lanes.drafters.tolist() == [[4, 4, 4], [-1, 7, 7], [-1, 9, -1]]
    assert [p.lengths.tolist() for p in lanes.proposals] == [[1, 2, 2], [0, 2, 3], [0, 1, 0]]
    assert layout.tokens.tolist() == [
        [3, 40, 41, 3, 3, 3, 3],
        [4, 40, 41, 70, 71, 72, 90],
        [5, 40, 41, 70, 71, 72, 5],
    ]
    assert layout.columns.tolist() == [list(range(n - 1, n + 6)) for n in (3, 4, 5)]
    assert layout.positions.tolist() == [[2, 3, 4, 3, 4, 5, 6], [3, 4, 5, 4, 5, 6, 4], [4, 5, 6, 5, 6, 7, 5]]
    assert layout.slots[:, 1].tolist() == [[0, 1, 2, 3], [0, 3, 4, 5], [0, 6, 6, 6]]
    assert lanes.by_drafter([[0, 1, 2], [5, 3, 4], [5, 6, 5]]) == {4: [0, 1, 2], 7: [-1, 3, 4], 9: [-1, 6, -1]}


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        ("full_attention", lambda key, query: True),
        ("sliding_attention", lambda key, query: query - key < 3),
        ("chunked_attention", lambda key, query: key // 4 == query // 4),
    ],
)
def test_a_chain_sees_itself_and_what_is_committed(kind: str, sees: Callable[[int, int], bool]) -> None:
    """Rows of 6 and 3 committed tokens; chains of 3, 2 and 2, and of 1 and 4 and padding."""
    widths = [[3, 2, 2], [1, 4, 0]]
    lengths, width = [6, 3], 7
    columns = torch.tensor([list(range(n - 1, n + width)) for n in lengths])  # [B, W]
    owner = [[0, *(1 + c for c, n in enumerate(own) for _ in range(n))] for own in widths]
    owner = [each + [9] * (width + 1 - len(each)) for each in owner]
    positions = columns.clone()
    for row, n in enumerate(lengths):
        for slot in range(1, width + 1):
            positions[row, slot] = n + owner[row][:slot].count(owner[row][slot])
    mask = MaskPlan((kind,), False, 3, 4).build(positions, 16, torch.float64, columns)[:, 0] == 0  # [B, W, 16]
    for row, n in enumerate(lengths):
        for slot in range(width + 1):
            query = int(positions[row, slot])
            for column in range(16):
                behind = column - n + 1  # its slot
                if behind <= 0:
                    expected = sees(column, query)
                else:
                    own = behind <= slot and owner[row][behind] == owner[row][slot]
                    expected = own and sees(int(positions[row, behind]), query)
                assert bool(mask[row, slot, column]) == expected, (row, slot, column)
