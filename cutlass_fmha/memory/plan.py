"""``memory_plan``: what a call and its gradients allocate, by what the launch allocates of meta tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cutlass_fmha import _C, autocast
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import gradients as dispatch_gradients
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.describe import Operands, describe
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.explain import problem_of_shape, resolve
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT, Problem
from cutlass_fmha.features import NO_FEATURES, Features
from cutlass_fmha.launch import gradients
from cutlass_fmha.launch import plan as launches
from cutlass_fmha.launch.workspace import Workspace
from cutlass_fmha.memory.ledger import Ledger, unfused
from cutlass_fmha.ops import attend_backward

MIB = 1 << 20
EVERYTHING = 1 << 60  # bytes, of memory that there is not
Parts = Mapping[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that attention takes on a device. Print it for the table.

    ``inputs``: what it is given. ``of_forward`` and ``of_backward``: what it allocates, by name; the incoming
    gradients among the latter. ``workspace`` is freed when the call is over: parts of split keys, sums in
    float32, copies of what a kernel can't read. torch rounds each tensor up to 512 bytes.
    """

    problem: Problem
    device: Device
    row: str
    backward_row: str | None
    inputs: Parts
    of_forward: Parts
    of_backward: Parts
    #: What a ``Workspace`` needs for the call and its gradients.
    workspace: int

    @property
    def forward(self) -> int:
        """What a call allocates at most at once: output, LSE, workspace."""
        return sum(self.of_forward.values())

    @property
    def backward(self) -> int:
        """The same of its gradients: they, those of the output (and of the LSE), workspace."""
        return sum(self.of_backward.values())

    @property
    def saved(self) -> int:
        """What is kept from the call to its gradients: the inputs, the output, the LSE."""
        return sum(self.inputs.values()) + self._results if self.backward_row is not None else 0

    @property
    def total(self) -> int:
        """The most there is at once, inputs included."""
        kept = self._results + self.backward if self.backward_row is not None else 0
        return sum(self.inputs.values()) + max(self.forward, kept)

    @property
    def _results(self) -> int:
        return self.forward - self.of_forward.get("workspace", 0)

    @functools.cached_property
    def unfused(self) -> int:
        """``total`` of the same inputs where scores are in memory: ``ledger.unfused``."""
        given = sum(size for name, size in self.inputs.items() if name not in attend_backward.DIFFERENTIABLE[:3])
        return given + unfused(self.problem, self.backward_row is not None)

    @property
    def share_saved(self) -> float:
        """Of ``unfused``, what this doesn't take."""
        return 1.0 - self.total / self.unfused if self.unfused else 0.0

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Lines, the table's cells with those that name its columns first, and the lines after it."""
        rows = self.row if self.backward_row is None else f"{self.row}, {self.backward_row}"
        before = [f"problem: {self.problem}", f"device:  {self.device}", f"rows:    {rows}"]
        amounts: list[tuple[str, int, str]] = [
            ("inputs", sum(self.inputs.values()), _listed(self.inputs)),
            ("forward", self.forward, _listed(self.of_forward)),
        ]
        if self.backward_row is not None:
            amounts += [
                ("saved", self.saved, "inputs, output, softmax_lse"),
                ("backward", self.backward, _listed(self.of_backward)),
            ]
        amounts += [
            ("total", self.total, "the most at once"),
            ("unfused", self.unfused, f"with scores in memory; saved: {self.share_saved:.1%}"),
        ]
        return before, [["", "MiB", "of"], *([name, _mib(size), of] for name, size, of in amounts)], []

    def __str__(self) -> str:
        before, (_, *table), _ = self.parts()
        return "\n".join([*before, "", *(f"  {name:<8} {size:>10} MiB  {of}" for name, size, of in table)])


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def _listed(parts: Parts) -> str:
    return ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)


