"""Multiplies 4-bit weights by Marlin or Humming, two optional extras.

    codes   int32 [in / 16, 2 * stored_rows], in an order of the kernel
    scales  bfloat16 [groups, stored_rows]: of 64 rows, those with the same row % 8 lie together
    zeros   int32 [groups, stored_rows / 8]: permuted like the scales, then 8 to a word in an order of the kernel

Rows of the weight are padded to `stored_rows` with scale 0.

Marlin (Frantar et al. 2024), in the edition of vLLM, comes as source with `gptqmodel`, never imported: it
patches safetensors, triton and transformers. Its CUDA files are copied to the user's cache, completed by their own
generator, and compiled with torch's extension builder (some minutes, once).

Humming (`humming-kernels`, Apache) compiles its kernels at first use. Its `transform_humming_weight` lays out the
codes: it permutes words of 8 neighbouring columns on the GPU, and rows r … r + n of a weight become columns 2r … 2(r +
n) of the result, so blocks of rows can be stored in place. Its functions for scales and zero points copy a permutation
to the GPU in every call and synchronize: ours do not.
"""

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from abc import abstractmethod
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...user_cache import cache_directory, is_foreign
from .base import LayerSpec, Package, PackedWeight, QuantizedRows, gpu_unsupported, join_nibbles, pad_rows


UINT4 = 1125899906843648  # the kernel's number for unsigned 4-bit codes with zero points
SOURCES = ("marlin_torch_bf16.cpp", "gptq_marlin_bf16.cu", "gptq_marlin_repack.cu", "awq_marlin_repack.cu")
FEW_ROWS = 64
"""A call with at most this many rows compiles only kernels for such calls: 6 to 8 instead of dozens."""


