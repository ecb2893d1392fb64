r"""Trains a drafter for a model that has none, on the model's own samples.

    python examples/train_drafter.py --target path/or/hub-id --drafter eagle3 --prompts prompts.txt --output my_drafter
    python examples/train_drafter.py --target path/or/hub-id --drafter dflash --output my_drafter --resume

The target continues the prompts (or, without a file, its BOS token) at temperature 1; the drafter learns to say what
the target would. Afterwards

    model.generate(..., assistant_strategy="eagle3", assistant_model="my_drafter")

Prompts come from a file: .txt (one per line), .jsonl (with "prompt", "question" or "text") or .json (a list of
strings). The last ones are held out: at the end they are continued with the trained drafter and with an untrained one.
Training that was broken off goes on with --resume and the same options, and ends in the same bits.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import spec_trl  # noqa: F401  teaches generate() the keyword assistant_strategy
from spec_trl import SpeculativeConfig
from spec_trl.cli.arguments import DTYPES
from spec_trl.cli.loading import find_device, load_model, read_prompts
from spec_trl.drafter_training.offline import (
    STATE_FILE,
    Samples,
    Trainee,
    TrainingOptions,
    cut,
    learned_trainee,
    model_trainee,
    sample_sequences,
    train,
)
from spec_trl.drafter_training.untrained import write_dflash, write_eagle3
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter


@dataclass(frozen=True)
class Recipe:
    """What is trained how, unless options say otherwise: found on a target of 3 M parameters on a CPU.

    Published learning rates, for targets of billions of parameters and many more steps: 1e-4 (EAGLE-3), 6e-4 (DFlash).
    """

    learning_rate: float
    steps: int
    batch_size: int


RECIPES = {
    "eagle3": Recipe(learning_rate=4e-3, steps=2000, batch_size=4),
    "dflash": Recipe(learning_rate=5e-3, steps=2500, batch_size=4),
    "model": Recipe(learning_rate=5e-3, steps=600, batch_size=16),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="hub id or local folder of the model to draft for")
    add("--drafter", choices=sorted(RECIPES), default="eagle3", help="default: %(default)s")
    add("--output", type=Path, required=True, help="folder for the drafter and its training state")
    add("--resume", action="store_true", help="go on with the training in --output")
    add("--prompts", type=Path, help="file with prompts (default: none, samples begin with the BOS token)")
    add("--prompt-tokens", type=int, help="cut longer prompts to this length (default: a quarter of --sample-tokens)")
    add("--held-out", type=int, default=16, help="prompts to measure with, not to train on (default: %(default)s)")
    add("--samples", type=int, default=4000, help="sequences to train on (default: %(default)s)")
    add("--sample-tokens", type=int, help="length of one (default: --window, or the target's context, at most 512)")
    add("--window", type=int, help="cut samples into windows of this length, each from position 0 (default: whole)")
    add("--steps", type=int, help="default: " + _per_kind("steps"))
    add("--batch-size", type=int, help="windows per step; default: " + _per_kind("batch_size"))
    add("--learning-rate", type=float, help="highest, of AdamW; default: " + _per_kind("learning_rate"))
    add("--save-every", type=int, default=200, help="steps between saved states (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--format", help='"safeai" or "speculators" (eagle3), "z-lab" or "speculators" (dflash); default: the first')
    add("--layer-ids", type=int, nargs="+", help="hidden states that it reads, in transformers' count")
    add("--depth", type=int, default=7, help="eagle3: steps that training unrolls (default: %(default)s)")
    add("--block-size", type=int, default=16, help="dflash (default: %(default)s)")
    add("--anchors", type=int, help="dflash: blocks per window (default: a token is drafted about twice)")
    add("--layers", type=int, help="dflash: default 5; model: default 4")
    add("--hidden-size", type=int, default=96, help="model (default: %(default)s)")
    add("--mask-token", type=int, help="dflash: a token that text does not contain (default: the target's pad token)")
    add("--dtype", default="float32", choices=["auto", *DTYPES], help="of the target; the drafter's is float32")
    add("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")
    add("--measure-tokens", type=int, default=128, help="tokens per held-out prompt; 0: no measurement")
    return parser.parse_args(arguments)


def _per_kind(name: str) -> str:
    return ", ".join(f"{getattr(recipe, name):g} ({kind})" for kind, recipe in RECIPES.items())


def tokenize(prompts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> list[Tensor]:
    """Each prompt `[n_i]` int64, as a chat where there is a template; at most `longest` tokens of its text."""
    found = []
    for prompt in prompts:
        if tokenizer.chat_template is None:
            ids = tokenizer(prompt, verbose=False).input_ids[:longest]
        else:  # cut before the template is put around it, whose end the model must see
            cut_text = tokenizer.decode(tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids[:longest])
            turns = [{"role": "user", "content": cut_text}]
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        found.append(torch.tensor(ids))
    return found


def choose_prompts(
    arguments: argparse.Namespace, target: PreTrainedModel, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts to train on, and those held out, `[n_i]` int64 each."""
    if arguments.prompts is None:
        start = target.generation_config.bos_token_id
        if start is None:
            raise ValueError("the target has no BOS token to begin with; give --prompts.")
        return [torch.tensor([start])], [torch.tensor([start])] * arguments.held_out
    longest = arguments.prompt_tokens or max(length // 4, 1)
    prompts = tokenize(read_prompts(arguments.prompts), AutoTokenizer.from_pretrained(arguments.target), longest)
    if not 1 <= arguments.held_out < len(prompts):
        raise ValueError(
            f"--held-out {arguments.held_out}: of {len(prompts)} prompts, at least 1 and not all can be held out."
        )
    return prompts[: -arguments.held_out], prompts[-arguments.held_out :]


def write_untrained(folder: Path, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
    """An untrained drafter, the same for the same seed."""
    if arguments.drafter == "eagle3":
        format = arguments.format or "safeai"
        write_eagle3(folder, target, format=format, layer_ids=arguments.layer_ids, seed=arguments.seed)
    elif arguments.drafter == "dflash":
        write_dflash(
            folder, target, format=arguments.format or "z-lab", block_size=arguments.block_size,
            layers=arguments.layers or 5, layer_ids=arguments.layer_ids, mask_token=arguments.mask_token,
            seed=arguments.seed,
        )  # fmt: skip
    else:
        own, generation = target.config.get_text_config(decoder=True), target.generation_config
        width = arguments.hidden_size
        if width < 16 or width % 16:
            raise ValueError(f"--hidden-size {width}: it must be a multiple of 16.")
        config = LlamaConfig(
            vocab_size=own.vocab_size, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=arguments.layers or 4, num_attention_heads=width // 16, num_key_value_heads=width // 16,
            max_position_embeddings=own.max_position_embeddings, tie_word_embeddings=True,
            bos_token_id=generation.bos_token_id, eos_token_id=generation.eos_token_id,
            pad_token_id=generation.pad_token_id,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(arguments.seed)
            LlamaForCausalLM(config).save_pretrained(folder)


def load_trainee(folder: Path, arguments: argparse.Namespace, target: PreTrainedModel) -> Trainee:
    """The drafter in `folder`, in float32."""
    if arguments.drafter == "model":
        return model_trainee(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(target.device))
    kind = Eagle3Drafter if arguments.drafter == "eagle3" else DFlashDrafter
    return learned_trainee(kind(folder, target, torch.float32))


def measure(
    target: PreTrainedModel, arguments: argparse.Namespace, folder: Path, prompts: list[Tensor], do_sample: bool
) -> float:
    """Tokens per verified block when `prompts` are continued with the drafter in `folder`."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])  # [B, width]
    mask = torch.arange(width) >= width - torch.tensor([len(prompt) for prompt in prompts])[:, None]  # [B, width]
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) if do_sample else dict(do_sample=False)
    output = target.generate(
        input_ids=ids.to(target.device), attention_mask=mask.long().to(target.device), **sampling,
        max_new_tokens=arguments.measure_tokens, assistant_strategy=arguments.drafter, assistant_model=str(folder),
        speculative_config=SpeculativeConfig(
            draft_length=arguments.block_size - 1 if arguments.drafter == "dflash" else 7, seed=arguments.seed,
            sd_toggle="always",
        ),
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    return output.statistics.block_efficiency


def report(target: PreTrainedModel, arguments: argparse.Namespace, prompts: list[Tensor]) -> str:
    """Block efficiency with the trained drafter and with an untrained one."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_untrained(Path(folder), arguments, target)
        runs = [
            (name, path, t)
            for name, path in (("untrained", Path(folder)), ("trained", arguments.output))
            for t in (0, 1)
        ]
        for name, path, temperature in tqdm(runs, desc="measuring", leave=False):
            found[name, temperature] = measure(target, arguments, path, prompts, temperature > 0)
    lines = [f"tokens per verified block on {len(prompts)} held-out prompts, up to {arguments.measure_tokens} tokens:"]
    lines += [
        f"  temperature {temperature}: {found['untrained', temperature]:.2f} untrained, "
        f"{found['trained', temperature]:.2f} trained"
        for temperature in (0, 1)
    ]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    recipe = RECIPES[arguments.drafter]
    options = TrainingOptions(
        steps=recipe.steps if arguments.steps is None else arguments.steps,
        learning_rate=recipe.learning_rate if arguments.learning_rate is None else arguments.learning_rate,
        batch_size=recipe.batch_size if arguments.batch_size is None else arguments.batch_size,
        depth=arguments.depth, anchors=arguments.anchors, save_every=arguments.save_every, seed=arguments.seed,
    )  # fmt: skip
    if not arguments.resume and (arguments.output / "config.json").exists():
        raise ValueError(f"--output {arguments.output} holds a model already; choose another folder, or --resume.")
    if arguments.resume and not (arguments.output / STATE_FILE).exists():
        raise ValueError(f"--resume: {arguments.output} has no {STATE_FILE} to go on from.")
    if arguments.window is not None and arguments.window < 2:
        raise ValueError(f"window={arguments.window}: --window must be at least 2 tokens.")
    target = load_model(arguments.target, arguments.dtype, find_device(arguments.device))
    context = target.config.get_text_config(decoder=True).max_position_embeddings
    length = arguments.sample_tokens or arguments.window or min(context, 512)
    prompts, held_out = choose_prompts(arguments, target, length)
    if arguments.resume:
        samples = Samples.load(arguments.output)
    else:
        with tempfile.TemporaryDirectory() as folder:  # whatever does not fit is refused before any sampling
            write_untrained(Path(folder), arguments, target)
            load_trainee(Path(folder), arguments, target)
        samples = sample_sequences(target, prompts, arguments.samples, length, arguments.seed, progress=True)
        samples.save(arguments.output)
        write_untrained(arguments.output, arguments, target)
    windows = cut(samples, arguments.window)
    trainee = load_trainee(arguments.output, arguments, target)
    size = sum(parameter.numel() for parameter in trainee.parameters)
    print(f"{size} parameters learn from {len(windows.tokens)} windows of up to {windows.tokens.shape[1]} tokens")
    train(target, trainee, windows, options, arguments.output, resume=arguments.resume, progress=True)
    print(f"saved in {arguments.output}")
    if arguments.measure_tokens:
        print(report(target, arguments, held_out))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not go together
        sys.exit(f"train_drafter.py: error: {' '.join(str(error).split())}")
