"""Which row runs a problem, and why.

Eligibility is a list of reasons per row, empty when the row can run the problem; of the eligible ones the
cheapest by predicted cost runs. The rows are those of the build (``_C.templates()``), no other list exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from cutlass_fmha import _C, cost
from cutlass_fmha import device as devices
from cutlass_fmha.arguments.check import FULL_ALIGNMENT
from cutlass_fmha.cost import store
from cutlass_fmha.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.recent import Recent

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.cost.model import RowCost
    from cutlass_fmha.cost.store import Calibration

#: Families of rows that know no more than a diagonal.
PLAIN = ("plain", "few_query")
#: The family of ``fallback.py``'s rows, with reasons, costs and launches of their own.
WIDE = "wide"

FEW_QUERIES, MANY_KEYS = 64, 512
"""Query rows that share keys at most, and keys at least, of what counts as decoding."""
UNTIMED = 1.25
"""A scored row that nobody timed is taken before a plain one where it should be faster by this factor."""
MAX_WINNERS = 8192
CLASS_BITS = 5
"""Lengths are told apart by so many leading bits where rows are compared: to 1/16 or better. Exact up to 32,
and for all lengths that models are usually trained and timed with."""
MAX_KEY_SPAN = 2**31 - 1
"""Elements: some rows multiply a row's number and its stride in 32 bits, up to the end of a tile."""
NO_KERNELS = (
    "this build of cutlass_fmha has no CUDA kernels (CUTLASS_FMHA_CUDA=OFF): install a wheel with CUDA, "
    "or rebuild it with `pip install . -C cmake.define.CUTLASS_FMHA_CUDA=ON`"
)


#: What only scored rows know, and what it is called.
FEATURES: Mapping[str, str] = {
    "window": "sliding window",
    "mask": "boolean mask",
    "bias": "bias",
    "prefix": "prefix that every query sees",
    "block_mask": "block mask",
    "softcap": "softcap",
    "alibi": "ALiBi slopes",
    "sinks": "sinks",
    "dropout": "dropout",
    "varlen": "packed sequences",
    "lengths": "lengths of each sequence",
    "pages": "paged keys",
    "cache_batch_idx": "cache_batch_idx",
    "splits": "split keys",
}


@dataclass(frozen=True)
class Problem:
    """One forward call, as far as the choice of a row depends on it.

    ``seqlen_q`` and ``seqlen_k`` are those of the longest sequence. ``alignment``: the largest power of two,
    at most 16, that divides every pointer and every stride in bytes. ``head_dim_v`` is None where it is
    head_dim. ``features``: names of ``FEATURES``. ``window``: (left, right), -1 without limit.
    ``block_mask``: queries and keys of a block. ``page_size``: keys of a page, 0 without pages.
    ``num_splits``: parts of the keys that the caller asks for. ``key_span``: elements that the keys or values
    of a sequence lie apart at most, 0 where any row's offsets hold them.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: str = "none"
    alignment: int = FULL_ALIGNMENT
    head_dim_v: int | None = None
    features: tuple[str, ...] = ()
    window: tuple[int, int] = (-1, -1)
    block_mask: tuple[int, int] | None = None
    page_size: int = 0
    num_splits: int | None = None
    key_span: int = 0

    def __post_init__(self) -> None:
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", None)

    @property
    def value_dim(self) -> int:
        """Head dim of value and output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def is_plain(self) -> bool:
        """Whether the call asks for nothing that plain rows don't know."""
        return not self.features and self.head_dim_v is None

    @functools.cached_property
    def is_decode(self) -> bool:
        """Whether few queries meet many keys, so that dividing the keys may be what fills the GPU."""
        group = self.num_heads // self.num_heads_kv if self.num_heads_kv else 1
        return self.seqlen_q * group <= FEW_QUERIES and self.seqlen_k >= MANY_KEYS

    @functools.cached_property
    def is_ranged(self) -> bool:
        """Whether queries see different ranges of keys."""
        return self.diagonal is not None or max(self.window) >= 0

    def visible_keys(self, first: int, last: int) -> tuple[int, int]:
        """Begin and end of the keys that queries ``first`` to ``last`` see some of, by mask and window."""
        left, right = self.window
        if self.causal != "none":
            right = 0 if right < 0 else min(right, 0)
        offset = 0 if self.causal == "top-left" else self.seqlen_k - self.seqlen_q
        begin = 0 if left < 0 else max(0, first + offset - left)
        return begin, self.seqlen_k if right < 0 else max(0, min(self.seqlen_k, last + offset + right + 1))

    @functools.cached_property
    def diagonal(self) -> int | None:
        """Key j is visible to query i when j <= i + diagonal; None when every key is."""
        return mask_diagonal(self.causal, self.seqlen_q, self.seqlen_k)

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, seqlen_q {self.seqlen_q}, seqlen_k {self.seqlen_k}, "
            f"num_heads {self.num_heads}, num_heads_kv {self.num_heads_kv}, head_dim {self.head_dim}, "
            f"{self.dtype}, causal {self.causal}, aligned to {self.alignment} bytes"
            + ("" if self.head_dim_v is None else f", head_dim_v {self.head_dim_v}")
            + ("" if not self.features else f", with {', '.join(FEATURES[name] for name in self.features)}")
        )


