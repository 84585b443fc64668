"""The ops ``forward`` and ``attend`` as torch sees them, compiled, and on their way to kernels past the dispatcher.

A torch without private names serves every call.
"""

import functools
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import oracle_features
import pytest
import torch
import torch._dynamo.testing
from fake_kernels import skip_dispatcher
from operands import place
from tensors import LooksLikeCuda, ints, qkv, starts
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import BaseTorchDispatchMode

import cutlass_fmha
from cutlass_fmha import attention, private_torch
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher

# Of torch's own making: what its compiler and its forward-mode derivatives use inside.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

forward, attend = torch.ops.cutlass_fmha.forward, torch.ops.cutlass_fmha.attend

tensors = functools.partial(qkv, head_dim_v=24)
NO_BACKWARD = "cutlass_fmha has no backward yet"
Q, K, V = tensors()
LISTS = {"block_counts": torch.ones(1, 1, 3, dtype=torch.int32), "block_m": 16, "block_n": 32}
LISTS["block_indices"] = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": ((Q, K, V), {}),
    "scores": ((Q, K, V), {
        "softcap": 2.0, "bias": torch.randn(33, 1), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}),
    "masks": ((Q, K, V), {
        "window_left": 3, "mask": torch.randn(2, 1, 33, 65) > 0, "prefix_lengths": ints(3, 4), **LISTS}),
    "dropout": ((Q, K, V), {"dropout_p": 0.3, "dropout_seed": torch.tensor([3])}),
    "packed": (tuple(x.flatten(0, 1) for x in (Q, K, V)), {
        "cu_seqlens_q": ints(0, 20, 66), "cu_seqlens_k": ints(0, 100, 130), "max_seqlen_q": 50}),
    "pages": ((Q, *(x[:, :64].reshape(8, 16, 2, -1) for x in (K, V))), {
        "page_table": ints(*range(8)).view(2, 4), "seqused_k": ints(3, 60)}),
    "cache": ((Q[:1], K, V), {
        "cache_batch_idx": ints(1), "seqused_k": ints(50), "leftpad_k": ints(5), "num_splits": 3}),
    "no keys": ((Q, K[:, :0], V[:, :0]), {"batch_invariant": True}),
    "no batch": ((Q[:0], K[:0], V[:0]), {"seqused_q": ints()}),
    "forward": (qkv(), {}),
    "forward, heads first": (tuple(place(x, "bhsd") for x in qkv()), {}),
    "forward, no keys": (qkv(seqlen_k=0), {}),
    "forward, no batch": (qkv(batch=0), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_passes(name: str):
    inputs, features = CALLS[name]
    op = forward if name.startswith("forward") else attend
    for causal, return_lse in [("none", False), ("bottom-right", True), ("top-left", True)]:
        torch.library.opcheck(op.default, (*inputs, 0.3, causal, return_lse, None), features)


def test_slopes_that_want_a_gradient_and_forward_mode_are_refused():
    """test_bad_calls.py has the leaf."""
    (q, k, v), slopes, bias = qkv(dtype=torch.float32), torch.ones(4, requires_grad=True), torch.zeros(65)
    for each in (slopes, slopes * 2):
        with pytest.raises(NotImplementedError, match=NO_BACKWARD):
            attention(q, k, v, alibi_slopes=each)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert attention(q, k, v, alibi_slopes=each).grad_fn is None
    with forward_ad.dual_level():
        attention(q, k, v)  # nothing dual about it
        for said in ({"k": forward_ad.make_dual(k, k)}, {"k": k, "bias": forward_ad.make_dual(bias, bias)}):
            with pytest.raises(NotImplementedError, match=NO_BACKWARD):
                attention(q, v=v, **said)


def compiled(function: Any, backend: str = "aot_eager", dynamic: bool | None = True) -> tuple[Any, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter


def scored(q, k, v, slopes, sinks, **said):
    scores = {"bias": slopes[:, None, None] * 2, "alibi_slopes": slopes, "sinks": sinks, "softcap": 3.0}
    out, lse = attention(q + 1, k, v, causal=True, **scores, **said, return_lse=True)
    return out * 2, lse


def scored_operands(number: int, head_dim_v: int = 0) -> tuple[Tensor, ...]:
    sizes = [(5, 33, 65), (3, 17, 40), (7, 50, 51)][number]
    return *qkv(*sizes, seed=number, head_dim_v=head_dim_v), torch.rand(4), torch.randn(4)


def masked_operands(number: int) -> tuple[Tensor, ...]:
    q, k, *others = scored_operands(number, 24)
    return torch.randn(len(q), 1, q.shape[1], k.shape[1]) > -1, q, k, *others


def packed_operands(number: int) -> tuple[Tensor, ...]:
    lengths = [([5, 9], [7, 40]), ([1, 8, 2], [20, 3, 1]), ([4, 0, 6, 7], [9, 9, 0, 30])][number]
    return *(x[0] for x in tensors(1, *map(sum, lengths))), *(starts(*each) for each in lengths)


def paged_operands(number: int) -> tuple[Tensor, ...]:
    batch, pages = [(3, 7), (5, 4), (2, 9)][number]
    q, *kv = tensors(batch, 6, pages * 16 * batch, head_dim_v=32, seed=number)
    table = torch.randperm(batch * pages).view(batch, pages).to(torch.int32)
    used = torch.randint(1, pages * 16, (batch,), dtype=torch.int32)
    return q, *(x[0].reshape(batch * pages, 16, 2, 32) for x in kv), table, used


# All sizes of a first call differ: torch takes equal ones for the same variable. A batch of 2 has 3 starts.
GRAPHS: dict[str, tuple[Any, Any]] = {
    "forward": (scored, scored_operands),
    "attend": (lambda mask, *given: scored(*given, mask=mask, window=(20, None)), masked_operands),
    "packed": (lambda q, k, v, cu_q, cu_k: attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True), packed_operands),
    "paged": (lambda q, k, v, table, used: attention(
        q, k, v, page_table=table, seqused_k=used, causal=True, num_splits=4), paged_operands),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "aot_eager") for name in GRAPHS), ("forward", "inductor"), ("attend", "inductor")]
)
def test_compile_takes_the_whole_graph_with_dynamic_shapes(name: str, backend: str):
    call, operands = GRAPHS[name]
    function, counter = compiled(call, backend)
    for number in range(3):
        given = operands(number)
        torch.testing.assert_close(function(*given), call(*given))
    assert counter.frame_count == 1  # one graph for all lengths


