"""Single rollouts of a trainer: when it speculates, what it measures once, and TRL's other ways into a rollout."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast, ProcessorMixin

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer, SpeculativeConfig
from spec_trl.drafter_training.adaptation import AdaptationOptions
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.parked_rows import ParkedRows
from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.generation.planner.planner import Planner
from spec_trl.papers.efficient_rollout import profile_cache as profiles_module
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.specactor import ladder_calibration
from spec_trl.trainers import trainer_speculator
from spec_trl.trainers.run_log import read_run
from spec_trl.trainers.step_totals import RolloutSums
from tests.generation.drafters.watching import make_checkpoint
from tests.option_groups import merged
from tests.trainers.conftest import Asked
from tests.trainers.harness import (
    PROMPTS,
    Run,
    make_run,
    roll_out,
    tiny_dataset,
    tiny_policy,
    train,
    train_plainly,
)
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


# ---- Who drafts ----------------------------------------------------------------------------------------------------


def test_strategies(tmp_path: Path, level_ladder: Asked) -> None:
    small = str(tmp_path / "small")
    tiny_policy(seed=1, num_hidden_layers=1).save_pretrained(small)
    best_of_n = {"strategy": "best_of_n", "specactor": {"drafters": ["ngram", "model"]}}
    for options, expected in (
        ({"strategy": "none"}, []),
        ({"strategy": "self"}, [SelfDrafter]),
        ({"strategy": "ngram"}, [NgramDrafter]),
        ({"strategy": "history"}, [HistoryDrafter]),
        ({"strategy": "model", "assistant_model": small}, [SmallModelDrafter]),
        ({"strategy": "auto"}, [SelfDrafter, HistoryDrafter]),
        (best_of_n | {"assistant_model": small}, [NgramDrafter, SmallModelDrafter]),
        (merged(best_of_n, {"specactor": {"assistants": {"model": small}}}), [NgramDrafter, SmallModelDrafter]),
        ({"strategy": "self", "sd_toggle": "never"}, []),
    ):
        drafters = roll_out(tmp_path, **options).calls[0].drafters
        assert [type(drafter) for drafter in drafters] == expected


def test_modules_among_the_settings(tmp_path: Path, level_ladder: Asked) -> None:
    """The log, and what loggers are given, name them."""
    small = tiny_policy(seed=1, num_hidden_layers=1)
    small.name_or_path = "small"
    best_of_n = {"strategy": "best_of_n", "specactor": {"drafters": ["model", "ngram"]}}
    for name, given, named, options in (
        ("assistant_model", small, "LlamaForCausalLM small", {"strategy": "model"}),
        ("assistant_model", torch.compile(small, backend="eager"), "OptimizedModule small", {"strategy": "model"}),
        ("specactor.assistants", {"model": small}, {"model": "LlamaForCausalLM small"}, best_of_n),
    ):
        group, _, inner = name.rpartition(".")
        run = roll_out(tmp_path / str(named), **merged(options, {group: {inner: given}} if group else {name: given}))
        log = read_run(run.folder)
        assert log.rollouts[0].drafter and sum(depth.drafted for depth in log.rollouts[0].per_depth.values())
        saved = json.loads(run.trainer.args.to_json_string())
        assert log.header.settings[name] == named
        assert (saved["speculative_config"][group][inner] if group else saved[name]) == named


def test_options_of_adaptation_and_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level_ladder: Asked) -> None:
    """They reach what trains a learned drafter, or nothing does; and what races drafters."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(trainer_speculator, "DrafterAdaptation", lambda *args: given.append(args[3:]))
    path = make_checkpoint(tmp_path / "eagle3", "eagle3", 48)
    for adaptation in (dict(learning_rate=1e-3, hidden_weight=0.5, token_weight=0.25), False):
        roll_out(tmp_path, "eagle3", assistant_model=path, drafter_adaptation=adaptation, seed=5)
    make = Planner.__init__

    def watch(planner: Planner, *args: Any) -> None:
        given.append((args[1], *args[4:]))
        make(planner, *args)

    monkeypatch.setattr(Planner, "__init__", watch)
    options = dict(efficient_rollout=dict(margin=0.1), specactor=dict(budget=9, race=False), draft_length=[4, 6])
    roll_out(tmp_path, "best_of_n", **options)
    assert given == [(AdaptationOptions(1e-3, 0.5, 0.25), 5, 11), ([2, 4, 6], 0.1, False, 9)]


# ---- When it speculates, and what is measured for that -----------------------------------------------------------


