"""The way from tensors to the kernels beside attention: which there are, what they are told and refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutlass_fmha import _C
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch import helpers

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


def test_a_devices_kernels_are_its_rows_or_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "this_build", lambda: tables.Table(()))
    monkeypatch.setattr(_C, "helpers", lambda: kernels(89, 90, 120))
    for gpu, forced in (("l4", ""), ("h200", "89")):
        monkeypatch.setattr(devices, "of_index", lambda index, gpu=gpu: devices.PRESETS[gpu])
        monkeypatch.setenv(devices.FORCE_ARCH, forced)
        assert helpers._arch(0) == 89
    monkeypatch.setattr(devices, "of_index", lambda index: Device("an A100", (8, 0), 108, 163 * 1024))
    monkeypatch.setattr(_C, "helpers", lambda: kernels(89, 120))
    for forced in ("", "120"):  # also where it is told to take code that it can't execute
        monkeypatch.setenv(devices.FORCE_ARCH, forced)
        with pytest.raises(UnsupportedError, match="for sm_89, sm_120, and none of them runs on an A100"):
            helpers._arch(0)
    monkeypatch.setattr(_C, "helpers", list)
    with pytest.raises(UnsupportedError, match="CUTLASS_FMHA_CUDA=OFF"):
        helpers._arch(0)


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
        ("gated_backward", rows_of(_C.GatedBackwardParams(), "gate", "up"), "dgate and dup must be address"),
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
        if _C.build_info()["cuda"]:
            _C.run(row_of(family), params, 0, 0)
            with pytest.raises(ValueError, match=f"is of family merge_tail.* parameters of family {family}"):
                _C.run(row_of("merge_tail"), params, 0, 0)
        else:
            with pytest.raises(RuntimeError, match="CUTLASS_FMHA_CUDA=OFF"):
                _C.run(0, params, 0, 0)
