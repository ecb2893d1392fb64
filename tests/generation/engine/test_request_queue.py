"""When free rows are given to waiting requests: the rule alone, and rollouts under it."""

import pytest
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.rows import Request, RequestQueue
from spec_trl.scheduling import admission
from spec_trl.scheduling.admission import AdmissionDelay
from tests.generation.calls import generate, outputs, pad_left, random_rows


ENDS = dict(eos_token_id=[5, 6, 7], max_new_tokens=24)


def test_rows_wait_until_they_have_cost_a_quarter_of_a_round() -> None:
    """Of 16 rows 4: one row for 3 rounds, or 1 and then 2 rows for one each."""
    delay = AdmissionDelay(16)
    assert [delay.waits(1, "abc", "x") for _ in range(8)] == 2 * [True, True, True, False]
    assert [delay.waits(free, "abc", "x") for free in (1, 2, 1)] == [True, True, False]
    assert not delay.waits(4, "abc", "x")
    assert delay.rounds(1, "abc", "x") == 3
    assert not AdmissionDelay(4).waits(1, "abc", "x"), "few rows never wait"


def test_nothing_is_waited_for_where_it_saves_nothing_or_never_comes() -> None:
    delay = AdmissionDelay(100)
    assert delay.waits(1, ["a"], "b") and delay.waits(1, ["a"], None)
    assert not delay.waits(1, ["a", "b"], "b"), "its prompt is in flight"
    assert delay.waits(1, ["a"], "b")
    assert not delay.waits(1, [], "b"), "no row is in flight"


@pytest.mark.parametrize("strategy", ["none", "ngram"])
def test_several_prompts_are_read_at_once_and_no_token_changes(
    strategy: str, fresh: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, admitted = pad_left(random_rows([4 + i % 3 for i in range(40)])), []
    take = RequestQueue.take

    def counted(queue: RequestQueue, free: int, active: int) -> list[Request]:
        admitted.append(take(queue, free, active))
        return admitted[-1]

    monkeypatch.setattr(RequestQueue, "take", counted)
    found, times = [], []
    for delay in (admission.MAX_EMPTY_ROUNDS, 0.0):
        monkeypatch.setattr(admission, "MAX_EMPTY_ROUNDS", delay)
        admitted.clear()
        found.append(outputs(generate(fresh, prompts, strategy, {"max_batch_size": 16}, **ENDS)))
        times.append(sum(map(bool, admitted)))
    assert found[0] == found[1]
    assert times[0] < 0.8 * times[1]
