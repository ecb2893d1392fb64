"""EAGLE-3 against a straight-line implementation, in every format and flag, and through whole generations."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.checkpoints import read_checkpoint, write_checkpoint
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.eagle3.network import Rotary
from spec_trl.generation.engine.attention import FULL, MaskPlan
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3.reference import (
    CONFIGS,
    IDS_KEY,
    LAYER,
    LLAMA3,
    VOCABULARY,
    Reference,
    make_folder,
    make_tensors,
    safeai,
    watch,
    watch_catching_up,
    without,
)


EOS = dict(eos_token_id=[7, 11, 12])


@pytest.fixture
def drafter(tmp_path: Path, tiny: PreTrainedModel) -> Eagle3Drafter:
    return Eagle3Drafter(make_folder(tmp_path / "eagle3", safeai()), tiny)


# ---- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line_implementation(
    name: str, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    """Through rounds with rejections, rows of different lengths, refills, moves and shared prompts."""
    config = CONFIGS[name]
    drafter = Eagle3Drafter(make_folder(tmp_path, config), tiny)
    seen = watch(drafter)
    rows = random_rows([5, 9, 1, 3, 12])
    prompts = pad_left([*rows, rows[3], rows[1]])
    result = generate(tiny, prompts, drafter=drafter, config={"draft_length": 3, "max_batch_size": 3}, **EOS)
    assert result.statistics.drafter_failure is None and len(seen) > 20
    assert {len(tokens) for tokens, _, _ in seen} >= {2, 3, 5, 9, 12}
    reference = Reference(config, read_checkpoint(tmp_path)[1], tiny)
    for tokens, drafts, logits in seen[:: max(len(seen) // 20, 1)]:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-5)


@torch.no_grad()
def test_after_rounds_without_it(drafter: Eagle3Drafter, tiny: PreTrainedModel) -> None:
    """It goes on listening, and catches up in pieces."""

    class Pausing(AlwaysSpeculate):
        rounds = 0

        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
            self.rounds += 1
            index, draft_length = super().decide(batch, length, waiting)
            pauses = self.rounds < 5 or 8 < self.rounds < 8 + 2.5 * CATCH_UP
            return index, 0 if pauses else draft_length

    seen, caught_up = watch(drafter), watch_catching_up(drafter)
    options = dict(max_new_tokens=80)
    prompts = pad_left(random_rows([5, 30, 1]))
    control = Pausing(Candidate("eagle3", 4, 4.0, 100))
    result = generate(tiny, prompts, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert len(seen) > 20 and max(fed for fed, _ in caught_up) > 2 * CATCH_UP
    reference = Reference(safeai(), drafter._stored, tiny)
    for tokens, drafts, logits in [*seen[:9:2], *seen[9::6]]:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths, capacity", [([5, 30, 1], None), ([3, 60, 20, 62, 9, 40, 5, 33], 2)])
@torch.no_grad()
def test_after_rounds_of_another_drafter(
    lengths: list[int], capacity: int | None, drafter: Eagle3Drafter, tiny: PreTrainedModel
) -> None:
    """Its wide rounds verify more than they commit: the bound on what is missing is loose, and must not matter. Where
    the short row moves into a long one's place, what was cached there must not count for it."""
    from spec_trl.generation.drafters.ngram import NgramDrafter

    class Alternating(AlwaysSpeculate):
        rounds = 0

        def __init__(self) -> None:
            super().__init__(Candidate("ngram", 20, 4.0, 100))
            self.candidates = [Candidate("ngram", 20, 4.0, 100), Candidate("eagle3", 2, 4.0, 100)]

        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
            self.rounds += 1
            return (1, 2) if self.rounds % 4 == 0 else (0, 20)

        def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
            pass

    seen, caught_up = watch(drafter), watch_catching_up(drafter)
    prompts, drafters = pad_left(random_rows(lengths)), [NgramDrafter(3), drafter]
    config = {"max_batch_size": capacity}
    result = generate(tiny, prompts, config=config, drafter=drafters, control=Alternating(), max_new_tokens=50)
    if capacity is None:
        assert len(caught_up) > 4 and all(fed == grown or grown < fed <= CATCH_UP for fed, grown in caught_up)
    assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=50))
    reference = Reference(safeai(), drafter._stored, tiny)
    assert len(seen) > 10
    for tokens, drafts, logits in seen[::3]:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(), dict(temperature=0.6, top_k=20)])
