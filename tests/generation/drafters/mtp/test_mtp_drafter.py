"""MTP heads in `generate`: tokens, which state they read, "auto", "tts", and what is refused."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from spec_trl import release
from spec_trl.drafter_training.sequence_loss import TargetView, sequence_loss
from spec_trl.generation.drafters.mtp import mtp_layouts as layouts
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from spec_trl.generation.engine.network.shadow import observe
from tests.conftest import STORY_MODEL, TRANSFORMERS
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs
from tests.generation.drafters.mtp.heads import LAYOUTS, add, random_head, write_heads
from tests.generation.drafters.watching import watch
from tests.tiny_families import make


ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])  # a prompt of one token, and two copies
RAGGED: dict[str, Any] = {"draft_length": 3, "max_batch_size": 3}
NEW = 14
FIRST = ("glm4_moe", "deepseek_v3", "qwen3_5_text")
LATER = sorted(LAYOUTS.keys() - {*FIRST})
STATES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # families with layers that keep states


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    return write_heads(tmp_path / "llama", "llama")[0]


@pytest.mark.parametrize("family", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
def test_tokens(family: str, do_sample: bool, tmp_path: Path) -> None:
    """Rows of many lengths, which end, move and are filled again; the head lies in a shard of its own."""
    if family in STATES and TRANSFORMERS < (5, 21):
        pytest.skip("refused before 5.21")
    model, _ = write_heads(tmp_path, family, shards=True)
    options: dict[str, Any] = dict(do_sample=do_sample, max_new_tokens=NEW)
    plain = outputs(generate(model, PROMPTS, config=RAGGED, **options))
    result = generate(model, PROMPTS, "mtp", RAGGED, **options)
    assert outputs(result) == plain
    if not do_sample:
        assert plain == reference_outputs(model, PROMPTS, max_new_tokens=NEW)
    statistics = result.statistics
    assert statistics.drafter_failure is None and statistics.per_drafter["mtp"].drafted > 100


def test_reads_the_state_after_the_final_norm(llama: PreTrainedModel, tmp_path: Path) -> None:
    """A head that hands the state through drafts what the target says there, which is the newest token; so it does
    from its own output, which is that state up to a factor. The weights of the final norm differ: before it the
    largest logit is another token's."""
    with torch.no_grad():
        torch.manual_seed(0)
        llama.model.norm.weight.copy_(3 * torch.rand(64) ** 3 + 0.01)
    head = {name: torch.zeros_like(tensor) for name, tensor in random_head(llama, "llama").items()}
    head["mtp.fc.weight"][:, 64:] = torch.eye(64)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"].fill_(1)
    add(tmp_path / "llama", head)
    drafter = MtpDrafter(None, llama)
    seen = watch(drafter)
    generate(llama, PROMPTS, "mtp", RAGGED, drafter=drafter, do_sample=False, max_new_tokens=NEW)
    assert len(seen) > 20 and all(drafts == [tokens[-1]] * len(drafts) for tokens, drafts, _ in seen)


@pytest.mark.parametrize("scope", ["request", "run"])
def test_learns_from_rounds(scope: str, llama: PreTrainedModel) -> None:
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=NEW)
    prompts = pad_left(ROWS[:2])
    config = {"tts": {"drafter": "mtp", "scope": scope, "stride": 1}, "draft_length": 3}
    learned = generate(llama, prompts, "tts", config, **options)
    assert outputs(learned) == outputs(generate(llama, prompts, **options))
    assert learned.statistics.drafter_failure is None and learned.statistics.learning.updates > 5


# ---- which head ---------------------------------------------------------------------------------------------------


