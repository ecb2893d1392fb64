"""`spec-trl vllm-serve-command`: prints the line that starts a server for a trainer."""

import argparse
import json
import shlex

from transformers import AutoConfig

from ..generation.drafters.mtp.mtp_layouts import promises_heads
from ..generation.options import SpeculativeConfig
from ..generation.refusals import check
from ..generation.registry import assistant_of
from ..trainers.rollout_options import DRAFT_LENGTHS
from .drafting import TRANSPORTS, drafting_of


OF_TRL = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out"]
"""What TRL's client needs of a server."""


def run(arguments: argparse.Namespace) -> None:
    """Prints the line.

    Raises:
        ValueError: the options exclude each other.
    """
    strategy, assistant = arguments.assistant_strategy, arguments.assistant_model
    config = SpeculativeConfig(draft_length=arguments.draft_length or DRAFT_LENGTHS, sd_toggle=arguments.sd_toggle)
    words = f"--assistant-strategy {strategy}"
    check(
        {
            "assistant_model": assistant is not None,
            "assistant_model=None": assistant is None and "no --assistant-model",
            "a strategy without assistant": assistant_of(strategy) == "none" and words,
            "a strategy with an assistant": assistant_of(strategy) == "required" and words,
        }
    )
    has_head = strategy == "auto" and promises_heads(AutoConfig.from_pretrained(arguments.model))
    drafting = drafting_of(strategy, config, assistant, arguments.model, has_head, arguments.device)
    line = ["vllm", "serve", arguments.model, *OF_TRL]
    for name, value in drafting.engine_arguments(arguments.device, TRANSPORTS[arguments.transport]).items():
        line += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    print("VLLM_SERVER_DEV_MODE=1", shlex.join(line))
