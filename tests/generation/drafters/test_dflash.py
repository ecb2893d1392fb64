"""DFlash: what the drafter drafts, against an implementation without cache, batch or vectors; formats; bad input."""

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
)

from spec_trl.generation.drafters.base import DraftSession
from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash import DFlashDrafter
from spec_trl.generation.drafters.dflash_config import DFlashConfig
from spec_trl.generation.drafters.dflash_network import DFlashNetwork
from spec_trl.scheduling.toggle import AlwaysSpeculate, Candidate
from tests.conftest import shared, tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs


EOS = dict(eos_token_id=[7, 11, 12])
VOCABULARY = 64
SIZES = dict(
    hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-6, vocab_size=VOCABULARY, hidden_act="silu",
    attention_bias=False, rope_theta=5000.0, rope_scaling=None,
)  # fmt: skip
WINDOWED = dict(use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"])
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def zlab(**changes: Any) -> dict[str, Any]:
    inner = dict(target_layer_ids=[1, 0], mask_token_id=2) | changes.pop("dflash_config", {})
    own = dict(model_type="qwen3", block_size=6, num_target_layers=2, dflash_config=inner)
    return SIZES | own | changes


def speculators(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    own = dict(
        speculators_model_type="dflash", block_size=6, draft_vocab_size=VOCABULARY, mask_token_id=2,
        aux_hidden_state_layer_ids=[0, 2], transformer_layer_config=SIZES | {"model_type": "qwen3"} | (inner or {}),
    )  # fmt: skip
    return own | changes


PRUNED = speculators(draft_vocab_size=40)
VARIANTS: dict[str, dict[str, Any]] = {
    "z-lab": zlab(),
    "z-lab, block size within dflash_config": zlab(block_size=None, dflash_config={"block_size": 3}),
    "z-lab, biases, RoPE of Llama 3": zlab(attention_bias=True, rope_scaling=LLAMA3, max_position_embeddings=4096),
    "z-lab, causal window": zlab(**WINDOWED),
    "z-lab, window to both sides": zlab(**WINDOWED | {"sliding_window": 3}, is_causal=False),
    "z-lab, scales and softcap": zlab(
        dflash_config=dict(input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0)
    ),
    "speculators": speculators(),
    "speculators, pruned": PRUNED,
    "speculators, window": speculators(WINDOWED),
    "speculators, window to both sides": speculators(WINDOWED, sliding_window_non_causal=True),
    "speculators, from the anchor": speculators(sample_from_anchor=True, draft_vocab_size=40),
}


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def make_checkpoint(
    folder: Path,
    settings: dict[str, Any],
    features: int = 128,
    dtype: torch.dtype = torch.float64,
    gain: float = 2.5,
) -> dict[str, Tensor]:
    """A checkpoint with random weights, with embedding and head of its own where the vocabulary is pruned."""
    config = DFlashConfig.parse(settings)
    network = DFlashNetwork(config, features, config.is_pruned, config.is_pruned, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in network.state_dict().items():
        if not tensor.is_floating_point():
            continue
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        # By default sharp enough that slots, positions and context all matter to the largest logit.
        tensors[name] = (1 + 0.3 * random if "norm" in name else gain * random * tensor.shape[-1] ** -0.5).to(dtype)
    if config.is_pruned:
        ids = torch.randperm(VOCABULARY, generator=generator)[: config.draft_vocabulary].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    write_checkpoint(folder, settings, tensors)
    return tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def make(settings: dict[str, Any], change: Callable[[dict[str, Tensor]], Any] | None = None) -> Path:
        tensors = make_checkpoint(tmp_path, settings)
        if change is not None:
            change(tensors)
            write_checkpoint(tmp_path, settings, tensors)
        return tmp_path

    return make


# ---- the straight line: one row, one slot, one head at a time, everything recomputed --------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int, settings: dict[str, Any]) -> Tensor:
    """RoPE of one head's vector `[d]`."""
    half, scaling = len(x) // 2, settings["rope_scaling"]
    result = torch.empty_like(x)
    for i in range(half):
        frequency = settings["rope_theta"] ** (-i / half)
        if scaling is not None:  # Llama 3: low frequencies are slowed down, those between partly
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
            share = min(max((turns - scaling["low_freq_factor"]) / span, 0.0), 1.0)
            frequency = share * frequency + (1 - share) * frequency / scaling["factor"]
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        result[i], result[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return result


def sees(settings: dict[str, Any], layer: int, query: int, key: int, anchor: int, in_block: bool) -> bool:
    is_speculators = "speculators_model_type" in settings
    sizes = settings["transformer_layer_config"] if is_speculators else settings
    window = sizes["sliding_window"] if sizes.get("layer_types", [""] * 9)[layer] == "sliding_attention" else None
    if is_speculators:
        if window is None:
            return True
        return key >= anchor - window if not in_block else settings.get("sliding_window_non_causal") or key <= query
    causal = settings.get("is_causal", window is not None)
    return not (causal and key > query) and (window is None or abs(query - key) < window)


def straight_line(
    target: PreTrainedModel, weights: dict[str, Tensor], settings: dict[str, Any], row: Tensor
) -> Tensor:
    """Draft logits `[drafts, vocabulary]` behind `row` `[n]` of committed tokens."""
    is_speculators = "speculators_model_type" in settings
    sizes = settings["transformer_layer_config"] if is_speculators else settings
    extra = settings.get("dflash_config", {})
    block = settings["block_size"] or extra["block_size"]
    heads, shared_heads, d = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    anchor = len(row) - 1
    context: list[Tensor] = []
    if anchor:
        states = target(row[None, :-1], output_hidden_states=True).hidden_states
        ids = settings["aux_hidden_state_layer_ids"] if is_speculators else [i + 1 for i in extra["target_layer_ids"]]
        for position in range(anchor):
            feature = torch.cat([states[i][0, position] for i in ids])  # [features]
            context.append(norm(weights["fc.weight"] @ feature, weights["hidden_norm.weight"]))
    own = weights.get("embed_tokens.weight")
    table = target.get_input_embeddings().weight if own is None else own
    tokens = [int(row[-1])] + [2] * (block - 1)
    hidden = [table[token] * extra.get("input_embedding_scale", 1.0) for token in tokens]
    for layer in range(sizes["num_hidden_layers"]):

        def linear(name: str, x: Tensor, prefix: str = f"layers.{layer}.") -> Tensor:
            y = weights[f"{prefix}{name}.weight"] @ x
            return y + weights[f"{prefix}{name}.bias"] if f"{prefix}{name}.bias" in weights else y

        of_layer = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        inputs = [norm(x, of_layer["input_layernorm.weight"]) for x in hidden]
        keys, values = [], []
        for position, x in enumerate(context + inputs):
            k = linear("self_attn.k_proj", x).view(shared_heads, d)
            keys.append([turned(norm(head, of_layer["self_attn.k_norm.weight"]), position, sizes) for head in k])
            values.append(linear("self_attn.v_proj", x).view(shared_heads, d))
        for slot, x in enumerate(inputs):
            seen = [
                position
                for position in range(anchor + block)
                if sees(settings, layer, anchor + slot, position, anchor, position >= anchor)
            ]
            attended = []
            for head, q in enumerate(linear("self_attn.q_proj", x).view(heads, d)):
                q = turned(norm(q, of_layer["self_attn.q_norm.weight"]), anchor + slot, sizes)
                group = head // (heads // shared_heads)
                scores = torch.stack([q @ keys[position][group] / math.sqrt(d) for position in seen])
                attended.append(sum(p * values[at][group] for p, at in zip(scores.softmax(0), seen, strict=True)))
            hidden[slot] = hidden[slot] + linear("self_attn.o_proj", torch.cat(attended))
        for slot in range(block):
            x = norm(hidden[slot], of_layer["post_attention_layernorm.weight"])
            gated = F.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
            hidden[slot] = hidden[slot] + linear("mlp.down_proj", gated)
    head = weights.get("lm_head.weight")
    head = target.get_output_embeddings().weight if head is None else head
    logits = torch.full((block, VOCABULARY), -torch.inf, dtype=torch.float64)
    for slot in range(block):
        scored = head @ norm(hidden[slot], weights["norm.weight"]) * extra.get("output_multiplier", 1.0)
        cap = extra.get("final_logit_softcapping")
        for i, logit in enumerate(torch.tanh(scored / cap) * cap if cap else scored):
            logits[slot, i + (int(weights["d2t"][i]) if "d2t" in weights else 0)] = logit
    return logits if settings.get("sample_from_anchor") else logits[1:]


# ---- drafting -------------------------------------------------------------------------------------------------------


class Sometimes(AlwaysSpeculate):
    """Drafts in two rounds of three."""

    rounds = 0

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self.rounds += 1
        index, draft_length = super().decide(batch, length, waiting)
        return index, draft_length if self.rounds % 3 else 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Of every row at every draft: committed tokens, logits over the target's vocabulary, tokens, how many count."""
    found = []
    propose, block_logits = DFlashDrafter.propose, DFlashDrafter._block_logits
    logits: list[Tensor] = []

    def watched_logits(self: DFlashDrafter, *arguments: Any) -> Tensor:
        raw = block_logits(self, *arguments)
        logits.append(self._over_target(raw))
        return raw

    def watched(self: DFlashDrafter, draft_length: int, noise: Any) -> Any:
        proposal, rows = propose(self, draft_length, noise), self.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            committed = rows.tokens[row, :length].clone()
            found.append((committed, logits[-1][row].clone(), proposal.tokens[row], int(proposal.lengths[row])))
        return proposal

    monkeypatch.setattr(DFlashDrafter, "propose", watched)
    monkeypatch.setattr(DFlashDrafter, "_block_logits", watched_logits)
    return found


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line(name: str, tiny: PreTrainedModel, tmp_path: Path, seen: list) -> None:
    """Ragged rows that share prompts, come in late and move, rounds with rejections and rounds that draft nothing: a
    stale, missing or shifted column of context would show."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    drafter = DFlashDrafter(tmp_path, tiny)
    rows = random_rows([5, 9, 1, 3, 12, 4])
    prompts = pad_left([rows[1], rows[0], rows[1], *rows[2:], rows[5]])  # two share a prompt, at once and later
    options = dict(max_new_tokens=22, **EOS)
    control = Sometimes(Candidate("dflash", 4, 4.0, 100))
    config = {"max_batch_size": 3}
    result = generate(tiny, prompts, config=config, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics.drafter_failure is None
    assert len(seen) > 40 and len({len(committed) for committed, *_ in seen}) > 12
    for committed, logits, tokens, length in seen[:: max(1, len(seen) // 30)]:
        expected = straight_line(tiny, weights, settings, committed)[: len(tokens)]  # γ falls towards a row's end
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert length == len(expected) and tokens[length:].eq(0).all()


@pytest.mark.parametrize("name", ["z-lab", "speculators, pruned", "speculators, from the anchor"])
@pytest.mark.parametrize("draft_length", [1, 3, 11])
@torch.no_grad()
def test_greedy_drafts(draft_length: int, name: str, tiny, tmp_path, seen) -> None:
    """The largest logits of the slots, as many as there are slots: no more than γ, and no more than a block drafts."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    prompts, options = pad_left(random_rows([5, 9, 1])), dict(do_sample=False, max_new_tokens=14, **EOS)
    drafter = DFlashDrafter(tmp_path, tiny)
    generate(tiny, prompts, config={"draft_length": draft_length}, drafter=drafter, **options)
    assert len(seen) > 8
    for committed, _, tokens, length in seen:
        expected = straight_line(tiny, weights, settings, committed).argmax(-1)[: len(tokens)]
        assert length == len(expected) and tokens[:length].equal(expected)


@torch.no_grad()
def test_a_whole_forward_without_cache(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """What training differentiates is what drafting computes; context at or behind the anchor is not seen."""
    for name in ("z-lab, causal window", "speculators, window to both sides", "speculators, pruned"):
        settings = VARIANTS[name]
        weights = make_checkpoint(tmp_path, settings)
        drafter = DFlashDrafter(tmp_path, tiny)
        network, config = drafter.network, drafter.config
        text = random_rows([17])[0]
        states = tiny(text[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in config.target_layers], dim=-1)  # [1, 17, features]
        anchors = torch.tensor([0, 4, 11])
        tokens = torch.full((3, config.block_size), config.mask_token)
        tokens[:, 0] = text[anchors]
        embedded = network.embed(tokens, tiny.get_input_embeddings())  # [3, n, H]
        positions = torch.arange(17).expand(3, -1)
        hidden = network(features.expand(3, -1, -1), positions, embedded, anchors)  # [3, n, H]
        logits = drafter._over_target(network.logits(hidden, tiny.get_output_embeddings()))  # [3, n, V]
        for row, anchor in enumerate(anchors.tolist()):
            expected = straight_line(tiny, weights, settings, text[: anchor + 1])
            torch.testing.assert_close(logits[row, -len(expected) :], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [dict(do_sample=False), dict(), dict(temperature=0.7, top_k=9)])
@pytest.mark.parametrize("name", ["z-lab", "speculators, pruned"])
def test_tokens_are_those_of_none(name, sampling, batch, tiny, tmp_path) -> None:
    make_checkpoint(tmp_path, VARIANTS[name])
    prompts = pad_left(random_rows([5, 9, 1, 3, 12, 4, 2, 7][:batch]))
    result = generate(tiny, prompts, drafter=DFlashDrafter(tmp_path, tiny), **EOS, **sampling)
    assert outputs(result) == outputs(generate(tiny, prompts, **EOS, **sampling))
    assert result.statistics.drafter_failure is None and result.statistics.draft_forwards > 0


class TwoOnly(LogitsProcessor):
    """Leaves two tokens, by the length of the prefix; a pruned vocabulary lacks both of them now and then."""

    def allowed(self, width: int) -> list[int]:
        return [3 + (7 * width + i) % 60 for i in range(2)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed(input_ids.shape[1])] = scores[:, self.allowed(input_ids.shape[1])]
        return masked


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("processor", [TwoOnly(), NoRepeatNGramLogitsProcessor(2)])
@pytest.mark.parametrize("name", ["z-lab", "speculators, pruned"])
def test_processors_that_read_the_prefix(name, processor, verification, tiny, tmp_path, seen) -> None:
    """They act on each draft token with the ones before it in place. Where they leave nothing that the drafter's
    vocabulary has, a row drafts no further."""
    make_checkpoint(tmp_path, VARIANTS[name])
    drafter, prompts = DFlashDrafter(tmp_path, tiny), pad_left(random_rows([5, 9, 1]))
    options = dict(logits_processor=LogitsProcessorList([processor]))
    result = generate(tiny, prompts, config={"verification": verification}, drafter=drafter, **options)
    assert result.statistics.drafter_failure is None
    if verification == "exact":
        assert outputs(result) == outputs(generate(tiny, prompts, **options))
    for committed, _, tokens, length in seen:
        prompt = next(row for row in random_rows([5, 9, 1]) if committed[: len(row)].equal(row))
        width = 9 - len(prompt) + len(committed)  # as `generate` pads
        text = [0] * (9 - len(prompt)) + committed.tolist()
        for step in range(length):
            if isinstance(processor, TwoOnly):
                assert tokens[step] in processor.allowed(width + step)
            else:
                assert (text[-1], int(tokens[step])) not in set(pairwise(text))
            text.append(int(tokens[step]))
    cut_short = any(length < min(len(tokens), 5) for *_, tokens, length in seen)
    assert cut_short == (name != "z-lab" and isinstance(processor, TwoOnly))


def test_rejection_keeps_the_distribution(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """A bad drafter under rejection: the second token's frequencies are the target's."""
    make_checkpoint(tmp_path, PRUNED)
    prompt = random_rows([5])[0]
    count = 3000
    options = dict(max_new_tokens=3, top_k=4)
    result = generate(
        tiny, pad_left([prompt] * count), config={"verification": "rejection"},
        drafter=DFlashDrafter(tmp_path, tiny), **options,
    )  # fmt: skip
    assert result.statistics.drafter_failure is None
    tokens = torch.tensor(outputs(result))  # [count, 3]
    first = tokens[:, 0].mode().values
    found = tokens[tokens[:, 0] == first, 1].bincount(minlength=VOCABULARY).double()
    with torch.no_grad():
        logits = tiny(torch.cat([prompt, first[None]])[None]).logits[0, -1]
    p = logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf).softmax(0)
    expected = p * found.sum()
    chi2 = ((found - expected).square() / expected)[p > 0].sum()
    assert found[p == 0].sum() == 0 and chi2 < 16.3  # 3 degrees of freedom, p = 0.001


# ---- a drafter that has learned something ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simple() -> PreTrainedModel:
    """A target whose next token depends on the last one alone: what can be learned in seconds."""
    target = tiny_llama(seed=3)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


@pytest.fixture(scope="module", params=[zlab(), speculators(sample_from_anchor=True)])
def trained(request: Any, simple: PreTrainedModel, tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A drafter trained for seconds on the target's own greedy outputs, by the network's plain forward."""
    folder = tmp_path_factory.mktemp("trained")
    settings = request.param
    make_checkpoint(folder, settings, gain=0.4)
    drafter = DFlashDrafter(folder, simple)
    network, config = drafter.network, drafter.config
    prompts = pad_left(random_rows([6] * 200, seed=1))
    text = simple.generate(**prompts, do_sample=False, max_new_tokens=26, pad_token_id=0)  # [200, 32]
    with torch.no_grad():
        states = simple(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in config.target_layers], dim=-1).float()  # [200, 32, features]
    network.float().requires_grad_(True)
    shift = 1 if config.sample_from_anchor else 0
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    target = copy.deepcopy(simple).float()
    head, table = target.get_output_embeddings(), target.get_input_embeddings()
    for _ in range(250):
        rows = torch.randint(len(text), (64,), generator=generator)
        anchors = torch.randint(2, 32 - config.block_size, (64,), generator=generator)
        slots = anchors[:, None] + torch.arange(config.block_size)  # [64, n]
        tokens = torch.full_like(slots, config.mask_token)
        tokens[:, 0] = text[rows, anchors]
        hidden = network(features[rows], torch.arange(32).expand(64, -1), network.embed(tokens, table), anchors)
        logits = network.logits(hidden, head)[:, 1 - shift :]  # [64, drafts, V]
        labels = text[rows[:, None], slots + shift][:, 1 - shift :]  # [64, drafts]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.save(folder)
    return folder, settings


@torch.no_grad()
def test_acceptance_is_that_of_the_straight_line(trained, simple: PreTrainedModel) -> None:
    """Round by round, on the same text, the engine accepts what the straight line would have, and that is a lot: both
    would lose it if slots, positions or features were shifted by one."""
    folder, settings = trained
    drafter, weights = DFlashDrafter(folder, simple), load_file(folder / "model.safetensors")
    prompts = pad_left(random_rows([6, 6, 6], seed=9))
    options = dict(do_sample=False, max_new_tokens=20)
    rounds: list[list[int]] = [[], [], []]
    propose = drafter.propose

    def watched(draft_length: int, noise: Any) -> Any:
        rows = drafter.session.rows
        for request, length in zip(rows.requests.tolist(), rows.lengths.tolist(), strict=True):
            rounds[request].append(length - 6)
        return propose(draft_length, noise)

    drafter.propose = watched  # type: ignore[method-assign]
    result = generate(simple, prompts, config={"draft_length": 5}, drafter=drafter, **options)
    expected = reference_outputs(simple, prompts, max_new_tokens=20)
    assert outputs(result) == expected
    for prompt, new, starts in zip(prompts["input_ids"], expected, rounds, strict=True):
        start, straight = 0, []
        while start < 20 - 1:
            straight.append(start)
            row = torch.cat([prompt, torch.tensor(new[:start], dtype=torch.int64)])
            drafts = straight_line(simple, weights, settings, row).argmax(-1)[:5].tolist()
            wanted = new[start : start + 5]
            accepted = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(wanted))
            start += min(accepted, 20 - start - 1) + 1
        assert starts[: len(straight)] == straight
    assert result.statistics.acceptance_rate > 0.3


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["z-lab, biases, RoPE of Llama 3", "speculators, pruned"])
def test_saved_as_it_came(name: str, dtype: torch.dtype, tiny: PreTrainedModel, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "saved"
    stored = make_checkpoint(source, VARIANTS[name], dtype=dtype)
    text = json.dumps(VARIANTS[name], indent=4) + "\n\n"  # not as this package would write it
    (source / "config.json").write_text(text)
    drafter = DFlashDrafter(source, tiny, dtype=torch.bfloat16)
    assert drafter.network.fc.weight.dtype == torch.bfloat16
    drafter.save(folder)
    assert (folder / "config.json").read_text() == text
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(saved[key].dtype == stored[key].dtype and saved[key].equal(stored[key]) for key in stored)


def test_default_layers(tmp_path: Path) -> None:
    def layers(depth: int, count: int) -> list[int]:
        settings = zlab(num_target_layers=depth, num_hidden_layers=count)
        del settings["dflash_config"]["target_layer_ids"]
        return [index - 1 for index in DFlashConfig.parse(settings).target_layers]

    assert layers(36, 5) == [1, 9, 17, 25, 33]  # z-lab/Qwen3-8B-DFlash-b16
    assert layers(24, 5) == [1, 6, 11, 16, 21]
    assert layers(36, 1) == [18]
    assert layers(29, 3) == [1, 14, 26]  # 13.5 rounds to even


REAL = {"qwen2.5-0.5b": (896, 24), "qwen3-4b": (2560, 36), "qwen3-8b": (4096, 36)}


@pytest.mark.parametrize("name", REAL)
def test_shapes_of_real_checkpoints(name: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_{name}-dflash.json").read_text())
    width, depth = REAL[name]
    config = DFlashConfig.parse(settings)
    network = DFlashNetwork(config, 5 * width, device="meta")
    shapes = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    queries, shared_, d = (
        settings["num_attention_heads"] * settings["head_dim"],
        settings["num_key_value_heads"] * settings["head_dim"],
        settings["head_dim"],
    )
    inner = settings["intermediate_size"]
    expected = {"fc.weight": [width, 5 * width], "hidden_norm.weight": [width], "norm.weight": [width]}
    for i in range(5):
        for key, shape in {
            "input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [queries, width],
            "self_attn.k_proj": [shared_, width], "self_attn.v_proj": [shared_, width],
            "self_attn.o_proj": [width, queries], "self_attn.q_norm": [d], "self_attn.k_norm": [d],
            "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
        }.items():  # fmt: skip
            expected[f"layers.{i}.{key}.weight"] = shape
    assert shapes == expected
    assert config.target_layers == tuple(i + 1 for i in settings["dflash_config"]["target_layer_ids"])
    assert (config.block_size, config.drafts, config.mask_token) == (16, 15, 151669)
    assert config.decoder.rope_parameters["rope_theta"] == 1e6 and not any(config.is_causal)
    assert max(config.target_layers) <= depth


def test_a_real_config_loads_drafts_and_saves(tmp_path: Path) -> None:
    """Random weights, real shapes."""
    settings = json.loads(shared("configs/drafter/specforge_qwen2.5-0.5b-dflash.json").read_text())
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings["vocab_size"], hidden_size=896, intermediate_size=16, num_hidden_layers=24,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        )
    ).to(torch.bfloat16).eval()  # fmt: skip
    stored = make_checkpoint(tmp_path, settings, features=5 * 896, dtype=torch.bfloat16)
    drafter = DFlashDrafter(tmp_path, target)
    prompts, options = pad_left(random_rows([5, 9])), dict(do_sample=False, max_new_tokens=6)
    result = generate(target, prompts, config={"draft_length": 15}, drafter=drafter, **options)
    assert result.statistics.draft_forwards > 0 and result.statistics.drafter_failure is None
    drafter.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == stored.keys() and all(saved[key].equal(stored[key]) for key in stored)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


# ---- bad input ------------------------------------------------------------------------------------------------------


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "neither format": (SIZES, "is no DFlash drafter"),
    "another speculator": (speculators(speculators_model_type="eagle3"), "speculators_model_type='eagle3'"),
    "layer past the depth": (
        zlab(dflash_config={"target_layer_ids": [0, 2]}),
        r"hidden states \[1, 3\].* has 2 layers",
    ),
    "speculators' layer past the depth": (speculators(aux_hidden_state_layer_ids=[3]), r"\[3\].* has 2 layers"),
    "negative layer": (zlab(dflash_config={"target_layer_ids": [-1]}), "target_layer_ids=-1"),
    "no layers": (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids=None"),
    "another depth": (zlab(num_target_layers=36), "num_target_layers=36.* has 2 layers"),
    "vocabulary": (zlab(vocab_size=65), "vocab_size=65, .* has 64"),
    "mask token": (zlab(dflash_config={"mask_token_id": 64}), "mask_token_id=64"),
    "no mask token": (zlab(dflash_config={"mask_token_id": None}), "mask_token_id=None"),
    "hidden size": (zlab(hidden_size=32), "hidden_size=32, and the target's is 64"),
    "target's hidden size": (speculators(target_hidden_size=32), "target_hidden_size=32"),
    "block size": (zlab(block_size=1), "block_size=1"),
    "draft vocabulary": (speculators(draft_vocab_size=65), "draft_vocab_size=65 is more"),
    "unknown key": (zlab(layer_scale=0.1), "config.json has keys .*layer_scale.*0.1"),
    "unknown inner key": (zlab(dflash_config={"selector_rank": 2}), "dflash_config has keys .*selector_rank"),
    "unknown decoder key": (speculators({"logit_scale": 2}), "transformer_layer_config has keys .*logit_scale"),
    "shifted labels": (speculators(shift_label=True), "shift_label=True"),
    "projector": (speculators(projector_type="domino"), "projector_type='domino'"),
    "window without a size": (zlab(**WINDOWED | {"sliding_window": None}), "sliding_window is None"),
    "window switched off": (zlab(**WINDOWED | {"use_sliding_window": False}), "use_sliding_window=False"),
    "layer types": (zlab(layer_types=["full_attention"]), "do not fit together(.|\n)*layer_types"),
    "RoPE": (zlab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "RoPE of type 'dynamic'"),
    "activation": (zlab(hidden_act="swoosh"), "hidden_act='swoosh'"),
    "family": (speculators({"model_type": "gemma2"}), "model_type='gemma2'"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_do_not_fit(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    settings, message = BAD_CONFIGS[name]
    write_checkpoint(tmp_path, settings, {"fc.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=message) as caught:
        DFlashDrafter(tmp_path, tiny)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("domino", "projector_type='domino'"), ("dspark", "projector_type='dspark'")]
)
def test_relatives_are_refused_by_name(name: str, message: str) -> None:
    settings = json.loads(shared(f"configs/drafter/specforge_qwen3-8b-{name}.json").read_text())
    with pytest.raises(ValueError, match=message):
        DFlashConfig.parse(settings)


BAD_TENSORS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (zlab(), lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
    "unexpected": (zlab(), lambda t: t.update(extra=t["norm.weight"]), r"unexpected \['extra'\]"),
    "shape": (zlab(), lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight has shape \[64, 64\]"),
    "NaN": (zlab(), lambda t: t["layers.1.mlp.up_proj.weight"].fill_(torch.nan), "up_proj.weight holds NaN"),
    "no head": (PRUNED, lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no map": (PRUNED, lambda t: t.pop("d2t"), r"missing \['d2t'\]"),
    "map out of range": (PRUNED, lambda t: t["d2t"].add_(30), "d2t reaches token ids"),
    "map twice": (PRUNED, lambda t: t["d2t"].copy_(-torch.arange(40)), "d2t names 1 tokens and t2d 40"),
    "maps disagree": (PRUNED, lambda t: t.update(t2d=~t["t2d"]), "t2d 24, which are not the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit(name: str, tiny: PreTrainedModel, checkpoint: Callable[..., Path]) -> None:
    settings, change, message = BAD_TENSORS[name]
    with pytest.raises(ValueError, match=message):
        DFlashDrafter(checkpoint(settings, change), tiny)


def test_spare_tensors_are_kept(tiny: PreTrainedModel, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    spare = torch.randn(5, 3)
    folder = checkpoint(speculators(), lambda t: t.update({"verifier_lm_head.weight": spare}))
    DFlashDrafter(folder, tiny).save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")["verifier_lm_head.weight"].equal(spare)


def test_rows_past_scaled_rope(tiny: PreTrainedModel, checkpoint: Callable[..., Path]) -> None:
    """Plain RoPE goes on past max_position_embeddings; scaled RoPE is refused there."""
    prompts, options = pad_left(random_rows([5])), dict(max_new_tokens=24)
    expected = outputs(generate(tiny, prompts, **options))
    plain = DFlashDrafter(checkpoint(zlab(max_position_embeddings=16)), tiny)
    result = generate(tiny, prompts, drafter=plain, **options)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    scaled = DFlashDrafter(checkpoint(zlab(max_position_embeddings=16, rope_scaling=LLAMA3)), tiny)
    with pytest.raises(ValueError, match=r"rows can reach \d+ tokens.*positions reach 16"):
        generate(tiny, prompts, drafter=scaled, **options)


def test_transformers_own_loop_is_refused(tiny: PreTrainedModel, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="needs the target's hidden states"):
        DFlashDrafter(checkpoint(zlab()), tiny).prepare_assisted_decoding(5, 20, False, [])  # type: ignore[arg-type]


# ---- life within a generation ---------------------------------------------------------------------------------------


def test_the_target_is_shared_live(fresh: PreTrainedModel, tmp_path: Path, seen: list) -> None:
    """Embedding and head are the policy's own, read at each draft: an optimizer step in between shows."""
    weights = make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, fresh)
    owned = {tensor.data_ptr() for tensor in drafter.network.state_dict().values()}
    assert not owned & {tensor.data_ptr() for tensor in fresh.parameters()}
    with torch.no_grad():
        for module in (fresh.get_input_embeddings(), fresh.get_output_embeddings()):
            module.weight += torch.randn(module.weight.shape, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    generate(fresh, pad_left(random_rows([5])), drafter=drafter, do_sample=False, max_new_tokens=8)
    with torch.no_grad():
        for committed, _, tokens, length in seen:
            assert tokens[:length].equal(straight_line(fresh, weights, zlab(), committed).argmax(-1)[:length])
    assert all(tensor.equal(before[name]) for name, tensor in fresh.state_dict().items())


@pytest.mark.parametrize("where", ["remember", "refine", "NaN"])
def test_a_drafter_that_fails_changes_no_output(where: str, tiny, tmp_path, monkeypatch) -> None:
    make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, tiny)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    if where == "NaN":
        drafter.network.norm.weight.fill_(torch.nan)
    else:
        monkeypatch.setattr(drafter.network, where, broken)
    prompts = pad_left(random_rows([5, 9]))
    with pytest.warns(UserWarning, match="NaN logits" if where == "NaN" else "out of order"):
        result = generate(tiny, prompts, drafter=drafter, **EOS)
    assert outputs(result) == outputs(generate(tiny, prompts, **EOS))


def test_nothing_of_a_generation_outlives_it(tiny: PreTrainedModel, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, tiny)
    begin, targets = drafter.begin, []

    def watched(session: DraftSession) -> None:
        begin(session)
        targets.append(session.target)

    drafter.begin = watched  # type: ignore[method-assign]
    for _ in range(2):
        result = generate(tiny, pad_left(random_rows([5, 9])), drafter=drafter)
        assert not {"session", "_cache", "_broken_off"} & vars(drafter).keys()
        assert targets[-1]._heard is None
        target_only = generate(tiny, pad_left(random_rows([5, 9]))).statistics.cache_bytes
        assert result.statistics.cache_bytes > target_only
        assert result.statistics.draft_forwards == drafter.forwards == result.statistics.rounds - _undrafted(result)


def _undrafted(result: Any) -> int:
    spans = [*result.statistics.speculating, (result.statistics.rounds, 0)]
    return sum(until - since for (since, gamma), (until, _) in zip(spans, spans[1:], strict=False) if not gamma)