@pytest.mark.parametrize("masked", [False, True])
def test_compile_takes_a_longest_sequence_that_only_the_device_knows(masked: bool):
    def block(x, cu, longest, mask):
        seqlen = longest.item()
        said = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
        return attention(x, x, x, causal=True, mask=mask if masked else None, **said)

    x, cu, mask = torch.randn(12, 4, 16), ints(0, 6, 12), torch.rand(6, 6) > 0.2
    # A graph from the cache on disk would prove nothing.
    fresh = torch._functorch.config.patch(enable_autograd_cache=False)
    with fresh, torch._dynamo.config.patch(capture_scalar_outputs=True):
        function, counter = compiled(block)
        for longest in [6] if masked else [6, 7, 12]:
            arguments = x, cu, torch.tensor(longest), mask
            torch.testing.assert_close(function(*arguments), block(*arguments))
        assert counter.frame_count == 1


FLOATS: dict[str, Any] = {
    "scale": lambda q, number: attention(q, q, q, scale=number),
    "softcap": lambda q, number: attention(q, q, q, softcap=number, causal=True),
    "dropout_p": lambda q, number: attention(q, q, q, dropout_p=number, dropout_seed=3),
    "sdpa": lambda q, number: cutlass_fmha.scaled_dot_product_attention(q, q, q, scale=number),
}


