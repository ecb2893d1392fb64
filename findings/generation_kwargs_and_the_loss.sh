#!/usr/bin/env bash
# TRL 1.16.0 GRPOTrainer with transformers 5.24.0: what generation_kwargs changes in the rollout and not in the loss.
# 1. eos_token_id ends the completions there, but the trainer goes on looking for the model's and the tokenizer's end tokens
#    alone: the padding behind such an end counts as completion. It is given to the reward functions, it is in
#    completions/mean_length, and the loss trains on it. (The same ids in model.generation_config are right.)
# 2. temperature sets that of the samples; the loss takes its log-probabilities at GRPOConfig.temperature.
# 3. A misspelt key ("temprature") is taken without an error or a warning and does nothing.
# Seen, same weights and seed: completion tokens in the loss: 384 by generation_kwargs, 143 by model.generation_config.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 trl==1.16.0 transformers==5.24.0
"$PYTHON" - <<'P' 2>&1 | grep -v "^Failed to load\|^W[0-9]\|^{"
import tempfile

import tiny
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

tokenizer = tiny.tokenizer()
data = Dataset.from_dict({"prompt": ["abc", "the ab", "a", "xyz"] * 4})
ENDS = [1, 5, 6, 7, 8]


def step(own_ends=None, **generation_kwargs):
    """One step. Returns the completions that the reward function was given, the tokens in the loss and the loss's temperature."""
    seen, tokens = [], []

    def reward(completion_ids, **columns):
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    class Trainer(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            tokens.append(int(inputs["completion_mask"].sum()))
            return super()._compute_loss(model, inputs)

    model = tiny.llama(len(tokenizer), spread=0.02)
    if own_ends:
        model.generation_config.eos_token_id = own_ends
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_generations=2, max_completion_length=24, max_steps=1,
        bf16=False, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, generation_kwargs=generation_kwargs, seed=0,
    )
    trainer = Trainer(model, reward, config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return seen, tokens[0], (trainer.generation_config.temperature, trainer.temperature)


by_kwargs, in_loss, _ = step(eos_token_id=ENDS)
by_model, right, _ = step(own_ends=ENDS)
print("first completions:", by_kwargs[0], by_model[0])
print("completion tokens in the loss: by generation_kwargs", in_loss, "by model.generation_config", right)


def cut(ids):
    """The completion up to and with its first end token."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ENDS), len(ids))]


assert [cut(ids) for ids in by_kwargs] == by_model, "changed: other completions"
assert in_loss > right == sum(map(len, by_model)), "changed: the padding is not trained on"
sampled, _, temperatures = step(temperature=0.01)
print("temperature of the samples and of the loss:", temperatures)
assert temperatures == (0.01, 1.0), "changed"
plain, misspelt = step()[0], step(temprature=0.01)[0]
print("misspelt key: same completions", plain == misspelt)
assert plain == misspelt != sampled, "changed"
P
