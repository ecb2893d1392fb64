r"""Samples completions with speculative decoding and says how it went.

    python examples/generate.py
    python examples/generate.py --model path/to/model --prompts prompts.txt --compare

Prompts come from a file: .txt (one per line), .jsonl (with "prompt", "question" or "text") or .json (a list of
strings). --compare samples the same with assistant_strategy="none": with exact verification every row must come out
the same (on a GPU up to near-ties that rounding decides).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from spec_trl import SpeculativeConfig, SpeculativeOutput
from spec_trl.cli.arguments import DTYPES, add_option, non_negative, whole_number
from spec_trl.cli.loading import PROMPTS, find_device, load_model, pad_left, read_prompts, token_ids
from spec_trl.generation.options import OPTIONS
from spec_trl.generation.registry import assistant_of, needing_assistant, strategies
from spec_trl.papers.specactor.options import SpecActorOptions
from spec_trl.papers.test_time_speculation.options import TTSOptions
from spec_trl.value_checks import kinds_of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or local folder (default: %(default)s)")
    add("--prompts", type=Path, help="file with prompts (default: built-in ones)")
    add("--limit", type=whole_number, default=32, help="number of prompts to take (default: %(default)s)")
    add("--max_prompt_tokens", type=whole_number, default=256, help="cut longer ones (default: %(default)s)")
    add("--max_new_tokens", type=whole_number, default=256, help="longest completion in tokens (default: %(default)s)")
    add("--temperature", type=non_negative, default=1.0, help="0 decodes greedily (default: %(default)s)")
    add("--top_p", type=float, default=1.0, help="nucleus (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the sampling noise (default: %(default)s)")
    add("--assistant_strategy", default="self", choices=strategies(), help="what drafts (default: %(default)s)")
    add("--assistant_model", help="hub id or folder of the drafter, for a strategy that takes one")
    add_option(parser, "--tts_drafter", "tts.drafter", choices=kinds_of(OPTIONS["tts.drafter"]))
    add_option(parser, "--best_of_n_drafters", "specactor.drafters", nargs="+")
    add_option(parser, "--draft_length", "draft_length", type=whole_number)
    add_option(parser, "--verification", "verification", choices=kinds_of(OPTIONS["verification"]))
    add("--batch_size", type=whole_number, help="rows decoded at a time (default: all)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="of the weights (auto: the checkpoint's)")
    add("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")
    add("--show", type=int, default=3, help="number of completions to print (default: %(default)s)")
    add("--compare", action="store_true", help='sample the same with assistant_strategy="none"')
    return parser.parse_args()


def sample(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: str, arguments: argparse.Namespace, new_tokens: int
) -> SpeculativeOutput:
    """Generates up to `new_tokens` for every prompt."""
    sampling: dict[str, Any] = {"do_sample": False}
    if arguments.temperature > 0:
        # generate would take the 50 likeliest tokens only, if it were not told otherwise.
        sampling = dict(do_sample=True, temperature=arguments.temperature, top_p=arguments.top_p, top_k=0)
    learning = TTSOptions(drafter=arguments.tts_drafter)
    racing = SpecActorOptions(drafters=arguments.best_of_n_drafters)
    return model.generate(
        **inputs,
        **sampling,
        max_new_tokens=new_tokens,
        assistant_strategy=strategy,
        assistant_model=None if strategy == "none" else arguments.assistant_model,
        speculative_config=SpeculativeConfig(
            draft_length=arguments.draft_length,
            verification=arguments.verification,
            seed=arguments.seed,
            max_batch_size=arguments.batch_size,
            tts=learning if strategy == "tts" else TTSOptions(),
            specactor=racing if strategy == "best_of_n" else SpecActorOptions(),
        ),
        return_dict_in_generate=True,
    )


def describe(output: SpeculativeOutput) -> str:
    """The statistics of one generation as text."""
    statistics = output.statistics
    assert statistics is not None
    lines = [
        f'assistant_strategy="{statistics.strategy}": {statistics.tokens} tokens in {statistics.seconds:.2f} s, '
        f"{statistics.tokens_per_second:.0f} tokens/s",
        f"  forwards: {statistics.target_forwards} target, {statistics.draft_forwards} draft",
    ]
    if statistics.total.blocks:
        lines.append(
            f"  tokens per verified block: {statistics.block_efficiency:.2f}; drafts accepted: "
            f"{statistics.acceptance_rate:.3f}, first drafts: {statistics.first_token_acceptance:.3f}"
        )
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in statistics.phase_seconds.items())
    lines.append(f"  seconds by phase: {phases}")
    return "\n".join(lines)


def completions_of(output: SpeculativeOutput) -> list[list[int]]:
    """New tokens of each row, EOS included."""
    assert output.sequences is not None and output.logprobs is not None and output.lengths is not None
    new = output.sequences[:, -output.logprobs.shape[1] :].tolist()  # [B, new]
    return [row[:length] for row, length in zip(new, output.lengths.tolist(), strict=True)]


def main() -> None:
    arguments = parse_arguments()
    strategy, assistant = arguments.assistant_strategy, arguments.assistant_model
    if assistant is not None and assistant_of(strategy) == "none":
        raise ValueError(f"--assistant_strategy {strategy} uses no --assistant_model {assistant}; drop one of them.")
    if assistant is None and strategy in needing_assistant():
        raise ValueError(f"--assistant_strategy {strategy} needs a drafter; give --assistant_model.")
    device = find_device(arguments.device)
    prompts = (PROMPTS if arguments.prompts is None else read_prompts(arguments.prompts))[: arguments.limit]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = load_model(arguments.model, arguments.dtype, device)
    inputs = pad_left(token_ids(prompts, tokenizer, arguments.max_prompt_tokens), device)

    strategies = list(dict.fromkeys([*(["none"] if arguments.compare else []), strategy]))
    outputs = {}
    for each in strategies:
        sample(model, inputs, each, arguments, new_tokens=4)  # the first one loads, quantizes and compiles
        outputs[each] = sample(model, inputs, each, arguments, arguments.max_new_tokens)

    completions = {each: completions_of(output) for each, output in outputs.items()}
    chosen = completions[strategy]
    for prompt, tokens in list(zip(prompts, chosen, strict=True))[: arguments.show]:
        print(f"--- {prompt[:200]}\n{tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    for output in outputs.values():
        print(describe(output))
    if len(outputs) > 1:
        identical = sum(ours == theirs for ours, theirs in zip(chosen, completions["none"], strict=True))
        print(f'rows identical to "none": {identical} of {len(prompts)}')


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not go together
        sys.exit(f"generate.py: error: {' '.join(str(error).split())}")