@pytest.mark.parametrize("name", FLOATS)
def test_compile_takes_a_float_that_changes(name: str):
    said, q = FLOATS[name], torch.randn(1, 9, 2, 16)
    function, counter = compiled(said, dynamic=None)
    for number in (0.13, 0.24, 0.35, 0.46, 0.57):
        torch.testing.assert_close(function(q, number), said(q, number))
    assert counter.frame_count == 2  # the first is a constant, and from the second on it may be any


def test_numbers_in_a_tensor_are_checked_as_those_that_are_said():
    q = torch.randn(1, 9, 2, 16)
    call = (q, q, q, 1.0, "none", False, None)
    numbers = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    expected = attend(*call[:3], 0.5, *call[4:], softcap=2.0)[0]
    torch.testing.assert_close(attend(*call, numbers=numbers)[0], expected)
    with pytest.raises(ValueError, match=r"numbers must be float64 of shape \(3,\) on the CPU, got float32"):
        attend(*call, numbers=numbers.float())
    with pytest.raises(ValueError, match="softcap must be 0"):
        attend(*call, numbers=-numbers)


def test_each_call_of_a_graph_draws_a_seed():
    """test_autocast.py compiles the ways to call, with a seed."""
    q = torch.randn(2, 4, 33, 32)
    drawn, _ = compiled(lambda q: cutlass_fmha.scaled_dot_product_attention(q, q, q, dropout_p=0.3))
    torch.manual_seed(0)
    first, second = drawn(q), drawn(q)
    torch.manual_seed(0)
    assert torch.equal(drawn(q), first) and not torch.equal(first, second)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", ["forward", "attend"])
def test_export_keeps_the_op(op: str, strict: bool):
    class Block(torch.nn.Module):
        def forward(self, q, k, v, lengths):
            said = {"seqused_k": lengths, "softcap": 2.0} if op == "attend" else {}
            return attention(q, k, v, causal=True, **said)

    batch = torch.export.Dim("batch", max=64)
    seqlen_q, seqlen_k = (torch.export.Dim(name, min=2, max=4096) for name in ("seqlen_q", "seqlen_k"))
    shapes = ({0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}, {0: batch, 1: seqlen_k}, {0: batch})
    program = torch.export.export(Block(), (*qkv(3), ints(3, 40, 65)), dynamic_shapes=shapes, strict=strict)
    assert f"cutlass_fmha.{op}.default" in str(program.graph)
    other = (*qkv(2, 9, 7, seed=1), ints(3, 7))
    torch.testing.assert_close(program.module()(*other), Block()(*other))


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert not any(isinstance(x, LooksLikeCuda) for x in args), "the mode saw what was asked"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda_like(monkeypatch):
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    return [x.as_subclass(LooksLikeCuda) for x in qkv(dtype=torch.float32)]


def test_the_dispatcher_is_skipped_only_for_plain_tensors_and_where_nothing_listens(cuda_like):
    x, skips = qkv()[0], dispatcher.others_can_skip_dispatcher
    for which, own in enumerate(cuda_like):
        leaf = own.detach().requires_grad_()
        others = [None, 3, x, torch.nn.Parameter(x), x.to("meta"), torch._neg_view(own), leaf]
        asked = [(*cuda_like[:which], other, *cuda_like[which + 1 :]) for other in others]
        assert not any(dispatcher.can_skip_dispatcher(*tensors) for tensors in asked)
        assert skips([own, *others[:2]]) and skips([]) and not any(skips([own, other]) for other in (others[5], leaf))
        with torch.no_grad():
            assert dispatcher.can_skip_dispatcher(*asked[-1]) and skips([leaf])

    answers = []

    def ask(x):
        answers.append(dispatcher.can_skip_dispatcher(*cuda_like))
        return x * 1

    x = torch.ones(2)
    for listener in (BaseTorchDispatchMode, Watching, torch.profiler.profile, forward_ad.dual_level):
        with listener():
            ask(x)
    torch.func.vmap(ask)(x)
    make_fx(ask)(x)
    torch.jit.trace(ask, x, check_trace=False)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            ask(x)
    assert answers == [False] * 7 + [True] * 3


