"""Round-to-nearest against AWQ (ER Fig. 7), and 4 bits against 8 (ER Tab. 4): block efficiency.

Every scheme drafts for the same prompts with the same noise, so the texts are the same and only the drafts differ. The
statistics come from one forward over other texts, in place of the training step that the trainer takes them from.

    python -m benchmarks.rtn_awq --models ../shared/models/stories260K ../shared/models/bit-stories3M
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import spec_trl
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.quantization.awq import ActivationStatistics

from .calls import way
from .measure import Finding, Options, begin, shown, write_result
from .models import DTYPES, LoadedModel, load_model, model_line
from .workload import STORIES, STORY_MODEL, Workload, end_tokens, prompt_source


SCHEMES = ("rtn-w4-g128", "awq-w4-g128", "rtn-w8")
RESAMPLES = 2000  # of the bootstrap over rows


def observed_tokens(loaded: LoadedModel, texts: Path, count: int, length: int) -> Tensor:
    """Beginnings of the last `count` texts that are long enough, [count, length]."""
    assert loaded.tokenizer is not None
    encoded = loaded.tokenizer(json.loads(texts.read_text()))["input_ids"]
    long = [torch.tensor(ids[:length]) for ids in encoded if len(ids) >= length]
    return torch.stack(long[-count:])


def draft(loaded: LoadedModel, drafter: SelfDrafter, draft_length: int, options: argparse.Namespace) -> Tensor:
    """Tokens and blocks of every row, [rows, 2], and the rest of the counts, [rows, 6] in all."""
    prompts = prompt_source(loaded, options.texts, options.rows, options.seed)
    config = spec_trl.SpeculativeConfig(draft_length=draft_length, seed=options.seed, sd_toggle="always")
    counts: list[DraftCounts] = []
    for first in range(0, options.rows, options.batch):
        part = prompts[first : first + options.batch]
        work = Workload(part, options.max_new_tokens, options.temperature, end_tokens(loaded, False), 0)
        numbers = range(first, first + len(part))
        call = way(loaded.model, "self", config, lambda: [drafter], request_ids=numbers)
        counts += call(work, options.seed).statistics.per_request
    return torch.tensor(
        [[c.committed, c.blocks, c.accepted, c.drafted, c.first_accepted, c.first_drafted] for c in counts],
        dtype=torch.float64,
    )  # [rows, 6]


def gain_interval(counts: Tensor, baseline: Tensor) -> tuple[float, float]:
    """95 % interval of the difference in block efficiency, by resampling rows, the same ones on both sides."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)  # [resamples, rows]
    ours, theirs = counts[picks].sum(1), baseline[picks].sum(1)  # [resamples, 6]
    gains = ours[:, 0] / ours[:, 1] - theirs[:, 0] / theirs[:, 1]  # [resamples]
    low, high = gains.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def acceptance(loaded: LoadedModel, tokens: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Block efficiency of each scheme at each draft length."""
    drafters = {}
    for scheme in options.schemes:
        drafters[scheme] = SelfDrafter(loaded.model, scheme, options.kernel)
        if options.batch > drafters[scheme].max_rows:
            raise ValueError(
                f"--batch={options.batch} is more than the {drafters[scheme].max_rows} rows that {scheme!r} drafts "
                "for here; pass a smaller one."
            )
        observed = ActivationStatistics(loaded.model, drafters[scheme].quantized.activation_aware_layers)
        with observed.collect(0), torch.no_grad():
            loaded.model(tokens)
        drafters[scheme].refresh(observed)
    cells: list[dict[str, Any]] = []
    for draft_length in options.draft_lengths:
        baseline: Tensor | None = None
        for scheme in tqdm(options.schemes, desc=f"{loaded.facts['model']} draft length {draft_length}"):
            counts = draft(loaded, drafters[scheme], draft_length, options)  # [rows, 6]
            committed, blocks, accepted, drafted, first_accepted, first_drafted = counts.sum(0).tolist()
            baseline = counts if baseline is None else baseline
            cells.append(
                {
                    "scheme": scheme,
                    "draft_length": draft_length,
                    "block_efficiency": committed / blocks,
                    "acceptance_rate": accepted / drafted,
                    "first_token_acceptance": first_accepted / first_drafted,
                    "blocks": int(blocks),
                    "gain": committed / blocks - (baseline[:, 0].sum() / baseline[:, 1].sum()).item(),
                    "gain_interval": gain_interval(counts, baseline),
                }
            )
    return cells


def findings(result: dict[str, Any]) -> list[Finding]:
    """Gains in block efficiency over the first scheme."""
    found = []
    baseline = result["options"]["schemes"][0]
    for model in result["models"]:
        for cell in model["acceptance"]:
            what = f"{model_line(model)}, γ = {cell['draft_length']}, {cell['scheme']}: block efficiency"
            if cell["scheme"] == baseline:
                found.append(Finding(what, cell["block_efficiency"], "tokens per round"))
            else:
                low, high = cell["gain_interval"]
                found.append(Finding(f"{what}, gain", cell["gain"], "tokens per round", baseline, (low, high)))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options = result["options"]
    return (
        f"{options['rows']} prompts in batches of {options['batch']}, up to {options['max_new_tokens']} new tokens, "
        f"T = {options['temperature']:g}, exact verification, kernel {options['kernel']!r}; 95 % intervals by "
        f"resampling rows. AWQ's statistics: one forward over {options['observed_texts']} other texts of "
        f"{options['observed_length']} tokens."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = f"--models {STORY_MODEL} --draft-lengths 3 --rows 2 --batch 2 --max-new-tokens 6 --observed-texts 2"
    parser = Options(__doc__, "rtn_awq", f"{tiny} --observed-length 16")
    add = parser.add_argument
    add("--models", nargs="+", required=True, help="folders")
    add("--schemes", nargs="+", default=SCHEMES, help="the first is the baseline")
    add("--draft-lengths", type=int, nargs="+", default=[3, 5, 7])
    add("--dtype", default="float32", choices=list(DTYPES))
    add("--kernel", default="auto", help="draft_kernel")
    add("--texts", type=Path, default=STORIES, help="JSON list of strings")
    add("--rows", type=int, default=256, help="prompts")
    add("--batch", type=int, default=16, help="rows decoded together")
    add("--max-new-tokens", type=int, default=128, help="per row")
    add("--temperature", type=float, default=1.0)
    add("--observed-texts", type=int, default=32, help="for the statistics")
    add("--observed-length", type=int, default=256, help="tokens of each")
    parser.set_defaults(device="cpu")
    options = parser.read(arguments, "draft_lengths", "rows", "batch", "max_new_tokens")
    machine = begin(options)
    models = []
    for spec in options.models:
        loaded = load_model(spec, DTYPES[options.dtype], "cpu")
        tokens = observed_tokens(loaded, options.texts, options.observed_texts, options.observed_length)
        models.append(loaded.facts | {"acceptance": acceptance(loaded, tokens, options)})
    result = {"options": shown(options), "models": models}
    default = "Round-to-nearest against AWQ, 4 bits against 8"
    title = default if tuple(options.schemes) == SCHEMES else f"Schemes {', '.join(options.schemes)}"
    write_result(options.output, "quantization", title, setup(result), machine, findings(result), result)


if __name__ == "__main__":
    main()
