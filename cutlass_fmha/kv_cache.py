"""Attention over a cache of keys and values, contiguous or paged, to which a call may append new ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import autocast, private_torch
from cutlass_fmha.arguments import check, check_features, results, tensors
from cutlass_fmha.arguments.op_arguments import op_arguments, window_sides
from cutlass_fmha.arguments.results import OUT, RESULTS
from cutlass_fmha.arguments.signature import lists_features, refuse_name
from cutlass_fmha.call import call_attention
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.choose import choose
from cutlass_fmha.dispatch.describe import problem_of
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT
from cutlass_fmha.features import CacheArguments, Features
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import append_kv, attend, attend_backward, dispatcher
from cutlass_fmha.ops.append_kv import Append, capacity_of, check_room
from cutlass_fmha.ops.rotary import check_positions

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAMES = ("q", "k_cache", "v_cache")
TAKEN = frozenset(CacheArguments.__annotations__)

#: What a call with a plan for both launches may say: where the others' tensors lie decides which rows can read
#: them, and what is given to write to is compared with all else before the cache is written.
PLANNED = TAKEN - {"mask", "bias", "out", "lse"}


class Step(NamedTuple):
    """What calls with the same metadata have in common, whose checks they passed."""

    append: append_kv.Plan | None  # None: nothing is appended
    attention: plan.Plan


@lists_features
def with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | int | None = None,
    cache_seqlens: Tensor | int | None = None,
    scale: float | None = None,
    causal: bool | str | None = False,
    return_lse: bool = False,
    row: str | None = None,
    **features: Unpack[CacheArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the keys and values in a cache, after new ones were appended: decoding, or a prompt.

    What ``flash_attn_with_kvcache`` is in flash_attn. The cache is written in place, cache_seqlens is not.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], as ``attention`` takes it, or with cu_seqlens_q packed,
            [total_q, num_heads, head_dim].
        k_cache, v_cache: [batch_cache, seqlen_cache, num_heads_kv, head_dim or head_dim_v], or with
            page_table pages, [pages, page_size, num_heads_kv, ...], of a multiple of 16 rows.
        k, v: [batch, seqlen_new, num_heads_kv, ...], written to rows cache_seqlens, cache_seqlens + 1, ...
            Packed as q is, [total_q, num_heads_kv, ...], with cu_seqlens_q. None: the cache is used as it is.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], of q's dtype or float32: k and q are rotated as
            ``rotary`` does it; rotary_dim is any even number up to head_dim.
        rotary_interleaved: pairs are neighbours, otherwise of an element of each half (flash_attn's default
            is True).
        rotary_seqlens: int32 [batch] or an int, the position of the first new key; when None cache_seqlens -
            leftpad_k, which is a key's number in its own sequence. (flash_attn does not subtract leftpad_k.)
        cache_seqlens: int32 [batch] or an int: rows of the cache in use before the call, counted with
            leftpad_k. None, without k: all.
        cache_batch_idx: int32 [batch], which entry of the cache is a sequence's; None: its own number.
        page_table: int32 [batch, pages]: which pages hold a sequence's rows.
        leftpad_k: int32 [batch]: rows before the first key.
        cu_seqlens_q: int32 [batch + 1], where sequences begin in q, k and v: prompts, parts of prompts and
            single tokens in one batch.
        max_seqlen_q, max_seqlen_k: no sequence has more queries; more keys, new ones included. As
            ``attention``.
        causal, window: as ``attention``. With one of them query i is rotated to the position of new key i,
            otherwise every query to that of the first one.
        scale, mask, bias, prefix_lengths, softcap, alibi_slopes, sinks, num_splits, batch_invariant,
            return_lse, row, out, lse: as ``attention``.

    Returns:
        As ``attention``. Under torch.autocast the cache is not cast: q, k and v are, to its dtype.

    The host reads no tensor on a GPU. There a new key without a place is dropped: one beyond the rows that
    the cache has for a sequence, or of a page or an entry that there is not; and a row whose position
    rotary_cos does not have becomes NaN as far as it is rotated. Both raise ValueError where the host knows:
    on the CPU, and where cache_seqlens or rotary_seqlens is an int.

    Raises:
        TypeError, ValueError, UnsupportedError, NotImplementedError: as ``attention``.
    """
    if features and (unknown := [name for name in features if name not in TAKEN]):
        refuse_name("with_kv_cache", min(unknown))
    causal = "none" if causal is False else "bottom-right" if causal is True else check.causal_name(causal)
    is_rotated = rotary_cos is not None or rotary_sin is not None or rotary_seqlens is not None
    call: Any = Append(  # as it is said: not all of it may be what an append takes
        k_cache,
        v_cache,
        k,  # type: ignore[arg-type]
        v,  # type: ignore[arg-type]
        cache_seqlens,  # type: ignore[arg-type]
        q if is_rotated else None,
        advances(causal, features.get("window")),
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        rotary_seqlens,  # type: ignore[arg-type]
        features.get("cache_batch_idx"),
        features.get("page_table"),
        features.get("leftpad_k"),
        features.get("cu_seqlens_q"),
    )
    if (
        not private_torch.any_autocast_enabled()
        and dispatcher.passes(
            (q, k_cache, v_cache),
            (k, v, cache_seqlens, rotary_cos, rotary_sin, rotary_seqlens, *features.values()),
        )
        and (not features or features.keys() <= PLANNED)
    ):
        if not (_is_on_device(cache_seqlens) and _is_on_device(rotary_seqlens)):
            call = _checked(q, call, features)  # a number is checked at each call, and becomes a vector
        return _planned(q, call, scale, causal, return_lse, row, features)
    call = _checked(q, call, features)
    if k is not None:
        check_cache(q, k_cache, v_cache, call.cache_seqlens, scale, causal, return_lse, row, **features)
    with dispatcher.between_launches(q) as between:
        seqused_k = call.cache_seqlens
        if k is not None:
            rotated, seqused_k = append_kv.append(call, between)
            q = rotated if is_rotated and rotated is not None else q
        said = {**features, "seqused_k": seqused_k}
        output, softmax_lse = attend_cache(q, k_cache, v_cache, scale, causal, return_lse, row, said)
    return output if softmax_lse is None or not return_lse else (output, softmax_lse)


