"""Configs, and what is refused when a trainer is made: by the name that the user set, before any work."""

import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, HfArgumentParser
from trl import GRPOConfig, TrlParser

from spec_trl import (
    SpecDistillationConfig,
    SpecGMPOConfig,
    SpecGRPOConfig,
    SpecGRPOTrainer,
    SpecRLOOConfig,
    SpeculativeConfig,
)
from spec_trl.drafter_training.adaptation import AdaptationOptions
from spec_trl.trainers.checkpoint import DraftLengthState
from spec_trl.trainers.rollout_options import DRAFT_LENGTHS, RolloutOptions
from spec_trl.trainers.trainer_speculator import draft_length_controllers
from tests.generation.drafters.watching import make_checkpoint
from tests.option_groups import merged
from tests.trainers.harness import make_run, tiny_dataset, tiny_policy, train


CONFIGS = (SpecGRPOConfig, SpecRLOOConfig, SpecDistillationConfig, SpecGMPOConfig)
each_config = pytest.mark.parametrize("kind", CONFIGS)


def make_config(kind: type[RolloutOptions] = SpecGRPOConfig, **options: Any) -> RolloutOptions:
    return kind(**{"output_dir": "unused", "use_cpu": True, "bf16": False} | options)


def name_of(value: object) -> str:
    return "-".join(map(str, value.items())) if isinstance(value, dict) else ""


BEST_OF_N = {"assistant_strategy": "best_of_n"}
TTS = {"assistant_strategy": "tts"}


def drafting(**options: Any) -> dict[str, Any]:
    return {"speculative_config": options}


RANK: dict[str, Any] = {"specactor": {"draft_ranks": 1}}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"assistant_strategy": "selv"}, r"assistant_strategy='selv' is unknown; choose one of .*Did you mean 'self'"),
        ({"assistant_strategy": "auto", "assistant_model": "./nothing"}, "^assistant_model='./nothing' is a folder"),
        ({"assistant_strategy": "model", "assistant_model": __file__}, "test_config.py' is a file; give"),
        (drafting(efficient_rollout={"initial_draft_length": 6}),
         r"initial_draft_length=6 is not one of draft_length=\[5, 7, 9, 11\]"),
        (drafting(draft_length=[5, 5]), r"^draft_length=\[5, 5\] is not ascending"),
        ({"speculative_config": "x"}, "^speculative_config='x' is a str; pass a SpeculativeConfig or a dict"),
        ({"rollout_sharing": "all"}, "^rollout_sharing='all' is unknown; choose one of"),
        ({"exact_logprobs": "yes"}, "^exact_logprobs='yes' is no bool"),
        ({"logprobs_over": "kept"}, "^logprobs_over='kept' is unknown; choose one of"),
        ({"drafter_adaptation": "maybe"}, "^drafter_adaptation='maybe' is no bool; pass True or False, or a dict"),
        ({"drafter_adaptation": {"learning_rate": 0.0}}, "^drafter_adaptation.learning_rate=0.0 is out of range"),
        ({"drafter_adaptation": {"hidden_weight": -1.0}}, "^drafter_adaptation.hidden_weight=-1.0 is out of range"),
        ({"drafter_adaptation": {"token_weight": math.inf}}, "^drafter_adaptation.token_weight=inf is out of range"),
        ({"drafter_adaptation": {"hidden_weight": 0, "token_weight": 0}}, "leave the drafter nothing to learn"),
        (BEST_OF_N | {"assistant_model": "some/drafter"}, "assistant_model serves exactly one of them"),
        # names that generate, another TRL or an earlier release has
        *(({name: 1}, rf"has no option '{name}' \(given 1\). Give {place}: ...") for name, place in (
            ("draft_length", 'speculative_config={"draft_length"'), ("tts_rank", 'speculative_config={"tts": {"rank"'),
            ("max_batch_size", 'speculative_config={"max_batch_size"'),
            ("rollout_batch_size", 'speculative_config={"max_batch_size"'),
            ("drafter_learning_rate", 'drafter_adaptation={"learning_rate"'),
        )),
        ({"max_prompt_length": 9}, "has no option 'max_prompt_length' .*: cut prompts in the dataset"),
        ({"asistant_model": "a/b"}, "has no option 'asistant_model' .*Did you mean 'assistant_model'"),
        ({"qqqqqq": 1}, "has no option 'qqqqqq' .*TRL has none"),
        # settings that belong elsewhere, or are of another type
        ({"generation_kwargs": {"assistant_strategy": "self"}}, r"Set SpecGRPOConfig\(assistant_strategy=\.\.\.\)"),
        ({"generation_kwargs": {"speculative_config": {}}}, r"Set SpecGRPOConfig\(speculative_config=\.\.\.\)"),
        ({"generation_kwargs": {"temprature": 0.5}}, "has 'temprature', .*Did you mean 'temperature'"),
        ({"assistant_strategy": "model", "assistant_model": 5}, "^assistant_model=5 is a int; give the path or hub"),
        ({"assistant_strategy": "eagle3", "assistant_model": ["a/b"]}, "is a list; give the path or hub id as text"),
    ],
    ids=name_of,
)  # fmt: skip
def test_bad_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**{"assistant_strategy": "self"} | bad)


