r"""Samples completions with speculative decoding and says how it went.

    python examples/generate.py
    python examples/generate.py --model path/to/model --prompts prompts.txt --compare

Prompts come from a file: .txt (one per line), .jsonl (with "prompt", "question" or "text") or .json (a list of
strings). --compare samples the same with assistant_strategy="none": with exact verification every row must come out
the same, up to near-ties that rounding decides (none in float64).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spec_trl import SpeculativeConfig, SpeculativeOutput
from spec_trl.generation.configuration import STRATEGIES, VERIFICATIONS


PROMPTS = [
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Reason step by step.",
    "Translate to French: The early bird catches the worm.",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or local folder (default: %(default)s)")
    add("--prompts", type=Path, help="file with prompts (default: four built-in ones)")
    add("--limit", type=int, default=32, help="take the first so many prompts (default: %(default)s)")
    add("--max_prompt_tokens", type=int, default=256, help="cut prompts behind so many tokens (default: %(default)s)")
    add("--max_new_tokens", type=int, default=256, help="longest completion in tokens (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="0 decodes greedily (default: %(default)s)")
    add("--top_p", type=float, default=1.0, help="nucleus (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the sampling noise (default: %(default)s)")
    add("--assistant_strategy", default="self", choices=STRATEGIES, help="what drafts (default: %(default)s)")
    add("--assistant_model", help="hub id or folder of the drafter of --assistant_strategy model")
    add("--draft_length", type=int, default=5, help="draft tokens per verification (default: %(default)s)")
    add("--verification", default="exact", choices=VERIFICATIONS, help="default: %(default)s")
    add("--batch_size", type=int, help="rows decoded together (default: all)")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float64 (default: the checkpoint's)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--show", type=int, default=3, help="print so many completions (default: %(default)s)")
    add("--compare", action="store_true", help='sample the same with assistant_strategy="none"')
    return parser.parse_args()


def read_prompts(path: Path | None) -> list[str]:
    """Reads prompts from a .txt, .jsonl or .json file; the built-in ones without a file."""
    if path is None:
        return PROMPTS
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return [str(entry) for entry in json.loads(text)]
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        row = json.loads(line)
        names = [name for name in ("prompt", "question", "text") if name in row]
        if not names:
            raise ValueError(f"line {number} of {path} has {sorted(row)}; it needs 'prompt', 'question' or 'text'.")
        prompts.append(row[names[0]])
    return prompts


def tokenize(prompts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, each `[B, width]` int64, left-padded; as a chat where there is a template."""
    # Cut before the template is put around it, whose end the model must see.
    cut = [tokenizer.decode(tokenizer(p, add_special_tokens=False).input_ids[:longest]) for p in prompts]
    if tokenizer.chat_template is not None:
        turns = [[{"role": "user", "content": prompt}] for prompt in cut]
        cut = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(
        cut, padding=True, padding_side="left", return_tensors="pt",
        add_special_tokens=tokenizer.chat_template is None,
    )  # fmt: skip
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def sample(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: str, arguments: argparse.Namespace, new_tokens: int
) -> SpeculativeOutput:
    """Generates up to `new_tokens` for every prompt."""
    sampling: dict[str, Any] = {"do_sample": False}
    if arguments.temperature > 0:
        # generate would take the 50 likeliest tokens only, if it were not told otherwise.
        sampling = dict(do_sample=True, temperature=arguments.temperature, top_p=arguments.top_p, top_k=0)
    return model.generate(
        **inputs,
        **sampling,
        max_new_tokens=new_tokens,
        assistant_strategy=strategy,
        assistant_model=arguments.assistant_model if strategy == "model" else None,
        speculative_config=SpeculativeConfig(
            draft_length=arguments.draft_length,
            verification=arguments.verification,
            seed=arguments.seed,
            max_batch_size=arguments.batch_size,
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
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).to(arguments.device).eval()
    prompts = read_prompts(arguments.prompts)[: arguments.limit]
    inputs = tokenize(prompts, tokenizer, arguments.max_prompt_tokens)
    inputs = {name: tensor.to(arguments.device) for name, tensor in inputs.items()}

    strategies = list(dict.fromkeys([*(["none"] if arguments.compare else []), arguments.assistant_strategy]))
    outputs = {}
    for strategy in strategies:
        sample(model, inputs, strategy, arguments, new_tokens=4)  # the first one loads, quantizes and compiles
        outputs[strategy] = sample(model, inputs, strategy, arguments, arguments.max_new_tokens)

    completions = {strategy: completions_of(output) for strategy, output in outputs.items()}
    chosen = completions[arguments.assistant_strategy]
    for prompt, tokens in list(zip(prompts, chosen, strict=True))[: arguments.show]:
        print(f"--- {prompt[:200]}\n{tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    for output in outputs.values():
        print(describe(output))
    if len(outputs) > 1:
        identical = sum(ours == theirs for ours, theirs in zip(chosen, completions["none"], strict=True))
        print(f'rows identical to "none": {identical} of {len(prompts)}')


if __name__ == "__main__":
    main()
