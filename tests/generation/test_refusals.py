"""What does not go together: each row of the table is refused at its door, in its words, before any work."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import LogitsProcessor

import spec_trl
from spec_trl import SpecDistillationConfig, SpecGRPOConfig, SpeculativeConfig
from spec_trl.generation.call import of_model
from spec_trl.generation.engine.network.family import Family
from spec_trl.generation.refusals import REFUSALS, Refusal, check, of_drafting
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from spec_trl.trainers.prompt_media import check_media
from spec_trl.trainers.trainer_checks import asked
from tests import tiny_families
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows
from tests.generation.conftest import Make
from tests.generation.engine.network.test_image_prompts import batch
from tests.generation.races import random_plans
from tests.papers.specactor.decoupled.scripted import Chance, InTurn
from tests.tiny_vision import make as vision
from tests.trainers.harness import OTHERS, hybrid_policy, make_run, tiny_policy


GPU, PROMPTS = torch.device("cuda", 0), pad_left(random_rows([4, 6]))
Door = Callable[[Path, Make], object]


class Curious(LogitsProcessor):
    """May look at other rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


# ---- doors: each asks for two features ------------------------------------------------------------------------------


def call(strategy: str | None = "self", config: Any = None, drafter: tuple[str, ...] = (), **options: Any) -> Door:
    """A call of `generate`; `drafter`: names of given drafters."""

    def door(_: Path, drafters: Make) -> None:
        model = options.pop("model", tiny_llama)()
        prompts = batch(model, [1]) if hasattr(model.config, "vision_config") else PROMPTS
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
        given = {"drafter": drafters(*drafter)} if drafter else {}
        generate(model, prompts, strategy, config, **given, **options)

    return door


def options(**given: Any) -> Door:
    """A trainer's config."""
    return lambda *_: arguments(**given)


def arguments(kind: Any = SpecGRPOConfig, **given: Any) -> SpecGRPOConfig:
    """A config of a trainer; options of :class:`SpeculativeConfig` go into its own."""
    config = {name: given.pop(name) for name in [*given] if name in SpeculativeConfig.__dataclass_fields__}
    base = {"output_dir": "unused", "use_cpu": True, "bf16": False, "assistant_strategy": "self"}
    return kind(**base | given, speculative_config=config)


def trainer(args: dict[str, Any] | None = None, policy: Callable[[], nn.Module] | None = None, **facts: Any) -> Door:
    """A trainer with these arguments, policy and other attributes."""
    dist = {name: facts.pop(name, value) for name, value in DIST.items()}
    place = SimpleNamespace(device=facts.pop("device", torch.device("cpu")), num_processes=facts.pop("ranks", 1))

    def door(*_: Any) -> None:
        of = SimpleNamespace(
            args=arguments(**{"exact_logprobs": not args} | (args or {})), accelerator=place,
            model=policy() if policy else tiny_policy().float(), _dist=SimpleNamespace(**dist), **NOTHING | facts,
        )  # fmt: skip
        check(asked(of, of.args.rollout_config()))

    return door


NOTHING: dict[str, Any] = {"train_dataset": None, "eval_dataset": None, "processing_class": None, "lacking": ()}
DIST: dict[str, Any] = {"fsdp_version": None, "zero_stage": 0, "is_fsdp": False}
LEARNS = {"assistant_strategy": "eagle3", "assistant_model": "a/b"}


def with_states() -> nn.Module:
    return tiny_families.make("qwen3_5_text")


def made(**given: Any) -> Door:
    """A trainer that is made."""
    return lambda folder, _: make_run(folder, "self", **given)


def images(tools: bool = False, **given: Any) -> Door:
    """A rollout whose prompts have images."""
    return lambda *_: check_media(vision("gemma3"), arguments(**given), tools)


def on_gpu(**options: Any) -> Door:
    config = SpeculativeConfig(**options)
    return lambda *_: check({**of_drafting("self", config), **of_model(Family.of(tiny_llama()), config, GPU)})


