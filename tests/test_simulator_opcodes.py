"""The simulator's instructions against models of numpy's and Python's, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import ptx
import pytest

Model = Callable[..., Any]

RNG = np.random.default_rng(1)
FLOATS = np.float32(
    [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 3e38, -3e38, 1e-38, 1e-40, -1e-45, math.inf, -math.inf, math.nan]
)


def integers(dtype: type, count: int = 256) -> np.ndarray:
    """Random bits, with the numbers at the edges among them."""
    info = np.iinfo(dtype)
    values = np.frombuffer(RNG.bytes(count * np.dtype(dtype).itemsize), dtype=dtype).copy()
    values[:6] = (0, 1, info.max, info.min, info.max // 2, info.max - 1)
    RNG.shuffle(values)
    return values


def floats(dtype: type = np.float32, count: int = 256) -> np.ndarray:
    """All kinds of floats, ordinary ones most of all."""
    values = (RNG.standard_normal(count) * 10.0 ** RNG.integers(-6, 6, count)).astype(dtype)
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


# ---- integers ----------------------------------------------------------------------------------------------

TYPES = {
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
}


def wrap(value: int, dtype: type) -> int:
    """An integer's last bits as a number of the type."""
    bits = np.dtype(dtype).itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGERS: dict[str, Model] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated_quotient(a, b) if b else -1,
    "rem": lambda a, b: a - b * truncated_quotient(a, b) if b else a,
}


def expect(dtype: type, model: Model, *operands: np.ndarray) -> np.ndarray:
    """The model, on Python's integers, of each element."""
    values = [wrap(model(*(int(x) for x in row)), dtype) for row in zip(*operands, strict=True)]
    return np.array(values, dtype=dtype)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_arithmetic_wraps(name: str, type_name: str):
    dtype = TYPES[type_name]
    a, b = integers(dtype), integers(dtype)
    same(ptx.apply(f"{name}.{type_name}", dtype, a, b), expect(dtype, INTEGERS[name], a, b))


@pytest.mark.parametrize("type_name", TYPES)
def test_upper_halves_of_products(type_name: str):
    dtype = TYPES[type_name]
    bits = np.dtype(dtype).itemsize * 8
    a, b, c = integers(dtype), integers(dtype), integers(dtype)
    same(ptx.apply(f"mul.hi.{type_name}", dtype, a, b), expect(dtype, lambda a, b: a * b >> bits, a, b))
    same(
        ptx.apply(f"mad.hi.{type_name}", dtype, a, b, c),
        expect(dtype, lambda a, b, c: (a * b >> bits) + c, a, b, c),
    )
    same(ptx.apply(f"mad.lo.{type_name}", dtype, a, b, c), expect(dtype, lambda a, b, c: a * b + c, a, b, c))
    if bits < 64:
        wide = TYPES[f"{type_name[0]}{2 * bits}"]
        d = integers(wide)
        same(ptx.apply(f"mul.wide.{type_name}", wide, a, b), expect(wide, lambda a, b: a * b, a, b))
        same(
            ptx.apply(f"mad.wide.{type_name}", wide, a, b, d),
            expect(wide, lambda a, b, d: a * b + d, a, b, d),
        )


@pytest.mark.parametrize("type_name", [name for name in TYPES if name[0] == "s"])
def test_signs(type_name: str):
    dtype = TYPES[type_name]
    a = integers(dtype)
    same(ptx.apply(f"neg.{type_name}", dtype, a), expect(dtype, lambda a: -a, a))
    same(ptx.apply(f"abs.{type_name}", dtype, a), expect(dtype, abs, a))


# ---- bits --------------------------------------------------------------------------------------------------

BITS = {"16": (np.uint16, np.int16), "32": (np.uint32, np.int32), "64": (np.uint64, np.int64)}


