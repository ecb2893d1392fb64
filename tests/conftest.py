"""Models and prompts that several tests use."""

import gc
import json
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch


# Before anything imports Triton: without a device its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spec_trl.native.native_code import compiler
from tests import compile_once, durations


compile_once.install()
TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
SHARED = Path(__file__).resolve().parents[2] / "shared"
DATA = Path(__file__).resolve().parents[1] / "examples/data"
STORY_MODEL = DATA / "stories260K"

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") and version("triton").startswith("3.6."):
    # Loops of its interpreter take a bound from an array of one element, which NumPy refuses from 2.4 on.
    from triton.runtime import interpreter

    patch_tensors = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda bound: int(bound.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """A file or folder of `../shared` by its path; the test that asks for it is skipped where it is absent."""

    def find(path: str) -> Path:
        if not (SHARED / path).exists():
            pytest.skip(f"../shared/{path} is absent")
        return SHARED / path

    return find


@pytest.hookimpl(wrapper=True)  # marks before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks the tests that ask for `../shared`, by themselves or through a fixture; puts the longest files first."""
    for item in items:
        if isinstance(item, pytest.Function) and "shared" in item.fixturenames:
            item.add_marker("shared")
    yield
    known = json.loads(durations.FILE.read_text())
    items.sort(key=lambda item: durations.order(item.nodeid.partition("::")[0], known))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `cuda` where there is no device."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Training begins with a collection of garbage, which would go through all objects of imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_TRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles, ladders and ledgers: empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SPEC_TRL_CACHE", str(folder))
    return folder / "spec_trl/profiles"


@pytest.fixture(scope="session")
def stories() -> PreTrainedModel:
    """stories260K, trained, float64."""
    return AutoModelForCausalLM.from_pretrained(STORY_MODEL, dtype=torch.float64).eval()


@pytest.fixture(scope="session")
def bit_stories(shared: Callable[[str], Path]) -> PreTrainedModel:
    """bit-stories3M, trained, float64."""
    return AutoModelForCausalLM.from_pretrained(shared("models/bit-stories3M"), dtype=torch.float64).eval()


@pytest.fixture(scope="session")
def story_tokenizer() -> AutoTokenizer:
    """The tokenizer of both story models."""
    return AutoTokenizer.from_pretrained(STORY_MODEL, padding_side="left")


WIDE: dict[str, int] = dict(hidden_size=192, num_attention_heads=3, num_key_value_heads=1)
"""Of models whose bits are compared: sums of few numbers would hide in which order they are. Attention reads heads of
64 in blocks of 64 columns, in bfloat16 by AMX."""


SHORT_PROMPT = 6
"""Tokens of a prompt that is read as steps are computed, in tests of bits; their prompts are shorter and longer."""


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random float64 Llama of two layers with logits sharp enough that drafts are accepted now and then."""
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).double().eval()


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    """A target that no test may change."""
    return tiny_llama()


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=str)
def narrow_model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """The target of `narrow`."""
    if compiler() is None:
        pytest.skip("no C++ compiler: attention reads masks, whose sums depend on the batch")
    return tiny_llama(**WIDE).to(request.param)


@pytest.fixture
def narrow(narrow_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A target in a dtype in which the order of a sum shows, and wide enough for that. No test may change it. Of the
    prompts some are read as steps are computed, and some, beyond `SHORT_PROMPT`, by other products."""
    monkeypatch.setattr("spec_trl.generation.engine.rows.SHORT_PROMPT", SHORT_PROMPT)
    return narrow_model


@pytest.fixture
def fresh() -> LlamaForCausalLM:
    """A target of the test's own."""
    return tiny_llama()


@pytest.fixture(scope="session")
def tiny_assistant(tiny: LlamaForCausalLM) -> LlamaForCausalLM:
    """The target with a little noise on its weights: agrees often, not always."""
    return add_noise(tiny_llama())


def add_noise(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """`model`, whose weights have a little noise now."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
