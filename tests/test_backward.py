"""Gradients on CPU tensors, and what autograd and torch's other machinery make of the ops."""

import functools
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from fake_build import L4
from tensors import ints, randn
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cutlass_fmha
from cutlass_fmha import _C, attention
from cutlass_fmha.dispatch import gradients
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.launch import gradients as launch

F64 = torch.float64
BACKWARD = torch.ops.cutlass_fmha.attend_backward
drawn = functools.partial(randn, dtype=F64)


def tensors(seqlen_q: int = 7, seqlen_k: int = 9, dtype: torch.dtype = F64, head_dim: int = 8) -> list[Tensor]:
    """Four query heads that share two of keys."""
    shapes = ((2, seqlen_q, 4, head_dim), (2, seqlen_k, 2, head_dim), (2, seqlen_k, 2, head_dim))
    return [drawn(*shape, dtype=dtype).mul(1 + n / 8).requires_grad_() for n, shape in enumerate(shapes)]


#: All that a call may say beside its causality, with what is learned of it.
EVERYTHING: dict[str, Any] = {
    "softcap": 1.5, "alibi_slopes": torch.tensor((0.5, 0.1, 0.02, -0.3)), "window": (1, 1), "dropout_p": 0.3,
    "dropout_seed": 3, "prefix_lengths": ints(2, 3), "mask": drawn(2, 1, 6, 8) > -1.0, "seqused_q": ints(5, 6),
    "seqused_k": ints(7, 8), "leftpad_k": ints(2, 1), "bias": drawn(4, 1, 8).requires_grad_(),
    "sinks": drawn(4).requires_grad_(),
    "block_mask": (ints(1, 2, 2).view(1, 1, 3), ints(1, 0, 1, 2, 1, 2).view(1, 1, 3, 2), (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("said", [{"causal": "top-left", "scale": -0.7}, EVERYTHING], ids=["little", "all"])
def test_gradients_are_those_of_finite_differences(said: dict[str, Any]):
    """Of the output and of the LSE. test_oracle_gradients.py draws mixtures, for the op alone."""
    learned = [n for n, x in said.items() if isinstance(x, Tensor) and x.requires_grad]

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        out, lse = attention(q, k, v, return_lse=True, **said | dict(zip(learned, more, strict=True)))
        return out, lse.clamp(min=-99.0)

    inputs = (*tensors(6, 8, head_dim=2), *(said[n] for n in learned))
    assert torch.autograd.gradcheck(lambda *inputs: call(*inputs)[0], inputs)
    for of in (lambda out, lse: lse, lambda out, lse: lse.double() + out.sum()):  # alone and with the output
        assert torch.autograd.gradcheck(lambda *x: of(*call(*x)), inputs, eps=1e-3, atol=1e-3)  # noqa: B023  # LSEs are fp32


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("said", [{}, {"softcap": 1.5}])
def test_shares_of_the_keys_add_up_to_the_whole(said: dict[str, Any], packed: bool, dtype: torch.dtype):
    """As in ring attention: parts of the keys, with output and LSE of all of them."""
    q, k, v = (x.detach() for x in tensors(dtype=dtype))
    dout, dlse = drawn(*q.shape, dtype=dtype), drawn(2, 4, 7, dtype=dtype).float()
    out, lse = attention(q, k, v, scale=0.3, return_lse=True, **said)

    def call(first: int, last: int) -> tuple[Tensor, ...]:
        rows, lses, features = [dout, q, k[:, first:last], v[:, first:last], out], [lse, dlse], said
        if packed:
            rows = [x.flatten(0, 1) for x in rows]
            lses = [x.transpose(0, 1).flatten(1) for x in lses]
            keys = last - first
            features = said | {"cu_seqlens_q": ints(0, 7, 14), "cu_seqlens_k": ints(0, keys, 2 * keys)}
        found = BACKWARD(*rows, *lses, 0.3, "none", **features)[:3]
        return tuple(x.unflatten(0, (2, -1)) if packed else x for x in found)

    whole, *parts = (call(*keys) for keys in ((0, 9), (0, 4), (4, 9)))
    summed = [sum(dq for dq, *_ in parts), *(torch.cat(x, 1) for x in zip(*(dkv for _, *dkv in parts), strict=True))]
    torch.testing.assert_close(summed, list(whole), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_nobody_wants_is_empty_and_one_of_the_output_lies_anywhere():
    q, k, v = (x.detach() for x in tensors())
    out, lse = attention(q, k, v, return_lse=True)
    given = (out.mT.contiguous().mT[:, :1].expand(out.shape), q, k, v, out, lse, None)
    every = BACKWARD(given[0].contiguous(), *given[1:], 0.3, "none")
    for wanted in itertools.product((False, True), repeat=3):
        found = BACKWARD(*given, 0.3, "none", wanted=[*wanted, False, False])
        for x, y, need in zip(found, every, (*wanted, False, False), strict=True):
            assert torch.equal(x, y) if need else x.numel() == 0
    # Numbers of a graph take the place of scale, softcap and dropout.
    for numbers in ((0.3, 0.0, 0.0), (0.3, 2.0, 0.0), (0.3, 0.0, 0.5)):
        seed, (scale, softcap, p) = torch.tensor([3]), numbers
        expected = BACKWARD(*given, scale, "none", softcap=softcap, dropout_p=p, dropout_seed=seed)
        found = BACKWARD(*given, 1.0, "none", numbers=torch.tensor(numbers, dtype=F64), dropout_seed=seed)
        assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("two_routes")
def test_without_heads_of_queries_all_gradients_are_0(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors()
    bias = drawn(7, 9).requires_grad_()
    out = attention(q[:, :, :0], k, v, bias=bias)
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v, bias)))
    monkeypatch.setattr(launch.devices, "simulated", lambda built: H200)  # whose kernels write nothing
    monkeypatch.setattr(_C, "run", lambda *launched: None)
    monkeypatch.setattr(torch, "empty_like", lambda x, **said: torch.full_like(x, torch.nan, **said))
    q, k, bias = (torch.zeros(shape).half() for shape in ((1, 4, 0, 64), (1, 6, 2, 64), (1, 0, 4, 6)))
    given = (q, torch.zeros(1, 0, 4), None, 1.0, "none", {"bias": bias})
    found = launch.launch(q, (q, k, k), *given, (True, True, True, True, False))
    assert all((x == 0).all() for x in found) and found[1].shape == k.shape and found[3].dtype == bias.dtype


def put_in_place(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> None:
    usual = {"family": "backward", "dtype": "float16", "smem_bytes": 99000, "alignment": 16, "arch": 90}
    usual |= {"scored": False, "writes_scores": False, "groups": 1, "tail": 0}
    made = tuple(SimpleNamespace(index=i, **usual | row) for i, row in enumerate(rows))
    monkeypatch.setattr(tables, "backward", lambda: tables.Table(made))
    monkeypatch.delenv("CUTLASS_FMHA_FORCE_ARCH", raising=False)


@pytest.fixture
def four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = [{"name": f"bwd_sm{a}_d{d}", "arch": a, "head_dim": d} for a in (89, 90) for d in (128, 64)]
    put_in_place(monkeypatch, *of_all)


@pytest.mark.usefixtures("four_rows")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        *[({"head_dim": d, "head_dim_v": v}, "bwd_sm89_d64") for d, v in ((32, None), (64, 64))],
        *[({"head_dim": d, "head_dim_v": v}, "bwd_sm89_d128") for d, v in ((40, 72), (128, 64))],
        ({"head_dim": 136}, "bwd_sm89_d64: made for head dims up to 64, and the tensors have 136"),
        ({"dtype": "float32"}, "bwd_sm89_d128: computes float16, and the tensors are float32"),
        ({"features": ("softcap",)}, "bwd_sm89_d128: has no softcap"),
        ({"features": ("pages",)}, "bwd_sm89_d128: has no paged keys"),
    ],
)
def test_the_least_head_dim_that_holds_both_is_chosen_or_the_nearest_rows_say_why_not(change: dict, said: str):
    problem = replace(Problem(1, 64, 64, 4, 2, 64, "float16", features=("window", "varlen")), **change)
    if ":" in said:
        with pytest.raises(cutlass_fmha.UnsupportedError, match=re.escape(said)):
            gradients.choose(problem, L4)
    else:
        assert gradients.choose(problem, L4).row.name == said


@pytest.mark.usefixtures("four_rows")
def test_wide_rows_know_all_scored_ones_do_and_a_bias_beside_a_softcap():
    kind = {"arch": 89, "dtype": "float16", "scored": True, "smem_bytes": 60000, "alignment": 16}
    wide, scored = (
        SimpleNamespace(**kind, family=family, head_dim=head_dim, writes_scores=False)
        for family, head_dim in (("backward_wide", 512), ("backward", 256))
    )
    names, table = ("window", "bias", "softcap"), tables.Table((wide, scored))
    asked = Problem(1, 64, 64, 4, 2, 40, "float16", features=names, window=(3, 5), bias_gradient=True)
    for row, change, sentences in (
        (wide, {}, []),
        (scored, {}, ["has no gradient of a bias beside a softcap"]),
        (scored, {"bias_gradient": False}, []),
        (wide, {"features": ("cache_batch_idx",)}, ["has no cache_batch_idx"]),
        (wide, {"head_dim_v": 513}, ["made for head dims up to 512, and the tensors have 40, value 513"]),
    ):
        assert gradients.reasons(row, replace(asked, **change), L4, table, deterministic=True) == sentences


@pytest.mark.usefixtures("two_routes")
def test_a_row_is_asked_for_while_sizes_are_symbols(monkeypatch: pytest.MonkeyPatch):
    """Of lengths nothing is noted as asked; a row that writes dS has a size in bytes, of what symbols stand for."""
    monkeypatch.setattr(launch.devices, "of_index", lambda index: H200)
    shapes = ShapeEnv()
    symbols = [(n, shapes.create_symbol(n, ConstantSource(f"s{n}"))) for n in (3, 11, 13, 64, 4096)]
    *sizes, fits, does_not = (shapes.create_symintnode(symbol, hint=n) for n, symbol in symbols)
    assert launch.refusal(Problem(*sizes, 4, 2, 8, "float16", "bottom-right"), 0) == "" and not shapes.guards
    assert launch.refusal(Problem(2, 100, 100, 4, 4, fits, "float16"), 0) == ""
    assert "made for head dims up to" in launch.refusal(Problem(2, 100, 100, 4, 4, does_not, "float16"), 0)
    for choose in (gradients.choose, None):  # that nothing refuses numbers is found once
        monkeypatch.setattr(gradients, "choose", choose)
        assert launch.refusal(Problem(2, 101, 99, 4, 4, 64, "float16"), 0) == ""


@pytest.mark.usefixtures("four_rows")
def test_explain_says_which_row_computes_gradients_and_why_not_the_others():
    unaligned = {"shape": (1, 64, 4, 40), "dtype": "float16", "alignment": 2}  # which a launch copies
    found = cutlass_fmha.explain(**unaligned, device=L4, backward=True)
    assert found.winner == "bwd_sm89_d64" and "of the least head dim" in found.note
    assert [x.row.name for x in found.rows if x.eligible] == ["bwd_sm89_d64", "bwd_sm89_d128"]
    refused = cutlass_fmha.explain(shape=(1, 64, 4, 64), dtype="float16", device=L4, backward=True, deterministic=True)
    assert refused.winner is None and "bwd_sm89_d64" in str(refused)
    assert "sums dQ in no fixed order" in str(refused)
    q, k, v = (x.detach() for x in tensors())
    assert "CPU backend" in cutlass_fmha.explain(q, k, v, softcap=3.0, backward=True).note


H200 = PRESETS["h200"]
LONG = Problem(2, 4096, 4096, 16, 4, 128, "float16")
#: dS of a head of keys of LONG, and its four heads of queries: 64 x 32 tiles of 64 x 128 x 2 bytes each.
WHOLE = 4 * 64 * 32 * 64 * 128 * 2

#: Changes of LONG to problems without scores.
NOTHING: tuple[dict[str, Any], ...] = (
    {"num_heads": 0, "num_heads_kv": 0},
    {"batch": 0},
    {"batch": 0, "causal": "top-left"},
)


@pytest.fixture
def two_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"head_dim": 128, "tile_m": 64, "tile_n": 128, "min_blocks": 1}
    scored, writes = {"scored": True}, {"writes_scores": True}
    kinds = {"plain": {}, "scored": scored, "ds": writes, "scored_ds": scored | writes}
    put_in_place(monkeypatch, *({"name": name, **made, **kind} for name, kind in kinds.items()))
    monkeypatch.setattr(tables, "query_products", lambda: {(90, "float16", 128)})


