"""What the backends of serving engines share: the one call, over pages or packed keys, and its refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.attention import attention
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.explain import explain
from cutlass_fmha.dispatch.problem import typical_length


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **said: Any,
) -> Tensor:
    """``attention`` of packed queries [total_q, num_heads, head_dim], written to ``output`` if there is one.

    The longest lengths change with each step and a call of new numbers is prepared anew, so that they are
    rounded up to those that stand for their class. Nothing waits for the device.
    """
    found: Tensor = attention(
        query,
        key,
        value,
        scale=scale,
        causal=causal,
        max_seqlen_q=typical_length(max_seqlen_q),
        max_seqlen_k=typical_length(max_seqlen_k),
        out=output,
        **said,
    )
    return found


def why_not(
    capability: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    features: tuple[str, ...] = (),
) -> str | None:
    """Why no kernel of this build serves a model on a GPU of that compute capability; None where one does.

    features: names of ``dispatch.problem.FEATURES``, beside those of every batch. Asks neither CUDA nor the
    driver, so that a process may fork after it.
    """
    name = "a GPU"
    gpu = dataclasses.replace(devices.of_arch(89), name=name, capability=capability)
    if (own := devices.own_arch(gpu)) in devices.ARCHITECTURES:
        gpu = dataclasses.replace(devices.of_arch(own), name=name, capability=capability)
    try:
        found = explain(
            shape=(1, 16, 1, head_dim),
            seqlen_k=1024,
            dtype=dtype,
            features=("varlen", "lengths", "pages", *features),
            page_size=page_size,
            causal=True,
            device=gpu,
        )
    except (TypeError, ValueError) as error:
        return str(error)
    return None if found.winner is not None else found.note.removeprefix("nothing, because ")