@pytest.mark.parametrize("batch", [1, 8])
def test_token_identity(batch: int, options: dict[str, Any], drafter: Eagle3Drafter, tiny: PreTrainedModel) -> None:
    prompts = pad_left(random_rows([5, 9, 1, 3, 12, 4, 7, 2][:batch]))
    config = {"max_batch_size": None if batch == 1 else 5}
    result = generate(tiny, prompts, drafter=drafter, config=config, max_new_tokens=60, **EOS, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=60, **EOS, **options))
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    assert result.statistics.draft_forwards > result.statistics.rounds and result.statistics.cache_bytes > 0


STORIES = safeai(
    vocab_size=512, draft_vocab_size=512, intermediate_size=128, eagle_aux_hidden_state_layer_ids=[1, 3, 5]
)


@pytest.fixture(scope="module")
def trained(stories: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that learned for a few seconds, on the target's own text, by plain forwards of the network."""
    folder = make_folder(tmp_path_factory.mktemp("trained"), STORIES)
    drafter = Eagle3Drafter(folder, stories)
    network, count, length = drafter.network, 24, 100
    with torch.no_grad():
        torch.manual_seed(0)
        start = torch.ones(count, 1, dtype=torch.int64)
        text = stories.generate(
            start, do_sample=True, temperature=0.7, max_new_tokens=length + 1, min_new_tokens=length + 1
        )
        output = stories(text, output_hidden_states=True)
        features = torch.cat([output.hidden_states[i] for i in STORIES[IDS_KEY]], dim=-1)[
            :, :length
        ]  # [n, l, 3 * H_t]
        embedded = stories.get_input_embeddings()(text[:, 1:-1])  # [n, l, H]
        p = output.logits[:, 1:-1].softmax(-1)  # [n, l, V], of token i + 2
    positions = torch.arange(length).expand(count, -1)
    mask = MaskPlan((FULL,), False, 0, 0).build(positions, length, torch.float64)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(60):
        h = network(embedded, network.project(features), positions, mask)  # [n, l, H]
        loss = -(p * network.logits(h).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in network.parameters())
    drafter.save(folder / "saved")
    return folder / "saved"


@torch.no_grad()
def test_acceptance_is_that_of_the_straight_line_implementation(trained: Path, stories: PreTrainedModel) -> None:
    """Counted on the finished text, round by round; and a drafter that was trained drafts far better than chance."""
    drafter = Eagle3Drafter(trained, stories)
    torch.manual_seed(1)
    starts = stories.generate(torch.ones(3, 1, dtype=torch.int64), do_sample=True, max_new_tokens=20)  # [3, 21]
    prompts = [row[:length] for row, length in zip(starts, (4, 20, 9), strict=True)]
    config = {"draft_length": 3, "max_batch_size": 2}
    result = generate(stories, pad_left(prompts), drafter=drafter, config=config, do_sample=False, max_new_tokens=30)
    reference = Reference(STORIES, read_checkpoint(trained)[1], stories)
    accepted = blocks = 0
    for prompt, output in zip(prompts, outputs(result), strict=True):
        text, length = [*prompt.tolist(), *output], len(prompt)
        while length < len(text):
            room = len(text) - length - 1
            drafts = reference.logits(text[:length], min(3, room)).argmax(-1).tolist() if room else []
            matches = 0
            while matches < len(drafts) and drafts[matches] == text[length + matches]:
                matches += 1
            accepted, blocks, length = accepted + matches, blocks + bool(drafts), length + matches + 1
    total = result.statistics.total
    assert total.accepted == accepted and total.first_drafted == blocks
    assert total.first_token_acceptance > 0.3 and total.accepted > total.first_accepted  # chance: 1 in 512


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.7, top_p=0.9)])
def test_rejection_verification(options: dict[str, Any], drafter: Eagle3Drafter, tiny: PreTrainedModel) -> None:
    prompts, config = pad_left(random_rows([5, 9, 1, 3])), {"verification": "rejection", "max_batch_size": 3}
    result = generate(tiny, prompts, drafter=drafter, config=config, **EOS, **options)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 50


