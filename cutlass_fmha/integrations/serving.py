"""What the backends of serving engines share: why a model is refused."""

from __future__ import annotations

import dataclasses

import torch

from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.explain import explain
from cutlass_fmha.dispatch.table import WIDE


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
    if found.winner is None:
        return found.note.removeprefix("nothing, because ")
    row = next(verdict.row for verdict in found.rows if verdict.row.name == found.winner)
    if row.family in WIDE and head_dim * row.element_bytes % row.alignment:
        needed = row.alignment // row.element_bytes
        return (
            f"{row.name} would copy the whole cache at each call: head dims must be multiples of {needed}, "
            f"got {head_dim}"
        )
    return None
