"""Races: rows verify the chains of several drafters, and ranks decode the same rows with different drafters."""

from collections import Counter
from collections.abc import Callable

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeOutput
from spec_trl.distributed import pool as pool_module
from spec_trl.distributed.pool import SharedPool
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.rows import Request
from tests.distributed.ranks import Helped, PatientRacing, unfair
from tests.distributed.test_pool import ENDS, check_logprobs, decode, prompts
from tests.generation.calls import generate, outputs
from tests.generation.races import PROMPTS, Knowing, random_plans


def test_the_longest_accepted_chain_wins(tiny) -> None:
    """How chains are counted, `test_statistics.py` says; how far a round gets, `test_token_identity.py`."""
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    control = random_plans(4, 2)
    statistics = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=40).statistics
    asked = [iter(member.right) for member in members]
    wins: list[Counter[str]] = [Counter() for _ in expected]
    done = [1] * 7  # first tokens
    for each in control.rounds:
        right = {which: next(asked[which]) for which in each["accepted"]}
        for row, request in enumerate(each["requests"]):
            found = {}
            for chain in each["plan"]:
                if chain.drafter in right and (chain.rows is None or row in chain.rows):
                    length = min(chain.draft_length, 40 - done[request] - 1)
                    own = each["accepted"][chain.drafter][row], each["drafted"][chain.drafter][row]
                    assert own == (min(right[chain.drafter][request], length), length), "its own chain, and no other's"
                    found[chain.drafter] = own[0]
            assert {which for which in right if each["accepted"][which][row] >= 0} == found.keys()
            if len(found) > 1:
                wins[request][f"k{max(found, key=found.__getitem__)}"] += 1  # the first of the longest
            done[request] += 1 + max(found.values(), default=0)
    assert list(map(Counter, statistics.best_of_n.winners)) == wins
    found = statistics.best_of_n
    assert all(found.wins[name] > 0 < found.losses[name] for name in statistics.per_drafter)


def test_rejection_verification_does_not_race(tiny, drafters, monkeypatch) -> None:
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    options = dict(config={"verification": "rejection"}, drafter=drafters("self", "model"), control=random_plans(2))
    with pytest.raises(ValueError, match='verification="rejection" does not go with the control of this call: '):
        generate(tiny, PROMPTS, **options)


# ---- between ranks --------------------------------------------------------------------------------------------------


def test_no_bit_differs_between_ranks_that_race(narrow: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    test_ranks_race_for_the_rows_of_another(narrow, monkeypatch)


def test_ranks_race_for_the_rows_of_another(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that two ranks decode has one completion, that of the first one to end it."""
    monkeypatch.setattr(pool_module, "rows_to_give", lambda *_: 0)
    monkeypatch.setattr(pool_module, "POLL_SHARE", 1e9)
    given, config = prompts(6), {"max_batch_size": 3}
    reference = generate(tiny, given, **ENDS)
    alone = outputs(reference)
    controls = [Helped(), Helped()]

    def call(rank: int, make: Callable[[list[Request]], SharedPool]) -> SpeculativeOutput:
        drafters = [SelfDrafter(tiny, kernel="reference"), NgramDrafter(2)]
        more = dict(drafter=drafters, control=controls[rank], make_queue=make)
        return generate(tiny, given, "best_of_n", config, **ENDS, **more)

    texts, pools, found = decode(2, unfair(alone), 3, call, PatientRacing)
    assert texts == alone
    check_logprobs(found, reference)
    assert controls[1].tallies[1].rounds > 0  # the lookup drafts for helpers alone
    assert pools[1].taken_over == 0
