"""The tensors of ``Problem``. Each lies inside a buffer of NaN, or of numbers that would be noticed. Rows that are no
sequence's, that a length leaves out or that pad it, and pages that nobody has, are NaN: none is let in unseen."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from operands import EXACT_FILLS, GUARD, filled, lay_out, lay_out_one
from torch import Tensor

if TYPE_CHECKING:
    from problems import Problem


class Call(NamedTuple):
    """Tensors and numbers as ``cutlass_fmha.attention`` takes them; ``causal`` is the op's word."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    causal: str
    features: dict[str, Any]
    exact_scores: bool


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
