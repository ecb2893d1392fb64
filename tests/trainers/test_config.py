"""Configs, and what is refused when a trainer is made: by the name that the user set, before any work."""

import copy
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
from spec_trl.generation.options import OPTIONS
from spec_trl.trainers.checkpoint import DraftLengthState
from spec_trl.trainers.rollout_options import RolloutOptions
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.harness import make_run, tiny_dataset, tiny_policy, train


CONFIGS = (SpecGRPOConfig, SpecRLOOConfig, SpecDistillationConfig, SpecGMPOConfig)
each_config = pytest.mark.parametrize("kind", CONFIGS)


def make_config(kind: type[RolloutOptions] = SpecGRPOConfig, **options: Any) -> RolloutOptions:
    return kind(**{"output_dir": "unused", "use_cpu": True, "bf16": False} | options)


def name_of(value: object) -> str:
    return "-".join(map(str, value.items())) if isinstance(value, dict) else ""


BEST_OF_N = {"assistant_strategy": "best_of_n"}
TTS = {"assistant_strategy": "tts"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"assistant_strategy": "selv"}, r"assistant_strategy='selv' is unknown; choose one of .*Did you mean 'self'"),
        ({"assistant_strategy": "auto", "assistant_model": "./nothing"}, "^assistant_model='./nothing' is a folder"),
        ({"assistant_strategy": "model", "assistant_model": __file__}, "test_config.py' is a file; give"),
        ({"initial_draft_length": 6}, r"^initial_draft_length=6 is not one of draft_lengths=\[5, 7, 9, 11\]"),
        ({"draft_lengths": [5, 5]}, r"^draft_lengths=\[5, 5\] is not ascending"),
        ({"draft_lengths": [0]}, r"^draft_lengths=\[0\] must lie between 1 and 64"),
        ({"draft_lengths": []}, r"^draft_lengths=\[\] must be a list of at least one integer"),
        ({"draft_lengths": [5, 65]}, r"^draft_lengths=\[5, 65\] must lie between 1 and 64"),
        ({"draft_lengths": [5, 7.5]}, r"^draft_lengths=.* must be a list of at least one integer"),
        ({"draft_lengths": 5}, r"^draft_lengths=5 must be a list of .*integer, e.g. \[5, 7, 9, 11\]"),
        ({"draft_length_up": 1.5}, "^draft_length_down=0.85 and draft_length_up=1.5 must be shares"),
        ({"draft_length_down": 0.94}, "^draft_length_down=0.94 and draft_length_up=0.94 must be"),
        ({"draft_length_down": 0.0}, "^draft_length_down=0.0 and draft"),
        ({"draft_length_patience": 1.5}, "^draft_length_patience=1.5 is a float; pass an integer"),
        ({"draft_length_patience": 0}, "^draft_length_patience=0 is out of range; it must be at least 1"),
        ({"rollout_sharing": "all"}, "^rollout_sharing='all' is unknown; choose one of"),
        ({"draft_ranks": -1}, "^draft_ranks=-1 is out of range; it must be at least 0"),
        ({"rollout_batch_size": 0}, "^rollout_batch_size=0 is out of range; it must be at least 1"),
        ({"drafter_adaptation": "no"}, "^drafter_adaptation='no' is no bool"),
        ({"drafter_learning_rate": 0.0}, "^drafter_learning_rate=0.0 is out of range; it must be a positive number"),
        ({"drafter_hidden_weight": -1.0}, "^drafter_hidden_weight=-1.0 is out of range; it must be a number of at"),
        ({"drafter_token_weight": math.inf}, "^drafter_token_weight=inf is out of range"),
        (BEST_OF_N | {"assistant_model": "some/drafter"}, "assistant_model serves exactly one of them"),
        ({"keep_graphs": "maybe"}, '^keep_graphs=.maybe. is no bool; pass True or False or "auto"'),
        (TTS | {"tts_stride": "0"}, "^tts_stride=0 is out of range"),
        # names that generate, or another TRL, has
        ({"draft_length": 5}, r"has no option 'draft_length' \(given 5\). Set draft_lengths=.*initial_draft_length"),
        ({"speculative_config": {"seed": 1}}, "has no option 'speculative_config' .*Its fields are options here"),
        ({"max_prompt_length": 9}, "has no option 'max_prompt_length' .*: cut prompts in the dataset"),
        ({"max_batch_size": 9}, "has no option 'max_batch_size' .*Set rollout_batch_size"),
        ({"asistant_model": "a/b"}, "has no option 'asistant_model' .*Did you mean 'assistant_model'"),
        ({"qqqqqq": 1}, "has no option 'qqqqqq' .*TRL has none"),
        # settings that belong elsewhere, or are of another type
        ({"generation_kwargs": {"assistant_strategy": "self"}}, r"Set SpecGRPOConfig\(assistant_strategy=\.\.\.\)"),
        ({"generation_kwargs": {"speculative_config": {}}}, "has 'speculative_config'.*Its fields are options here"),
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
        ({"max_batch_size": 9}, "^{0}Config has no option 'max_batch_size' .*Set rollout_batch_size"),
        ({"speculative_config": {}}, r"^{0}Config has no option .*Its fields are options here: {0}Config\(verif"),
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

    assert Named(name="a", output_dir="unused", use_cpu=True, bf16=False).draft_lengths == [5, 7, 9, 11]
    assert Longer(name="a", output_dir="unused", use_cpu=True, bf16=False).name == "a"
    copied = pickle.loads(pickle.dumps(make_config(draft_lengths=[3])))
    assert copied.draft_lengths == copy.deepcopy(copied).draft_lengths == [3]


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

