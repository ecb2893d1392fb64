"""A drafter of your own in a class and one decorator: here, the word that most often follows in a text of yours.

    python examples/own_drafter.py --model PATH_OR_HUB_ID --text README.md
"""

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_trl import Drafter, Proposal, register_drafter


@register_drafter
class BigramDrafter(Drafter):
    """Drafts the token that most often followed the last one in `text_ids`. Whatever it drafts, outputs stay."""

    strategy = "bigram"  # generate(assistant_strategy="bigram"), SpecGRPOConfig(assistant_strategy="bigram")
    has_probabilities = False  # verification="rejection" is refused
    looks_up = True  # its drafts cost no forward
    text_ids: list[int] = []

    def __init__(self) -> None:
        counts = Counter(pairwise(self.text_ids)).most_common()
        self.after = {first: second for (first, second), _ in reversed(counts)}

    def propose(self, draft_length: int, noise: object) -> Proposal:
        rows = self.session.rows  # in flight; their texts, drafts not included
        last = rows.window(-1, 1)[:, 0].tolist()  # the newest token of each row
        drafts = []
        for _ in range(draft_length):
            last = [self.after.get(token, 0) for token in last]
            drafts.append(last)
        return Proposal(torch.tensor(drafts, device=rows.tokens.device).T)  # [B, draft_length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="whose tokens are drafted")
    parser.add_argument("--prompt", default="Once upon a time")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    BigramDrafter.text_ids = tokenizer(options.text.read_text())["input_ids"]
    inputs = tokenizer(options.prompt, return_tensors="pt")
    config = {"sd_toggle": "always", "draft_length": 3}  # the default "measured" drafts only where that is faster
    output = model.generate(
        **inputs, assistant_strategy="bigram", speculative_config=config, max_new_tokens=60,
        return_dict_in_generate=True,
    )  # fmt: skip
    print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    print(output.statistics)


if __name__ == "__main__":
    main()