def test_rejection_keeps_the_targets_distribution(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """χ² on the second token behind one prompt, drafted over a pruned vocabulary."""
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), tiny)
    prompt, count = random_rows([4])[0], 3000
    result = generate(
        tiny, pad_left([prompt] * count), drafter=drafter, max_new_tokens=3, temperature=1.5,
        config={"verification": "rejection", "draft_length": 2},
    )  # fmt: skip
    first = torch.tensor([tokens[0] for tokens in outputs(result)])
    with torch.no_grad():
        p = (tiny(prompt[None]).logits[0, -1] / 1.5).softmax(-1)  # [V]
    expected, found = count * p, torch.bincount(first, minlength=VOCABULARY)
    common = expected > 5
    rest = torch.stack([expected[~common].sum(), found[~common].sum().double()])
    chi2 = ((found - expected)[common] ** 2 / expected[common]).sum() + (rest[1] - rest[0]) ** 2 / rest[0].clamp(min=1)
    freedom = int(common.sum())
    assert float(chi2) < freedom + 4 * (2 * freedom) ** 0.5


class EveryOther(LogitsProcessor):
    """At odd lengths nothing but `allowed` may come."""

    prefix_only = True

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(self.allowed), 0)
        return scores + only if input_ids.shape[1] % 2 else scores


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_processors_that_leave_nothing_of_the_draft_vocabulary(
    verification: str, drafter: Eagle3Drafter, tiny: PreTrainedModel
) -> None:
    """Drafts end there; that is no fault."""
    processors = LogitsProcessorList([EveryOther((~drafter.network.t2d).nonzero().flatten().tolist())])
    prompts, config = pad_left(random_rows([5, 9])), {"verification": verification}
    result = generate(tiny, prompts, drafter=drafter, config=config, logits_processor=processors)
    total = result.statistics.total
    assert result.statistics.drafter_failure is None and 0 < total.drafted == total.first_drafted
    if verification == "exact":
        assert outputs(result) == outputs(generate(tiny, prompts, logits_processor=processors))


def test_the_targets_embedding_is_read_live(fresh: LlamaForCausalLM, tmp_path: Path) -> None:
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), fresh)
    prompts = pad_left(random_rows([5]))
    generate(fresh, prompts, drafter=drafter)
    with torch.no_grad():
        fresh.get_input_embeddings().weight.copy_(tiny_llama(seed=3).get_input_embeddings().weight)
        seen = watch(drafter)
        generate(fresh, prompts, drafter=drafter)
        tokens, drafts, logits = seen[-1]
        expected = Reference(safeai(), drafter._stored, fresh).logits(tokens, drafts)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_leaves_its_dtype_alone(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = tiny_llama().float()
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), model, dtype=dtype)
    seen = watch(drafter)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = generate(model, pad_left(random_rows([5, 9])), drafter=drafter)
    assert result.statistics.drafter_failure is None
    assert {logits.dtype for _, _, logits in seen} == {dtype or torch.float32}


def test_neither_target_nor_drafter_is_changed(drafter: Eagle3Drafter, fresh: LlamaForCausalLM) -> None:
    models = (fresh, drafter.network)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    generate(fresh, pad_left(random_rows([5, 9])), drafter=drafter)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    left = {"session", "_projected", "_cache", "_cached", "_failure"}
    assert not left & vars(drafter).keys()


