"""EAGLE-3 and DFlash where they do the same: in `generate`, under captured forwards, two at once, and saved."""

import gc
import json
import os
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

from spec_trl import release
from spec_trl.generation import generate as one_call
from spec_trl.generation.drafters.feature_drafter import FeatureDrafter
from spec_trl.generation.planner.control import Chain
from spec_trl.generation.registry import DRAFTERS
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.mtp.heads import write_alone
from tests.generation.drafters.watching import (
    KINDS,
    PRUNED,
    before,
    check_drafts,
    check_frequencies,
    make_checkpoint,
    watch,
    write_random,
)
from tests.generation.engine.pools import install_pool
from tests.generation.engine.tape import Tape
from tests.generation.races import Plans


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
EOS = dict(eos_token_id=[7, 11, 12])
each_kind = pytest.mark.parametrize("kind", PRUNED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters of each kind with 40 of the target's 64 tokens."""
    folder = tmp_path_factory.mktemp("pruned")
    return {kind: write_random(kind, folder / kind, config) for kind, config in PRUNED.items()}


@pytest.fixture
def drafter(kind: str, folders: dict[str, Path], tiny: PreTrainedModel) -> FeatureDrafter:
    return KINDS[kind](folders[kind], tiny)


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3"])
def test_rejection_keeps_the_distribution(drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
    """χ² on the second token after one prompt, the first that is drafted, over a pruned vocabulary."""
    prompt, count = random_rows([4])[0], 1500
    config, options = {"verification": "rejection", "draft_length": 2}, dict(max_new_tokens=4, temperature=1.5)
    result = generate(tiny, pad_left([prompt] * count), config=config, drafter=drafter, **options)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > count
    with torch.no_grad():
        first = (tiny(prompt[None]).logits[0, -1] / 1.5).softmax(-1)  # [V]
        continued = torch.cat([prompt.expand(64, -1), torch.arange(64)[:, None]], dim=1)  # [V, 5]
        p = first @ (tiny(continued).logits[:, -1] / 1.5).softmax(-1)  # [V]
    check_frequencies(torch.tensor([tokens[1] for tokens in outputs(result)]).bincount(minlength=64), p)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_copies_of_a_prompt_draft_from_its_last_features(
    is_paged: bool, kind: str, drafter: FeatureDrafter, folders, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a page ends with the prompt, and a pair of its last column has another token in each copy."""
    if is_paged:
        install_pool(monkeypatch, columns=4)
    prompts = pad_left([row for row in random_rows([4, 5, 8, 9, 7]) for _ in range(3)])
    seen = watch(drafter)
    result = generate(tiny, prompts, config={"draft_length": 3}, drafter=drafter, max_new_tokens=6)
    assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=6))
    assert result.statistics.drafter_failure is None and len(seen) > 30
    for start in range(0, 15, 3):
        check_drafts(seen[start : start + 3], kind, folders[kind], tiny)


class EveryOther(LogitsProcessor):
    """At odd lengths only `allowed` may come."""

    prefix_only = True

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(self.allowed), 0)
        return scores + only if input_ids.shape[1] % 2 else scores


@pytest.mark.parametrize(("kind", "verification"), [("eagle3", "exact"), ("dflash", "rejection")])
def test_processors(verification: str, drafter: FeatureDrafter, tiny: PreTrainedModel) -> None:
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
    pair = [KINDS[kind](folders[kind], tiny) for kind in PRUNED]
    for drafters in (pair, pair[::-1]):
        result = generate(tiny, PROMPTS, drafter=drafters, control=Plans(2, [[Chain(0, 3)], [Chain(1, 3)]]))
        assert outputs(result) == outputs(generate(tiny, PROMPTS)) and result.statistics.drafter_failure is None
        assert all(counts.drafted > 20 for counts in result.statistics.per_drafter.values())


# ---- what it borrows, keeps and leaves alone ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PRUNED, "mtp", "model", "auto"])
def test_a_folder_is_read_once(kind: str, folders, tiny, tmp_path, monkeypatch) -> None:
    """By several calls, until a file in it changes."""
    folder = folders.get(kind, tmp_path / kind)
    if kind == "mtp":
        write_alone(folder, tiny)
    elif kind not in folders:
        tiny.save_pretrained(folder)
    drafter, loads = DRAFTERS["model" if kind == "auto" else kind], []
    make = drafter.make.__func__
    monkeypatch.setattr(drafter, "make", classmethod(lambda *given: loads.append(given) or make(*given)))
    plain = outputs(generate(tiny, PROMPTS))
    for written in (False, False, True, False):
        if written:
            os.utime(folder / "model.safetensors")
        result = generate(tiny, PROMPTS, kind, assistant_model=str(folder))
        assert outputs(result) == plain and result.statistics.drafter_failure is None
        assert kind == "auto" or result.statistics.total.drafted > 20
    assert len(loads) == 2
    release(tiny)


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


@pytest.mark.parametrize("kind", ["eagle3"])
def test_a_failure_is_told_where_the_drafter_is_not_asked_again(kind: str, drafter, tiny, monkeypatch) -> None:
    monkeypatch.setattr(drafter.network, "project", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        generate(tiny, PROMPTS, drafter=drafter, control=Plans(1, [[]] * 9 + [[Chain(0, 3)]]), max_new_tokens=5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_leaves_its_dtype_alone(dtype: torch.dtype | None, folders: dict[str, Path]) -> None:
    model = tiny_llama().float()
    for kind in PRUNED:
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
    monkeypatch.setattr(one_call, "runner_for", lambda *_, **__: pytest.fail("work was begun"))
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
def test_saved_as_it_came(kind: str, folders: dict[str, Path], tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Bit for bit, whatever it ran in; what was trained comes back in the stored dtype."""
    drafter = KINDS[kind](folders[kind], tiny, dtype=torch.bfloat16)
    assert drafter.network.dtype == torch.bfloat16
    drafter.save(tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (folders[kind] / file).read_bytes()
    with torch.no_grad():
        drafter.network.norm.weight += 1
    drafter.save(tmp_path)  # over itself
    old, new = (load_file(folder / "model.safetensors") for folder in (folders[kind], tmp_path))
    assert new["fc.weight"].equal(old["fc.weight"]) and new["norm.weight"].dtype == torch.float64
    torch.testing.assert_close(new["norm.weight"], old["norm.weight"] + 1, rtol=1e-2, atol=0)


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
