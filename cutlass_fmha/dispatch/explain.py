"""``explain``: what selection makes of a problem, row by row, on the GPU that is here or on another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast
from cutlass_fmha.arguments import check, refusal
from cutlass_fmha.arguments.check import integer
from cutlass_fmha.arguments.check_features import check_numbers
from cutlass_fmha.arguments.op_arguments import op_arguments, window_sides
from cutlass_fmha.cost import store
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import gradients
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.choose import choose, contenders, predicted_us, price
from cutlass_fmha.dispatch.describe import Call, describe, window_of
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.eligibility import irrelevance, reasons
from cutlass_fmha.dispatch.problem import FEATURES, FULL_ALIGNMENT, Problem
from cutlass_fmha.dispatch.table import WIDE, Row, Table
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import NO_FEATURES, Features


@dataclass(frozen=True)
class Verdict:
    """A row's line in an explanation. ``predicted_us`` is None for a row that is not eligible.

    ``contender`` is False of an eligible row that is left out of the choice (``choose.contenders``).
    ``irrelevance``: what a row is for that the problem isn't (``eligibility.irrelevance``). ``measured_us``:
    the median of what it took on this machine's GPU, None unless that was asked for.
    """

    row: Row
    reasons: tuple[str, ...]
    predicted_us: float | None
    measured_us: float | None = None
    contender: bool = True
    irrelevance: tuple[str, str] | None = None

    @property
    def eligible(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Explanation:
    """What runs a problem on a device, and why. Print it for the table.

    ``device`` None is the CPU. ``rows`` has the eligible rows first, cheapest first. ``winner`` is the name
    of the row that runs, None when none does; ``note`` says in a sentence what runs and how it was chosen, or
    why nothing does. ``costs`` says where the predicted costs come from. ``all_rows``: whether the table has
    the irrelevant rows one by one, too, in place of a line for each kind.
    """

    problem: Problem
    device: Device | None
    rows: tuple[Verdict, ...]
    winner: str | None
    note: str
    costs: str | None = None
    all_rows: bool = False

    @property
    def measured(self) -> bool:
        return any(verdict.measured_us is not None for verdict in self.rows)

    @property
    def lost(self) -> float | None:
        """What the winner takes beyond the best row, relative to it; None when nothing was measured."""
        times = {v.row.name: v.measured_us for v in self.rows if v.measured_us is not None}
        if self.winner is None or not times:
            return None
        return times[self.winner] / min(times.values()) - 1

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Lines, the table's cells with those that name its columns first, and the lines after it."""
        shown = [v for v in self.rows if self.all_rows or v.irrelevance is None]
        before = [f"problem: {self.problem}", f"device:  {self.device or 'CPU'}"]
        if self.costs is not None:
            before.append(f"costs:   {self.costs}")
        cells = [["  row", "predicted", *["measured"] * self.measured, ""], *map(self._cells, shown)]
        after = []
        if len(shown) < len(self.rows):
            irrelevant = Counter(v.irrelevance for v in self.rows if v.irrelevance is not None)
            after += ["", *(f"  {line}" for line in refusal.summary(irrelevant))]
            after.append("  (all_rows=True, or --all, lists them)")
        after += ["", f"runs: {self.note}"]
        if self.lost is not None:
            after.append(f"measured: {self._judgement(self.lost)}")
        return before, cells if shown else [], after

    def __str__(self) -> str:
        before, table, after = self.parts()
        width = max((len(cells[0]) for cells in table), default=0)
        lines = [
            f"{row:<{width}}  {'  '.join(f'{time:>12}' for time in times)}  {verdict}".rstrip()
            for row, *times, verdict in table
        ]
        return "\n".join([*before, *[""] * bool(lines), *lines, *after])

    def _cells(self, verdict: Verdict) -> list[str]:
        mark = ">" if verdict.row.name == self.winner else " "
        times = [verdict.predicted_us, *[verdict.measured_us] * self.measured]
        said = "eligible" if verdict.contender else "eligible, as a last resort"
        if not verdict.eligible:
            said = f"no: {'; '.join(verdict.reasons)}"
        told = ("-" if time is None else f"{time:.1f} us" for time in times)
        return [f"{mark} {verdict.row.name}", *told, said]

    def _judgement(self, lost: float) -> str:
        best = min((v for v in self.rows if v.measured_us is not None), key=lambda v: v.measured_us or 0.0)
        if best.row.name == self.winner:
            return "no eligible row is faster"
        return f"{best.row.name} is the fastest; the row that runs takes {lost:.1%} longer"


