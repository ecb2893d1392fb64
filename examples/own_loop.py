"""A loop of your own whose rollouts draft: REINFORCE towards short sentences, with Accelerate and nothing else.

    python examples/own_loop.py --model PATH_OR_HUB_ID

The default is the model of this clone, which is too small to gain from drafts.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_trl


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "data/stories260K"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16, help="completions per step")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    options = parser.parse_args(given)
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    policy = AutoModelForCausalLM.from_pretrained(options.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(policy, optimizer)
    prompt = tokenizer("Once upon a time", return_tensors="pt")["input_ids"].to(accelerator.device)
    with spec_trl.speculate(policy, output_dir="own_loop") as speculation:  # generate below drafts from now on
        for step in range(options.steps):
            ids = policy.generate(
                prompt.repeat(options.rows, 1), attention_mask=torch.ones_like(prompt).repeat(options.rows, 1),
                do_sample=True, top_k=0, max_new_tokens=options.tokens, pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            rewards = torch.tensor([text.count(".") / len(text.split()) for text in texts], device=ids.device)
            logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [B, T - 1]
            sampled = logprobs[:, prompt.shape[1] - 1 :].sum(1)  # [B]
            accelerator.backward(-((rewards - rewards.mean()) * sampled).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"step {step}: reward {rewards.mean():.3f}")
    accelerator.print(speculation.verdict)


if __name__ == "__main__":
    main()
