"""The way from tensors to the kernels beside attention: which there are, what they are told and refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensors import ints

from cutlass_fmha import _C
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch import helpers, plan
from cutlass_fmha.ops import append_kv, merge_states
from cutlass_fmha.ops import rotary as rotary_op

HAS_CUDA = bool(_C.build_info()["cuda"])
WITH_FLOAT32 = (
    "combine", "merge", "append", "rotary", "rope", "rope_backward", "rope_weights", "gated",
    "gated_backward", "backward_before", "rms_norm", "rms_norm_backward", "rms_norm_weights",
)  # fmt: skip
WITHOUT_FLOAT32 = ("merge_tail", "backward_after", "backward_lists")


# ---- the table ---------------------------------------------------------------------------------------------


def test_every_architecture_has_every_kernel():
    architectures = _C.build_info()["architectures"]
    assert isinstance(architectures, list)
    expected = {
        (f"{kind}_sm{arch}_{short}", kind, arch, dtype)
        for arch in architectures
        for kind in (*WITHOUT_FLOAT32, *WITH_FLOAT32)
        for short, dtype in (("f16", "float16"), ("bf16", "bfloat16"), ("f32", "float32"))
        if dtype != "float32" or kind not in WITHOUT_FLOAT32
    }
    found = _C.helpers()
    assert {(row.name, row.family, row.arch, row.dtype) for row in found} == expected
    assert len(found) == len(expected)
    blocks = {"rms_norm": 512, "rms_norm_backward": 512, "gated": 256, "gated_backward": 256}
    assert all(row.threads == blocks.get(row.family, 128) and row.name in repr(row) for row in found)
    assert {row.family for row in found if row.smem_bytes} == {"rms_norm_backward"}
    for row in found:
        with pytest.raises(AttributeError, match=f"{row.name} has no head_dim"):
            row.head_dim  # noqa: B018


def kernels(*architectures: int) -> list[Any]:
    return [SimpleNamespace(arch=arch) for arch in architectures]


@pytest.mark.parametrize(
    ("capability", "built", "forced", "expected"),
    [
        ((8, 9), (89, 90, 120), "", 89),
        ((9, 0), (89, 90, 120), "", 90),
        ((9, 0), (89, 90, 120), "89", 89),
        ((12, 1), (89, 90, 120), "", 120),
        ((10, 0), (89, 90, 120), "", 89),
        ((9, 0), (89,), "", 89),
    ],
)
def test_a_devices_kernels_are_its_rows(capability, built, forced, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_C, "helpers", lambda: kernels(*built))
    monkeypatch.setattr(tables, "this_build", lambda: tables.Table(()))
    monkeypatch.setattr(devices, "of_index", lambda index: Device("a GPU", capability, 100, 99 * 1024))
    monkeypatch.setenv(devices.FORCE_ARCH, forced)
    assert helpers._arch(0) == expected


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "this_build", lambda: tables.Table(()))
    monkeypatch.setattr(devices, "of_index", lambda index: Device("an A100", (8, 0), 108, 163 * 1024))
    monkeypatch.setattr(_C, "helpers", lambda: kernels(89, 120))
    with pytest.raises(UnsupportedError, match="for sm_89, sm_120, and none of them runs on an A100"):
        helpers._arch(0)
    monkeypatch.setattr(_C, "helpers", list)
    with pytest.raises(UnsupportedError, match="CUTLASS_FMHA_CUDA=OFF"):
        helpers._arch(0)


# ---- what the binding is told ------------------------------------------------------------------------------


class Told:
    """Stands in for ``_C.run``, and does nothing: (name of the row, parameters) of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, row: int, params: Any, device: int, stream: int) -> None:
        assert (device, stream) == (0, 0)
        (name,) = (x.name for x in _C.helpers() if x.index == row)
        self.calls.append((name, params.copy()))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    if not HAS_CUDA:
        pytest.skip("a build without CUDA has no rows")
    found = Told()
    monkeypatch.setattr(_C, "run", found)
    monkeypatch.setattr(helpers, "_arch", lambda index: min(row.arch for row in _C.helpers()))
    monkeypatch.setattr(helpers, "current_stream", lambda index: 0)
    plan.clear()
    return found