def memory_plan(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    causal: bool | str | None = False,
    layout: str = "bshd",
    scale: float | None = None,
    return_lse: bool = False,
    row: str | None = None,
    seqlen_k: int | None = None,
    num_heads_kv: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    head_dim_v: int | None = None,
    features: Sequence[str] = (),
    device: str | int | torch.device | Device | None = None,
    backward: bool | None = None,
    **keywords: Any,
) -> MemoryPlan:
    """What ``attention`` and its gradients allocate on a GPU, in bytes, without a call and without the GPU.

    Either ``memory_plan(q, k, v, causal=..., bias=..., ...)`` as ``attention`` is called, where meta tensors
    do (``torch.empty(..., device="meta")``), or as ``explain`` is, ``memory_plan(shape=(batch, seqlen_q,
    num_heads, head_dim), ...)`` with ``seqlen_k``, ``num_heads_kv``, ``head_dim_v`` and ``dtype``.

    Args:
        features: for a shape, what it comes with: those of ``memory.plan.STAND_INS``, as "bias".
        keywords: those of ``attention``; with a shape, too.
        device: the GPU, as ``explain`` takes it; the tensors' when None, or else the first CUDA device.
        backward: whether gradients will be computed. None: where a tensor requires one. Those of the tensors
            that require one, or of q, k and v where none does.

    Raises what ``attention`` and its gradients raise, UnsupportedError among it; ValueError for a device that
    is no GPU.
    """
    causal = check.causal_name(causal)
    check.layout_name(layout)
    check.flag("return_lse", return_lse)
    if scale is not None:
        check.finite_scale(scale)
    given: tuple[Tensor | None, ...] = (q, k, v)
    if shape is not None:
        if any(x is not None for x in given):
            raise TypeError("memory_plan takes tensors or a shape, got both")
        problem = problem_of_shape(shape, seqlen_k, num_heads_kv, dtype, causal)
        tensors, said = _of_shape(problem, head_dim_v, features)
        keywords = {**said, **keywords}
    else:
        if any(x is None for x in given):
            raise TypeError("memory_plan needs q, k and v, or a shape (batch, seqlen_q, num_heads, head_dim)")
        if features or head_dim_v is not None or seqlen_k is not None or num_heads_kv is not None:
            raise TypeError(
                "features, seqlen_k, num_heads_kv and head_dim_v describe a shape: with tensors, pass what "
                "attention takes"
            )
        check.check_tensors_given(dict(zip("qkv", given, strict=True)))
        tensors = given  # type: ignore[assignment]
        if device is None and tensors[0].is_cuda:
            device = tensors[0].device
    gpu = resolve(("cuda" if _C.device_count() else "cpu") if device is None else device)
    if gpu is None:
        raise ValueError(
            "memory is planned of a GPU: name one (device='l4', --device l4) among " + ", ".join(devices.PRESETS)
        )
    # No seed is drawn for what doesn't run.
    *cast, keywords = autocast.operands(tensors[0], tensors[1], tensors[2], {**keywords, "dropout_seed": 0})  # type: ignore[assignment]
    *tensors, keywords = tree_map_only(Tensor, _meta, (*cast, keywords))
    return _plan(
        tuple(tensors),
        causal,
        layout,
        row,
        return_lse,
        gpu,
        backward,
        op_arguments(tensors[0], keywords, "q"),
    )


def _meta(x: Tensor) -> Tensor:
    """Where x begins between multiples of 16 bytes, which decides what is copied."""
    try:
        odd = x.data_ptr() % FULL_ALIGNMENT // x.element_size()
    except RuntimeError:  # a fake tensor lies nowhere
        odd = 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(odd + max(0, elements), dtype=x.dtype, device="meta")
    return memory.as_strided(x.shape, x.stride(), odd).requires_grad_(x.requires_grad)


def _size(x: Tensor) -> int:
    """Bytes of its elements, of those that an expanded one repeats once."""
    sides = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0)
    return math.prod(sides) * x.element_size()


def _plan(
    tensors: Operands,
    causal: str,
    layout: str,
    row: str | None,
    return_lse: bool,
    device: Device,
    backward: bool | None,
    said: dict[str, Any],
) -> MemoryPlan:
    names = dict(zip(("query", "key", "value"), tensors, strict=True)) | said
    inputs = {name: x for name, x in names.items() if isinstance(x, Tensor)}
    wanted = tuple(name in inputs and inputs[name].requires_grad for name in attend_backward.DIFFERENTIABLE)
    if backward is None:
        backward = any(wanted)
    elif not any(wanted):
        wanted = attend_backward.QKV
    plan = launches.prepare(tensors, causal, row, layout, ("q", "k", "v"), said, device)
    of_forward, workspace = _forward(plan, tensors, said, return_lse or backward)
    if layout == "bhsd":
        tensors = tuple(x.transpose(1, 2) for x in tensors)  # type: ignore[assignment]
    call = describe(tensors, causal, Features(**said) if said else NO_FEATURES)
    of_backward: Parts = {}
    backward_row = None
    if backward:
        if sentence := attend_backward.refusal(*tensors, causal, said):
            raise NotImplementedError(sentence)
        # What isn't aligned is copied.
        aligned = replace(call.problem, alignment=FULL_ALIGNMENT, bias_gradient=wanted[3])
        backward_row = dispatch_gradients.choose(
            aligned, device, None, call.features.deterministic and wanted[0], gradients.workspace_cap(said)
        ).row.name
        of_backward, more = _backward(tensors, call.sizes.out_shape, causal, said, wanted, return_lse, plan, device)
        workspace = max(workspace, more)
    return MemoryPlan(
        call.problem,
        device,
        next(each.name for each in tables.this_build().rows if each.index == plan.row),
        backward_row,
        {name: _size(x) for name, x in inputs.items()},
        of_forward,
        of_backward,
        workspace,
    )


