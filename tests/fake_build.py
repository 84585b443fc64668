"""A build that exists on every machine: rows like the manifest's, and a ``_C.run`` that computes in Python.

The fake kernel knows what the binding promises to a real one and nothing else: addresses, sizes, strides in
elements, a scale, a diagonal. It reads and writes plain memory, so what Python packs is tested against what
the tensors hold.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from cutlass_fmha.device import Device
from cutlass_fmha.select import Build

L4 = Device("NVIDIA L4", (8, 9), 58, 99 * 1024)


@dataclass(frozen=True)
class Row:
    """The attributes of ``_C.Template``."""

    index: int
    arch: int
    dtype: str
    head_dim: int
    tile_m: int
    tile_n: int
    warps: int
    copy: str
    smem_bytes: int
    kv_warps: int = 1
    stages: int = 2
    min_blocks: int = 1
    q_in_registers: bool = True
    ping_pong: bool = False
    dependent_launch: bool = False
    general: bool = False
    value_dim: int = 0

    @property
    def head_dim_v(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def name(self) -> str:
        short = {"float16": "f16", "bfloat16": "bf16"}[self.dtype]
        tile = f"m{self.tile_m}n{self.tile_n}w{self.warps}"
        suffix = f"k{self.kv_warps}" if self.kv_warps > 1 else ""
        suffix += f"_{self.copy}" if self.copy in ("element", "tma") else ""
        suffix += "_pdl" if self.dependent_launch else ""
        suffix += "_general" if self.general else ""
        dims = f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else "")
        return f"fwd_sm{self.arch}_{short}_{dims}_{tile}{suffix}"

    @property
    def alignment(self) -> int:
        return 2 if self.copy == "element" or self.general else 16


#: (tile_m, tile_n, warps, kv_warps, stages) of the manifest's split rows.
SPLIT = {
    32: [(32, 64, 8, 8, 2)],
    64: [(16, 32, 4, 4, 2), (32, 32, 8, 8, 2), (32, 32, 4, 4, 2)],
    128: [(16, 16, 8, 8, 2), (32, 32, 8, 4, 1)],
}


#: (head_dim, value_dim, tile_m, tile_n, warps, kv_warps, stages) of general rows.
GENERAL = [
    (64, 0, 64, 64, 4, 1, 2),
    (64, 0, 16, 16, 4, 4, 3),
    (128, 0, 64, 32, 4, 1, 2),
    (128, 0, 16, 16, 4, 4, 2),
    (192, 128, 64, 32, 4, 1, 2),
    (256, 0, 64, 32, 4, 1, 2),
]


def make_build(
    archs: tuple[int, ...] = (89, 90, 120), compiled_for: dict[int, str] | None = None, general: bool = True
) -> Build:
    """A large tile, a small one, an element row and split rows for each architecture, dtype and head dim.

    And general rows, if ``general``.
    """
    rows: list[Row] = []
    for arch in archs:
        for dtype in ("float16", "bfloat16"):
            for head_dim in (32, 64, 128):
                key = (arch, dtype, head_dim)
                rows += [
                    Row(len(rows), *key, 256, 64, 8, "cp_async_16", 768 * head_dim, ping_pong=True),
                    Row(len(rows) + 1, *key, 64, 64, 4, "cp_async_16", 384 * head_dim, min_blocks=2),
                    Row(len(rows) + 2, *key, 64, 64, 4, "element", 384 * head_dim, min_blocks=2),
                ]
                for tile_m, tile_n, warps, kv_warps, stages in SPLIT[head_dim]:
                    smem_bytes = kv_warps * tile_m * (4 * head_dim + 8)
                    tile = (tile_m, tile_n, warps, "ldg_16", smem_bytes, kv_warps, stages)
                    rows.append(Row(len(rows), *key, *tile, dependent_launch=arch >= 90))
            for head_dim, value_dim, tile_m, tile_n, warps, kv_warps, stages in GENERAL if general else ():
                loaded = stages * tile_n * kv_warps * (head_dim + (value_dim or head_dim))
                tile = (
                    tile_m,
                    tile_n,
                    warps,
                    "cp_async_16",
                    2 * (tile_m * head_dim + loaded),
                    kv_warps,
                    stages,
                )
                form = {"general": True, "value_dim": value_dim, "q_in_registers": head_dim < 256}
                rows.append(Row(len(rows), arch, dtype, head_dim, *tile, **form))
    return Build(tuple(rows), tuple((compiled_for or {}).items()))  # type: ignore[arg-type]


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class FakeKernels:
    """Stands in for ``_C.run``: launches are computed at once, in fp32, and remembered."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.launches: list[tuple] = []

    def __call__(self, row, pointers, sizes, strides, scale, diagonal, device, stream) -> None:
        self.launches.append((row, pointers, sizes, strides, scale, diagonal, device, stream))
        template = self.build.templates[row]
        dtype = getattr(torch, template.dtype)
        batch, seqlen_q, seqlen_k, heads, heads_kv = sizes
        shapes = [(batch, seqlen_q, heads), *[(batch, seqlen_k, heads_kv)] * 2, (batch, seqlen_q, heads)]
        q, k, v, o = (
            _at(pointers[i], dtype, (*shapes[i], template.head_dim), (*strides[3 * i : 3 * i + 3], 1))
            for i in range(4)
        )
        k, v = (x.float().repeat_interleave(heads // heads_kv, dim=2) for x in (k, v))
        scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k)
        if diagonal is not None:
            scores.masked_fill_(torch.ones(seqlen_q, seqlen_k).tril(diagonal) == 0, -torch.inf)
        lse = scores.logsumexp(-1)
        p = scores.softmax(-1).nan_to_num(0.0)
        o.copy_(torch.einsum("bhqk,bkhd->bqhd", p, v))
        if pointers[4]:
            contiguous = (heads * seqlen_q, seqlen_q, 1)
            _at(pointers[4], torch.float32, (batch, heads, seqlen_q), contiguous).copy_(lse)