VALUES: dict[str, Any] = {
    "sd_toggle": "roofline", "sd_margin": 0.1, "roofline_profile": "p.json", "roofline_mismatch": "error",
    "history_max_tokens": 1000, "draft_quantization": "rtn-w8",
    "draft_kernel": "reference", "draft_lm_head": "dense", "runner": "compiled", "max_graph_memory": 2.5,
    "keep_graphs": "True", "exact": "True", "tts_drafter": "model",
    "tts_learning_rate": 2e-4, "tts_scope": "rollout", "tts_steps": 2,
    "tts_stride": "5", "tts_anchor_weight": 0.5, "tts_anchor": "initial", "tts_asynchronous": True,
    "tts_rank": 4, "best_of_n_drafters": ["history", "model", "tts"],
    "best_of_n_assistants": {"model": "some/drafter"},
    "best_of_n_budget": 64, "best_of_n_race": False,
    "decoupled_execution": "auto", "verification": "exact",
}  # fmt: skip
"""Another value than the default of each option that the trainer shares with `generate`, but for verification="exact",
which a race needs."""
OWN: dict[str, Any] = {
    "assistant_strategy": "best_of_n", "assistant_model": "some/drafter", "draft_lengths": [3, 7],
    "initial_draft_length": 7, "draft_length_up": 0.9, "draft_length_down": 0.8, "draft_length_patience": 3,
    "rollout_batch_size": 4, "rollout_sharing": "own", "drafter_adaptation": False, "drafter_learning_rate": 2e-6,
    "drafter_hidden_weight": 0.5, "drafter_token_weight": 0.2, "draft_ranks": 0, "exact_logprobs": True,
}  # fmt: skip
"""The same for the trainer's own options; others of "draft_ranks" do not go with these."""


