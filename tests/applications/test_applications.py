"""Applications that call `generate` with criteria and processors of their own: text as without us, drafts accepted,
and the same calls in the same order. `tests/applications.sh` installs them; tests of absent ones are skipped.

SMOLLM2=FOLDER runs them with that chat model too."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

import spec_trl
from spec_trl.trainers.run_log import read_run
from tests.conftest import STORY_MODEL


pytestmark = pytest.mark.timeout(120)  # an error in a thread leaves its reader waiting
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, Lily"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module", params=["stories260K", "SmolLM2"])
def folder(request: pytest.FixtureRequest) -> str:
    if request.param == "SmolLM2" and "SMOLLM2" not in os.environ:
        pytest.skip("SMOLLM2 names no folder")
    return os.environ["SMOLLM2"] if request.param == "SmolLM2" else str(STORY_MODEL)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    found = AutoTokenizer.from_pretrained(folder, padding_side="left")
    found.chat_template = found.chat_template or TEMPLATE
    found.pad_token = found.pad_token or found.eos_token
    return found


@pytest.fixture(scope="module")
def model(folder: str) -> PreTrainedModel:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found.generation_config.update(do_sample=False, max_length=None)
    return found


class Spy:
    """A processor and a criterion after the application's own, which write down what they are shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def look(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shown.append((input_ids.dtype, input_ids.tolist(), scores.dtype, scores.argmax(-1).tolist()))
        return scores

    def stop(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.shown.append((input_ids.dtype, input_ids.tolist(), scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def check(model: PreTrainedModel, use: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Uses the application without drafts and with them; returns what it says."""

    def watched(run: Callable[[], Any]) -> tuple[Any, list[Any]]:
        spy = Spy()

        def generate(*args: Any, **kwargs: Any) -> Any:
            kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or []), spy.look]
            kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or []), spy.stop]
            return GenerationMixin.generate(model, *args, **kwargs)

        monkeypatch.setattr(model, "generate", generate, raising=False)
        said = run()
        monkeypatch.delattr(model, "generate")
        return said, spy.shown

    def drafting() -> Any:
        with spec_trl.speculate(model, "ngram", output_dir=folder, sd_toggle="always") as speculation:
            before, said = threading.enumerate(), use()
            for thread in set(threading.enumerate()) - {*before}:  # LangChain joins none
                thread.join()
        assert speculation.log is not None
        return said, read_run(speculation.log.path).rollouts

    expected, shown = watched(use)
    (said, rollouts), shown_here = watched(drafting)
    assert said == expected
    assert shown_here == shown and len(shown) > 20
    assert max(each.acceptance_rate or 0.0 for each in rollouts) > 0, "nothing was drafted, or nothing accepted"
    return said


@pytest.fixture
def same(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return lambda use, of=model: check(of, use, tmp_path, monkeypatch)


def test_chat_loop_with_stop_on_tokens(model: PreTrainedModel, tokenizer: Any, same: Callable[..., Any]) -> None:
    """As in many demos: a class in a function, a thread, and a streamer."""

    def chat() -> list[str]:
        history, answers = "", []
        for message in (STORY, " Then she said"):
            history += message

            class StopOnTokens(StoppingCriteria):
                def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
                    return any(input_ids[0][-1] == stop for stop in tokenizer.all_special_ids)

            inputs = tokenizer([history], return_tensors="pt")
            streamer = TextIteratorStreamer(tokenizer, timeout=60, skip_prompt=True, skip_special_tokens=True)
            options = dict(
                inputs, streamer=streamer, max_new_tokens=40,
                stopping_criteria=StoppingCriteriaList([StopOnTokens()]),
            )  # fmt: skip
            thread = threading.Thread(target=model.generate, kwargs=options)
            thread.start()
            answers.append("".join(streamer))
            thread.join()
            history += answers[-1]
        return answers

    assert all(same(chat))


@pytest.mark.parametrize("streams", [False, True])
def test_smolagents(streams: bool, folder: str, tokenizer: Any, same: Callable[..., Any]) -> None:
    smolagents = pytest.importorskip("smolagents")
    agent = smolagents.TransformersModel(folder, device_map="cpu", torch_dtype=torch.float32, max_new_tokens=48)
    agent.tokenizer.chat_template = tokenizer.chat_template
    agent.model.generation_config.update(do_sample=False)
    messages = [{"role": "user", "content": [{"type": "text", "text": STORY}]}]
    stop = ["Observation:", "Calling tools:", "."]

    def call() -> Any:
        if streams:
            return [each.content for each in agent.generate_stream(messages, stop_sequences=stop[:2])]
        answer = agent.generate(messages, stop_sequences=stop[:2])
        return answer.content, answer.token_usage.output_tokens

    assert same(call, agent.model)


@pytest.mark.parametrize("stops", [False, True])
def test_langchain(stops: bool, model: PreTrainedModel, tokenizer: Any, same: Callable[..., Any]) -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    chain = langchain.HuggingFacePipeline(pipeline=pipe)
    inputs = tokenizer(STORY, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=48)[0, inputs["input_ids"].shape[1] :].tolist()
    newest = max(written, key=written.index)  # of all tokens the one that first comes latest
    stop = tokenizer.convert_ids_to_tokens([newest]) if stops else None
    options = dict(pipeline_kwargs=dict(max_new_tokens=48), stop=stop)
    text = "".join(same(lambda: list(chain.stream(STORY, **options))))
    assert tokenizer.decode(written, skip_special_tokens=True).strip().startswith(text.strip()) and text


@pytest.mark.parametrize("batch", [1, 4])
def test_lm_evaluation_harness(batch: int, model: PreTrainedModel, tokenizer: Any, same: Callable[..., Any]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=256)
    until = {"until": ["\n\n", "Tim"], "max_gen_toks": 32, "do_sample": False}
    texts = [STORY, "Tom and Sam went to the park. Tom and Sam", "The cat sat. The cat sat. The", "One day a big dog"]
    requests = [Instance("generate_until", {}, (text, until), index) for index, text in enumerate(texts)]
    assert len(same(lambda: harness.generate_until(requests, disable_tqdm=True))) == 4


SCHEMA = {
    "type": "object",
    "properties": {"girl": {"enum": ["Lily", "Lucy"]}, "friend": {"enum": ["Lily", "Lucy"]}, "age": {"enum": [3, 4]}},
    "required": ["girl", "friend", "age"],
    "additionalProperties": False,
}
EXAMPLE = 'One day, {"girl": "Lily", "friend": "Lucy", "age": 3} and '


@pytest.mark.parametrize("rows", [1, 3])
def test_xgrammar(rows: int, model: PreTrainedModel, tokenizer: Any, same: Callable[..., Any]) -> None:
    """It takes a token when it is called next: one that was not the text's would raise."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as Grammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    inputs = tokenizer([EXAMPLE * (row + 1) for row in range(rows)], return_tensors="pt", padding=True)

    def write() -> list[str]:
        out = model.generate(
            **inputs, max_new_tokens=60, logits_processor=[Grammar(grammar)], pad_token_id=tokenizer.pad_token_id
        )
        return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    assert all(json.loads(text)["age"] in (3, 4) for text in same(write))


@pytest.mark.parametrize("kind", ["regex", "schema"])
def test_outlines(kind: str, model: PreTrainedModel, tokenizer: Any, same: Callable[..., Any]) -> None:
    outlines = pytest.importorskip("outlines")
    kinds = {"regex": outlines.regex(r"(She was happy\. ){3}(Lily|Tim)"), "schema": outlines.json_schema(SCHEMA)}
    writer = outlines.from_transformers(model, tokenizer)
    prompt = STORY + " She was happy. She" if kind == "regex" else EXAMPLE
    assert same(lambda: writer(prompt, kinds[kind], max_new_tokens=60))
