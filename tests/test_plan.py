"""From tensors to ``_C.run``: what is packed, checked, remembered and warned of. The kernels are fakes."""

from __future__ import annotations

import logging

import oracle
import pytest
import torch
from fake_build import L4, make_build
from fake_general import FakeKernels
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_fmha
from cutlass_fmha.arguments import check
from cutlass_fmha.dispatch import device
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.problem import CAUSAL
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import forward


def tensors(batch=2, seqlen_q=33, seqlen_k=65, heads=4, heads_kv=2, head_dim=32, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, seqlen_q, heads, head_dim, generator=generator)
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, head_dim, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Sends launches of CPU tensors to kernels written in Python, on a GPU that does not exist."""
    build = make_build((89,))
    fake = FakeKernels(build)
    monkeypatch.setattr(tables, "this_build", lambda: build)
    monkeypatch.setattr(device, "of_index", lambda index: L4)
    monkeypatch.setattr(plan, "current_stream", lambda index: 4711)
    fake.install(monkeypatch)
    monkeypatch.delenv(device.FORCE_ARCH, raising=False)
    plan.clear()
    yield fake
    plan.clear()


def launch(q, k, v, scale=None, causal="none", return_lse=True, template=None, layout="bshd"):
    return plan.launch(q, k, v, scale, causal, return_lse, template, layout)


def strided(x: torch.Tensor, memory: str) -> torch.Tensor:
    """The same numbers in another place: heads before the sequence, padded rows, off the 16-byte grid."""
    if memory == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "padded":
        return torch.nn.functional.pad(x, (0, 8))[..., :-8]
    if memory == "odd stride":
        return torch.nn.functional.pad(x, (0, 3))[..., :-3]
    if memory == "odd address":
        return torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape)
    return x.contiguous()


MEMORY = ["plain", "bhsd", "padded", "odd stride", "odd address"]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_packed_is_what_the_tensors_hold(kernels, dtype, layout: str, memory: str, causal: str):
    q, k, v = (strided(x, memory) for x in tensors(dtype=dtype))
    views = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bhsd" else [q, k, v]
    out, lse = launch(*views, causal=causal, layout=layout)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    assert out.is_contiguous() and lse.is_contiguous()
    oracle.assert_close(out, q, k, v, causal=causal, lse=lse)
    (run,) = kernels.launches
    assert (kernels.build.rows[run.row].copy == "element") == ("odd" in memory)
    assert (run.device, run.stream) == (0, 4711)  # the tensors' device and its current stream


@settings(max_examples=60)
@given(data=st.data())
def test_drawn_problems_are_packed_right(data):
    with pytest.MonkeyPatch.context() as monkeypatch:
        build = make_build((89,))
        monkeypatch.setattr(tables, "this_build", lambda: build)
        monkeypatch.setattr(device, "of_index", lambda index: L4)
        monkeypatch.setattr(plan, "current_stream", lambda index: 0)
        FakeKernels(build).install(monkeypatch)
        monkeypatch.delenv(device.FORCE_ARCH, raising=False)
        plan.clear()
        heads_kv = data.draw(st.integers(1, 3))
        q, k, v = tensors(
            batch=data.draw(st.integers(0, 3)),
            seqlen_q=data.draw(st.integers(0, 20)),
            seqlen_k=data.draw(st.integers(0, 20)),
            heads=heads_kv * data.draw(st.integers(1, 3)),
            heads_kv=heads_kv,
            head_dim=data.draw(st.sampled_from([32, 64, 128])),
        )
        q, k, v = (strided(x, data.draw(st.sampled_from(MEMORY))) for x in (q, k, v))
        causal = data.draw(st.sampled_from(CAUSAL))
        scale = data.draw(st.none() | st.floats(-1, 1))
        out, lse = launch(q, k, v, scale, causal)
        oracle.assert_close(out, q, k, v, scale, causal, lse)
        plan.clear()


def test_sizes_strides_and_pointers_of_a_launch(kernels):
    q, k, v = tensors(2, 33, 65, 4, 2, 32)
    k = strided(k, "bhsd")
    out, lse = launch(q, k, v, 0.25, "bottom-right")
    row, p, *_ = kernels.launches[0]
    assert (p.q, p.k, p.v, p.o, p.lse) == tuple(x.data_ptr() for x in (q, k, v, out, lse))
    assert (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_heads_kv) == (2, 33, 65, 4, 2)
    assert (p.head_dim, p.head_dim_v) == (32, 32)
    assert (p.q_stride, p.k_stride) == (q.stride()[:3], (65 * 64, 32, 65 * 32))
    assert (p.v_stride, p.o_stride) == (v.stride()[:3], out.stride()[:3])
    assert (p.lse_batch_stride, p.lse_head_stride, p.lse_rows) == (4 * 33, 33, 2 * 4 * 33)
    assert (p.scale, p.window_right, p.bottom_right) == (0.25, 0, True)
    assert kernels.build.rows[row].dtype == "float16"


def test_strides_of_single_elements_disqualify_nothing(kernels):
    q, k, v = tensors(1, 1, 1, 1, 1, 32)
    q, k, v = (torch.as_strided(x, x.shape, (7, 13, 1, 1)) for x in (q, k, v))
    launch(q, k, v)
    run = kernels.launches[0]
    assert kernels.build.rows[run.row].alignment == 16
    assert run.params.q_stride == run.params.k_stride == run.params.v_stride == (0, 0, 0)


def test_no_lse_is_allocated_unless_wanted(kernels):
    _, lse = launch(*tensors(), return_lse=False)
    assert lse is None and kernels.launches[0].params.lse == 0


def test_the_default_scale(kernels):
    for head_dim in (32, 64, 128):
        launch(*tensors(head_dim=head_dim))
        assert kernels.launches[-1].params.scale == pytest.approx(head_dim**-0.5, rel=1e-7)


@pytest.mark.parametrize("shape", [(0, 5, 7, 2, 2), (2, 0, 7, 2, 2), (2, 5, 7, 0, 0)])
def test_empty_problems_launch_nothing(kernels, shape: tuple[int, ...]):
    q, k, v = tensors(*shape, 32)
    out, lse = launch(q, k, v)
    assert out.shape == q.shape and lse.shape == (shape[0], shape[3], shape[1])
    assert kernels.launches == []


def test_no_keys_are_the_kernels_business(kernels):
    out, lse = launch(*tensors(seqlen_k=0))
    assert len(kernels.launches) == 1
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_checks_come_before_the_launch(kernels):
    q, k, v = tensors()
    with pytest.raises(ValueError, match="value must have key's seqlen 65, got 64"):
        launch(q, k, v[:, :64])
    with pytest.raises(cutlass_fmha.UnsupportedError, match="no template of this build can run this problem"):
        launch(*tensors(head_dim=480))
    with pytest.raises(ValueError, match="template 'x' is not a row of this build"):
        launch(q, k, v, template="x")
    assert kernels.launches == []


def test_a_template_can_be_forced(kernels):
    for row in kernels.build.rows:
        if row.dtype == "float16" and row.head_dim == 32:
            launch(*tensors(), template=row.name)
            assert kernels.launches[-1].row == row.index


def test_a_plan_is_made_once(kernels, monkeypatch):
    made = []
    original = plan.prepare
    monkeypatch.setattr(plan, "prepare", lambda *arguments: made.append(arguments) or original(*arguments))
    q, k, v = tensors()
    for scale in (0.1, 0.2):
        for return_lse in (False, True):
            launch(q, k, v, scale, return_lse=return_lse)
    launch(q.clone(), k, v)
    assert len(made) == 1 and len(kernels.launches) == 5
    assert [run.params.scale for run in kernels.launches[:4]] == pytest.approx([0.1, 0.1, 0.2, 0.2])
    for other in (
        lambda: launch(q, k, v, causal="top-left"),
        lambda: launch(q, k, v, template=kernels.build.rows[0].name),
        lambda: launch(q[:, :5], k, v),
        lambda: launch(strided(q, "bhsd"), k, v),
        lambda: launch(q, strided(k, "bhsd"), v),
        lambda: launch(q, k, strided(v, "bhsd")),
        lambda: launch(q, strided(k, "odd address"), v),
        lambda: launch(*tensors(dtype=torch.bfloat16)),
    ):
        count = len(made)
        other()
        assert len(made) == count + 1


def test_slow_copies_are_told_once_per_cause(kernels, caplog):
    caplog.set_level(logging.WARNING, logger="cutlass_fmha")
    q, k, v = tensors()
    for seqlen in (33, 20):
        launch(q[:, :seqlen], strided(k, "odd stride"), v)
    (record,) = caplog.records
    assert record.getMessage() == (
        "key's batch stride and key's seqlen stride and key's head stride are not a multiple of 16 bytes: "
        "fwd_sm89_f16_d32_m64n64w4_element copies element by element, which is slower"
    )
    caplog.clear()
    launch(q, k, strided(v, "odd address"))
    assert [record.getMessage()[:39] for record in caplog.records] == [
        "value's address is not a multiple of 16"
    ]
    caplog.clear()
    launch(q, k, v, template="fwd_sm89_f16_d32_m64n64w4_element")  # asked for, so no surprise
    assert caplog.records == []


@pytest.mark.parametrize(("value", "expected"), [(0, 16), (2, 2), (6, 2), (8, 8), (24, 8), (48, 16), (1, 1)])
def test_alignment_is_the_largest_power_of_two(value: int, expected: int):
    assert check.alignment(value) == expected


def test_the_cuda_implementation_is_the_launch(kernels):
    q, k, v = tensors()
    out, lse = forward._cuda(q, k, v, 0.3, "bottom-right", True, None)
    oracle.assert_close(out, q, k, v, 0.3, "bottom-right", lse)
    assert forward._cuda(q, k, v, 0.3, "none", False, None)[1].shape == (0,)
    with pytest.raises(ValueError, match="scale must be finite"):
        forward._cuda(q, k, v, float("inf"), "none", True, None)
