"""The way from CUDA tensors to one call of ``_C.run``.

Everything about a call that does not change from one call to the next (checks, the choice of the row, sizes,
strides) is prepared once and kept under the tensors' metadata, so that a repeated call costs one dictionary
lookup.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import _C, general_plan, select
from cutlass_fmha import device as devices
from cutlass_fmha.arguments import check
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features, Sizes
from cutlass_fmha.recent import MAX_PLANS, Recent
from cutlass_fmha.streams import current_stream as _current_stream

logger = logging.getLogger("cutlass_fmha")

Names = tuple[str, str, str]


@dataclass(frozen=True)
class Plan:
    """What ``_C.run`` and the allocation of the outputs need, for every call with the same metadata."""

    row: int
    params: _C.AttentionParams  # complete but for addresses and the scale, and never written to
    out_shape: tuple[int, int, int, int]
    like_q: bool  # the output's rows lie as q's do: making it like q takes half the time
    lse_shape: tuple[int, int, int]
    scale: float  # of a call that names none
    dtype: torch.dtype
    device: torch.device
    index: int
    empty: bool
    room: int  # floats that the parts of a tail leave


@dataclass(frozen=True)
class Handover:
    """In place of a plan where ``general_plan`` takes the call: its row, None if that is to be found."""

    template: str | None


_NO_FEATURES = Features()

_plans: Recent[Any, Plan | Handover] = Recent(MAX_PLANS)
_warned: set[tuple[str, ...]] = set()


def clear() -> None:
    """Forgets every plan: for tests, and for a process that changes CUTLASS_FMHA_FORCE_ARCH."""
    _plans.clear()
    _warned.clear()
    general_plan.clear()


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    template: str | None,
    layout: str = "bshd",
    names: Names = check.NAMES,
) -> tuple[Tensor, Tensor | None]:
    """Runs one forward call on the current stream of the tensors' device: output in q's layout, and the LSE.

    ``scale`` None is 1/sqrt(head_dim). Raises what ``check.check_tensors`` and ``select.select`` raise, under
    ``names``.
    """
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        (q_address | k_address | v_address) & 15,  # the bits that decide which rows are aligned
        causal,
        layout,
        template,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = prepare(q, k, v, causal, template, layout, names)
        _plans.put(key, plan)
    if type(plan) is Handover:
        return _hand_over(q, k, v, scale, causal, return_lse, plan.template, layout, names)
    assert type(plan) is Plan

    if plan.like_q:
        out = torch.empty_like(q)
    else:
        out = torch.empty(plan.out_shape, dtype=plan.dtype, device=plan.device)
        if layout != "bshd":
            out = out.transpose(1, 2)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=plan.device) if return_lse else None
    if not plan.empty:
        params = plan.params.of_call(
            q_address,
            k_address,
            v_address,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            plan.scale if scale is None else scale,
        )
        if plan.room:
            parts = torch.empty(plan.room, dtype=torch.float32, device=plan.device)
            general_plan.add_room(params, parts.data_ptr())
        _C.run(plan.row, params, plan.index, _current_stream(plan.index))
    return out, lse


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    template: str | None,
    layout: str = "bshd",
    names: Names = check.NAMES,
) -> Plan | Handover:
    """Checks the tensors, picks the row and packs the arguments. Reads metadata and addresses, no element."""
    check.check_types((q, k, v), names)
    if q.dim() == v.dim() == 4 and v.shape[3] != q.shape[3]:  # for a scored row, if for any
        return Handover(template)
    dims = check.check_tensors((q, k, v), layout, names)
    if (
        not select.this_build().templates
    ):  # before the device is asked about itself: there may be no driver either
        raise UnsupportedError(select.NO_KERNELS)
    operands = [check.operand(tensor, layout) for tensor in (q, k, v)]
    problem = select.Problem(
        *dims,
        dtype=check.dtype_name(q.dtype),
        causal=causal,
        alignment=min(operand.alignment for operand in operands),
    )
    index = q.get_device()
    device = devices.of_index(index)
    row = select.select(problem, device, template)
    if row.family not in select.PLAIN:
        return Handover(row.name)
    if row.copy == "element":
        _warn_of_element_copies(row.name, operands, names)

    batch, seqlen_q, _, num_heads, _, head_dim = dims
    sizes = Sizes(*dims, head_dim_v=head_dim, total_q=None, page_size=0)
    params = general_plan.params_of(sizes, _NO_FEATURES, causal, operands)
    room = general_plan.divide(params, row, problem, device)
    return Plan(
        row=row.index,
        params=params,
        out_shape=(batch, seqlen_q, num_heads, head_dim),
        like_q=(q if layout == "bshd" else q.transpose(1, 2)).is_contiguous(),
        lse_shape=(batch, num_heads, seqlen_q),
        scale=head_dim**-0.5,
        dtype=q.dtype,
        device=q.device,
        index=index,
        empty=batch == 0 or seqlen_q == 0 or num_heads == 0,
        room=room,
    )


def _hand_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    template: str | None,
    layout: str,
    names: Names,
) -> tuple[Tensor, Tensor | None]:
    """The call as one with features, none of which it has."""
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = general_plan.launch(q, k, v, scale, causal, return_lse, template, _NO_FEATURES, names)
    return (out if layout == "bshd" else out.transpose(1, 2)), lse


def _warn_of_element_copies(row: str, operands: list[check.Operand], names: Names) -> None:
    """One warning per distinct cause. A row that was forced with everything aligned is nobody's surprise."""
    causes = tuple(check.misaligned(operands, names))
    if not causes or causes in _warned:
        return
    _warned.add(causes)
    logger.warning(
        "%s %s not a multiple of 16 bytes: %s copies element by element, "
        "which is slower than the 16-byte rows",
        " and ".join(causes),
        "is" if len(causes) == 1 else "are",
        row,
    )
