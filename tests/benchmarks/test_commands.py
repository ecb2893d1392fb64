"""Each benchmark's command, once, on its smallest input: what it writes is checked, no time is looked at."""

import json
import math
import os
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import (
    admission,
    configurations,
    control_machine,
    end_to_end,
    identity_grid,
    rollout,
    roofline_fit,
    sampler_mismatch,
)
from benchmarks.training_task import demo_task
from spec_trl.drafter_training.untrained import write_eagle3
from spec_trl.generation import kept
from spec_trl.scheduling import admission as rule
from spec_trl.scheduling.cluster import Lengths
from spec_trl.trainers.run_log import read_run
from tests.benchmarks.conftest import Command, set_arguments
from tests.conftest import STORY_MODEL


TINY = "shape:tiny,float32"


def test_rollout(command: Command) -> None:
    arguments = "--model shape:tiny --dtype float64 --batch 1 2 --repeats 2 --max-new-tokens 6 --baselines generate "
    result = command("rollout", f"{arguments} --strategies none self ngram")
    batches = result.details["batches"]
    assert list(batches) == ["1", "2"]
    for summaries in batches.values():
        assert all(s["identical_rows"] in (None, s["rows"]) for s in summaries)
    (first, *_) = (each for each in result.findings if each.what.endswith("batch 2: ours self"))
    assert first.interval is not None and first.interval[0] <= first.value <= first.interval[1]
    assert "overlap with the 4-bit copy is 0.900" in result.setup and "is rtn-w4-g128" in result.setup
    assert "defaults" not in result.setup and "median of 2 passes" in result.setup


def test_cpu_attention(command: Command) -> None:
    result = command("cpu_attention", "--turns 1 --rows 1 --head-sizes 16 --threads 1")
    assert len(result.details["cells"]) == 16 and all(finding.value > 0 for finding in result.findings)


@pytest.fixture
def chat(tmp_path: Path) -> str:
    """Arguments that name a chat model, and a file of two questions."""
    tokenizer = AutoTokenizer.from_pretrained(STORY_MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for part in (AutoModelForCausalLM.from_pretrained(STORY_MODEL), tokenizer):
        part.save_pretrained(tmp_path / "story")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in ("One day", "Tim and Sue went")))
    return f"--model {tmp_path / 'story'} --prompts {questions} --rows 2 --new-tokens 6"


def test_sampler_mismatch(command: Command, chat: str) -> None:
    """Every training forward of every kind, and no distance where there is none."""
    cells = command("sampler_mismatch", chat).details["cells"]
    assert list(cells) == ["float32", "bfloat16", "float32 weights, autocast"]
    for kind, forwards in cells.items():
        assert len(forwards) == 6
        for found in forwards.values():
            assert 0 < found["mean"] <= found["largest"] < (1e-4 if kind == "float32" else 0.5), kind
            assert 0 <= found["k3"] < found["largest"]
    same = torch.zeros(3)
    assert sampler_mismatch.distances(same, same) == {"mean": 0, "largest": 0, "k3": 0}
    assert sampler_mismatch.distances(same + math.log(2), same)["k3"] == pytest.approx(1 - math.log(2))


def test_exact_logprobs(command: Command, chat: str) -> None:
    cells = command("exact_logprobs", f"{chat} --turns 1").details["cells"]
    for kind, (plain, exact) in ((kind, ways.values()) for kind, ways in cells.items()):
        assert exact["distance"] == 0 < plain["distance"], kind
        assert min(plain["forward"], plain["backward"], exact["forward"], exact["backward"]) > 0


