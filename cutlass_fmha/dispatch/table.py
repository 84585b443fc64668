"""The table of compiled kernels, as selection reads it: no other list of rows exists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cutlass_fmha import _C

#: Families of rows that know no more than a diagonal.
PLAIN = ("plain", "few_query")
#: Those of float32, and of head dims above 256.
WIDE = ("wide", "wide_scored")
NO_KERNELS = (
    "this build of cutlass_fmha has no CUDA kernels (CUTLASS_FMHA_CUDA=OFF): install a wheel with CUDA, "
    "or rebuild it with `pip install . -C cmake.define.CUTLASS_FMHA_CUDA=ON`"
)


class Row:
    """A compiled kernel, with the attributes of ``_C.Row``: each question to that takes 150 ns.

    What rows of a family don't have raises AttributeError.
    """

    index: int
    name: str
    family: str
    arch: int
    dtype: str
    threads: int
    smem_bytes: int
    dependent_launch: bool
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    min_blocks: int
    mma: str
    takes_features: bool
    scored: bool
    writes_scores: bool
    groups: int
    tail: int
    alignment: int
    element_bytes: int
    kv_warps: int
    stages: int
    q_in_registers: bool
    ping_pong: bool
    reads_mask_bytes: bool
    reads_mask_bits: bool
    mask_words: Callable[[_C.AttentionParams], int]
    copy: str
    accumulates: bool
    example: bool

    def __init__(self, compiled: _C.Row) -> None:
        for name in Row.__annotations__:
            if hasattr(compiled, name):
                setattr(self, name, getattr(compiled, name))

    def __repr__(self) -> str:
        return f"<Row {self.name}>"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows, and what each architecture's were compiled for, where that says more than its number."""

    rows: tuple[Row, ...]
    compiled_for: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def architectures(self) -> Mapping[int, str]:
        """Those that there are rows for, and what these were compiled for: ``device.can_execute``."""
        compiled_for = dict(self.compiled_for)
        return {arch: compiled_for.get(arch, str(arch)) for arch in sorted({row.arch for row in self.rows})}

    @functools.cached_property
    def made_for(self) -> dict[tuple[object, ...], tuple[Row, ...]]:
        """A cache of ``eligibility``'s."""
        return {}

    def by_name(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise ValueError(
            f"{name!r} is not a row of this build; `python -m cutlass_fmha info --rows` lists its {len(self.rows)} rows"
        )


def _table(rows: list[_C.Row]) -> Table:
    compiled_for = _C.build_info().get("compiled_for", {})
    assert isinstance(compiled_for, dict)
    return Table(tuple(map(Row, rows)), tuple(compiled_for.items()))


@functools.cache
def this_build() -> Table:
    """The rows of attention in this build."""
    return _table(_C.rows())


@functools.cache
def backward() -> Table:
    """The rows that compute gradients."""
    return _table([row for row in _C.backward_rows() if row.family in ("backward", "backward_wide")])


@functools.cache
def query_products() -> frozenset[tuple[int, str, int]]:
    """(arch, dtype, head dim) of the rows that make dQ of what others write of dS."""
    rows = (row for row in _C.backward_rows() if row.family == "query_product")
    return frozenset((row.arch, row.dtype, row.head_dim) for row in rows)
