"""Prompts with images: tokens are those of plain `generate`, whichever rows, drafts and orders."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl import SpeculativeOutput
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.row_memory import RowMemory
from spec_trl.generation.engine.network.media import MediaPrompt
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.native.native_code import compiler
from tests import tiny_families
from tests.generation.calls import generate, outputs
from tests.generation.engine.pools import install_pool
from tests.generation.engine.tape import Tape
from tests.tiny_vision import IMAGE, VISION, make


FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
SIZES = [(4, 4), (4, 6), (6, 4)]  # patches of Qwen's images, which take more tokens than positions


def batch(model: PreTrainedModel, images: list[int], seed: int = 0, repeats: int = 1) -> dict[str, Tensor]:
    """Left-padded prompts, as a processor returns them, with so many `images` in each; `repeats`: neighbours that are
    equal."""
    kind, draw = model.config.model_type, torch.Generator().manual_seed(seed)
    rows, pixels, grids = [], [], []
    for row, count in enumerate(images):
        ids = torch.randint(3, 50, (3 + row,), generator=draw).tolist()
        of_row = []
        for number in range(count):
            size = SIZES[(row + number) % len(SIZES)]
            tokens = size[0] * size[1] // 4 if "qwen" in kind else 4
            ids += [51, *[IMAGE] * tokens, 52, *torch.randint(3, 50, (2,), generator=draw).tolist()]
            shape = (size[0] * size[1], 96) if "qwen" in kind else (1, 3, 32, 32)
            of_row.append(torch.rand(shape, generator=draw, dtype=torch.float64) + 0.1)
            grids.append([1, *size])
        rows += [ids] * repeats
        pixels += [of_row] * repeats
        grids[len(grids) - count :] = grids[len(grids) - count :] * repeats
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind in ("smolvlm", "idefics3"):
        values = torch.zeros(len(rows), max(images), 3, 32, 32, dtype=torch.float64)
        for row, of_row in enumerate(pixels):
            for number, image in enumerate(of_row):
                values[row, number] = image[0]
        return inputs | {"pixel_values": values, "pixel_attention_mask": torch.ones(values[:, :, 0].shape).long()}
    inputs["pixel_values"] = torch.cat([image for of_row in pixels for image in of_row])
    if "qwen" in kind:
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs | {"mm_token_type_ids" if "qwen" in kind else "token_type_ids": (ids == IMAGE).long()}


def plain(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    output: Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=24, **options)
    return output


def greedy(model: PreTrainedModel, inputs: dict[str, Tensor], strategy: str, **options: Any) -> SpeculativeOutput:
    config = {"draft_length": 3} | options.pop("config", {})
    return generate(model, inputs, strategy, config, do_sample=False, **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows into which prompts with images are read."""
    rows: list[int] = []
    read = MediaPrompt.read

    def watched(self: MediaPrompt, network: Any, cache: Any, row: int, columns: int) -> None:
        rows.append(row)
        read(self, network, cache, row, columns)

    monkeypatch.setattr(MediaPrompt, "read", watched)
    return rows


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("strategy", ["none", "self", "ngram"])
def test_tokens_are_those_of_generate(family: str, strategy: str, reads: list[int]) -> None:
    model = make(family)
    inputs = batch(model, [1, 0, 2, 1])
    expected = plain(model, inputs)
    assert len(expected[:, -24:].unique()) > 12
    changed = plain(model, inputs | {"pixel_values": inputs["pixel_values"].flip(0)})
    assert not torch.equal(changed, expected), "images matter"
    result = greedy(model, inputs, strategy)
    assert torch.equal(result.sequences, expected) and len(reads) == 3
    assert result.statistics.tokens_read == inputs["attention_mask"].sum()
    assert result.statistics.exact is None
    total = result.statistics.total
    assert (total.drafted > 20) == (strategy != "none") and total.accepted > (8 if strategy == "self" else -1)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits(family: str, dtype: torch.dtype) -> None:
    """Drafts and other rows change no bit, also of images of one size and of a prompt that two rows have."""
    model, drafted = make(family).to(dtype), 0
    images = [1, 0, 2, 1]
    inputs = batch(model, images, repeats=2)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16, "min_new_tokens": 16}
    reference = generate(model, inputs, "none", {"exact": True}, request_ids=[*range(8)], **options)
    assert reference.statistics.exact is True
    for strategy, config in (("self", {"draft_length": 3}), ("ngram", {"draft_length": 5, "max_batch_size": 3})):
        found = generate(model, inputs, strategy, config, request_ids=[*range(8)], **options)
        drafted += found.statistics.total.drafted
        assert torch.equal(found.logprobs, reference.logprobs)
    assert drafted > 30
    alone = batch(model, images[:1])
    alone["pixel_values"] = alone["pixel_values"].to(dtype)
    for row in (0, 1):
        found = generate(model, alone, "ngram", {"draft_length": 3}, request_ids=[row], **options)
        assert torch.equal(found.logprobs, reference.logprobs[row : row + 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_come_and_go(family: str, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time, also of one prompt; rows leave for lack of memory, and come back."""
    model = make(family)
    inputs = batch(model, [1, 0, 2], repeats=2)
    expected = plain(model, inputs)
    calls = iter([False] * 4 + [True] * 3)
    monkeypatch.setattr(RowMemory, "leaving", lambda *_: [1] if next(calls, False) else [])
    result = greedy(model, inputs, "self", config={"max_batch_size": 3})
    assert torch.equal(result.sequences, expected)
    assert result.statistics.preemptions and result.statistics.total.accepted > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_of_a_prompt_read_it_once(family: str, reads: list[int]) -> None:
    """As copies of a row, and as rows of a batch whose images are equal; also those that enter later."""
    model = make(family)
    ends = dict(eos_token_id=[7, 9, 11, 30], max_new_tokens=20)
    samples = outputs(generate(model, batch(model, [1, 2]), num_return_sequences=4, **ends))
    assert len(reads) == 2 and len({str(sample) for sample in samples}) > 5
    for strategy in ("none", "self", "history"):
        for rows in (8, 3):
            del reads[:]
            result = generate(model, batch(model, [1, 2], repeats=4), strategy, {"max_batch_size": rows}, **ends)
            assert outputs(result) == samples
            assert len(reads) == 2 if rows == 8 else 2 <= len(reads) < 6  # again if no row has it any more
    other = batch(model, [1, 2], repeats=4)
    other["pixel_values"][-{"gemma3": 6, "smolvlm": 3}.get(family, 144) :] += 1  # of the last three rows
    del reads[:]
    changed = outputs(generate(model, other, **ends))
    assert changed[:5] == samples[:5] and changed[5:] != samples[5:] and len(reads) == 3
    assert outputs(generate(model, other, config={"max_batch_size": 3}, **ends)) == changed


def test_equal_texts_with_other_images_share_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gemma3")
    inputs = batch(model, [2], repeats=6)
    inputs["pixel_values"] = torch.rand(inputs["pixel_values"].shape, dtype=torch.float64) + 0.1
    expected = outputs(generate(model, inputs))
    install_pool(monkeypatch, most=22)  # for 3 rows
    result = generate(model, inputs, "self")
    assert outputs(result) == expected and result.statistics.total.accepted > 8


def test_rows_with_images_come_together() -> None:
    """Leaders first, since they are read first, and followers last: their logits are known."""
    rows, words = Rows(8, 16, torch.device("cpu")), torch.tensor([5, 6, 7])
    seen, other = MediaPrompt(words, {}), MediaPrompt(words, {})
    first = rows.admit([Request(0, words, 9, 0), Request(1, words, 9, 0, media=seen)])
    assert rows.indices == [1, 0] and first.leaders == 2 and first.media == {0: seen}
    requests = [Request(index, words, 9, 0, media=image) for index, image in enumerate([seen, None, other], 2)]
    late = rows.admit(requests)
    assert rows.indices[2:] == [4, 3, 2] and (late.leaders, late.sources) == (1, [1, 0])
    assert late.media == {2: other, 4: seen}
    rows.drop([1])
    assert rows.admit([Request(9, words, 9, 0, media=seen)]).sources == [1], "where a row has moved"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_captured_forwards(family: str, tape: Tape) -> None:
    """On CUDA rows lie in pages, and forwards read positions from static buffers; text and images alternate."""
    model = make(family)
    images = batch(model, [1, 0, 2], repeats=2)
    text = {"input_ids": images["input_ids"][:, :5] % IMAGE + 1}
    ends = dict(eos_token_id=[7, 9], max_new_tokens=16)
    for inputs, rows in (text, 6), (images, 6), (images, 4), (text, 6):  # offsets stay where they are once needed
        expected, replayed = outputs(generate(model, inputs, config={"runner": "eager"}, **ends)), tape.replayed
        for strategy in ("none", "self"):
            result = generate(model, inputs, strategy, {"runner": "graph", "max_batch_size": rows}, **ends)
            assert outputs(result) == expected
        assert tape.replayed > replayed and result.statistics.total.accepted > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_under_training(family: str) -> None:
    """The policy trains: its modules are in train mode, and their dropout must not be seen."""
    model = make(family).float()
    inputs = batch(model, [2, 1])
    expected = plain(model, inputs)
    model.train()
    for config in model.config, model.config.get_text_config(), model.config.vision_config:
        config.attention_dropout = 0.5
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.5
    for strategy in ("none", "auto", "best_of_n"):
        members = {"specactor": {"drafters": ("self", "ngram", "history")}} if strategy == "best_of_n" else {}
        assert torch.equal(greedy(model, inputs, strategy, config=members).sequences, expected)


def test_no_images_are_text() -> None:
    model = make("gemma3")
    text = {"input_ids": torch.tensor([[5, 9, 7]]), "token_type_ids": torch.zeros(1, 3).long()}
    result = greedy(model, text | {"pixel_values": None}, "self")
    assert torch.equal(result.sequences, plain(model, text)) and result.statistics.total.accepted > 8


# ---- refusals -------------------------------------------------------------------------------------------------------


def without(inputs: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name not in names}


@pytest.mark.parametrize(
    ("message", "family", "change"),
    [
        ("prompt 0 has 4 image tokens, and its 1 images take 6", "qwen2_5_vl",
         lambda inputs: inputs | {"image_grid_thw": inputs["image_grid_thw"].flip(0)}),
        (r"pixel_values holds 2 images \(36 rows\) and the prompts have tokens for 2 \(40 rows\)", "qwen3_vl",
         lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][:-4]}),
        ("prompt 1 has 4 image tokens, and its 0 images take 0", "gemma3",
         lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][:1]}),
        ("pixel_values has 1 rows for 2 prompts", "smolvlm",
         lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][:1]}),
        ("mm_token_type_ids is missing", "qwen3_vl", lambda inputs: without(inputs, "mm_token_type_ids")),
        ("token_type_ids is not 1 at the image tokens", "gemma3",
         lambda inputs: inputs | {"token_type_ids": inputs["token_type_ids"] * 2}),
        ("image_grid_thw, mm_token_type_ids without pixel_values", "qwen3_vl",
         lambda inputs: without(inputs, "pixel_values")),
        (r"inputs \['pixel_values_videos'\] of model type 'qwen3_vl' .* from tensors pixel_values, image_grid_thw",
         "qwen3_vl", lambda inputs: inputs | {"pixel_values_videos": torch.zeros(4, 96)}),
        ("mm_token_type_ids, pixel_values without image_grid_thw; pass all", "qwen2_5_vl",
         lambda inputs: without(inputs, "image_grid_thw")),
        (r"pixel_values has shape \[1, 2, 3, 32, 32\]; of model type 'gemma3' it has 4 dimensions", "gemma3",
         lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][None]}),
        (r"pixel_values has shape \[2, 3, 32, 32\]; of model type 'smolvlm' it has 5 dimensions", "smolvlm",
         lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][:, 0]}),
        (r"image_grid_thw has shape \[6\]; of model type 'qwen3_vl' it has 2 dimensions", "qwen3_vl",
         lambda inputs: inputs | {"image_grid_thw": inputs["image_grid_thw"].flatten()}),
        ("images of model type 'llava' are not served; those of qwen2_vl, .*gemma3.* are. Generate without", "llava",
         lambda inputs: without(inputs, "token_type_ids")),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(
    message: str, family: str, change: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family) if family in VISION else tiny_families.make(family)
    monkeypatch.setattr(EagerRunner, "prefill", lambda *_: pytest.fail("a forward ran"))
    inputs = batch(model, [1, 1])
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("a module of the policy ran"))
    with pytest.raises(ValueError, match=message):
        greedy(model, change(inputs), "none")
