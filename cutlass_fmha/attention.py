"""The public functions: what a caller says, turned into one call of the op."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cutlass_fmha import arrays, autocast, jagged, private_torch
from cutlass_fmha.arguments import check, check_features, results
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arguments.results import OUT, RESULTS
from cutlass_fmha.arguments.signature import lists_features, refuse_positions
from cutlass_fmha.dispatch.describe import Names
from cutlass_fmha.features import Features, Sizes
from cutlass_fmha.launch import plan
from cutlass_fmha.launch.plan import NOTHING
from cutlass_fmha.ops import dispatcher

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cutlass_fmha.arrays import Array
    from cutlass_fmha.features import CallArguments


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = ...,
    causal: bool | str | None = ...,
    return_lse: Literal[False] = ...,
    layout: str = ...,
    row: str | None = ...,
    **features: Unpack[CallArguments],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = ...,
    causal: bool | str | None = ...,
    return_lse: Literal[True],
    layout: str = ...,
    row: str | None = ...,
    **features: Unpack[CallArguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = ...,
    causal: bool | str | None = ...,
    return_lse: bool = ...,
    layout: str = ...,
    row: str | None = ...,
    **features: Any,
) -> Any: ...
# The features are not named here: twenty more defaults would cost every call a quarter of a microsecond.
@lists_features  # type: ignore[misc]  # features of the third kind may be arrays
def attention(
    q: Tensor | Any,
    k: Tensor | Any,
    v: Tensor | Any,
    *rest: object,
    scale: float | None = None,
    causal: bool | str | None = False,
    return_lse: bool = False,
    layout: str = "bshd",
    row: str | None = None,
    **features: Unpack[CallArguments],
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Exact attention, ``softmax(scale * q @ k^T + ...) @ v``, in one kernel (FlashAttention-2, Dao 2023).

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], float16, bfloat16 or float32 (on the CPU also float64). Any
            strides, as long as the last dimension is contiguous. Or, with k and v, an array of a library that
            has DLPack (NumPy, CuPy, JAX), and then so is the result; features may be either.
            Jagged nested tensors (torch.nested) are packed sequences: so are the results, with q's offsets.
        k, v: [batch, seqlen_k, num_heads_kv, head_dim], of q's dtype and device; v may have another head_dim.
            num_heads_kv divides num_heads: each head of k and v serves num_heads / num_heads_kv consecutive
            heads of q (GQA; MQA when it is 1).
        scale: factor on the scores before the softmax, any finite number; 1/sqrt(head_dim) when None.
        causal: False (or "none"), or which keys a mask hides. "bottom-right" (or True) aligns the last query
            with the last key: key j is visible to query i when j <= i + seqlen_k - seqlen_q. "top-left"
            aligns the first ones: j <= i.
        return_lse: also return the log-sum-exp of each row's scores.
        layout: "bshd", or "bhsd" for [batch, num_heads, seqlen, head_dim], which torch's SDPA has.
        row: name of the kernel to run, in place of the winner that ``cutlass_fmha.explain`` shows.

    All further arguments are features, documented with examples in docs/attention.md. int tensors are int32.
    i + offset is the place of query i among the keys: offset is 0 with ``causal="top-left"``, otherwise
    seqlen_k - seqlen_q of the sequence.

    Masks:
        window: (left, right): key j is visible when i + offset - left <= j <= i + offset + right; None or -1
            is no limit.
        mask: bool, broadcastable to [batch, num_heads, seqlen_q, seqlen_k]; False hides a key.
        prefix_lengths: [batch]: so many first keys are visible whatever causal and window say.
        block_mask: (block_counts, block_indices, (block_m, block_n)): for each block of block_m queries, how
            many of the numbers in block_indices count, which are the blocks of block_n keys that are visible,
            ascending. [batch or 1, num_heads or 1, query blocks] and [..., query blocks, entries at most].
    Scores:
        bias: added to them; q's dtype or float32, broadcastable as a mask is.
        softcap: scores become softcap * tanh(scores / softcap), before anything is added.
        alibi_slopes: float32 [num_heads] or [batch, num_heads]: slope * |i + offset - j| is subtracted.
        sinks: float32 or q's dtype, [num_heads]: one more score per head, whose value is 0.
        dropout_p: in [0, 1), to the nearest 1/65536 (below half of that, nothing is dropped): probabilities
            are dropped with it, the others divided by 1 - dropout_p. ``dropout_mask`` says which.
        dropout_seed: int, or int64 [1]; drawn from torch's generator of the device when None.
    Sequences:
        cu_seqlens_q: [batch + 1], where sequences begin in a packed q, [total_q, num_heads, head_dim]; the
            output is packed alike, and the LSE [num_heads, total_q].
        cu_seqlens_k: the same for k and v, [total_k, num_heads_kv, head_dim].
        max_seqlen_q, max_seqlen_k: no sequence is longer; saves work that the device's lengths make moot. The
            latter also with seqused_k.
        seqused_q, seqused_k: [batch]: how many rows are in use. Queries beyond have output 0 and LSE -inf.
        leftpad_k: [batch]: rows before the first key, counted among those in use.
        page_table: [batch, pages]: k and v are pages, [pages, page size, num_heads_kv, head_dim], and a row
            of the table names those of a sequence. A page has a multiple of 16 keys.
        cache_batch_idx: [batch]: which batch entry of k and v is a sequence's.
    Results:
        out: of the output's shape, dtype and device, any strides with a contiguous last dimension: it is
            written to and returned. It shares no memory with another tensor of the call.
        lse: float32, contiguous: the same for the LSE, with ``return_lse``.
    Work:
        num_splits: how many parts the keys are divided into, 1 to 64; chosen when None.
        batch_invariant: a sequence's result has the same bits in every batch.
        deterministic: gradients have the same bits each time.
        deterministic_workspace: bytes that they may take for dS; ``set_deterministic_workspace``'s when None.

    Returns:
        The output, a new tensor or ``out``, of q's shape (with v's head_dim), dtype and layout. With
        ``return_lse`` a pair of it and the natural-log LSE, float32 [batch, num_heads, seqlen_q]. A query
        that sees no key has output 0 and LSE -inf (with a sink, that one).

    Raises:
        TypeError, ValueError: an argument is not what is described above, or two exclude each other; the
            sentence names them.
        UnsupportedError: no kernel of this build runs the problem on the device; the message says what to
            change and why the nearest rows don't.
        NotImplementedError: a gradient is wanted of a call that has none (docs/attention.md, "Gradients").
            One with out or lse has none.
    """
    if rest:
        refuse_positions("attention", "q, k and v", 3 + len(rest))
    if layout != "bshd":
        check.layout_name(layout)
    causal = "none" if causal is False else "bottom-right" if causal is True else check.causal_name(causal)
    if return_lse is not False and return_lse is not True:
        check.flag("return_lse", return_lse)  # type: ignore[unreachable]
    if not isinstance(q, Tensor) and arrays.is_array(q):
        options = arrays.Options(scale, causal, return_lse, layout, row)
        return arrays.through(attention, q, k, v, features, options)  # type: ignore[no-any-return]
    said: Mapping[str, Any] = features
    if private_torch.any_autocast_enabled():
        q, k, v, said = autocast.operands(q, k, v, features)
    arguments = op_arguments(q, said, "q", RESULTS if return_lse else OUT) if said else NOTHING
    found: tuple[Tensor, Tensor | None] = _call(
        q, k, v, scale, causal, return_lse, layout, row, ("q", "k", "v"), arguments
    )
    return found if return_lse else found[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with its signature and semantics, where supported.

    Args:
        query: [..., num_heads, seqlen_q, head_dim], with any number of leading dimensions, none included;
            dtypes as for ``attention``, any strides (a last dimension that is not contiguous is copied).
            Jagged nested tensors are taken too, [batch, num_heads, seqlen, head_dim] whose seqlen is jagged.
        key, value: [..., num_heads, seqlen_k, head_dim]. Leading dimensions broadcast, as torch's do.
        attn_mask: bool, where False hides a key, or of query's dtype or float32, to be added to the scores;
            broadcastable to [..., num_heads, seqlen_q, seqlen_k].
        dropout_p: as for ``attention``. The numbers are not those that torch draws.
        is_causal: key j is visible to query i when j <= i, also when the lengths differ ("top-left").
        scale: 1/sqrt(head_dim) when None.
        enable_gqa: key and value may have fewer heads, a divisor of query's.
        out: where the output is written to, which is returned; as ``attention``, but that leading dimensions
            beyond the batch must lie in memory as one. torch has no such argument.

    Returns:
        The output, a new tensor or ``out``, [..., num_heads, seqlen_q, head_dim of value]. A query that sees
        no key, or only scores of -inf, has output 0.

    Raises:
        NotImplementedError, TypeError, ValueError, UnsupportedError: as ``attention``; ValueError also for
            attn_mask together with is_causal.
    """
    causal = "none" if is_causal is False else "top-left"
    if is_causal is not False and is_causal is not True:
        check.flag("is_causal", is_causal)  # type: ignore[unreachable]
    if private_torch.any_autocast_enabled():
        query, key, value, said = autocast.operands(query, key, value, {"bias": attn_mask})
        attn_mask = said["bias"]
    plain = attn_mask is None and dropout_p == 0.0 and out is None
    layout = "sdpa" if enable_gqa is False else "sdpa, gqa" if enable_gqa is True else "bhsd"
    # Where a call like this one went well, its tensors need not be asked again what they are.
    if layout != "bhsd" and (plain or (type(attn_mask) is Tensor and dropout_p == 0.0 and out is None)):
        said = NOTHING
        if attn_mask is not None:
            said = {"mask" if attn_mask.dtype is torch.bool else "bias": attn_mask}
        known = _call(query, key, value, scale, causal, False, layout, None, check.NAMES, said, True)
        if known is not None:
            return known[0]  # type: ignore[no-any-return]
    lead = None
    if not _same_leading(query, key, value, enable_gqa):
        check.flag("enable_gqa", enable_gqa)
        if jagged.is_jagged(query) or jagged.is_jagged(key):
            jagged.refuse_leading(query, key, value, enable_gqa)
        check.check_types((query, key, value))
        lead, (query, key, value) = _broadcast(query, key, value, enable_gqa)
        layout = "bhsd"
    if not have_contiguous_rows(query, key, value):
        rows = tuple(map(contiguous_rows, check.NAMES, (query, key, value)))
        if any(one is not other for one, other in zip(rows, (query, key, value), strict=True)):
            layout, (query, key, value) = "bhsd", rows
    arguments: Mapping[str, Any] = NOTHING
    if not plain:
        features: CallArguments = {"dropout_p": dropout_p}
        if out is not None:
            features["out"] = _four_dims(out, query, value, lead)
        if attn_mask is not None:
            if is_causal:
                raise ValueError(
                    "attn_mask and is_causal exclude each other, as in torch: "
                    "use cutlass_fmha.attention, which takes a mask and causal together"
                )
            leading = query.shape[:2] if lead is None else lead
            scores = _of_scores(attn_mask, query.dtype, (*leading, query.shape[2], key.shape[2]))
            features["mask" if scores.dtype == torch.bool else "bias"] = scores
        arguments = op_arguments(query, features, results=OUT)
    output: Tensor = _call(query, key, value, scale, causal, False, layout, None, check.NAMES, arguments)[0]
    if out is not None:
        return out
    return output if lead is None else output.reshape(*lead, *output.shape[-2:])


#: What ``with_kv_cache`` calls q, k and v.
_OF_CACHES: Names = ("q", "k_cache", "v_cache")


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
        rest = (scale, check.causal_name(causal), return_lse, "bshd", row, _OF_CACHES)
        found: tuple[Tensor, Tensor | None] = _call(q, k_cache, v_cache, *rest, arguments)
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
    not looked at."""
    if torch.compiler.is_compiling():  # nothing is written before all shapes are known
        return
    if scale is not None:
        check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    given = {**features, "seqused_k": seqused_k}
    q, arguments = _over_a_cache(q, k_cache, v_cache, causal, return_lse, given)
    said = {name: x for name, x in arguments.items() if name not in RESULTS}
    tensors = (q, k_cache, v_cache)

    def checked() -> Sizes:
        return check_features.check_features(tensors, Features(**said), _OF_CACHES)

    if type(q) is Tensor and q.is_cuda:  # a step's host time counts: once for calls that are alike
        plan.kept("check_cache", (*tensors, *said, *said.values()), checked)
    else:
        checked()


def attend_known(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, known: Mapping[str, Any], own: Mapping[str, Any]
) -> Tensor:
    """``attention`` for callers of many layers: ``known`` is what ``op_arguments`` made of what all of them say,
    ``own`` what this one says besides."""
    if private_torch.any_autocast_enabled():
        q, k, v, own = autocast.operands(q, k, v, own)
    arguments = {**known, **op_arguments(q, own, "q", OUT)} if own else known
    word = "bottom-right" if causal else "none"
    return _call(q, k, v, scale, word, False, "bshd", None, ("q", "k", "v"), arguments)[0]  # type: ignore[no-any-return]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool | str, **features: Any
) -> Tensor:
    """``attention`` of packed sequences in tensors [batch, num_heads, seqlen, head_dim], where the tokens of
    an entry follow those of the one before: [batch, seqlen_q, num_heads, head_dim]. Not for ``out``."""
    word = check.causal_name(causal)
    said: Mapping[str, Any] = features
    if private_torch.any_autocast_enabled():
        q, k, v, said = autocast.operands(q, k, v, features)
    arguments = op_arguments(q, said, "q")
    rest = (None, ("q", "k", "v"), arguments)
    if (known := _call(q, k, v, scale, word, False, "packed", *rest, True)) is not None:
        return known[0]  # type: ignore[no-any-return]
    tensors, layout = (q, k, v), "packed"
    rows = plan.packed_rows(q), plan.packed_rows(k), plan.packed_rows(v)
    if not dispatcher.passes(tensors, arguments.values()) or any(
        row.data_ptr() != x.data_ptr() for row, x in zip(rows, tensors, strict=True)
    ):
        layout, tensors = "bshd", rows
    out: Tensor = _call(*tensors, scale, word, False, layout, *rest)[0]
    return out if layout == "packed" else out.view(q.shape[0], q.shape[2], *out.shape[1:])


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    row: str | None,
    names: Names,
    arguments: Mapping[str, Any],
    known_only: bool = False,
) -> Any:
    """One call of an op, or of what the op would call where nothing listens in between: output and LSE.

    ``known_only``: None, and nothing is done, where there is no plan for that.
    ``arguments`` are those of ``attend``, under its names; without any, the op is ``forward``.
    """
    if scale is not None:
        scale = check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    if arguments and layout not in ("bshd", "packed") and ("cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments):
        raise ValueError(
            'layout must be "bshd" with cu_seqlens_q or cu_seqlens_k: '
            "packed tensors are [total tokens, num_heads, head_dim]"
        )
    if dispatcher.passes((q, k, v), arguments.values()):
        try:
            return plan.launch(q, k, v, scale, causal, return_lse, row, layout, names, arguments, known_only)
        except RuntimeError:
            if known_only:  # what CUDA refuses, it does again
                return None
            check.check_types((q, k, v), names)  # nested and sparse tensors have no shape or address
            raise
    if known_only:
        return None
    return _dispatch(q, k, v, scale, causal, return_lse, plan.LAYOUTS[layout], row, names, arguments)


def _dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    row: str | None,
    names: Names,
    arguments: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The call through torch's dispatcher, checked before: the op would use names of its own."""
    if (type(q) is not Tensor or type(k) is not Tensor) and (jagged.is_jagged(q) or jagged.is_jagged(k)):
        packed = jagged.pack((q, k, v), layout, names, arguments)
        said = packed.arguments
        out, lse = _call(*packed.tensors, scale, causal, return_lse, "bshd", row, names, said)
        return packed.as_given(out, lse if return_lse else None)
    check.check_types((q, k, v), names)
    compiling = torch.compiler.is_compiling()
    if type(q) is not Tensor and not compiling and type(q).__name__ == "DTensor":
        from cutlass_fmha.ops import sharding  # noqa: F401  torch.distributed is there, and now knows the ops
    changes = compiling and not (scale is None or private_torch.has_static_value(scale))
    short = not arguments and not changes and not (q.dim() == v.dim() == 4 and v.shape[3] != q.shape[3])
    if short:
        check.check_tensors((q, k, v), layout, names)
    elif layout == "bhsd":
        check.check_dims((q, k, v), layout, names)  # before they are transposed; the rest comes later
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    given = {name: arguments[name] for name in RESULTS if name in arguments}
    if given:
        return _dispatch_into(given, q, k, v, scale, causal, return_lse, layout, row, names, arguments)
    if not short and not compiling:
        check_features.check_features((q, k, v), Features(**arguments), names)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    if short:
        output, lse = dispatcher.call("forward", q, k, v, scale, causal, return_lse, row)
    else:
        if compiling:
            scale, arguments = _numbers_that_change(scale, arguments)
        output, lse = dispatcher.call("attend", q, k, v, scale, causal, return_lse, row, **arguments)
    return (output.transpose(1, 2) if layout == "bhsd" else output), lse


def _dispatch_into(
    given: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    row: str | None,
    names: Names,
    arguments: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The rest of ``_dispatch`` where there is something to write to. The layout is ``given``'s alone."""
    if type(q).__name__ == "DTensor":
        raise NotImplementedError("out and lse are not taken with DTensors: leave them out")
    said: Mapping[str, Any] = {name: x for name, x in arguments.items() if name not in given}
    compiling, out, lse = torch.compiler.is_compiling(), given.get("out"), given.get("lse")
    if not compiling or out is None or (lse is None and return_lse):
        sizes = check_features.check_features((q, k, v), Features(**said), names)
        if not compiling:
            results.check_results(given, sizes, layout, (names[0], q))
            tensors = {name: x for name, x in said.items() if isinstance(x, Tensor)}
            results.check_apart_before(given, dict(zip(names, (q, k, v), strict=True)) | tensors)
        if out is None:
            out = q.new_empty(sizes.out_shape)
            out = out.transpose(1, 2) if layout == "bhsd" else out
        if lse is None and return_lse:
            lse = q.new_empty(sizes.lse_shape, dtype=torch.float32)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    if compiling:
        scale, said = _numbers_that_change(scale, said)
    to = out.transpose(1, 2) if layout == "bhsd" else out
    torch.ops.cutlass_fmha.attend_out(q, k, v, to, lse, scale, causal, row, **said)
    return out, lse


def _numbers_that_change(scale: float, arguments: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Scale and arguments of the op in a graph: numbers that may take any value there go in a tensor."""
    numbers = (scale, arguments.get("softcap", 0.0), arguments.get("dropout_p", 0.0))
    if all(private_torch.has_static_value(number) for number in numbers):
        return scale, arguments
    one = torch.ones((), dtype=torch.float64, device="cpu")
    rest = {name: value for name, value in arguments.items() if name not in ("softcap", "dropout_p")}
    return 1.0, {**rest, "numbers": torch.stack([one * number for number in numbers])}


def _same_leading(query: object, key: object, value: object, enable_gqa: bool) -> bool:
    """The usual case: four dimensions, nothing to broadcast."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    last = 1 if enable_gqa else 2
    try:
        return query.shape[:last] == key.shape[:last] == value.shape[:last]
    except RuntimeError:  # a nested tensor has no shape
        return False


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """The output's leading sizes, and four-dimensional views (copies where dimensions can't be merged)."""
    tensors = (query, key, value)
    own = 3 if enable_gqa else 2  # trailing dimensions that do not broadcast
    for name, tensor in zip(check.NAMES, tensors, strict=True):
        if tensor.dim() < own:
            needed = "[..., num_heads, seqlen, head_dim]" if enable_gqa else "[..., seqlen, head_dim]"
            raise ValueError(f"{name} must have at least {own} dimensions, {needed}, got shape {tuple(tensor.shape)}")
    try:
        lead = torch.broadcast_shapes(*(tensor.shape[:-own] for tensor in tensors))
    except RuntimeError:
        hint = "" if enable_gqa else " (enable_gqa=True lets key and value have fewer heads)"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"query, key and value must have leading dimensions that broadcast, got shapes {shapes}{hint}"
        ) from None
    expanded = [tensor.expand(*lead, *tensor.shape[-own:]) for tensor in tensors]
    while expanded[0].dim() < 4:
        expanded = [tensor.unsqueeze(0) for tensor in expanded]
    q, k, v = (tensor.flatten(0, tensor.dim() - 4) for tensor in expanded)
    return (*lead, query.shape[-3]) if enable_gqa else tuple(lead), (q, k, v)


def _four_dims(out: Tensor, query: Tensor, value: Tensor, lead: tuple[int, ...] | None) -> Tensor:
    """``scaled_dot_product_attention``'s ``out`` as [batch, num_heads, seqlen_q, head_dim], a view of it."""
    check.check_tensor("out", out)
    if lead is None:
        return out
    shape = (*lead, query.shape[-2], value.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    try:
        return out.view(*query.shape[:-1], value.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"out must have leading dimensions that lie in memory as one, got strides {tuple(out.stride())}"
        ) from None


def _of_scores(attn_mask: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A mask or a bias that goes with ``shape``, [..., seqlen_q, seqlen_k], in four dimensions at most."""
    check.check_optional_tensor("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, dtype, torch.float32):
        raise ValueError(
            f"attn_mask must be bool, or of query's dtype {check.dtype_name(dtype)} or float32, "
            f"got {check.dtype_name(attn_mask.dtype)}"
        )
    sizes = tuple(attn_mask.shape)
    own = shape[max(0, len(shape) - len(sizes)) :]
    if sizes != own and (
        len(own) < len(sizes) or any(size not in (1, want) for size, want in zip(sizes, own, strict=True))
    ):
        raise ValueError(
            f"attn_mask must be broadcastable to {shape}, [..., seqlen_q, seqlen_k], got shape {tuple(attn_mask.shape)}"
        )
    if len(shape) < 5 or attn_mask.dim() < 4:
        return attn_mask
    return attn_mask.expand(*shape[:-3], *attn_mask.shape[-3:]).flatten(0, len(shape) - 4)


def have_contiguous_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    try:
        return query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    except RuntimeError:  # a sparse tensor has no strides
        return False


def contiguous_rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    try:
        if tensor.stride(-1) == 1:
            return tensor
    except RuntimeError:  # a sparse tensor has no strides
        pass
    if jagged.is_jagged(tensor):
        return jagged.contiguous_rows(tensor)
    check.check_tensor(name, tensor)
    return tensor.clone(memory_format=torch.contiguous_format)  # contiguous() leaves an empty one as it is