def test_profiles_decide(tmp_path: Path, profiles: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of imaginary machines: speculation pays on one, not on the other, nor where the margin is large. The record says
    why, and what plain decoding would have taken."""
    for which, margin, pays in (("pays", 0.05, True), ("does not", 0.05, False), ("pays", 1e6, False)):
        folder = tmp_path / f"{which} {margin}"
        options = dict(sd_toggle="roofline", efficient_rollout=dict(profile=profiles[which], margin=margin))
        run = roll_out(folder, max_completion_length=48, **options)
        log = read_run(folder)
        (record,) = log.rollouts
        assert (run.metric("eval_rollout/sd_on_fraction")[0] > 0) is pays is (record.drafter is not None)
        assert run.metric("eval_rollout/predicted_speedup") == [record.predicted_speedup]
        assert 0 < log.header.calibration_seconds < 60
        assert log.header.profile == str(folder / "roofline_profile.json") and Path(log.header.profile).exists()
        # 8 rows of at most 17 tokens of prompt and 24 of output; by the profile 5 / (5 × 0.63 + 1).
        said = capsys.readouterr().out.splitlines()[0]
        decision = "speculating" if pays else "decoding plainly"
        assert re.search(
            rf"^spec_trl rollouts: speculation predicted \d\.\d\d× at 8 rows × \d\d tokens: {decision}", said
        )
        assert ("predicted 1.20×" if which == "pays" else "predicted 0.10×") in said
        if pays:
            assert record.plain_seconds > 0 and record.reason.startswith("the roofline predicted ")
            assert 5 in {point.draft_length for point in record.points}
            assert 0 < record.drafted_by["self"]
            assert record.phase_seconds["control"] > 0 and record.predicted_speedup > 1
        else:
            assert record.reason.startswith(said.removeprefix("spec_trl rollouts: ").partition(" at ")[0])
            assert record.setup_seconds > 0  # drafters were made
            whole = record.seconds - record.refresh_seconds - record.setup_seconds
            assert record.plain_seconds == pytest.approx(whole, rel=1e-6)
        if which == "does not":
            assert record.predicted_speedup == pytest.approx(5 / 51, rel=0.01)


def test_a_missing_profile_is_calibrated_once(tmp_path: Path, quick_calibration: list[int]) -> None:
    """Into the file that was named, which says so, into the run's folder, and into the user's cache."""
    for name in ("first", "second"):
        path = tmp_path / f"{name}.json"
        with pytest.warns(UserWarning, match=f"rollout.profile='.*{name}.json' does not exist and is written now"):
            roll_out(tmp_path / name, sd_toggle="roofline", efficient_rollout=dict(profile=str(path)))
        assert Profile.load(path) == Profile.load(tmp_path / name / "roofline_profile.json")
    roll_out(tmp_path, sd_toggle="roofline", efficient_rollout=dict(profile=str(path)))
    roll_out(tmp_path, sd_toggle="roofline")
    assert quick_calibration == [8]


def test_a_profile_of_something_else(tmp_path: Path, profiles: dict[str, str], quick_calibration: list[int]) -> None:
    own = Profile.load(profiles["pays"])
    other = replace(own, key=replace(own.key, dtype="float16", hardware="abacus"))
    other.save(tmp_path / "other.json")
    given = dict(sd_toggle="roofline", efficient_rollout=dict(profile=str(tmp_path / "other.json")))
    with pytest.raises(ValueError, match="hardware is 'abacus' there .*dtype is 'float16' there"):
        roll_out(tmp_path, **merged(given, dict(efficient_rollout=dict(mismatch="error"))))
    with pytest.warns(UserWarning, match="hardware is 'abacus' there .*Calibrating again"):
        roll_out(tmp_path, **given)
    assert len(quick_calibration) == 1
    assert Profile.load(tmp_path / "other.json") == other  # the user's file is left alone


def test_a_ladder_is_profiled_where_it_is_asked_for(
    tmp_path: Path, level_ladder: Asked, profiles: dict[str, str]
) -> None:
    calibrated = {"sd_toggle": "roofline", "efficient_rollout": {"profile": profiles["pays"]}}
    never = {"sd_toggle": "never"}
    for strategy, options, asked in (("auto", never, 0), ("self", calibrated, 0), ("auto", calibrated, 1)):
        roll_out(tmp_path, strategy, **options)
        assert len(level_ladder) == asked
    assert level_ladder[0] == (["self", "history"], 8, (2, 5, 7, 9, 11))


def test_by_default_nothing_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one control goes on learning from rollout to rollout."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something was profiled before the first token")

    monkeypatch.setattr(profiles_module, "calibrate", fail)
    monkeypatch.setattr(ladder_calibration, "build_ladder", fail)
    run = train(tmp_path, SpecGRPOConfig.assistant_strategy, sd_toggle=SpeculativeConfig.sd_toggle)
    assert isinstance(run.calls[-1].control, Planner) and len({call.control for call in run.calls}) == 1
    rounds = [call.known["times"]["rounds"] for call in run.calls]
    assert rounds == sorted(set(rounds)) and run.trainer.args.assistant_strategy == "auto"
    assert run.completions == train_plainly().completions


@pytest.mark.parametrize("stop", ["+", ["3+", "="]])
def test_stop_strings(tmp_path: Path, stop: Any) -> None:
    """Rows end where the text has one of them, which may be said across tokens."""
    plain, run = (roll_out(tmp_path, generation_kwargs=given) for given in ({}, {"stop_strings": stop}))
    decode, cut = build_tokenizer().decode, []
    for row in plain.rewarded[0][1]:
        ends = (end for end in range(1, len(row)) if any(each in decode(row[:end]).replace(" ", "") for each in stop))
        cut.append(row[: next(ends, len(row))])
    assert run.rewarded[0][1] == cut != plain.rewarded[0][1]
    assert run.metric("eval_rollout/draft_length")[0] > 0


# ---- TRL's other ways into a rollout ------------------------------------------------------------------------------


def test_rollout_func_is_left_alone(tmp_path: Path) -> None:
    def answer(prompts: list[str], trainer: SpecGRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts).input_ids
        completion_ids = [[4 + row, 2] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": [[-1.0, -1.0]] * len(prompts)}

    run = roll_out(tmp_path, trainer={"rollout_func": answer})
    assert run.rewarded == [("eval", [[4 + row, 2] for row in range(8)])] and run.calls == []
    assert not [name for entry in run.logs for name in entry if "rollout/" in name]


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return make_chat_tokenizer()


def test_tool_loop(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = conversations("a3+b8", "c5")
    none, drafted = (
        roll_out(
            tmp_path / strategy, strategy, prompts, tokenizer=chat_tokenizer, max_completion_length=48,
            max_tool_calling_iterations=3, trainer={"tools": [add]},
        )
        for strategy in ("none", "self")
    )  # fmt: skip
    assert drafted.rewarded == none.rewarded
    turns = [call.request_ids for call in drafted.calls]
    assert turns == [call.request_ids for call in none.calls]
    assert len(turns[0]) == 8 and len(turns) > 1 and min(map(len, turns)) < 8  # later turns, of some of the rows
    # Ids tell the row, whichever rows go on: they are the same where these are spread over more ranks.
    assert {request & 0xFFFFFF for request in turns[1]} <= {row for row in range(8) if chat_tokenizer.asked[row]}
    ids = [request for turn in turns for request in turn]
    assert len(set(ids)) == len(ids)
    # One record per rollout, over all of its turns, with one lane per request and turn, after the turns before it.
    (record,) = read_run(tmp_path / "self").of("eval")
    assert len(drafted.metric("eval_rollout/seconds")) == 1 and record.requests == len(ids)
    lanes = sorted(record.timeline, key=lambda lane: lane.request)
    assert [lane.request for lane in lanes] == list(range(record.requests))
    assert max(lane.ended for lane in lanes[:8]) < min(lane.changes[0][0] for lane in lanes[8:])
    assert lanes[-1].changes[0][1] > max(lane.changes[-1][1] for lane in lanes[:8])


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_tool_turns_read_only_what_is_new(
    strategy: str, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five turns, in which a tool answers all rows that have not reached the limit: the completions are those of turns
    that read whole texts."""
    call = {"type": "function", "function": {"name": "recite", "arguments": {"count": 5}}}
    chat_tokenizer.parse_response = lambda ids, **_: {
        "role": "assistant", "content": chat_tokenizer.decode(ids), "tool_calls": [call],
    }  # fmt: skip
    found: list[SpeculationStatistics] = []
    add = RolloutSums.add
    monkeypatch.setattr(
        RolloutSums, "add", lambda self, statistics, *rest: (found.append(statistics), add(self, statistics, *rest))
    )

    def run(name: str) -> tuple[Run, float]:
        found.clear()
        run = roll_out(
            tmp_path / name, strategy, conversations("a3+b8", "c5"), tokenizer=chat_tokenizer,
            policy=tiny_policy(max_position_embeddings=2048), max_completion_length=500,
            max_tool_calling_iterations=4, trainer={"tools": [recite]},
        )  # fmt: skip
        found[:] = [each for each in found if each.rounds]  # sums begin with no call
        assert len(found) == 5 and (strategy == "none" or sum(each.total.drafted for each in found) > 200)
        return run, sum(each.tokens_read for each in found) / sum(each.tokens for each in found)

    parked, share = run("parked")
    monkeypatch.setattr(ParkedRows, "add", lambda *_: None)
    read, whole = run("read")
    assert parked.rewarded == read.rewarded
    print(f"tokens read per generated token: {share:.2f} where rows are parked, {whole:.2f} where they are read")
    assert share < 0.4 < 1.0 < whole


def recite(count: int) -> str:
    """Recites.

    Args:
        count: how much.
    """
    return "a3+b8=" * count


# ---- A vision-language model that is given text ------------------------------------------------------------------


class Processor(ProcessorMixin):
    """Tokenizes text, and marks each token with `mark` in a field called `field`, as processors of images do."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, field: str = "token_type_ids", mark: int = 0) -> None:
        super().__init__(tokenizer)
        self.field, self.mark = field, mark

    def apply_chat_template(self, conversation: list[Any], **_: Any) -> dict[str, Any]:
        ids = [self.tokenizer(messages[-1]["content"][0]["text"])["input_ids"] for messages in conversation]
        return {"input_ids": ids, self.field: [[self.mark] * len(row) for row in ids]}


def roll_out_text(folder: Path, strategy: str, **processor: Any) -> Run:
    """A rollout of a tiny Gemma 3 with a vision tower on conversations without images."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.1, sliding_window=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, intermediate_size=32)
    tokens = dict(mm_tokens_per_image=4, boi_token_index=45, eoi_token_index=46, image_token_index=47)
    policy = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).double()
    conversations = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS[:2]]
    processing = Processor(build_tokenizer(), **processor)
    return roll_out(folder, strategy, Dataset.from_list(conversations), policy=policy, tokenizer=processing)


