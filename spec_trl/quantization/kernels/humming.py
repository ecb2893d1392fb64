"""Humming, a library of 4-bit kernels compiled at first use (`humming-kernels`, Apache): an optional extra.

Its own `transform_humming_weight` lays out the codes. It permutes words of 8 neighbouring columns on the GPU, and rows
r … r + n of a weight become columns 2r … 2(r + n) of the result, so blocks of rows can be stored in place. Its
functions for scales and zero points send a permutation to the GPU at each call and wait for it: ours do not.
"""

import json

import torch
from torch import Tensor

from .base import LayerSpec, Package, gpu_unsupported, join_nibbles
from .fragments import FragmentInt4


FEW_ROWS = 64
"""A call with at most this many rows compiles, at first use, only the kernels for such calls: 6 to 8 instead of
dozens."""


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