def explain(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool | str = False,
    layout: str = "bshd",
    scale: float | None = None,
    return_lse: bool = False,
    row: str | None = None,
    shape: Sequence[int] | None = None,
    seqlen_k: int | None = None,
    num_heads_kv: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    alignment: int = FULL_ALIGNMENT,
    device: str | int | torch.device | Device | None = None,
    arch: int | None = None,
    sm_count: int | None = None,
    measure: bool = False,
    all_rows: bool = False,
    head_dim_v: int | None = None,
    features: Sequence[str] = (),
    backward: bool = False,
    **keywords: Any,
) -> Explanation:
    """Which kernel runs a problem on a device, and what speaks against each of the others.

    Either ``explain(q, k, v, causal=..., layout=..., row=..., window=..., ...)`` as ``attention`` is
    called, or ``explain(shape=(batch, seqlen_q, num_heads, head_dim), ...)`` with ``seqlen_k``,
    ``num_heads_kv`` and ``head_dim_v`` where they differ from seqlen_q, num_heads and head_dim, ``dtype``,
    and ``alignment``: what pointers and strides are multiples of, in bytes.

    Args:
        scale, return_lse: as ``attention`` takes them; no choice depends on them.
        features: for a shape, what it comes with: those of ``dispatch.problem.FEATURES``, as "bias".
        keywords: for tensors, those of ``attention``; for a shape ``window`` (left, right), ``block_size``
            (queries, keys) of a block mask, ``page_size`` and ``num_splits``.
        device: "cuda", "cuda:1", "cpu", "sm_89", "sm_89:58" (with its SM count) or a name: "l4", "l40s",
            "rtx4090", "h200", "rtx5080", "rtx5090", "rtxpro6000". That of the tensors when None; for a shape
            the first CUDA device, or the CPU without one. No GPU is needed for a named one.
        arch, sm_count: the same as ``device="sm_<arch>:<sm_count>"``.
        measure: also time every eligible row, on the CUDA device of this machine that ``device`` says: random
            inputs of the problem's sizes, contiguous as [batch, seqlen, num_heads, head_dim].
        backward: which kernel computes the gradients, that of a bias too where ``bias`` requires one; with
            ``deterministic`` and ``deterministic_workspace`` as ``attention`` takes them.
        all_rows: print the rows for other architectures, dtypes and head dims one by one, too.

    Raises TypeError or ValueError, in a sentence, for arguments that describe no problem or no device.
    """
    causal_name = check.causal_name(causal)
    check.layout_name(layout)
    check.flag("return_lse", return_lse)
    if scale is not None:
        check.finite_scale(scale)
    if shape is not None:
        if q is not None or k is not None or v is not None:
            raise TypeError("explain takes tensors or a shape, got both")
        problem = problem_of_shape(shape, seqlen_k, num_heads_kv, dtype, causal_name, alignment)
        deterministic = backward and bool(keywords.pop("deterministic", False))
        most = keywords.pop("deterministic_workspace", None) if backward else None
        problem = _with_features(problem, head_dim_v, features, keywords)
        default: str | torch.device | None = None
    else:
        if q is None or k is None or v is None:
            raise TypeError("explain needs q, k and v, or a shape (batch, seqlen_q, num_heads, head_dim)")
        if features or head_dim_v is not None:
            raise TypeError("features and head_dim_v describe a shape: with tensors, pass what attention takes")
        call = _call_of_tensors((q, k, v), causal_name, layout, keywords)
        problem, sizes = call.problem, call.sizes
        deterministic, most = bool(keywords.get("deterministic")), keywords.get("deterministic_workspace")
        default = q.device
    if arch is not None or sm_count is not None:
        if device is not None or arch is None:
            raise TypeError("explain takes arch with or without sm_count, or device, but not both")
        device = devices.of_arch(arch, sm_count)
    if device is None:  # the driver is asked only now: it may be too old to answer
        device = default or ("cuda" if _C.device_count() else "cpu")
    if backward:
        if measure:
            raise ValueError("explain measures no backward: python -m cutlass_fmha bench --preset backward does")
        if most is not None:
            integer("deterministic_workspace", most)
        check_numbers(NO_FEATURES._replace(deterministic_workspace=most))
        bias = keywords.get("bias")
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, bias)]
        # A launch copies what is not aligned, and nobody orders what nobody wants of q.
        aligned = replace(problem, alignment=FULL_ALIGNMENT, bias_gradient=wanted[3])
        ordered = deterministic and (wanted[0] or not any(wanted))
        found = explain_gradients(aligned, resolve(device), row, ordered, most)
        if isinstance(bias, Tensor) and wanted[3] and found.winner is not None:
            whole = (sizes.batch, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k)
            try:
                gradients.bias_sums(tuple(bias.shape), whole, deterministic, most)
            except UnsupportedError as error:
                found = replace(found, winner=None, note=f"nothing, because {error}")
        return replace(found, problem=problem, all_rows=all_rows)
    found = replace(explain_problem(problem, resolve(device), row), all_rows=all_rows)
    return with_times(found, cuda_index(device)) if measure else found


