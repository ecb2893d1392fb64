"""How often the host waits for the device: once per round, where it reads what was committed."""

from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.rollout import Rollout
from tests.generation.calls import generate, pad_left, random_rows


READS = ("tolist", "item", "numpy", "cpu", "__int__", "__bool__", "__float__", "__index__", "nonzero", "unique")


@pytest.mark.parametrize("rows", [6, 2])  # all in flight; or rows that retire give way to others
@pytest.mark.parametrize("strategy", ["none", "self"])
def test_a_round_reads_once_whoever_retires(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, strategy: str, rows: int
) -> None:
    reads: list[str] = []
    rounds: list[list[str]] = []
    decode_round = Rollout.decode_round

    def watched(self: Rollout, plan: Any) -> None:
        reads.clear()
        decode_round(self, plan)
        rounds.append(list(reads))

    def note(name: str) -> None:
        read = getattr(Tensor, name)

        def noted(self: Tensor, *given: Any, **more: Any) -> Any:
            reads.append(name)
            return read(self, *given, **more)

        monkeypatch.setattr(Tensor, name, noted)

    monkeypatch.setattr(Rollout, "decode_round", watched)
    for name in READS:
        note(name)
    prompts = pad_left(random_rows([4, 6, 5, 7, 4, 9]))
    found = generate(tiny, prompts, strategy, {"max_batch_size": rows}, eos_token_id=[5, 6], max_new_tokens=60)
    assert len(set(found.lengths.tolist())) > 2
    assert rounds == [["tolist"]] * found.statistics.rounds
