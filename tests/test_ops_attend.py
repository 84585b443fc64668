"""What torch expects of the ops ``forward`` and ``attend``: schema, fake tensors, no gradient dropped.

And ``attend`` compiled, and on its way to kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import oracle_features
import pytest
import torch
import torch._dynamo.testing
from fake_kernels import skip_dispatcher
from operands import place
from tensors import ints, qkv
from torch import Tensor
from torch.autograd import forward_ad

import cutlass_fmha
from cutlass_fmha import attention
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import attend as attend_op
from cutlass_fmha.ops import forward as forward_op

# Of torch's own making: what its compiler and its forward-mode derivatives use inside.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

forward, attend = torch.ops.cutlass_fmha.forward, torch.ops.cutlass_fmha.attend
F16 = torch.float16


tensors = functools.partial(qkv, head_dim_v=24)
Q, K, V = tensors()
LISTS = {"block_counts": torch.ones(1, 1, 3, dtype=torch.int32), "block_m": 16, "block_n": 32}
LISTS["block_indices"] = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": ((Q, K, V), {}),
    "scores": (
        (Q, K, V),
        {"softcap": 2.0, "bias": torch.randn(33, 1), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)},
    ),
    "masks": (
        (Q, K, V),
        {"window_left": 3, "mask": torch.randn(2, 1, 33, 65) > 0, "prefix_lengths": ints(3, 4), **LISTS},
    ),
    "dropout": ((Q, K, V), {"dropout_p": 0.3, "dropout_seed": torch.tensor([3])}),
    "packed": (
        (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1)),
        {"cu_seqlens_q": ints(0, 20, 66), "cu_seqlens_k": ints(0, 100, 130), "max_seqlen_q": 50},
    ),
    "pages": (
        (Q, K[:, :64].reshape(8, 16, 2, 32), V[:, :64].reshape(8, 16, 2, 24)),
        {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "seqused_k": ints(3, 60)},
    ),
    "cache": (
        (Q[:1], K, V),
        {"cache_batch_idx": ints(1), "seqused_k": ints(50), "leftpad_k": ints(5), "num_splits": 3},
    ),
    "no keys": ((Q, K[:, :0], V[:, :0]), {"batch_invariant": True}),
    "no batch": ((Q[:0], K[:0], V[:0]), {"seqused_q": ints()}),
    "forward": (qkv(), {}),
    "forward, heads first": (tuple(place(x, "bhsd") for x in qkv()), {}),
    "forward, no keys": (qkv(seqlen_k=0), {}),
    "forward, no batch": (qkv(batch=0), {}),
}


# ---- what torch expects of an op ---------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "module"), [(forward, forward_op), (attend, attend_op)])
def test_the_schema_is_functional_and_of_fixed_arity(op: Any, module: Any):
    schema = op.default._schema
    assert str(schema) == f"cutlass_fmha::{module.SCHEMA}"
    assert not schema.is_mutable


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_passes(name: str):
    inputs, features = CALLS[name]
    op = forward if name.startswith("forward") else attend
    for causal, return_lse in [("none", False), ("bottom-right", True), ("top-left", True)]:
        torch.library.opcheck(op.default, (*inputs, 0.3, causal, return_lse, None), features)


# ---- gradients ---------------------------------------------------------------------------------------------

NO_BACKWARD = "cutlass_fmha has no backward yet"
DIFFERENTIABLE = {"bias": torch.zeros(33, 65), "alibi_slopes": torch.ones(4), "sinks": torch.ones(4)}


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("which", "said"),
    [*(("qkv"[i], {}) for i in range(3)), *((name, DIFFERENTIABLE) for name in (*"qkv", *DIFFERENTIABLE))],
)
def test_a_call_that_needs_a_gradient_has_one_or_raises(which: str, said: dict[str, Tensor], place: str):
    names = dict(zip("qkv", tensors() if said else qkv(), strict=True)) | said
    arguments = {name: x.to(place) for name, x in names.items()}
    for wanted in (arguments[which].clone().requires_grad_(), arguments[which].clone().requires_grad_() * 2):
        arguments[which] = wanted  # a leaf or none
        if which != "alibi_slopes":
            assert attention(**arguments).requires_grad
            continue
        with pytest.raises(NotImplementedError, match=NO_BACKWARD):
            attention(**arguments)
    with torch.no_grad():
        assert not attention(**arguments).requires_grad
    with torch.inference_mode():
        attention(**arguments)
    assert attention(**{name: x.detach() for name, x in arguments.items()}).grad_fn is None


def test_other_ways_to_a_derivative_raise_too():
    q, k, v = qkv(dtype=torch.float32)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_BACKWARD):
        attention(q, forward_ad.make_dual(k, k), v)
    with forward_ad.dual_level():
        attention(q, k, v)  # nothing dual about it
    bias = torch.zeros(65)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=NO_BACKWARD):
        attention(q, k, v, bias=forward_ad.make_dual(bias, bias))
    bias.requires_grad_()
    assert cutlass_fmha.scaled_dot_product_attention(q, q, q, attn_mask=bias[:1]).requires_grad


# ---- compiling ---------------------------------------------------------------------------------------------


def compiled(function: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


@pytest.mark.parametrize("op", ["forward", "attend"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_takes_the_whole_graph_with_dynamic_shapes(op: str, backend: str):
    def block(q, k, v, mask, slopes, sinks):
        scores = {"bias": slopes[:, None, None] * 2, "alibi_slopes": slopes, "sinks": sinks, "softcap": 3.0}
        said = {**scores, "mask": mask, "window": (20, None)} if op == "attend" else {}
        out, lse = attention(q + 1, k, v, causal=True, **said, return_lse=True)
        return out * 2, lse

    function, counter = compiled(block, backend)
    slopes, sinks = torch.rand(4), torch.randn(4)
    # All sizes of the first call differ: torch takes equal ones for the same variable.
    for seed, (batch, seqlen_q, seqlen_k) in enumerate([(5, 33, 65), (3, 17, 40), (7, 50, 51)]):
        q, k, v = qkv(batch, seqlen_q, seqlen_k, seed=seed, head_dim_v=24 if op == "attend" else 0)
        mask = torch.randn(batch, 1, seqlen_q, seqlen_k) > -1
        arguments = (q, k, v, mask, slopes, sinks)
        for ours, expected in zip(function(*arguments), block(*arguments), strict=True):
            torch.testing.assert_close(ours, expected)
    assert counter.frame_count == 1  # one graph for all lengths


def test_compile_takes_packed_sequences_with_dynamic_shapes():
    def block(q, k, v, cu_q, cu_k):
        return attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)

    function, counter = compiled(block)
    # As above, the sizes of the first call differ: a batch of 2 has 3 starts, and there are 4 heads.
    for lengths_q, lengths_k in [([5, 9], [7, 40]), ([1, 8, 2], [20, 3, 1]), ([4, 0, 6, 7], [9, 9, 0, 30])]:
        q, k, v = (x[0] for x in tensors(1, sum(lengths_q), sum(lengths_k)))
        cu = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k)]
        out, lse = function(q, k, v, *cu)
        given = {"causal": "bottom-right", "cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        oracle_features.compare(out, lse, q, k, v, **given).check()
    assert counter.frame_count == 1


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
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(said, backend=counter, fullgraph=True)
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


def test_compile_takes_paged_decoding_with_dynamic_shapes():
    def step(q, k, v, table, used):
        return attention(q, k, v, page_table=table, seqused_k=used, num_splits=4, causal=True)

    function, counter = compiled(step)
    for seed, (batch, pages) in enumerate([(3, 7), (5, 4), (2, 9)]):
        q, k, v = tensors(batch, 6, pages * 16 * batch, head_dim_v=32, seed=seed)
        k, v = (x[0].reshape(batch * pages, 16, 2, 32) for x in (k, v))
        table = torch.randperm(batch * pages).view(batch, pages).to(torch.int32)
        used = torch.randint(1, pages * 16, (batch,), dtype=torch.int32)
        torch.testing.assert_close(function(q, k, v, table, used), step(q, k, v, table, used))
    assert counter.frame_count == 1


def test_compile_takes_dropout_and_sdpa():
    q, k, v = (x.transpose(1, 2) for x in tensors(dtype=torch.float32))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    sdpa = cutlass_fmha.scaled_dot_product_attention
    for function in (
        lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(33, 65, dtype=torch.bool).tril(3)),
        lambda q, k, v: sdpa(q, k, v, attn_mask=q[..., :1] * k[..., 0].unsqueeze(-2)),
        lambda q, k, v: attention(q, k, v, layout="bhsd", dropout_p=0.3, dropout_seed=5),
        lambda q, k, v: attention(q, k, v, layout="bhsd"),  # head_dim_v is another one
        lambda q, k, v: attention(q, k, v, layout="bhsd", causal="top-left", scale=-0.5),
        lambda q, k, v: sdpa(q[None], k[0], v, is_causal=True, enable_gqa=False),
    ):
        torch.testing.assert_close(compiled(function)[0](q, k, v), function(q, k, v))
    drawn, _ = compiled(lambda q, k, v: sdpa(q, k, v, dropout_p=0.3))
    torch.manual_seed(0)
    first, second = drawn(q, k, v), drawn(q, k, v)
    torch.manual_seed(0)
    assert torch.equal(drawn(q, k, v), first) and not torch.equal(first, second)


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


# ---- to the kernels ----------------------------------------------------------------------------------------


def test_features_reach_the_launch_past_the_dispatcher(monkeypatch):
    seen = []
    skip_dispatcher(monkeypatch)
    monkeypatch.setattr(plan, "launch", lambda *arguments: seen.append(arguments) or (arguments[0], None))
    q, k, v = tensors()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = attention(*heads_first, scale=2, causal="top-left", layout="bhsd", row="row", sinks=torch.ones(4))
    assert out.shape == heads_first[0].shape
    assert all(ours is tensor for ours, tensor in zip(seen[0][:3], heads_first, strict=True))
    assert seen[0][3:9] == (2.0, "top-left", False, "row", "bhsd", ("q", "k", "v"))
    assert torch.equal(seen[0][9]["sinks"], torch.ones(4))
    attention(q, k, v, softcap=1.0)
    assert seen[1][3] is None  # the default scale is the launch's
    attention(q, k, v, scale=2, causal="top-left", return_lse=True, layout="bhsd", row="row")
    assert seen[2] == (q, k, v, 2.0, "top-left", True, "row", "bhsd", ("q", "k", "v"), {}, False)
