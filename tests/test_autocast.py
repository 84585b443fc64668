"""torch.autocast: a call does what casting by hand does, bit for bit. Gradients: test_{torch_func,training}.py."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tensors import LooksLikeCuda, ints
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_fmha
from cutlass_fmha import attention, cascade_attention, with_kv_cache
from cutlass_fmha import scaled_dot_product_attention as sdpa
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher

# Of torch's own making: what its compiler uses inside.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
forward, attend = torch.ops.cutlass_fmha.forward, torch.ops.cutlass_fmha.attend


def cpu(dtype: torch.dtype = BF16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, **options)


def drawn(dtype: torch.dtype = F32) -> dict[str, Tensor]:
    """Operands of every call below, of ``dtype``; what is float32 or int always is so."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q": (2, 9, 4, 32), "k": (2, 17, 2, 32), "v": (2, 17, 2, 32), "bias": (4, 9, 17), "slopes": (4,),
        "sinks": (4,), "new_k": (2, 3, 2, 32), "new_v": (2, 3, 2, 32), "cos": (40, 8), "sin": (40, 8),
    }  # fmt: skip
    t = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    t |= {name: x.to(dtype) for name, x in t.items() if name not in ("slopes", "sinks")}
    return t | {"used": ints(9, 14), "table": ints(3, 0, 1, 2).view(2, 2), "slots": ints(1, 0)}


def qkv(t: dict[str, Tensor]) -> list[Tensor]:
    return [t[name] for name in "qkv"]