def _call_of_tensors(
    tensors: tuple[Tensor, Tensor, Tensor], causal: str, layout: str, keywords: dict[str, Any]
) -> Call:
    check.check_tensors_given(dict(zip("qkv", tensors, strict=True)))
    keywords = {**keywords, "dropout_seed": 0}  # none is drawn for what doesn't run
    q, k, v, cast = autocast.operands(*tensors, keywords)
    said = op_arguments(q, cast)
    return describe((q, k, v), causal, Features(**said) if said else NO_FEATURES, ("q", "k", "v"), layout)


def problem_of_shape(
    shape: Sequence[int],
    seqlen_k: int | None,
    num_heads_kv: int | None,
    dtype: str | torch.dtype,
    causal: str,
    alignment: int = FULL_ALIGNMENT,
) -> Problem:
    """Raises ValueError or TypeError for what is no size."""
    if not isinstance(shape, Sequence) or len(shape) != 4 or not all(map(_is_size, shape)):
        got = check.shown(shape)
        raise ValueError(f"shape must be four sizes (batch, seqlen_q, num_heads, head_dim), got {got}")
    batch, seqlen_q, num_heads, head_dim = shape
    seqlen_k = seqlen_q if seqlen_k is None else integer("seqlen_k", seqlen_k)
    num_heads_kv = num_heads if num_heads_kv is None else integer("num_heads_kv", num_heads_kv)
    name = check.dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    allowed = [check.dtype_name(each) for each in check.CPU_DTYPES]
    if name not in allowed:
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {dtype!r}")
    if seqlen_k < 0:
        raise ValueError(f"seqlen_k must be at least 0, got {seqlen_k}")
    if (longest := max(seqlen_q, seqlen_k)) > check.MAX_SEQLEN:
        raise ValueError(f"a seqlen must be 2**29 at most, got {longest}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if num_heads_kv < 0 or (num_heads % num_heads_kv if num_heads_kv else num_heads):
        raise ValueError(f"num_heads_kv must divide num_heads {num_heads}, got {num_heads_kv}")
    if alignment not in (1, 2, 4, 8, 16):
        raise ValueError(f"alignment must be 1, 2, 4, 8 or 16 bytes, got {alignment}")
    return Problem(batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, name, causal, alignment)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _with_features(problem: Problem, head_dim_v: int | None, names: Sequence[str], keywords: dict[str, Any]) -> Problem:
    """A problem of a shape, and what comes with it."""
    if unknown := set(keywords) - {"window", "block_size", "page_size", "num_splits"}:
        raise TypeError(f"explain got {min(unknown)!r}, which says nothing of a shape")
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"features must be names, as ('bias', 'sinks'), got {check.shown(names)}")
    if unknown := set(names) - set(FEATURES):
        raise ValueError(f"features must be among {', '.join(FEATURES)}, got {min(unknown)!r}")
    said = {"page_size": "pages", "block_size": "block_mask"}
    named = set(names) | {feature for keyword, feature in said.items() if keywords.get(keyword)}
    page_size, splits = (
        None if (number := keywords.get(name)) is None else integer(name, number)
        for name in ("page_size", "num_splits")
    )
    if page_size:
        check.page_size("a problem", page_size)
    if head_dim_v is not None and integer("head_dim_v", head_dim_v) < 1:
        raise ValueError(f"head_dim_v must be at least 1, got {head_dim_v}")
    block = keywords.get("block_size")
    if block is not None and not (isinstance(block, Sequence) and len(block) == 2 and all(map(_is_size, block))):
        raise TypeError(f"block_size must be a pair (queries, keys) or None, got {check.shown(block)}")
    if block is not None and min(block) < 1:
        raise ValueError(f"block_size must have sides of at least 1, got {check.shown(block)}")
    numbers_said = Features(**window_sides(keywords.get("window")), num_splits=splits)
    check_numbers(numbers_said)
    window, causal = window_of(numbers_said.window_left, numbers_said.window_right, problem.causal)
    named |= {"window"} if window is not None else set()
    named |= {"splits"} if (splits or 1) > 1 else set()
    return replace(
        problem,
        causal=causal,
        head_dim_v=head_dim_v,
        features=tuple(name for name in FEATURES if name in named),
        window=window or (-1, -1),
        block_mask=None if block is None else (block[0], block[1]),
        page_size=page_size or 0,
        num_splits=splits,
    )


