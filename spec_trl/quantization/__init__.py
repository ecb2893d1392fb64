"""Quantizes a copy of the policy: schemes, kernels, and the replacement of projections."""

from .linear import QuantizedLinear
from .quantized_copy import QuantizedNetwork, quantize_projections


__all__ = ["QuantizedLinear", "QuantizedNetwork", "quantize_projections"]