@each_config
def test_every_option_reaches_generate(kind: type[RolloutOptions]) -> None:
    config = make_config(kind, **VALUES, **OWN, seed=11)
    passed = vars(config.speculative_config())
    expected = VALUES | {"draft_length": 7, "max_batch_size": 4, "seed": 11, "tts_stride": 5}
    expected |= {"keep_graphs": True, "exact": True}
    assert {name: passed[name] for name in expected} == expected
    assert OPTIONS.keys() - expected.keys() == {"ngram_size"}
    assert make_config(kind, assistant_strategy="tts", tts_stride="3").speculative_config().tts_stride == 3
    rejecting = make_config(kind, assistant_strategy="self", verification="rejection").speculative_config()
    assert rejecting.verification == "rejection"
    assert make_config(kind, assistant_strategy="best_of_n").speculative_config().best_of_n_race is True
    (base,) = {*kind.__bases__} - {RolloutOptions}
    inherited = {option.name for option in fields(base)}
    assert [option.name for option in fields(kind)] == [
        option.name for part in (base, RolloutOptions) for option in fields(part)
    ]
    assert config.own_options() == VALUES | OWN
    assert config.own_options().keys() == {option.name for option in fields(kind)} - inherited
    ours, theirs = vars(make_config(kind).speculative_config()), vars(SpeculativeConfig())
    differ = {name for name in theirs if ours[name] != theirs[name]}
    assert differ == {"seed", "keep_graphs", "tts_scope", "best_of_n_drafters", "best_of_n_race"}
    assert tuple(ours["best_of_n_drafters"]) == theirs["best_of_n_drafters"]


def test_the_controller_of_the_draft_length() -> None:
    """Rises and falls by the shares and after the number of rollouts that the options say."""
    options = dict(draft_lengths=[2, 4, 8], initial_draft_length=4, draft_length_up=0.75, draft_length_down=0.25)
    for share, patience, expected in ((0.75, 1, 8), (0.74, 1, 4), (0.26, 1, 4), (0.25, 1, 2), (0.75, 2, 4)):
        config = make_config(**options, draft_length_patience=patience, assistant_strategy="self", sd_toggle="always")
        (controller,) = config.draft_length_controllers(["self"], {}).values()
        controller.observe(1 + 4 * share)
        assert controller.draft_length == expected
        saved = DraftLengthState(2, 1.5, [])
        assert config.draft_length_controllers(["self"], {"self": saved})["self"].draft_length == 2
    assert make_config(sd_toggle="roofline").draft_length_controllers(["self"], {})["self"].draft_length == 5
    assert make_config().draft_length_controllers(["self"], {}) == {}  # a planner chooses


@each_config
def test_the_command_line(kind: type[RolloutOptions]) -> None:
    parser, arguments = TrlParser((kind,)), ["--output_dir", "unused", "--use_cpu", "--bf16", "false"]
    for name, value in (VALUES | OWN).items():
        words = value if isinstance(value, list) else [str(value).replace("'", '"')]
        arguments += [f"--{name}", *map(str, words)]
    (config,) = parser.parse_args_and_config(arguments)
    assert config.own_options() == VALUES | OWN
    with pytest.raises(ValueError, match="Did you mean 'always'"):  # one sentence, not the parser's usage
        parser.parse_args_and_config([*arguments, "--sd_toggle", "alway"])
    usage = " ".join(parser.format_help().split())
    for option in fields(kind):
        if option.name in VALUES | OWN:
            assert f"--{option.name}" in usage and option.metadata["help"].split(".")[0][:60] in usage


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
    options = {"assistant_model": nn.Linear(2, 2)} | ({"tts_drafter": "model"} if strategy == "tts" else {})
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
        make_run(tmp_path, sd_toggle="roofline", roofline_profile=str(tmp_path / "broken.json"))


RACE = {"strategy": "best_of_n", "best_of_n_drafters": ["model", "ngram"]}


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("assistant_model", {"strategy": "model"}),
        ("assistant_model", {"strategy": "auto"}),
        ("assistant_model", {"strategy": "tts", "tts_drafter": "model"}),
        (r"best_of_n_assistants\['model'\]", RACE),
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
        given = {"best_of_n_assistants": {"model": path}} if options is RACE else {"assistant_model": path}
        with pytest.raises(ValueError, match=f"^{argument}='{path}' {message}"):
            make_run(tmp_path, **options, **given)


def test_a_parsed_command_line_may_leave_out_what_is_none(tmp_path: Path) -> None:
    """HfArgumentParser changes the fields' types in place."""
    (config,) = HfArgumentParser(SpecGRPOConfig).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    )
    assert config.initial_draft_length is None
    SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
