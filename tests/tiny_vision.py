"""Tiny random vision-language models that read images, and their processors, from nothing but classes."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_families import tiny_settings


IMAGE = 60  # token
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4),
    "qwen2_5_vl": dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4,
                       window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4,
                     num_position_embeddings=16, deepstack_visual_indexes=[0]),
    "gemma3": dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, image_size=32, patch_size=8),
    "smolvlm": dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, image_size=32, patch_size=8),
}  # fmt: skip
VISION |= {"qwen3_vl_moe": VISION["qwen3_vl"], "idefics3": VISION["smolvlm"]}


def make(family: str) -> PreTrainedModel:
    """A random float64 model whose images take few tokens: 4 of each, or in Qwen a quarter of their patches."""
    kind = CONFIG_MAPPING[family]
    settings = tiny_settings(kind)
    settings["vision_config"] |= VISION[family]
    settings["image_token_index" if family == "gemma3" else "image_token_id"] = IMAGE
    if family == "gemma3":
        settings["mm_tokens_per_image"] = 4
        settings["text_config"]["sliding_window"] = 8
    config = kind(**settings)
    config.get_text_config()._experts_implementation = "eager"  # grouped_mm has no float64
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %} {{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} IMAGE {% else %} {{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""Chat template: contents one after another."""


class _Qwen(Qwen2_5_VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = "<|video_pad|>", 63
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(family: str) -> ProcessorMixin:
    """The processor of a model that :func:`make` makes. Text is words: letters, digits and "+"."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+abcdefghijklmnopqrstuvwxyz"]
    words += [f"w{number}" for number in range(len(words), IMAGE)]
    special = {"image_token": "<|image_pad|>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    if family == "idefics3":
        special = {"image_token": "<image>", "fake": "<fake_token_around_image>", "whole": "<global-img>"}
    ids = {word: number for number, word in enumerate([*words, *special.values(), "<|video_pad|>"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", extra_special_tokens=special,
    )  # fmt: skip
    if family == "gemma3":
        size = {"height": 32, "width": 32}
        template = TEMPLATE.replace("IMAGE", "<boi>")
        return Gemma3Processor(Gemma3ImageProcessorPil(size=size), fast, chat_template=template, image_seq_length=4)
    if family == "idefics3":
        size = {"longest_edge": 32}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        template = TEMPLATE.replace("IMAGE", "<image>")
        return Idefics3Processor(images, fast, image_seq_len=4, chat_template=template)
    template = TEMPLATE.replace("IMAGE", "<boi> <|image_pad|> <eoi>")
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1024})
    return _Qwen(images, fast, template)
