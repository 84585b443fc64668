"""DTensors: each device computes shards of batch and heads, and together they have what one would have."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes
from tensors import drawn, ints, randn
from torch import Tensor, nn

from cutlass_fmha import attention, scaled_dot_product_attention, sdpa
from cutlass_fmha.torch_sdpa.override import _HAS_REGISTRY

Q, K = (2, 9, 4, 32), (2, 13, 2, 32)
#: Shapes of query and of key and value, features (with a gradient where they are of that kind).
MASK = torch.arange(13) < ints(13, 5)[:, None, None, None]
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "causal": (Q, K, {"causal": True}),
    "one head of keys": (Q, (2, 13, 1, 32), {"window": (4, 0)}),
    "3 heads of keys for 2 devices": ((2, 9, 6, 32), (2, 13, 3, 32), {}),
    "mask, a bias of heads, sinks": (Q, K, {"mask": MASK, "bias": randn(4, 9, 13), "sinks": randn(4)}),
    "lengths": (Q, K, {"seqused_k": ints(13, 5), "alibi_slopes": randn(2, 4).abs(), "bias": randn(2, 1, 9, 13)}),
    "block lists": (Q, K, {"block_mask": (ints(1, 1).view(2, 1, 1), ints(0, 0).view(2, 1, 1, 1), (128, 128))}),
    "packed": ((10, 4, 32), (12, 2, 32), {"cu_seqlens_q": ints(0, 4, 10), "cu_seqlens_k": ints(0, 5, 12)}),
}
LEARNED = ("bias", "sinks")


def results(q: Tensor, k: Tensor, v: Tensor, features: dict[str, Any], of_output: Any) -> list[Tensor]:
    out, lse = attention(q, k, v, return_lse=True, **features)
    wanted = [q, k, v, *(features[name] for name in LEARNED if name in features)]
    loss = (out * of_output).sum() + lse.nan_to_num(neginf=0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, wanted)]


def ring_attention(mesh: Any) -> None:
    """torch's context parallelism: its flash op on pairs of shards of queries and keys, merged by LSEs."""
    from torch.distributed.tensor import DTensor, Shard, experimental
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    shape = (2, 4, 16, 32)
    whole = [randn(*shape, seed=n) for n in range(4)]
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    want = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]
    with sdpa("cpu"), experimental.context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 4):
        *given, dout = (DTensor.from_local(x, mesh, [Shard(2)]) for x in whole)
        given = [x.requires_grad_() for x in given]
        found = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, True)[0]
        results = [found, *torch.autograd.grad(found, given, dout)]
        full = context_parallel_unshard(mesh, [x.to_local() for x in results], [2] * 4)
    torch.testing.assert_close(list(full), want, rtol=1e-4, atol=1e-5)
    assert sdpa.counts["_scaled_dot_product_flash_attention_backward"] == 2 and not sdpa.declined


def tensor_parallel(mesh: Any) -> None:
    """Four heads of queries that share two of keys, divided by torch's plan for their projections."""
    from torch.distributed.tensor import parallel

    torch.manual_seed(0)
    sizes = {"q": (64, 128), "k": (64, 64), "v": (64, 64), "out": (128, 64)}
    alone = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    plan = dict.fromkeys("qkv", parallel.ColwiseParallel(use_local_output=False)) | {"out": parallel.RowwiseParallel()}
    shared = parallel.parallelize_module(copy.deepcopy(alone), mesh, plan)
    for layer in (alone, shared):
        heads = (layer[name](randn(2, 9, 64)).unflatten(-1, (-1, 32)) for name in "qkv")
        layer["out"](attention(*heads, causal=True).flatten(2)).square().sum().backward()
    for one, part in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-4)


def one_of_two(rank: int, meeting: str) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    two_processes.meet(rank, meeting)
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))

    def spread(x: Any, placement: Any) -> Any:
        """Over the last dimension of the mesh, where the tensor has such an axis."""
        if not isinstance(x, Tensor):
            return x
        whole = isinstance(placement, Shard) and x.dim() <= placement.dim
        found = distribute_tensor(x.detach(), mesh, [Replicate(), Replicate() if whole else placement])
        return found.requires_grad_(x.requires_grad)

    for name, (shape_q, shape_k, features) in CALLS.items():
        tensors = [x.requires_grad_() for x in drawn(shape_q, shape_k, shape_k)]
        features = {n: x.requires_grad_() if n in LEARNED else x for n, x in features.items()}
        of_output = randn(*shape_q, seed=7)
        want = results(*tensors, features, of_output)
        heads = len(shape_q) - 2
        for axis in (0, 1, 2, None):
            if axis not in (0, heads) and name != "causal":
                continue  # a sequence is not divided, and nothing sharded
            placement = Replicate() if axis is None else Shard(axis)
            divided = shape_k[heads] != 3 if axis == heads else axis == 0 and len(shape_q) == 4
            kv = Replicate() if divided and shape_k[heads] == 1 and axis == heads else placement
            given = [spread(x, p) for x, p in zip(tensors, (placement, kv, kv), strict=True)]
            said = {n: spread(x, Replicate()) if n in LEARNED else x for n, x in features.items()}
            with CommDebugMode() as sent, torch.no_grad():
                out, _ = attention(*given, return_lse=True, **said)
            assert sent.get_total_counts() == (0 if divided or axis is None else 3), (name, axis)
            assert out.placements[1] == (placement if divided else Replicate()), (name, axis)
            found = results(*given, said, spread(of_output, Replicate()))
            assert all(isinstance(x, DTensor) for x in found)
            beside = results(*given, features, spread(of_output, Replicate()))[5:]  # learned, and the same everywhere
            assert not any(isinstance(x, DTensor) for x in beside)
            torch.testing.assert_close(beside, want[5:], rtol=1e-4, atol=1e-4)
            if name.startswith("one head") and axis == heads:
                assert found[3].placements[1] == Partial(), "each device has a part of the shared head's gradient"
            whole = [x.full_tensor() for x in found]
            torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-4, msg=lambda m, at=(name, axis): f"{at}: {m}")

    q = spread(randn(*Q), Shard(0))
    with torch.inference_mode():
        out = attention(q, q, q)
    assert out.placements[1] == Shard(0)
    for axis, heads in ((0, 4), (1, 4), (2, 4), (2, 3)):  # of which the second and the last are gathered
        q = spread(randn(2, 8, heads, 32), Shard(axis))
        with pytest.raises(NotImplementedError, match="dropout_p would not drop what one device drops"):
            attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(rank)  # each would draw another seed
    q = spread(randn(*Q).requires_grad_(), Replicate())
    dropped = attention(q, q, q, dropout_p=0.5)
    for x in (dropped, torch.autograd.grad(dropped.sum(), q)[0]):
        both = DTensor.from_local(x.to_local(), mesh, [Replicate(), Partial()]).full_tensor()
        torch.testing.assert_close(both, 2 * x.to_local())
    q = spread(randn(*Q), Shard(0))
    with pytest.raises(NotImplementedError, match="cache_batch_idx has no shards where query is sharded"):
        attention(q, q, q, cache_batch_idx=ints(0, 1))
    tensor_parallel(mesh["two"])
    if _HAS_REGISTRY:
        ring_attention(mesh["two"])


def test_shards_of_two_processes_are_what_one_computes(tmp_path: Path):
    two_processes.run(one_of_two, tmp_path)
