r"""Trains a drafter for a model that has none, on the model's own samples: the whole recipe in one file.

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
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import spec_trl  # noqa: F401  teaches generate() the keyword assistant_strategy
from spec_trl import SpeculativeConfig
from spec_trl.cli.arguments import DTYPES
from spec_trl.cli.loading import find_device, load_model, pad_left, read_prompts, token_ids
from spec_trl.drafter_training.sequence_loss import TargetHead, TargetView, sequence_loss
from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.dflash.dflash_network import DFlashConfig, DFlashNetwork, spaced_layers
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.eagle3.eagle3_network import Eagle3Config, Eagle3Network
from spec_trl.generation.engine.network.shadow import observe
from spec_trl.json_files import replacing


STATE_FILE, WINDOWS_FILE = "training_state.pt", "training_windows.pt"
SAMPLED_AT_ONCE = 64  # rows in flight
WARMUP, MAX_NORM = 0.05, 1.0  # share of the steps; of the gradient
# Tried on a target of 3 M parameters on a CPU. Published learning rates, for targets of billions of parameters and
# many more steps: 1e-4 (EAGLE-3), 6e-4 (DFlash).
RECIPES = {
    "eagle3": {"learning_rate": 4e-3, "steps": 2000, "batch_size": 4},
    "dflash": {"learning_rate": 5e-3, "steps": 2500, "batch_size": 4},
    "model": {"learning_rate": 5e-3, "steps": 600, "batch_size": 16},
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
    add("--steps", type=int, help=f"these three have defaults for each kind of drafter: {RECIPES}")
    add("--batch-size", type=int, help="windows per step")
    add("--learning-rate", type=float, help="highest, of AdamW")
    add("--save-every", type=int, default=200, help="steps between saved states (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--depth", type=int, default=7, help="eagle3: steps that training unrolls (default: %(default)s)")
    add("--block-size", type=int, default=16, help="dflash (default: %(default)s)")
    add("--anchors", type=int, help="dflash: blocks per window (default: a token is drafted about twice)")
    add("--layers", type=int, help="dflash: default 5; model: default 4")
    add("--hidden-size", type=int, default=96, help="model (default: %(default)s)")
    add("--mask-token", type=int, help="dflash: a token that text does not contain (default: the target's pad token)")
    add("--dtype", default="float32", choices=["auto", *DTYPES], help="of the target; the drafter's is float32")
    add("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")
    add("--measure-tokens", type=int, default=128, help="tokens per held-out prompt; 0: no measurement")
    found = parser.parse_args(arguments)
    for name, value in RECIPES[found.drafter].items():
        if vars(found)[name] is None:
            setattr(found, name, value)
    ones = ("steps", "batch_size", "save_every", "depth", "anchors", "samples")
    least = dict.fromkeys(ones, 1) | {"window": 2, "learning_rate": 1e-9, "held_out": 0, "measure_tokens": 0}
    for name, low in least.items():
        if (value := vars(found)[name]) is not None and not value >= low:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be at least {low}.")
    if found.measure_tokens and not found.held_out:
        raise ValueError(f"--held-out 0 needs --measure-tokens 0, not {found.measure_tokens}: no prompt is held out.")
    if found.hidden_size < 16 or found.hidden_size % 16:
        raise ValueError(f"--hidden-size {found.hidden_size}: it must be a multiple of 16.")
    return found


# ---- an untrained drafter ------------------------------------------------------------------------------------------


def write_eagle3(folder: str | Path, target: PreTrainedModel, seed: int = 0) -> None:
    """Writes an untrained EAGLE-3 checkpoint in the format of its authors and the target's dtype. Its head starts as
    the target's."""
    own = target.config.get_text_config(decoder=True)
    depth, rule = own.num_hidden_layers, [2, own.num_hidden_layers // 2, own.num_hidden_layers - 3]
    config = _layer_settings(target) | {"model_type": "llama", "num_hidden_layers": 1}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": own.vocab_size}
    if rule != sorted(set(rule)):  # of a target of few layers
        config["eagle_aux_hidden_state_layer_ids"] = rule = _evenly(depth, 3)
    network = Eagle3Network(Eagle3Config.parse(config, depth), own.hidden_size * len(rule), ())
    _initialise(network, target, seed)
    assert network.lm_head is not None
    network.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    tensors = network.to(target.dtype).state_dict()
    write_checkpoint(folder, config, {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()})


def write_dflash(
    folder: str | Path, target: PreTrainedModel, block_size: int = 16, layers: int = 5,
    mask_token: int | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Writes an untrained DFlash checkpoint in the format of its authors and the target's dtype. It drafts blocks of
    `block_size` slots, the first of which holds the last token and the others `mask_token`."""
    own = target.config.get_text_config(decoder=True)
    if layers < 1 or block_size < 2:
        raise ValueError(f"layers={layers}, block_size={block_size}; give at least 1 layer and 2 slots.")
    mask = mask_token if mask_token is not None else own.pad_token_id
    if mask is None or not 0 <= mask < own.vocab_size or mask in (own.eos_token_id, own.bos_token_id):
        raise ValueError(
            f"mask_token={mask} must be a token, of 0 to {own.vocab_size - 1}, that text does not contain; the pad "
            f"token of {type(target).__name__} is none. Give --mask-token."
        )
    depth, rule = own.num_hidden_layers, [index + 1 for index in spaced_layers(own.num_hidden_layers, layers)]
    if rule != sorted(set(rule)) or rule[0] < 1 or rule[-1] > depth:  # of a target of few layers
        rule = _evenly(depth, min(layers, depth))
    head = TargetHead(target)
    inner: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": [index - 1 for index in rule]}
    inner |= {"output_multiplier": head.factor} if head.factor != 1 else {}
    inner |= {"final_logit_softcapping": head.softcap} if head.softcap is not None else {}
    config = _layer_settings(target) | {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers, "use_sliding_window": False, "attention_bias": False,
        "block_size": block_size, "num_target_layers": depth, "dflash_config": inner,
    }  # fmt: skip
    network = DFlashNetwork(DFlashConfig.parse(config), own.hidden_size * len(rule), ())
    _initialise(network, target, seed)
    write_checkpoint(folder, config, network.to(target.dtype).state_dict())


def write_model(folder: str | Path, target: PreTrainedModel, hidden_size: int, layers: int, seed: int) -> None:
    """Writes an untrained small Llama with the target's vocabulary, in float32."""
    own, tokens = target.config.get_text_config(decoder=True), target.generation_config
    config = LlamaConfig(
        vocab_size=own.vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=hidden_size // 16, num_key_value_heads=hidden_size // 16,
        max_position_embeddings=own.max_position_embeddings, tie_word_embeddings=True,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)


def write_untrained(folder: Path, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
    if arguments.drafter == "eagle3":
        write_eagle3(folder, target, arguments.seed)
    elif arguments.drafter == "dflash":
        write_dflash(folder, target, arguments.block_size, arguments.layers or 5, arguments.mask_token, arguments.seed)
    else:
        write_model(folder, target, arguments.hidden_size, arguments.layers or 4, arguments.seed)


def _layer_settings(target: PreTrainedModel) -> dict[str, Any]:
    """The keys of a Llama or Qwen3 config for a layer of the target's sizes. RoPE is not scaled."""
    own = target.config.get_text_config(decoder=True)
    settings = own.to_dict()  # families leave out different keys
    rope = settings.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # some families have one per layer type
    return {
        "hidden_size": own.hidden_size, "intermediate_size": settings.get("intermediate_size") or 4 * own.hidden_size,
        "num_attention_heads": own.num_attention_heads, "tie_word_embeddings": False,
        "num_key_value_heads": settings.get("num_key_value_heads") or own.num_attention_heads,
        "head_dim": settings.get("head_dim") or own.hidden_size // own.num_attention_heads, "hidden_act": "silu",
        "rms_norm_eps": settings.get("rms_norm_eps") or 1e-6, "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": own.max_position_embeddings, "vocab_size": own.vocab_size,
    }  # fmt: skip


def _evenly(depth: int, count: int) -> list[int]:
    """Up to `count` different hidden states, from the first layer's output to the last's."""
    return sorted({round(1 + i * (depth - 1) / (count - 1)) for i in range(count)}) if count > 1 else [depth]


def _initialise(network: Any, target: PreTrainedModel, seed: int) -> None:
    """Random matrices with standard deviation 1 / sqrt(inputs); the final norm at the root mean square of the target's
    last hidden states, from which one is too far for a short training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    own = target.config.get_text_config(decoder=True)
    length = min(64, own.max_position_embeddings)
    tokens = torch.randint(own.vocab_size, (1, length), generator=generator).to(target.device)
    _, hidden = observe(target, tokens, ())  # [1, length, H]
    nn.init.constant_(network.norm.weight, float(hidden.float().square().mean().sqrt()))


# ---- samples -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Pieces of what the target sampled."""

    tokens: Tensor  # [M, W] int64, right-padded with 0
    lengths: Tensor  # [M] int64
    first: Tensor  # [M] int64, index in the window of the first sampled token that has a token before it


@torch.no_grad()
def sample(target: PreTrainedModel, prompts: list[list[int]], count: int, length: int, seed: int) -> list[list[int]]:
    """Samples `count` sequences of at most `length` tokens, prompts included, which are taken in turn. The same seed
    and prompts give the same sequences."""
    chosen = [prompts[row % len(prompts)] for row in range(count)]
    found: list[list[int]] = [[]] * count
    order = sorted(range(count), key=lambda row: len(chosen[row]))
    bar = tqdm(total=count, desc="sampling")
    while order:
        shortest = len(chosen[order[0]])  # prompts of about this length go together: all grow to about `length`
        rows = [i for i in order[: 4 * SAMPLED_AT_ONCE] if len(chosen[i]) <= shortest + (length - shortest) // 8]
        order = order[len(rows) :]
        inputs = pad_left([chosen[row] for row in rows], target.device)
        width = inputs["input_ids"].shape[1]
        output: Any = target.generate(
            **inputs, assistant_strategy="none", do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=length - width, return_dict_in_generate=True, request_ids=rows,
            speculative_config=SpeculativeConfig(seed=seed, max_batch_size=SAMPLED_AT_ONCE),
        )  # fmt: skip
        for row, tokens, size in zip(rows, output.sequences.tolist(), output.lengths.tolist(), strict=True):
            found[row] = chosen[row] + tokens[width : width + size]
        bar.update(len(rows))
    bar.close()
    return found


def cut(sequences: list[list[int]], prompt_lengths: list[int], window: int) -> Windows:
    """Cuts sequences into windows, the last of a sequence shorter. Windows without a sampled token after another are
    left out."""
    pieces = [
        (tokens[start : start + window], max(prompt - start, 1))
        for start in range(0, max(map(len, sequences)), window)
        for tokens, prompt in zip(sequences, prompt_lengths, strict=True)
        if min(len(tokens) - start, window) > max(prompt - start, 1)
    ]
    if not pieces:
        raise ValueError(f"no window of {window} tokens holds a sampled token after another; sample longer sequences.")
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(piece) for piece, _ in pieces], batch_first=True)  # [M, W]
    lengths = torch.tensor([len(piece) for piece, _ in pieces])  # [M]
    return Windows(tokens, lengths, torch.tensor([first for _, first in pieces]))


def choose_prompts(arguments: argparse.Namespace, target: PreTrainedModel, length: int) -> list[list[int]]:
    """Token ids of all prompts, those that are held out last."""
    if arguments.prompts is None:
        start = target.generation_config.bos_token_id
        if start is None:
            raise ValueError("the target has no BOS token to begin with; give --prompts.")
        return [[start]] * (1 + arguments.held_out)
    longest = arguments.prompt_tokens or max(length // 4, 1)
    texts, tokenizer = read_prompts(arguments.prompts), AutoTokenizer.from_pretrained(arguments.target)
    prompts = [tokenizer(text, verbose=False).input_ids[:longest] for text in texts]  # special tokens count
    if tokenizer.chat_template is not None:
        prompts = token_ids(texts, tokenizer, longest)
    if not arguments.held_out < len(prompts):
        raise ValueError(f"--held-out {arguments.held_out}: of {len(prompts)} prompts, not all can be held out.")
    if max(map(len, prompts)) >= length:
        raise ValueError(f"a prompt has {max(map(len, prompts))} tokens; --sample-tokens {length} leaves no room.")
    return prompts


# ---- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainee:
    """What learns to draft: its parameters, the target's hidden states that it reads (in transformers' count), its
    loss of a view of the target (cross-entropy in nats, and agreement in 0..1), and what writes its checkpoint."""

    parameters: list[nn.Parameter]
    layers: tuple[int, ...]
    loss: Callable[[TargetView, torch.Generator], tuple[Tensor, Tensor]]
    save: Callable[[Path], None]


def load_trainee(folder: Path, arguments: argparse.Namespace, target: PreTrainedModel) -> Trainee:
    """The drafter in `folder`, in float32."""
    if arguments.drafter == "model":
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(target.device)

        def distil(view: TargetView, _: torch.Generator) -> tuple[Tensor, Tensor]:
            after = torch.arange(1, view.tokens.shape[1], device=target.device)  # [T - 1]
            counts = view.is_real[:, 1:] & (after >= view.first[:, None])  # [B, T - 1]
            with torch.no_grad():
                wanted = TargetHead(target)(view.hidden[:, :-1])[counts]  # [n, V]
            scores = model(view.tokens, use_cache=False).logits[:, :-1][counts].float()  # [n, V]
            entropies = -(wanted.softmax(-1) * scores.log_softmax(-1)).sum(-1)  # [n]
            return entropies.mean(), (wanted.argmax(-1) == scores.argmax(-1)).float().mean()

        def save(folder: Path) -> None:  # each file whole or not at all: a killed run can be resumed
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                model.save_pretrained(fresh)
                for file in Path(fresh).iterdir():
                    file.replace(folder / file.name)

        return Trainee(list(model.parameters()), (), distil, save)
    kind = Eagle3Drafter if arguments.drafter == "eagle3" else DFlashDrafter
    drafter = kind(folder, target, torch.float32)

    def loss(view: TargetView, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        found = sequence_loss(drafter, target, view, generator, depth=arguments.depth, anchors=arguments.anchors)
        return found.cross_entropy, found.agreement

    return Trainee(drafter.trained(drafter.network), drafter.feature_layers, loss, drafter.save)


def train(target: PreTrainedModel, trainee: Trainee, windows: Windows, arguments: argparse.Namespace) -> list[float]:
    """Trains in `arguments.output`, from the state there with `arguments.resume`; returns the loss of each step."""
    folder, steps = arguments.output, arguments.steps
    parameters = [parameter.requires_grad_() for parameter in trainee.parameters]
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, int(WARMUP * steps), steps)
    names = ("steps", "learning_rate", "batch_size", "depth", "anchors", "seed")
    options = {name: vars(arguments)[name] for name in names}
    losses: list[float] = []
    if arguments.resume:
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        if state["options"] != options:
            raise ValueError(f"--resume: {folder} was trained with {state['options']}; give the same options.")
        for parameter, saved in zip(parameters, state["parameters"], strict=True):
            parameter.data.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        losses = state["losses"]

    def save() -> None:
        trainee.save(folder)
        learned = [parameter.detach().cpu() for parameter in parameters]
        state = dict(options=options, losses=losses, parameters=learned)
        with replacing(folder / STATE_FILE) as file:
            torch.save(state | dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict()), file)

    save()  # training that is broken off before the next save can be resumed too
    bar = tqdm(range(len(losses), steps), desc="training")
    for step in bar:
        generator = torch.Generator().manual_seed((arguments.seed << 32) + step)
        loss, agreement = trainee.loss(_view(target, trainee, windows, arguments, step), generator)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(
                f"the loss is {losses[-1]} at step {step + 1}: lower --learning-rate {arguments.learning_rate}. The "
                "state of the last save is untouched."
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{losses[-1]:.3f}", agreement=f"{agreement.item():.3f}", refresh=False)
        if (step + 1) % arguments.save_every == 0 or step + 1 == steps:
            save()
    return losses


def _view(
    target: PreTrainedModel, trainee: Trainee, windows: Windows, arguments: argparse.Namespace, step: int
) -> TargetView:
    """What the target shows of the windows of `step`: all come once in each pass, in a new order."""
    count, size = len(windows.tokens), arguments.batch_size
    chosen = []
    for place in range(step * size, (step + 1) * size):
        order = torch.Generator().manual_seed((arguments.seed << 32) + (1 << 31) + place // count)
        chosen.append(int(torch.randperm(count, generator=order)[place % count]))
    lengths = windows.lengths[chosen]  # [B]
    tokens = windows.tokens[chosen, : int(lengths.max())].to(target.device)  # [B, T]
    is_real = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(target.device)  # [B, T]
    features, hidden = observe(target, tokens, trainee.layers)
    return TargetView(tokens, is_real, features, hidden, windows.first[chosen].to(target.device))


# ---- what it is worth ----------------------------------------------------------------------------------------------


def measure(target: PreTrainedModel, arguments: argparse.Namespace, folder: Path, prompts: list[list[int]]) -> str:
    """Tokens per verified block when `prompts` are continued with the drafter in `folder`."""
    found, most = [], arguments.block_size - 1 if arguments.drafter == "dflash" else 7
    for temperature in (0, 1):
        sampling: dict[str, Any] = dict(do_sample=True, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
        output: Any = target.generate(
            **pad_left(prompts, target.device), **sampling, max_new_tokens=arguments.measure_tokens, pad_token_id=0,
            assistant_strategy=arguments.drafter, assistant_model=str(folder), return_dict_in_generate=True,
            speculative_config=SpeculativeConfig(draft_length=most, seed=arguments.seed, sd_toggle="always"),
        )  # fmt: skip
        found.append(f"{output.statistics.block_efficiency:.2f} at temperature {temperature}")
    return ", ".join(found)


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    output = arguments.output
    if not arguments.resume and (output / "config.json").exists():
        raise ValueError(f"--output {output} holds a model already; choose another folder, or --resume.")
    if arguments.resume and not (output / STATE_FILE).exists():
        raise ValueError(f"--resume: {output} has no {STATE_FILE} to go on from.")
    if arguments.resume and not (output / WINDOWS_FILE).exists():
        raise ValueError(f"--resume: an older version wrote {output}; resume with it, or train in another --output.")
    target = load_model(arguments.target, arguments.dtype, find_device(arguments.device))
    context = target.config.get_text_config(decoder=True).max_position_embeddings
    length = arguments.sample_tokens or arguments.window or min(context, 512)
    prompts = choose_prompts(arguments, target, length)
    prompts, held_out = prompts[: -arguments.held_out or None], prompts[len(prompts) - arguments.held_out :]
    with tempfile.TemporaryDirectory() as folder:  # whatever does not fit is refused before any sampling
        write_untrained(Path(folder), arguments, target)
        load_trainee(Path(folder), arguments, target)
        if arguments.resume:
            windows = Windows(**torch.load(output / WINDOWS_FILE, weights_only=True))
        else:
            sequences = sample(target, prompts, arguments.samples, length, arguments.seed)
            prompt_lengths = [len(prompts[row % len(prompts)]) for row in range(len(sequences))]
            windows = cut(sequences, prompt_lengths, arguments.window or length)
            with replacing(output / WINDOWS_FILE) as file:
                torch.save(vars(windows), file)
            write_untrained(output, arguments, target)
        trainee = load_trainee(output, arguments, target)
        size = sum(parameter.numel() for parameter in trainee.parameters)
        print(f"{size} parameters learn from {len(windows.tokens)} windows of up to {windows.tokens.shape[1]} tokens")
        train(target, trainee, windows, arguments)
        print(f"saved in {output}")
        if arguments.measure_tokens:
            print(f"tokens per verified block on {len(held_out)} held-out prompts, {arguments.measure_tokens} tokens:")
            print(f"  untrained: {measure(target, arguments, Path(folder), held_out)}")
            print(f"  trained: {measure(target, arguments, output, held_out)}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not go together
        sys.exit(f"train_drafter.py: error: {' '.join(str(error).split())}")
