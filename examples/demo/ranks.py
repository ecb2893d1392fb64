"""The demo on two ranks: how long they have nothing to do, when each decodes its own rows and when they share a pool.

``python -m examples.demo.ranks`` starts two CPU processes, which train the shipped policy both ways, on the same
questions and with the same seed. Most sums are short and a few are long, so a rank that got the short ones waits for
the other, unless it takes over some of its rows. The numbers come from the run's own log, `rollout_log.jsonl`.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from examples.demo.pretrain import POLICY
from examples.demo.task import MAX_COMPLETION_LENGTH, build_dataset, exact_match
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.trainers.run_log import read_run


RANKS = 2
STEPS = 12
WARM_UP = 2  # steps that do not count: the first ones import, allocate and measure
ROWS = 64  # completions of a step, of both ranks together, eight of each question
WAYS = ("own", "pool")
OUTPUT = Path("demo_output") / "ranks"


def train(way: str) -> str:
    """Trains on this rank and the other; returns a digest of all completions."""
    digest = hashlib.sha256()

    def right_answer(completions: list[str], completion_ids: list[list[int]], **columns: list[str]) -> list[float]:
        digest.update(repr(gather_object(completion_ids)).encode())
        return exact_match(completions, **columns)

    args = SpecGRPOConfig(
        output_dir=str(OUTPUT / way), rollout_sharing=way, assistant_strategy="none", max_steps=STEPS,
        per_device_train_batch_size=ROWS // RANKS, num_generations=8, max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=2e-4, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    trainer = SpecGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(POLICY), reward_funcs=right_answer, args=args,
        train_dataset=build_dataset(STEPS * ROWS // 8, seed=0), processing_class=AutoTokenizer.from_pretrained(POLICY),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return digest.hexdigest()


def main() -> None:
    if "RANK" in os.environ:
        digests = [train(way) for way in WAYS]
        if os.environ["RANK"] == "0":
            show(digests[0] == digests[1])
        return
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "-m", "examples.demo.ranks"]
    subprocess.run([sys.executable, "-m", *launch], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def show(is_same: bool) -> None:
    """Prints what the logs of both runs say."""
    print(f"\n{'rollout_sharing':16} {'idle share':>10} {'seconds per rollout':>20} {'rows moved':>11}")
    for way in WAYS:
        rollouts = read_run(OUTPUT / way).of("train")[WARM_UP:]
        idle, seconds = fmean(each.idle_share or 0.0 for each in rollouts), median(each.seconds for each in rollouts)
        moved = sum(each.moved_rows for each in rollouts)
        print(f"{way:16} {idle:>10.1%} {seconds:>20.2f} {moved:>11}")
    print(f"The completions are {'the same' if is_same else 'NOT the same'}.")


if __name__ == "__main__":
    main()
