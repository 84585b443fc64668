"""``cutlass_fmha.sdpa``: torch's attention comes here and gives the same, or goes on to torch aloud."""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tensors import drawn, ints, randn
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutlass_fmha
from cutlass_fmha import log, private_torch, sdpa
from cutlass_fmha.torch_sdpa import composite, flash, override

NAME = "scaled_dot_product_attention"
with_registry = pytest.mark.skipif(not override._HAS_REGISTRY, reason="torch < 2.11 has no registry of flash kernels")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    sdpa.reset_counts()
    log.forget()
    yield
    assert sdpa.enabled == (), "a test left torch's attention with us"


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in drawn(*shapes, dtype=dtype)]


def results(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = call(*tensors)
    return [out, *torch.autograd.grad(out, tensors, randn(*out.shape, seed=9).to(out))]


Q, K = (2, 4, 9, 32), (2, 4, 13, 32)
CALLS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([Q, K, K], {}),
    "top-left causal": ([Q, K, K], {"is_causal": True}),
    "scale": ([Q, K, K], {"scale": 0.3}),
    "grouped heads": ([Q, (2, 2, 13, 32), (2, 2, 13, 32)], {"enable_gqa": True, "is_causal": True}),
    "another value dim": ([Q, K, (2, 4, 13, 48)], {}),
    "no heads": ([(2, 9, 32), (2, 13, 32), (2, 13, 32)], {}),
    "mask": ([Q, K, K], {"attn_mask": torch.arange(13) < ints(13, 5)[:, None, None, None]}),
    "bias with a gradient": ([Q, K, K, (4, 9, 13)], {}),
}


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_and_gradients_are_ours_and_as_exact_as_torchs(name: str, place: str):
    shapes, options = CALLS[name]
    dtype = torch.float32 if place == "cpu" else torch.float16
    given = [x.to(place).requires_grad_() for x in drawn(*shapes, dtype=dtype)]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    placed = {key: x.to(place) if isinstance(x, Tensor) else x for key, x in options.items()}

    def call(tensors: list[Tensor], said: dict[str, Any]) -> list[Tensor]:
        found = results(lambda *x: F.scaled_dot_product_attention(*x, **said), tensors)
        return [x.double().cpu() for x in found]

    want, theirs = call(exact, options), call(given, placed)
    with sdpa(place):
        found = call(given, placed)
    assert sdpa.counts == {NAME: 1} and not sdpa.declined
    for x, y, z in zip(found, theirs, want, strict=True):
        eps = (100 if place == "cpu" else 1) * torch.finfo(dtype).eps
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + eps * z.abs().max()
    F.scaled_dot_product_attention(*given, **placed)
    assert sdpa.counts == {NAME: 1}, "after the block torch's own runs"


def test_dropout_draws_from_our_generator_and_a_gradient_outlives_the_block():
    tensors = leaves(Q, K, K)
    torch.manual_seed(0)
    with sdpa("cpu"):
        out = F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
    torch.manual_seed(0)
    want = results(functools.partial(cutlass_fmha.scaled_dot_product_attention, dropout_p=0.5), tensors)
    assert all(map(torch.equal, results(lambda *_: out, tensors), want))
    assert not torch.equal(out, F.scaled_dot_product_attention(*tensors))


#: torch 2.6 takes the op apart before, in inference mode.
MODES = [torch.enable_grad, torch.no_grad, pytest.param(torch.inference_mode, marks=with_registry)]


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_compiled_in_the_block_holds_our_op_and_others_dont(mode: Callable[[], Any]):
    """Whatever was traced before: torch keeps the kernels that it found."""
    tensors = leaves(Q, K, K)
    want = results(F.scaled_dot_product_attention, tensors)
    for inside in (False, True, False):
        backend = AotEagerAndRecordGraphs()
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend=backend)
        with sdpa("cpu") if inside else contextlib.nullcontext(), mode():
            training = torch.is_grad_enabled()
            found = results(compiled, tensors) if training else [compiled(*(x.detach() * 1 for x in tensors))]
        graphs = [str(module.graph) for module in (*backend.fw_graphs, *backend.bw_graphs)]
        torch.testing.assert_close(found, want[: len(found)], rtol=1e-4, atol=1e-5)
        assert ("cutlass_fmha.forward" in graphs[0] or "cutlass_fmha.attend" in graphs[0]) is inside
        assert [*{"scaled_dot_product" in graph for graph in graphs}] == [not inside]
        assert len(graphs) == 1 + training
        assert not training or ("cutlass_fmha.attend_backward" in graphs[1]) is inside


