"""Attention in a function that JAX compiles and differentiates, beside JAX's own.

    pip install jax
    python examples/jax_gradients.py

On JAX's GPU the kernels run; without one, the op's CPU backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cutlass_fmha import jax as fmha


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.float16 if on_gpu else jnp.float32
    q, k, v = (jax.random.normal(key, (2, 200, 4, 64)).astype(dtype) for key in keys)

    def loss(attend):  # type: ignore[no-untyped-def]
        return jax.jit(jax.value_and_grad(lambda *x: attend(*x).astype(jnp.float32).var(), (0, 1, 2)))

    value, gradients = loss(lambda *x: fmha.attention(*x, causal=True))(q, k, v)
    theirs, expected = loss(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))(q, k, v)
    apart = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(gradients, expected, strict=True))
    print(f"on the {jax.default_backend()}: loss {value:.6f}, JAX's own {theirs:.6f}")
    print(f"gradients are {apart:.1e} apart")
    assert apart < (1e-2 if on_gpu else 1e-4) and abs(value - theirs) < 1e-3 * theirs


if __name__ == "__main__":
    main()
