"""A drafter of a user's own: a class and a decorator make it a strategy of generate and of the trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from examples import own_drafter
from examples.own_drafter import BigramDrafter
from spec_trl import Drafter, SpecGRPOConfig, SpeculativeConfig, register_drafter
from spec_trl.generation.registry import DRAFTERS
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.trainers.harness import assert_same_training, train


DRAFTERS.pop("bigram")  # for other tests


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(DRAFTERS, "bigram", BigramDrafter)
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(BigramDrafter, "text_ids", torch.randint(0, 48, (4000,), generator=generator).tolist())
    yield


def test_it_drafts_and_changes_nothing(tiny: LlamaForCausalLM) -> None:
    prompts = pad_left(random_rows([3, 7, 5]))
    plain = generate(tiny, prompts, max_new_tokens=40)
    found = generate(tiny, prompts, "bigram", max_new_tokens=40)
    assert outputs(found) == outputs(plain) and torch.equal(found.logprobs, plain.logprobs)
    assert found.statistics.per_drafter["bigram"].drafted > 100 and found.statistics.drafter_failure is None


def test_the_trainer_drafts_with_it(tmp_path: Path) -> None:
    plain, found = train(tmp_path / "plain", "none"), train(tmp_path / "own", "bigram")
    assert_same_training(plain, found)
    assert found.log.rollouts and all(record.drafted_by["bigram"] > 0 for record in found.log.rollouts)


def test_names() -> None:
    with pytest.raises(ValueError, match="strategy='ngram' of Clash is taken"):
        register_drafter(type("Clash", (Drafter,), {"strategy": "ngram"}))
    with pytest.raises(ValueError, match="strategy='ngram' of NgramDrafter is taken"):
        register_drafter(type("NgramDrafter", (Drafter,), {"strategy": "ngram"}))  # of another module
    with pytest.raises(ValueError, match="strategy='custom' of Clash"):
        register_drafter(type("Clash", (Drafter,), {}))
    with pytest.raises(ValueError, match="strategy='auto'"):
        register_drafter(type("Clash", (Drafter,), {"strategy": "auto"}))
    assert register_drafter(BigramDrafter) is BigramDrafter  # a notebook's cell may run twice
    assert SpeculativeConfig(specactor=dict(drafters=["bigram", "self"])).specactor.drafters == ("bigram", "self")
    with pytest.raises(ValueError, match=r"assistant_strategy='bigramm'.*bigram"):
        SpecGRPOConfig(use_cpu=True, bf16=False, assistant_strategy="bigramm")
    with pytest.raises(ValueError, match="needs draft probabilities"):
        rejection = {"verification": "rejection"}
        SpecGRPOConfig(use_cpu=True, bf16=False, assistant_strategy="bigram", speculative_config=rejection)
    with pytest.raises(ValueError, match="assistant_model"):
        SpecGRPOConfig(use_cpu=True, bf16=False, assistant_strategy="bigram", assistant_model="x/y")


def test_the_example(
    tmp_path: Path, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo.task import build_tokenizer

    tiny.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text").write_text("1+2=3 " * 20)
    monkeypatch.setattr("sys.argv", ["own_drafter", "--model", str(tmp_path), "--text", str(tmp_path / "text"),
                                     "--prompt", "1+2="])  # fmt: skip
    own_drafter.main()
    assert "bigram: " in capsys.readouterr().out
