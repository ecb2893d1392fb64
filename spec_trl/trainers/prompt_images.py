"""Images of a rollout's prompts, as the processors of TRL's trainers return them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..generation.engine.image_prompts import TOKEN_TYPES
from .rollout_options import RolloutOptions


def image_inputs(
    images: Any, fields: Mapping[str, Any], options: RolloutOptions, has_tools: bool
) -> dict[str, Any]:
    """Returns what `generate` takes for the `images` of a rollout's prompts, out of `fields`, a processor's outputs
    besides token ids: tensors, and rows of token types without padding. Empty: prompts are text.

    Raises:
        ValueError: the images are not in `fields`, or something else of the run does not go with images.
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
    asked = {
        "tools": (has_tools, "leave tools unset"),
        f"draft_ranks={options.draft_ranks}": (options.draft_ranks > 0, "set draft_ranks=0"),
        "exact_logprobs=True": (options.exact_logprobs, "set exact_logprobs=False"),
    }
    for what, (is_asked, remedy) in asked.items():
        if is_asked:
            raise ValueError(
                f"prompts with images do not go with {what} in {options.trainer}; {remedy}, or use "
                f"{options.base_trainer}."
            )
    return {
        name: rows if name in TOKEN_TYPES or isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows))
        for name, rows in fields.items()
    }