@pytest.mark.parametrize("bits", BITS)
def test_logic_and_shifts(bits: str):
    unsigned, signed = BITS[bits]
    a, b = integers(unsigned), integers(unsigned)
    n = RNG.integers(0, 2 * int(bits), len(a)).astype(np.uint32)
    size = int(bits)
    for name, model in {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }.items():
        same(ptx.apply(f"{name}.b{bits}", unsigned, a, b), expect(unsigned, model, a, b))
    same(ptx.apply(f"not.b{bits}", unsigned, a), expect(unsigned, lambda a: ~a, a))
    same(ptx.apply(f"shl.b{bits}", unsigned, a, n), expect(unsigned, lambda a, n: a << n, a, n))
    same(ptx.apply(f"shr.u{bits}", unsigned, a, n), expect(unsigned, lambda a, n: a >> n, a, n))
    s = a.view(signed)
    same(ptx.apply(f"shr.s{bits}", signed, s, n), expect(signed, lambda s, n: s >> min(n, size - 1), s, n))


def extract(a: int, begin: int, length: int, size: int, signed: bool) -> int:
    """bfe as PTX's reference describes it, bit by bit."""
    bits = [a >> i & 1 for i in range(size)]
    sign = 0 if not signed or length == 0 else bits[min(begin + length - 1, size - 1)]
    found = [bits[i + begin] if i < length and i + begin < size else sign for i in range(size)]
    return sum(bit << i for i, bit in enumerate(found))


@pytest.mark.parametrize("type_name", ["u32", "s32", "u64", "s64"])
def test_fields_are_extracted(type_name: str):
    dtype, size = TYPES[type_name], int(type_name[1:])
    a = integers(dtype)
    begin, length = (RNG.integers(0, size + 9, len(a)).astype(np.uint32) for _ in range(2))
    signed = type_name[0] == "s"
    expected = expect(
        dtype, lambda a, b, n: extract(a & (1 << size) - 1, b, n, size, signed), a, begin, length
    )
    same(ptx.apply(f"bfe.{type_name}", dtype, a, begin, length), expected)


@pytest.mark.parametrize("bits", ["32", "64"])
def test_fields_are_inserted(bits: str):
    dtype, size = BITS[bits][0], int(bits)
    a, b = integers(dtype), integers(dtype)
    begin, length = (RNG.integers(0, size + 9, len(a)).astype(np.uint32) for _ in range(2))

    def model(a: int, b: int, begin: int, length: int) -> int:
        for i in range(min(length, max(0, size - begin))):
            b = b & ~(1 << begin + i) | (a >> i & 1) << begin + i
        return b

    same(ptx.apply(f"bfi.b{bits}", dtype, a, b, begin, length), expect(dtype, model, a, b, begin, length))


def test_bytes_are_permuted():
    a, b, selector = (integers(np.uint32) for _ in range(3))

    def model(a: int, b: int, selector: int) -> int:
        source, result = (b << 32 | a).to_bytes(8, "little"), 0
        for i in range(4):
            choice = selector >> 4 * i & 15
            byte = source[choice & 7]
            result |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
        return result

    same(ptx.apply("prmt.b32", np.uint32, a, b, selector), expect(np.uint32, model, a, b, selector))


@pytest.mark.parametrize("table", [0x00, 0x80, 0x96, 0xCA, 0xE8, 0xF8, 0x6A])
def test_logic_of_three(table: int):
    a, b, c = (integers(np.uint32) for _ in range(3))

    def model(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
        )

    same(ptx.apply("lop3.b32", np.uint32, a, b, c, table), expect(np.uint32, model, a, b, c))