ARCH = min((row.arch for row in _C.helpers()), default=0)


def fields(params: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(params, name) for name in names)


def is_told(params: Any, **tensors: torch.Tensor | None) -> None:
    """Where each tensor begins, 0: nowhere, and its strides but for the last, as of a batch of one if it has
    no batch."""
    for name, x in tensors.items():
        assert getattr(params, name) == (0 if x is None else x.data_ptr()), name
        if x is not None and hasattr(params, f"{name}_stride"):
            own = x.stride() if name.startswith("lse") else x.stride()[:-1]
            assert getattr(params, f"{name}_stride") == (0,) * (3 - len(own)) + own, name


@pytest.mark.parametrize("batched", [True, False])
def test_merge_is_told_addresses_and_strides(batched: bool, told: Told):
    a, b = torch.zeros(2, 3, 5, 24)[..., :16].transpose(1, 2), torch.zeros(2, 5, 3, 16)
    lses = torch.zeros(2, 5, 3).mT, torch.zeros(2, 3, 5)
    out, lse = torch.zeros(2, 3, 5, 24)[..., :16].transpose(1, 2), torch.zeros(2, 3, 9)[..., :5]
    a, b, lse_a, lse_b, out, lse = (x if batched else x[0] for x in (a, b, *lses, out, lse))
    for to in (merge_states._cuda(a, lse_a, b, lse_b), (out, lse)):
        if to[0] is out:
            merge_states._cuda_out(a, lse_a, b, lse_b, out, lse)
        name, p = told.calls.pop()
        assert name == f"merge_sm{ARCH}_f32"
        is_told(p, o_a=a, o_b=b, lse_a=lse_a, lse_b=lse_b, o=to[0], lse=to[1])
        assert fields(p, "batch", "seqlen_q", "num_heads", "head_dim_v") == (1 + batched, 5, 3, 16)
    with pytest.raises(ValueError, match="lse must not share memory with lse_b"):
        merge_states._cuda_out(a, lse_a, b, lse_b, out, lse_b)