SOURCE = Path(private_torch.__file__)
PRIVATE = sorted(set(re.findall(r'"(_(?!AutoDispatch)[a-zA-Z_]+)"', SOURCE.read_text())))


@pytest.mark.parametrize("name", [*PRIVATE, "all of them"])
def test_a_torch_without_a_private_name_serves_every_call(name: str, cuda_like, monkeypatch):
    spec = importlib.util.spec_from_file_location("private_torch_of_another_torch", SOURCE)
    another = importlib.util.module_from_spec(spec)
    holders = (torch._C, forward_ad, torch.autograd.profiler, torch.ops.aten)
    with monkeypatch.context() as without:
        for each, holder in itertools.product(PRIVATE if name == "all of them" else [name], holders):
            if hasattr(holder, each):
                without.delattr(holder, each, raising=False)
        if name in ("_scaled_dot_product_flash_attention_for_cpu", "all of them"):
            without.setattr(torch.ops, "aten", object())
        spec.loader.exec_module(another)
    for each in [x for x in vars(another) if not x.startswith("_")]:
        monkeypatch.setattr(private_torch, each, getattr(another, each))

    listens = name in LISTENERS or name == "all of them"
    assert dispatcher.can_skip_dispatcher(*cuda_like) is not listens
    monkeypatch.setattr(dispatcher, "Tensor", torch.Tensor)  # the calls below are real ones
    q, k, v = qkv(heads_kv=4)
    out = attention(q, k, v, causal="top-left")
    oracle_features.compare(out, None, q, k, v, causal="top-left").check()
    with pytest.raises(NotImplementedError, match="no backward yet"):
        attention(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))
    cast = attention(*(x.bfloat16() for x in (q, k, v)))
    product = v * torch.ones(1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q.float(), k, v), cast)
        torch.ops.cutlass_fmha.append_kv_(k, v, q[:, :2].float(), q[:, :2], ints(3, 5))
    assert torch.equal(k[1, 5:7], q[1, :2]) and private_torch.raw_stream is another.raw_stream
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


LISTENERS = {
    "_len_torch_function_stack", "_len_torch_dispatch_stack", "_functorch", "_get_tracing_state",
    "_current_level", "_is_profiler_enabled",
}  # fmt: skip


def test_private_names_are_looked_up_in_one_place():
    assert set(PRIVATE) > LISTENERS
    private = r"torch\._(?!_)|aten\._|(?<!private_torch\.)(forward_ad|profiler)\._"
    for path in SOURCE.parent.rglob("*.py"):
        if path != SOURCE and "bench" not in path.parts:
            assert not re.search(private, path.read_text()), path


def test_features_reach_the_launch_past_the_dispatcher(monkeypatch):
    seen = []
    skip_dispatcher(monkeypatch)
    monkeypatch.setattr(plan, "launch", lambda *arguments: seen.append(arguments) or (arguments[0], None))
    q, k, v = tensors()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    said = {"scale": 2, "causal": "top-left", "layout": "bhsd", "row": "row"}
    assert attention(*heads_first, **said, sinks=torch.ones(4)).shape == heads_first[0].shape
    assert all(ours is tensor for ours, tensor in zip(seen[0][:3], heads_first, strict=True))
    assert seen[0][3:9] == (2.0, "top-left", False, "row", "bhsd", ("q", "k", "v"))
    assert torch.equal(seen[0][9]["sinks"], torch.ones(4))
    attention(q, k, v, softcap=1.0)
    assert seen[1][3] is None  # the default scale is the launch's
    attention(q, k, v, **said, return_lse=True)
    assert seen[2] == (q, k, v, 2.0, "top-left", True, "row", "bhsd", ("q", "k", "v"), {}, False)