@each_config
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_batch_size": 9}, "^{0}Config has no option 'max_batch_size'"),
        ({"generation_kwargs": {"assistant_strategy": "self"}}, r"Set {0}Config\(assistant_strategy=\.\.\.\)"),
    ],
    ids=name_of,
)
def test_messages_name_the_class_at_hand(kind: type[RolloutOptions], bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.format(kind.__name__.removesuffix("Config"), kind.base_trainer)):
        make_config(kind, **bad)


def test_subclasses_may_take_more() -> None:
    class Named(SpecGRPOConfig):
        def __init__(self, name: str, **options: Any) -> None:
            super().__init__(**options)

    @dataclass
    class Longer(SpecGRPOConfig):
        name: str = ""

    named = Named(name="a", output_dir="unused", use_cpu=True, bf16=False)
    assert named.rollout_config().draft_length == DRAFT_LENGTHS
    assert Longer(name="a", output_dir="unused", use_cpu=True, bf16=False).name == "a"
    copied = pickle.loads(pickle.dumps(make_config(**drafting(draft_length=[3]))))
    assert copied.rollout_config() == copy.deepcopy(copied).rollout_config()


def test_ranks_on_cpus_have_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives it to none of their process groups."""
    given: list[Any] = []

    def make_group(**options: Any) -> None:
        given.append(options["timeout"])
        raise InterruptedError

    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(torch.distributed, "init_process_group", make_group)
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, OMP_NUM_THREADS=1).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InterruptedError):
        make_config(ddp_timeout=7)
    assert given == [timedelta(seconds=7)]


# ---- Good ones ------------------------------------------------------------------------------------------------------

CHOSEN = SpeculativeConfig(
    draft_length=(3, 7), sd_toggle="roofline", history_max_tokens=1000, draft_quantization="rtn-w8",
    draft_kernel="reference", runner="compiled", max_batch_size=4, max_graph_memory=2.5, keep_graphs=True, exact=True,
    seed=11, efficient_rollout={"profile": "p.json", "initial_draft_length": 7},
    tts={"drafter": "model", "scope": "rollout", "stride": 5},
    specactor={"drafters": ["history", "model", "tts"], "assistants": {"model": "some/drafter"}, "budget": 64},
)  # fmt: skip
OWN: dict[str, Any] = {
    "assistant_strategy": "best_of_n", "assistant_model": "some/drafter", "rollout_sharing": "own",
    "drafter_adaptation": {"learning_rate": 2e-6}, "exact_logprobs": True, "logprobs_over": "support",
}  # fmt: skip


@each_config
def test_options_reach_generate(kind: type[RolloutOptions]) -> None:
    config = make_config(kind, **OWN, speculative_config=CHOSEN)
    assert config.rollout_config() == CHOSEN and config.adaptation == AdaptationOptions(2e-6)
    given = make_config(kind, **OWN, speculative_config=CHOSEN.to_dict())
    assert given.rollout_config() == CHOSEN and make_config(kind, drafter_adaptation=False).adaptation is None
    assert config.settings() == OWN | CHOSEN.by_place()
    assert config.to_dict()["speculative_config"] == CHOSEN.to_dict()
    default = make_config(kind, seed=5)
    assert default.rollout_config() == SpeculativeConfig(draft_length=DRAFT_LENGTHS, seed=5, tts={"scope": "run"})
    assert default.adaptation == AdaptationOptions()


@each_config
def test_the_command_line(kind: type[RolloutOptions]) -> None:
    parser, arguments = TrlParser((kind,)), ["--output_dir", "unused", "--use_cpu", "--bf16", "false"]
    texts = {"speculative_config": json.dumps(CHOSEN.to_dict()), "drafter_adaptation": '{"learning_rate": 2e-6}'}
    for name, value in (OWN | texts).items():
        arguments += [f"--{name}", str(value)]
    (config,) = parser.parse_args_and_config(arguments)
    assert config.settings() == OWN | CHOSEN.by_place()
    (config,) = parser.parse_args_and_config([*arguments, "--drafter_adaptation", "false"])
    assert config.adaptation is None
    with pytest.raises(ValueError, match="Did you mean 'always'"):  # one sentence, not the parser's usage
        parser.parse_args_and_config([*arguments, "--speculative_config", '{"sd_toggle": "alway"}'])
    usage = " ".join(parser.format_help().split())
    for option in fields(RolloutOptions):
        assert f"--{option.name}" in usage and option.metadata["help"].split(".")[0][:60] in usage


def test_the_controller_of_the_draft_length() -> None:
    """Rises and falls by the shares and after the number of rollouts that the options say."""
    options: dict[str, Any] = dict(initial_draft_length=4, draft_length_up=0.75, draft_length_down=0.25)
    for share, patience, expected in ((0.75, 1, 8), (0.74, 1, 4), (0.26, 1, 4), (0.25, 1, 2), (0.75, 2, 4)):
        of_paper = options | {"draft_length_patience": patience}
        config = SpeculativeConfig(draft_length=[2, 4, 8], sd_toggle="always", efficient_rollout=of_paper)
        (controller,) = draft_length_controllers(config, ["self"], {}).values()
        controller.observe(1 + 4 * share)
        assert controller.draft_length == expected
        saved = DraftLengthState(2, 1.5, [])
        assert draft_length_controllers(config, ["self"], {"self": saved})["self"].draft_length == 2
    roofline = make_config(**drafting(sd_toggle="roofline")).rollout_config()
    assert draft_length_controllers(roofline, ["self"], {})["self"].draft_length == 5
    assert draft_length_controllers(make_config().rollout_config(), ["self"], {}) == {}  # a planner chooses


# ---- What a trainer refuses when it is made ----------------------------------------------------------------------


def own_config(**settings: Any) -> Any:
    policy = tiny_policy()
    vars(policy.generation_config).update(settings)
    return policy


def soft_prompt(kind: type) -> Any:
    return kind(task_type="CAUSAL_LM", num_virtual_tokens=3)


ALORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"generation_kwargs": {"num_beams": 3}}, "num_beams=3 cannot be .*Look in generation_kwargs"),
        (lambda: {"generation_kwargs": {"output_scores": True}}, "output_scores=True cannot be"),
        (lambda: {"generation_kwargs": {"token_healing": True}}, "token_healing=True cannot be .*Look in"),
        (lambda: {"generation_kwargs": {"stop_strings": 5}}, "'int' object is not iterable Look in generation_kwargs"),
        (
            lambda: {"generation_kwargs": {"bad_words_ids": []}},
            "`bad_words_ids` has to be .*Look in generation_kwargs",
        ),
        (lambda: {"generation_kwargs": {"forced_eos_token_id": 99}}, "index 99 is out of bounds .*Look in gen"),
        (lambda: {"generation_kwargs": {"is_assistant": True}}, "TypeError: .*Look in generation_kwargs"),
        (
            lambda: {"policy": BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))},
            "model type 'bloom' is not served",
        ),
        (lambda: {"policy": own_config(num_beams=4)}, "num_beams=4 cannot be .*the model's own generation_config"),
        (lambda: {"trainer": {"peft_config": soft_prompt(PromptTuningConfig)}}, "prompt learning .*Use LoRA"),
        (
            lambda: {"policy": get_peft_model(tiny_policy(), soft_prompt(PrefixTuningConfig))},
            "prompt learning .*Use LoRA",
        ),
        (lambda: {"trainer": {"peft_config": ALORA}}, "aLoRA.*Use LoRA"),
    ],
)
def test_what_no_rollout_serves(tmp_path: Path, options: Callable[[], dict[str, Any]], message: str) -> None:
    """Without drafts neither."""
    with pytest.raises(ValueError, match=message):
        make_run(tmp_path, "none", **options())


@pytest.mark.parametrize("strategy", ["model", "auto", "tts", "eagle3"])
def test_assistants_that_are_no_models(tmp_path: Path, strategy: str) -> None:
    options = {"assistant_model": nn.Linear(2, 2)} | ({"tts": {"drafter": "model"}} if strategy == "tts" else {})
    with pytest.raises(ValueError, match="^assistant_model=Linear (is neither a transformers|with a drafter of)"):
        make_run(tmp_path, strategy, **options)


LONG = "a+" * 30


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_prompts_beyond_the_last_position(tmp_path: Path, name: str) -> None:
    """The row is named when the trainer is made; in a rollout, which may draw another, the prompt."""
    sizes = dict(vocab_size=48, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=1)
    policy = GPT2LMHeadModel(GPT2Config(**sizes))
    rows = [{"prompt": LONG if row == 3 else "a+b="} for row in range(5)]
    given = {"train_dataset": tiny_dataset(), name: Dataset.from_list(rows)}
    with pytest.raises(
        ValueError, match=rf"^{name}\[3\]\['prompt'\] has 61 tokens; .*at 64 its learned positions end"
    ):
        make_run(tmp_path, policy=policy, trainer=given)
    if name == "eval_dataset":
        given[name] = {"sums": given[name]}
        with pytest.raises(ValueError, match=r"^eval_dataset\['sums'\]\[3\]\['prompt'\] has 61 tokens"):
            make_run(tmp_path, policy=policy, trainer=given)
    run = make_run(tmp_path, policy=policy, per_device_eval_batch_size=8)
    with pytest.raises(
        ValueError, match=r"^the prompt '<bos>a\+a\+.*' has 61 tokens; with 16 new ones it would reach 77"
    ):
        run.trainer.evaluate(Dataset.from_list(rows))


def test_prompts_beyond_the_context_go_on(tmp_path: Path) -> None:
    """As in generate, and with one warning, where positions do not end."""
    policy = tiny_policy(max_position_embeddings=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("default", ".*beyond the model's context of 8 ")
        run = train(
            tmp_path,
            policy=policy,
            max_steps=2,
            trainer={"train_dataset": Dataset.from_list([{"prompt": LONG}, {"prompt": LONG + "b"}])},
        )
    assert len([each for each in caught if "beyond the model's context" in str(each.message)]) == 1
    assert len(run.completions) == 2 and sum(run.metric("rollout/acceptance_rate")) > 0


def test_who_generates_by_himself_is_left_alone(tmp_path: Path) -> None:
    make_run(tmp_path, generation_kwargs={"num_beams": 3}, trainer={"rollout_func": lambda *_: {}})


def test_files_and_configs_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="args is a GRPOConfig; SpecGRPOTrainer needs a SpecGRPOConfig"):
        SpecGRPOTrainer(tiny_policy(), lambda completions, **_: [0.0], config, tiny_dataset())
    (tmp_path / "broken.json").write_text('{"version": 1, ')
    with pytest.raises(ValueError, match="broken.json is not a valid roofline profile"):
        make_run(tmp_path, sd_toggle="roofline", efficient_rollout={"profile": str(tmp_path / "broken.json")})


RACE = {"strategy": "best_of_n", "specactor": {"drafters": ["model", "ngram"]}}


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("assistant_model", {"strategy": "model"}),
        ("assistant_model", {"strategy": "auto"}),
        ("assistant_model", {"strategy": "tts", "tts": {"drafter": "model"}}),
        (r"specactor.assistants\['model'\]", RACE),
        ("assistant_model", {"strategy": "eagle3"}),
        ("assistant_model", {"strategy": "dflash"}),
    ],
)
def test_assistants_that_do_not_fit(tmp_path: Path, argument: str, options: dict[str, Any]) -> None:
    kind, other, is_no_model = options["strategy"], str(tmp_path / "other"), "is no causal LM that can be loaded"
    if kind in ("eagle3", "dflash"):
        make_checkpoint(tmp_path / "other", kind, 50)
        is_no_model = "has no config.json"
    else:
        tiny_policy(vocab_size=50, num_hidden_layers=1).save_pretrained(other)
    for path, message in (
        ("/no/such/folder", "is a folder that does not exist"),
        (str(tmp_path), is_no_model),
        (other, "has a vocabulary of 50 tokens"),
    ):
        given = {"specactor": {"assistants": {"model": path}}} if options is RACE else {"assistant_model": path}
        with pytest.raises(ValueError, match=f"^{argument}='{path}' {message}"):
            make_run(tmp_path, **merged(options, given))


def test_a_parsed_command_line_may_leave_out_what_is_none(tmp_path: Path) -> None:
    """HfArgumentParser changes the fields' types in place."""
    (config,) = HfArgumentParser(SpecGRPOConfig).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    )
    assert config.assistant_model is None
    SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