@pytest.mark.usefixtures("two_routes")
@pytest.mark.parametrize(
    ("change", "workspace", "row", "heads"),
    [
        ({}, None, "ds", 8),  # 128 MiB each
        ({"batch": 4}, 6 * WHOLE, "ds", 4),  # of 32 blocks, which fill the SMs four times; six at a time, five times
        ({"batch": 4, "causal": "top-left"}, 6 * (WHOLE // 2 + WHOLE // 16), "ds", 6),  # turns are alike
        ({}, WHOLE, "scored", 0),  # 32 blocks at a time leave 100 SMs idle
        ({}, WHOLE - 1, "scored", 0),
        ({}, 0, "scored", 0),
        ({"causal": "bottom-right"}, 4 * (WHOLE // 2 + WHOLE // 16), "ds", 4),  # two tiles share a row
        ({"causal": "bottom-right", "features": ("prefix",)}, 4 * WHOLE, "ds", 4),
        ({"window": (128, 0), "features": ("window",)}, WHOLE, "ds", 8),
        ({"features": ("softcap",)}, None, "scored_ds", 8),
        ({"features": ("softcap",)}, WHOLE - 1, "scored", 0),
        ({"features": ("softcap", "block_mask"), "block_mask": (64, 64)}, None, "scored_ds", 8),
        # Lists may name what a diagonal hides.
        ({"causal": "bottom-right", "features": ("block_mask",), "block_mask": (64, 64)}, 4 * WHOLE, "scored_ds", 4),
        ({"seqlen_q": 64, "seqlen_k": 64}, None, "scored", 0),  # a tile of keys awaits nobody
        *[(none, None, "ds", 1) for none in NOTHING],
        ({"batch": 0}, 0, "scored", 0),
    ],
)
def test_the_cheaper_route_within_the_cap_is_chosen(change: dict, workspace: int | None, row: str, heads: int):
    route = gradients.choose(replace(LONG, **change), H200, None, True, workspace)
    assert (route.row.name, route.heads) == (row, heads)
    assert route.scores <= (workspace or gradients.DEFAULT_WORKSPACE)
    assert bool(route.scores) == (heads > 0 and change not in NOTHING)


class Symbol(int):
    """A size that a compiler has no number for; comparing it would make it a constant."""


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({}, "long"),
        ({"causal": "bottom-right"}, "short"),  # half of a tile at the diagonal is computed for nothing
        ({"causal": "bottom-right", "seqlen_q": 8192, "seqlen_k": 8192}, "long"),
        ({"causal": "bottom-right", "seqlen_q": Symbol(2048)}, "long"),
        ({"window": (256, 0)}, "short"),
        ({"window": (256, 256), "seqlen_q": 8192, "seqlen_k": 8192}, "short"),
        ({"batch": 1, "num_heads": 12, "seqlen_q": 512, "seqlen_k": 512}, "short"),  # 24 blocks, 58 SMs
        ({"batch": 1, "num_heads": 16, "seqlen_q": 512, "seqlen_k": 512}, "long"),  # 32, and 64 are two waves
        ({"num_heads": 16, "num_heads_kv": 1, "batch": 2}, "short"),
        ({"mean": (300, 300)}, "short"),  # of 256 keys, the second is nearly empty
        ({"mean": (2048, 2048), "seqlen_q": 8192, "seqlen_k": 8192}, "long"),
        ({"mean": (130, 130)}, "short"),  # two blocks of 256 keys a sequence
        ({"arch": 120, "causal": "bottom-right"}, "short"),
        ({"arch": 120, "causal": "bottom-right", "seqlen_q": 8192, "seqlen_k": 8192}, "long"),
        ({"mean": (2048, 0), "seqlen_q": 8192}, "long"),  # keys are as long as the longest
        ({"causal": "top-left", "seqlen_q": 8192, "seqlen_k": 16384}, "long"),
        ({"batch": 0}, "long"),
        ({"seqlen_k": 0}, "long"),
    ],
)
def test_the_tile_of_keys_suits_the_lengths(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], row: str):
    arch = change.get("arch", 89)
    made = {"arch": arch, "head_dim": 64, "tile_m": 64}
    put_in_place(monkeypatch, *({"name": name, "tile_n": n, **made} for name, n in (("long", 256), ("short", 128))))
    problem = Problem(4, 2048, 2048, 16, 16, 64, "float16")
    change = {"num_heads_kv": change.get("num_heads", 16), **{x: change[x] for x in change if x != "arch"}}
    device = {89: L4, 120: PRESETS["rtx5090"]}[arch]
    assert gradients.choose(replace(problem, **change), device).row.name == row


@pytest.mark.parametrize(
    ("sizes", "faster"),  # batch, heads, length; by microseconds that an H200 took, where the other takes 4 % more
    [
        ((2, 16, 1024), "short full"),
        ((8, 12, 512), "short full"),
        ((1, 16, 2048), "short full, short causal"),
        ((64, 12, 128), "short full, short causal"),
        ((2, 16, 640), "long full, short causal"),  # the last 64 keys are a block that is half as long
        ((4, 16, 1536), "long full, long causal"),
        ((16, 16, 1024), "long full, long causal"),
        ((4, 32, 4096), "long full, long causal"),
        ((2, 8, 4096), "long full, long causal"),
        ((4, 16, 2048), "long full, long causal"),
        ((1, 8, 8192), "long causal"),
    ],
)
def test_the_tile_of_keys_suits_an_h200(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], faster: str):
    made = {"arch": 90, "head_dim": 64, "tile_m": 64, "groups": 3}
    long, short = {"name": "long", "tile_n": 192, "tail": 64}, {"name": "short", "tile_n": 128}
    put_in_place(monkeypatch, {**made, **long}, {**made, **short})
    batch, heads, seqlen = sizes
    for row, mask in (each.split() for each in faster.split(", ")):
        causal = "none" if mask == "full" else "bottom-right"
        problem = Problem(batch, seqlen, seqlen, heads, heads, 64, "float16", causal=causal)
        assert gradients.choose(problem, H200).row.name == row, mask


