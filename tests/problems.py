"""Attention problems for the parity tests: what is asked, which numbers, and how the tensors lie in memory.

A problem is data, so that the same list runs against every row, a report can name what failed, and hypothesis
can draw more. Every tensor lies inside a buffer of NaN: an element that a kernel reads outside its operand, a
padding row included, poisons the result, since even a probability of zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

GUARD = 256  # elements of NaN before and after each tensor: 512 bytes keep the alignment of the allocation
CAUSAL = ("none", "top-left", "bottom-right")


@dataclass(frozen=True)
class Problem:
    """One call of attention, but for dtype and head_dim, which the row decides."""

    seqlen_q: int
    seqlen_k: int
    causal: str = "none"
    batch: int = 2
    num_heads: int = 2
    num_heads_kv: int = 2
    scale: float | None = None
    fill: str = "normal"
    layout: str = "bshd"
    return_lse: bool = True
    seed: int = 0

    def __str__(self) -> str:
        heads = f"{self.num_heads}" + (f"/{self.num_heads_kv}" if self.num_heads_kv != self.num_heads else "")
        parts = [f"b{self.batch} h{heads} q{self.seqlen_q} k{self.seqlen_k} {self.causal}"]
        parts += [] if self.scale is None else [f"scale={self.scale:g}"]
        parts += [x for x in (self.fill, self.layout) if x not in ("normal", "bshd")]
        parts += [] if self.return_lse else ["no-lse"]
        return " ".join(parts) + (f" seed={self.seed}" if self.seed else "")

    @property
    def exact_scores(self) -> bool:
        return self.fill in ("large", "huge")

    def runs_on(self, alignment: int) -> bool:
        """Whether a row that asks for ``alignment`` bytes can take the problem's memory layout."""
        return alignment <= 2 or self.layout != "unaligned"

    def inputs(
        self, dtype: torch.dtype, head_dim: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as [batch, seqlen, heads, head_dim] views, surrounded by NaN."""
        q, k, v = FILLS[self.fill](self, dtype, head_dim, device)
        return lay_out(q, k, v, self.layout)


Fill = Callable[[Problem, torch.dtype, int, torch.device | str], list[Tensor]]


# ---- numbers -----------------------------------------------------------------------------------------------


def _normal(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator(device=device).manual_seed(problem.seed)
    p = problem
    shapes = [(p.seqlen_q, p.num_heads), (p.seqlen_k, p.num_heads_kv), (p.seqlen_k, p.num_heads_kv)]
    return [
        torch.randn(p.batch, s, h, head_dim, generator=generator, device=device).to(dtype) for s, h in shapes
    ]


def _constant(
    problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str
) -> list[Tensor]:
    """Every key weighs the same, and every output is the one value there is."""
    return [torch.full_like(x, 0.7) for x in _normal(problem, dtype, head_dim, device)]


def _ramp(per_key: float) -> Fill:
    """Scores change by up to 2 * ``per_key`` from one key to the next: up in some rows, down in others."""

    def fill(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
        q, k, v = _normal(problem, dtype, head_dim, device)
        scale = problem.scale or head_dim**-0.5  # a scale of 0 has no ramp to show
        # The first element of q and k carries the ramp; q's varies by row, in size and sign.
        slope = q[..., 0].float().clamp(-2, 2)
        steps = torch.arange(problem.seqlen_k, device=device, dtype=torch.float32) * per_key / scale
        limit = 60000.0
        q[..., 0] = slope.to(dtype)
        k[..., 0] = steps.clamp(-limit, limit).to(dtype)[:, None]
        return [q, k, v]

    return fill


def _outliers(
    problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str
) -> list[Tensor]:
    """A few keys score far above all before them, for some query rows of a warp and not for others."""
    q, k, v = _normal(problem, dtype, head_dim, device)
    k[:, 5::37] *= 20
    return [q, k, v]


def _exact(
    q_unit: float, k_unit: float, half_q_unit: float | None = None, half_k_unit: float | None = None
) -> Fill:
    """Scores that are integers up to 12 times the units' product (the latter two: in fp16), exact in fp32 in
    any order of summation, with frequent ties. Beyond ties the softmax picks one key."""

    def fill(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
        q, k, v = _normal(problem, dtype, head_dim, device)
        half = dtype == torch.float16
        q[..., 4:] = 0  # sums of four products of small integers and a power of two
        q = q.float().round().clamp(-1, 1) * ((half and half_q_unit) or q_unit)
        k = k.float().round().clamp(-3, 3) * ((half and half_k_unit) or k_unit)
        return [q.to(dtype), k.to(dtype), v]

    return fill


def _huge_values(
    problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str
) -> list[Tensor]:
    q, k, v = _normal(problem, dtype, head_dim, device)
    return [q, k, v.clamp(-4, 4) * (15000.0 if dtype == torch.float16 else 1e30)]


def _small(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
    """Subnormal numbers in fp16; with a scale of 2^40 the scores are ordinary again."""
    return [x * 2.0**-20 for x in _normal(problem, dtype, head_dim, device)]


def _tiny(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
    """The smallest subnormal numbers of fp16; in bf16 numbers whose products underflow to 0."""
    unit = 2.0**-23 if dtype == torch.float16 else 1e-30
    return [x * unit for x in _normal(problem, dtype, head_dim, device)]


def _minus_infinity(hides: Callable[[Tensor], Tensor]) -> Fill:
    """Scores of -inf for the keys that ``hides`` names, given their numbers."""

    def fill(problem: Problem, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> list[Tensor]:
        q, k, v = _normal(problem, dtype, head_dim, device)
        q[..., 0] = q[..., 0].abs() + 0.5  # positive, so that the scores are -inf and not +inf
        k[:, hides(torch.arange(problem.seqlen_k, device=device)), :, 0] = -torch.inf
        return [q, k, v]

    return fill


FILLS = {
    "normal": _normal,
    "constant": _constant,
    "ramp": _ramp(0.05),
    "steep-ramp": _ramp(1.0),
    "outliers": _outliers,
    "large": _exact(2.0**10, 2.0**10),
    "huge": _exact(2.0**50, 2.0**50, 2.0**15, 2.0**14),
    "huge-values": _huge_values,
    "small": _small,
    "tiny": _tiny,
    "first-keys-minus-inf": _minus_infinity(lambda j: j < 100),
    "last-keys-minus-inf": _minus_infinity(lambda j: j >= j.numel() - 100),
    "most-keys-minus-inf": _minus_infinity(lambda j: j % 50 > 0),
    "all-keys-minus-inf": _minus_infinity(lambda j: j >= 0),
}


# ---- memory ------------------------------------------------------------------------------------------------


def poison(dtype: torch.dtype, count: int, device: torch.device | str) -> Tensor:
    """``count`` elements of NaN, with a bit pattern that no arithmetic makes."""
    bits = {
        torch.float16: (torch.int16, 0x7E5A),
        torch.bfloat16: (torch.int16, 0x7FDA),
        torch.float32: (torch.int32, 0x7FDA5A5A),
        torch.float64: (torch.int64, 0x7FFDA5A55A5A5A5A),
    }
    integer, pattern = bits[dtype]
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


def _packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one tensor along the heads, as a fused projection leaves them; of two for two lengths."""
    heads_kv = k.shape[2]
    if q.shape[1] == k.shape[1]:
        whole = place(torch.cat([q, k, v], dim=2))
        q, kv = whole[:, :, : q.shape[2]], whole[:, :, q.shape[2] :]
    else:
        q, kv = place(q), place(torch.cat([k, v], dim=2))
    return q, kv[:, :, :heads_kv], kv[:, :, heads_kv:]


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stride 0 over the batch of q and over the heads of k and v: one copy read by all."""
    q = place(q[:1]).expand(q.shape)
    return q, place(k[:, :, :1]).expand(k.shape), place(v[:, :, :1]).expand(v.shape)


def lay_out(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in memory as ``layout`` says; "expanded" keeps only the first batch or head of each."""
    if layout == "bshd":
        return place(q), place(k), place(v)
    if layout == "bhsd":
        return place(q, "bhsd"), place(k, "bhsd"), place(v, "bhsd")
    if layout == "sbhd":
        return place(q, "sbhd"), place(k, "sbhd"), place(v, "sbhd")
    if layout == "padded":
        return place(q, row_pad=8), place(k, row_pad=24), place(v, "bhsd", row_pad=40)
    if layout == "packed":
        return _packed(q, k, v)
    if layout == "expanded":
        return _expanded(q, k, v)
    if layout == "unaligned":
        return place(q, offset=GUARD + 1), place(k, row_pad=3), place(v, "bhsd", row_pad=1, offset=GUARD + 7)
    raise ValueError(f"no layout {layout!r}")


LAYOUTS = ("bshd", "bhsd", "sbhd", "padded", "packed", "expanded", "unaligned")


# ---- the list ----------------------------------------------------------------------------------------------

# Around the tiles' sizes (32, 64 and 256), both lengths, each longer than the other by less and by more than
# a tile.
LENGTHS = (
    (1, 1), (1, 17), (17, 1), (17, 113), (113, 17), (63, 65), (64, 64), (65, 63), (128, 32), (33, 96),
    (113, 113), (255, 257), (256, 256), (257, 255), (1, 1023), (1023, 1), (113, 1023), (1023, 113),
    (1023, 1023),
)  # fmt: skip


def _lengths() -> list[Problem]:
    heads = [(2, 2), (4, 2), (3, 1)]
    problems = []
    for i, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        for j, causal in enumerate(CAUSAL):
            h, h_kv = heads[(i + j) % 3]
            problems.append(
                Problem(
                    seqlen_q, seqlen_k, causal, num_heads=h, num_heads_kv=h_kv, return_lse=(i + j) % 4 > 0
                )
            )
    return problems


def _empty() -> list[Problem]:
    problems = [Problem(q, k, causal) for q, k in ((0, 5), (5, 0), (300, 0), (0, 0)) for causal in CAUSAL]
    return [*problems, Problem(5, 7, batch=0), Problem(5, 7, num_heads=0, num_heads_kv=0)]


def _numbers() -> list[Problem]:
    scales = (0.0, -0.2, 1.0, -3.0, 20.0, 1e-6, 1e-45, -1e-45)
    problems = [
        Problem(130, 300, causal, scale=scale) for scale in scales for causal in ("none", "bottom-right")
    ]
    for fill in FILLS:
        for lengths, causal in (((130, 300), "none"), ((300, 300), "bottom-right"), ((70, 1023), "none")):
            scale = 1.0 if fill in ("large", "huge") else None
            problems.append(Problem(*lengths, causal, fill=fill, scale=scale, num_heads=4))
    return [
        *problems,
        Problem(130, 300, "bottom-right", fill="small", scale=2.0**40),
        Problem(200, 500, fill="steep-ramp", scale=-0.1),
        Problem(64, 64, "top-left", fill="huge", scale=-1.0),
    ]


def _memory() -> list[Problem]:
    problems = [
        Problem(q, k, causal, batch=3, num_heads=6, num_heads_kv=3, layout=layout)
        for layout in LAYOUTS
        for q, k, causal in ((113, 113, "bottom-right"), (65, 300, "none"))
    ]
    return [
        *problems,
        Problem(3, 5, batch=1, num_heads=64, num_heads_kv=8),
        Problem(1, 70, batch=300, num_heads=8, num_heads_kv=1),
        # More (batch, head) pairs than the y and z dimensions of a grid hold.
        Problem(1, 2, batch=70000, num_heads=1, num_heads_kv=1),
        Problem(2, 1, batch=1, num_heads=70000, num_heads_kv=1),
        Problem(1, 20000, batch=1, num_heads=4, num_heads_kv=1),
        Problem(2048, 2048, "bottom-right", batch=1, num_heads=8, num_heads_kv=2),
    ]


def listed() -> list[Problem]:
    """The problems every row is run on, without those whose layout it can't take. Each has its own seed."""
    problems = [*_lengths(), *_empty(), *_numbers(), *_memory()]
    return [replace(problem, seed=seed) for seed, problem in enumerate(problems)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any problem of moderate size. Shrinks towards one batch, one head and one key."""
    length = st.one_of(st.integers(0, 40), st.integers(0, 300), st.integers(250, 1100))
    group, heads_kv = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    scale = st.one_of(st.none(), st.just(0.0), st.floats(-2.0, 2.0, width=32))
    # Not those that need a scale of their own: huge scores are exact for powers of two, -inf wants a positive
    # scale.
    fills = ("normal", "constant", "ramp", "steep-ramp", "outliers", "huge-values", "small", "tiny")
    return Problem(
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        causal=draw(st.sampled_from(CAUSAL)),
        batch=draw(st.integers(1, 3)),
        num_heads=group * heads_kv,
        num_heads_kv=heads_kv,
        scale=draw(scale),
        fill=draw(st.sampled_from(fills)),
        layout=draw(st.sampled_from(LAYOUTS)),
        return_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
