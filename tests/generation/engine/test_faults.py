"""Whatever a drafter does, the tokens stay the same; a broken target says where it broke."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.rows import Admission
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


EOS = dict(eos_token_id=[7, 11, 12])


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Seven rows, two of them alike, for a batch of three: rows come, move and go."""
    rows = random_rows([5, 9, 1, 3, 12, 4])
    return pad_left([*rows, rows[3]])


@pytest.fixture(scope="module")
def expected(tiny: PreTrainedModel, prompts: Prompts) -> list[list[int]]:
    return outputs(generate(tiny, prompts, **EOS))


class Scripted(Drafter):
    """Proposes what `tokens` and `lengths` make of the batch size, γ and round."""

    has_probabilities = False

    def __init__(self, tokens: Callable[[int, int], Any], lengths: Callable[[int, int], Any] | None = None) -> None:
        self.tokens = tokens
        self.lengths = lengths or (lambda rows, draft_length: torch.full((rows,), draft_length))

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows.active
        return Proposal(self.tokens(rows, draft_length), self.lengths(rows, draft_length))


def noise(rows: int, draft_length: int) -> torch.Tensor:
    return torch.randint(64, (rows, draft_length))


# Bad content: legal to propose, and simply not accepted.
HARMLESS = {
    "noise": Scripted(noise),
    "ids out of range": Scripted(lambda rows, k: torch.full((rows, k), 64)),
    "huge ids": Scripted(lambda rows, k: torch.full((rows, k), 2**62)),
    "negative ids": Scripted(lambda rows, k: torch.full((rows, k), -1)),
    "some ids out of range": Scripted(lambda rows, k: noise(rows, k) * torch.randint(-1, 3, (rows, k))),
    "too long lengths": Scripted(noise, lambda rows, k: torch.full((rows,), k + 1000)),
    "negative lengths": Scripted(noise, lambda rows, k: torch.full((rows,), -3)),
    "nothing": Scripted(noise, lambda rows, k: torch.zeros(rows).long()),
    "ragged": Scripted(noise, lambda rows, k: torch.arange(rows) % (k + 1)),
}
# Bad form: the drafter is dropped.
FATAL = {
    "too few tokens": Scripted(lambda rows, k: noise(rows, k - 1)),
    "too many tokens": Scripted(lambda rows, k: noise(rows, k + 1)),
    "too few rows": Scripted(lambda rows, k: noise(rows, k)[:-1]),
    "one row": Scripted(lambda rows, k: noise(rows, k)[0]),
    "too few lengths": Scripted(noise, lambda rows, k: torch.full((rows - 1,), k)),
    "NaN": Scripted(lambda rows, k: torch.full((rows, k), torch.nan)),
    "NaN lengths": Scripted(noise, lambda rows, k: torch.full((rows,), torch.nan)),
    "int32": Scripted(lambda rows, k: noise(rows, k).int()),
    "a list": Scripted(lambda rows, k: [[1] * k] * rows),
    "None": Scripted(lambda rows, k: None),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.filterwarnings("error")
def test_bad_drafts_are_not_accepted(name: str, tiny, prompts, expected) -> None:
    result = generate(tiny, prompts, drafter=HARMLESS[name], config={"max_batch_size": 3, "draft_length": 4}, **EOS)
    assert outputs(result) == expected
    for counts in result.statistics.per_request:
        assert 0 <= counts.accepted <= counts.drafted
    assert result.statistics.total.accepted <= 0.3 * result.statistics.total.drafted
    if name in ("ids out of range", "huge ids", "negative ids"):
        assert result.statistics.total.drafted == 0, "no token of the vocabulary was proposed"


@pytest.mark.parametrize("name", FATAL)
def test_malformed_drafts_drop_the_drafter(name: str, tiny, prompts, expected) -> None:
    with pytest.warns(UserWarning, match="the drafter Scripted failed.*same tokens") as caught:
        result = generate(tiny, prompts, drafter=FATAL[name], config={"max_batch_size": 3, "draft_length": 4}, **EOS)
    assert len(caught) == 1
    assert outputs(result) == expected
    assert result.statistics.drafter_failure


class Perfect(Drafter):
    """Proposes what will be accepted, and raises when told to: in `method`, at its `nth` call."""

    has_probabilities = False

    def __init__(self, answers: list[list[int]], method: str, nth: int) -> None:
        self.answers, self.method, self.left = answers, method, nth

    def _count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise KeyError("the drafter's own trouble")

    def begin(self, session: DraftSession) -> None:
        self._count("begin")
        super().begin(session)

    def admit(self, admission: Admission) -> None:
        self._count("admit")

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        self._count("move")

    def observe(self, tokens: int) -> None:
        self._count("observe")

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self._count("propose")
        rows = self.session.rows
        drafts = [
            (self.answers[request][done : done + draft_length] + [0] * draft_length)[:draft_length]
            for request, done in zip(rows.requests.tolist(), rows.generated.tolist(), strict=True)
        ]
        return Proposal(torch.tensor(drafts), torch.full_like(rows.lengths, draft_length))


@pytest.mark.parametrize("method", ["begin", "admit", "move", "observe", "propose"])
@pytest.mark.parametrize("nth", [1, 2])
def test_exceptions_drop_the_drafter(method: str, nth: int, tiny, prompts, expected) -> None:
    drafter = Perfect(expected, method, nth)
    config = {"max_batch_size": 3, "draft_length": 2}
    if method == "begin" and nth == 2:  # a drafter that fails once may serve the next generation
        drafter.left = 0
        result = generate(tiny, prompts, drafter=drafter, config=config, **EOS)
        assert result.statistics.acceptance_rate > 0.8 and result.statistics.drafter_failure is None
    else:
        with pytest.warns(
            UserWarning, match="the drafter Perfect failed.*KeyError: .the drafter's own trouble"
        ) as caught:
            result = generate(tiny, prompts, drafter=drafter, config=config, **EOS)
        assert len(caught) == 1
        assert "KeyError" in result.statistics.drafter_failure
    assert outputs(result) == expected


@pytest.mark.parametrize("control", [AlwaysSpeculate, lambda candidate: SpeculationToggle([candidate])])
def test_a_drafter_that_cannot_begin_leaves_plain_rounds(control, tiny, prompts, expected) -> None:
    config = {"max_batch_size": 3, "draft_length": 2}
    deciding = control(Candidate("custom", 2, 2.0, 100))
    for _ in range(2):  # a control that has been in use, too
        with pytest.warns(UserWarning, match="the drafter Perfect failed"):
            result = generate(
                tiny, prompts, drafter=Perfect(expected, "begin", 1), config=config, control=deciding, **EOS
            )
        assert outputs(result) == expected
        assert result.statistics.speculating == [(0, 0)]


def test_ctrl_c_is_not_a_drafter_failure(tiny, prompts) -> None:
    class Interrupted(Scripted):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tiny, prompts, drafter=Interrupted(noise))