def test_torchs_files_of_graphs_tell_ours_from_torchs_in_all_threads():
    """Where torch has a tag: README and docs/sdpa.md say what an older one lacks."""
    tags: list[str] = []
    with ThreadPoolExecutor(1) as other:
        for device_types in ("cpu", ("cuda", "cpu")):
            for block in (contextlib.nullcontext(), sdpa(device_types)):
                with block:
                    tags.append(other.submit(getattr, torch.compiler.config, "cache_key_tag", "").result())
    assert len({*tags}) == (1 if private_torch._tag is None else 3) and tags[0] == tags[2]


PLACES = pytest.mark.parametrize(
    ("place", "dtype", "tolerance"),
    [("cpu", torch.float32, 1e-4), pytest.param("cuda", torch.float16, 1e-2, marks=pytest.mark.gpu)],
)


@PLACES
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_modules_run_ours(training: bool, padded: bool, place: str, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=32, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).train(training).to(place, dtype)
    x, counted = randn(2, 7, 64).to(place, dtype), (torch.arange(7) < ints(7, 4 if padded else 7)[:, None]).to(place)
    call = functools.partial(module, x, src_key_padding_mask=~counted if padded else None)
    with torch.set_grad_enabled(training):
        want = call()
        with sdpa(place):
            found = call()
    torch.testing.assert_close(found[counted], want[counted], rtol=tolerance, atol=tolerance / 10)
    assert sdpa.counts == {NAME: 2} and not sdpa.declined
    assert torch.backends.mha.get_fastpath_enabled()


def of_itself(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], scale=0.3, enable_gqa=True)


def nested(q: Tensor) -> Tensor:
    q = torch.nested.nested_tensor([q[0], q[1, :, :5]])
    return torch.cat(F.scaled_dot_product_attention(q, q, q).unbind(), 1)


def jagged(q: Tensor, **said: Any) -> Tensor:
    x = torch.nested.nested_tensor([q[0].mT, q[1, :, :5].mT], layout=torch.jagged).transpose(1, 2)
    return F.scaled_dot_product_attention(x, x, x, **said).values()


def in_forward_mode(q: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return of_itself(forward_ad.make_dual(q, q))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "reason"), [
    (torch.func.grad(lambda q: of_itself(q).sum()), "torch.func transforms the call"),
    (torch.vmap(of_itself), "torch.func transforms the call"),
    (nested, "tensors are nested, in the strided layout"),
    (in_forward_mode, "gradients are in forward mode"),
    (sdpa_kernel(SDPBackend.MATH)(of_itself), "FLASH_ATTENTION, whose place it takes, is switched off"),
    (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1.0), "dropout_p must be at least 0"),
    (lambda q: F.scaled_dot_product_attention(q, q, q, torch.zeros(9, dtype=torch.float64)), "attn_mask"),
    (lambda q: jagged(q, attn_mask=torch.ones(9, 9)), "attn_mask"),
])  # fmt: skip
def test_what_is_declined_is_torchs_with_one_line_in_the_log(
    call: Callable[[Tensor], Tensor], reason: str, caplog: pytest.LogCaptureFixture
):
    def outcome(call: Callable[[Tensor], Tensor]) -> Any:
        try:
            return call(randn(*Q))
        except (RuntimeError, ValueError) as error:
            return str(error)

    want = outcome(call)
    with caplog.at_level(logging.WARNING, "cutlass_fmha"):
        for other in (call, of_itself, jagged):  # of another device there is no word
            theirs = outcome(other)
            with sdpa("cuda"):
                assert str(outcome(other)) == str(theirs)
        assert not (sdpa.counts or sdpa.declined or caplog.messages)
        with sdpa("cpu"):
            for _ in range(2):
                found = outcome(call)
                assert torch.equal(found, want) if isinstance(want, Tensor) else found == want
    (line,) = caplog.messages
    assert reason in line and "torch's own scaled_dot_product_attention runs" in line
    ((told, times),) = sdpa.declined.items()
    assert reason in told and times >= 2 and NAME not in sdpa.counts


