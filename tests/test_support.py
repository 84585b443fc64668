"""The way from tensors to the kernels beside attention: which there are, what they are told and refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutlass_fmha import _C, cache, select, states, support
from cutlass_fmha import device as devices
from cutlass_fmha.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.rotary import _cuda as rotary_on_cuda

HAS_CUDA = bool(_C.build_info()["cuda"])
TARGET = ("float32", 89, 0, 0)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- the table ---------------------------------------------------------------------------------------------


def test_every_architecture_has_every_kernel():
    architectures = _C.build_info()["architectures"]
    assert isinstance(architectures, list)
    expected = {
        (f"{kind}_sm{arch}_{short}", kind, arch, dtype)
        for arch in architectures
        for kind in ("combine", "merge_tail", "merge", "append", "rotary")
        for short, dtype in (("f16", "float16"), ("bf16", "bfloat16"), ("f32", "float32"))
        if (kind, dtype) not in (("combine", "float32"), ("merge_tail", "float32"))
    }
    found = _C.support_kernels()
    assert {(kernel.name, kernel.kind, kernel.arch, kernel.dtype) for kernel in found} == expected
    assert len(found) == len(expected)
    assert all(kernel.threads == 128 and kernel.name in repr(kernel) for kernel in found)


def kernels(*architectures: int) -> list[Any]:
    return [SimpleNamespace(arch=arch) for arch in architectures]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Forgets which architecture's kernels a device takes, before and after."""
    monkeypatch.delenv(devices.FORCE_ARCH, raising=False)
    support._arch.cache_clear()
    yield
    support._arch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "built", "forced", "expected"),
    [
        ((8, 9), (89, 90, 120), None, 89),
        ((9, 0), (89, 90, 120), None, 90),
        ((9, 0), (89, 90, 120), "89", 89),
        ((12, 1), (89, 90, 120), None, 120),
        ((10, 0), (89, 90, 120), None, 89),
        ((9, 0), (89,), None, 89),
    ],
)
def test_a_device_takes_the_kernels_of_its_rows(
    capability, built, forced, expected, fresh, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_C, "support_kernels", lambda: kernels(*built))
    monkeypatch.setattr(select, "this_build", lambda: select.Build(()))
    monkeypatch.setattr(devices, "of_index", lambda index: Device("a GPU", capability, 100, 99 * 1024))
    if forced is not None:
        monkeypatch.setenv(devices.FORCE_ARCH, forced)
    assert support._arch(0, forced) == expected