def resolve(device: str | int | torch.device | Device) -> Device | None:
    """The GPU that a description means; None for the CPU. An int is a CUDA device's index."""
    if isinstance(device, Device):
        return device
    if (index := cuda_index(device)) is not None:
        return devices.of_index(index)
    return None if str(device) == "cpu" else devices.named(str(device))


def cuda_index(device: str | int | torch.device | Device) -> int | None:
    """The number of a CUDA device of this machine; None for the CPU and for GPUs that are only described."""
    if isinstance(device, Device):
        return None
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    if text != "cuda" and not text.startswith("cuda:"):
        return None
    index = text.removeprefix("cuda").removeprefix(":") or "0"
    count = _C.device_count()
    if not index.isdecimal() or int(index) >= count:
        raise ValueError(f"device {text} does not exist: there are {count} CUDA devices here")
    return int(index)


def explain_problem(
    problem: Problem, device: Device | None, row: str | None = None, table: Table | None = None
) -> Explanation:
    """Every row's verdict on a problem. ``device`` None is the CPU, ``table`` defaults to this one."""
    table = table or tables.this_build()
    if row is not None:
        table.by_name(row)
    if device is None:
        verdicts = tuple(
            Verdict(
                row,
                ("a CUDA kernel, and this is the CPU",),
                None,
                irrelevance=("CUDA devices", f"sm_{row.arch}"),
            )
            for row in table.rows
        )
        note = "the CPU backend, which needs no row"
        if row is not None:
            note = f"nothing, because row {row} is a CUDA kernel and this is the CPU"
        return Explanation(problem, None, verdicts, None, note)
    calibration = store.for_device(device)
    verdicts = _verdicts(problem, device, table, calibration)
    try:
        winner = choose(problem, device, row, table, calibration)
    except UnsupportedError as error:
        sentence, _, rest = str(error).partition("\n")
        note = f"nothing, because {sentence.removesuffix(':')}"
        if rest.startswith(refusal.WHAT_TO_CHANGE):
            note += f"; {rest.partition(chr(10))[0]}"
        return Explanation(problem, device, verdicts, None, note, calibration.origin)
    how = "forced by name" if row is not None else "the cheapest eligible row by predicted cost"
    return Explanation(problem, device, verdicts, winner.name, f"{winner.name}, {how}", calibration.origin)


