"""Reads the images of a rollout's prompts from the outputs of TRL's processors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from ..generation.engine.network.image_prompts import TOKEN_TYPES, check_family
from ..generation.refusals import IMAGES, check
from .rollout_options import RolloutOptions


_COLUMNS = "images", "image"
"""Columns that TRL searches for images."""
_LOOKED_AT = 64  # rows of a dataset, evenly spread, searched for images


def has_images(dataset: object) -> bool:
    """Whether some of `dataset`, or of a dict of datasets, has images, judged without decoding one."""
    if isinstance(dataset, dict):
        return any(map(has_images, dataset.values()))
    if not isinstance(dataset, Dataset) or not len(dataset):
        return False
    names = [name for name in _COLUMNS if name in dataset.column_names]
    rows = range(0, len(dataset), -(-len(dataset) // _LOOKED_AT))
    some = dataset.select(rows).select_columns(names).with_format("arrow")[:] if names else {}
    return any(row for name in names for row in some[name].to_pylist())


def check_images(policy: PreTrainedModel, options: RolloutOptions, has_tools: bool) -> None:
    """Raises ValueError if the policy's family, or another part of the run, cannot serve images."""
    check_family(policy, f"Use {options.base_trainer}, or leave the images out of the dataset.")
    check(options.asked(options.rollout_config()) | {IMAGES: True, "tools": has_tools})


def image_inputs(
    images: Any, fields: Mapping[str, Any], policy: PreTrainedModel, options: RolloutOptions, has_tools: bool
) -> dict[str, Any]:
    """Returns the inputs of `generate` for the `images` of a rollout's prompts, from `fields`, a processor's outputs
    besides token ids: tensors, and rows of token types without padding. Empty: prompts are text.

    Raises:
        ValueError: the images are not in `fields`, or the run cannot serve images.
    """
    carried = [
        name for name, rows in fields.items()
        if name not in TOKEN_TYPES or any(any(row) for row in rows)  # rows [B, n]; zero is text
    ]  # fmt: skip
    if not images and not carried:
        return {}
    if "pixel_values" not in fields:
        raise ValueError(
            f"the prompts carry {', '.join(carried) or 'images'}, and the processor gives no pixel_values for them. "
            f"Pass the processor of a vision-language model as processing_class, or use {options.base_trainer}."
        )
    check_images(policy, options, has_tools)
    return {
        name: rows if name in TOKEN_TYPES or isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows))
        for name, rows in fields.items()
    }
