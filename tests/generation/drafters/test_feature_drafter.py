"""EAGLE-3 and DFlash where they do the same: in `generate`, under captured forwards, two at once, and saved."""

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_trl import release
from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.feature_drafter import FeatureDrafter
from spec_trl.generation.drafters.feature_network import Rotary
from spec_trl.generation.engine import captured
from spec_trl.scheduling.control import Chain
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.watching import before, check_frequencies, make_checkpoint, watch
from tests.generation.engine.tape import Tape
from tests.generation.races import Plans


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
KINDS: dict[str, type[FeatureDrafter]] = {"eagle3": Eagle3Drafter, "dflash": DFlashDrafter}
PRUNED = {"eagle3": eagle3.safeai(), "dflash": dflash.PRUNED}
EOS = dict(eos_token_id=[7, 11, 12])
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters of each kind with 40 of the target's 64 tokens."""
    folder = tmp_path_factory.mktemp("pruned")
    for kind, config in PRUNED.items():
        write_random(kind, folder / kind, config)
    return {kind: folder / kind for kind in KINDS}


def write_random(kind: str, folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    if kind == "dflash":
        dflash.make_checkpoint(folder, config, dtype=dtype)
    else:
        eagle3.make_folder(folder, config, dtype)


@pytest.fixture
def drafter(kind: str, folders: dict[str, Path], tiny: PreTrainedModel) -> FeatureDrafter:
    return KINDS[kind](folders[kind], tiny)


# ---- tokens ---------------------------------------------------------------------------------------------------------


@each_kind
def test_by_name(kind: str, tiny, folders) -> None:
    config = {"max_batch_size": 5}
    result = generate(tiny, PROMPTS, kind, config, assistant_model=str(folders[kind]), max_new_tokens=16, **EOS)
    expected = generate(tiny, PROMPTS, "none", config, max_new_tokens=16, **EOS)
    assert outputs(result) == outputs(expected)
    statistics = result.statistics
    assert statistics.strategy == kind and statistics.drafter_failure is None and statistics.total.drafted > 0
    assert statistics.draft_forwards > 0 and statistics.cache_bytes > expected.statistics.cache_bytes


@each_kind
def test_rejection_keeps_the_distribution(kind: str, drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
    """χ² on the first token after one prompt, drafted over a pruned vocabulary."""
    prompt, count = random_rows([4])[0], 1500
    config, options = {"verification": "rejection", "draft_length": 2}, dict(max_new_tokens=3, temperature=1.5)
    result = generate(tiny, pad_left([prompt] * count), config=config, drafter=drafter, **options)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > count
    with torch.no_grad():
        p = (tiny(prompt[None]).logits[0, -1] / 1.5).softmax(-1)  # [V]
    check_frequencies(torch.tensor([tokens[0] for tokens in outputs(result)]).bincount(minlength=64), p)


class EveryOther(LogitsProcessor):
    """At odd lengths only `allowed` may come."""

    prefix_only = True

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(self.allowed), 0)
        return scores + only if input_ids.shape[1] % 2 else scores


@each_kind
@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_processors(kind: str, verification: str, drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
    """They act on each draft token with those before it in place. Where they leave nothing of the draft vocabulary, a
    row's drafts end, which is no fault."""
    outside = sorted(set(range(64)) - set(drafter.target_ids.tolist()))
    config = {"verification": verification}
    for processor, ends in ((EveryOther(outside), True), (NoRepeatNGramLogitsProcessor(2), False)):
        options = dict(logits_processor=LogitsProcessorList([processor]))
        result = generate(tiny, PROMPTS, config=config, drafter=drafter, max_new_tokens=16, **options)
        total = result.statistics.total
        assert result.statistics.drafter_failure is None and 0 < total.first_drafted
        assert (total.drafted == total.first_drafted) == ends
        if verification == "exact":
            assert outputs(result) == outputs(generate(tiny, PROMPTS, max_new_tokens=16, **options))


@pytest.mark.parametrize(
    ("kind", "runner"),
    [("eagle3", "graph"), ("dflash", "graph"), pytest.param("dflash", "compiled", marks=pytest.mark.slow)],
)
def test_under_captured_forwards(kind: str, runner: str, tiny, checkpoints, tape: Tape) -> None:
    """The features come out of the captured target: the same drafts, of which the same are accepted."""
    options = dict(assistant_model=checkpoints[kind], max_new_tokens=16)
    expected = generate(tiny, PROMPTS, kind, {"draft_length": 3, "runner": "eager"}, **options)
    for _ in range(2):  # captured, then kept
        generate(tiny, PROMPTS, "none", {"runner": runner}, max_new_tokens=16)
        result = generate(tiny, PROMPTS, kind, {"draft_length": 3, "runner": runner}, **options)
        assert outputs(result) == outputs(expected) and result.statistics.total == expected.statistics.total
    assert tape.replayed > 20
    release(tiny)


def test_two_at_once(folders: dict[str, Path], tiny: PreTrainedModel) -> None:
    """One runner tells both, each what it reads: they draft in turns, each as if alone."""
    pair = [KINDS[kind](folders[kind], tiny) for kind in KINDS]
    for drafters in (pair, pair[::-1]):
        result = generate(tiny, PROMPTS, drafter=drafters, control=Plans(2, [[Chain(0, 3)], [Chain(1, 3)]]))
        assert outputs(result) == outputs(generate(tiny, PROMPTS)) and result.statistics.drafter_failure is None
        assert all(counts.drafted > 20 for counts in result.statistics.per_drafter.values())


# ---- what it borrows, keeps and leaves alone ------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_the_target_is_read_live_and_left_alone(kind: str, fresh: PreTrainedModel, tmp_path: Path) -> None:
    """Embedding and head are the policy's own, read at each draft: an optimizer step in between shows."""
    drafter = KINDS[kind](make_checkpoint(tmp_path, kind), fresh)
    owned = {tensor.data_ptr() for tensor in drafter.network.state_dict().values()}
    assert not owned & {tensor.data_ptr() for tensor in fresh.parameters()}
    for module in (fresh.get_input_embeddings(), fresh.get_output_embeddings()):
        module.weight += torch.randn(module.weight.shape, dtype=torch.float64)
    states = [copy.deepcopy(model.state_dict()) for model in (fresh, drafter.network)]
    seen = watch(drafter)
    generate(fresh, pad_left(random_rows([5])), drafter=drafter, max_new_tokens=8)
    weights = load_file(tmp_path / "model.safetensors")
    for tokens, drafts, logits in seen[::2]:
        if kind == "eagle3":
            expected = eagle3.Reference(eagle3.safeai(), weights, fresh).logits(tokens, drafts)
        else:
            expected = dflash.straight_line(fresh, weights, dflash.zlab(), torch.tensor(tokens))[: len(drafts)]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    for model, state in zip((fresh, drafter.network), states, strict=True):
        assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())


@each_kind
def test_nothing_of_a_generation_outlives_it(kind: str, drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
    rows: list[Any] = []
    before(drafter, "begin", lambda session: rows.append(weakref.ref(session.rows)))
    result = generate(tiny, PROMPTS, drafter=drafter)
    assert result.statistics.draft_forwards == drafter.forwards > 0
    del result
    gc.collect()
    assert rows[0]() is None and not hasattr(drafter, "session")
    held = {name for name, value in vars(drafter).items() if isinstance(value, Tensor | Cache)}
    assert held == {"target_ids"}


@each_kind
@pytest.mark.parametrize("fault", ["features", "drafts", "NaN"])
def test_a_drafter_that_fails_changes_no_output(kind: str, fault: str, drafter, tiny, monkeypatch) -> None:
    parts = {"eagle3": ("project", "logits"), "dflash": ("remember", "refine")}[kind]
    if fault == "NaN":
        drafter.network.norm.weight[3] = torch.nan
    else:
        monkeypatch.setattr(drafter.network, parts[fault == "drafts"], lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="NaN logits" if fault == "NaN" else "division by zero"):
        result = generate(tiny, PROMPTS, drafter=drafter, **EOS)
    assert outputs(result) == outputs(generate(tiny, PROMPTS, **EOS))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_leaves_its_dtype_alone(dtype: torch.dtype | None, folders: dict[str, Path]) -> None:
    model = tiny_llama().float()
    for kind in KINDS:
        drafter = KINDS[kind](folders[kind], model, dtype=dtype)
        seen = watch(drafter)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = generate(model, pad_left(random_rows([5, 9])), drafter=drafter, max_new_tokens=8)
        assert result.statistics.drafter_failure is None
        # DFlash's head is outside its network, as the target's is.
        assert kind == "dflash" or {logits.dtype for _, _, logits in seen} == {dtype or torch.float32}


# ---- what is refused ------------------------------------------------------------------------------------------------


@each_kind
def test_rows_that_outgrow_scaled_positions(kind: str, tiny, tmp_path, monkeypatch) -> None:
    """Refused before any work; positions that are not scaled have no end."""
    plain = make_checkpoint(tmp_path / "plain", kind, max_position_embeddings=8)
    assert generate(tiny, PROMPTS, kind, assistant_model=plain, max_new_tokens=8).statistics.total.drafted > 0
    scaling = eagle3.LLAMA3 | {"original_max_position_embeddings": 8}
    scaled = make_checkpoint(tmp_path / "scaled", kind, max_position_embeddings=16, rope_scaling=scaling)
    monkeypatch.setattr(captured, "runner_for", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=r"rows can reach \d+ tokens.*positions reach 16.*Lower max_new_tokens"):
        generate(tiny, PROMPTS, kind, assistant_model=scaled)


@each_kind
def test_other_refusals(kind: str, drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
    for assistant in (None, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"drafter of kind '{kind}': give the folder or hub id"):
            generate(tiny, PROMPTS, kind, assistant_model=assistant)
    with pytest.raises(ValueError, match=f'needs the target.s hidden states.*assistant_strategy="{kind}"'):
        drafter.prepare_assisted_decoding(5, 20, False, None)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_saved_as_it_came(kind: str, stored: torch.dtype, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Bit for bit, whatever it ran in, spare tensors included; what was trained comes back in the stored dtype."""
    config = PRUNED[kind]
    write_random(kind, tmp_path / "a", config, stored)
    stored_tensors = load_file(tmp_path / "a/model.safetensors") | {"verifier_lm_head.weight": torch.randn(5, 3)}
    write_checkpoint(tmp_path / "a", config, stored_tensors)
    text = json.dumps(config | {"torch_dtype": "x"}, indent=4) + "\n\n"  # not as this package would write it
    (tmp_path / "a/config.json").write_text(text)
    drafter = KINDS[kind](tmp_path / "a", tiny, dtype=torch.bfloat16)
    assert drafter.network.dtype == torch.bfloat16
    drafter.save(tmp_path / "b")
    after = load_file(tmp_path / "b/model.safetensors")
    assert (tmp_path / "b/config.json").read_text() == text and stored_tensors.keys() == after.keys()
    assert all(tensor.dtype == after[key].dtype and tensor.equal(after[key]) for key, tensor in stored_tensors.items())
    with torch.no_grad():
        drafter.network.norm.weight += 1
    drafter.save(tmp_path / "b")  # over itself
    changed = load_file(tmp_path / "b/model.safetensors")
    assert changed["norm.weight"].dtype == stored and changed["fc.weight"].equal(after["fc.weight"])
    torch.testing.assert_close(changed["norm.weight"], after["norm.weight"] + 1, rtol=1e-2, atol=0)


REAL = {
    "specforge_qwen3-4b-eagle3": "Qwen3-4B",
    "specforge_qwen3-4b-dflash": "Qwen3-4B",
    "specforge_qwen3-8b-eagle3": "Qwen3-8B",
    "specforge_qwen2.5-7b-eagle3": "Qwen2.5-7B-Instruct",
    "eagle3_train_llama31-8b": "Llama-3.1-8B-Instruct",
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if "4b" in name else [pytest.mark.slow]) for name in REAL
])  # fmt: skip
def test_real_configs(shared: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Real widths, random weights, without much MLP and vocabulary: the whole ones are GBs. A thin target."""
    depth, kind = 4, "dflash" if "dflash" in name else "eagle3"
    changes: dict[str, Any] = dict(vocab_size=4096, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config = json.loads(shared(f"configs/drafter/{name}.json").read_text()) | changes | dict(intermediate_size=64)
    target = random_target(AutoConfig.from_pretrained(shared(f"configs/target/{REAL[name]}"), **changes), depth)
    if kind == "dflash":
        config |= dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, num_target_layers=depth)
        config["dflash_config"] |= dict(target_layer_ids=[0, 2], mask_token_id=7)
        dflash.make_checkpoint(tmp_path / "a", config, 2 * target.config.hidden_size, torch.bfloat16)
    else:
        eagle3.make_folder(tmp_path / "a", config | dict(draft_vocab_size=512), torch.bfloat16, depth)
    drafter = KINDS[kind](tmp_path / "a", target)
    assert drafter.feature_layers == ((1, 3) if kind == "dflash" else (2, 2, 1))
    result = generate(target, pad_left(random_rows([3, 5])), drafter=drafter, max_new_tokens=4, do_sample=False)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
    drafter.save(tmp_path / "b")
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "b/config.json").read_bytes()
    stored, saved = (load_file(tmp_path / f"{folder}/model.safetensors") for folder in "ab")
    assert stored.keys() == saved.keys() and all(tensor.equal(saved[key]) for key, tensor in stored.items())


def random_target(config: Any, depth: int) -> PreTrainedModel:
    config.num_hidden_layers, config.intermediate_size, config.tie_word_embeddings = depth, 64, True
    config.num_attention_heads = config.num_key_value_heads = 2
    if config.to_dict().get("layer_types"):
        config.layer_types = config.layer_types[:depth]
    with no_init_weights():
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in target.parameters():
        nn.init.uniform_(parameter, -0.03, 0.03) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return target


@pytest.mark.parametrize("rope", [
    dict(rope_type="default", rope_theta=1e6), dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    dict(rope_theta=5e5, **eagle3.LLAMA3), dict(rope_theta=1e6, **eagle3.YARN),
])  # fmt: skip
def test_positions_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", rope_parameters=rope, hidden_size=64, num_attention_heads=4)
    positions = torch.arange(14).view(2, 7) * 30
    with torch.device("meta"):  # where checkpoints are loaded
        rotary = Rotary(config)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    for found, table in zip(rotary(positions, torch.float32), expected, strict=True):
        assert found[:, 0].equal(table)
