"""The op ``qk_norm_rope_append_``, which writes keys and values into a cache by qk_norm_rope's launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast, private_torch
from cutlass_fmha.arguments import check, results
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import angles, append_kv, dispatcher, qk_norm_rope
from cutlass_fmha.ops.angles import Angles
from cutlass_fmha.ops.qk_norm_rope import Norm

SCHEMA_APPEND = (
    "qk_norm_rope_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q, Tensor k, Tensor v, "
    f"Tensor cache_seqlens, {qk_norm_rope.NORM}Tensor? cache_batch_idx=None, Tensor? page_table=None, "
    f"Tensor? leftpad_k=None, {angles.SCHEMA}) -> (Tensor q, Tensor seqused_k)"
)
SCHEMA_APPEND_OUT = (
    SCHEMA_APPEND.replace("append_(", "append_out(")
    .replace(" Tensor q,", " Tensor(c!) q_out, Tensor(d!) seqused_out, Tensor q,")
    .replace("(Tensor q, Tensor seqused_k)", "()")
)

NO_BACKWARD_WITH_CACHE = (
    "cutlass_fmha has no backward of qk_norm_rope with a cache, and an input of this call requires a "
    "gradient: call it without k_cache and v_cache, or under torch.no_grad()"
)


class _Call(NamedTuple):
    """The arguments of the op ``qk_norm_rope_append_``."""

    append: append_kv.Append
    q: Tensor
    norm: Norm
    angles: Angles


def _call(
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    **said: Any,
) -> _Call:
    a = Angles(**said)
    places = append_kv.Append(
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        page_table=page_table,
        leftpad_k=leftpad_k,
        cu_seqlens_q=a.cu_seqlens,
    )
    return _Call(places, q, Norm(q_weight, k_weight, eps, weight_offset), a)


def _check_append(c: _Call) -> None:
    if c.append.key.dim() == 3 and c.angles.cu_seqlens is None:
        raise ValueError("cu_seqlens is None, and packed rows that go to a cache are those of its sequences")
    check.check_tensors_given({"q": c.q, "k": c.append.key, "v": c.append.value})
    qk_norm_rope.check_normed(c.q, c.append.key, c.norm, c.angles)
    append_kv.check_append(c.append, ("k", "v"))


def _check_append_out(c: _Call, out: tuple[Tensor, Tensor]) -> None:
    lengths = c.append.cache_seqlens
    results.check_result("out[0]", out[0], tuple(c.q.shape), c.q.dtype, ("q", c.q))
    results.check_result("out[1]", out[1], tuple(lengths.shape), lengths.dtype, ("q", c.q))


def _check_append_apart(c: _Call, out: tuple[Tensor, Tensor]) -> None:
    rows = dispatcher.tensors_of(c.append._asdict())
    qk_norm_rope.check_apart(results.both(*out), c.q, c.append.key, c.norm, c.angles)
    results.check_apart(results.placed(results.both(*out)), results.placed(rows))


def _launch(c: _Call, given: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    a, rows = c.angles, c.append

    def prepare() -> helpers.Helper[_C.RopeParams]:
        _check_append(c)
        p = _C.RopeParams()
        qk_norm_rope.describe(p, c.q, c.norm, a)
        if given is not None:
            _check_append_out(c, given)
        angles.describe_rows(p.q, c.q, given[0] if given else c.q.new_empty(c.q.shape, device="meta"))
        angles.describe_rows(p.k, rows.key, rows.k_cache)
        angles.describe_rows(p.v, rows.value, rows.v_cache)
        append_kv.describe_places(p, rows)
        return helpers.helper("rope", p, c.q)

    plan = kept("qk_norm_rope_append_", (*rows, c.q, *c.norm, *a.key, *(given or ())), prepare)
    if given is not None:
        _check_append_apart(c, given)
    out, seqused_k = given or (
        c.q.new_empty(c.q.shape),
        rows.cache_seqlens.new_empty(rows.cache_seqlens.shape),
    )
    if c.q.numel() == 0 and rows.key.numel() == 0:  # nothing is launched, and nobody counts
        torch.add(rows.cache_seqlens, rows.seqlen_new, out=seqused_k)
    p = plan.params.copy()
    qk_norm_rope.set_norm(p, c.norm, a)
    if a.offsets is None:
        p.first_position, p.before_position = rows.cache_seqlens.data_ptr(), helpers.address(rows.leftpad_k)
    p.q.x, p.k.x, p.v.x = c.q.data_ptr(), rows.key.data_ptr(), rows.value.data_ptr()
    p.q.out, p.k.out, p.v.out = out.data_ptr(), rows.k_cache.data_ptr(), rows.v_cache.data_ptr()
    append_kv.set_places(p, rows)
    p.cache_seqlens = p.cache_seqlens or p.cu_seqlens  # of no sequences: not read, and null would say no cache
    p.seqused_k = seqused_k.data_ptr()
    helpers.launch(plan, p)
    return out, seqused_k


def _write(c: _Call) -> tuple[Tensor, Tensor]:
    """What a launch does, on CPU tensors."""
    _check_append(c)
    a, rows = c.angles, c.append
    out, keys = c.q.new_zeros(c.q.shape), rows.key.new_zeros(rows.key.shape)
    if a.offsets is None:
        first = rows.cache_seqlens if rows.leftpad_k is None else rows.cache_seqlens - rows.leftpad_k
        a = a._replace(offsets=first)
    own, positions = angles.rows_and_positions(c.q, a)
    for x, weight, to in ((c.q, c.norm.q_weight, out), (rows.key, c.norm.k_weight, keys)):
        to[own] = angles.turn(qk_norm_rope.normalized(x[own], weight, c.norm), positions, a).to(x.dtype)
    _, seqused_k = append_kv.write(rows._replace(key=keys))
    return out, seqused_k


def _append_out(k_cache: Tensor, v_cache: Tensor, *rest: Any, **said: Any) -> tuple[_Call, tuple[Tensor, Tensor]]:
    """What the op ``qk_norm_rope_append_out`` is told."""
    q_out, seqused_out, *given = rest
    return _call(k_cache, v_cache, *given, **said), (q_out, seqused_out)


def _cuda_append_out(*args: Any, **kwargs: Any) -> None:
    _launch(*_append_out(*args, **kwargs))


def _cpu_append_out(*args: Any, **kwargs: Any) -> None:
    c, given = _append_out(*args, **kwargs)
    if dispatcher.simulated():
        _launch(c, given)
        return
    _check_append(c)
    _check_append_out(c, given)
    _check_append_apart(c, given)
    for to, x in zip(given, _write(c), strict=True):
        to.copy_(x)


def _fake_append_out(*args: Any, **kwargs: Any) -> None:
    c, given = _append_out(*args, **kwargs)
    _check_append(c)
    _check_append_out(c, given)


def _cuda_append(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _launch(_call(*args, **kwargs))


def _cpu_append(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    c = _call(*args, **kwargs)
    return _launch(c) if dispatcher.simulated() else _write(c)


def _fake_append(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    c = _call(*args, **kwargs)
    _check_append(c)
    return c.q.new_empty(c.q.shape), c.append.cache_seqlens.new_empty(c.append.cache_seqlens.shape)


def _casts_append(
    dtype: torch.dtype,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
    **said: Any,
) -> autocast.Arguments:
    """What is new becomes what the cache is."""
    new = (autocast.cast(x, k_cache.dtype) for x in (q, k, v))
    _, said = angles.casts(dtype, k_cache, **said)
    return (k_cache, v_cache, *new, *rest), said


def _casts_append_out(
    dtype: torch.dtype,
    k_cache: Tensor,
    v_cache: Tensor,
    q_out: Tensor,
    seqused_out: Tensor,
    *rest: Any,
    **said: Any,
) -> autocast.Arguments:
    (_, _, *cast), said = _casts_append(dtype, k_cache, v_cache, *rest, **said)
    return (k_cache, v_cache, q_out, seqused_out, *cast), said


dispatcher.register(SCHEMA_APPEND, {"CUDA": _cuda_append, "CPU": _cpu_append, "fake": _fake_append}, _casts_append)
dispatcher.register(
    SCHEMA_APPEND_OUT,
    {"CUDA": _cuda_append_out, "CPU": _cpu_append_out, "fake": _fake_append_out},
    _casts_append_out,
)
dispatcher.register_writes("qk_norm_rope_append_", ("k_cache", "v_cache"))
dispatcher.register_writes("qk_norm_rope_append_out", ("k_cache", "v_cache", "q_out", "seqused_out"))


def _autograd_of_append(keyset: Any, *given: Any, **said: Any) -> tuple[Tensor, Tensor]:
    if dispatcher.needs_gradient(*(x for x in (*given, *said.values()) if isinstance(x, Tensor))):
        raise NotImplementedError(NO_BACKWARD_WITH_CACHE)
    op = torch.ops.cutlass_fmha.qk_norm_rope_append_.default
    found: tuple[Tensor, Tensor] = private_torch.after_autograd(op, keyset, *given, **said)
    return found


dispatcher.register_gradients("qk_norm_rope_append_", _autograd_of_append)
