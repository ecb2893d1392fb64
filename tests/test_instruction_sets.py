"""What is exact, once more as on processors with fewer instructions than this one, whatever this one is.

ONEDNN_MAX_CPU_ISA bounds oneDNN and our C++ (`native_code.py`), which both leave out what a processor lacks anyway.
ATEN_CPU_CAPABILITY names torch's own kernels, which torch takes without asking the processor.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spec_trl.native.native_code import compiler


pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the switches are those of x86-64"),
]
TESTS = Path(__file__).parent
FILES = "generation/test_exactness.py", "generation/engine/network/test_products.py", "native/test_cpu_products.py"
FILES += ("test_dense_layers.py",)


@pytest.mark.parametrize(
    ("most", "torchs"), [("AVX2", "avx2"), ("AVX512_CORE", "avx512"), ("AVX512_CORE_BF16", "avx512")]
)
def test_exact_with(most: str, torchs: str) -> None:
    """Runs the tests marked `instructions`."""
    if torch.backends.cpu.get_cpu_capability() not in (torchs.upper(), "AVX512"):
        pytest.skip(f"no {torchs}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"ONEDNN_MAX_CPU_ISA": most, "ATEN_CPU_CAPABILITY": torchs}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "instructions"]
    command += [str(TESTS / file) for file in FILES]
    ran = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-5000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) >= 20 and "skipped" not in ran.stdout
