"""Declares the arguments of `spec-trl vllm-serve-command`."""

import argparse

from ..cli.arguments import Command, add_option, whole_number
from .drafting import STRATEGIES, TRANSPORTS


def _vllm_serve_command(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of the policy")
    add("--assistant-strategy", default="auto", choices=STRATEGIES, help="that of the trainer's config (%(default)s)")
    add("--assistant-model", metavar="MODEL", help='of "model", "eagle3", or an "mtp" head of its own')
    add_option(parser, "--draft-length", "draft_length", type=whole_number, nargs="+", metavar="N")
    add_option(parser, "--sd-toggle", "sd_toggle", choices=["measured", "always"])
    text = "how weights arrive: TRL's NCCL group, or a file on this machine, which needs no GPU (%(default)s)"
    add("--transport", default="nccl", choices=list(TRANSPORTS), help=text)
    add("--device", default="cuda", choices=["cuda", "cpu"], help="of the server (%(default)s)")


COMMANDS = {
    "vllm-serve-command": Command(
        """\
Prints the line that starts a vLLM server for a trainer with use_vllm=True and vllm_mode="server": one that drafts as
the trainer's config says, and takes weights of policy and drafter. Add vLLM's own options to it, such as
--tensor-parallel-size. spec_trl must be installed where it runs.""",
        """spec-trl vllm-serve-command Qwen/Qwen2.5-0.5B-Instruct --assistant-strategy self
  spec-trl vllm-serve-command path/to/model --assistant-strategy eagle3 --assistant-model path/to/head""",
        _vllm_serve_command,
    ),
}
