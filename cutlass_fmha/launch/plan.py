"""The way from tensors to a launch.

Everything about a call that does not change from one call to the next (checks, the choice of the row, sizes,
strides) is prepared once and kept under the tensors' metadata, so that a repeated call costs one dictionary
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutlass_fmha import _C, log, private_torch
from cutlass_fmha.arguments import check, results
from cutlass_fmha.dispatch import decisions
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.choose import choose
from cutlass_fmha.dispatch.describe import Names, Operands, describe, with_output
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.eligibility import family
from cutlass_fmha.dispatch.families.family import Launch
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT
from cutlass_fmha.dispatch.table import Row
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import NO_FEATURES, Features, Sizes
from cutlass_fmha.launch.params import addresses_of
from cutlass_fmha.launch.recent import MAX_PLANS, Recent
from cutlass_fmha.launch.streams import current_stream
from cutlass_fmha.launch.workspace import IN_USE, Scratch

T = TypeVar("T")

NOTHING: Mapping[str, Any] = {}


class Given(NamedTuple):
    """Of a call that is given its results: names, and bytes that are spanned, of all tensors of a launch."""

    written: tuple[tuple[str, int], ...]
    operands: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]

    def check(self, tensors: Operands, said: Mapping[str, Any]) -> None:
        """Raises ValueError where a result shares memory with another tensor."""
        written = [(name, said[name], size) for name, size in self.written]
        read = [(name, x, size) for (name, size), x in zip(self.operands, tensors, strict=True)]
        results.check_apart(written, read + [(name, said[name], size) for name, size in self.others])
        results.count_writes(x for _, x, _ in written)


class Plan(NamedTuple):
    """What a launch and the allocation of its outputs need, for every call with the same metadata."""

    row: int
    params: _C.AttentionParams  # complete but for addresses and the scale, and never written to
    launch: Launch | None  # where the row's family launches it, or it is given its results
    #: Of the output, in the call's layout: the rows of a query's heads are neighbours in memory.
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    scale: float  # of a call that names none
    dtype: torch.dtype
    device: torch.device
    device_index: int
    cuda_index: int  # the same, 0 for the CPU, whose tensors a simulator takes
    given: Given | None
    room: int  # floats that the parts of split keys or of a tail leave, or words of a packed mask
    #: (name in Features, field) of the tensors that are read.
    addresses: tuple[tuple[str, str], ...]


#: Of every op: what is prepared for calls of the same metadata.
_plans: Recent[Any, Any] = Recent(MAX_PLANS)


def clear() -> None:
    """Forgets every plan: for tests, and for a process that changes CUTLASS_FMHA_FORCE_ARCH."""
    _plans.clear()
    log.forget()


#: How a call's layout lies in the tensors. torch's SDPA has rules of its own about shapes; a plan that is
#: kept under its name has seen them obeyed. "packed" is "bhsd" whose ``packed_rows`` are views.
LAYOUTS = {"bshd": "bshd", "bhsd": "bhsd", "sdpa": "bhsd", "sdpa, gqa": "bhsd", "packed": "packed"}


def packed_rows(x: Tensor) -> Tensor:
    """Of [batch, num_heads, seqlen, head_dim] all tokens, [batch * seqlen, num_heads, head_dim]."""
    return x.transpose(1, 2).flatten(0, 1)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    row: str | None,
    layout: str = "bshd",
    names: Names = check.NAMES,
    said: Mapping[str, Any] = NOTHING,
    known_only: bool = False,
    plan: Plan | None = None,
) -> Any:
    """Runs one call on the current stream of the tensors' device: output in the layout, and the LSE.

    ``scale`` None is 1/sqrt(head_dim). ``said``: what ``Features`` are made of. ``known_only``: return None
    without a plan, with nothing done. ``plan``: that of ``prepare``, where it is kept with something else's.
    Raises what ``describe`` and ``choose`` raise, under ``names``.

    Returns:
        Output and LSE, None where it is not wanted; None in place of both with ``known_only``.
    """
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if plan is None:
        key: Any = (
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
            row,
        )
        if said:
            key = (key, *said, *map(metadata, said.values()))
            for name in _ADDRESSED:
                if name in said:
                    key = (key, name, said[name].data_ptr() & 15)
        plan = _plans.get(key) or _plans.revive(key)
        if plan is None:
            if known_only:
                return None
            plan = prepare((q, k, v), causal, row, LAYOUTS[layout], names, said)
            _put(key, plan)
    scale = plan.scale if scale is None else scale
    if plan.launch is not None:
        return plan.launch((q, k, v), scale, return_lse, said)

    lse = None
    if plan.given is not None:
        out, lse = _results(plan, (q, k, v), return_lse, said)
    elif 0 <= plan.device_index == private_torch.current_device():  # which needs a driver
        empty = private_torch.empty_strided_cuda
        out = empty(plan.out_shape, plan.out_strides, plan.dtype)
        if return_lse:
            lse = empty(plan.lse_shape, plan.lse_strides, torch.float32)
    else:
        out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=plan.dtype, device=plan.device)
        if return_lse:
            lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=plan.device)
    lse_address = 0 if lse is None else lse.data_ptr()
    start(plan, (q_address, k_address, v_address, out.data_ptr(), lse_address), scale, said)
    return out, lse


def start(plan: Plan, addresses: tuple[int, int, int, int, int], scale: float, said: Mapping[str, Any]) -> None:
    """The kernel of a plan without a launch of its own: on q, k and v, into an output and an LSE (0: none)."""
    room, scratch = 0, None
    if plan.room:
        if not IN_USE and 0 <= plan.device_index == private_torch.current_device():
            parts = private_torch.empty_strided_cuda((plan.room,), (1,), torch.float32)
            room = parts.data_ptr()  # what a Scratch would find, sooner
        else:
            scratch = Scratch(plan.device).begin()
    params = plan.params
    if plan.addresses:
        params = params.copy()  # threads that share a plan must not meet in its parameters
        for name, field in plan.addresses:
            setattr(params, field, said[name].data_ptr())
    try:
        if scratch is not None:
            room = scratch.floats(plan.room)
        _C.launch(plan.row, params, plan.cuda_index, current_stream(plan.device_index), *addresses, scale, room)
    finally:
        if scratch is not None:
            scratch.end()


_before: Any = ()


def _put(key: Any, plan: Plan) -> None:
    """Keeps a plan. Of 14 tuples in the key of a packed call, most are equal to those of the key before: with
    these in common, half as often a new length has to wait for a garbage collection."""
    global _before
    _before = key = _sharing(key, _before)
    _plans.put(key, plan)


def _sharing(key: Any, before: Any) -> Any:
    """An equal key that has in common what it can with the one before."""
    if type(before) is not tuple or len(key) != len(before):
        return key
    pairs = zip(key, before, strict=True)
    return tuple([b if a is b or a == b else _sharing(a, b) if type(a) is tuple else a for a, b in pairs])


#: Tensors, beside the operands, whose addresses decide which rows can read or write them.
_ADDRESSED = ("mask", "bias", "out")


def metadata(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return value


def new_like(x: Tensor) -> Tensor:
    """Contiguous, of the shape, dtype and device of a tensor that has memory."""
    if 0 <= x.get_device() == private_torch.current_device():
        strides = x.stride() if x.is_contiguous() else _contiguous(x.shape)
        found: Tensor = private_torch.empty_strided_cuda(tuple(x.shape), strides, x.dtype)
        return found
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def kept(op: str, arguments: Sequence[Any], prepare: Callable[[], T]) -> T:
    """What an op prepares for calls whose arguments have this metadata, made once."""
    return kept_by((op, *map(metadata, arguments)), prepare)


def kept_by(key: Any, prepare: Callable[[], T]) -> T:
    """The same where the key is ``metadata`` that a caller chose."""
    found: T | None = _plans.get(key)
    if found is None:  # an empty string is kept, too
        found = _plans.revive(key)
        if found is None:
            found = prepare()
            _plans.put(key, found)
    return found


def _relaid(
    launch: Launch, packed: bool, tensors: Operands, scale: float, return_lse: bool, said: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """A family's own launch, which knows "bshd", of tensors that are "bhsd" or "packed"."""
    q, k, v = (packed_rows(x) if packed else x.transpose(1, 2) for x in tensors)
    if "out" in said:
        said = {**said, "out": said["out"].transpose(1, 2)}
    out, lse = launch((q, k, v), scale, return_lse, said)
    return out.view(len(tensors[0]), -1, *out.shape[1:]) if packed else out.transpose(1, 2), lse


