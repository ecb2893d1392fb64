"""Reads the images of a rollout's prompts from the outputs of TRL's processors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, ProcessorMixin

from ..generation.engine.network.family import TOKEN_TYPES, Family
from ..generation.refusals import MEDIA, Asked, check
from .rollout_options import RolloutOptions


_COLUMNS = "images", "image"
"""Columns that TRL searches for images."""
_LOOKED_AT = 64  # rows of a dataset, evenly spread, searched for images


def _have_images(dataset: object) -> bool:
    """Whether some of `dataset`, or of a dict of datasets, has images, as far as can be seen without decoding one."""
    if isinstance(dataset, dict):
        return any(map(_have_images, dataset.values()))
    if not isinstance(dataset, Dataset) or not len(dataset):
        return False
    names = [name for name in _COLUMNS if name in dataset.column_names]
    rows = range(0, len(dataset), -(-len(dataset) // _LOOKED_AT))
    some = dataset.select(rows).select_columns(names).with_format("arrow")[:] if names else {}
    return any(row for name in names for row in some[name].to_pylist())


def of_media(datasets: object, reader: object) -> dict[str, Asked]:
    """Features of prompts from `datasets`, which the processing class `reader` reads."""
    return {
        MEDIA: _have_images(datasets),
        "a processing_class without images": not isinstance(reader, ProcessorMixin)
        and f"the processing_class, a {type(reader).__name__}",
    }


def check_media(policy: PreTrainedModel, options: RolloutOptions, has_tools: bool) -> None:
    """Raises ValueError if the policy's family, or something else of the run, does not go with images."""
    Family.of(policy).check_media(f"Use {options.base_trainer}, or leave the images out of the dataset.")
    check(options.asked(options.rollout_config()) | {MEDIA: True, "tools": has_tools})


def media_inputs(
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
    check_media(policy, options, has_tools)
    return {
        name: rows if name in TOKEN_TYPES or isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows))
        for name, rows in fields.items()
    }