def test_append_is_told_addresses_and_strides(told: Told):
    k_cache, v_cache = torch.zeros(9, 32, 2, 16), torch.zeros(9, 2, 32, 8).transpose(1, 2)
    key, value = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 8)
    query, lengths, pads = torch.zeros(3, 1, 6, 16), ints(1, 2, 3), ints(0, 1, 0)
    page_table = torch.zeros(3, 7, dtype=torch.int32)[:, :5]
    cos, sin = torch.zeros(50, 4), torch.zeros(50, 8)[:, :4]
    rotated, used = append_kv._cuda(
        k_cache, v_cache, key, value, lengths, query=query, advance_query=False, rotary_cos=cos,
        rotary_sin=sin, page_table=page_table, leftpad_k=pads,
    )  # fmt: skip
    name, p = told.calls.pop()
    assert name == f"append_sm{ARCH}_f32"
    is_told(p, k_cache=k_cache, v_cache=v_cache, k=key, v=value, cache_seqlens=lengths, cache_batch_idx=None)
    assert p.seqused_k == used.data_ptr()
    assert fields(p, "page_table", "page_table_stride") == (page_table.data_ptr(), 7)
    sizes = ("batch", "seqlen_new", "num_heads_kv", "head_dim", "head_dim_v")
    assert fields(p, *sizes) == (3, 4, 2, 16, 8)
    assert fields(p, "entries", "capacity", "page_size") == (9, 160, 32)
    for table in (p.rotary, p.query.rotary):
        assert fields(table, "cos", "sin") == (cos.data_ptr(), sin.data_ptr())
        assert fields(table, "cos_stride", "sin_stride", "positions", "dim") == (4, 8, 50, 8)
        assert (table.interleaved, table.float32) == (False, True)
    is_told(p.query, x=query, out=rotated)
    for rows in (p, p.query):
        is_told(rows, first_position=lengths, before_position=pads)
    assert fields(p.query, "batch", "seqlen", "num_heads", "head_dim", "advance") == (3, 1, 6, 16, False)

    first = ints(7, 8, 9)
    rest = {"rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": first, "rotary_interleaved": True}
    append_kv._cuda(k_cache[:3], v_cache[:3], key, value, lengths, leftpad_k=pads, **rest)
    p = told.calls.pop()[1]
    is_told(p, cache_batch_idx=None, first_position=first, before_position=None)
    assert fields(p, "page_table", "page_table_stride", "page_size") == (0, 0, 0)
    assert fields(p, "entries", "capacity") == (3, 32)
    assert (p.rotary.interleaved, p.rotary.float32, p.query.x) == (True, True, 0)

    # Packed rows are one sequence of them.
    key, value, query = torch.zeros(7, 2, 16), torch.zeros(7, 2, 8), torch.zeros(6, 7, 16).transpose(0, 1)
    begins = ints(0, 1, 1, 7)
    rotated, used = append_kv._cuda(
        k_cache, v_cache, key, value, lengths, query=query, rotary_cos=cos, rotary_sin=sin,
        cache_batch_idx=ints(5, 0, 7), cu_seqlens_q=begins,
    )  # fmt: skip
    p = told.calls.pop()[1]
    assert rotated.shape == query.shape and rotated.is_contiguous() and used.shape == (3,)
    is_told(p, k=key, v=value)
    assert fields(p, *sizes) == (1, 7, 2, 16, 8)
    assert fields(p.query, "batch", "seqlen", "num_heads", "head_dim") == (1, 7, 6, 16)
    assert (p.query.x_stride, p.query.out_stride) == ((0, 16, 112), (672, 96, 16))
    for rows in (p, p.query):
        assert fields(rows, "cu_seqlens", "sequences") == (begins.data_ptr(), 3)

    _, used = append_kv._cuda(k_cache[:1], v_cache[:1], key[None, :0], value[None, :0], lengths[:1])
    assert used.tolist() == [1]  # nothing new still gives lengths


def test_rotary_is_told_addresses_and_strides(told: Told):
    x, first = torch.zeros(2, 6, 5, 16).transpose(1, 2), ints(3, 4)
    cos = torch.zeros(50, 4)
    rotary_op._cuda_out(x, cos, cos, first, there := torch.zeros(2, 5, 6, 32)[..., :16])
    for out in (rotary_op._cuda(x, cos, cos, first), there):
        name, p = told.calls.pop()
        assert name == f"rotary_sm{ARCH}_f32"
        is_told(p, x=x, out=out, first_position=first, before_position=None)
        assert fields(p, "batch", "seqlen", "num_heads", "head_dim", "advance") == (2, 5, 6, 16, True)
        assert fields(p.rotary, "cos_stride", "sin_stride", "positions", "dim") == (4, 4, 50, 8)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        rotary_op._cuda_out(x, cos, cos, first, x)


# ---- what the binding refuses ------------------------------------------------------------------------------