@pytest.mark.parametrize("logits", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", ["right", "wrong"])
def test_broken_draft_probabilities(shape: str, logits: float, tiny, prompts) -> None:
    """Under rejection verification; tokens may differ from "none", so the test is that the run goes on and ends."""

    class Broken(Scripted):
        has_probabilities = True

        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            proposal = super().propose(draft_length, noise)
            width = 64 if shape == "right" else 63
            return Proposal(proposal.tokens, proposal.lengths, torch.full((*proposal.tokens.shape, width), logits))

    config = {"verification": "rejection", "draft_length": 4}
    if shape == "right":
        result = generate(tiny, prompts, drafter=Broken(noise), config=config)
        assert result.statistics.total.accepted == 0
    else:
        with pytest.warns(UserWarning, match="the drafter Broken failed"):
            result = generate(tiny, prompts, drafter=Broken(noise), config=config)
    assert result.lengths.tolist() == [24] * 7
    assert torch.isfinite(result.logprobs).all()


# ---- The self-drafter, which writes into the target's cache ----------------------------------------------------


@pytest.mark.parametrize("poisoned", ["first layer", "last layer", "after some rounds"])
@pytest.mark.parametrize("max_batch_size", [None, 3])
def test_nan_in_packed_weights(max_batch_size, poisoned: str, tiny, prompts, expected, monkeypatch) -> None:
    """The twin's NaN reach the shared K/V cache; a masked column still meets a weight of 0, and 0 * NaN is NaN."""
    drafter = SelfDrafter(tiny, kernel="reference")
    layers = list(drafter.quantized.layers.values())

    def poison() -> None:
        layers[-1 if poisoned == "last layer" else 0].packed.scales.fill_(torch.nan)

    if poisoned == "after some rounds":
        rounds, propose = 0, SelfDrafter.propose

        def later(self: SelfDrafter, *args: Any) -> Proposal:
            nonlocal rounds
            rounds += 1
            if rounds == 3:
                poison()
            return propose(self, *args)

        monkeypatch.setattr(SelfDrafter, "propose", later)
    else:
        poison()
    with pytest.warns(UserWarning, match="the drafter SelfDrafter failed.*NaN") as caught:
        result = generate(tiny, prompts, drafter=drafter, config={"max_batch_size": max_batch_size}, **EOS)
    assert len(caught) == 1
    assert outputs(result) == expected


def test_a_drafter_that_breaks_off_half_way(tiny, prompts, expected, monkeypatch) -> None:
    """After two of five draft tokens are written, with K/V that nobody will ever verify as theirs."""
    drafter, calls = SelfDrafter(tiny, kernel="reference"), 0
    forward = drafter._forward

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise RuntimeError("out of luck")
        return forward(*args)

    monkeypatch.setattr(drafter, "_forward", failing)
    with pytest.warns(UserWarning, match="out of luck"):
        result = generate(tiny, prompts, drafter=drafter, **EOS)
    assert outputs(result) == expected


def test_a_twin_that_runs_the_policy_is_noticed(tiny, prompts, expected) -> None:
    """Packed layers are taken out again behind the drafter's back: correct, slow, and silent but for the canary."""
    drafter = SelfDrafter(tiny, kernel="reference")
    drafter.network.model.layers[0].mlp = tiny.model.layers[0].mlp
    with pytest.warns(UserWarning, match="3 of 15 quantized layers did not run"):
        result = generate(tiny, prompts, drafter=drafter, **EOS)
    assert outputs(result) == expected


# ---- A broken target -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the drafter")
@pytest.mark.parametrize("strategy", ["none", "self", "ngram", "history"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_in_the_target(do_sample: bool, strategy: str, prompts) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(FloatingPointError) as caught:
        generate(model, prompts, strategy, do_sample=do_sample)
    message = str(caught.value)
    assert "request 2 at generated position 0, decoding round 1" in message
    assert "'model.layers.1.mlp.up_proj' (torch.float64)" in message


def test_nan_in_one_row_alone(prompts) -> None:
    """A token that only row 4 ever reads; the message says which request it was, in the order of the caller."""
    model = tiny_llama()
    prompts = {name: tensor.clone() for name, tensor in prompts.items()}
    prompts["input_ids"][prompts["input_ids"] == 50] = 51
    prompts["input_ids"][4, -2] = 50
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
        model.lm_head.weight[50] = 0
    with pytest.raises(FloatingPointError, match="request 4 at generated position 0"):
        generate(model, prompts, "ngram", do_sample=False)


def test_nan_later_on(tiny, prompts, expected) -> None:
    """The position is that of the token which could not be sampled, drafted or not."""
    for strategy in ("none", "self"):
        processors = LogitsProcessorList([BreakAt(length=prompts["input_ids"].shape[1] + 9)])
        with pytest.raises(FloatingPointError, match="generated position 9,.*the logits processors did it"):
            generate(tiny, prompts, strategy, logits_processor=processors)


class BreakAt(LogitsProcessor):
    """Leaves no token to sample for prefixes of one length."""

    prefix_only = True

    def __init__(self, length: int, value: float = -torch.inf) -> None:
        self.length, self.value = length, value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] == self.length else scores


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_processors_that_leave_no_token(value: float, verification: str, tiny, tiny_assistant, prompts) -> None:
    processors = LogitsProcessorList([BreakAt(length=prompts["input_ids"].shape[1] + 2, value=value)])
    with pytest.raises(FloatingPointError, match="leave no token to sample.*the logits processors did it"):
        generate(tiny, prompts, "ngram" if verification == "exact" else "none", {"verification": verification},
                 logits_processor=processors)  # fmt: skip


def test_broken_logits_behind_the_end_do_not_matter(tiny, prompts, expected) -> None:
    """What lies behind a row's EOS is none of its business, even where a draft reached there."""
    row = next(row for row, tokens in enumerate(expected) if 1 < len(tokens) < 20)
    prompt = {name: tensor[row : row + 1] for name, tensor in prompts.items()}
    processors = LogitsProcessorList([BreakAt(length=prompts["input_ids"].shape[1] + len(expected[row]))])
    drafter = Perfect([expected[row] + [3] * 9], "never", 0)
    options = dict(drafter=drafter, config={"draft_length": 20}, request_ids=[row], logits_processor=processors)
    assert outputs(generate(tiny, prompt, **options, **EOS)) == [expected[row]]
