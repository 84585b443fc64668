"""Attention over NumPy arrays, beside the formula in NumPy. CuPy's and JAX's arrays go the same way.

python examples/arrays.py
"""

from __future__ import annotations

import numpy

from cutlass_fmha import attention


def main() -> None:
    generator = numpy.random.default_rng(0)
    q, k, v = generator.standard_normal((3, 2, 50, 4, 64), dtype=numpy.float32)
    keep = numpy.arange(50) < numpy.array([50, 30])[:, None]  # [batch, seqlen]: False for padding
    out = attention(q, k, v, mask=keep[:, None, None, :])

    scores = numpy.einsum("bihd,bjhd->bhij", q, k) / 64**0.5
    weights = numpy.exp(scores) * keep[:, None, None, :]
    weights /= weights.sum(-1, keepdims=True)
    distance = numpy.abs(out - numpy.einsum("bhij,bjhd->bihd", weights, v)).max()
    print(f"{type(out).__name__} of shape {out.shape}, {distance:.1e} from the formula")
    assert distance < 1e-5


if __name__ == "__main__":
    main()