def test_funnel_shifts_and_counts():
    a, b = integers(np.uint32), integers(np.uint32)
    n = RNG.integers(0, 70, len(a)).astype(np.uint32)
    for name, model in {
        "shf.l.wrap": lambda a, b, n: (b << 32 | a) << (n & 31) >> 32,
        "shf.r.wrap": lambda a, b, n: (b << 32 | a) >> (n & 31),
        "shf.l.clamp": lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32,
        "shf.r.clamp": lambda a, b, n: (b << 32 | a) >> min(n, 32),
    }.items():
        same(ptx.apply(f"{name}.b32", np.uint32, a, b, n), expect(np.uint32, model, a, b, n))
    same(ptx.apply("popc.b32", np.uint32, a), expect(np.uint32, int.bit_count, a))
    same(ptx.apply("clz.b32", np.uint32, a), expect(np.uint32, lambda a: 32 - a.bit_length(), a))
    same(ptx.apply("brev.b32", np.uint32, a), expect(np.uint32, lambda a: int(f"{a:032b}"[::-1], 2), a))
    same(ptx.apply("bfind.u32", np.uint32, a), expect(np.uint32, lambda a: a.bit_length() - 1, a))


# ---- floats ------------------------------------------------------------------------------------------------


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


FLOAT_MODELS: dict[str, Model] = {
    "add{}": lambda a, b: a + b,
    "sub{}": lambda a, b: a - b,
    "mul{}": lambda a, b: a * b,
    "div.rn{}": lambda a, b: a / b,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_arithmetic_rounds_to_nearest(name: str):
    for dtype, type_name in ((np.float32, "f32"), (np.float64, "f64")):
        a, b = floats(dtype), floats(dtype)
        same(ptx.apply(name.format(".") + type_name, dtype, a, b), FLOAT_MODELS[name](a, b))
    a, b = floats(), floats()
    a[:32], b[:32] = 1e-30, np.linspace(1e-10, 1e-7, 32)  # products in the range of subnormal numbers
    expected = flush(FLOAT_MODELS[name](flush(a), flush(b)))
    same(ptx.apply(name.format(".ftz.") + "f32", np.float32, a, b), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_rounds_once():
    a, b = floats(), floats()
    c = np.where(np.arange(len(a)) % 2, -(a * b), floats())  # what a separate product would round away
    exact = np.float64(a) * np.float64(b) + np.float64(c)  # the product is exact; the sum rounds where it may
    result = ptx.apply("fma.rn.f32", np.float32, a, b, c)
    cancelled = np.isfinite(exact) & (np.arange(len(a)) % 2 == 1)
    assert (result[cancelled] != 0).any(), "the product's last bits are there"
    same(result[cancelled], exact[cancelled])


def directed(exact: Fraction, up: bool) -> np.float32:
    """The nearest float that is not on the other side of a number."""
    x = np.float32(float(exact))
    while (Fraction(float(x)) < exact) if up else (Fraction(float(x)) > exact):
        x = np.nextafter(x, np.float32(np.inf if up else -np.inf))
    return x


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
def test_other_roundings(mode: str):
    a, b, c = (np.float32(RNG.standard_normal(64) * 2.0 ** RNG.integers(-20, 20, 64)) for _ in range(3))
    c[:16] = -(a * b)[:16]  # where a separate product would round everything away
    for name, model in {
        "add": lambda a, b, c: a + b,
        "sub": lambda a, b, c: a - b,
        "mul": lambda a, b, c: a * b,
        "fma": lambda a, b, c: a * b + c,
    }.items():
        exact = [model(*(Fraction(float(x)) for x in row)) for row in zip(a, b, c, strict=True)]
        expected = [directed(x, mode == "rp" or (mode == "rz" and x < 0)) for x in exact]
        operands = (a, b, c) if name == "fma" else (a, b)
        same(ptx.apply(f"{name}.{mode}.f32", np.float32, *operands), np.array(expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_minimum_and_maximum_take_the_number():
    a, b = floats(), floats()
    a[:4], b[:4] = (math.nan, 1.0, math.nan, -0.0), (1.0, math.nan, math.nan, 0.0)
    low, high = np.fmin(a, b), np.fmax(a, b)
    low[3], high[3] = -0.0, 0.0
    same(ptx.apply("min.f32", np.float32, a, b)[:4], low[:4])
    same(ptx.apply("max.f32", np.float32, a, b)[:4], high[:4])
    same(np.abs(ptx.apply("min.f32", np.float32, a, b)), np.abs(low))
    same(np.abs(ptx.apply("max.NaN.f32", np.float32, a, b)), np.abs(np.maximum(a, b)))
    same(np.abs(ptx.apply("min.NaN.f32", np.float32, a, b)), np.abs(np.minimum(a, b)))


def test_arithmetic_makes_one_nan():
    a = np.full(32, math.nan, dtype=np.float32)
    assert set(ptx.apply("add.f32", np.float32, a, a).view(np.uint32)) == {0x7FFFFFFF}


APPROXIMATIONS: dict[str, tuple[Model, float]] = {
    "ex2.approx.ftz.f32": (np.exp2, 2**-22),
    "ex2.approx.f32": (np.exp2, 2**-22),
    "lg2.approx.f32": (np.log2, 2**-22),
    "rcp.approx.ftz.f32": (np.reciprocal, 2**-22),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), 2**-22),
    "sqrt.approx.f32": (np.sqrt, 2**-22),
    "sin.approx.f32": (np.sin, 2**-20),
    "cos.approx.f32": (np.cos, 2**-20),
    "tanh.approx.f32": (np.tanh, 2**-10),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations(name: str):
    model, error = APPROXIMATIONS[name]
    x = np.linspace(-3, 3, 256, dtype=np.float32)
    if name.startswith("ex2"):
        x *= 40
    actual, expected = ptx.apply(name, np.float32, x), model(x.astype(np.float64))
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    good = np.isfinite(expected)
    np.testing.assert_allclose(
        actual[good], expected[good], rtol=error, atol=error if name[0] in "scl" else 0
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_powers_of_two_at_the_edges():
    x = np.float32([-math.inf, math.inf, math.nan, 0, -200, 200, 127, -126, -140, -149, 128, -127] + [1] * 20)
    exact = np.float32([2.0 ** float(v) if v < 128 else math.inf for v in x])
    exact[2] = math.nan
    same(ptx.apply("ex2.approx.f32", np.float32, x), exact)
    same(ptx.apply("ex2.approx.ftz.f32", np.float32, x), flush(exact))


# ---- conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["s8", "u8", *TYPES])
@pytest.mark.parametrize("source", TYPES)
def test_integers_convert(source: str, to: str):
    dtype = TYPES.get(to) or {"s8": np.int8, "u8": np.uint8}[to]
    x = integers(TYPES[source])
    register = np.int16 if dtype == np.int8 else np.uint16 if dtype == np.uint8 else dtype
    same(ptx.apply(f"cvt.{to}.{source}", register, x), x.astype(dtype).astype(register))


def test_a_narrow_source_is_the_low_part_of_its_register():
    x = integers(np.uint32)
    same(ptx.apply("cvt.s32.s8", np.int32, x), x.astype(np.int8).astype(np.int32))
    same(ptx.apply("cvt.u64.u16", np.uint64, x.astype(np.uint16)), x.astype(np.uint16).astype(np.uint64))


@pytest.mark.parametrize("source", TYPES)
def test_integers_become_floats(source: str):
    x = integers(TYPES[source])
    same(ptx.apply(f"cvt.rn.f32.{source}", np.float32, x), x.astype(np.float32))
    same(ptx.apply(f"cvt.rn.f64.{source}", np.float64, x), x.astype(np.float64))


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize(
    ("mode", "rounds"), [("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_become_integers_and_saturate(mode: str, rounds: Model, to: str):
    info = np.iinfo(TYPES[to])
    x = floats()

    def model(x: float) -> int:
        if math.isnan(x):
            return 0
        return (
            int(min(max(float(rounds(x)), info.min), info.max))
            if math.isfinite(x)
            else info.max
            if x > 0
            else info.min
        )

    expected = [min(max(model(float(v)), info.min), info.max) for v in x]
    same(ptx.apply(f"cvt.{mode}.{to}.f32", TYPES[to], x), np.array(expected, dtype=TYPES[to]))


def test_halves():
    x = floats()
    x[:40] = np.linspace(-2, 2, 40) * 2.0 ** RNG.integers(-24, 15, 40)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    same(ptx.apply("cvt.rn.f16.f32", np.float16, x), half)
    same(ptx.apply("cvt.f32.f16", np.float32, half), half.astype(np.float32))
    every = np.arange(65536, dtype=np.uint16)
    same(ptx.apply("cvt.f32.f16", np.float32, every), every.view(np.float16).astype(np.float32))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def test_bfloat16():
    x = floats()
    x[:64] = (np.arange(64, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32)  # ties
    same(ptx.apply("cvt.rn.bf16.f32", np.uint16, x), to_bfloat16(x))
    y = to_bfloat16(x)
    same(ptx.apply("cvt.f32.bf16", np.float32, y), (y.astype(np.uint32) << 16).view(np.float32))


def test_pairs_have_their_first_operand_on_top():
    a, b = (np.float32(RNG.standard_normal(64)) for _ in range(2))
    pair = ptx.apply("cvt.rn.f16x2.f32", np.uint32, a, b)
    same((pair >> 16).astype(np.uint16).view(np.float16), a.astype(np.float16))
    same(pair.astype(np.uint16).view(np.float16), b.astype(np.float16))
    pair = ptx.apply("cvt.rn.bf16x2.f32", np.uint32, a, b)
    assert np.array_equal(pair, to_bfloat16(a).astype(np.uint32) << 16 | to_bfloat16(b))


def test_tf32_rounds_ties_away():
    x = (np.arange(64, dtype=np.uint32) * 0x1000 + 0x3F800000).view(np.float32)
    bits = ptx.apply("cvt.rna.tf32.f32", np.uint32, x)
    assert np.array_equal(bits, (x.view(np.uint32) + 0x1000) & 0xFFFFE000)


# ---- predicates --------------------------------------------------------------------------------------------

FLOAT_COMPARISONS: dict[str, Model] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def compare(opcode: str, a: np.ndarray, b: np.ndarray, guard: str = "%p0") -> np.ndarray:
    """Where a comparison of two arrays of 32-bit elements holds. The body may use %p1 and %n, the lane."""
    out = np.zeros(len(a), dtype=np.uint32)
    assert len(a) == 32
    ptx.run(
        ".reg .b64 %a<4>; .reg .b32 %x, %y, %n, %r; .reg .pred %p<4>; mov.u32 %n, %tid.x;"
        + "".join(f"ld.param.u64 %a{i}, [p{i}]; mad.wide.u32 %a{i}, %n, 4, %a{i};" for i in range(3))
        + "ld.global.b32 %x, [%a0]; ld.global.b32 %y, [%a1]; setp.lt.u32 %p1, %n, 10;"
        + f"{opcode}; selp.u32 %r, 1, 0, {guard}; st.global.u32 [%a2], %r; ret;",
        np.ascontiguousarray(a),
        np.ascontiguousarray(b),
        out,
    )
    return out == 1


@pytest.mark.parametrize("name", FLOAT_COMPARISONS)
def test_float_comparisons(name: str):
    a, b = floats(count=32), floats(count=32)
    a[::5] = b[::5]
    same(compare(f"setp.{name}.f32 %p0, %x, %y", a, b), FLOAT_COMPARISONS[name](a, b))


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_integer_comparisons(name: str):
    for type_name, dtype in (("s32", np.int32), ("u32", np.uint32)):
        a, b = integers(dtype, 32), integers(dtype, 32)
        a[::5] = b[::5]
        same(compare(f"setp.{name}.{type_name} %p0, %x, %y", a, b), FLOAT_COMPARISONS[name](a, b))


def test_predicates_combine():
    a, b = integers(np.int32, 32), integers(np.int32, 32)
    first, less = np.arange(32) < 10, a < b
    same(compare("setp.lt.and.s32 %p0, %x, %y, %p1", a, b), less & first)
    same(compare("setp.lt.or.s32 %p0, %x, %y, !%p1", a, b), less | ~first)
    same(compare("setp.lt.xor.s32 %p0, %x, %y, %p1", a, b), less ^ first)
    same(compare("setp.lt.s32 %p2|%p0, %x, %y", a, b), ~less)
    same(compare("setp.lt.s32 %p0, %x, %y; and.pred %p0, %p0, %p1", a, b), less & first)
    same(compare("setp.lt.s32 %p0, %x, %y; or.pred %p0, %p0, %p1", a, b), less | first)
    same(compare("setp.lt.s32 %p0, %x, %y; xor.pred %p0, %p0, %p1", a, b), less ^ first)
    same(compare("setp.lt.s32 %p0, %x, %y; not.pred %p0, %p0", a, b), ~less)
    same(compare("mov.pred %p0, %p1", a, b), first)
    same(compare("mov.pred %p0, -1; @%p1 setp.lt.s32 %p0, %x, %y", a, b), less | ~first)


def test_halves_are_packed_and_unpacked():
    a = integers(np.uint32, 32)
    out = np.zeros(32, dtype=np.uint32)
    ptx.run(
        ".reg .b64 %a<2>, %w; .reg .b32 %x, %n, %l, %h; .reg .b16 %s<4>; mov.u32 %n, %tid.x;"
        "ld.param.u64 %a0, [p0]; mad.wide.u32 %a0, %n, 4, %a0;"
        "ld.param.u64 %a1, [p1]; mad.wide.u32 %a1, %n, 4, %a1;"
        "ld.global.b32 %x, [%a0]; mov.b32 {%s0, %s1}, %x; mov.b32 %l, {%s1, %s0};"
        "mov.b64 %w, {%l, %x}; mov.b64 {_, %h}, %w; add.u32 %l, %l, %h; st.global.u32 [%a1], %l; ret;",
        a,
        out,
    )
    same(out, (a >> 16 | a << 16) + a)


def test_selections():
    a, b = integers(np.uint64, 32), integers(np.uint64, 32)
    out = np.zeros(32, dtype=np.uint64)
    ptx.run(
        ".reg .b64 %a<3>, %x, %y; .reg .b32 %n; .reg .pred %p; mov.u32 %n, %tid.x;"
        + "".join(f"ld.param.u64 %a{i}, [p{i}]; mad.wide.u32 %a{i}, %n, 8, %a{i};" for i in range(3))
        + "ld.global.b64 %x, [%a0]; ld.global.b64 %y, [%a1]; setp.lt.u32 %p, %n, 7;"
        "selp.b64 %x, %x, %y, %p; st.global.b64 [%a2], %x; ret;",
        a,
        b,
        out,
    )
    same(out, np.where(np.arange(32) < 7, a, b))


# ---- what is not known -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("frobnicate.b32 %r, %r;", "unknown opcode in frobnicate.b32"),
        ("add.f32 %r, %r;", "too few operands in add.f32"),
        ("add.f32 %r, %r, %r, %r;", "too many operands in add.f32"),
        ("add.f64 %r, %r, %r;", "register %r is not of 64 bits in add.f64"),
        ("mov.u32 %r, %moon;", "unknown name %moon in mov.u32"),
        ("selp.b32 %r, %r, %r, %r;", "an operand that is no predicate in selp.b32"),
        ("ld.global.v2.u32 {%r, %r, %r}, [%r];", "a vector of another length in ld.global.v2.u32"),
        ("bra NOWHERE;", "there is no label NOWHERE"),
        ("mov.u32 %r 1;", 'expected ";"'),
    ],
)
def test_what_is_unknown_is_an_error_with_its_line(statement: str, complaint: str):
    text = ptx.module(f".reg .b32 %r;\n{statement}\nret;", 0)
    found = ptx.complaints(text)
    line = 1 + text[: text.index(statement)].count("\n")
    assert complaint in found and f"PTX line {line}" in found
    with pytest.raises(ptx.SimulationError, match=f"PTX line {line}"):
        ptx.run_text(text, [])
