"""How many files and functions of ours one call of generate passes: the third call, two rows of 16 tokens."""

import collections
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import spec_trl
from tests.conftest import tiny_llama


PACKAGE = f"{Path(spec_trl.__file__).parent}/"

# A little above what was measured. Under "auto" times decide what a call drafts: 40 files and 363 to 379 functions, or
# 45 and 417 where the copy is packed.
# Comprehensions count as functions, which Python 3.12 no longer calls: without them 217, 255 and 295 to 301.
LIMITS = {"none": (34, 286), "self": (37, 340), "auto": (47, 430)}


@pytest.mark.parametrize("strategy", LIMITS)
def test_a_call_passes_few_files_and_functions(strategy: str) -> None:
    model, ids = tiny_llama().float(), torch.randint(3, 60, (2, 8))
    config = {"draft_length": 3} | ({} if strategy == "auto" else {"sd_toggle": "always"})
    passed: collections.Counter[tuple[str, str]] = collections.Counter()

    def call() -> None:
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=16,
            min_new_tokens=16, pad_token_id=0, assistant_strategy=strategy, speculative_config=config,
        )  # fmt: skip

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            passed[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    for _ in range(2):
        call()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    files = collections.Counter(file for file, _ in passed)
    print(f"{strategy}: {len(files)} files, {len(passed)} functions, {passed.total()} calls")
    print(*(f"  {functions:3d} in {file}" for file, functions in files.most_common()), sep="\n")
    most_files, most_functions = LIMITS[strategy]
    assert len(files) <= most_files and len(passed) <= most_functions
