"""``attention``: what a caller says, turned into one call of the op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from cutlass_fmha import arrays, autocast, private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arguments.results import OUT, RESULTS
from cutlass_fmha.arguments.signature import lists_features, refuse_positions
from cutlass_fmha.call import call_attention
from cutlass_fmha.launch.plan import NOTHING

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
        deterministic_workspace: bytes that they may take for dS, and for the sums of a broadcast bias;
            ``set_deterministic_workspace``'s when None.

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
    found: tuple[Tensor, Tensor | None] = call_attention(
        q, k, v, scale, causal, return_lse, layout, row, ("q", "k", "v"), arguments
    )
    return found if return_lse else found[0]
