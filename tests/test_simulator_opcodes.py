"""The simulator's arithmetic of floats, bit by bit, and what it says of instructions that it does not know.

Integers, addresses, lanes and matrices are what every row of test_simulated_parity.py computes with: a row whose
index or operand is another one is far off, or outside of its tensors.
"""

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import ptx
import pytest

#: An opcode, the type of its result, its operands, and what comes out.
Case = tuple[str, type, tuple[Any, ...], np.ndarray]

RNG = np.random.default_rng(1)
FLOATS = np.float32(
    [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 3e38, -3e38, 1e-38, 1e-40, -1e-45, math.inf, -math.inf, math.nan]
)


def floats(count: int = 256) -> np.ndarray:
    """All kinds of floats, ordinary ones most of all."""
    values = np.float32(RNG.standard_normal(count) * 10.0 ** RNG.integers(-6, 6, count))
    values[: len(FLOATS)] = FLOATS
    RNG.shuffle(values)
    return values


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit by bit, but that one NaN is as good as another, and is PTX's."""
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[actual.itemsize]
    expected = np.asarray(expected).astype(actual.dtype)
    different = actual.view(bits) != expected.view(bits)
    if actual.dtype.kind == "f":
        different &= ~(np.isnan(actual) & np.isnan(expected))
    assert not different.any(), f"{actual[different][:8]} are no {expected[different][:8]}"


# ---- the table ---------------------------------------------------------------------------------------------


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


#: Of one operand or of two, as many as the model takes.
ARITHMETIC: dict[str, np.ufunc] = {
    "add.f32": np.add, "sub.f32": np.subtract, "mul.f32": np.multiply, "div.rn.f32": np.divide,
    "rcp.rn.f32": np.reciprocal, "neg.f32": np.negative, "abs.f32": np.abs,
}  # fmt: skip


