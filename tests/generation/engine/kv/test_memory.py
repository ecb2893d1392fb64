"""K/V on a CPU takes memory for what is written alone; the kernel is asked how much."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StoppingCriteriaList

from spec_trl.generation.engine.kv import memory
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.kv.memory import LateZeros, free_memory, limited_groups
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs, pad_left, random_rows


PAGEMAP = Path("/proc/self/pagemap")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not PAGEMAP.exists(), reason="the kernel does not say which pages are taken")


def written(tensor: Tensor) -> int:
    """Bytes of the pages of `tensor` that were written and not given back."""
    first, pages = tensor.data_ptr() // mmap.PAGESIZE, -(-tensor.nbytes // mmap.PAGESIZE)
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * pages)), dtype=torch.int64)  # [pages]
    # Bit 63: present; bit 56: mapped here alone, which the kernel's page of zeros is not.
    return int(((entries < 0) & ((entries >> 56) & 1).bool()).sum()) * mmap.PAGESIZE


def test_memory_is_taken_for_what_is_written() -> None:
    zeros = LateZeros((4, 2, 4096, 32), torch.float32, CPU)  # 128 bytes per column, 512 KiB per head
    assert not zeros.tensor.any() and written(zeros.tensor) == 0, "reading takes no memory"
    zeros.tensor[1, :, :100] = 1
    zeros.tensor[3, :, :40] = 1
    assert zeros.bytes_of([100, 40]) == written(zeros.tensor) == 2 * (4 + 2) * 4096
    zeros.give_back(1, 2, kept=60)
    assert zeros.tensor[1, :, :64].all() and not zeros.tensor[1, :, 64:].any()
    assert written(zeros.tensor) == 2 * (2 + 2) * 4096
    zeros.give_back(0, 2)
    assert not zeros.tensor[:3].any() and zeros.tensor[3, :, :40].all() and written(zeros.tensor) == 2 * 2 * 4096


def test_rows_that_share_a_page_keep_it() -> None:
    zeros = LateZeros((3, 1, 100, 16), torch.float32, CPU)  # 6,400 bytes per row: 1.56 pages
    zeros.tensor.fill_(1)
    zeros.give_back(1, 2)
    assert zeros.tensor[0].all() and zeros.tensor[2].all()
    assert zeros.bytes_of([100] * 3) >= written(zeros.tensor)


def test_other_devices_take_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "takes_memory_late", lambda device: False)
    zeros = LateZeros((3, 1, 100, 16), torch.float32, CPU)
    zeros.tensor.fill_(1)
    zeros.give_back(0, 3)
    assert zeros.tensor.all() and zeros.bytes_of([1]) == zeros.tensor.nbytes


def write_group(folder: Path, limit: str, used: str, stat: str, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(text + "\n")


def test_limits_of_control_groups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process's own group and those around it; under version 1 also where its path is another machine's."""
    root, membership = tmp_path / "cgroup", tmp_path / "membership"

    def left() -> float:
        return min((group.left() for group in limited_groups(root, membership)), default=math.inf)

    assert left() == math.inf, "no control groups"
    membership.write_text("9:name=systemd:/x\n4:cpu,cpuacct:/\n0::/job_7/step_0\n")
    write_group(root / "job_7/step_0", "max", "900", "anon 100\ninactive_file 800", version=2)
    assert left() == math.inf, "no limit"
    write_group(root / "job_7", "5000", "3000", "anon 2200\ninactive_file 700\nactive_file 100", version=2)
    assert left() == 5000 - 3000 + 700
    write_group(root / "job_7", "5000", "6000", "anon 6000", version=2)
    assert left() == 0

    membership.write_text("4:memory:/docker/abc\n0::/\n")
    write_group(root / "memory", "4000", "1000", "inactive_file 1\ntotal_inactive_file 300", version=1)
    assert left() == 4000 - 1000 + 300
    monkeypatch.setattr(memory, "groups_of_this_process", lambda: limited_groups(root, membership))
    assert free_memory(CPU) == 3300


def test_gaps_are_closed_and_the_rest_is_given_back() -> None:
    cache = RaggedCache(layers=1, rows=4, columns=1024)
    cache.point_at(torch.arange(1000).expand(4, -1), 1000, first_row=0)
    cache.update(*(torch.arange(1.0, 5.0).view(4, 1, 1, 1).expand(4, 2, 1000, 32) for _ in range(2)), 0)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    cache.move_rows([3], [1], [200], 3)
    assert (keys[0, :, :1000] == 1).all() and (keys[2, :, :1000] == 3).all()
    assert (keys[1, :, :200] == 4).all() and (values[1, :, :200] == 4).all()
    assert not keys[1, :, 256:].any() and not keys[3].any() and not values[3].any()
    assert written(keys) + written(values) <= cache.bytes_of([1000, 200, 1000]) < 2.3 * 2 * 2 * 1024 * 32 * 4
    cache.move_rows([], [], [], 1)
    assert written(keys) + written(values) <= cache.bytes_of([1000])
    assert (keys[0, :, :1000] == 1).all()


@pytest.mark.parametrize("strategy", ["none", "self", "model"])
def test_statistics_count_what_the_kernel_counts(
    strategy: str, tiny_assistant: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(max_position_embeddings=1024)
    caches: list[RaggedCache] = []
    make: Callable[..., None] = RaggedCache.__init__

    def watched(self: RaggedCache, *arguments: Any) -> None:
        make(self, *arguments)
        caches.append(self)

    monkeypatch.setattr(RaggedCache, "__init__", watched)
    taken = []

    def look(_: int) -> None:
        layers = [layer for cache in caches for layer in cache.layers if layer.is_initialized]
        taken.append(sum(written(states) for layer in layers for states in (layer.keys, layer.values)))

    prompts = pad_left(random_rows([5, 9, 100, 300, 4, 6]))
    options: dict[str, Any] = {"eos_token_id": 5, "max_new_tokens": 600}
    assistant = {"assistant_model": tiny_assistant} if strategy == "model" else {}
    criteria = StoppingCriteriaList([EachRound(look)])
    found = generate(model, prompts, strategy, stopping_criteria=criteria, **assistant, **options)
    assert max(taken) <= found.statistics.cache_bytes < 2 * max(taken), "pages of 64 columns, and of shared heads"
    assert outputs(found) == outputs(generate(model, prompts, config={"max_batch_size": 1}, **options)), (
        "nothing padded"
    )
