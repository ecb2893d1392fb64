"""Prompts with images. A family's forward reads such a prompt, alone and whole: it merges the features of images into
the text, and knows their positions and which tokens attend in both directions. Its K/V is then written into the cache,
and the engine decodes text after it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ....native.cpu_products import reading_prompts
from ..kv.base import KVCache
from ..kv.memory import sent
from .family import PIXELS, TOKEN_TYPES, Family
from .family_hooks import cache_argument, forward_parameters


_OPTIONAL = {"pixel_attention_mask"}  # a forward takes all pixels without it
INPUTS = frozenset(name for names in PIXELS.values() for name in names) | {
    "image_patches", "pixel_values_images", "pixel_values_videos", "video_grid_thw",
}  # fmt: skip
"""Inputs of any family that hold images or videos."""


def take_inputs(keywords: dict[str, Any]) -> dict[str, Any]:
    """Removes the inputs that describe images from the `keywords` of `generate`, and returns them; empty for text."""
    images = {name: value for name in INPUTS if (value := keywords.pop(name, None)) is not None}
    types = [name for name in TOKEN_TYPES if images and keywords.get(name) is not None]
    return images | {name: keywords.pop(name) for name in types}


@dataclass(eq=False)
class MediaPrompt:
    """A prompt with images; equal prompts with equal images are one object.

    Args:
        tokens: `[length]` int64, without padding, on the host.
        inputs: the family's inputs for this prompt alone, besides its tokens.
        offset: number to add to the column of a later token for its position (M-RoPE); 0 in most families.

    Attributes:
        logits: `[1, 1, vocab]` after the prompt, once it was read.
    """

    tokens: Tensor
    inputs: dict[str, Tensor]
    offset: int = 0
    logits: Tensor = field(init=False)

    def read(self, network: PreTrainedModel, cache: KVCache, row: int, columns: int) -> None:
        """Writes K/V of its first `columns` tokens into a row of `cache`."""
        states, narrow = DynamicCache(), {"logits_to_keep": 1} if network._supports_logits_to_keep() else {}
        tokens = self.tokens[None].to(network.device)  # [1, length]
        inputs = {name: value.to(network.device) for name, value in self.inputs.items()}
        with reading_prompts():
            output = network(input_ids=tokens, use_cache=True, **{cache_argument(network): states}, **inputs, **narrow)
        self.logits = output.logits[:, -1:]
        kept = [(layer.keys[0, :, :columns], layer.values[0, :, :columns]) for layer in states.layers]
        cache.import_row(row, 0, dict(enumerate(kept)))


def read_media(
    network: PreTrainedModel,
    cache: KVCache,
    rows: range,
    prompts: Mapping[int, MediaPrompt],
    begin: Collection[int],
    lengths: Sequence[int],
    after: Callable[[int], None],
) -> tuple[dict[int, int], list[Tensor]]:
    """Writes the K/V of the `prompts` with images by row, within the first `lengths` columns of the admitted `rows`,
    and the offsets of these; calls `after` with each row. Returns the number of written columns by row, and logits
    `[1, 1, vocab]` after the prompts of rows that `begin`."""
    read, logits = dict[int, int](), list[Tensor]()
    if cache.offsets is not None:
        offsets = [prompts[row].offset if row in prompts else 0 for row in rows]
        cache.offsets[rows.start : rows.stop] = sent(torch.tensor(offsets), cache.offsets.device)
    for row, length in zip(rows, lengths, strict=False):
        if (images := prompts.get(row)) is not None:
            read[row] = min(len(images.tokens), length)
            images.read(network, cache, row, read[row])
            after(row)
            if row in begin:
                logits.append(images.logits)
    return read, logits


def media_prompts(
    model: PreTrainedModel, inputs: Mapping[str, Any], prompts: Sequence[Tensor], copies: int
) -> list[MediaPrompt | None]:
    """Splits the `inputs` of a batch, as processors return them, into those of its `prompts` (`[length]` int64 each),
    of which `copies` neighbours are equal. None: a prompt is text alone.

    Raises:
        ValueError: images of this family, or some of `inputs`, are not served; or prompts and images do not fit.
    """
    family = Family.of(model)
    family.check_media("Generate without assistant_strategy.")
    kind, pixels = family.name, family.media
    known = forward_parameters(type(model)) & {*pixels, *TOKEN_TYPES}
    if unknown := sorted(name for name, value in inputs.items() if name not in known or not isinstance(value, Tensor)):
        raise ValueError(
            f"the model inputs {unknown} of model type '{kind}' cannot be combined with assistant_strategy, which "
            f"reads images from tensors {', '.join(pixels)}. Generate without assistant_strategy."
        )
    if missing := [name for name in pixels if name not in inputs and name not in _OPTIONAL]:
        raise ValueError(
            f"{', '.join(sorted(inputs))} without {', '.join(missing)}; pass all that the processor returns."
        )
    _check_shapes(kind, inputs)
    token: int = model.config.image_token_id
    seen: dict[bytes, list[MediaPrompt]] = {}
    found: list[MediaPrompt | None] = []
    tokens = list(prompts)[::copies]
    counts = [int((prompt == token).sum()) for prompt in tokens]
    for row, (prompt, of_prompt) in enumerate(zip(tokens, _split(model, inputs, counts), strict=True)):
        if of_prompt is None:
            found += [None] * copies
            continue
        for name in TOKEN_TYPES:
            if name in inputs:
                of_prompt[name] = types = inputs[name][row : row + 1, -len(prompt) :].to(prompt.device)  # [1, length]
                if not torch.equal(types[0].long(), (prompt == token).long()):
                    raise ValueError(f"{name} is not 1 at the image tokens ({token}) of prompt {row} alone.")
        images = MediaPrompt(prompt, of_prompt, _offset(model, prompt, of_prompt))
        others = seen.setdefault(prompt.cpu().numpy().tobytes(), [])
        equal = next((other for other in others if _are_equal(images.inputs, other.inputs)), None)
        if equal is None:
            others.append(images)
        found += [equal or images] * copies
    return found


def _check_shapes(kind: str, inputs: Mapping[str, Tensor]) -> None:
    pixels = 2 if "qwen" in kind else 4 if kind == "gemma3" else 5
    for name, dimensions in (("pixel_values", pixels), ("image_grid_thw", 2), ("pixel_attention_mask", 4)):
        if name in inputs and inputs[name].dim() != dimensions:
            raise ValueError(
                f"{name} has shape {list(inputs[name].shape)}; of model type '{kind}' it has {dimensions} dimensions. "
                "Pass it as the processor returns it."
            )


def _split(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], counts: Sequence[int]
) -> Iterator[dict[str, Tensor] | None]:
    """Yields the images of each prompt, of which `counts` tokens stand for images; None: it has none."""
    config, pixels = model.config, inputs["pixel_values"]
    if pixels.dim() == 5:  # [B, most images of a prompt, channels, height, width], padded by zeros
        if len(pixels) != len(counts):
            raise ValueError(f"pixel_values has {len(pixels)} rows for {len(counts)} prompts; they must be equal.")
        of_image: int = model.base_model.image_seq_len
        for row, count in enumerate(counts):
            images = max(int(pixels[row].flatten(1).any(1).sum()), min(count, 1))  # one image may be all 0
            if count != images * of_image:
                raise _mismatch(row, count, images, images * of_image)
            own = {name: inputs[name][row : row + 1] for name in Family.of(model).media if name in inputs}
            yield own if count else None
        return
    grid = inputs.get("image_grid_thw")  # [images, 3]
    if grid is None:
        sizes, patches = [config.mm_tokens_per_image] * len(pixels), [1] * len(pixels)
    else:
        patches = grid.prod(-1).tolist()
        sizes = [number // config.vision_config.spatial_merge_size**2 for number in patches]
    first = 0  # image, whose patches begin at `start`
    for row, count in enumerate(counts):
        last = first
        while sum(sizes[first:last]) < count and last < len(sizes):
            last += 1
        if sum(sizes[first:last]) != count:
            raise _mismatch(row, count, last - first, sum(sizes[first:last]))
        start, stop = sum(patches[:first]), sum(patches[:last])
        own = {"pixel_values": pixels[start:stop]} | ({} if grid is None else {"image_grid_thw": grid[first:last]})
        yield own if count else None
        first = last
    if first < len(sizes) or sum(patches) != len(pixels):
        raise ValueError(
            f"pixel_values holds {len(sizes)} images ({len(pixels)} rows) and the prompts have tokens for {first} "
            f"({sum(patches[:first])} rows). Pass all that the processor returns for these prompts."
        )


def _mismatch(row: int, count: int, images: int, tokens: int) -> ValueError:
    return ValueError(
        f"prompt {row} has {count} image tokens, and its {images} images take {tokens}. Pass all that the processor "
        "returns for these prompts."
    )


def _offset(model: PreTrainedModel, prompt: Tensor, inputs: Mapping[str, Tensor]) -> int:
    positions = getattr(model.base_model, "get_rope_index", None)
    if positions is None:
        return 0
    if "mm_token_type_ids" not in inputs:
        raise ValueError("mm_token_type_ids is missing, by which this family finds images; the processor returns it.")
    types, grid = inputs["mm_token_type_ids"], inputs["image_grid_thw"].to(prompt.device)
    return int(positions(prompt[None], mm_token_type_ids=types, image_grid_thw=grid)[1])


def _are_equal(inputs: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, others[name]) for name, value in inputs.items())