def _of_a_workspace(launch: Callable[[], object]) -> int:
    """Bytes that a launch of meta tensors takes of one."""
    with Workspace(EVERYTHING, "meta") as workspace, torch.no_grad():
        launch()
    return workspace.high_water


def _forward(plan: launches.Plan, tensors: Operands, said: Mapping[str, Any], lse: bool) -> tuple[Parts, int]:
    """What ``launch.plan.launch`` allocates, and what of it a workspace may have."""
    found = {"output": math.prod(plan.out_shape) * plan.dtype.itemsize}
    if lse:
        found["softmax_lse"] = 4 * math.prod(plan.lse_shape)
    found["workspace"] = workspace = 4 * plan.room
    if (launch := plan.launch) is not None:
        with Ledger() as ledger, torch.no_grad():
            launch(tensors, 1.0, lse, said)
        found["workspace"] = ledger.peak - sum(found.values())
        workspace = _of_a_workspace(lambda: launch(tensors, 1.0, lse, said))
    return found, workspace


def _backward(
    tensors: Operands,
    out_shape: tuple[int, ...],
    causal: str,
    said: Mapping[str, Any],
    wanted: tuple[bool, ...],
    return_lse: bool,
    plan: launches.Plan,
    device: Device,
) -> tuple[Parts, int]:
    """What ``launch.gradients.launch`` allocates, and what it is given; what of it a workspace may have."""
    output, dout = (torch.empty(out_shape, dtype=plan.dtype, device="meta") for _ in range(2))
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device="meta")
    dlse = lse if return_lse else None
    said = {name: x for name, x in said.items() if name in attend_backward.NAMES}
    launch = functools.partial(
        gradients.launch, dout, tensors, output, lse, dlse, 1.0, causal, said, wanted, device=device
    )
    with Ledger() as ledger, torch.no_grad():
        found = launch()
    parts = {"output's gradient": _size(dout)} | ({"softmax_lse's gradient": _size(lse)} if return_lse else {})
    results = {
        f"{name}'s gradient": x.untyped_storage().nbytes()
        for name, x, need in zip(attend_backward.DIFFERENTIABLE, found, wanted, strict=True)
        if need
    }
    own = ledger.peak - sum(results.values())
    return {**parts, **results, "workspace": own}, _of_a_workspace(launch)


# ---- a shape -----------------------------------------------------------------------------------------------


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


#: What a shape may come with by name, ``attention``'s keywords for it: numbers and sizes that are usual.
STAND_INS: Mapping[str, Callable[[Problem, torch.dtype], dict[str, Any]]] = {
    "mask": lambda p, dtype: {"mask": _empty(p.batch, 1, p.seqlen_q, p.seqlen_k, dtype=torch.bool)},
    "bias": lambda p, dtype: {"bias": _empty(p.num_heads, p.seqlen_q, p.seqlen_k, dtype=dtype)},
    "prefix": lambda p, dtype: {"prefix_lengths": _empty(p.batch)},
    "softcap": lambda p, dtype: {"softcap": 30.0},
    "alibi": lambda p, dtype: {"alibi_slopes": _empty(p.num_heads, dtype=torch.float32)},
    "sinks": lambda p, dtype: {"sinks": _empty(p.num_heads, dtype=torch.float32)},
    "dropout": lambda p, dtype: {"dropout_p": 0.1},
    "varlen": lambda p, dtype: {
        "cu_seqlens_q": _empty(p.batch + 1),
        "cu_seqlens_k": _empty(p.batch + 1),
        "max_seqlen_q": p.seqlen_q,
        "max_seqlen_k": p.seqlen_k,
    },
    "lengths": lambda p, dtype: {"seqused_k": _empty(p.batch)},
    "leftpad": lambda p, dtype: {"leftpad_k": _empty(p.batch)},
}


def _of_shape(p: Problem, head_dim_v: int | None, names: Sequence[str]) -> tuple[Operands, dict[str, Any]]:
    """Meta tensors of a problem, and what comes with it."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"features must be names, as ('bias', 'sinks'), got {check.shown(names)}")
    if unknown := set(names) - set(STAND_INS):
        raise ValueError(
            f"features must be among {', '.join(STAND_INS)}, got {min(unknown)!r}: pass others as attention takes them"
        )
    dtype = getattr(torch, p.dtype)
    value_dim = p.head_dim if head_dim_v is None else check.integer("head_dim_v", head_dim_v)
    q = _empty(p.batch, p.seqlen_q, p.num_heads, p.head_dim, dtype=dtype)
    k, v = (_empty(p.batch, p.seqlen_k, p.num_heads_kv, dim, dtype=dtype) for dim in (p.head_dim, value_dim))
    if "varlen" in names:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    said: dict[str, Any] = {}
    for name in names:
        said |= STAND_INS[name](p, dtype)
    return (q, k, v), said