def explain_gradients(
    problem: Problem,
    device: Device | None,
    row: str | None = None,
    deterministic: bool = False,
    workspace: int | None = None,
) -> Explanation:
    """The same of the rows that compute a problem's gradients, whose costs are not predicted one by one."""
    table = tables.backward()
    if device is None:
        return Explanation(problem, None, (), None, "the CPU backend, which needs no row")

    def irrelevant(other: Row) -> tuple[str, str] | None:
        if other.arch != devices.rows_arch(device, table.architectures):
            return "another architecture", f"sm_{other.arch}"
        return ("another dtype", other.dtype) if other.dtype != problem.dtype else None

    verdicts = [
        Verdict(
            other,
            tuple(gradients.reasons(other, problem, device, table, deterministic, workspace)),
            None,
            irrelevance=irrelevant(other),
        )
        for other in table.rows
    ]
    verdicts.sort(
        key=lambda verdict: (
            len(verdict.reasons),
            verdict.row.head_dim,
            verdict.row.scored,
            gradients.writes_scores(verdict.row),
        )
    )
    try:
        route = gradients.choose(problem, device, row, deterministic, workspace)
    except UnsupportedError as error:
        note = f"nothing, because {str(error).partition(chr(10))[0].removesuffix(':')}"
        return Explanation(problem, device, tuple(verdicts), None, note)
    how = "forced by name" if row is not None else "of the least head dim that holds both, and no more features"
    winner = route.row.name
    note = f"{winner}, {how}" + f"; {route.why}" * bool(route.why)
    return Explanation(problem, device, tuple(verdicts), winner, note)


def _verdicts(problem: Problem, device: Device, table: Table, calibration: Calibration) -> tuple[Verdict, ...]:
    """Those in question first, as the choice ranks them; then the eligible ones, then the others."""
    why = {row.name: tuple(reasons(row, problem, device, table)) for row in table.rows}
    eligible = [row for row in table.rows if not why[row.name]]
    in_question = {row.name for row in contenders(eligible, problem)}
    prices = {row.name: price(row, problem, device, calibration) for row in eligible}
    rows = sorted(
        table.rows,
        key=lambda row: (len(why[row.name]), row.name not in in_question, prices.get(row.name, 0.0)),
    )
    return tuple(
        Verdict(
            row,
            why[row.name],
            None,
            contender=False,
            irrelevance=irrelevance(row, problem, device, table),
        )
        if why[row.name]
        else Verdict(
            row,
            (),
            predicted_us(row, problem, device, calibration),
            contender=row.name in in_question,
        )
        for row in rows
    )


def with_times(explanation: Explanation, index: int | None) -> Explanation:
    """The explanation with the time of each eligible row on CUDA device ``index`` of this machine."""
    problem = explanation.problem
    if index is None:
        what = explanation.device or "the CPU"
        raise ValueError(f"rows are measured on a CUDA device of this machine, and {what} is none")
    if problem.batch == 0 or problem.num_heads == 0 or problem.seqlen_q == 0:
        raise ValueError("an empty problem launches nothing that could be measured")
    if problem.features:
        raise ValueError(f"only problems without features are measured, and this one is {problem}")
    from cutlass_fmha.calibrate.timing import RowTimer

    eligible = [verdict.row for verdict in explanation.rows if verdict.eligible]
    rows = [row for row in eligible if row.family not in WIDE]
    times = RowTimer(index, [problem]).time(problem, rows, give_up=math.inf, budget_us=20_000.0)
    timed = (replace(v, measured_us=times[v.row.name].us) if v.row.name in times else v for v in explanation.rows)
    return replace(explanation, rows=tuple(timed))
