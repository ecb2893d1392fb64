"""Tiny drafters that vLLM and we read, trained for a few seconds, so that some of their tokens are accepted."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from examples.demo.task import build_tokenizer
from spec_trl.drafter_training.adaptation import Adaptable, AdaptationOptions, DrafterAdaptation
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from tests.generation.drafters.eagle3.reference import IDS_KEY, make_folder, safeai
from tests.generation.drafters.mtp.heads import add, random_head
from tests.trainers.test_drafter_adaptation import ONE_RANK


def easy(policy: PreTrainedModel) -> PreTrainedModel:
    """Weakens all layers of a random policy, so that its next token depends above all on the newest one."""
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight *= 0.05
    return policy


def train(drafter: Adaptable, policy: PreTrainedModel, steps: int) -> None:
    """On the policy's own samples."""
    with torch.no_grad():
        for weight in drafter.network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.05 if weight.dim() > 1 else torch.ones_like(weight))
    how = AdaptationOptions(learning_rate=3e-3, hidden_weight=0.0, token_weight=1.0)
    learning = DrafterAdaptation(drafter, policy, ONE_RANK, how, seed=0)
    torch.manual_seed(0)
    prompts = torch.randint(3, policy.config.vocab_size, (256, 4))
    how_long: dict[str, Any] = {"max_new_tokens": 28, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    texts = policy.generate(prompts, do_sample=True, top_k=0, temperature=0.6, **how_long)
    for step in range(steps):
        own = texts[16 * (step % 16) :][:16]
        ids = {"prompt_ids": own[:, :4], "completion_ids": own[:, 4:]}
        masks = {name.replace("ids", "mask"): torch.ones_like(part) for name, part in ids.items()}
        with torch.no_grad(), learning.watch(ids | masks):
            policy(own)
        learning.update()


def eagle3_head(policy: PreTrainedModel, folder: Path, steps: int = 200) -> str:
    """A folder under `folder` with an EAGLE-3 head for `policy`."""
    config = policy.config
    make_folder(
        folder / "random",
        safeai(
            vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, hidden_size=config.hidden_size,
            intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64, **{IDS_KEY: [1, 2, 3]},
        ),
        torch.float32,
    )  # fmt: skip
    drafter = Eagle3Drafter(folder / "random", policy)
    train(drafter, policy, steps)
    drafter.save(folder / "trained")
    return str(folder / "trained")


def policy_with_head(folder: Path, steps: int = 200) -> Path:
    """A GLM-4.5 with a layer of two experts, whose checkpoint has an MTP head."""
    tokenizer = build_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=48, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=False, first_k_dense_replace=1, n_routed_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=64,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = easy(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    policy.generation_config.eos_token_id = None
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add(folder, random_head(policy, "glm4_moe"))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = MtpDrafter(None, policy)
    train(drafter, policy, steps)
    add(folder, drafter.tensors())
    return folder