class FragmentInt4(PackedWeight):
    """Stores scales and zero points; the subclass defines the order of the codes, and the product.

    Args:
        stored_rows: rows with padding; a multiple of 64.
        locks: number of counters that let the kernel's programs find the last one.

    Attributes:
        zero_order: the zero point, of 8 neighbouring ones, in each nibble of a word, from the lowest on.
    """

    bits = 4
    device_type = "cuda"
    activation_dtypes = (torch.bfloat16,)
    row_block = 64
    zero_order: ClassVar[tuple[int, ...]]

    def __init__(self, layer: LayerSpec, stored_rows: int, locks: int) -> None:
        super().__init__(layer)
        self.codes = self.allocate(layer.in_features // 16, 2 * stored_rows, dtype=torch.int32)
        self.scales = self.allocate(layer.groups, stored_rows, dtype=torch.bfloat16)
        self.zeros = self.allocate(layer.groups, stored_rows // 8, dtype=torch.int32)
        self.locks = self.allocate(locks, dtype=torch.int32)  # 0 again after a call

    @abstractmethod
    def order_codes(self, codes: Tensor) -> Tensor:
        """int32 [rows, in] of codes → int32 [in/16, 2 rows] of words; 64 divides the rows."""

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        rows = pad_rows(rows, 64)
        first, last = first_row, first_row + len(rows.codes)
        self.codes[:, 2 * first : 2 * last] = self.order_codes(rows.codes)  # [in/16, 2 rows]
        self.scales[:, first:last] = permute_scales(rows.scales)  # [groups, rows]
        zeros = permute_scales(rows.zeros).int()  # [groups, rows]
        words = join_nibbles([zeros[:, place::8] for place in self.zero_order])  # [groups, rows/8]
        self.zeros[:, first // 8 : last // 8] = words


def permute_scales(values: Tensor) -> Tensor:
    """[rows, groups] → [groups, rows], of each 64 rows those with the same row % 8 together."""
    rows, groups = values.shape
    return values.view(rows // 64, 8, 8, groups).permute(3, 0, 2, 1).reshape(groups, rows)  # [groups, rows]


class MarlinInt4(FragmentInt4):
    """`gptq_marlin_gemm_bf16` with integer zero points; sums in fp32.

    For each tile of 16 columns and 64 rows of the weight, the codes are 128 words: nibble 4 * (column % 2) + 2 * (row
    // 8 % 2) + column // 8 of word (row % 8, column % 8 // 2, row // 16) is the code; row and column within the tile.
    """

    name = "marlin"
    package = Package("gptqmodel", "gptqmodel_ext", "spec-trl[marlin]")
    multiples = (1, 64)
    zero_order = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, layer: LayerSpec) -> None:
        programs = 128
        if layer.device.type == "cuda":
            load_marlin()
            programs = max(programs, torch.cuda.get_device_properties(layer.device).multi_processor_count)
        # The kernel's tiles are 64 rows by 128 columns or 128 rows by 64 columns.
        tile = 64 if layer.in_features % 128 == 0 else 128
        super().__init__(layer, -(-layer.out_features // tile) * tile, locks=programs)

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.groups == 1:  # then the layout of the scales is another one
            return "a row is a single group"
        reason = super().unsupported(layer)
        if reason is None:
            from torch.utils.cpp_extension import CUDA_HOME

            if CUDA_HOME is None:
                return "nvcc, which compiles it, is not found; install the CUDA toolkit or set CUDA_HOME"
        return reason

    def order_codes(self, codes: Tensor) -> Tensor:
        rows, columns = codes.shape
        # row = 64 tile + 16 warp + 8 b + lane row; column = 16 tile + 8 c + 2 lane column + a
        parts = codes.view(rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)  # [tiles, warp, b, row, tiles, c, column, a]
        nibbles = [parts[:, :, b, :, :, c, :, a] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
        words = join_nibbles(nibbles)  # [row tiles, warp, lane row, column tiles, lane column]
        return words.permute(3, 0, 2, 4, 1).reshape(columns // 16, 2 * rows)  # [in/16, 2 rows]

    def linear(self, x: Tensor) -> Tensor:
        y = torch.ops.spec_trl.marlin_int4_mm(x.contiguous(), self.codes, self.scales, self.zeros, self.locks)
        return y[:, : self.layer.out_features]  # [m, out]


class HummingInt4(FragmentInt4):
    """`humming.ops.humming_gemm`, in bfloat16, with integer zero points."""

    name = "humming"
    package = Package("humming-kernels", "humming", "spec-trl[humming]")
    multiples = (64, 1)
    zero_order = (0, 1, 2, 3, 4, 5, 6, 7)

    def __init__(self, layer: LayerSpec) -> None:
        from humming import dtypes
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config
        from humming.tune import get_heuristics_config

        super().__init__(layer, layer.out_features, locks=2048)
        schema = HummingWeightSchema(
            b_dtype=dtypes.uint4, weight_scale_group_size=layer.group, weight_scale_type="group", has_zero_point=True
        )
        self.config = prepare_layer_config(
            layer.out_features, layer.in_features, schema, torch_dtype=torch.bfloat16, device=layer.device
        )
        self.config_text = self.config.to_str()
        kernels = get_heuristics_config(self.config, device=layer.device)  # (rows above, rows up to, kernel) each
        self.few_rows_text = json.dumps([each for each in kernels if each[0] < FEW_ROWS])

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        reason = super().unsupported(layer)
        if reason is None and layer.out_features % 128 and gpu_unsupported(layer, (9, 0)) is None:
            return f"{layer.out_features} output features are no multiple of 128, which this GPU needs"
        return reason

    def order_codes(self, codes: Tensor) -> Tensor:
        from humming.transform import transform_humming_weight

        words = join_nibbles([codes[:, i::8] for i in range(8)])  # [rows, in/8]
        with torch.cuda.device_of(words):
            return transform_humming_weight(words, self.config.b_dtype, self.config.a_dtype, packed=True)

    def linear(self, x: Tensor) -> Tensor:
        from humming.ops import humming_gemm

        return humming_gemm(
            layer_config=self.config_text, inputs=x.contiguous(), weight=self.codes, weight_scale=self.scales,
            zero_point=self.zeros, locks=self.locks,
            tuning_config=self.few_rows_text if x.shape[0] <= FEW_ROWS else None,
        )  # [m, out]  # fmt: skip


@functools.cache
def load_marlin() -> None:
    """Registers `torch.ops.gptqmodel_marlin_bf16`, compiled now or by an earlier process; raises RuntimeError if its
    sources cannot be completed or compiled."""
    if hasattr(torch.ops.gptqmodel_marlin_bf16, "gptq_marlin_gemm_bf16"):  # gptqmodel has registered it
        return
    from torch.utils import cpp_extension

    package = importlib.util.find_spec("gptqmodel_ext")
    assert package is not None and package.origin is not None
    nvcc = str(Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc")
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    name = f"marlin-{version('gptqmodel')}-torch-{torch.__version__}-cuda-{torch.version.cuda}-sm{capability}"
    home = cache_directory() / name
    sources = copy_sources(Path(package.origin).parent / "marlin", home / "source")
    objects = home / "build"
    objects.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-DENABLE_BF16"]
    cuda_flags = [*flags, "-diag-suppress=179,39,177"]
    # The kernels are templates that one file instantiates and another calls; newer compilers hide them by default.
    visible = "-static-global-template-stub"
    if visible in subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout:
        cuda_flags.append(f"{visible}=false")
    files = [*(sources / name for name in SOURCES), *sorted(sources.glob("kernel_bf16_*.cu"))]
    cpp_extension.load(
        name="spec_trl_marlin", sources=[str(file) for file in files], extra_cflags=flags,
        extra_cuda_cflags=cuda_flags, extra_include_paths=[str(sources)], build_directory=str(objects),
        is_python_module=False,
    )  # fmt: skip


def copy_sources(installed: Path, to: Path) -> Path:
    """Copies the folder `installed` to `to`, unless it exists (newer files would be compiled again), and completes the
    copy; returns `to`. Raises RuntimeError if the generator fails, or another user owns a folder above `to`."""
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(map(is_foreign, (to.parent.parent, to.parent))):
        raise RuntimeError(f"another user owns {to.parent}: what is compiled there is code")
    if to.exists():
        return to
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        copied = Path(folder) / "source"
        shutil.copytree(installed, copied)
        done = subprocess.run(
            [sys.executable, "generate_kernels.py"], cwd=copied, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the generator of {installed} failed: {done.stderr.strip()[-500:]}")
        try:
            copied.rename(to)
        except OSError:  # another rank was faster
            if not to.exists():
                raise
    return to


@torch.library.custom_op("spec_trl::marlin_int4_mm", mutates_args=("workspace",))
def marlin_int4_mm(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, workspace: Tensor) -> Tensor:
    """x [m, in] bfloat16 times a weight in the layout of `MarlinInt4` → [m, stored_rows] bfloat16."""
    multiply = torch.ops.gptqmodel_marlin_bf16.gptq_marlin_gemm_bf16
    m, k, n = x.shape[0], x.shape[1], scales.shape[1]
    no_bias = no_global_scale = no_order = None
    full_k, atomic_adds, fp32_sums, float_zeros = True, False, True, False
    return multiply(
        x, None, codes, no_bias, scales, no_global_scale, zeros, no_order, no_order, workspace, UINT4, m, n, k,
        full_k, atomic_adds, fp32_sums, float_zeros,
    )  # fmt: skip


@marlin_int4_mm.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, workspace: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])
