"""Humming, a library of 4-bit kernels compiled at first use (`humming-kernels`, Apache): an optional extra.

The codes are laid out by its own `transform_humming_weight`, which permutes words of 8 neighbouring columns on the
GPU: rows r … r + n of a weight become the columns 2r … 2(r + n) of the result, so blocks of rows can be stored in
place. Scales and zero points are ordered as in Marlin; 8 zero points make a word, in order.
"""

import importlib.util
import json
from typing import ClassVar

import torch
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, gpu_unsupported, join_nibbles, permute_scales


FEW_ROWS = 64
"""A call of no more compiles, at first use, the kernels for so many alone: 6 to 8 of the dozens that it would choose
among."""


class HummingInt4(PackedWeight):
    """`humming.ops.humming_gemm`, in bfloat16, with integer zero points."""

    name: ClassVar[str] = "humming"
    bits: ClassVar[int] = 4
    device_type: ClassVar[str] = "cuda"
    row_block: ClassVar[int] = 64
    package: ClassVar[str] = "humming-kernels"

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        from humming import dtypes
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config
        from humming.tune import get_heuristics_config

        self.max_rows = 16
        self.activation_dtype = torch.bfloat16
        schema = HummingWeightSchema(
            b_dtype=dtypes.uint4, weight_scale_group_size=layer.group, weight_scale_type="group", has_zero_point=True
        )
        self.config = prepare_layer_config(
            layer.out_features, layer.in_features, schema, torch_dtype=torch.bfloat16, device=layer.device
        )
        self.config_text = self.config.to_str()
        kernels = get_heuristics_config(self.config, device=layer.device)  # (rows above, rows up to, kernel) each
        self.few_rows_text = json.dumps([each for each in kernels if each[0] < FEW_ROWS])
        out, device = layer.out_features, layer.device
        codes = torch.empty(layer.in_features // 16, 2 * out, dtype=torch.int32, device=device)  # [in/16, 2 out]
        scales = torch.empty(layer.groups, out, dtype=torch.bfloat16, device=device)  # [groups, out], permuted
        zeros = torch.empty(layer.groups, out // 8, dtype=torch.int32, device=device)  # [groups, out/8], permuted
        # The kernel's programs count in it who came last; it is 0 again after each call.
        locks = torch.zeros(2048, dtype=torch.int32, device=device)  # [2048]
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("zeros", zeros, persistent=False)
        self.register_buffer("locks", locks, persistent=False)

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    locks: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.activation_dtype not in (None, torch.bfloat16):
            return f"activation_dtype={layer.activation_dtype}, and only torch.bfloat16 is offered"
        if layer.out_features % 64:
            return f"{layer.out_features} output features are no multiple of 64"
        if importlib.util.find_spec("humming") is None:
            return 'humming-kernels is not installed; "pip install spec-trl[humming]"'
        if (too_old := gpu_unsupported(layer, (8, 0))) is not None:
            return too_old
        if layer.out_features % 128 and gpu_unsupported(layer, (9, 0)) is None:
            return f"{layer.out_features} output features are no multiple of 128, which this GPU needs"
        return None

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        from humming.transform import transform_humming_weight

        assert rows.zeros is not None
        last_row = first_row + rows.codes.shape[0]
        words = join_nibbles([rows.codes[:, i::8] for i in range(8)])  # [rows, in/8]
        with torch.cuda.device_of(words):
            packed = transform_humming_weight(words, self.config.b_dtype, self.config.a_dtype, packed=True)
        self.codes[:, 2 * first_row : 2 * last_row] = packed  # [in/16, 2 rows]
        # Its functions for these send a permutation to the GPU at each call, and wait for it.
        self.scales[:, first_row:last_row] = permute_scales(rows.scales)  # [groups, rows]
        zeros = permute_scales(rows.zeros).int()  # [groups, rows]
        self.zeros[:, first_row // 8 : last_row // 8] = join_nibbles([zeros[:, i::8] for i in range(8)])

    def linear(self, x: Tensor) -> Tensor:
        from humming.ops import humming_gemm

        return humming_gemm(
            layer_config=self.config_text, inputs=x.contiguous(), weight=self.codes, weight_scale=self.scales,
            zero_point=self.zeros, locks=self.locks,
            tuning_config=self.few_rows_text if x.shape[0] <= FEW_ROWS else None,
        )  # [m, out]  # fmt: skip