def typical_length(length: int) -> int:
    """The length that stands for its class: the next one that CLASS_BITS bits and zeros can say."""
    unit = 1 << max(0, (length - 1).bit_length() - CLASS_BITS)
    return -(-length // unit) * unit


def typical(problem: Problem) -> Problem:
    """The problem that stands for those of the same class of lengths, by which a row is chosen.

    Choosing takes longer than all else that a new length takes. Equal lengths stay equal; what a
    row's offsets can hold is another class than what they can't. By the model, what a class picks costs at
    most 4.5 % more than the best row, 0.1 % on average (300 drawn problems, three GPUs).
    """
    return replace(
        problem,
        seqlen_q=typical_length(problem.seqlen_q),
        seqlen_k=typical_length(problem.seqlen_k),
        key_span=_key_span_class(problem.key_span),
    )


def _key_span_class(key_span: int) -> int:
    return 0 if key_span <= MAX_KEY_SPAN else key_span


def _class_of(problem: Problem) -> tuple[object, ...]:
    """What the choice of a row depends on: equal for problems that are ``typical`` of each other."""
    return (
        problem.batch,
        typical_length(problem.seqlen_q),
        typical_length(problem.seqlen_k),
        problem.num_heads,
        problem.num_heads_kv,
        problem.head_dim,
        problem.dtype,
        problem.causal,
        problem.alignment,
        problem.head_dim_v,
        problem.features,
        problem.window,
        problem.block_mask,
        problem.page_size,
        problem.num_splits,
        _key_span_class(problem.key_span),
        problem.is_decode,
    )


def mask_diagonal(causal: str, seqlen_q: int, seqlen_k: int) -> int | None:
    """The diagonal of a causal mask; None also where it hides nothing, as in decoding with one query."""
    if causal == "none":
        return None
    diagonal = 0 if causal == "top-left" else seqlen_k - seqlen_q
    return None if diagonal >= seqlen_k - 1 else diagonal


@functools.cache
def this_build() -> Build:
    """The rows of this build."""
    info = _C.build_info()
    compiled_for = info.get("compiled_for", {})
    assert isinstance(compiled_for, dict)
    rows = tuple(cast("Template", Row(template)) for template in _C.templates())
    return Build(rows, tuple(compiled_for.items()))


class Row:
    """A row as ``_C.templates()`` has it: a copy, since each question to a compiled object takes 150 ns."""

    def __init__(self, template: Template) -> None:
        for name in dir(template):
            if not name.startswith("_") and hasattr(template, name):  # a family has what it has
                setattr(self, name, getattr(template, name))

    def __repr__(self) -> str:
        return f"<Row {vars(self)['name']}>"


@dataclass(frozen=True, eq=False)
class Build:
    """Rows, and what each architecture's were compiled for, where that says more than its number."""

    templates: tuple[Template, ...]
    compiled_for: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def architectures(self) -> Mapping[int, str]:
        """Those that there are rows for, and what these were compiled for: ``devices.can_execute``."""
        compiled_for = dict(self.compiled_for)
        return {
            arch: compiled_for.get(arch, str(arch)) for arch in sorted({row.arch for row in self.templates})
        }

    @functools.cached_property
    def _by_kind(self) -> dict[tuple[object, ...], tuple[Template, ...]]:
        return {}

    def candidates(self, problem: Problem, device: Device) -> tuple[Template, ...]:
        """The rows that nothing keeps from a problem but what else the call says: looked up by what they are
        made for, the device, the dtype and the head dims."""
        arch = devices.rows_arch(device, self.architectures)
        key = (device, arch, problem.dtype, problem.head_dim, problem.head_dim_v)
        rows = self._by_kind.get(key)
        if rows is None:
            rows = tuple(row for row in self.templates if is_made_for(row, problem, device, self))
            self._by_kind[key] = rows
        return rows

    def by_name(self, name: str) -> Template:
        for template in self.templates:
            if template.name == name:
                return template
        raise ValueError(
            f"template {name!r} is not a row of this build; `python -m cutlass_fmha info --rows` lists its "
            f"{len(self.templates)} rows"
        )


class Predicate(Protocol):
    """One eligibility rule: a sentence why the row can't run the problem, or None."""

    def __call__(self, template: Template, problem: Problem, device: Device, build: Build) -> str | None: ...


def _made_for_device(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    arch = devices.rows_arch(device, build.architectures)
    if template.arch in (arch, devices.own_arch(device)):
        compiled_for = build.architectures.get(template.arch, str(template.arch))
        if not devices.can_execute(compiled_for, device.capability):
            major, minor = device.capability
            return (
                f"compiled for sm_{compiled_for}, which a device of capability {major}.{minor} can't execute"
            )
    if arch == template.arch:
        return None
    if arch is None:
        return f"made for sm_{template.arch}, and this device takes no row of this build"
    return f"made for sm_{template.arch}, and this device takes the sm_{arch} rows"


def _dtype(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.dtype == problem.dtype:
        return None
    return f"computes {template.dtype}, and the tensors are {problem.dtype}"


def _head_dim(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.scored:
        if problem.head_dim <= template.head_dim and problem.value_dim <= template.head_dim_v:
            return None
        most = str(template.head_dim)
        if template.head_dim_v != template.head_dim:
            most += f", {template.head_dim_v} of value"
        return f"made for head dims up to {most}, and the tensors have {_head_dims(problem)}"
    if template.head_dim == problem.head_dim == problem.value_dim:
        return None
    return f"made for head_dim {template.head_dim}, and the tensors have {_head_dims(problem)}"


def _head_dims(problem: Problem) -> str:
    return f"{problem.head_dim}" + ("" if problem.head_dim_v is None else f", value {problem.head_dim_v}")


def _block_mask(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if problem.block_mask is None or not template.scored:
        return None
    block_m, block_n = problem.block_mask
    keys = template.tile_n * template.kv_warps
    if block_m % template.tile_m == 0 and block_n % keys == 0:
        return None
    return (
        f"takes block masks of blocks that are multiples of {template.tile_m} x {keys}, "
        f"and these are {block_m} x {block_n}"
    )


def lacking(row: Template, problem: Problem) -> tuple[str, ...]:
    """The features of a problem that a row doesn't know."""
    if row.family == WIDE:
        from cutlass_fmha import fallback

        return tuple(name for name in problem.features if name not in fallback.KNOWN)
    return () if row.scored else problem.features


def has_no(names: Sequence[str]) -> str:
    return f"has no {', no '.join(FEATURES[name] for name in names)}"


def _features(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if not (names := lacking(template, problem)):
        return None
    return f"{has_no(names)}: that takes a scored row"


def _alignment(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if problem.alignment % template.alignment == 0:
        return None
    return (
        f"needs pointers and strides aligned to {template.alignment} bytes, "
        f"and these are aligned to {problem.alignment}"
    )


def _shared_memory(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.smem_bytes <= device.smem_per_block:
        return None
    return (
        f"needs {template.smem_bytes} bytes of shared memory per block, "
        f"and this device has {device.smem_per_block}"
    )


#: What a row is made for, and what else a call may ask.
FIXED_RULES: tuple[Predicate, ...] = (_made_for_device, _dtype, _head_dim, _shared_memory)
CALL_RULES: tuple[Predicate, ...] = (_features, _block_mask, _alignment)


def _rules(row: Template) -> tuple[tuple[Predicate, ...], tuple[Predicate, ...]]:
    if row.family == WIDE:
        from cutlass_fmha import fallback  # which has its rules from here

        return fallback.FIXED_RULES, fallback.CALL_RULES
    return FIXED_RULES, CALL_RULES


def reasons(template: Template, problem: Problem, device: Device, build: Build | None = None) -> list[str]:
    """Why a row can't run a problem on a device, one sentence each; empty when it can."""
    build = build or this_build()
    fixed, of_call = _rules(template)
    sentences = (rule(template, problem, device, build) for rule in (*fixed, *of_call))
    return [sentence for sentence in sentences if sentence is not None]


def irrelevance(row: Template, problem: Problem, device: Device, build: Build) -> tuple[str, str] | None:
    """What a row is for that has nothing to do with a problem, as ("another dtype", "float16").

    None for a row for this architecture, dtype and head dim: its reasons are worth reading.
    """
    if row.arch != devices.rows_arch(device, build.architectures):
        return "another architecture", f"sm_{row.arch}"
    if row.dtype != problem.dtype:
        return "another dtype", row.dtype
    if row.family == WIDE:
        from cutlass_fmha import fallback

        if fallback._purpose(row, problem, device, build) is not None:
            return "other head dims", f"above {fallback.LARGEST_HEAD_DIM}"
        refused, up_to = fallback._head_dim(row, problem, device, build), True
    else:
        refused, up_to = _head_dim(row, problem, device, build), row.scored
    return ("other head dims", f"{'up to ' if up_to else ''}{row.head_dim}") if refused else None


def is_made_for(row: Template, problem: Problem, device: Device, build: Build) -> bool:
    """Whether a row's device, dtype and head dims are those of a problem."""
    fixed, _ = _rules(row)
    return all(rule(row, problem, device, build) is None for rule in fixed)


def eligible_rows(problem: Problem, device: Device, build: Build) -> list[Template]:
    """The rows that have no reason against them."""
    return [
        row
        for row in build.candidates(problem, device)
        if all(rule(row, problem, device, build) is None for rule in _rules(row)[1])
    ]


def predicted_cost(
    template: Template, problem: Problem, device: Device, calibration: Calibration | None = None
) -> float:
    """Predicted microseconds of one launch: a model (``cost.py``) that ranks rows, not a measurement.

    ``calibration``: what the model was told of this GPU; the one that counts here when None.
    """
    if template.family == WIDE:
        return price_of_wide(template, problem, device)
    calibration = calibration or store.for_device(device)
    return cost.predict(template, problem, device, calibration.cost(template, device))


def no_rows(device: Device, build: Build | None = None) -> str | None:
    """Why a device takes no row of a build at all, and what to do about it; None when it takes some."""
    build = build or this_build()
    if not build.templates:
        return NO_KERNELS
    if devices.rows_arch(device, build.architectures) is not None:
        return None
    held = ", ".join(f"sm_{arch}" for arch in build.architectures)
    if (forced := devices.forced_arch()) is not None:
        return (
            f"{devices.FORCE_ARCH}={forced} asks for sm_{forced} rows, "
            f"and this build holds rows for {held} only"
        )
    if device.capability < (8, 9):
        return (
            f"{device} is older than every kernel of cutlass_fmha: compute capability 8.9 or newer is needed"
        )
    way_out = "with its own architecture"
    if (own := devices.own_arch(device)) in build.architectures:
        held += f" (compiled for sm_{build.architectures[own]})"
        way_out = "with nvcc 12.9 or newer, which compiles for the whole family"
    return (
        f"this build of cutlass_fmha holds rows for {held} only, none of which {device} takes: rebuild it "
        f"with `pip install . -C cmake.define.CMAKE_CUDA_ARCHITECTURES=89`, or {way_out}"
    )


def select(
    problem: Problem,
    device: Device,
    template: str | None = None,
    build: Build | None = None,
    calibration: Calibration | None = None,
) -> Template:
    """The row that runs a problem: the cheapest eligible one, or the one named ``template``.

    ``calibration``: what is known of the rows' costs; that of the device (``store.for_device``) when None.
    Raises UnsupportedError with the nearest rows' reasons (with those of ``template`` when it is given), and
    ValueError for a name that no row has.
    """
    build = build or this_build()
    if template is not None:
        return _named(template, problem, device, build)
    known = calibration or store.for_device(device)
    # Whoever holds a build and its costs keeps their ids from being anybody else's.
    key = (_class_of(problem), device, devices.forced_arch(), id(build), id(known))
    if (found := _winners.get(key) or _winners.revive(key)) is not None:
        return found[0]
    if (nothing := no_rows(device, build)) is not None:
        raise UnsupportedError(nothing)
    winner = cheapest(_asked(problem, device, build, known), typical(problem), device)
    _winners.put(key, (winner, build, known))
    return winner


def _named(name: str, problem: Problem, device: Device, build: Build) -> Template:
    if (nothing := no_rows(device, build)) is not None:
        raise UnsupportedError(nothing)
    row = build.by_name(name)
    if why := reasons(row, problem, device, build):
        raise UnsupportedError(
            f"template {name} can't run this problem ({problem}) on {device}: {'; '.join(why)}"
        )
    return row


#: What ``select`` found: with it the build and the costs by which it did.
_winners: Recent[tuple[object, ...], tuple[Template, Build, Calibration]] = Recent(MAX_WINNERS)


class Asked(NamedTuple):
    """A row in question: ``cost`` None of one with a ``predicted_us`` of its own, ``markup`` on its price."""

    row: Template
    cost: RowCost | None
    markup: float


#: By what keeps rows from a problem, lengths apart: those that cost decides between.
_in_question: Recent[tuple[object, ...], tuple[list[Asked], Build, Calibration]] = Recent(MAX_WINNERS)


def _asked(problem: Problem, device: Device, build: Build, known: Calibration) -> list[Asked]:
    key = (
        device,
        devices.forced_arch(),
        id(build),
        id(known),
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.alignment,
        problem.features,
        problem.window[0] >= 0,
        problem.block_mask,
        problem.key_span <= MAX_KEY_SPAN,
        problem.is_decode,
    )
    if (found := _in_question.get(key) or _in_question.revive(key)) is not None:
        return found[0]
    eligible = eligible_rows(problem, device, build)
    if not eligible:
        from cutlass_fmha.arguments import refusal  # which asks for reasons here

        raise UnsupportedError(refusal.message(problem, device, build))
    asked = [
        Asked(row, None if row.family == WIDE else known.cost(row, device), _markup(row, problem, known))
        for row in contenders(eligible, problem)
    ]
    _in_question.put(key, (asked, build, known))
    return asked


def price(row: Template, problem: Problem, device: Device, calibration: Calibration) -> float:
    """What rows are chosen by: the predicted microseconds, more of a scored row that nobody timed."""
    return predicted_cost(row, problem, device, calibration) * _markup(row, problem, calibration)


def _markup(row: Template, problem: Problem, calibration: Calibration) -> float:
    return UNTIMED if row.scored and problem.is_plain and row.name not in calibration.rows else 1.0


def cheapest(asked: Sequence[Asked], problem: Problem, device: Device) -> Template:
    """The row of the least ``price``, the first of several.

    Launches are played through in the order of what they cost at least, up to the first that can't win.
    """
    if len(asked) == 1:
        return asked[0].row
    bounds: list[tuple[float, int, cost.Launch | None]] = []
    for number, (row, prices, markup) in enumerate(asked):
        if prices is None:
            bounds.append((price_of_wide(row, problem, device), number, None))
        elif row.smem_bytes + devices.KIB > device.smem_per_sm:
            bounds.append((math.inf, number, None))
        else:
            launch = cost.Launch(row, problem, device, prices)
            bounds.append((launch.bound() * markup, number, launch))
    least, winner = math.inf, 0
    for us, number, candidate in sorted(bounds, key=_by_bound):
        if us > least:
            break
        if candidate is not None:
            markup = asked[number].markup
            if candidate.least() * markup > least:
                continue
            us = candidate.us() * markup
        if us < least or (us == least and number < winner):
            least, winner = us, number
    return asked[winner].row


def _by_bound(found: tuple[float, int, cost.Launch | None]) -> tuple[float, int]:
    return found[:2]


def price_of_wide(row: Template, problem: Problem, device: Device) -> float:
    from cutlass_fmha import fallback

    return fallback.predicted_us(row, problem, device)


def contenders(eligible: Sequence[Template], problem: Problem) -> Sequence[Template]:
    """The eligible rows that cost decides between; the others are for problems that these can't run.

    Scored rows do more than a plain problem needs: where a plain row takes it, they are only in question for
    decoding, since plain rows don't split keys among blocks. Of those, the ones of the least head dims are:
    the others compute the same and more zeros. Copying element by element is for operands that nothing else
    takes: with others it has never been the fastest, and where all rows cost about the same, a prediction
    could err in its favour.
    """
    if not problem.is_decode:
        eligible = [row for row in eligible if not row.scored] or eligible
    least = min(((row.head_dim, row.head_dim_v) for row in eligible if row.scored), default=None)
    eligible = [row for row in eligible if not row.scored or (row.head_dim, row.head_dim_v) == least]
    return [row for row in eligible if row.family == WIDE or row.copy != "element"] or eligible