@pytest.mark.usefixtures("two_routes")
def test_explain_says_which_route_deterministic_gradients_take_and_why():
    given: dict[str, Any] = {"shape": (2, 4096, 16, 128), "num_heads_kv": 4, "dtype": "float16"}
    given |= {"device": H200, "backward": True, "deterministic": True}
    found = cutlass_fmha.explain(**given, deterministic_workspace=2 * WHOLE)
    assert found.winner == "ds" and "us predicted" in found.note
    assert f"dS is written, {2 * WHOLE} bytes in 4 turns: " in found.note
    less = cutlass_fmha.explain(**given, deterministic_workspace=9)
    assert less.winner == "scored"
    assert f"writes {WHOLE} bytes of dS for a head of keys, and deterministic_workspace is 9" in str(less)
    assert cutlass_fmha.set_deterministic_workspace(9) == gradients.DEFAULT_WORKSPACE
    try:
        assert cutlass_fmha.explain(**given).winner == "scored"
    finally:
        assert cutlass_fmha.set_deterministic_workspace(None) == 9
    assert cutlass_fmha.explain(**given).winner == "ds"


def test_a_broadcast_bias_in_a_fixed_order_has_sums_of_all_scores(monkeypatch: pytest.MonkeyPatch):
    put_in_place(monkeypatch, {"name": "scored", "head_dim": 64, "tile_m": 64, "tile_n": 128, "scored": True})
    made: list[Tensor] = []
    monkeypatch.setattr(launch, "_zeros", lambda shape, *of: made.append(q.new_zeros(shape)) or made[-1])
    shapes = ((1, 4, 5, 64), (1, 6, 5, 64), (1, 5, 4), (6,))
    q, k, lse, bias = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    said: dict[str, Any] = {"bias": bias}
    given = (q, (q, k, k), q, lse.float(), None, 1.0, "none", said, (False, False, False, True, False))
    for deterministic, most, sums in ((False, 0, 6), (True, 480, 120)):
        said.update(deterministic=deterministic, deterministic_workspace=most)
        found = launch.launch(*given, device=H200)
        assert found[3].shape == (6,) and made[-1].numel() == sums
    said["deterministic_workspace"] = 479
    sentence = "480 bytes, and deterministic_workspace is 479"
    with pytest.raises(cutlass_fmha.UnsupportedError, match=sentence):
        launch.launch(*given, device=H200)
    asked = {**said, "bias": bias.requires_grad_(), "backward": True, "device": "h200"}
    told = [cutlass_fmha.explain(q, k, k, **{**asked, "deterministic_workspace": most}) for most in (479, 480)]
    assert told[0].winner is None and sentence in told[0].note and told[1].winner == "scored"
    asked |= {"deterministic_workspace": 480, "batch_invariant": True}  # of which a row is chosen as for one sequence
    assert cutlass_fmha.explain(*(x.expand(2, -1, -1, -1) for x in (q, k, k)), **asked).winner is None


