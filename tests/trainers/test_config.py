"""SpecGRPOConfig: every field acts, every bad value is refused by the name the user set, all of it parses."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.generation import kept
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine import captured
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.quantization.kernels import ReferenceInt4
from spec_trl.scheduling.profile import Profile
from tests.generation.drafters.test_feature_drafter import make_checkpoint
from tests.generation.engine.tape import Tape
from tests.trainers import test_best_of_n, test_tts
from tests.trainers.harness import Run, make_trainer, tiny_dataset, tiny_policy


@pytest.fixture
def run_one_step(tmp_path: Path) -> Callable[..., tuple[Any, Run]]:
    """Trains one step; returns the drafter that was used, and the run."""

    def run(**options: Any) -> tuple[Any, Run]:
        trainer, run = make_trainer(tmp_path, **{"max_steps": 1} | options)
        trainer.train()
        return trainer._drafters[0] if trainer._drafters else None, run

    return run


OneStep = Callable[..., tuple[Any, Run]]


def test_no_field_without_a_test_of_its_effect() -> None:
    added = {field.name for field in fields(SpecGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    names = globals() | vars(test_tts) | vars(test_best_of_n)
    tested = {name.removeprefix("test_effect_of_") for name in names if name.startswith("test_effect_of_")}
    assert added == tested


def test_effect_of_assistant_strategy(run_one_step: OneStep) -> None:
    assert run_one_step(strategy="none")[0] is None
    assert type(run_one_step(strategy="self")[0]) is SelfDrafter
    assert type(run_one_step(strategy="ngram")[0]) is NgramDrafter
    assert type(run_one_step(strategy="history")[0]) is HistoryDrafter


def test_effect_of_assistant_model(run_one_step: OneStep, tmp_path: Path) -> None:
    assistant = tiny_policy(seed=1, num_hidden_layers=1)
    assistant.save_pretrained(tmp_path / "assistant")
    drafter, _ = run_one_step(strategy="model", assistant_model=str(tmp_path / "assistant"))
    assert type(drafter) is SmallModelDrafter
    loaded = drafter.network.state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in assistant.state_dict().items())


def lengths_in_force(run: Run) -> list[int]:
    return [math.ceil(length) for length in run.metric("rollout/draft_length")]  # rows near their end draft less


@pytest.mark.parametrize("draft_length", [1, 4])
def test_effect_of_draft_lengths(run_one_step: OneStep, draft_length: int) -> None:
    assert lengths_in_force(run_one_step(draft_lengths=[draft_length, 9])[1]) == [draft_length]


def test_effect_of_initial_draft_length(run_one_step: OneStep) -> None:
    assert lengths_in_force(run_one_step(draft_lengths=[2, 4], initial_draft_length=4)[1]) == [4]


CLIMBING: dict[str, Any] = dict(
    draft_lengths=[1, 2, 3, 4], draft_length_up=1e-3, draft_length_down=1e-4, draft_length_patience=1, max_steps=4
)


def test_effect_of_draft_length_up(run_one_step: OneStep) -> None:
    assert lengths_in_force(run_one_step(**CLIMBING)[1]) == [1, 2, 3, 4]
    assert lengths_in_force(run_one_step(**CLIMBING | {"draft_length_up": 1.0})[1]) == [1] * 4


def test_effect_of_draft_length_patience(run_one_step: OneStep) -> None:
    assert lengths_in_force(run_one_step(**CLIMBING | {"draft_length_patience": 2})[1]) == [1, 1, 2, 2]


def test_effect_of_draft_length_down(run_one_step: OneStep) -> None:
    falling = dict(
        draft_lengths=[1, 2, 3, 4], initial_draft_length=4, draft_length_up=1.0, draft_length_patience=1, max_steps=4
    )
    assert lengths_in_force(run_one_step(**falling, draft_length_down=0.999)[1]) == [4, 3, 2, 1]
    assert lengths_in_force(run_one_step(**falling, draft_length_down=1e-3)[1]) == [4] * 4


def test_effect_of_sd_toggle(run_one_step: OneStep, profiles: dict[str, str]) -> None:
    """Profiles of imaginary machines: speculation pays on one, not on the other."""
    fraction = {
        toggle: run_one_step(sd_toggle=toggle)[1].metric("rollout/sd_on_fraction") for toggle in ("always", "never")
    }
    assert fraction["always"][0] > 0.5
    assert fraction["never"] == []  # nothing drafts, as with assistant_strategy="none"
    for which, pays in (("pays", True), ("does not", False)):
        _, run = run_one_step(sd_toggle="roofline", roofline_profile=profiles[which])
        assert (run.metric("rollout/sd_on_fraction")[0] > 0) is pays


def test_effect_of_sd_margin(run_one_step: OneStep, profiles: dict[str, str]) -> None:
    _, run = run_one_step(sd_toggle="roofline", roofline_profile=profiles["pays"], sd_margin=1e6)
    assert run.metric("rollout/sd_on_fraction") == [0.0]


def test_effect_of_roofline_profile(run_one_step: OneStep, tmp_path: Path, quick_calibration: list[int]) -> None:
    path = tmp_path / "mine.json"
    run_one_step(sd_toggle="roofline", roofline_profile=str(path))
    assert len(quick_calibration) == 1
    assert Profile.load(path).draft_max_rows == SelfDrafter(tiny_policy()).max_rows
    run_one_step(sd_toggle="roofline", roofline_profile=str(path))
    assert len(quick_calibration) == 1  # read, not measured again


def test_broken_profile_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"version": 1, ')
    with pytest.raises(ValueError, match="broken.json is not a valid roofline profile"):
        make_trainer(tmp_path, sd_toggle="roofline", roofline_profile=str(tmp_path / "broken.json"))


def test_profile_in_the_cache_and_in_the_output(
    run_one_step: OneStep, tmp_path: Path, quick_calibration: list[int]
) -> None:
    for _ in range(2):
        run_one_step(sd_toggle="roofline")
    assert len(quick_calibration) == 1
    assert Profile.load(tmp_path / "roofline_profile.json")


def test_effect_of_roofline_mismatch(
    run_one_step: OneStep, tmp_path: Path, profiles: dict[str, str], quick_calibration: list[int]
) -> None:
    other = Profile.load(profiles["pays"])
    other = replace(other, key=replace(other.key, dtype="float16", hardware="abacus"))
    other.save(tmp_path / "other.json")
    given = dict(sd_toggle="roofline", roofline_profile=str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match="hardware is 'abacus' there .*dtype is 'float16' there"):
        run_one_step(**given, roofline_mismatch="error")
    with pytest.warns(UserWarning, match="hardware is 'abacus' there .*Calibrating again"):
        run_one_step(**given)
    assert len(quick_calibration) == 1
    assert Profile.load(tmp_path / "other.json") == other  # the user's file is left alone


def test_effect_of_history_max_tokens(run_one_step: OneStep) -> None:
    drafter, _ = run_one_step(strategy="history", max_steps=3, history_max_tokens=100)
    assert 0 < len(drafter.history) <= 100


def test_effect_of_verification(run_one_step: OneStep) -> None:
    (_, none), (_, exact), (_, rejection) = (
        run_one_step(**options)
        for options in ({"strategy": "none"}, {"verification": "exact"}, {"verification": "rejection"})
    )
    assert none.completions == exact.completions != rejection.completions
    assert rejection.metric("rollout/acceptance_rate")[0] > 0.25


@pytest.mark.parametrize(
    ("scheme", "bits", "group"), [("rtn-w4-g128", 4, 64), ("rtn-w4-g32", 4, 32), ("rtn-w8", 8, 64)]
)
def test_effect_of_draft_quantization(run_one_step: OneStep, scheme: str, bits: int, group: int) -> None:
    layers = run_one_step(draft_quantization=scheme)[0].quantized.layers
    query = layers["model.layers.0.self_attn.q_proj"].packed  # rows of 64
    assert (query.layer.bits, query.layer.group) == (bits, group)


def test_effect_of_draft_kernel(run_one_step: OneStep) -> None:
    kernels = {
        name: {type(layer.packed) for layer in run_one_step(draft_kernel=name)[0].quantized.layers.values()}
        for name in ("auto", "reference")
    }
    assert kernels["reference"] == {ReferenceInt4}
    assert ReferenceInt4 not in kernels["auto"]


def test_effect_of_draft_lm_head(run_one_step: OneStep) -> None:
    packed = {
        choice: "lm_head" in run_one_step(draft_lm_head=choice)[0].quantized.layers for choice in ("dense", "packed")
    }
    assert packed == {"dense": False, "packed": True}


@pytest.mark.parametrize(("rows", "in_flight"), [(3, 3), (None, 8), (100, 8)])
def test_effect_of_rollout_batch_size(
    run_one_step: OneStep, monkeypatch: pytest.MonkeyPatch, rows: int | None, in_flight: int
) -> None:
    capacities = []
    begin = Drafter.begin

    def watch(drafter: Drafter, session: DraftSession) -> None:
        capacities.append(session.rows.capacity)
        begin(drafter, session)

    monkeypatch.setattr(Drafter, "begin", watch)
    _, run = run_one_step(rollout_batch_size=rows)
    assert capacities == [in_flight]
    assert len(run.completions[0]) == 8


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"assistant_strategy": "selv"}, r"assistant_strategy='selv' is unknown; choose one of \['none', 'self'"),
        ({"assistant_strategy": "model"}, "assistant_strategy='model' with assistant_model=None"),
        ({"assistant_model": "gpt2"}, "assistant_strategy='self' with assistant_model='gpt2'"),
        ({"initial_draft_length": 6}, r"^initial_draft_length=6 is not one of draft_lengths=\[5, 7, 9, 11\]"),
        ({"draft_lengths": [5, 5]}, r"^draft_lengths=\[5, 5\] is not ascending"),
        ({"draft_lengths": [0]}, r"^draft_lengths=\[0\] must lie between 1 and 64"),
        ({"draft_length_down": 0.94}, "^draft_length_down=0.94 must be above 0 and below draft_length_up=0.94"),
        ({"draft_length_patience": 0}, "^draft_length_patience=0 must be an integer of at least 1"),
        ({"sd_toggle": "on"}, r"^sd_toggle='on' is unknown; choose one of \['measured', 'roofline',"),
        ({"sd_margin": -0.1}, "^sd_margin=-0.1 is out of range"),
        ({"roofline_mismatch": "ignore"}, "^roofline_mismatch='ignore' is unknown"),
        ({"roofline_profile": "p.json", "sd_toggle": "always"}, "^roofline_profile='p.json' is not read under"),
        ({"roofline_profile": "p.json", "assistant_strategy": "none"}, "^roofline_profile='p.json' has no use with"),
        ({"history_max_tokens": 0}, "^history_max_tokens=0 is out of range"),
        ({"rollout_batch_size": 0}, "^rollout_batch_size=0 is out of range; it must be at least 1"),
        ({"rollout_batch_size": "8"}, "^rollout_batch_size='8' is a str; pass an integer"),
        ({"verification": "greedy"}, r"^verification='greedy' is unknown; choose one of \['exact', 'rejection'\]"),
        ({"draft_quantization": "w4"}, r"^draft_quantization='w4' is unknown; choose one of \['rtn-w4-g128'"),
        ({"draft_kernel": "marlln"}, r"^draft_kernel='marlln' is unknown; choose one of \['auto', 'torch_int4'"),
        ({"draft_lm_head": "sparse"}, r"^draft_lm_head='sparse' is unknown; choose one of \['auto', 'dense'"),
        (
            {"assistant_strategy": "ngram", "verification": "rejection"},
            'verification="rejection" needs draft probabilities, which assistant_strategy=.ngram. has none of',
        ),
        ({"drafter_learning_rate": 0.0}, "^drafter_learning_rate=0.0 is out of range; it must be a number above 0"),
        ({"drafter_learning_rate": math.nan}, "^drafter_learning_rate=nan is out of range"),
        (
            {"drafter_hidden_weight": -1.0},
            "^drafter_hidden_weight=-1.0 is out of range; it must be a number of at least 0",
        ),
        ({"drafter_token_weight": math.inf}, "^drafter_token_weight=inf is out of range"),
        (
            {"drafter_hidden_weight": 0, "drafter_token_weight": 0},
            "^drafter_hidden_weight=0 and drafter_token_weight=0 leave the drafter nothing to learn",
        ),
        ({"use_vllm": True}, "use_vllm=True contradicts assistant_strategy='self'.* Set use_vllm=False"),
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching=True contradicts assistant_strategy='self'",
        ),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False contradicts SpecGRPOTrainer"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_values(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **bad)


def test_plain_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args is a GRPOConfig; SpecGRPOTrainer needs a SpecGRPOConfig"):
        SpecGRPOTrainer(
            tiny_policy(), lambda completions, **_: [0.0], GRPOConfig(str(tmp_path), use_cpu=True, bf16=False),
            tiny_dataset(),
        )  # fmt: skip


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    return tape


def test_effect_of_runner(run_one_step: OneStep, tape: Tape) -> None:
    run_one_step(runner="eager")
    assert tape.recorded == 0
    run_one_step(runner="graph")
    assert tape.recorded > 0


def test_effect_of_max_graph_memory(run_one_step: OneStep, tape: Tape) -> None:
    with pytest.warns(UserWarning, match="reaches max_graph_memory=0.0005"):
        run_one_step(max_graph_memory=0.0005, max_completion_length=32)
    assert tape.recorded == 1


@pytest.mark.parametrize("keep", [True, False])
def test_effect_of_keep_graphs(tmp_path: Path, tape: Tape, keep: bool) -> None:
    trainer, _ = make_trainer(tmp_path, max_steps=1, keep_graphs=keep)
    trainer.train()
    assert tape.recorded > 0
    assert (kept.look(trainer.model, "runner") is not None) == keep


@pytest.fixture
def run_eagle3(run_one_step: OneStep, tmp_path: Path) -> Callable[..., tuple[dict[str, Tensor], Run]]:
    """Trains one step with an EAGLE-3 drafter; returns how far its weights moved, by name, and the run."""
    checkpoint = make_checkpoint(tmp_path / "eagle3", "eagle3", tiny_policy().config.vocab_size)
    loaded = Eagle3Drafter(checkpoint, tiny_policy()).network.state_dict()

    def run(**options: Any) -> tuple[dict[str, Tensor], Run]:
        drafter, run = run_one_step(strategy="eagle3", assistant_model=checkpoint, **options)
        weights = drafter.network.state_dict()
        return {name: (weights[name] - loaded[name]).abs().max() for name in loaded}, run

    return run


Eagle3Run = Callable[..., tuple[dict[str, Tensor], Run]]


def test_effect_of_drafter_adaptation(run_eagle3: Eagle3Run) -> None:
    assert any(run_eagle3()[0].values())
    assert not any(run_eagle3(drafter_adaptation=False)[0].values())


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_effect_of_drafter_learning_rate(run_eagle3: Eagle3Run, rate: float) -> None:
    moved, _ = run_eagle3(drafter_learning_rate=rate)
    assert max(moved.values()) == pytest.approx(rate, rel=1e-3)  # Adam's first step


def test_effect_of_drafter_hidden_weight(run_eagle3: Eagle3Run) -> None:
    without, one, two = (
        run_eagle3(drafter_hidden_weight=weight)[1].metric("drafter/loss")[0] for weight in (0.0, 1.0, 2.0)
    )
    assert two - one == pytest.approx(one - without, rel=1e-5) and one > without > 0


def test_effect_of_drafter_token_weight(run_eagle3: Eagle3Run) -> None:
    (moved, without), (_, tenth), (_, fifth) = (run_eagle3(drafter_token_weight=weight) for weight in (0.0, 0.1, 0.2))
    assert moved["lm_head.weight"] == 0 < moved["fc.weight"]  # hidden states alone say nothing of the head
    losses = [run.metric("drafter/loss")[0] for run in (without, tenth, fifth)]
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-5) and losses[1] > losses[0] > 0


COMMAND_LINE = (
    "--use_cpu --bf16 false --output_dir out --assistant_strategy model --assistant_model some/drafter "
    "--draft_lengths 3 7 --initial_draft_length 7 --draft_length_up 0.9 --draft_length_down 0.8 "
    "--draft_length_patience 3 --sd_toggle roofline --sd_margin 0.1 --roofline_profile p.json "
    "--roofline_mismatch error --history_max_tokens 1000 "
    "--verification rejection --draft_quantization rtn-w8 --draft_kernel reference "
    "--draft_lm_head dense --rollout_batch_size 4 --runner compiled --max_graph_memory 2.5 --keep_graphs false "
    "--drafter_adaptation false --drafter_learning_rate 2e-6 --drafter_hidden_weight 0.5 --drafter_token_weight 0.2 "
    "--tts_drafter model --tts_learning_rate 2e-4 --tts_scope rollout --tts_steps 2 --tts_stride adaptive "
    "--tts_anchor_weight 0.5 --tts_anchor initial --tts_asynchronous --tts_rank 4 "
    '--best_of_n_drafters ngram model --best_of_n_assistants {"model":"some/drafter"} --best_of_n_budget 64 '
    "--best_of_n_tolerance 0.1 --best_of_n_race false"
).split()


@pytest.mark.parametrize(
    "parse",
    [
        lambda arguments: HfArgumentParser(SpecGRPOConfig).parse_args_into_dataclasses(arguments),
        lambda arguments: TrlParser((SpecGRPOConfig,)).parse_args_and_config(arguments),
    ],
    ids=["HfArgumentParser", "TrlParser"],
)
def test_command_line(parse: Callable[[list[str]], tuple[SpecGRPOConfig]]) -> None:
    (config,) = parse(COMMAND_LINE)
    own = {field.name for field in fields(SpecGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert {name: getattr(config, name) for name in own} == {
        "assistant_strategy": "model", "assistant_model": "some/drafter", "draft_lengths": [3, 7],
        "initial_draft_length": 7, "draft_length_up": 0.9, "draft_length_down": 0.8, "draft_length_patience": 3,
        "sd_toggle": "roofline", "sd_margin": 0.1, "roofline_profile": "p.json", "roofline_mismatch": "error",
        "history_max_tokens": 1000,
        "verification": "rejection", "draft_quantization": "rtn-w8", "draft_kernel": "reference",
        "draft_lm_head": "dense", "rollout_batch_size": 4, "runner": "compiled", "max_graph_memory": 2.5,
        "keep_graphs": False, "drafter_adaptation": False, "drafter_learning_rate": 2e-6,
        "drafter_hidden_weight": 0.5, "drafter_token_weight": 0.2,
        "tts_drafter": "model", "tts_learning_rate": 2e-4, "tts_scope": "rollout", "tts_steps": 2,
        "tts_stride": "adaptive", "tts_anchor_weight": 0.5, "tts_anchor": "initial", "tts_asynchronous": True,
        "tts_rank": 4, "best_of_n_drafters": ["ngram", "model"],
        "best_of_n_assistants": {"model": "some/drafter"}, "best_of_n_budget": 64, "best_of_n_tolerance": 0.1,
        "best_of_n_race": False,
    }  # fmt: skip


def test_every_field_says_what_it_does_on_the_command_line() -> None:
    usage = HfArgumentParser(SpecGRPOConfig).format_help()
    for field in fields(SpecGRPOConfig):
        if field.name not in {inherited.name for inherited in fields(GRPOConfig)}:
            assert f"--{field.name}" in usage
            assert field.metadata["help"]
            assert f"{field.name} (" in (SpecGRPOConfig.__doc__ or "")
