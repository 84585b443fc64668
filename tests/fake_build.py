"""A build that exists on every machine: rows like the manifest's."""

import itertools
from dataclasses import dataclass
from typing import Any

from cutlass_fmha.dispatch.device import PRESETS, Device
from cutlass_fmha.dispatch.table import Table

#: Those that the default build has code for.
GPUS = [name for name, gpu in PRESETS.items() if gpu.capability >= (8, 9)]
L4 = Device("NVIDIA L4", (8, 9), 58, 99 * 1024)


@dataclass(frozen=True)
class Row:
    """The attributes of ``_C.Row``."""

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
    takes_features: bool = False
    ranged: bool = False
    score_mod: bool = False
    masked: bool = False
    value_dim: int = 0
    element_bytes: int = 2
    reads_mask_bytes: bool = True
    reads_mask_bits: bool = True

    @property
    def scored(self) -> bool:
        return self.takes_features and not (self.ranged or self.score_mod or self.masked)

    @property
    def family(self) -> str:
        if self.takes_features and not self.scored:
            return "ranged" if self.ranged else "masked" if self.masked else "score_mod"
        return "_".join(["few_query"] * (self.kv_warps > 1) + ["scored"] * self.scored) or "plain"

    @property
    def head_dim_v(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def name(self) -> str:
        dtype, family = self.dtype.replace("float", "f"), "scored" if self.scored else self.family
        words = [f"fwd_sm{self.arch}_{dtype}_d{self.head_dim}" + f"v{self.value_dim}" * bool(self.value_dim)]
        words += [f"m{self.tile_m}n{self.tile_n}w{self.warps}" + f"k{self.kv_warps}" * (self.kv_warps > 1)]
        words += [self.copy] * (self.copy in ("element", "tma")) + ["pdl"] * self.dependent_launch
        return "_".join([*words, *[family] * self.takes_features])

    @property
    def alignment(self) -> int:
        return 2 if self.copy == "element" or self.scored else 16


#: (tile_m, tile_n, warps, kv_warps, stages) of the manifest's few-query rows.
FEW_QUERY = {
    32: [(32, 64, 8, 8, 2)],
    64: [(16, 32, 4, 4, 2), (32, 32, 8, 8, 2), (32, 32, 4, 4, 2)],
    128: [(16, 16, 8, 8, 2), (32, 32, 8, 4, 1)],
}
#: (head_dim, value_dim, tile_m, tile_n, warps, kv_warps, stages) of scored rows.
SCORED = (
    *((64, 0, 64, 64, 4, 1, 2), (64, 0, 16, 16, 4, 4, 3), (128, 0, 64, 32, 4, 1, 2), (128, 0, 16, 16, 4, 4, 2)),
    *((192, 128, 64, 32, 4, 1, 2), (256, 0, 64, 32, 4, 1, 2)),
)


def make_build(archs: tuple[int, ...] = (89, 90, 120), compiled_for: dict[int, str] | None = None) -> Table:
    """Of each architecture, dtype and head dim a large, a small, an element and few-query rows; scored rows."""
    rows: list[Row] = []

    def add(*columns: Any, **form: Any) -> None:
        rows.append(Row(len(rows), *columns, **form))

    for arch, dtype in itertools.product(archs, ("float16", "bfloat16")):
        for dim in (32, 64, 128):
            add(arch, dtype, dim, 256, 64, 8, "cp_async_16", 768 * dim, ping_pong=True)
            add(arch, dtype, dim, 64, 64, 4, "cp_async_16", 384 * dim, min_blocks=2)
            add(arch, dtype, dim, 64, 64, 4, "element", 384 * dim, min_blocks=2)
            for *tile, kv_warps, stages in FEW_QUERY[dim]:
                copied = ("ldg_16", kv_warps * tile[0] * (4 * dim + 8), kv_warps, stages)
                add(arch, dtype, dim, *tile, *copied, dependent_launch=arch >= 90)
        for dim, value_dim, *tile, kv_warps, stages in SCORED:
            loaded = stages * tile[1] * kv_warps * (dim + (value_dim or dim))
            columns = (*tile, "cp_async_16", 2 * (tile[0] * dim + loaded), kv_warps, stages)
            add(arch, dtype, dim, *columns, takes_features=True, value_dim=value_dim, q_in_registers=dim < 256)
    targets = {89: "80,89"} if compiled_for is None else compiled_for
    return Table(tuple(rows), tuple(targets.items()))  # type: ignore[arg-type]