def test_a_device_without_kernels_is_refused(fresh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(select, "this_build", lambda: select.Build(()))
    monkeypatch.setattr(devices, "of_index", lambda index: Device("an A100", (8, 0), 108, 163 * 1024))
    monkeypatch.setattr(_C, "support_kernels", lambda: kernels(89, 120))
    with pytest.raises(
        UnsupportedError, match="has kernels for sm_89, sm_120, and none of them runs on an A100"
    ):
        support._arch(0, None)
    monkeypatch.setattr(_C, "support_kernels", list)
    with pytest.raises(UnsupportedError, match="CUTLASS_FMHA_CUDA=OFF"):
        support._arch(0, None)


# ---- what the binding is told ------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each call of the binding, which does nothing."""
    calls: list[tuple[Any, ...]] = []
    for name in ("merge_states", "append_kv", "rotary"):
        monkeypatch.setattr(_C, name, lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(support, "target", lambda tensor: TARGET)
    return calls


def test_merge_is_told_addresses_and_strides(told: list[tuple[Any, ...]]):
    o_a = torch.zeros(2, 3, 5, 24)[..., :16].transpose(1, 2)  # [2, 5, 3, 16]
    o_b, lse_a, lse_b = torch.zeros(2, 5, 3, 16), torch.zeros(2, 5, 3).mT, torch.zeros(2, 3, 5)
    output, lse = states._cuda(o_a, lse_a, o_b, lse_b)
    ((pointers, sizes, strides, target),) = told
    assert pointers == tuple(x.data_ptr() for x in (o_a, o_b, output, lse_a, lse_b, lse))
    assert (sizes, target) == ((2, 5, 3, 16), TARGET)
    outputs = (360, 24, 120), (240, 48, 16), (240, 48, 16)
    assert strides == (*(x for three in outputs for x in three), 15, 1, 3, 15, 5, 1, 15, 5, 1)

    states._cuda(o_a[0], lse_a[0], o_b[0], lse_b[0])
    assert told[1][1] == (1, 5, 3, 16)
    assert told[1][2] == (0, 24, 120, 0, 48, 16, 0, 48, 16, 0, 1, 3, 0, 5, 1, 0, 5, 1)


def test_append_is_told_addresses_and_strides(told: list[tuple[Any, ...]]):
    k_cache, v_cache = torch.zeros(9, 32, 2, 16), torch.zeros(9, 2, 32, 8).transpose(1, 2)
    key, value = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 8)
    query, lengths, pads = torch.zeros(3, 1, 6, 16), int32(1, 2, 3), int32(0, 1, 0)
    page_table = torch.zeros(3, 7, dtype=torch.int32)[:, :5]
    cos, sin = torch.zeros(50, 4), torch.zeros(50, 8)[:, :4]
    rotated, used = cache._cuda(
        k_cache, v_cache, key, value, lengths, query=query, advance_query=False, rotary_cos=cos,
        rotary_sin=sin, page_table=page_table, leftpad_k=pads,
    )  # fmt: skip
    ((pointers, sizes, strides, table, rows, target),) = told
    given = k_cache, v_cache, key, value, lengths, None, page_table, used, lengths, pads
    assert pointers == tuple(0 if x is None else x.data_ptr() for x in given)
    assert (sizes, target) == ((3, 4, 2, 16, 8, 9, 160, 32), TARGET)
    assert strides == (1024, 32, 16, 512, 8, 256, 128, 32, 16, 64, 16, 8, 7)
    assert table == ((cos.data_ptr(), sin.data_ptr()), (4, 8, 50, 8), (False, True))
    assert rows == (
        (query.data_ptr(), rotated.data_ptr(), lengths.data_ptr(), pads.data_ptr()),
        (3, 1, 6, 16),
        (96, 96, 16, 96, 96, 16),
        False,
    )

    first = int32(7, 8, 9)
    rest = {"rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": first, "rotary_interleaved": True}
    cache._cuda(k_cache[:3], v_cache[:3], key, value, lengths, leftpad_k=pads, **rest)
    pointers, sizes, strides, table, rows, _ = told[1]
    assert pointers[5:7] == (0, 0) and pointers[8:] == (first.data_ptr(), 0)
    assert sizes[5:] == (3, 32, 0) and strides[-1] == 0 and table[2] == (True, True) and rows is None


def test_nothing_to_append_still_gives_lengths(told: list[tuple[Any, ...]]):
    empty = torch.zeros(3, 0, 2, 16)
    caches = torch.zeros(3, 32, 2, 16), torch.zeros(3, 32, 2, 16)
    _, used = cache._cuda(*caches, empty, empty, int32(1, 2, 3))
    assert used.tolist() == [1, 2, 3]


def test_rotary_is_told_addresses_and_strides(told: list[tuple[Any, ...]]):
    x, first = torch.zeros(2, 6, 5, 16).transpose(1, 2), int32(3, 4)
    cos = torch.zeros(50, 4)
    out = rotary_on_cuda(x, cos, cos, first)
    ((pointers, sizes, strides, advance, table, target),) = told
    assert pointers == (x.data_ptr(), out.data_ptr(), first.data_ptr(), 0)
    assert (sizes, strides, advance) == ((2, 5, 6, 16), (480, 16, 80, 480, 96, 16), True)
    assert table[1] == (4, 4, 50, 8) and target == TARGET


# ---- what the binding refuses ------------------------------------------------------------------------------

TABLE = ((0, 0), (4, 4, 50, 8), (False, True))
NOTHING = (0,) * 18


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 1, 1, 8), r"batch must be between 0 and 536870912, got -1"),
        ((1, 2**29 + 1, 1, 8), "seqlen_q must be between"),
        ((1, 1, 2**30, 8), "num_heads must be between"),
        ((1, 1, 1, -8), "head_dim_v must be between"),
    ],
)
def test_sizes_are_checked(sizes: tuple[int, int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        _C.merge_states(NOTHING[:6], sizes, NOTHING, TARGET)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((TABLE[0], (4, 4, 50, 7), TABLE[2]), "rotary dim must be even and at most head_dim 16, got 7"),
        ((TABLE[0], (4, 4, 50, 18), TABLE[2]), "rotary dim must be even and at most head_dim 16, got 18"),
        ((TABLE[0], (4, 4, -1, 8), TABLE[2]), "positions of cos and sin must be between"),
    ],
)
def test_rotary_tables_are_checked(table: Any, message: str):
    with pytest.raises(ValueError, match=message):
        _C.rotary((0, 0, 0, 0), (0, 1, 1, 16), NOTHING[:6], True, table, TARGET)


def test_append_is_checked():
    pointers, sizes, strides = (0,) * 10, (0, 1, 1, 16, 16, 1, 1, 0), (0,) * 13
    query = ((0, 0, 0, 0), (0, 1, 1, 16), NOTHING[:6], True)
    with pytest.raises(ValueError, match="a query is rotated where keys are: rotary is None"):
        _C.append_kv(pointers, sizes, strides, None, query, TARGET)
    with pytest.raises(ValueError, match="page_size must be between 1 and"):
        _C.append_kv((*pointers[:6], 4, 0, 0, 0), sizes, strides, None, None, TARGET)
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16 or float32, got float64"):
        _C.append_kv(pointers, sizes, strides, None, None, ("float64", 89, 0, 0))


def test_a_launch_without_rows_needs_no_gpu_and_one_without_cuda_says_so():
    calls = (
        lambda: _C.combine((0, 0, 0, 0, 0), (0, 1, 1, 8, 2), NOTHING[:6], TARGET),
        lambda: _C.merge_states(NOTHING[:6], (2, 0, 1, 8), NOTHING, TARGET),
        lambda: _C.append_kv((0,) * 10, (2, 0, 1, 8, 8, 1, 1, 0), (0,) * 13, None, None, TARGET),
        lambda: _C.rotary((0, 0, 0, 0), (2, 1, 0, 16), NOTHING[:6], True, TABLE, TARGET),
    )
    for call in calls:
        if HAS_CUDA:
            assert call() is None
        else:
            with pytest.raises(RuntimeError, match="CUTLASS_FMHA_CUDA=OFF"):
                call()
