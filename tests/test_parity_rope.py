"""rotary_qk and qk_norm_rope against fp64: the CPU backend, and the kernels, on a GPU or in a simulator.

What ops allocate is NaN before it is written.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle_helpers import assert_close, bits, in_fp64, rms_norm, rotate
from test_parity_helpers import (  # its fixture says where kernels run
    DTYPES,
    LAYOUTS,
    NEW_ROWS,
    Append,
    backend,  # noqa: F401
    drawn,
    following,
    int32,
    kernels_only,
    laid_out,
    randn,
    sequences,
    table,
)
from torch import Tensor

import cutlass_fmha

pytestmark = pytest.mark.filterwarnings("default")
POSITIONS = 40
STARTS = ("none", "int", "offsets", "positions", "packed", "packed positions")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Problem(NamedTuple):
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dim: int = 64
    seqlen: int = 5
    dtype: torch.dtype = torch.float32
    layout: str = "packed"
    start: str = "none"
    angles: str = "table"  # "float32": a table of that; "inv_freq"; for qk_norm_rope "no angles"
    interleaved: bool = False
    weight: str = "own"  # "float32", "none"
    eps: float = 1e-6
    offset: float = 0.0

    @property
    def packed(self) -> bool:
        return self.start.startswith("packed")

    @property
    def begins(self) -> tuple[int, ...]:
        """Of packed rows: one before, a sequence, one of nothing, another, one behind."""
        return (1, self.seqlen + 1, self.seqlen + 1, 2 * self.seqlen)

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        rows = (2 * self.seqlen + 1,) if self.packed else (2, self.seqlen)
        q, k = (laid_out(randn(*rows, h, self.head_dim, dtype=self.dtype, seed=h), self.layout) for h in self.heads)
        dtype = torch.float32 if self.weight == "float32" else self.dtype
        weights = (randn(self.head_dim, dtype=dtype, seed=n) for n in (7, 8))
        return q, k, *(None if self.weight == "none" else weight for weight in weights)  # type: ignore[return-value]

    def said(self) -> dict[str, Any]:
        """Arguments that say angles and positions."""
        device = int32(0).device
        found: dict[str, Any] = {"interleaved": self.interleaved}
        found |= {"cu_seqlens": int32(*self.begins)} if self.packed else {}
        if self.angles == "no angles":
            return found
        if self.angles == "inv_freq":
            found["inv_freq"] = 100.0 ** -(torch.arange(self.dim // 2) / max(1, self.dim // 2)).to(device)
        else:
            dtype = torch.float32 if self.angles == "float32" else self.dtype
            found["cos"], found["sin"] = table(POSITIONS, self.dim, dtype, self.layout == "odd")
        if self.start.endswith("positions"):
            numbers = torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(1)).int().to(device)
            found["positions"] = numbers[: 2 * self.seqlen + self.packed].view(*([-1] if self.packed else [2, -1]))
        elif self.start in ("offsets", "packed"):
            found["offsets"] = int32(*(7, 2, 0)[: 2 + self.packed])
        elif self.start == "int":
            found["offsets"] = 9
        return found

    def positions(self, said: dict[str, Any]) -> Tensor:
        """Of each row; -1: it is of no sequence."""
        firsts = torch.as_tensor(said.get("offsets", 0)).cpu().expand(2 + self.packed)
        found = firsts[:, None] + torch.arange(self.seqlen)
        if self.packed:
            own, found = found, torch.full((2 * self.seqlen + 1,), -1)
            for first, (begin, end) in zip(own, itertools.pairwise(self.begins), strict=True):
                found[begin:end] = first[: end - begin]
        return torch.where(found < 0, found, said["positions"].cpu().long()) if "positions" in said else found

    def turned(self, x: Tensor, said: dict[str, Any]) -> Tensor:
        """In fp64, on the CPU; rows of no sequence are 0."""
        positions = self.positions(said)
        x, positions = x.cpu().double() * (positions >= 0)[..., None, None], positions.clamp(min=0)
        if self.angles == "no angles":
            return x
        if "inv_freq" in said:
            angles = (torch.arange(POSITIONS).float()[:, None] * said["inv_freq"].cpu()).double()
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = said["cos"].cpu(), said["sin"].cpu()
        batched = x if x.dim() == 4 else x[None]
        return rotate(batched, cos, sin, positions.view(batched.shape[:2]), self.interleaved).view(x.shape)


def largest(x: Tensor) -> Tensor:
    return x.double().abs().amax(-1, keepdim=True)


@st.composite
def problems(draw: Any) -> Problem:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    head_dim = one(8, 16, 40, 50, 64, 96, 128, 160, 256, 257, 320)
    dim = 2 * draw(st.integers(1, head_dim // 2)) if draw(st.booleans()) else head_dim // 16 * 16 or head_dim
    return Problem(
        (one(1, 3, 8, 13), one(1, 2, 8)), head_dim, dim, draw(st.integers(1, 9)), one(*DTYPES), one(*LAYOUTS),
        one(*STARTS), one("table", "float32", "inv_freq", "no angles"), draw(st.booleans()),
        one("own", "float32", "none"), one(1e-6, 1e-2), one(0.0, 1.0),
    )  # fmt: skip


def check_rotary(p: Problem) -> None:
    if p.angles == "no angles":
        p = p._replace(angles="table")
    (q, k, _, _), said = p.operands(), p.said()
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    found = cutlass_fmha.rotary_qk(*leaves, **said)
    douts = [randn(*x.shape, dtype=p.dtype, seed=5) for x in found]
    for x, out, dx, dout in zip(leaves, found, torch.autograd.grad(found, leaves, douts), douts, strict=True):
        assert out.is_contiguous()
        exact = x.detach().cpu().double().requires_grad_()
        right = p.turned(exact, said)
        assert_close(out.cpu(), right.detach(), largest(x.cpu()))
        assert_close(dx.cpu(), torch.autograd.grad(right, exact, dout.cpu().double())[0], largest(dout.cpu()))
    in_place = [laid_out(x.clone(), p.layout) for x in (q, k)]
    assert all(a is b for a, b in zip(cutlass_fmha.rotary_qk(*in_place, inplace=True, **said), in_place, strict=True))
    there = p.positions(said) >= 0
    for x, out, before in zip(in_place, found, (q, k), strict=True):
        assert torch.equal(bits(x.cpu()[there]), bits(out.cpu()[there]))
        assert torch.equal(bits(x.cpu()[~there]), bits(before.cpu()[~there]))
    written = cutlass_fmha.rotary_qk(q, k, out=nowhere(found, p.layout), **said)
    assert all(torch.equal(bits(x), bits(out)) for x, out in zip(written, found, strict=True))


def nowhere(like: tuple[Tensor, ...], layout: str) -> tuple[Tensor, ...]:
    """To write to."""
    return tuple(laid_out(torch.full_like(x, math.nan), layout) for x in like)


def check_norm(p: Problem) -> None:
    operands, said = p.operands(), p.said()
    norm = {"eps": p.eps, "weight_offset": p.offset, **said}
    leaves = [None if x is None else x.detach().requires_grad_() for x in operands]
    found = cutlass_fmha.qk_norm_rope(leaves[0], leaves[1], None, leaves[2], leaves[3], **norm)
    exact = in_fp64(*operands)
    expected = [p.turned(rms_norm(exact[n], exact[2 + n], None, p.eps, p.offset), said) for n in (0, 1)]
    for out, right in zip(found, expected, strict=True):
        assert_close(out.detach().cpu(), right.detach(), 4 * largest(right.detach()))
    with torch.no_grad():
        q, k, *weights = operands
        written = cutlass_fmha.qk_norm_rope(q, k, None, *weights, out=nowhere(found, p.layout), **norm)
    assert all(torch.equal(bits(x), bits(out)) for x, out in zip(written, found, strict=True))
    douts = [randn(*x.shape, dtype=p.dtype, seed=5) for x in found]
    inputs, exact_inputs = ([x for x in some if x is not None] for some in (leaves, exact))
    gradients = torch.autograd.grad(found, inputs, douts, retain_graph=True)
    again = torch.autograd.grad(found, inputs, douts)
    right = torch.autograd.grad(expected, exact_inputs, [x.cpu().double() for x in douts])
    for n, (dx, other, exact_dx) in enumerate(zip(gradients, again, right, strict=True)):
        assert torch.equal(bits(dx), bits(other)), "the same bits in each run"
        scale = torch.tensor(4.0 * douts[n % 2].numel() ** 0.5 + 4.0)
        if n < 2:
            weight = 1.0 if exact[2 + n] is None else float((exact[2 + n].detach() + p.offset).abs().max())
            norm_of_row = (exact[n].detach().square().mean(-1, keepdim=True) + p.eps).sqrt()
            scale = weight * largest(douts[n].cpu()) / norm_of_row
        assert_close(dx.cpu(), exact_dx, 8 * scale)


@pytest.mark.parametrize("op", ["rotary_qk", "qk_norm_rope"])
@drawn
@given(p=problems())
@example(p=Problem((32, 8), 128, 128, 9, torch.bfloat16))
@example(p=Problem((5, 1), 128, 128, 9, torch.float16, "bhsd", "packed", interleaved=True))
@example(p=Problem((3, 3), 72, 24, 3, torch.bfloat16, "padded", "offsets", "float32"))
@example(p=Problem((8, 2), 256, 256, 3, torch.float32, "packed", "int", "inv_freq"))
def test_heads(op: str, p: Problem):
    (check_rotary if op == "rotary_qk" else check_norm)(p)


@kernels_only
def test_of_many_rows_a_thread_has_several():
    """The same bits as of few, which have a thread each; the last elements of a row have no partner in it."""
    rows, last, dtype = 8192, 8189, torch.bfloat16
    cos, sin = table(rows, 16, dtype)
    operands = [randn(1, rows, heads, 24, dtype=dtype, seed=heads) for heads in (64, 3)]
    douts = [randn(*x.shape, dtype=dtype, seed=5) for x in operands]

    def run(begin: int) -> list[Tensor]:
        leaves = [x[:, begin:].detach().requires_grad_() for x in operands]
        weights = [randn(24, dtype=dtype, seed=n) for n in (7, 8)]
        said = {"cos": cos, "sin": sin, "interleaved": True, "offsets": begin}
        found = cutlass_fmha.qk_norm_rope(*leaves, None, *weights, **said)
        return [*found, *torch.autograd.grad(found, leaves, [x[:, begin:] for x in douts])]

    for many, few in zip(run(0), run(last), strict=True):
        assert torch.equal(bits(many[:, last:].cpu()), bits(few.cpu()))


def check_to_cache(kind, dims, head_dim_v, layout, begins, numbers, interleaved, dtype: torch.dtype) -> None:
    """What stands in the cache and what is returned against fp64; values are there bit by bit."""
    append = Append(kind, dtype, dims[0], head_dim_v, layout, begins)
    lengths = append.draw_lengths(numbers)
    pads = lengths // 3
    places = {"cu_seqlens" if name == "cu_seqlens_q" else name: x for name, x in append.places.items()}
    q = laid_out(randn(*append.key.shape[:-2], 6, dims[0], dtype=dtype, seed=6), layout)
    weights = [randn(dims[0], dtype=dtype, seed=n) for n in (1, 2)]
    cos, sin = table(40, dims[1], torch.float32)
    said = dict(zip(("k_cache", "v_cache"), append.views, strict=True), cache_seqlens=lengths, leftpad_k=pads, **places)
    said |= {"cos": cos, "sin": sin, "interleaved": interleaved}
    call = functools.partial(cutlass_fmha.qk_norm_rope, q, append.key, append.value, *weights, **said)
    out, used = call()
    to = *nowhere((q,), layout), torch.full_like(lengths, -7)
    assert call(out=to) is to and torch.equal(bits(to[0]), bits(out)) and torch.equal(to[1], used)
    assert used.tolist() == [n + new for n, new in zip(lengths.tolist(), append.lengths, strict=True)]
    for x, found, weight in ((q, out, weights[0]), (append.key, append.keys(lengths), weights[1])):
        for b, (own, turned) in enumerate(zip(sequences(x, begins), sequences(found, begins), strict=True)):
            normed = rms_norm(own.double(), weight.cpu().double(), None, 1e-6, 0.0)
            positions = following((lengths - pads)[b : b + 1], own.shape[1])
            right = rotate(normed, cos.cpu(), sin.cpu(), positions, interleaved)
            assert_close(turned, right, 4 * largest(right))
    assert begins is None or not (out[: begins[0]].any() or out[begins[-1] :].any()), "rows of no sequence are 0"


@drawn
@given(**NEW_ROWS, dtype=st.sampled_from(DTYPES))
def test_a_cache_gets_the_rows(**p: Any):
    check_to_cache(**p)


@kernels_only
def test_rows_without_an_angle_or_a_place():
    append, lengths = Append("pages", torch.float16), int32(46, -2, 2**31 - 1)
    q, (cos, sin) = randn(3, 5, 6, 64, dtype=torch.float16), table(40, 32, torch.float32)
    said = dict(zip(("k_cache", "v_cache"), append.views, strict=True), cache_seqlens=lengths, **append.places)
    said |= {"cos": cos, "sin": sin, "offsets": int32(0, 38, -1)}
    out, _ = cutlass_fmha.qk_norm_rope(q, append.key, append.value, **said)
    assert all(cache.intact() for cache in append.caches)
    assert {b for b, _ in append.check_places(lengths)} == {0}
    outside = torch.zeros(3, 5, 6, 64, dtype=torch.bool)
    outside[1, 2:, :, :32] = outside[2, :1, :, :32] = True
    assert torch.equal(out.isnan().cpu(), outside)


def test_nothing_is_a_call_as_well():
    weight = randn(64).requires_grad_()
    for shape in ((0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)):
        q, k = randn(*shape).requires_grad_(), randn(*shape[:2], 4, 64)
        cos, sin = table(9, 64, torch.float32)
        out, _ = cutlass_fmha.qk_norm_rope(q, k, None, weight, cos=cos, sin=sin)
        dq, dw = torch.autograd.grad(out.sum(), (q, weight))
        assert dq.shape == shape and (dw == 0).all()
        assert cutlass_fmha.rotary_qk(q, k, cos, sin, inplace=False)[0].shape == shape
    x, rows, one = randn(7, 2, 64), randn(2, 0, 4, 64), table(9, 64, torch.float32)
    for out in cutlass_fmha.rotary_qk(x, x, *one, cu_seqlens=int32(0, 7)[:1]):
        assert (out == 0).all()
    caches = {name: randn(2, 16, 4, 64) for name in ("k_cache", "v_cache")}
    _, used = cutlass_fmha.qk_norm_rope(rows, rows, rows, cache_seqlens=int32(3, 5), **caches)
    assert used.tolist() == [3, 5]


def test_large_angles_are_those_of_float32():
    inv_freq = torch.tensor([1.0, 0.37, 1e-3, 1e-4]).to(int32(0).device)
    positions = int32(0, 1, 3, 1000, 131071, 999983, 2**24 - 1)[:, None]
    x = torch.zeros(7, 1, 1, 8, device=positions.device)
    x[..., :4] = 1.0
    out, _ = cutlass_fmha.rotary_qk(x, x, inv_freq=inv_freq, positions=positions)
    angles = (positions.float() * inv_freq).double().cpu()
    assert (out[:, 0, 0, :4].cpu() - angles.cos()).abs().max() < 2.0**-21
    assert (out[:, 0, 0, 4:].cpu() - angles.sin()).abs().max() < 2.0**-21