def test_auto_starts_from_nothing_for_each_batch_and_no_method_has_a_history(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of rounds is kept with the model and in files, and other methods have written the same texts."""
    users = Path(os.environ["SPEC_TRL_CACHE"])
    (users / "of an earlier run").mkdir(parents=True)
    calls: list[str] = []
    real_way, real_forget = rollout.way, rollout.forget

    def way(model: Any, strategy: str, config: Any, **options: Any) -> Any:
        call = real_way(model, strategy, config, **options)
        assert config.sd_toggle == ("measured" if strategy == "auto" else "always")
        assert config.draft_quantization == "rtn-w4-g128", "the overlap of synthetic weights is that of 4 bits"

        def watched(work: Any, seed: int) -> Any:
            assert kept.look(model, "history") is None
            calls.append(f"{strategy} {len(set(map(tuple, work.prompts)))}x{len(work.prompts)} {seed}")
            return call(work, seed)

        return watched

    def forget(model: Any) -> None:
        real_forget(model)
        folder = Path(os.environ["SPEC_TRL_CACHE"])
        assert folder != users and not folder.exists()
        calls.append("forget")

    monkeypatch.setattr(rollout, "way", way)
    monkeypatch.setattr(rollout, "forget", forget)
    arguments = "--model shape:tiny --dtype float64 --batch 1 2 --group 2 --repeats 1 --max-new-tokens 6 --baselines "
    result = command("rollout", f"{arguments} --strategies history auto")
    assert calls == [
        "forget", "history 1x1 0", "auto 1x1 0", "history 1x1 1", "auto 1x1 1",
        "forget", "history 1x2 0", "auto 1x2 0", "history 1x2 1", "auto 1x2 1",
    ]  # fmt: skip
    assert "the best of the others: ours history" in {each.baseline for each in result.findings}
    assert "hold so many rows of each prompt" in result.setup and "one pass" in result.setup
    assert '"ours auto" has its defaults' in result.setup


def test_end_to_end_on_questions(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = f"--model {STORY_MODEL} --questions {file} --methods trl auto --steps 2 --rows 2 --group 2 --repeats 1"
    made = command("end_to_end", f"{arguments} --max-completion-length 4 --epochs 1 --dtype float64")
    result = made.details
    assert any(each.what.endswith("auto, tokens/s of a whole step") for each in made.findings)
    assert result["options"]["questions"] == 2 and result["methods"].keys() == {"autoregressive", "trl", "auto"}
    assert result["methods"]["auto"]["identical_steps"] == 2


def test_identity(command: Command) -> None:
    arguments = "--dtypes float64 --tokens 100 --batch 2 --max-new-tokens 64 --rejection-batches 1"
    (entry,) = command("identity", arguments).details["studies"]
    for strategy in ("self", "ngram"):
        found = entry["strategies"][strategy]
        assert found["unexplained"] == found["near_ties"] == 0 and found["tokens_compared"] >= 100  # float64
    assert entry["strategies"]["self"]["exact_over_rejection"] > 0.8


def test_identity_grid(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_grid, "BATCHES", (2,))
    monkeypatch.setattr(identity_grid, "DRAFT_LENGTHS", (3,))
    monkeypatch.setattr(identity_grid, "SAMPLINGS", {"T=1": identity_grid.SAMPLINGS["T=1"]})
    with pytest.raises(SystemExit) as ended:
        command("identity_grid", f"--models {STORY_MODEL} --assistant {STORY_MODEL} --max-new-tokens 4")
    assert ended.value.code == 0  # no row differed


def test_refresh(command: Command) -> None:
    (measured,) = command("refresh", "--models shape:tiny --repeats 1").details["models"]
    assert measured["quantized_weights"] == 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128) + 512 * 128
    assert 0.25 < measured["memory_ratio"] < 0.35
    assert measured["dense_layers"] == []


def test_rtn_awq(command: Command) -> None:
    arguments = f"--models {STORY_MODEL} --schemes rtn-w4-g128 awq-w4-g128 rtn-w8 --draft-lengths 3 --rows 4 --batch 4"
    result = command("rtn_awq", f"{arguments} --repeats 1 --max-new-tokens 8 --observed-texts 2 --observed-length 16")
    coarse, _, fine = result.details["models"][0]["acceptance"]
    assert any(finding.what.endswith("one AWQ refresh") for finding in result.findings)
    assert coarse["gain_interval"] == [0, 0] and coarse["gain"] == 0
    assert fine["gain_interval"][0] <= fine["gain"] <= fine["gain_interval"][1]


def test_control_regret(command: Command) -> None:
    result = command("control_regret", "--worlds 1 --noises 0% --batches 1")
    worst = next(finding for finding in result.findings if finding.what == "noise 0%: worst rollout")
    assert 1.0 <= worst.value <= 1.1


def test_admission(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: what waits for rows that never come loses, what reads beside saves. Run: the tokens are the same."""
    monkeypatch.setattr(admission, "CASES", (admission.CASES[0], admission.CASES[5]))
    monkeypatch.setattr(rule, "PATIENCE", rule.PATIENCE)  # the command changes it
    models = f"--models {STORY_MODEL} --batches 8:10 --turns 1 --median 2"
    result = command("admission", f"--seeds 1 {models}")
    found = result.details["policies"]  # six on a CPU, where eager and captured are one
    few, many = ({each["policy"]: each for each in part} for part in (found[:6], found[6:]))
    assert few["4 free rows"]["total"] > 0.1 and few["a quarter of a round"]["total"] == 0
    assert many["a quarter of a round"]["total"] < -0.02 and many["chunks of 256 beside, captured"]["total"] < -0.05
    assert result.findings[-1].what.startswith("measured: ")


def test_simulated_admissions_add_up() -> None:
    """One row, one request after the other: each its prompt and its rounds; four of one prompt read it once."""
    machine = replace(admission.CPU, host=0.5)
    case = admission.Case(machine, 1, 2, Lengths(3, 0.001, 3), 10, 1)
    prefill, per_round = machine.forward(10, 0, 0, True), machine.forward(1, 1, 0, False)
    total, mean = admission.simulate(case, admission.AT_ONCE, 0)
    assert total == pytest.approx(2 * (0.5 + prefill + 3 * per_round), rel=0.02)
    assert mean == pytest.approx(0.75 * total)
    shared = admission.Case(machine, 4, 4, Lengths(3, 0.001, 3), 10, 4)
    expected = 0.5 + prefill + 3 * machine.forward(4, 4, 0, False)
    assert admission.simulate(shared, admission.AT_ONCE, 0)[0] == pytest.approx(expected, rel=0.02)


def test_first_call(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is released before it, and nothing before the second call."""
    calls: list[str] = []
    speeds = {"self": 0.5, "ngram": 0.25}  # tokens per second
    rate = lambda model, work, way, seed: (calls.append(way), speeds.get(way, 1.0))[1]  # noqa: E731
    monkeypatch.setattr("benchmarks.first_call.rate", rate)
    monkeypatch.setattr("spec_trl.release", lambda model: calls.append("release"))
    monkeypatch.setenv("SPEC_TRL_CACHE", "")
    result = command("first_call", f"--models {TINY} --batch 1 --repeats 2 --new-tokens 4 --strategies self ngram")
    once = ["release", "generate", "release", "none", "release", "self", "self", "release", "ngram", "ngram"]
    assert calls == ["generate", "none", *once, *once[2:], *once[:2]]
    (cell,) = result.details["cells"]
    assert cell["ratios"]["self, second call"] == {"generate": 0.5, "none": 0.5}
    assert cell["more_seconds"] == {"self": [4.0, 4.0], "ngram": [12.0, 12.0]}
    assert "shape:tiny, float32, batch 1: ngram" in {each.what for each in result.findings}


def test_one_token(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way's first calls, which make what is kept, do not count."""
    calls: list[str] = []

    def seconds(model: object, prompt: torch.Tensor, way: str) -> float:
        calls.append(way)
        assert prompt.shape == (1, 5)
        return 9.0 if len(calls) <= 12 else {"generate": 1.0, "none": 1.5, "self": 2.0}[way]

    monkeypatch.setattr("benchmarks.one_token.seconds", seconds)
    monkeypatch.setenv("SPEC_TRL_CACHE", "")
    result = command("one_token", "--layers 1 --strategies none self --calls 3 --prompt-tokens 5")
    assert calls[:6] == ["generate", "none", "self", "none", "self", "generate"] and len(calls) == 3 * 7
    assert [each.value for each in result.findings] == [1000.0, 1.5, 2.0]


def test_control_machine(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way starts with nothing kept; copiers get no processor; after the result, a differing row fails."""
    released: list[object] = []
    forget = control_machine.forget
    monkeypatch.setattr(control_machine, "forget", lambda model: (released.append(model), forget(model)))
    monkeypatch.setenv("SPEC_TRL_CACHE", "")
    arguments = "--models shape:tiny,float64 --batches 2 --kinds copy-heavy --single history --calls 2"
    (model,) = command("control_machine", f"{arguments} --repeats 2 --tokens 8").details["models"]
    assert len(released) == 2 * 3 + 1  # repeats x ways, and at the end
    (cell,) = model["cells"]
    assert cell["identical_rows"] == cell["rows"] == 2 * 2 * 2 * 2  # ways x repeats x calls x rows
    assert set(cell["to_none"]) == {"auto", "history"} and len(cell["to_none_by_repeat"]) == 2
    assert set(cell["to_none"]["auto"]) == {"all", "first", "later", "cpu"}
    monkeypatch.setattr(control_machine, "identical_rows", lambda ours, theirs: (0, 1))
    monkeypatch.setattr(control_machine, "COPYING", None)
    with pytest.raises(SystemExit, match="2 completions differ"):
        command("control_machine", f"{arguments} --copiers --repeats 1 --tokens 2")


@pytest.mark.slow
def test_calibration(command: Command) -> None:
    arguments = "--model shape:tiny --dtype float32 --max-batch-size 4 --max-length 64 --budget 0.5"
    found = command("calibration", arguments).details
    assert sum(half["points"] for half in found["held_out"]) == found["fit"]["points"] > 0


def test_roofline_fit(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fit left out, which takes seconds."""
    constants = roofline_fit.ModelConstants("a model", 1e9, 3e8, 1e9, 1e5, 1e4)
    truth = roofline_fit.Roofline(constants, roofline_fit.Coefficients(1e12, 1e11, 1.0, 1.0, 1e-4, 1e-4, 1e-4))
    fitted: list[tuple[str, int]] = []

    def fit(samples: list[Any], constants: Any, flops: float, bounds: Any, form: str) -> tuple[Any, Any]:
        fitted.append((form, len(samples)))
        return truth, roofline_fit.evaluate(truth, samples)

    monkeypatch.setattr(roofline_fit, "fit", fit)
    lines = ["model,batch,length,draft_length,mode,seconds"]
    for batch, length in product((1, 4, 16), (128, 512, 2048)):
        lines.append(f"m,{batch},{length},0,target,{truth.target_seconds(batch, length)}")
        for gamma in (3, 5):
            lines.append(f"m,{batch},{length},{gamma},verify,{truth.verify_seconds(batch, length, gamma)}")
            lines.append(f"m,{batch},{length},{gamma},draft,{truth.draft_seconds(batch, length)}")
    (tmp_path / "sweep.csv").write_text("\n".join(lines))
    (tmp_path / "constants.json").write_text(json.dumps(vars(constants)))
    paths = f"--sweeps {tmp_path}/sweep.csv --constants {tmp_path}/constants.json"
    (model,) = command("roofline_fit", f"{paths} --flops 1e12 --bandwidth 1e11").details["models"]
    assert fitted[:7] == [("paper", n) for n in (45, 27, 30, 30, 27, 15, 15)] and len(fitted) == 14
    assert set(model["fits"]) == {"paper", "improved"} and set(model["fits"]["paper"]["held_out"]) == {"γ", "S", "B"}
    assert model["fits"]["paper"]["in_sample"]["cycle_mape"] < 0.05


@pytest.mark.slow
def test_best_of_n_tail(command: Command) -> None:
    arguments = f"--models {TINY} --batch 2 --new-tokens 12 --rollouts 1 --repeats 2 --pools self,ngram"
    (pool,) = command("best_of_n_tail", arguments).details["pools"]
    assert all(each["identical_rows"] == each["rows"] == 4 and each["forwards"] <= 12 for each in pool["results"])
    assert pool["best_single"] in {each["name"] for each in pool["results"]}


def test_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["copying", *f"--model {STORY_MODEL} --steps 1 1 --output {tmp_path}".split()])
    import_module("benchmarks.copying").main()
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()


FAKE_VLLM = """
__version__ = "0.0"

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens

class Output:
    def __init__(self, count):
        self.outputs, self.token_ids = [self], [0] * count

class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, skip_tokenizer_init, enable_prefix_caching):
        self.longest = max_model_len

    def generate(self, prompts, sampling, use_tqdm):
        assert max(len(each["prompt_token_ids"]) for each in prompts) + sampling.max_tokens == self.longest
        return [Output(sampling.max_tokens) for _ in prompts]
"""


@pytest.mark.slow
def test_vllm_cpu(command: Command, tmp_path: Path) -> None:
    """All but vLLM itself, which has an environment of its own."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    arguments = f"--python {python} --models wide:{STORY_MODEL}*2 --batch 2 --new-tokens 4 --repeats 1"
    result = command("rivals.vllm_cpu", f"{arguments} --strategies none")
    assert "vLLM 0.0 and ours" in result.setup
    (model,) = result.details["models"]
    assert model["model"] == "wide:stories260K*2"
    assert {name: len(rates) for name, rates in model["tokens_per_second"].items()} == {"vllm": 1, "none": 1}


@pytest.mark.slow
def test_end_to_end(command: Command, tmp_path: Path) -> None:
    write_eagle3(tmp_path / "auxiliary", demo_task(torch.float64, 1, 0).make_policy())
    arguments = "--steps 2 --rows 4 --group 2 --max-completion-length 12 --repeats 1 --dtype float64 --ablations "
    arguments += f"--calibration-seconds 1 --epochs 1.5 --runs {tmp_path}/runs --learning-rate 1e-3 "
    result = command("end_to_end", f"{arguments} --learned eagle3 {tmp_path}/auxiliary").details
    methods, with_learned = result["methods"], configurations.learned("eagle3", "", 1e-6).keys()
    assert methods.keys() == configurations.METHODS.keys() | configurations.ABLATIONS.keys() | with_learned
    plain, trl = methods[configurations.AUTOREGRESSIVE], methods[configurations.TRL]
    for name, method in methods.items():
        assert method["steps"] == len(method["by_step"]["reward"]) == 2
        assert method["step_seconds"] > method["rollout_seconds"] > 0
        if method is not trl:  # in float64 there are no near-ties to excuse a difference
            assert method["identical_steps"] == 2, name
            assert method["by_step"]["reward"] == plain["by_step"]["reward"]
    assert plain["preparation_seconds"] is trl["preparation_seconds"] is None
    short, long = (methods[configurations.always_on(n)] for n in (3, 7))
    assert short["block_efficiency"] > 1.5 and long["draft_length"] > short["draft_length"]
    assert result["best_fixed"] in map(configurations.always_on, configurations.FIXED)
    assert result["calibration"]["seconds"] > 0
    assert result["configurations"][configurations.LEARNED_ADAPTED]["assistant_model"] == "auxiliary"
    assert all(methods[name]["block_efficiency"] >= 1 for name in with_learned)
    log = read_run(tmp_path / "runs" / f"{configurations.EFFICIENT_ROLLOUT}-0")
    assert result["options"]["learning_rate"] == 1e-3
    assert log.header.settings["roofline_profile"] == str(tmp_path / "runs" / end_to_end.PROFILE)
    coarse, fine = result["idealized_draft_ratio"].values()  # Tab. 4: an 8-bit copy reads more than a 4-bit one
    assert coarse > fine


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("rollout --strategies model", "strategy model needs --assistant"),
        ("rollout --strategies ngram --verification rejection", "ngram has no draft probabilities"),
        ("rollout --group 0", "must be 1 or more"),
        ("identity --strategies model", "strategy model needs --assistant"),
        ("first_call --batch 0", "must be 1 or more"),
        ("one_token --calls 1", "must be 2 or more"),
        ("one_token --models nowhere", "--models nowhere: no such folder"),
        ("control_machine --batches 0", "must be 1 or more"),
        ("control_machine --models nowhere,float32", "--models nowhere: no such folder"),
        ("control_machine --models shape:tiny", "name a dtype after a comma"),
        ("roofline_fit --sweeps a b --constants c", "give one of each per sweep"),
        ("end_to_end --steps 1", "the first step is not timed"),
        ("end_to_end --model nowhere", "--model nowhere: no such folder"),
        ("end_to_end --model wide:nowhere*2", "--model wide:nowhere*2: nowhere is no folder with a config.json"),
        ("control_machine --models wide:nowhere,float32", "--models wide:nowhere: write wide:CHECKPOINT*k"),
        ("end_to_end --model . --before-end 0", "--before-end 0 must be 1 or more"),
        ("end_to_end --before-end 9", "--before-end: the prompts of demo are no texts"),
        ("end_to_end --model shape:tiny --before-end 9", "--before-end: the prompts of shape:tiny are no texts"),
        ("end_to_end --questions q.jsonl", "--questions is for a checkpoint"),
        ("end_to_end --model . --questions nowhere", "--questions nowhere: no such file"),
        ("end_to_end --rows 6 --group 4", "--rows 6 is no multiple of --group 4"),
        ("end_to_end --learned ngram .", "--learned ngram .: give eagle3 or dflash"),
        ("end_to_end --drafter-learning-rate 0", "--drafter-learning-rate 0.0 must be above 0"),
        ("end_to_end --repeats 0", "must be 1 or more"),
        ("end_to_end --runs .", "is not empty"),
        (f"rivals.vllm_cpu --python {sys.executable}", "cannot import vllm: name the interpreter"),
        ("rivals.vllm_cpu --python nowhere", "--python nowhere does not start"),
        ("tts drafters --rates eagle3=-1", "'=' and a number above 0"),
        ("tts strides --strides 0", "must be 1 or more"),
        ("tts drafters --new-tokens 5", "--new-tokens 5 must be 21 or more"),
        ("tts drafters --target nowhere", "--target nowhere: no such folder"),
        ("tts anchors --anchor-weights 0", "must be above 0"),
    ],
)
def test_wrong_options_are_named(
    command_line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command_line.split()
    module = import_module(f"benchmarks.{name}")
    set_arguments(monkeypatch, module, arguments)
    with pytest.raises(SystemExit):
        module.main()
    assert message in capsys.readouterr().err