def heads_first(t: dict[str, Tensor], heads_kv: int = 4) -> list[Tensor]:
    return [x.transpose(1, 2).repeat_interleave(heads_kv // 2 if n else 1, 1) for n, x in enumerate(qkv(t))]


# Nothing is indexed with brackets, which torch without CUDA refuses for fake CUDA tensors.
CALLS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda t: attention(*qkv(t), return_lse=True),
    "flash": lambda t: attention(*heads_first(t), layout="bhsd", causal="top-left", return_lse=True),
    "features": lambda t: attention(
        *qkv(t), causal=True, return_lse=True, softcap=3.0, bias=t["bias"], alibi_slopes=t["slopes"],
        sinks=t["sinks"], dropout_p=0.3, dropout_seed=5,
    ),
    "packed": lambda t: attention(
        *(x.flatten(0, 1) for x in qkv(t)), cu_seqlens_q=ints(0, 5, 18), cu_seqlens_k=ints(0, 20, 34), window=(3, 1)
    ),
    "other head_dim_v": lambda t: attention(t["q"], t["k"], t["v"].narrow(3, 0, 8)),
    "sdpa": lambda t: sdpa(*heads_first(t), attn_mask=t["bias"]),
    "sdpa broadcast": lambda t: sdpa(*(x.unsqueeze(0) for x in heads_first(t)), is_causal=True),
    "sdpa gqa": lambda t: sdpa(*heads_first(t, 2), attn_mask=t["bias"] > 0, enable_gqa=True),
    "cascade": lambda t: cascade_attention(
        t["q"], t["k"].select(0, 0), t["v"].select(0, 0), t["k"], t["v"], causal=True, return_lse=True
    ),
    "forward": lambda t: forward(*qkv(t), 0.3, "bottom-right", True, None),
    "attend": lambda t: attend(*qkv(t), 0.3, "none", True, None, bias=t["bias"], alibi_slopes=t["slopes"]),
}  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def assert_same(found: Any, expected: Any, dtype: torch.dtype) -> None:
    found, expected = ((x,) if isinstance(x, Tensor) else x for x in (found, expected))
    assert [x.dtype for x in found] == [dtype, F32][: len(found)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


#: Contexts, the outermost first, and the dtype that float32 is cast to in them.
CONTEXTS: dict[str, tuple[Callable[[], list[Any]], torch.dtype]] = {
    "bfloat16": (lambda: [cpu()], BF16),
    "float16": (lambda: [cpu(F16)], F16),
    "the inner one's": (lambda: [cpu(F16), cpu(BF16), cpu(F16)], F16),
    "off within": (lambda: [cpu(), torch.autocast("cpu", enabled=False)], F32),
    "off": (lambda: [torch.autocast("cpu", enabled=False)], F32),
    "another device's": (lambda: [cuda()], F32),
}


def by_hand(t: dict[str, Tensor], to: torch.dtype) -> dict[str, Tensor]:
    return t | {name: t[name].to(to) for name in (*"qkv", "bias")}


@every_call
@pytest.mark.parametrize(("contexts", "to"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_call_is_the_one_that_is_cast_by_hand(call: Callable[..., Any], contexts: Any, to: torch.dtype):
    """Sinks and slopes stay float32, and float64 is not cast, as of torch's own SDPA."""
    other = F16 if to == BF16 else BF16
    cast, of_other = by_hand(drawn(), to), other if to == F32 else to
    expected, from_other, wide = call(cast), call(by_hand(drawn(other), of_other)), call(drawn(F64))
    with ExitStack() as stack:
        for each in contexts():
            stack.enter_context(each)
        assert_same(call(drawn()), expected, to)
        assert_same(call(cast), expected, to)
        assert_same(call(drawn(other)), from_other, of_other)
        assert_same(call(drawn(F64)), wide, F64)
        with pytest.raises(ValueError, match="must have .*dtype float64"):
            call(drawn(F64) | {"v": drawn()["v"]})
        if to == F32:
            with pytest.raises(ValueError, match="must have .*dtype float32"):
                call(drawn() | {"k": drawn(F16)["k"]})
        else:  # mixed dtypes, which raise elsewhere, are cast one by one
            assert_same(call(drawn() | {"k": cast["k"], "bias": cast["bias"]}), expected, to)
            half = drawn()["sinks"].to(to)  # which sinks may have, too: attend itself takes float32 alone
            assert_same(call(drawn() | {"sinks": half}), call(cast | {"sinks": half.float()}), to)


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_no_cast_outlives_what_it_was_made_of_and_explain_casts_alike(cache_enabled: bool):
    t = {name: torch.nn.Parameter(x) for name, x in drawn().items() if name in "qkv"}
    with cpu(cache_enabled=cache_enabled), torch.no_grad():
        before = CALLS["plain"](t)
        t["v"].mul_(2)
        assert_same(CALLS["plain"](t)[0], before[0] * 2, BF16)
        for said in ({}, {"bias": drawn()["bias"]}):  # explain tells what runs
            found = cutlass_fmha.explain(t["q"], t["k"].bfloat16(), t["v"], device="l4", **said)
            assert found.problem.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_what_is_no_attention_is_as_it_is_elsewhere(dtype: torch.dtype):
    t = drawn(dtype)
    state = CALLS["plain"](t)

    def others() -> list[Any]:
        return [cutlass_fmha.rotary(t["q"], t["cos"], t["sin"], ints(3, 5)), cutlass_fmha.merge_states(*state, *state)]

    expected, wide = others(), CALLS["plain"](drawn())
    with cpu(F16 if dtype == BF16 else BF16):
        for found, each in zip(others(), expected, strict=True):
            assert_same(found, each, dtype)
        narrow = CALLS["plain"](drawn())  # states of two dtypes merge in the wider one
        merged = [cutlass_fmha.merge_states(*x) for x in ((*narrow, *wide), (*wide, *narrow))]
    for found in merged:
        assert_same(found, cutlass_fmha.merge_states(narrow[0].float(), narrow[1], *wide), F32)


def step(t: dict[str, Tensor], packed: bool = False, **more: Any) -> Tensor:
    rows = [t["q"].narrow(1, 0, 3), t["new_k"], t["new_v"]]
    if packed:
        rows = [x.flatten(0, 1) for x in rows]
        more |= {"cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 18}
    return with_kv_cache(rows[0], t["k"], t["v"], *rows[1:], cache_seqlens=t["used"], causal=True, **more)


OVER_CACHES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "append": step,
    "rotary": lambda t: step(t, rotary_cos=t["cos"], rotary_sin=t["sin"], bias=t["bias"].narrow(1, 0, 3)),
    "append to pages": lambda t: step(t, page_table=t["table"]),
    "append packed to pages": lambda t: step(t, True, page_table=t["table"], rotary_cos=t["cos"], rotary_sin=t["sin"]),
    "append to slots": lambda t: step(t, cache_batch_idx=t["slots"], sinks=t["sinks"]),
    "cache as it is": lambda t: with_kv_cache(*qkv(t)),
    "pages": lambda t: attention(*qkv(t), page_table=t["table"], seqused_k=t["used"], return_lse=True),
    "slots": lambda t: attention(*qkv(t), cache_batch_idx=t["slots"], bias=t["bias"]),
    "cascade": lambda t: cascade_attention(
        t["q"], t["new_k"].select(0, 0), t["new_v"].select(0, 0), t["k"], t["v"], cache_batch_idx=t["slots"]
    ),
}


def caches(name: str, dtype: torch.dtype, others: torch.dtype) -> dict[str, Tensor]:
    t = drawn(others) | {name: x for name, x in drawn(dtype).items() if name in ("k", "v")}
    if "pages" in name:  # four of 16 rows
        t |= {name: t[name].repeat(2, 1, 1, 1)[:, :16].contiguous() for name in "kv"}
    return t


@pytest.mark.parametrize("name", OVER_CACHES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_a_cache_is_not_cast_and_what_meets_it_is(name: str, dtype: torch.dtype):
    call = OVER_CACHES[name]
    new = F64 if dtype == F64 else F32  # float64 is cast neither from nor to
    by_hand, given = caches(name, dtype, dtype), caches(name, dtype, new)
    # Tables are read in float32 as they are; those of the cache's dtype would have been rounded.
    by_hand |= {table: given[table] for table in ("cos", "sin")}
    before = given["k"].clone()
    expected = call(by_hand)
    compiled = [torch.compile(call, fullgraph=True, backend="aot_eager")] * (dtype in (BF16, F64))
    for run in (call, *compiled):
        for context in (cpu(), nullcontext())[: 1 + (dtype in (F32, F64))]:
            given = caches(name, dtype, new)
            with context:
                assert_same(run(given), expected, dtype)
            for cache in ("k", "v"):
                assert given[cache].dtype == dtype and torch.equal(given[cache], by_hand[cache])
            written = "append" in name or name == "rotary"
            assert torch.equal(given["k"], before) != written


@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in CALLS), ("features", "eager")])
def test_a_compiled_call_is_cast_alike(name: str, backend: str):
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend=backend)

    @torch.compile(fullgraph=True, backend=backend)
    def inside(t):
        with torch.autocast("cpu", dtype=F16):
            return call(t)

    t, mixed = drawn(), drawn() | {"k": drawn()["k"].bfloat16()}
    with cpu():
        for given in (t, mixed):
            assert_same(compiled(given), call(given), BF16)
    assert_same(compiled(t), call(t), F32)  # what was compiled under autocast is not reused without it
    with cpu(F16):
        expected = call(t)
        assert_same(compiled(t), expected, F16)
    assert_same(inside(t), expected, F16)


@contextmanager
def cuda(dtype: torch.dtype = BF16) -> Iterator[None]:
    """CUDA autocast, also where ``torch.autocast`` would switch itself off for want of a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_every_op_of_the_package_has_a_rule():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cutlass_fmha::")]
    assert {"cutlass_fmha::forward", "cutlass_fmha::attend", "cutlass_fmha::append_kv_"} <= set(names)
    for name in names:
        for key in ("AutocastCUDA", "AutocastCPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), f"{name} has none for {key}"


@every_call
@pytest.mark.parametrize("to", [BF16, F16])
def test_fake_cuda_tensors_are_cast(call: Callable[..., Any], to: torch.dtype):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        t = {name: torch.empty_like(x, device="cuda") for name, x in drawn().items()}
        mixed = t | {"k": t["k"].half(), "v": t["v"].bfloat16()}
        for given in (t, mixed):
            with cuda(to):
                found = call(given)
            found = (found,) if isinstance(found, Tensor) else found
            assert [x.dtype for x in found] == [to, F32][: len(found)]
            assert {x.device.type for x in found} == {"cuda"}
        with cpu(), pytest.raises(ValueError, match="dtype float32"):
            call(mixed)


def test_the_way_past_the_dispatcher_gets_what_is_cast(monkeypatch: pytest.MonkeyPatch):
    launched = []
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    monkeypatch.setattr(plan, "launch", lambda *x: launched.append({y.dtype for y in x[:3]}) or (x[0], None))
    t = {name: x.as_subclass(LooksLikeCuda) for name, x in drawn().items()}
    mixed = t | {"k": t["k"].half()}
    attention(t["q"], t["k"], t["v"])
    with cpu():
        attention(mixed["q"], mixed["k"], mixed["v"])
        sdpa(*heads_first(mixed))
    assert launched == [{F32}, {BF16}, {BF16}]