def _checked(
    given: Given, launch: Launch, tensors: Operands, scale: float, return_lse: bool, said: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """A family's own launch of a call that is given its results."""
    given.check(tensors, said)
    out, lse = launch(tensors, scale, return_lse, said)
    return said.get("out", out), lse


def _nothing(
    plan: Plan, tensors: Operands, scale: float, return_lse: bool, said: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """A call without a query."""
    return _results(plan, tensors, return_lse, said)


def _results(plan: Plan, tensors: Operands, return_lse: bool, said: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Output and LSE to write to: what the call is given of them, and new ones."""
    if plan.given is not None:
        plan.given.check(tensors, said)
    out, lse = said.get("out"), said.get("lse")
    if out is None:
        out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=plan.dtype, device=plan.device)
    if lse is None and return_lse:
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=plan.device)
    return out, lse


# ---- a plan ------------------------------------------------------------------------------------------------


def prepare(
    tensors: Operands,
    causal: str,
    row: str | None,
    layout: str = "bshd",
    names: Names = check.NAMES,
    said: Mapping[str, Any] = NOTHING,
    device: Device | None = None,
) -> Plan:
    """Checks the arguments, picks the row, packs what is known. Reads metadata and addresses, no element.

    ``device``: that which meta tensors stand for; None: that of the tensors.
    """
    to = {name: said[name] for name in results.RESULTS if name in said}
    if to:
        said = {name: x for name, x in said.items() if name not in to}
    features = Features(**said) if said else NO_FEATURES
    given_shape, packed = tensors[0].shape, layout == "packed"
    if packed:
        tensors, layout = (packed_rows(tensors[0]), packed_rows(tensors[1]), packed_rows(tensors[2])), "bshd"
    call = describe(tensors, causal, features, names, layout)
    if to:
        results.check_results(to, call.sizes, layout, (names[0], tensors[0]))
    if "out" in to:
        call = with_output(call, to["out"], layout)
    table = tables.this_build()
    if not table.rows:  # before the device is asked about itself: there may be no driver either
        raise UnsupportedError(tables.NO_KERNELS)
    index = tensors[0].get_device()
    if device is None:
        device = devices.of_index(index) if index >= 0 else devices.simulated(table.architectures)
    chosen = choose(call.problem, device, row)
    decisions.decision(call.problem, device, chosen, row is not None)
    prepared, sizes = family(chosen).prepare(chosen, call, device), call.sizes
    if prepared.launch is None and (call.problem.alignment < FULL_ALIGNMENT or _is_odd(chosen, sizes)):
        _warn_of_element_copies(chosen, tensors, sizes, names, layout, to.get("out"))
    out_shape, lse_shape = sizes.out_shape, sizes.lse_shape
    out_strides = _contiguous(out_shape)
    if layout == "bhsd":
        (batch, seqlen, heads, dim), (by_batch, by_seqlen, by_head, _) = out_shape, out_strides
        out_shape, out_strides = (batch, heads, seqlen, dim), (by_batch, by_head, by_seqlen, 1)
    elif packed:
        out_shape = (given_shape[0], given_shape[2], *out_shape[1:])
        out_strides = _contiguous(out_shape)
    addresses = addresses_of(features)
    launch, given = prepared.launch, None
    if to:
        read = {name: said[name] for name, _ in addresses}
        groups = (to, dict(zip(names, tensors, strict=True)), read)
        given = Given(*(tuple((name, results.extent(x)) for name, x in group.items()) for group in groups))
    if launch is not None:
        if packed or layout == "bhsd":
            launch = partial(_relaid, launch, packed)
        launch = launch if given is None else partial(_checked, given, launch)
    plan = Plan(
        chosen.index,
        prepared.params,
        launch,
        out_shape,
        out_strides,
        lse_shape,
        _contiguous(lse_shape),
        sizes.head_dim**-0.5,
        tensors[0].dtype,
        tensors[0].device,
        index,
        max(index, 0),
        given,
        prepared.room,
        addresses,
    )
    if 0 in (sizes.batch, sizes.seqlen_q, sizes.num_heads, sizes.total_q):
        plan = plan._replace(launch=partial(_nothing, plan))
    return plan


def _is_odd(row: Row, sizes: Sizes) -> bool:
    """Whether head dims end within 16 bytes."""
    dims = sizes.head_dim | sizes.head_dim_v
    return row.takes_features and dims * row.element_bytes % FULL_ALIGNMENT != 0


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(1, size))
    return tuple(strides[::-1])


def _warn_of_element_copies(
    row: Row, tensors: Operands, sizes: Sizes, names: Names, layout: str, out: Tensor | None
) -> None:
    """One warning per distinct cause. A row that was forced with everything aligned is nobody's surprise."""
    named = dict(zip(names, tensors, strict=True)) | ({} if out is None else {"out": out})
    operands = [check.operand(x if x.dim() == 4 else x.unsqueeze(0), layout) for x in named.values()]
    causes = check.misaligned(operands, tuple(named))
    for name, size in (("head_dim", sizes.head_dim), ("head_dim_v", sizes.head_dim_v)):
        if size * row.element_bytes % FULL_ALIGNMENT and (name == "head_dim" or size != sizes.head_dim):
            causes.append(f"{name} {size}")
    if not causes:
        return
    log.warn_once(
        tuple(causes),
        "%s %s not a multiple of 16 bytes: %s copies element by element, which is slower",
        " and ".join(causes),
        "is" if len(causes) == 1 else "are",
        row.name,
    )