def test_text_for_a_vision_language_model(tmp_path: Path) -> None:
    none, drafted = roll_out_text(tmp_path, "none"), roll_out_text(tmp_path, "self", field="mm_token_type_ids")
    assert drafted.rewarded == none.rewarded
    assert len({str(ids) for _, rows in none.rewarded for ids in rows}) > 4
    with pytest.raises(ValueError, match="the prompts carry token_type_ids.*or use trl.GRPOTrainer"):
        roll_out_text(tmp_path, "self", mark=1)


def test_the_copy_stays_under_gradient_checkpointing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's default puts one more hook on the embedding after each rollout."""
    made: list[object] = []
    monkeypatch.setattr(trainer_speculator, "copy_again", lambda *_: made.append(_))
    run = train(tmp_path, "self", gradient_checkpointing=True)
    assert len(run.calls) == 3 and not made


@pytest.mark.parametrize("strategy", ["self", "tts"])
@pytest.mark.filterwarnings("ignore:Adapter name")
def test_the_copy_follows_the_adapter_between_rollouts(tmp_path: Path, strategy: str) -> None:
    """Without a step in between, as where an evaluation looks at another one. A copy made anew is the measure."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    policy = get_peft_model(tiny_policy(), config, "a", autocast_adapter_dtype=False)
    policy.add_adapter("b", config, autocast_adapter_dtype=False)
    policy.double()

    def rates(name: str, *adapters: str) -> list[float]:
        run = make_run(tmp_path / name, strategy, policy=policy, per_device_eval_batch_size=8)
        for adapter in adapters:
            policy.set_adapter(adapter)
            run.trainer.evaluate(tiny_dataset(2))
        return run.metric("eval_rollout/acceptance_rate")

    followed, alone = rates("both", "a", "b")[1], rates("alone", "b", "b")[1]  # the second rollout of each
    assert followed == alone > 0.3


def test_one_shadow_serves_all_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under gradient checkpointing, TRL's default, which leaves new hooks and functions on the policy in each step."""
    run, made, make = make_run(tmp_path, "none", gradient_checkpointing=True), [], runner_choice.make_shadow
    del run.trainer.model.generate  # the harness's own, which is a closure
    monkeypatch.setattr(runner_choice, "make_shadow", lambda *given: made.append(given) or make(*given))
    run.train()
    assert len(run.completions) == 3 and len(made) == 1
