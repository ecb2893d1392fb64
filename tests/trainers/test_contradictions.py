"""What would end the first rollout, maybe after minutes of calibrating, is refused when the trainer is made."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM

from spec_trl import SpecGRPOConfig

from spec_trl.scheduling.profile import Profile
from tests.generation.drafters.test_feature_drafter import make_checkpoint
from tests.trainers.harness import make_trainer, tiny_policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_kwargs": {"num_beams": 3}}, "num_beams=3 cannot be .*Look in generation_kwargs"),
        ({"cache_implementation": "static"}, "cache_implementation='static' cannot be .*Look in"),
        ({"generation_kwargs": {"output_scores": True}}, "output_scores=True cannot be"),
        ({"runner": "graph"}, 'runner="graph" captures CUDA graphs, and the model is on cpu'),
        (
            {"policy": BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))},
            "model type 'bloom' is not served",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("strategy", ["none", "self"])
def test_modes_that_no_rollout_serves(tmp_path: Path, strategy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, strategy, **options)


def test_modes_of_the_models_own_generation_config(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="num_beams=4 cannot be .*the model's own generation_config"):
        make_trainer(tmp_path, policy=policy)


def test_whoever_generates_himself_is_left_alone(tmp_path: Path) -> None:
    make_trainer(tmp_path, generation_kwargs={"num_beams": 3}, trainer={"rollout_func": lambda *_: {}})


# ---- Assistants ------------------------------------------------------------------------------------------------

ARGUMENTS = [
    ("assistant_model", {"strategy": "model"}),
    ("assistant_model", {"strategy": "auto"}),
    ("assistant_model", {"strategy": "tts", "tts_drafter": "model"}),
    ("assistant_model", {"strategy": "best_of_n", "best_of_n_drafters": ["model", "ngram"]}),
    (r"best_of_n_assistants\['model'\]", {"strategy": "best_of_n", "best_of_n_drafters": ["model", "ngram"]}),
]


def naming(argument: str, options: dict[str, Any], path: str) -> dict[str, Any]:
    return options | ({argument: path} if argument == "assistant_model" else {"best_of_n_assistants": {"model": path}})


@pytest.mark.parametrize(("argument", "options"), ARGUMENTS)
@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing"])
def test_a_folder_that_does_not_exist(tmp_path: Path, argument: str, options: dict[str, Any], path: str) -> None:
    given = naming(argument, options, path)
    with pytest.raises(ValueError, match=f"^{argument}='{path}' is a folder that does not exist"):
        SpecGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, assistant_strategy=given.pop("strategy"), **given)


@pytest.mark.parametrize(("argument", "options"), ARGUMENTS)
def test_what_may_be_a_hub_id_is_looked_up(tmp_path: Path, argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}='no/drafter' is no causal LM that can be loaded"):
        make_trainer(tmp_path, **naming(argument, options, "no/drafter"))


@pytest.mark.parametrize(("argument", "options"), ARGUMENTS)
def test_another_vocabulary(tmp_path: Path, argument: str, options: dict[str, Any]) -> None:
    tiny_policy(vocab_size=50, num_hidden_layers=1).save_pretrained(tmp_path / "other")
    path = str(tmp_path / "other")
    with pytest.raises(
        ValueError, match=f"^{argument}='{path}' has a vocabulary of 50 tokens and the target one of 48"
    ):
        make_trainer(tmp_path, **naming(argument, options, path))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_another_vocabulary_of_a_learned_drafter(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path / kind, kind, 50)
    with pytest.raises(ValueError, match=f"^assistant_model='{path}' has a vocabulary of 50 tokens"):
        make_trainer(tmp_path, kind, assistant_model=path)
    with pytest.raises(ValueError, match=f"^assistant_model='{tmp_path}' has no config.json"):
        make_trainer(tmp_path, kind, assistant_model=str(tmp_path))


# ---- Profiles --------------------------------------------------------------------------------------------------


def test_a_profile_that_does_not_exist_is_written_and_says_so(tmp_path: Path, quick_calibration: list[int]) -> None:
    for name in ("first", "second"):  # calibrated, and from the cache
        trainer, _ = make_trainer(
            tmp_path, max_steps=1, sd_toggle="roofline", roofline_profile=str(tmp_path / f"{name}.json")
        )
        with pytest.warns(UserWarning, match=f"roofline_profile='.*{name}.json' does not exist and is written now"):
            trainer.train()
        assert Profile.load(tmp_path / f"{name}.json")
    assert len(quick_calibration) == 1


@pytest.mark.parametrize("path", ["no/such/folder/profile.json", "."])
def test_a_profile_that_cannot_be_written(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=f"^roofline_profile='{path}' must be a file in a folder that exists"):
        SpecGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, sd_toggle="roofline", roofline_profile=path)


def test_a_profile_that_is_only_read_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing.json' is no file that exists; .*sd_toggle=.roofline."):
        require_profile(str(tmp_path / "missing.json"), calibrates=False)
    (tmp_path / "profile.json").touch()
    require_profile(str(tmp_path / "profile.json"), calibrates=False)


def test_draft_lengths_that_are_no_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^draft_lengths=5 must be a list of .*integer, e.g. \[5, 7, 9, 11\]"):
        SpecGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, draft_lengths=5)