def fp32() -> Iterator[Case]:
    for opcode, model in ARITHMETIC.items():
        operands = [floats() for _ in range(model.nin)]
        yield opcode, np.float32, tuple(operands), model(*operands)
    a, b, c = floats(), floats(), floats()
    yield "rcp.approx.ftz.f32", np.float32, (a,), flush(1 / flush(a))
    yield "copysign.f32", np.float32, (a, b), np.copysign(b, a)
    yield "cvt.sat.f32.f32", np.float32, (c,), np.where(c > 0, np.minimum(c, 1), 0)
    powers = np.float32([-math.inf, math.inf, math.nan, 0, -200, 200, 127, -126, -140, -149, 128, -127])
    exact = np.float32([2.0 ** float(v) if v < 128 else v if v != v else math.inf for v in powers])
    powers, exact = (np.resize(x, 32) for x in (powers, exact))
    yield "ex2.approx.f32", np.float32, (powers,), exact
    yield "ex2.approx.ftz.f32", np.float32, (powers,), flush(exact)
    x = np.where(np.isfinite(a), a, np.float32(2.5))
    yield "cvt.rni.f32.f32", np.float32, (x,), np.rint(x)
    yield "rsqrt.approx.f32", np.float32, (x,), np.float32(1) / np.sqrt(x)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def conversions() -> Iterator[Case]:
    for source, dtype in (("s32", np.int32), ("u16", np.uint16)):
        x = np.frombuffer(RNG.bytes(256 * np.dtype(dtype).itemsize), dtype=dtype)
        yield f"cvt.rn.f32.{source}", np.float32, (x,), x.astype(np.float32)
    x, every = floats(), np.arange(65536, dtype=np.uint16)
    x[:40] = np.linspace(-2, 2, 40) * 2.0 ** RNG.integers(-24, 15, 40)
    yield "cvt.rn.f16.f32", np.float16, (x,), x.astype(np.float16)
    yield "cvt.f32.f16", np.float32, (every,), every.view(np.float16).astype(np.float32)
    x = floats()
    x[:64] = (np.arange(64, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32)  # ties
    y = to_bfloat16(x)
    yield "cvt.rn.bf16.f32", np.uint16, (x,), y
    yield "cvt.f32.bf16", np.float32, (y,), (y.astype(np.uint32) << 16).view(np.float32)
    # Pairs have their first operand on top.
    a, b = (np.float32(RNG.standard_normal(64)) for _ in range(2))
    halves = (h.astype(np.float16).view(np.uint16).astype(np.uint32) for h in (a, b))
    yield "cvt.rn.f16x2.f32", np.uint32, (a, b), next(halves) << 16 | next(halves)
    yield "cvt.rn.bf16x2.f32", np.uint32, (a, b), to_bfloat16(a).astype(np.uint32) << 16 | to_bfloat16(b)
    pairs = [to_bfloat16(h).astype(np.uint32) << 16 | to_bfloat16(g) for h, g in ((a, b), (b, b))]
    halves = [((h & 0xFFFF0000).view(np.float32), (h << 16).view(np.float32)) for h in pairs]
    upper, lower = (to_bfloat16(g * h).astype(np.uint32) for g, h in zip(*halves, strict=True))
    yield "mul.rn.bf16x2", np.uint32, tuple(pairs), upper << 16 | lower


COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "gtu": lambda a, b: ~(a <= b), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def predicates() -> Iterator[Case]:
    """Where a comparison of floats holds, with NaN on either side; and a shift."""
    for name, model in COMPARISONS.items():
        a, b = floats(32), floats(32)
        a[::5] = b[::5]
        yield f"setp.{name}.f32 %p0, %in0, %in1; selp.u32 %out, 1, 0, %p0;", np.uint32, (a, b), model(a, b)
    # What no row of test_simulated_parity.py computes with: gradients by dS of head dim 32 on sm_120 do.
    low, high, n = (np.frombuffer(RNG.bytes(1024), dtype=np.uint32) for _ in range(3))
    both = high.astype(np.uint64) << 32 | low
    yield "shf.l.wrap.b32", np.uint32, (low, high, n), both << (n & 31) >> 32


with np.errstate(all="ignore"):
    CASES = [*fp32(), *conversions(), *predicates()]


@pytest.mark.parametrize(("opcode", "dtype", "operands", "expected"), CASES, ids=[case[0] for case in CASES])
def test_opcode(opcode: str, dtype: type, operands: tuple[np.ndarray, ...], expected: np.ndarray):
    same(ptx.apply(opcode, dtype, *operands), expected)


# ---- what is not bit by bit --------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["rn", "rm"])
def test_fma_rounds_once(rounding: str):
    """To the nearest number, or down."""
    a, b, c = (np.float32(RNG.standard_normal(64) * 2.0 ** RNG.integers(-20, 20, 64)) for _ in range(3))
    c[:16] = -(a * b)[:16]  # where a separate product would round everything away
    a[16], b[16], c[16] = 1, 1, -1e-30  # which is lost in a double, too
    found = ptx.apply(f"fma.{rounding}.f32", np.float32, a, b, c)
    for near in zip(a, b, c, *(np.nextafter(found, np.float32(x)) for x in (-np.inf, np.inf)), found, strict=True):
        *abc, below, above, x = (Fraction(float(value)) for value in near)
        exact = abc[0] * abc[1] + abc[2]
        assert x <= exact < above if rounding == "rm" else below + x <= 2 * exact <= x + above


def test_minimum_and_maximum_take_the_number():
    a, b = np.resize(np.float32([math.nan, 1.0, math.nan, -0.0, 2.0]), 32), np.resize(FLOATS[::-1], 32)
    b[:4] = (1.0, math.nan, math.nan, 0.0)
    low, high = np.fmin(a, b), np.fmax(a, b)
    low[3], high[3] = -0.0, 0.0
    same(ptx.apply("min.f32", np.float32, a, b)[:4], low[:4])
    same(ptx.apply("max.f32", np.float32, a, b)[:4], high[:4])
    same(np.abs(ptx.apply("min.f32", np.float32, a, b)), np.abs(low))


def test_arithmetic_makes_one_nan():
    a = np.full(32, math.nan, dtype=np.float32)
    assert set(ptx.apply("add.f32", np.float32, a, a).view(np.uint32)) == {0x7FFFFFFF}


def test_powers_of_two_are_nearly_exact():
    x = np.linspace(-120, 120, 256, dtype=np.float32)
    for opcode in ("ex2.approx.ftz.f32", "ex2.approx.f32"):
        np.testing.assert_allclose(ptx.apply(opcode, np.float32, x), np.exp2(x.astype(np.float64)), rtol=2**-22)


# ---- what is not known -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("frobnicate.b32 %r, %r;", "unknown opcode in frobnicate.b32"),
        ("add.f32 %r, %r;", "too few operands in add.f32"),
        ("add.f32 %r, %r, %r, %r;", "too many operands in add.f32"),
        ("add.s64 %r, %r, %r;", "register %r is not of 64 bits in add.s64"),
        ("mov.u32 %r, %moon;", "unknown name %moon in mov.u32"),
        ("selp.b32 %r, %r, %r, %r;", "an operand that is no predicate in selp.b32"),
        ("ld.global.v2.u32 {%r, %r, %r}, [%r];", "a vector of another length in ld.global.v2.u32"),
        ("bra NOWHERE;", "there is no label NOWHERE"),
        ("mov.u32 %r 1;", 'expected ";"'),
    ],
)
def test_what_is_unknown_is_an_error_with_its_line(statement: str, complaint: str):
    text = ptx.module(f".reg .b32 %r;\n{statement}\nret;", 0)
    line = 1 + text[: text.index(statement)].count("\n")
    with pytest.raises(ptx.SimulationError, match=f"PTX line {line}: {re.escape(complaint)}"):
        ptx.run_text(text, [])
