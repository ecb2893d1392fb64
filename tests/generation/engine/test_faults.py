"""Faults beyond those that `test_token_identity.py` draws: what is said of them, and a broken target."""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.control import Candidate
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows
from tests.generation.races import Knowing


EOS = dict(eos_token_id=[7, 11, 12])
CONFIG = {"max_batch_size": 3, "draft_length": 2}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Seven rows, two of them alike."""
    rows = random_rows([5, 9, 1, 3, 12, 4])
    return pad_left([*rows, rows[3]])


@pytest.fixture(scope="module")
def expected(tiny, prompts: Prompts) -> list[list[int]]:
    return outputs(generate(tiny, prompts, **EOS))


class Failing(Knowing):
    """Fails whenever a generation begins, as long as `fails`."""

    fails = True

    def begin(self, session: DraftSession) -> None:
        if self.fails:
            raise KeyError("the drafter's own trouble")
        super().begin(session)


def test_a_failure_is_said_once_and_ends_with_the_generation(tiny, prompts, expected) -> None:
    drafter = Failing(expected, None)
    control = SpeculationToggle([Candidate("custom", 2, 2.0, 100)])
    for _ in range(2):  # a control that has been in use, too
        with pytest.warns(UserWarning, match="Failing failed.*same tokens.*KeyError: .the drafter") as caught:
            result = generate(tiny, prompts, drafter=drafter, config=CONFIG, control=control, **EOS)
        assert len(caught) == 1 and outputs(result) == expected
        assert "KeyError" in result.statistics.drafter_failure
        assert result.statistics.speculating == [(0, 0)]
    drafter.fails = False
    result = generate(tiny, prompts, drafter=drafter, config=CONFIG, **EOS)
    assert result.statistics.acceptance_rate > 0.8 and result.statistics.drafter_failure is None
    assert outputs(result) == expected


@pytest.mark.parametrize("tokens", [64, -1, 2**62, None])
@pytest.mark.filterwarnings("ignore:the drafter Other")
def test_what_was_not_proposed_does_not_count(tokens: int | None, tiny, prompts, expected) -> None:
    class Other(Knowing):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            proposal = super().propose(draft_length, noise)
            if tokens is None:
                raise KeyError("the drafter's own trouble")
            return Proposal(torch.full_like(proposal.tokens, tokens), proposal.lengths)

    result = generate(tiny, prompts, drafter=Other(expected, None), config=CONFIG, **EOS)
    assert outputs(result) == expected and result.statistics.total.drafted == result.statistics.total.accepted == 0


def test_ctrl_c_is_not_a_drafter_failure(tiny, prompts, expected, monkeypatch) -> None:
    drafter = Knowing(expected, None)

    def interrupted(*_: object) -> Proposal:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "propose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, prompts, drafter=drafter)


@pytest.mark.parametrize(("logits", "width"), [(torch.nan, 64), (torch.inf, 64), (-torch.inf, 64), (0.0, 63)])
def test_broken_draft_probabilities(logits: float, width: int, tiny, prompts, recwarn) -> None:
    """Under rejection verification; tokens may differ from "none", so the test is that the run goes on and ends."""

    class Broken(Drafter):
        has_probabilities = True

        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            rows = self.session.rows.active
            tokens, lengths = torch.randint(64, (rows, draft_length)), torch.full((rows,), draft_length)
            return Proposal(tokens, lengths, torch.full((*tokens.shape, width), logits))

    result = generate(tiny, prompts, drafter=Broken(), config={"verification": "rejection", "draft_length": 4})
    assert result.statistics.total.accepted == 0 and bool(result.statistics.drafter_failure) == (width == 63)
    assert [("Broken failed" in str(warning.message)) for warning in recwarn] == [True] * (width == 63)
    assert result.lengths.tolist() == [24] * 7 and torch.isfinite(result.logprobs).all()


def test_a_twin_that_runs_the_policy_is_noticed(tiny, prompts, expected) -> None:
    """Packed layers were taken out again: correct, slow, and silent but for the check."""
    drafter = SelfDrafter(tiny, kernel="reference")
    drafter.network.model.layers[0].mlp = tiny.model.layers[0].mlp
    with pytest.warns(UserWarning, match="3 of 15 quantized layers did not run"):
        result = generate(tiny, prompts, drafter=drafter, **EOS)
    assert outputs(result) == expected


# ---- a broken target -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the drafter")
@pytest.mark.parametrize(("strategy", "do_sample"), [("none", False), ("self", True)])
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


class BreakAt(LogitsProcessor):
    """Leaves no token to sample for prefixes of one length."""

    prefix_only = True

    def __init__(self, length: int, value: float = -torch.inf) -> None:
        self.length, self.value = length, value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] == self.length else scores


@pytest.mark.parametrize(
    ("strategy", "value", "verification"),
    [("none", torch.nan, "exact"), ("self", -torch.inf, "exact"), ("none", -torch.inf, "rejection")],
)
def test_processors_that_leave_no_token(value: float, verification: str, strategy: str, tiny, prompts) -> None:
    """The position is that of the token which could not be sampled, drafted or not."""
    processors = LogitsProcessorList([BreakAt(prompts["input_ids"].shape[1] + 9, value)])
    match = "leave no token to sample.*generated position 9,.*the logits processors did it"
    with pytest.raises(FloatingPointError, match=match):
        generate(tiny, prompts, strategy, {"verification": verification}, logits_processor=processors)


def test_broken_logits_after_the_end_do_not_matter(tiny, prompts, expected) -> None:
    """What comes after a row's EOS is none of its business, even where a draft reached there."""
    row = next(row for row, tokens in enumerate(expected) if 1 < len(tokens) < 20)
    prompt = {name: tensor[row : row + 1] for name, tensor in prompts.items()}
    processors = LogitsProcessorList([BreakAt(prompts["input_ids"].shape[1] + len(expected[row]))])
    drafter = Knowing([expected[row] + [3] * 9], None)
    options = dict(drafter=drafter, config={"draft_length": 20}, request_ids=[row], logits_processor=processors)
    assert outputs(generate(tiny, prompt, **options, **EOS)) == [expected[row]]
