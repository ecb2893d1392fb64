#!/usr/bin/env bash
# TRL 1.16.0 with transformers 5.23.0: a made GRPOConfig or RLOOConfig cannot be made again from its own values, as sweeps and notebooks do
# (dataclasses.replace(args, learning_rate=...), GRPOConfig(**args.to_dict())). It fills in both generation_batch_size and
# steps_per_generation when it is made, and refuses a config that is given both. transformers' TrainingArguments can be replaced.
# Seen: ValueError, "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"; with
# generation_batch_size=None the copy is made, and fills it in as before.
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0 trl==1.16.0 transformers==5.23.0
cat >"$scratch/replace.py" <<'P'
from dataclasses import replace

from transformers import TrainingArguments
from trl import GRPOConfig, RLOOConfig

given = dict(output_dir="unused", use_cpu=True, report_to="none")
assert replace(TrainingArguments(**given), learning_rate=1e-4).learning_rate == 1e-4
for kind in (GRPOConfig, RLOOConfig):
    made = kind(**given, bf16=False)
    for again in (lambda: replace(made, learning_rate=1e-4), lambda: kind(**made.to_dict())):
        try:
            again()
            print(kind.__name__, "is made again")
        except ValueError as error:
            print(kind.__name__, error)
    copy = replace(made, learning_rate=1e-4, generation_batch_size=None)
    assert copy.generation_batch_size == made.generation_batch_size
P
"$PYTHON" "$scratch/replace.py" | tee "$scratch/said"
test "$(grep -c "can not be both configured" "$scratch/said")" = 4
