"""torch's scaled_dot_product_attention through this package: ``cutlass_fmha.sdpa``."""

from cutlass_fmha.torch_sdpa.override import sdpa

__all__ = ["sdpa"]
