"""The numbers of attention problems, and places between NaN for them: what a kernel reads outside its operand, a
padding row included, poisons the result, for even 0 times NaN is NaN. What is read of features lies between NaN as
well, or between numbers that would be noticed. Rows that are no sequence's, that a length leaves out or that pad it,
and pages that nobody has, are NaN: none is let in unseen."""

import ctypes
import itertools
import mmap
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

GUARD = 256  # elements of NaN before and after each tensor: 512 bytes keep the alignment of the allocation
CAUSAL = ("none", "top-left", "bottom-right")
EXACT_FILLS = ("large", "huge")

QKV = tuple[Tensor, Tensor, Tensor]
Problem = Any  # that of problems.py, which imports this
#: Tensors and numbers as ``cutlass_fmha.attention`` takes them; ``causal`` is the op's word.
Call = namedtuple("Call", "q k v scale causal features exact_scores")


def filled(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> QKV:
    p, g = problem, torch.Generator(device=device).manual_seed(problem.seed)
    shapes = [(p.seqlen_q, p.num_heads), *[(p.seqlen_k, p.num_heads_kv)] * 2]
    q, k, v = (torch.randn(p.batch, *x, head_dim, generator=g, device=device).to(dtype) for x in shapes)
    return FILLS[p.fill](p, q, k, v)


def _ramp(per_key: float, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores change by up to 2 * ``per_key`` from one key to the next: up in some rows, down in others."""
    scale = problem.scale or q.shape[-1] ** -0.5  # a scale of 0 has no ramp to show
    # In fp64: torch divides on a GPU by multiplying, and 1 / scale may be infinite in fp32, 0 * inf NaN.
    steps = torch.arange(problem.seqlen_k, device=q.device, dtype=torch.float64) * per_key / scale
    # The first element of q and k carries the ramp; q's varies by row, in size and sign.
    q[..., 0] = q[..., 0].clamp(-2, 2)
    k[..., 0] = steps.clamp(-60000.0, 60000.0).to(q.dtype)[:, None]
    return q, k, v


def _outliers(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """A few keys score far above all before them, for some query rows of a warp and not for others."""
    k[:, 5::37] *= 20
    return q, k, v


def _exact(half: tuple[int, int], other: tuple[int, int], problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores that are integers up to 12 times 2 to the sum of exponents (the first in fp16), exact in fp32 in any
    order of summation, with frequent ties. Beyond ties the softmax picks one key."""
    q[..., 4:] = 0  # sums of four products of small integers and a power of two
    q_unit, k_unit = (2.0**x for x in (half if q.dtype == torch.float16 else other))
    to_q, to_k = q.float().round().clamp(-1, 1) * q_unit, k.float().round().clamp(-3, 3) * k_unit
    return to_q.to(q.dtype), to_k.to(k.dtype), v


def _near_minus_120(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """All scores near -120: where no key is, a score of 0 would weigh e^120, which is infinite in fp32."""
    offset = (120.0 / problem.head_dim**0.5) ** 0.5
    return q / 4 + offset, k / 4 - offset, v


def _times(half: float, other: float, problem: Problem, *tensors: Tensor) -> Any:
    return tuple(x * (half if x.dtype == torch.float16 else other) for x in tensors)


def _minus_infinity(hides: Callable[[Tensor], Tensor], problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Scores of -inf for the keys that ``hides`` names, given their numbers."""
    q[..., 0] = q[..., 0].abs() + 0.5  # positive, so that the scores are -inf and not +inf
    k[:, hides(torch.arange(problem.seqlen_k, device=q.device)), :, 0] = -torch.inf
    return q, k, v


#: Of a problem and q, k and v as they are drawn: what they are.
FILLS: dict[str, Callable[..., QKV]] = {
    "normal": lambda p, *qkv: qkv,
    # Every key weighs the same, and every output is the one value there is.
    "constant": lambda p, *qkv: tuple(torch.full_like(x, 0.7) for x in qkv),
    "ramp": partial(_ramp, 0.05), "steep-ramp": partial(_ramp, 1.0),
    "outliers": _outliers, "large": partial(_exact, (10, 10), (10, 10)), "huge": partial(_exact, (15, 14), (50, 50)),
    "huge-values": lambda p, q, k, v: (q, k, *_times(15000.0, 1e30, p, v.clamp(-4, 4))),
    # Subnormal in fp16; with a scale of 2^40 the scores are ordinary again.
    "small": partial(_times, 2.0**-20, 2.0**-20),
    # The smallest subnormal numbers of fp16; in bf16 numbers whose products underflow to 0.
    "tiny": partial(_times, 2.0**-23, 1e-30),
    "first-keys-minus-inf": partial(_minus_infinity, lambda j: j < 100),
    "last-keys-minus-inf": partial(_minus_infinity, lambda j: j >= j.numel() - 100),
    "most-keys-minus-inf": partial(_minus_infinity, lambda j: j % 50 > 0),
    "all-keys-minus-inf": partial(_minus_infinity, lambda j: j >= 0), "near-minus-120": _near_minus_120,
}  # fmt: skip


def poison(dtype: torch.dtype, count: int, device: torch.device | str) -> Tensor:
    """``count`` elements of NaN, with a bit pattern that no arithmetic makes."""
    integer, pattern = {
        torch.float16: (torch.int16, 0x7E5A), torch.bfloat16: (torch.int16, 0x7FDA),
        torch.float32: (torch.int32, 0x7FDA5A5A), torch.int32: (torch.int32, 0x7FDA5A5A),
        torch.float64: (torch.int64, 0x7FFDA5A55A5A5A5A),
    }[dtype]  # fmt: skip
    return torch.full((count,), pattern, dtype=integer, device=device).view(dtype)


def place(x: Tensor, order: str = "bshd", row_pad: int = 0, offset: int = GUARD) -> Tensor:
    """A copy of x [batch, seqlen, heads, head_dim] inside NaN, its dimensions in memory in ``order``, each
    row followed by ``row_pad`` elements of NaN, the first element at ``offset``."""
    sizes = dict(zip("bsh", x.shape, strict=False))
    strides, step = {}, x.shape[3] + row_pad
    for axis in reversed(order[:3]):
        strides[axis] = step
        step *= sizes[axis]
    buffer = poison(x.dtype, offset + step + GUARD, x.device)
    view = buffer.as_strided(x.shape, (*(strides[axis] for axis in "bsh"), 1), offset)
    return view.copy_(x)


#: Layouts of each tensor by itself; "expanded": one head for all.
OF_EACH = ("bshd", "bhsd", "sbhd", "padded", "unaligned", "expanded")
#: And those where no length tells sequences apart: "shared", one batch entry for all; "overlapping", rows
#: that begin within others.
LAYOUTS = (*OF_EACH, "shared", "overlapping")


def lay_out(q: Tensor, k: Tensor, v: Tensor, layout: str) -> QKV:
    """[batch, seqlen, heads, head_dim] each, inside NaN. Some layouts keep only the first entry or head. "packed":
    slices of one tensor along the heads, as a fused projection leaves them; of two for two lengths."""
    if layout != "packed":
        return lay_out_one(q, layout, 0), lay_out_one(k, layout, 1), lay_out_one(v, layout, 2)
    heads = [x.shape[2] for x in (q, k, v)]
    if q.shape[1] != k.shape[1]:
        return (place(q), *place(torch.cat([k, v], dim=2)).split(heads[1:], dim=2))
    return place(torch.cat([q, k, v], dim=2)).split(heads, dim=2)


def lay_out_one(x: Tensor, layout: str, which: int) -> Tensor:
    """x [batch, seqlen, heads, head_dim] inside NaN. ``which``: 0 for q, 1 for k, 2 for v."""
    if layout == "overlapping" and x.numel():  # rows begin 8, 16 or 24 elements after others
        strides = (24, 16, 8, 1)
        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        buffer = poison(x.dtype, count + 2 * GUARD, x.device)
        buffer[GUARD:-GUARD] = x.flatten().repeat(-(-count // x.numel()))[:count]
        return buffer.as_strided(x.shape, strides, GUARD)
    if layout == "unaligned":
        return place(x, ("bshd", "bshd", "bhsd")[which], row_pad=(0, 3, 1)[which], offset=GUARD + 1)
    first = {"expanded": x[:, :, :1], "shared": x[:1]}.get(layout, x)
    order = layout if layout in ("bhsd", "sbhd") else "bshd"
    return place(first, order, 8 * (1 + which) if layout == "padded" else 0).expand(x.shape)


class Maker:
    """Makes the tensors of one problem, each from the numbers that its seed gives."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device | str) -> None:
        self.problem, self.dtype, self.device = problem, dtype, device
        self.chance = random.Random(problem.seed + 1)
        numbers = torch.Generator(device=device).manual_seed(problem.seed + 1)
        self.drawn: dict[str, Any] = {"generator": numbers, "device": device}
        self.lengths = problem.lengths()
        #: Sequences have pages in common.
        self.shares_pages = problem.page_size > 0 and problem.memory in ("expanded", "overlapping")
        self.features: dict[str, Any] = {}

    def call(self) -> Call:
        p = self.problem
        q, k, v = self.contents()
        if p.page_size:
            k, v = self.paged(k, v)
        elif p.indexed:  # batch entries in another order, with one more that is nobody's
            places, (k, v) = self.shuffled([k, v], p.batch + 1)
            self.features["cache_batch_idx"] = self.vector(places[:-1])
        laid = lay_out(q, k, v, p.layout)
        q = self.packed(q, self.lengths.rows_q, "q") if p.packed_q else laid[0]
        k, v = (self.packed(x, self.lengths.rows_k, "k") for x in (k, v)) if p.packed_k else laid[1:]
        vectors = {"seqused_q": p.used_q, "seqused_k": p.used_k, "leftpad_k": p.leftpad}
        of_sequences = (self.lengths.used_q, self.lengths.used_k, self.lengths.padding)
        self.features |= {x: self.vector(y) for x, y in zip(vectors, of_sequences, strict=True) if vectors[x]}
        if p.is_bounded:
            self.features["max_seqlen_k"] = p.width
        numbers = {"window": p.window, "softcap": p.softcap, "dropout_p": p.dropout, "num_splits": p.num_splits}
        self.features |= {name: x for name, x in numbers.items() if x}
        self.add_tensors()
        if p.page_size and p.window and p.window[0] >= 0 and not self.shares_pages:
            self.leave_pages_behind()
        return Call(q, k, v, p.scale, p.causal, self.features, p.fill in EXACT_FILLS)

    def contents(self) -> list[Tensor]:
        """q, k and v with a batch entry per sequence, NaN where nothing is in use."""
        p, lengths = self.problem, self.lengths
        widest = filled(replace(p, seqlen_k=p.capacity), self.dtype, max(p.head_dim, p.head_dim_v), self.device)
        q, k, v = (x[..., :n].clone() for x, n in zip(widest, (p.head_dim, p.head_dim, p.head_dim_v), strict=True))
        for b in range(p.batch):
            q[b, lengths.used_q[b] :] = torch.nan
            for tensor in (k, v) if not self.shares_pages else ():
                tensor[b, lengths.used_k[b] :] = tensor[b, : lengths.padding[b]] = torch.nan
        return [q, k, v]

    def packed(self, x: Tensor, rows: list[int], side: str) -> Tensor:
        """The sequences one after another, with rows before and behind them that are nobody's."""
        chance = random.Random(self.problem.seed)
        before, behind = 2 * (chance.random() < 0.3), int(chance.random() < 0.5)
        gaps = (x.new_full((count, *x.shape[2:]), torch.nan) for count in (before, behind))
        whole = torch.cat([next(gaps), *(x[b, :length] for b, length in enumerate(rows)), next(gaps)])
        self.features[f"cu_seqlens_{side}"] = self.vector([*itertools.accumulate(rows, initial=before)])
        self.features[f"max_seqlen_{side}"] = getattr(self.problem, f"seqlen_{side}")
        return lay_out_one(whole[None], self.problem.layout, int(side == "k"))[0]

    def paged(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Shuffled pages, some of them nobody's. Where a table says nothing, it names one of those."""
        p, pages = self.problem, self.problem.capacity // self.problem.page_size
        own = p.batch * pages
        places, found = self.shuffled([x.reshape(own, p.page_size, *x.shape[2:]) for x in (k, v)], own + 3)
        table, self.nobody = torch.tensor(places[:own], dtype=torch.int32).view(p.batch, pages), places[own]
        if self.shares_pages:
            self.features["page_table"] = self.small(table, -1, dims=1)
            return found
        for b, used in enumerate(self.lengths.used_k):
            table[b, -(-used // p.page_size) :] = places[own]
        rest = int(p.memory != "plain")  # of a wider table
        room = torch.nn.functional.pad(table, (rest, 0), value=places[own])
        self.features["page_table"] = self.fenced(room)[:, rest:]
        return found

    def leave_pages_behind(self) -> None:
        """Names none, or one that is nobody's, where a window before all queries has left all of a page."""
        p, prefixes = self.problem, self.features.get("prefix_lengths", [0] * self.problem.batch)
        for b, (_, queries, _, rows, padding) in enumerate(zip(*self.lengths, strict=True)):
            keys = max(0, rows - padding)
            first = min(keys, (0 if p.causal == "top-left" else keys - queries) - p.window[0])
            begin = -(-(padding + int(prefixes[b])) // p.page_size) if prefixes[b] else 0
            self.features["page_table"][b, begin : max(0, padding + first) // p.page_size].fill_(-1)[::2] = self.nobody

    def shuffled(self, tensors: list[Tensor], room: int) -> tuple[list[int], list[Tensor]]:
        """Places in another order, of which the entries of each tensor have the first; those of the others are NaN."""
        places = self.chance.sample(range(room), room)
        found = [x.new_full((room, *x.shape[1:]), torch.nan) for x in tensors]
        for x, y in zip(tensors, found, strict=True):
            y[places[: len(x)]] = x
        return places, found

    def vector(self, values: list[int]) -> Tensor:
        wrong = [1] * 4  # stands where nothing is to be read, but within all tensors
        return self.fenced(torch.tensor(wrong + values, dtype=torch.int32))[4:]

    def add_tensors(self) -> None:
        p, features = self.problem, self.features
        if p.prefix:
            lengths = [self.chance.randint(0, self.chance.choice((5, p.capacity + 2))) for _ in range(p.batch)]
            features["prefix_lengths"] = self.vector(lengths)
        if p.mask is not None:
            seen = torch.rand(self.shape(p.mask[0]), **self.drawn) < 0.7
            seen &= torch.rand(self.shape(p.mask[0].replace("k", "")), **self.drawn) < 0.9  # whole rows
            features["mask"] = self.placed(seen, p.mask[1], guard=True)
        if p.blocks is not None:
            features["block_mask"] = (*self.block_lists(), p.blocks)
        if p.bias is not None:
            bias = torch.randn(self.shape(p.bias[0]), **self.drawn)
            if p.bias_fill == "minus-inf":
                bias.masked_fill_(torch.rand(bias.shape, **self.drawn) < 0.2, -torch.inf)
            dtype = torch.float32 if p.bias[1] == "float32" else self.dtype
            features["bias"] = self.placed(bias.to(dtype), p.bias[2], guard=torch.nan)
        if p.alibi:
            slopes = torch.rand((p.batch, p.num_heads)[-len(p.alibi) :], **self.drawn) * 0.5 - 0.1
            features["alibi_slopes"] = self.small(slopes, torch.nan)
        if p.sinks:
            sinks = torch.randn(p.num_heads, **self.drawn) + {"normal": 0.0, "high": 12.0, "low": -12.0}[p.sinks]
            features["sinks"] = self.fenced(sinks.to(torch.promote_types(self.dtype, torch.float32)))
        if p.dropout:
            features["dropout_seed"] = self.small(torch.tensor([self.chance.getrandbits(63)]), 0)

    def block_lists(self) -> tuple[Tensor, Tensor]:
        """Counts and ascending indices; what is beyond a count names a block that would be counted twice. Lists that
        have numbers in common ascend as a whole, and go on beyond all keys."""
        p = self.problem
        most = -(-p.width // p.blocks[1])
        shape = (p.batch if "b" in p.block_dims else 1, p.num_heads if "h" in p.block_dims else 1)
        lists = (*shape, -(-p.seqlen_q // p.blocks[0]))
        beyond = [most, most + 1, 2**31 - 1] if p.blocks_beyond else []
        entries = most + 1 + len(beyond)
        counts, indices = (torch.zeros(shape, dtype=torch.int32) for shape in (lists, (*lists, entries)))
        for at in itertools.product(*map(range, lists)):
            chosen = self.rising(most, self.chance.randint(0, most)) + beyond
            counts[at] = len(chosen)
            indices[at] = torch.tensor(chosen + chosen[:1] * (entries - len(chosen)) or [0] * entries)
            if p.memory == "expanded":
                indices[at] = torch.tensor(self.rising(entries + 2, entries))
        if p.memory == "overlapping" and counts.numel():
            count = windows(indices.shape)
            indices.view(-1)[:count] = torch.tensor(self.rising(count + 2, count))
        if p.memory == "expanded" and self.chance.random() < 0.3:  # an entry that is the whole list counts once
            first = self.small(indices[..., :1], 0).expand(indices.shape)
            return self.small(counts.clamp_max(1), entries), first
        return self.small(counts, entries), self.small(indices, 0, dims=3)

    def rising(self, end: int, count: int) -> list[int]:
        return sorted(self.chance.sample(range(end), count))

    def shape(self, dims: str) -> tuple[int, ...]:
        p = self.problem
        sizes = {"b": p.batch, "h": p.num_heads, "q": p.seqlen_q, "k": p.width}
        return tuple(size if name in dims else 1 for name, size in sizes.items())

    def placed(self, x: Tensor, memory: str, guard: Any) -> Tensor:
        if memory == "transposed":
            return self.guarded(x.transpose(2, 3), guard).transpose(2, 3)
        if 0 in x.shape:
            memory = "plain"
        batch, heads, queries, keys = x.shape
        if memory in ("strided", "padded"):  # a guard before each number, or some around each row
            room, own = (2 * keys, slice(1, None, 2)) if memory == "strided" else (keys + 5, slice(2, -3))
            return x.new_full((*x.shape[:3], room), guard)[..., own].copy_(x)
        if memory == "overlapping":
            return self.guarded(x.flatten()[: windows(x.shape)], guard).as_strided(x.shape, (1,) * x.dim())
        if memory == "padded by runs":
            return x.new_full((queries, heads, batch, keys + 12), guard).transpose(0, 2)[..., 4:-8].copy_(x)
        x = self.guarded(x, guard)
        while memory == "missing" and x.dim() and x.shape[0] == 1:
            x = x[0]
        return x.expand(self.shape("bhqk")) if memory == "expanded" else x

    def small(self, x: Tensor, guard: Any, dims: int | None = None) -> Tensor:
        """x in memory as the problem says; its first dimensions may be expanded, so many or all of them."""
        memory = self.problem.memory
        if memory == "plain" or 0 in x.shape:
            return self.fenced(x)
        if memory == "strided":
            wide, odd = x.new_full([2 * size for size in x.shape], guard), (slice(1, None, 2),) * x.dim()
            wide[odd] = x
            return self.fenced(wide)[odd]
        if memory == "overlapping":
            return self.fenced(x.flatten()[: windows(x.shape)]).as_strided(x.shape, (1,) * x.dim())
        few = tuple(slice(1 if self.chance.random() < 0.7 else None) for _ in range(x.dim() if dims is None else dims))
        return self.fenced(x[few]).expand(x.shape)

    def fenced(self, x: Tensor) -> Tensor:
        """A contiguous copy; on the CPU, nothing is mapped behind it: who reads on ends the process."""
        if torch.device(self.device).type != "cpu" or x.numel() == 0:
            return x.to(self.device, copy=True).contiguous()
        size = x.nbytes
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0  # PROT_NONE
        copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=room - size)
        return copy.view(x.shape).copy_(x)

    def guarded(self, x: Tensor, guard: Any) -> Tensor:
        return x.new_full((x.numel() + 2 * GUARD,), guard)[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)


def windows(shape: tuple[int, ...]) -> int:
    """Numbers of a tensor whose rows, and the rows of these, each begin one number after the one before."""
    return sum(shape) - len(shape) + 1