@pytest.mark.parametrize("head_dim", [20, 64])
def test_gradients_lie_as_a_compiled_graph_expects(head_dim: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.devices, "simulated", lambda built: L4)
    monkeypatch.setattr(_C, "run", lambda *launched: None)
    q, k, v = (torch.empty(2, 64, heads, head_dim, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, lse = q.clone(), torch.empty(2, 4, 64)
    real = launch.launch(out, (q, k, v), out, lse, None, 0.3, "none", {}, (True, True, True, False, False))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, out, lse = (torch.empty_like(x, device="cuda") for x in (q, k, v, out, lse))
        fake = BACKWARD(out, q, k, v, out, lse, None, 0.3, "none")
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


SOMEWHERE = 4096


def params(**changes: Any) -> _C.BackwardParams:
    """Three queries and four keys of two heads; addresses that nothing reads before all is checked."""
    forward = _C.AttentionParams()
    sizes = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "seqlen_q": 3, "seqlen_k": 4}
    sizes |= {"head_dim": 64, "head_dim_v": 64, "lse_head_stride": 3, "lse_batch_stride": 6, "lse_rows": 6}
    for name, value in (sizes | dict.fromkeys(("q", "k", "v", "o", "lse"), SOMEWHERE)).items():
        setattr(forward, name, value)
    found = _C.BackwardParams(forward)
    for name, value in (dict.fromkeys(("dout", "dq", "dk", "dv", "workspace"), SOMEWHERE) | changes).items():
        setattr(found, name, value)
    return found


def test_parameters_and_problems_that_a_row_does_not_take():
    rows = [x for x in _C.backward_rows() if x.family == "backward"]
    first = next(iter(rows), None)
    knowing = [x for x in rows if x.scored]
    scored, writer = (next((x for x in knowing if x.writes_scores == writes), None) for writes in (False, True))
    many = {"batch": 2**29, "num_heads": 4, "lse_batch_stride": 0, "lse_head_stride": 0}
    capped = {"bias": SOMEWHERE, "bias_type": "float32", "dbias": SOMEWHERE, "softcap": 1.0}
    lists = {"block_counts": SOMEWHERE, "block_indices": SOMEWHERE, "block_m": 16, "block_n": 48}
    for row, changes, sentence in (
        *((first, {name: 0}, f"{name} must be an address") for name in ("dout", "lse")),
        *((first, {name: SOMEWHERE + 2}, f"{name} must be aligned to 4 bytes") for name in ("dsinks", "dlse")),
        (first, {"workspace": SOMEWHERE + 8}, "workspace must be aligned to 16 bytes"),
        (first, {"num_heads": 3, "num_heads_kv": 2}, "must be a multiple of num_heads_kv"),
        (first, {"head_dim_v": 0}, "head_dim_v must be between 1 and"),
        (first, {"dq_stride": (-1, 0, 0)}, "dq_stride must be between 0 and"),
        (first, many, r"batch \* num_heads must be below 2\^31"),
        (scored, capped, "has no dbias beside a softcap"),
        (scored, lists, "blocks of a mask that are multiples of 16 x 32, got 16 x 48"),
        (writer, {"scores": SOMEWHERE, "scores_turn": 1, "ordered": True}, "does not know ordered"),
    ):
        if row is not None or row is first:  # a build without rows checks, too
            with pytest.raises(ValueError, match=sentence):
                _C.run(row.index if row else 0, params(**changes), 0, 0)
    if scored is not None:
        problem = Problem(1, 64, 64, 4, 2, 64, scored.dtype, features=("block_mask",), block_mask=(8, 64))
        with pytest.raises(cutlass_fmha.UnsupportedError, match="multiples of 16 x 32, and these are 8 x 64"):
            gradients.choose(problem, L4, scored.name)


def test_the_workspace_holds_whole_tiles():
    assert params().workspace_floats(64, 256, 128) == 2 * 64 * (128 + 2)
    assert params(batch=3, seqlen_q=65).workspace_floats(64, 256, 128) == 2 * 3 * 128 * (128 + 2)
    more = params(batch=3, seqlen_q=65, ordered=True, dsinks=SOMEWHERE)
    assert more.workspace_floats(64, 256, 128) == 2 * 3 * 2 * (64 * (128 + 2) + 8 + 1)
    # Of block lists, 16 bytes of each tile of queries, and one more, and a count, for each tile of keys.
    lists = params(batch=3, seqlen_q=65, seqlen_k=600, block_m=64, block_n=64)
    assert lists.workspace_floats(64, 256, 128) == 2 * 3 * 128 * (128 + 2) + 3 * 3 * (4 * (2 * 2 + 1) + 1)
    # Packed sequences begin with a tile each; beyond 2^31 elements, too.
    packed = params(batch=3, cu_seqlens_q=SOMEWHERE, lse_head_stride=2**28, lse_batch_stride=0)
    assert packed.workspace_floats(64, 256, 128) == 2 * (2**28 + 3 * 64) * (128 + 2)


def test_compiled_with_dynamic_shapes():
    def loss(*x: Tensor) -> Tensor:
        return attention(*x, causal=True).sin().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for seqlen_q, seqlen_k in ((7, 9), (12, 10), (16, 33)):
        inputs = tensors(seqlen_q, seqlen_k, torch.float32)
        found, expected = (torch.autograd.grad(call(*inputs), inputs) for call in (compiled, loss))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_masks_and_biases_compile_for_training():
    """Of lengths that are read by vectors, whose addresses nobody knows while a graph is traced."""
    inputs, bias = tensors(8, 8, torch.bfloat16), drawn(4, 8, 8, dtype=torch.bfloat16).requires_grad_()
    for said in ({"mask": drawn(8, 8) > -1.0}, {"bias": bias}):
        call = functools.partial(attention, **said)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        wanted = [*inputs, *[x for x in said.values() if x.requires_grad]]
        found, expected = (torch.autograd.grad(each(*inputs).sum(), wanted) for each in (compiled, call))
        assert all(map(torch.equal, found, expected))


def test_the_op_is_what_torch_expects():
    q, k, v = (x.detach() for x in tensors(dtype=torch.float32))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    op, forward = BACKWARD.default, torch.ops.cutlass_fmha.forward.default
    torch.library.opcheck(op, (out, q, k, v, out, lse, lse, 0.3, "bottom-right"), {"window_left": 3})
    q, k, v, out = (x.bfloat16() for x in (q, k, v, out))
    one = {"wanted": [False, True, False, False, False]}
    torch.library.opcheck(op, (out, q, k, v, out, lse, None, 0.3, "none"), one)
    grads = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*grads, 0.3, "none", True, None), test_utils="test_schema")