def advances(causal: bool | str | None, window: Any) -> bool:
    """Whether queries are rotated by their own positions, or all by that of the first new key, as in flash_attn."""
    return check.causal_name(causal) != "none" or (window is not None and bool(window_sides(window)))


def _is_on_device(lengths: Tensor | int | None) -> bool:
    return lengths is None or isinstance(lengths, Tensor)


def _planned(
    q: Tensor,
    call: Any,
    scale: float | None,
    causal: str,
    return_lse: bool,
    row: str | None,
    features: Mapping[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """Both launches past the dispatcher, by a plan that is known after the first call of its kind."""
    scale = None if scale is None else check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    if return_lse is not False:
        check.flag("return_lse", return_lse)
    if call.rotary_interleaved is not False:
        check.flag("rotary_interleaved", call.rotary_interleaved)
    said = op_arguments(q, features, "q") if features else {}
    k_cache, v_cache, seqused_k = call.k_cache, call.v_cache, call.cache_seqlens
    try:
        aligned = (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) & 15
        read = (q, k_cache, v_cache, call.key, call.value, seqused_k)
        key: Any = ("with_kv_cache", aligned, causal, row, *map(plan.metadata, read))
        if said or call.query is not None:
            rotation = (call.rotary_cos, call.rotary_sin, call.rotary_interleaved, call.rotary_seqlens)
            key = (key, *said, *map(plan.metadata, (*rotation, *said.values())))
        step = plan.kept_by(key, lambda: _prepare(q, call, causal, row, said, features))
        with dispatcher.between_launches(q) as between:
            first = q
            if step.append is not None:
                rotated, seqused_k = append_kv.launch(call, between, step.append)
                first = q if rotated is None else rotated
            if seqused_k is not None:
                said["seqused_k"] = seqused_k
            output, lse = plan.launch(
                first, k_cache, v_cache, scale, causal, return_lse, row, "bshd", NAMES, said, False, step.attention
            )
    except RuntimeError:
        _checked(q, call, features)  # nested and sparse tensors have no shape or address
        raise
    return (output, lse) if return_lse else output


def _prepare(
    q: Tensor, call: Any, causal: str, row: str | None, said: Mapping[str, Any], features: Mapping[str, Any]
) -> Step:
    call = _checked(q, call, features)
    new = None if call.key is None else append_kv.prepare(call)
    used = {} if call.cache_seqlens is None else {"seqused_k": call.cache_seqlens}  # whose metadata the sums have
    first = q if call.query is None else plan.new_like(q)
    return Step(new, plan.prepare((first, *call[:2]), causal, row, names=NAMES, said={**said, **used}))


def _checked(q: Tensor, call: Any, features: Mapping[str, Any]) -> Any:
    """The call, whose numbers become vectors; raises for what can be told before anything is written."""
    # By name: torch 2.6 traces no slice of a NamedTuple.
    k_cache, v_cache, k, v, cache_seqlens = call.k_cache, call.v_cache, call.key, call.value, call.cache_seqlens
    page_table, leftpad_k, cu_seqlens_q = call.page_table, call.leftpad_k, call.cu_seqlens_q
    vectors: dict[str, Tensor] = {}
    packed = cu_seqlens_q is not None
    tensors.check_dims("q", q, f"{'total_q' if packed else 'batch, seqlen_q'}, num_heads, head_dim")
    check.check_tensors_given(
        {"k_cache": k_cache, "v_cache": v_cache},
        {
            "k": k,
            "v": v,
            "rotary_cos": call.rotary_cos,
            "rotary_sin": call.rotary_sin,
            "leftpad_k": leftpad_k,
            "cache_batch_idx": call.cache_batch_idx,
            "page_table": page_table,
            "cu_seqlens_q": cu_seqlens_q,
        },
    )
    if cu_seqlens_q is not None:
        check_features.check_vector("cu_seqlens_q", cu_seqlens_q, None)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check.flag("rotary_interleaved", call.rotary_interleaved)
    if (k is None) != (v is None):
        raise ValueError("k and v go together: both are appended, or neither")
    if k is not None:
        tensors.check_dims("k", k, f"{'total_q' if packed else 'batch, seqlen_new'}, num_heads_kv, head_dim")
        if packed and k.shape[0] != q.shape[0]:
            raise ValueError(
                f"k must be packed as q, with {q.shape[0]} rows, got {k.shape[0]}: cu_seqlens_q is about both"
            )
    for bound, needed, given in (
        ("max_seqlen_q", "cu_seqlens_q", cu_seqlens_q),
        ("max_seqlen_k", "cache_seqlens", cache_seqlens),
    ):
        if features.get(bound) is not None and given is None:
            raise ValueError(f"{bound} is only taken with {needed}")
    first = call.rotary_seqlens  # the first position, where the host knows it
    if first is None and leftpad_k is None:
        first = cache_seqlens
    if isinstance(cache_seqlens, Tensor):
        tensors.check_vectors({"cache_seqlens": cache_seqlens}, batch)
    elif cache_seqlens is not None:
        vectors["cache_seqlens"] = tensors.vector_of("cache_seqlens", cache_seqlens, batch, q.device)
        check_room(cache_seqlens, 0 if k is None or packed else k.shape[1], capacity_of(k_cache, page_table))
    if call.rotary_seqlens is not None:
        vectors["rotary_seqlens"] = tensors.vector_of("rotary_seqlens", call.rotary_seqlens, batch, q.device)
    if k is not None and call.rotary_cos is not None and first is not None and not isinstance(first, Tensor):
        rows = min(1, q.shape[0]) if packed else max(k.shape[1], q.shape[1] if call.advance_query else 0)
        check_positions(call.rotary_cos, first, rows)
    out, lse = features.get("out"), features.get("lse")
    if (out is not None or lse is not None) and not torch.compiler.is_compiling():
        read = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
        results.check_before(out, lse, q, v_cache.shape[-1], k_cache.dtype, read)
    if k is None and call.query is not None:
        raise ValueError("rotary embedding is of k and v that are appended, and there are none")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v are appended behind cache_seqlens rows, and cache_seqlens is None")
    return Append(*[vectors.get(name, getattr(call, name)) for name in Append._fields])


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float | None,
    causal: bool | str | None,
    return_lse: bool,
    row: str | None,
    features: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """``attention`` for ``with_kv_cache``, under its names."""
    casts = _casts_to(k_cache)
    q, arguments = _over_a_cache(q, k_cache, v_cache, causal, return_lse, features)
    # The op would cast what it can't know to be a cache.
    with autocast.off(k_cache.device.type) if casts else nullcontext():
        rest = (scale, check.causal_name(causal), return_lse, "bshd", row, NAMES)
        found: tuple[Tensor, Tensor | None] = call_attention(q, k_cache, v_cache, *rest, arguments)
        return found


def _casts_to(k_cache: Tensor) -> bool:
    """Whether autocast has a say, which for a cache is that all else gets its dtype."""
    return private_torch.any_autocast_enabled() and autocast.dtype_of(k_cache) is not None


def _over_a_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, causal: object, return_lse: bool, features: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """q and the op's keyword arguments, as autocast has them."""
    check.causal_name(causal)
    if _casts_to(k_cache):
        q, _, _, features = autocast.operands(q, k_cache, v_cache, features, k_cache.dtype)
    return q, op_arguments(q, features, "q", RESULTS if check.flag("return_lse", return_lse) else OUT)


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqused_k: Tensor | None,
    scale: float | None = None,
    causal: bool | str | None = False,
    return_lse: bool = False,
    row: str | None = None,
    **features: Any,
) -> None:
    """Raises what ``attend_cache`` would say of its arguments, before the cache is written to; what lies in memory is
    not looked at, nor where: q may be rotated to a new tensor first. Only ``row`` can still refuse that."""
    if torch.compiler.is_compiling():  # nothing is written before all shapes are known
        return
    if scale is not None:
        check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    given = {**features, "seqused_k": seqused_k}
    q, arguments = _over_a_cache(q, k_cache, v_cache, causal, return_lse, given)
    said = {name: x for name, x in arguments.items() if name not in RESULTS}
    tensors, word = (q, k_cache, v_cache), check.causal_name(causal)

    def checked() -> None:
        features = Features(**said)
        sizes = check_features.check_features(tensors, features, NAMES)
        if type(q) is Tensor and q.is_cuda:
            problem = problem_of(sizes, features, check.dtype_name(q.dtype), word, FULL_ALIGNMENT, runs=False)
            choose(problem, devices.of_index(q.get_device()), row)
        elif type(q) is Tensor and q.device.type == "cpu" and not dispatcher.simulated():
            attend.refuse_row(row)

    if type(q) is Tensor and q.is_cuda:  # a step's host time counts: once for calls that are alike
        plan.kept("check_cache", (*tensors, word, row, *said, *said.values()), checked)
    else:
        checked()
    if dispatcher.needs_gradient(*tensors, *dispatcher.tensors_of(said).values()):
        if len(said) < len(arguments):
            raise NotImplementedError(results.NO_GRADIENT)
        if sentence := attend_backward.refusal(*tensors, word, said):
            raise NotImplementedError(sentence)