def test_a_call_that_was_refused_is_not_tried_again_and_others_are(monkeypatch: pytest.MonkeyPatch):
    tried: list[float] = []
    real = composite.scaled_dot_product_attention

    def ours(query: Tensor, *given: Any) -> Tensor:
        tried.append(given[3])
        if query.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("no gradients")
        return real(query, *given)

    monkeypatch.setattr(composite, NAME, ours)
    q, leaf = randn(*Q), randn(*Q).requires_grad_()
    calls = [*((q, p) for p in (1.0, 1.0, 0.0, 1.0)), (q[:, :2], 1.0), (leaf, 0.0), (leaf, 0.0), (leaf.detach(), 0.0)]
    with sdpa("cpu"):
        for n, (x, dropout_p) in enumerate(calls):
            with torch.set_grad_enabled(n != 6):
                F.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)
    assert tried == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def test_blocks_nest_and_leave_torch_as_it_was():
    with sdpa():
        assert sdpa.enabled == ("cuda",) and has(NAME, "CUDA") and not has(NAME, "CPU")
        with sdpa(("cpu", "cuda")):
            assert has(NAME, "CUDA") and has(NAME, "AutogradCUDA") and has(NAME, "CPU")
        assert sdpa.enabled == ("cuda",) and not has(NAME, "CPU")
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not has(NAME, "CUDA") and torch.backends.mha.get_fastpath_enabled()
    first, second = sdpa("cpu"), sdpa("cpu")  # as those of two threads
    for block in (first, second):
        block.__enter__()
    for block, left in ((first, ("cpu",)), (second, ())):
        block.__exit__(None, None, None)
        assert sdpa.enabled == left
    torch._C._dispatch_check_invariants(f"aten::{NAME}")
    for call, given in ((sdpa.enable, ["cpu"]), (sdpa.enable, [["cpu"]]), (sdpa.disable, []), (sdpa.disable, [])):
        call(*given)
    for wrong in ("xpu", ()):
        with pytest.raises(ValueError, match="device_types must"):
            sdpa.enable(wrong)


def test_autocast_casts_inference_mode_has_its_own_key_and_tensors_of_a_gpu_reach_us():
    q = randn(*Q)
    with sdpa("cpu"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q + 1, q, q).dtype == torch.bfloat16
    assert sdpa.counts == {NAME: 1}
    with sdpa(), FakeTensorMode():
        q = torch.empty(2, 4, 9, 64, device="cuda", dtype=torch.float16)
        assert F.scaled_dot_product_attention(q, q, q).stride() == (9 * 4 * 64, 64, 4 * 64, 1)
    assert sdpa.counts == {NAME: 2}


@with_registry
def test_torchs_registry_knows_us_and_who_was_active_before_is_again():
    from torch.nn import attention

    other = SimpleNamespace(alive=False)
    other.remove = functools.partial(setattr, other, "alive", False)
    attention.register_flash_attention_impl("other", register_fn=lambda: vars(other).update(alive=True) or other)
    attention.activate_flash_attention_impl("other")
    with sdpa("cpu"):
        assert attention.current_flash_attention_impl() == "cutlass_fmha" and not other.alive
    assert attention.current_flash_attention_impl() == "other" and other.alive
    attention.activate_flash_attention_impl("cutlass_fmha")
    assert sdpa.enabled == ("cuda",) and has("_flash_attention_forward", "CUDA")
    attention.restore_flash_attention_impl()
    assert sdpa.enabled == () and has("_flash_attention_forward", "CUDA") == (torch.version.cuda is not None)
    attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


