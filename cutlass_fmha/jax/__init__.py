"""Attention of JAX arrays as a call of XLA's foreign function interface: under ``jax.jit``, with gradients.

    from cutlass_fmha import jax as fmha
    out = fmha.attention(q, k, v, causal=True)     # [batch, seqlen, num_heads, head_dim]

Imports jax, which nothing else of the package does. See docs/jax.md.
"""

try:
    import jax.ffi as _ffi  # noqa: F401
except ImportError as _error:
    raise ImportError(f"cutlass_fmha.jax needs jax 0.5 or newer (pip install jax): {_error}") from _error

from cutlass_fmha.jax.traced import attention

__all__ = ["attention"]
