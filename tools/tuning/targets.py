"""What is tuned for: sets of the benchmark's cases that one kernel has to serve."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutlass_fmha.bench.cases import Case


#: The benchmark's cases, from their file: the package can only be imported once it is built.
CASES = Path(__file__).resolve().parents[2] / "cutlass_fmha" / "bench" / "cases.py"
bench_cases = SimpleNamespace(**runpy.run_path(str(CASES), run_name="cutlass_fmha_bench_cases"))

_SHAPE = re.compile(
    r"b(?P<batch>\d+)_h(?P<heads>\d+)(?:-(?P<heads_kv>\d+))?_(?:s(?P<s>\d+)|q(?P<q>\d+)_k(?P<k>\d+))"
    r"_d(?P<dim>\d+)_(?P<dtype>fp16|bf16)(?P<causal>_causal)?"
)
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Target:
    """Cases of one head dim whose times count together. A candidate is judged on their geometric mean."""

    name: str
    cases: tuple[Case, ...]

    @property
    def head_dim(self) -> int:
        return self.cases[0].head_dim

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({case.dtype for case in self.cases}))


def parse_shape(text: str) -> Case:
    """A case from its name: ``b4_h32_s4096_d64_bf16_causal``, ``b1_h32-8_q1_k8192_d128_fp16``.

    Raises ValueError for anything else, and for sizes that are no problem.
    """
    match = _SHAPE.fullmatch(text)
    if not match:
        raise ValueError(
            f"{text!r} is no shape: write it as b4_h32-8_s4096_d64_bf16_causal or b1_h8_q1_k512_d64_fp16"
        )
    g = match.groupdict()
    heads = int(g["heads"])
    case: Case = bench_cases.Case(
        "shape",
        batch=int(g["batch"]),
        num_heads=heads,
        num_heads_kv=int(g["heads_kv"] or heads),
        seqlen_q=int(g["s"] or g["q"]),
        seqlen_k=int(g["s"] or g["k"]),
        head_dim=int(g["dim"]),
        dtype=_DTYPES[g["dtype"]],
        causal=bool(g["causal"]),
    )
    sizes = (case.batch, case.num_heads, case.num_heads_kv, case.seqlen_q, case.seqlen_k)
    if min(sizes) < 1 or case.num_heads % case.num_heads_kv:
        raise ValueError(
            f"{text!r} is no problem: sizes are at least 1, and heads a multiple of those of K and V"
        )
    return case


def make_targets(
    presets: Sequence[str], shapes: Iterable[str], head_dims: Sequence[int] = (), apart: bool = False
) -> list[Target]:
    """Sets of cases: by head dim and group, or each case for itself (``apart``), in the order given.

    presets: the benchmark's groups or cases; all dense ones when neither presets nor shapes are given.
    head_dims: only these. Raises ValueError for an unknown preset, a bad shape, and when nothing is left.
    """
    chosen = [parse_shape(shape) for shape in shapes]
    if presets or not chosen:
        chosen = [*bench_cases.select_cases(list(presets) or ["dense"]), *chosen]
    chosen = [case for case in dict.fromkeys(chosen) if not head_dims or case.head_dim in head_dims]
    if not chosen:
        raise ValueError("no case is left to tune for: see --preset, --shape and --head-dim")
    sets: dict[str, list[Case]] = {}
    for case in chosen:
        sets.setdefault(case.name if apart else f"d{case.head_dim}-{case.group}", []).append(case)
    return [Target(name, tuple(cases)) for name, cases in sets.items()]