def two_devices(*_: Any) -> None:
    trainer(LEARNS | {"kind": type("Two", (SpecGRPOConfig,), {"n_gpu": 2})})()


def speculate(strategy: str = "self", **given: Any) -> Door:
    return lambda *_: spec_trl.speculate(tiny_policy(), strategy, **given)


REJECTS, EXACT = {"verification": "rejection"}, {"exact_logprobs": True}
SUPPORT = {"logprobs_over": "support"}
DECOUPLED = {"specactor": {"decoupled_execution": "always"}}
RANK = {"specactor": {"draft_ranks": 1}}
TWO = {"assistant_strategy": "best_of_n",
       "specactor": {"drafters": ["eagle3", "dflash"], "assistants": {"eagle3": "a", "dflash": "b"}}}  # fmt: skip
with_image = Dataset.from_list([{"prompt": "k=", "images": [[1]]}])

CASES: dict[str, list[Door]] = {
    "assistant_strategy x custom_generate": [call(custom_generate=lambda *_, **__: None)],
    "speculative_config x no assistant_strategy": [call(None, {"draft_length": 3})],
    "an option of one strategy x another strategy": [
        call("self", {"tts": {"rank": 16}}), call("history", {"ngram_size": 2}),
        call("auto", {"specactor": {"race": False}}), call("self", RANK), speculate(**RANK),
        call("self", {"efficient_rollout": {"draft_length_patience": 3}}),
        options(tts={"rank": 16}), speculate(ngram_size=2),
    ],
    "assistant_model x a strategy without assistant": [
        call(assistant_model="any"), options(assistant_model="gpt2"), speculate(assistant_model="gpt2"),
        options(assistant_strategy="tts", assistant_model="gpt2"),
    ],
    "assistant_model=None x a strategy with an assistant": [
        options(assistant_strategy="model"), options(assistant_strategy="tts", tts={"drafter": "dflash"}),
    ],
    'sd_toggle="always" x several drafters': [
        *(call(name, {"sd_toggle": "always"}) for name in ("auto", "best_of_n")),
        call(config={"sd_toggle": "always"}, drafter=("self", "ngram")),
    ],
    "efficient_rollout.profile x no sd_toggle": [
        call(config={"efficient_rollout": {"profile": "p.json"}, "sd_toggle": "never"}),
        options(efficient_rollout={"profile": "p.json"}, sd_toggle="roofline", assistant_strategy="none"),
    ],
    'verification="rejection" x several chains per row': [
        call("best_of_n", REJECTS), call(config=REJECTS, drafter=("self", "model"), control=random_plans(2)),
    ],
    'verification="rejection" x drafters without probabilities': [
        call("auto", REJECTS), call("ngram", REJECTS), call(config=REJECTS, drafter=("ngram",)),
        options(assistant_strategy="history", **REJECTS), speculate("ngram", **REJECTS),
    ],
    'verification="rejection" x specactor.decoupled_execution="always"': [
        call(config=REJECTS | DECOUPLED), call(config=REJECTS | DECOUPLED, drafter=("self",)),
    ],
    'specactor.decoupled_execution="always" x drafters that cannot draft ahead': [
        *(call(name, DECOUPLED) for name in ("none", "history", "eagle3", "dflash", "tts", "auto", "best_of_n")),
        *(call(config=DECOUPLED, drafter=(name,)) for name in ("eagle3", "history", "tts model rollout")),
        lambda _, drafters: DraftThread(DecoupledDrafter(DraftThread(*drafters("ngram")))),
        lambda *_: call("model", DECOUPLED, assistant_model=with_states())(*_),
    ],
    "a model on a GPU x a drafter on a thread": [on_gpu(**DECOUPLED)],
    "a model with states of convolutions or scans x several chains per row": [
        call("best_of_n", model=with_states),
        call(config={}, model=with_states, drafter=("self", "ngram"), control=random_plans(2)),
    ],
    'a model with states of convolutions or scans x tts.drafter="self"': [call("tts", model=with_states)],
    "a model with states of convolutions or scans x a copy that drafts ahead": [
        call(config=DECOUPLED, model=with_states), trainer(RANK, hybrid_policy),
    ],
    'an assistant with states x tts.drafter="model" or specactor.draft_ranks': [
        lambda *_: call("tts", {"tts": {"drafter": "model"}}, assistant_model=with_states())(*_),
        lambda *_: trainer({"assistant_strategy": "model", **RANK, "assistant_model": hybrid_policy()})(*_),
    ],
    "prompts with images x drafters that read prompts": [
        call("model", model=lambda: vision("gemma3")),
        call("best_of_n", {"specactor": {"drafters": ("self", "mtp")}}, model=lambda: vision("gemma3")),
    ],
    'prompts with images x specactor.decoupled_execution="always"': [
        call("self", DECOUPLED, model=lambda: vision("gemma3")),
    ],
    'runner="graph" x a model outside of CUDA': [call("none", {"runner": "graph"}), trainer({"runner": "graph"})],
    'runner="compiled" x exact=True on a GPU': [on_gpu(runner="compiled", exact=True)],
    "streamer x several rows": [call("none", streamer=Mock())],
    "a processor or criterion that may look at other rows x a smaller max_batch_size": [
        call("none", {"max_batch_size": 1}, logits_processor=[Curious()]),
    ],
    "synced_gpus=True x assistant_strategy": [call("none", synced_gpus=True)],
    "another engine x speculative rollouts": [
        options(kind=SpecDistillationConfig, use_vllm=True), options(use_transformers_continuous_batching=True),
    ],
    "ds3_gather_for_generation=False x speculative rollouts": [options(ds3_gather_for_generation=False)],
    "fsdp_version=1 x speculative rollouts": [trainer({"assistant_strategy": "none"}, fsdp_version=1)],
    "seed x speculate": [speculate(seed=3)],
    "num_return_sequences x num_generations": [made(generation_kwargs={"num_return_sequences": 2})],
    "specactor.draft_ranks x drafters that cannot draft ahead": [options(**RANK, assistant_strategy="auto")],
    'specactor.draft_ranks x rollout_sharing="own"': [options(**RANK, rollout_sharing="own")],
    'specactor.draft_ranks x verification="rejection"': [options(**RANK, **REJECTS)],
    'specactor.draft_ranks x specactor.decoupled_execution="always"': [
        options(specactor={"draft_ranks": 1, "decoupled_execution": "always"}),
    ],
    'specactor.draft_ranks x sd_toggle="never"': [options(**RANK, sd_toggle="never")],
    "drafter_adaptation=True x several learned drafters": [options(**TWO)],
    "drafter_adaptation=True x torch_compile=True": [options(**LEARNS, torch_compile=True)],
    "drafter_adaptation=True x torch.nn.DataParallel": [two_devices],
    "drafter_adaptation=True x FSDP or ZeRO-3": [trainer(LEARNS, zero_stage=3), trainer(LEARNS, is_fsdp=True)],
    "prompts with images x tools": [images(tools=True)],
    "prompts with images x specactor.draft_ranks": [images(**RANK)],
    "prompts with images x a processing_class without images": [
        trainer({"draft_length": 3}, train_dataset=with_image),
        trainer({"draft_length": 3}, eval_dataset={"a": with_image}),
    ],
    "exact_logprobs=True x a loss without log-probabilities": [
        trainer(lacking=("_get_per_token_logps_and_entropies",)),
    ],
    "exact_logprobs=True x a policy outside of a CPU": [trainer(device=GPU)],
    "exact_logprobs=True x no C++ compiler": [trainer()],
    "exact_logprobs=True x another dtype": [trainer(policy=tiny_policy)],
    "exact_logprobs=True x rollout_func": [trainer(rollout_func=print)],
    "exact_logprobs=True x another distribution": [made(policy=tiny_policy().float(), top_p=0.9, **EXACT)],
    "exact_logprobs=True x dropout": [made(policy=tiny_policy().float(), **EXACT,
                                           trainer={"peft_config": LoraConfig(r=4, lora_dropout=0.1)})],
    "exact_logprobs=True x attention_dropout": [trainer(policy=lambda: tiny_policy(attention_dropout=0.1).float())],
    "exact_logprobs=True x torch_compile=True": [options(torch_compile=True, **EXACT)],
    "exact_logprobs=True x DeepSpeed ZeRO-3": [trainer(zero_stage=3)],
    "exact_logprobs=True x AWQ": [trainer({"draft_quantization": "awq-w4-g128", **EXACT})],
    'logprobs_over="support" x a loss without log-probabilities': [made(**OTHERS["distillation"], **SUPPORT)],
    'logprobs_over="support" x rollout_func': [trainer(SUPPORT, rollout_func=print)],
    'logprobs_over="support" x prompts with images': [images(**SUPPORT)],
    'logprobs_over="support" x another distribution': [
        made(**SUPPORT, repetition_penalty=1.1), made(**SUPPORT, generation_kwargs={"temperature": 0.5}),
    ],
    'logprobs_over="support" x several ranks that share rollouts': [trainer(SUPPORT, ranks=2)],
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.what} x {row.other}")
def test_each_row_is_refused_at_its_doors(
    row: Refusal, tmp_path: Path, drafters: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.other == "no C++ compiler":
        monkeypatch.setattr("spec_trl.trainers.trainer_checks.compiler", lambda: None)
    words = re.escape(f": {row.because}. {row.instead}.")
    for door in CASES[f"{row.what} x {row.other}"]:
        with pytest.raises(ValueError, match=f"^.+ does not go with .+{words}"):
            door(tmp_path, drafters)


def test_the_sentence_has_the_words_of_the_user(drafters: Make, tmp_path: Path) -> None:
    said = {
        "^tts.rank=16, an option of 'tts', does not go with assistant_strategy='self': ": options(tts={"rank": 16}),
        "^assistant_model does not go with assistant_strategy='tts', tts.drafter='self': ": options(
            assistant_strategy="tts", assistant_model="gpt2"
        ),
        "^a model of type 'qwen3_5_text', which keeps states, does not go with specactor.draft_ranks=1: ": trainer(
            RANK, hybrid_policy
        ),
        "^use_vllm=True does not go with SpecDistillationTrainer: ": options(
            kind=SpecDistillationConfig, use_vllm=True
        ),
    }
    for message, door in said.items():
        with pytest.raises(ValueError, match=message):
            door(tmp_path, drafters)


def test_drafters_on_threads_and_elsewhere(drafters: Make) -> None:
    """A thread of this process shares the GPU, whichever way it is asked for; another process does not."""
    config, model = SpeculativeConfig(**DECOUPLED), tiny_llama()
    place = of_model(Family.of(model), config, GPU)
    check({**of_drafting("self", config, given=[DecoupledDrafter(InTurn(Chance([], 1.0)))]), **place})
    thread, plain = DecoupledDrafter(DraftThread(*drafters("ngram"))), SpeculativeConfig()
    for given, options, words in (
        ([*drafters("self"), thread], plain, r"drafter=DecoupledDrafter\(DraftThread\(...\)\)"),
        ([DecoupledDrafter(InTurn(Chance([], 1.0))), *drafters("ngram")], config, ".*decoupled_execution"),
    ):
        with pytest.raises(ValueError, match=f"^the model on cuda:0 does not go with {words}.*: "):
            check({**of_drafting("self", options, given=given), **place})


def test_what_goes_together(drafters: Make) -> None:
    """Rejection sampling that decodes greedily verifies nothing by chance; one drafter of several rows is no race."""
    for strategy in ("auto", "ngram"):
        generate(tiny_llama(), PROMPTS, strategy, REJECTS, do_sample=False, max_new_tokens=4)
    config = SpeculativeConfig(specactor=dict(race=False, drafters=("self", "model")), **REJECTS)
    check(of_drafting("best_of_n", config))