def test_what_fails_while_the_target_runs_drops_the_drafter(
    drafter: Eagle3Drafter, tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(features: Tensor) -> Tensor:
        raise RuntimeError("no room for features")

    monkeypatch.setattr(drafter.network, "project", fail)
    prompts = pad_left(random_rows([5, 9]))
    with pytest.warns(UserWarning, match="no room for features"):
        result = generate(tiny, prompts, drafter=drafter)
    assert outputs(result) == outputs(generate(tiny, prompts))


def test_nan_drops_the_drafter(drafter: Eagle3Drafter, tiny: PreTrainedModel) -> None:
    with torch.no_grad():
        drafter.network.fc.weight[3, 5] = torch.nan
    prompts = pad_left(random_rows([5, 9]))
    with pytest.warns(UserWarning, match="NaN"):
        result = generate(tiny, prompts, drafter=drafter)
    assert outputs(result) == outputs(generate(tiny, prompts))


def test_scaled_positions_end(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Unscaled ones go on; scaled ones end where the config says, and are not clamped."""
    prompts = pad_left(random_rows([5]))
    scaling = LLAMA3 | {"original_max_position_embeddings": 8}
    for name, config, fails in (
        ("plain", safeai(max_position_embeddings=8), False),
        ("scaled", safeai(max_position_embeddings=16, rope_scaling=scaling), True),
    ):
        drafter = Eagle3Drafter(make_folder(tmp_path / name, config), tiny)
        if fails:
            with pytest.raises(ValueError, match="scaled positions reach 16"):
                generate(tiny, prompts, drafter=drafter)
        else:
            assert generate(tiny, prompts, drafter=drafter).statistics.total.drafted > 0


def test_transformers_own_loop_is_refused(drafter: Eagle3Drafter) -> None:
    with pytest.raises(ValueError, match='assistant_strategy="eagle3"'):
        drafter.prepare_assisted_decoding(5, 20, False, None)


@pytest.mark.parametrize("rope", [
    dict(rope_type="default", rope_theta=1e6),
    dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    dict(rope_theta=5e5, **LLAMA3),
    dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=64),
])  # fmt: skip
def test_positions_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = AutoConfig.for_model("llama", rope_parameters=rope, **without(LAYER, "model_type"))
    query, key = torch.randn(2, 2, 7, 4, 16)
    positions = torch.arange(14).view(2, 7) * 30
    found = Rotary(config)(query, key, positions)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions)
    expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["safeai", "speculators, all flags"])
def test_saved_as_it_came(name: str, stored: torch.dtype, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Bit for bit, whatever it ran in; and what was trained comes back in the stored dtype."""
    make_folder(tmp_path / "a", CONFIGS[name], dtype=stored)
    text = json.dumps(CONFIGS[name] | {"torch_dtype": "x", "transformers_version": "?"}).replace(", ", " ,")
    (tmp_path / "a/config.json").write_text(text)
    model = tiny_llama().to(torch.bfloat16)
    drafter = Eagle3Drafter(tmp_path / "a", model)
    generate(model, pad_left(random_rows([5])), drafter=drafter)
    drafter.save(tmp_path / "b")
    (_, before), (_, after) = read_checkpoint(tmp_path / "a"), read_checkpoint(tmp_path / "b")
    assert (tmp_path / "b/config.json").read_text() == text
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key])
    with torch.no_grad():
        drafter.network.norm.weight += 1
    drafter.save(tmp_path / "b")  # over itself
    changed = read_checkpoint(tmp_path / "b")[1]
    assert changed["norm.weight"].dtype == stored and torch.equal(changed["fc.weight"], before["fc.weight"])
    torch.testing.assert_close(changed["norm.weight"], before["norm.weight"] + 1, rtol=1e-2, atol=0)