def test_only_shards_with_heads_are_read(llama: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(llama, "llama", seed=2)
    add(tmp_path / "llama", head, shards=True)
    (tmp_path / "llama/model-00001-of-00002.safetensors").write_bytes(b"")
    drafter = MtpDrafter(None, llama)
    assert drafter.tensors().keys() == head.keys()
    assert all(tensor.equal(head[name]) for name, tensor in drafter.tensors().items())


def test_saved_heads_come_back(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Under their names, bit for bit where nothing was learned, and as `assistant_model`."""
    drafter = MtpDrafter(None, llama)
    drafter.save(tmp_path / "same")
    with torch.no_grad():
        drafter.network.fc.weight.mul_(0.5)
    drafter.save(tmp_path / "other")
    same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "other"))
    stored = load_file(tmp_path / "llama/model.safetensors")
    assert same.keys() == {name for name in stored if "mtp" in name}
    assert all(tensor.equal(stored[name]) for name, tensor in same.items())
    assert [name for name in same if not same[name].equal(other[name])] == ["mtp.fc.weight"]
    shutil.rmtree(tmp_path / "llama")  # the policy's own is not looked for
    config = {"draft_length": 3}
    result = generate(llama, PROMPTS, "mtp", config, assistant_model=str(tmp_path / "other"), max_new_tokens=NEW)
    assert outputs(result) == outputs(generate(llama, PROMPTS, max_new_tokens=NEW))
    assert result.statistics.total.drafted > 100


def test_further_heads_are_left_out(tmp_path: Path) -> None:
    model, head = write_heads(tmp_path, "glm4_moe")
    add(tmp_path, {name.replace("layers.2.", "layers.3."): tensor for name, tensor in head.items()})
    first = {name for name in head if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert MtpDrafter(None, model).tensors().keys() == first


def test_auto_drafts_with_heads(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where config and files have them; the files are looked at, and the head is loaded, in the first call alone."""
    looked: list[object] = []
    find = layouts.stored_files
    monkeypatch.setattr(layouts, "stored_files", lambda folder: looked.append(folder) or find(folder))
    plain = outputs(generate(llama, PROMPTS, max_new_tokens=NEW))
    for _ in range(3):
        result = generate(llama, PROMPTS, "auto", max_new_tokens=NEW)
        assert outputs(result) == plain
        assert set(result.statistics.per_drafter) <= {"self", "history", "mtp"}
    assert len(looked) == 2  # for the decision, and for the weights


@pytest.mark.parametrize("change", ["no promise", "no head", "no folder", "broken head"])
def test_auto_without_heads(change: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    stored = load_file(tmp_path / "llama/model.safetensors")
    if change == "no promise":
        llama.config.num_nextn_predict_layers = llama.config.mtp_num_hidden_layers = None
    elif change == "no folder":
        llama.config.name_or_path = ""
    else:
        lost = ["mtp.fc.weight"] if change == "broken head" else [name for name in stored if "mtp" in name]
        lost = lost[:1] if change == "broken head" else lost
        (tmp_path / "llama/model.safetensors").unlink()
        llama.save_pretrained(tmp_path / "llama")
        if change == "broken head":
            add(tmp_path / "llama", {"mtp.fc.weight": stored["mtp.fc.weight"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [generate(llama, PROMPTS, "auto", max_new_tokens=NEW) for _ in range(2)]
    said = [str(one.message) for one in caught if "head of the checkpoint" in str(one.message)]
    assert len(said) == (change == "broken head")
    assert all(outputs(result) == outputs(results[0]) for result in results)
    release(llama)


def foreign(folder: Path, family: str) -> PreTrainedModel:
    """A model of a family whose layers no head fits, from a checkpoint with a head of a known mark."""
    if family == "gpt2":
        sizes = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, num_nextn_predict_layers=1)
        model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**sizes))
    else:
        model = make(family)
        model.config.num_nextn_predict_layers = 1
    model.save_pretrained(folder)
    add(folder, {"mtp.fc.weight": torch.zeros(1, 1)})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return loaded.eval()


@pytest.mark.parametrize("family", ["gpt2", "falcon_h1"])
def test_a_family_that_no_head_fits(family: str, tmp_path: Path) -> None:
    """ "auto" goes on without the head, with one warning; "mtp" refuses."""
    if family != "gpt2" and TRANSFORMERS < (5, 21):
        pytest.skip("refused before 5.21")
    model = foreign(tmp_path, family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [generate(model, PROMPTS, "auto", max_new_tokens=NEW) for _ in range(2)]
    said = [str(one.message) for one in caught if "head of the checkpoint" in str(one.message)]
    assert len(said) == 1 and f"config.name_or_path='{tmp_path}'" in said[0]
    plain = outputs(generate(model, PROMPTS, max_new_tokens=NEW))
    assert all(outputs(result) == plain for result in results)
    with pytest.raises(ValueError, match=f"config.name_or_path='{tmp_path}': .* family .{family}.: .*Error"):
        generate(model, PROMPTS, "mtp")


# ---- refusals -----------------------------------------------------------------------------------------------------


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (without("mtp.norm.weight"), r"missing \['norm.weight'\]"),
    "unknown": (lambda t: t.update({"mtp.gain": t["mtp.norm.weight"].clone()}), r"unexpected \['mtp.gain'\]"),
    "shape": (lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :64].clone()}), r"shape \[64, 64\]"),
    "layout": (lambda t: t.update({"mtp.x.weight": t.pop("mtp.fc.weight")}), "layout that is not known here: .*mtp.l"),
    "none": (lambda t: [t.pop(name) for name in list(t)], "has no multi-token-prediction head"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_refused_heads(change: Any, message: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(llama, "llama")
    change(head)
    (tmp_path / "llama/model.safetensors").unlink()
    llama.save_pretrained(tmp_path / "llama")
    add(tmp_path / "llama", head)
    with pytest.raises(ValueError, match=rf"config.name_or_path='{tmp_path}/llama'.*{message}"):
        generate(llama, PROMPTS, "mtp")


def test_refused_places(llama: PreTrainedModel, tmp_path: Path) -> None:
    for assistant, message in (
        (llama, "assistant_model=LlamaForCausalLM with a drafter of kind 'mtp'"),
        (str(tmp_path / "nowhere/at/all"), "is a folder that does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(llama, PROMPTS, "mtp", assistant_model=assistant)
    llama.config.name_or_path = ""
    with pytest.raises(ValueError, match="config.name_or_path='' has no multi-token-prediction head"):
        generate(llama, PROMPTS, "mtp")
    llama.config.mtp_use_dedicated_embeddings = True
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings=True"):
        generate(llama, PROMPTS, "mtp", assistant_model=str(tmp_path / "llama"))


# ---- a trained head -----------------------------------------------------------------------------------------------


@pytest.mark.slow  # 40 s
def test_a_trained_head_is_accepted(tmp_path: Path) -> None:
    """From the model's own samples, on its own output."""
    folder = Path(shutil.copytree(STORY_MODEL, tmp_path / "stories"))
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    target.config.num_nextn_predict_layers = 1
    add(folder, {name: t / 2 if t.ndim > 1 else t for name, t in random_head(target, "llama").items()})
    (folder / "config.json").write_text(json.dumps(target.config.to_dict()))
    drafter = MtpDrafter(folder, target)
    start = {"input_ids": torch.ones(160, 1, dtype=torch.int64), "attention_mask": torch.ones(160, 1)}
    tokens = generate(target, start, max_new_tokens=40, min_new_tokens=40).sequences  # [160, 41]
    features, hidden = observe(target, tokens, drafter.feature_layers)
    weights = [parameter.requires_grad_() for parameter in drafter.trained(drafter.network)]
    adam = torch.optim.Adam(weights, lr=4e-3)
    for step in range(320):
        some = torch.arange(4 * step, 4 * step + 4) % len(tokens)
        real = torch.ones_like(tokens[some], dtype=torch.bool)
        view = TargetView(tokens[some], real, features[some], hidden[some], torch.ones(4, dtype=torch.int64))
        loss = sequence_loss(drafter, target, view, depth=3).cross_entropy
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        adam.step()
    drafter.save(tmp_path / "head")
    prompts, target = pad_left([torch.tensor([1, 403 + n]) for n in range(8)]), target.double()
    for do_sample, least in ((False, 0.25), (True, 0.17)):
        options: dict[str, Any] = dict(do_sample=do_sample, max_new_tokens=60)
        plain = outputs(generate(target, prompts, **options))
        config, assistant = {"draft_length": 4}, str(tmp_path / "head")
        result = generate(target, prompts, "mtp", config, assistant_model=assistant, **options)
        assert outputs(result) == plain
        assert result.statistics.total.accepted / result.statistics.total.drafted >= least