@with_registry
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_op_gives_attention_its_gradients_and_torchs_layout(transposed: bool, causal: bool):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x for x in leaves(Q, K, K))
    bias = torch.zeros(9, 13).masked_fill(~torch.ones(9, 13).bool().tril(4), -math.inf) if causal else None
    scale = 0.3 if transposed else None
    want = results(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias, scale=scale), [q, k, v])
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    with sdpa("cpu"):
        whole = op(q, k, v, 0.0, causal, scale=scale)
        found = [whole[0], *torch.autograd.grad(whole[0], (q, k, v), randn(*Q, seed=9))]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert whole[1].shape == (2, 4, 9) and whole[2:6] == (None, None, 9, 13)
    mode = FakeTensorMode()
    fake = op(*(mode.from_tensor(x.detach()) for x in (q, k, v)), 0.0, causal)
    for one, other in zip(whole, fake, strict=True):
        if isinstance(one, Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert [x.stride() for x in found[1:]] == [torch.empty_like(x).stride() for x in (q, k, v)]
    assert {*sdpa.counts} == {"_scaled_dot_product_flash_attention", op.name()[6:] + "_backward"}


@with_registry
@PLACES
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)])
def test_packed_sequences_of_torchs_varlen_attn_are_ours(
    window: tuple[int, int], place: str, dtype: torch.dtype, tolerance: float
):
    from torch.nn.attention import varlen

    known = inspect.signature(varlen.varlen_attn).parameters  # torch 2.11 knows less
    if "window_size" not in known:
        pytest.skip("varlen_attn of this torch has no window_size")
    options = {n: x for n, x in (("window_size", window), ("enable_gqa", True), ("scale", 0.3)) if n in known}
    key = (12, 2 if "enable_gqa" in known else 4, 32)
    tensors = [x.to(place, dtype).requires_grad_() for x in drawn((10, 4, 32), key, key)]
    cu_q, cu_k = ints(0, 4, 10).to(place), ints(0, 5, 12).to(place)
    given, plain = (cu_q, cu_k, 6, 7), [x.detach() for x in tensors]
    same = {"cu_seqlens_q": cu_q, "window": window, "causal": window == (-1, 0), "scale": options.get("scale")}
    ours = functools.partial(cutlass_fmha.attention, **same)
    want = results(functools.partial(ours, cu_seqlens_k=cu_k), tensors)
    with sdpa(place), torch.autocast(place, torch.bfloat16):  # which has no say in these ops
        found = results(lambda *x: varlen.varlen_attn(*x, *given, **options), tensors)
        out, lse = varlen.varlen_attn(*plain, *given, return_aux=varlen.AuxRequest(lse=True), **options)
    torch.testing.assert_close(found, want, rtol=tolerance / 10, atol=tolerance / 10)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, ours(*plain, cu_seqlens_k=cu_k, return_lse=True)[1])
    assert sdpa.counts == {"_flash_attention_forward": 2, "_flash_attention_backward": 1}
    if "block_table" not in known:
        return
    again = torch.empty_like(out)
    with sdpa(place):
        varlen.varlen_attn_out(again, *plain, *given, **options)
    assert torch.equal(again, out) and sdpa.counts["_flash_attention_forward_no_dropout_inplace"] == 1
    of_page = ints(1, 2, 3, 4).view(4, 1, 1, 1).to(place)
    pages = [x[:-8].view(1, 4, key[1], 32).repeat(4, 4, 1, 1) * of_page for x in plain[1:]]
    used, table = ints(20, 5).to(place), ints(2, 0, 1, 3).view(2, 2).to(place)
    paged = {**options, "seqused_k": used, "block_table": table, "num_splits": 1}
    with sdpa(place):
        found = varlen.varlen_attn(plain[0], *pages, cu_q, None, 6, 32, **paged)
    want = ours(plain[0], *pages, seqused_k=used, page_table=table)
    torch.testing.assert_close(found, want, rtol=tolerance / 10, atol=tolerance / 10)