REAL = {
    "eagle3_train_llama31-8b": "Llama-3.1-8B-Instruct",
    "specforge_qwen2.5-7b-eagle3": "Qwen2.5-7B-Instruct",
    "specforge_qwen3-4b-eagle3": "Qwen3-4B",
    "specforge_qwen3-8b-eagle3": "Qwen3-8B",
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs(shared: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Real shapes, random weights, without much MLP and vocabulary: the whole ones are GBs. A thin target."""
    config = json.loads(shared(f"configs/drafter/{name}.json").read_text())
    changes: dict[str, Any] = dict(vocab_size=4096, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config |= changes | dict(intermediate_size=64, draft_vocab_size=512)
    text = json.dumps(config, indent=1)
    target = random_target(AutoConfig.from_pretrained(shared(f"configs/target/{REAL[name]}"), **changes))
    make_folder(tmp_path / "a", config, dtype=torch.bfloat16)
    (tmp_path / "a/config.json").write_text(text)
    drafter = Eagle3Drafter(tmp_path / "a", target)
    assert drafter.network.config.layer_ids == (2, 2, 1)
    assert drafter.network.lm_head.out_features == config["draft_vocab_size"]
    result = generate(target, pad_left(random_rows([3, 5])), drafter=drafter, max_new_tokens=4, do_sample=False)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    drafter.save(tmp_path / "b")
    assert (tmp_path / "b/config.json").read_text() == text
    before, after = (read_checkpoint(tmp_path / folder)[1] for folder in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def random_target(config: Any) -> PreTrainedModel:
    config.num_hidden_layers, config.intermediate_size, config.tie_word_embeddings = 4, 64, True
    config.num_attention_heads = config.num_key_value_heads = 2
    if config.to_dict().get("layer_types"):
        config.layer_types = config.layer_types[:4]
    with no_init_weights():
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        some = torch.empty(10**6 + 3, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
        for parameter in target.parameters():
            size = parameter.numel()
            many = some.repeat(-(-size // len(some)))[:size].view(parameter.shape)
            parameter.copy_(many if parameter.ndim > 1 else torch.ones_like(parameter))
    return target


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
BAD: dict[str, tuple[Change, str]] = {
    "layer ids past the depth": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"eagle_aux_hidden_state_layer_ids=\[0, 1, 3\].* 2 layers .*\[3\]",
    ),
    "default layer ids": (lambda c, t: c.pop(IDS_KEY), r"=\[2, 1, -1\]"),
    "vocabulary": (lambda c, t: c.update(vocab_size=65), "65 tokens .* the target one of 64"),
    "hidden size": (lambda c, t: c.update(target_hidden_size=32), "width 32 .* the target's have 64"),
    "no embedding": (lambda c, t: c.update(hidden_size=32, target_hidden_size=64), "no embed_tokens"),
    "unknown key": (lambda c, t: c.update(residual_gain=0.5), r"the keys \['residual_gain'\]"),
    "unknown eagle_config": (lambda c, t: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "another speculator": (lambda c, t: c.update(speculators_model_type="dflash"), "'dflash' speculator"),
    "model type": (lambda c, t: c.update(model_type="gemma2"), "model_type='gemma2'"),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "tied head": (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings=True"),
    "window": (lambda c, t: c.update(sliding_window=16), "sliding_window=16"),
    "dynamic positions": (
        lambda c, t: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_scaling=.*dynamic",
    ),
    "activation": (lambda c, t: c.update(hidden_act="snake"), "hidden_act='snake'"),
    "flag": (lambda c, t: c.update(norm_output="yes"), "norm_output='yes'"),
    "size": (lambda c, t: c.update(draft_vocab_size=-1), "draft_vocab_size=-1"),
    "draft vocabulary": (lambda c, t: c.update(draft_vocab_size=99), "draft_vocab_size=99, more than"),
    "a type": (lambda c, t: c.update(hidden_size="64"), "config.json"),
    "missing": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), r"missing \['layers.0.hidden_norm.weight'\]"),
    "unexpected": (lambda c, t: t.update({"fc.bias": torch.zeros(64)}), r"unexpected \['fc.bias'\]"),
    "shape": (lambda c, t: t.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight has shape \[64, 64\]"),
    "NaN": (lambda c, t: t["midlayer.mlp.up_proj.weight"][3, 4].fill_(torch.nan), "up_proj.weight holds NaN"),
    "no d2t": (lambda c, t: t.pop("d2t"), "no d2t"),
    "t2d of other tokens": (lambda c, t: t.update(t2d=~t["t2d"]), "t2d marks other tokens"),
    "d2t out of range": (lambda c, t: t["d2t"][-1].fill_(64), "from 0 to 103|run from"),
    "d2t negative": (lambda c, t: t["d2t"][0].fill_(-1), "run from -1"),
    "d2t twice": (lambda c, t: t["d2t"][1].copy_(t["d2t"][0] - 1), "39 different ones of 40"),
    "d2t is no number": (lambda c, t: t.update(d2t=t["d2t"].double()), "d2t is stored as torch.float64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    change, message = BAD[name]
    config, tensors = safeai(), make_tensors(safeai())
    change(config, tensors)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message) as error:
        Eagle3Drafter(tmp_path, tiny)
    assert "assistant_model=" in str(error.value)
