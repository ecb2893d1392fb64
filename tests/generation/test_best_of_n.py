"""`"auto"` and `"best_of_n"`: which drafters there are, races within a budget, and no token changes."""

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import release
from spec_trl.generation import measuring, strategies
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.planner.clock import ForwardSeconds, ProbedRounds
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs
from tests.generation.conftest import Make
from tests.generation.races import EOS, PROMPTS
from tests.option_groups import merged


def assert_same_tokens(result: Any, model: LlamaForCausalLM, **options: Any) -> None:
    assert outputs(result) == outputs(generate(model, PROMPTS, **options))
    assert result.statistics.drafter_failure is None


@pytest.mark.parametrize(
    ("names", "config", "options", "races"),
    [
        ((), {"max_batch_size": 3}, dict(do_sample=False, **EOS), True),
        (("self", "ngram"), {"specactor": {"race": False}}, {}, False),
        (("self", "ngram"), {"specactor": {"budget": 70}}, {}, True),
        (("self", "ngram"), {"specactor": {"budget": 1}}, {}, False),
        (("history", "ngram"), {}, {}, False),  # of two lookups one is as good as both
    ],
)
@pytest.mark.usefixtures("clock")
def test_races_keep_the_tokens_and_the_budget(
    names: tuple[str, ...], config: dict[str, Any], options: dict[str, Any], races: bool, tiny, drafters: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where every round takes as long. Rounds in which several drafted verify no more than the budget."""
    level = ForwardSeconds([1, 64], [1.0, 1.0])
    monkeypatch.setattr(measuring, "probe", lambda *_: ProbedRounds(level, {}))
    release(tiny)
    config = merged({"specactor": {"budget": 400}, "draft_length": 2}, config)
    options = {"max_new_tokens": 60} | options
    members, raced = drafters(*names), []
    for _ in range(3):  # it learns what pays
        result = generate(tiny, PROMPTS, "best_of_n", config, drafter=members, **options)
        assert_same_tokens(result, tiny, **options)
        raced.append(result.statistics.best_of_n)
        verified = [p.batch * (1 + p.draft_length) for p in result.statistics.points if p.drafter and "+" in p.drafter]
        assert all(tokens <= config["specactor"]["budget"] for tokens in verified)
    assert any(found and found.rounds for found in raced) == races
    release(tiny)


def test_a_control_serves_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge, who generates with the same model within the call, has one of its own."""
    model = tiny_llama()
    find, taken = strategies.control_for, []
    monkeypatch.setattr(strategies, "control_for", lambda *given: taken.append(find(*given)) or taken[-1])
    judge = EachRound(lambda number: number == 3 and generate(model, PROMPTS, "auto"))
    assert_same_tokens(generate(model, PROMPTS, "auto", stopping_criteria=[judge]), model)
    assert judge.round > 3
    drafting = [entry.control for entry in taken if entry.control.candidates]
    assert len(drafting) == 2 and drafting[0] is not drafting[1]
    release(model)


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_assistants(
    tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM, checkpoints: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Which of them lack one `test_configuration.py` says."""
    made: list[Drafter] = []
    make = strategies.make_drafters
    monkeypatch.setattr(strategies, "make_drafters", lambda *given: made.extend(make(*given)) or made)
    config = {"specactor": {"drafters": ("eagle3", "model", "dflash")}}
    given: dict[str, Any] = {"eagle3": checkpoints["eagle3"], "model": tiny_assistant}
    more = merged(config, {"specactor": {"assistants": given}})
    generate(tiny, PROMPTS, "best_of_n", more, max_new_tokens=4, assistant_model=checkpoints["dflash"])
    assert [type(drafter).__name__ for drafter in made] == ["Eagle3Drafter", "SmallModelDrafter", "DFlashDrafter"]
    release(tiny)