@with_registry
def test_a_flash_op_that_is_declined_is_whose_it_was():
    """Torch has no such kernel for the CPU: one of the test's stands in for what a GPU build has."""
    name, given = "_flash_attention_backward", []
    library = torch.library.Library("aten", "IMPL")

    def theirs(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return args[1], args[2], args[3]

    library.impl(name, theirs, "CPU")
    library.impl("_flash_attention_forward", lambda *args, **kwargs: theirs(*args) + args[:2], "CPU")
    q, lse = randn(2, 9, 4, 32), torch.tensor([[-math.inf, 1.0]])
    unused = torch.empty(0)
    with sdpa("cpu"):
        op = torch.ops.aten._flash_attention_backward
        op(q, q, q, q, q, lse, None, None, 9, 9, 0.1, True, unused, unused, scale=0.5, window_size_left=3)
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.1, True, False)
        value = randn(2, 9, 4, 16)
        for debug_mask in (True, False):
            torch.ops.aten._flash_attention_forward(q, q, value, None, None, 9, 9, 0.0, True, debug_mask, scale=1.0)
    (args, kwargs), *_ = given
    assert torch.equal(args[5], torch.tensor([[math.inf, 1.0]])), "torch's own LSE of a row without keys"
    assert args[6:12] == (None, None, 9, 9, 0.1, True) and kwargs == {"scale": 0.5, "window_size_left": 3}
    assert len(given) == 4 and [*sdpa.declined] == [flash._DROPOUT, flash._DEBUG_MASK, flash._VALUE_DIM]
    assert not sdpa.counts
    del library
    with sdpa("cpu"), pytest.raises(NotImplementedError, match="dropout_p here"):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.1, True, False)


@with_registry
def test_what_only_the_flash_ops_take_or_mean_reaches_ours(monkeypatch: pytest.MonkeyPatch):
    q, k = (x.transpose(1, 2) for x in drawn(Q, K))
    op = torch.ops.aten._flash_attention_forward.default
    known = {x.name for x in op._schema.arguments}
    options = {n: x for n, x in (("alibi_slopes", torch.arange(4) / 4), ("num_splits", 2)) if n in known}
    with sdpa("cpu"), mock.patch.object(flash, "attention", wraps=flash.attention) as ours:
        out = op(q, k, k, None, None, 9, 13, 0.0, False, False, **options)[0]
    assert {name: ours.call_args.kwargs[name] for name in options} == options
    assert torch.equal(out, cutlass_fmha.attention(q, k, k, **options)) and out.stride() == q.stride()
    # A query without keys has an LSE of +inf there, and -inf here.
    q, k = randn(1, 5, 2, 32), randn(1, 3, 2, 32)
    out, lse = cutlass_fmha.attention(q, k, k, causal=True, return_lse=True)
    theirs = lse.masked_fill(lse == -math.inf, math.inf)
    assert (theirs == math.inf).sum() == 4
    given = (q, q, k, k, out, theirs, None, None, 5, 3, 0.0, True, torch.empty(0), torch.empty(0))
    ours = torch.ops.cutlass_fmha
    with sdpa("cpu"), mock.patch.object(ours, "attend_backward", wraps=ours.attend_backward) as backward:
        torch.ops.aten._flash_attention_backward(*given)
        assert torch.equal(backward.call_args.args[5], lse) and "deterministic" not in backward.call_args.kwargs
        monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: 2)
        torch.ops.aten._flash_attention_backward(*given)
    assert backward.call_args.kwargs["deterministic"] is True