def row_of(family: str) -> int:
    return next((row.index for row in _C.helpers() if row.family == family), 0)


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (_C.MergeParams, "batch", -1, r"batch must be between 0 and 536870912, got -1"),
        (_C.MergeParams, "seqlen_q", 2**29 + 1, "seqlen_q must be between"),
        (_C.MergeParams, "head_dim_v", -8, "head_dim_v must be between"),
        (_C.MergeParams, "o_stride", (-1, 0, 0), "o_stride must be between"),
        (_C.AppendParams, "capacity", 2**30, "capacity must be between"),
        (_C.Rotary, "positions", -1, "positions must be between"),
        (_C.CombineParams, "splits", 65, "splits must be between 1 and 64, got 65"),
        (_C.CombineParams, "splits", 0, "splits must be between 1 and 64, got 0"),
        (_C.CombineParams, "head_dim_v", 257, "head_dim_v must be between 1 and 256, got 257"),
        (_C.RmsNormParams, "dim", 65537, "dim must be between 1 and 65536, got 65537"),
        (_C.RmsNormParams, "eps", float("inf"), "eps must be a finite float, got inf"),
        (_C.RmsNormParams, "out_type", "int8", "out_type is none of those that there are: int8"),
        (_C.GatedParams, "activation", "relu", "activation is none of those that there are: relu"),
    ],
)
def test_sizes_are_checked(make: Any, name: str, value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        setattr(make(), name, value)


def table(dim: int) -> _C.Rotary:
    made = _C.Rotary()
    made.cos = made.sin = 4096
    made.dim = dim
    return made


@pytest.mark.parametrize("dim", [7, 18])
def test_rotary_tables_are_checked(dim: int):
    for params, family in ((_C.RotaryParams(), "rotary"), (_C.AppendParams(), "append")):
        params.head_dim, params.rotary = 16, table(dim)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=f"rotary dim must be even and at most head_dim 16, got {dim}"):
            _C.run(row_of(family), params, 0, 0)  # type: ignore[arg-type]


def test_append_is_checked():
    for query, table, sentence in (
        (4096, 0, "a query is rotated: it needs a rotary"),
        (0, 4096, "page_table needs page_size"),
    ):
        p, rotated = _C.AppendParams(), _C.RotaryParams()
        rotated.x, rotated.batch, rotated.seqlen, rotated.num_heads = query, 1, 1, 1
        p.query, p.page_table = rotated, table
        with pytest.raises(ValueError, match=sentence):
            _C.run(row_of("append"), p, 0, 0)


def rows_of(params: Any, *addresses: str) -> Any:
    params.sizes, params.dim = (1, 2, 3), 8
    for name in addresses:
        setattr(params, name, 4096)
    return params


BACKWARD = rows_of(_C.RmsNormBackwardParams(), "x", "dout", "rstd", "dx", "dweight")


@pytest.mark.parametrize(
    ("family", "params", "message"),
    [
        ("rms_norm", rows_of(_C.RmsNormParams(), "x"), "x and out must be addresses"),
        ("rms_norm", rows_of(_C.RmsNormParams(), "x", "out", "sum"), "residual and sum go together"),
        ("rms_norm_backward", BACKWARD, "dweight needs parts, and partial for them"),
        ("gated", rows_of(_C.GatedParams(), "gate", "out"), "gate, up and out must be addresses"),
        (
            "gated_backward",
            rows_of(_C.GatedBackwardParams(), "gate", "up"),
            "dgate and dup must be address",
        ),
    ],
)
def test_rows_are_checked(family: str, params: Any, message: str):
    with pytest.raises(ValueError, match=message):
        _C.run(row_of(family), params, 0, 0)
    params.sizes = (2**20, 2**20, 1)
    with pytest.raises(ValueError, match="at most 2147483647 rows can be taken"):
        _C.run(row_of(family), params, 0, 0)


def test_a_launch_without_rows_needs_no_gpu_and_one_without_cuda_says_so():
    own = ("combine", "merge", "append", "rotary", "rms_norm", "rms_norm_backward", "gated", "gated_backward")
    for family in own:
        params = getattr(_C, f"{family.title().replace('_', '')}Params")()
        if HAS_CUDA:
            _C.run(row_of(family), params, 0, 0)
            with pytest.raises(ValueError, match=f"is of family merge_tail.* parameters of family {family}"):
                _C.run(row_of("merge_tail"), params, 0, 0)
        else:
            with pytest.raises(RuntimeError, match="CUTLASS_FMHA_CUDA=OFF"):
                _C.run(0, params, 0, 0)
