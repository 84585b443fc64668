"""Attention of Hugging Face transformers models through this package.

    from cutlass_fmha.integrations import transformers
    transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="cutlass_fmha_flash")

Two names, each for an attention function and a mask function: "cutlass_fmha" takes the masks that
transformers makes for SDPA, "cutlass_fmha_flash" says padding by lengths and windows by windows.
docs/transformers.md tells which is for what.

``apply(model)`` has what is beside attention computed by this package, too: norms, rotary embedding, MLPs.

Works with transformers 5.4 and newer, which is imported by ``register`` only.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cutlass_fmha.attention import attention
from cutlass_fmha.call import packed_attention
from cutlass_fmha.contiguous import contiguous_rows, have_contiguous_rows
from cutlass_fmha.integrations.padding import SAID, Said, packing, padding
from cutlass_fmha.integrations.transformers_apply import Applied, apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAME", "Applied", "apply", "attention_forward", "flash_forward", "register"]

NAME = "cutlass_fmha"
"""The ``attn_implementation`` that takes masks as SDPA does. With "_flash" behind it, lengths and windows."""

_HAS_FLASH = "_supports_flash_attn"  # transformers' word for models whose windows and padding lengths can say

# What a model may pass and that changes the result: ours, or what we have no word for.
_PASSED = {
    "softcap": "softcap",
    "s_aux": "sinks",
    "position_bias": "bias",
    "deterministic": "deterministic",
}
_REFUSED = {
    "output_attentions": "attention weights, which are never formed: attn_implementation='eager' has them",
    "head_mask": "a head mask",
    "sinks": "sinks of each query",
    "block_indices": "block-sparse attention",
    "cache": "continuous batching (paged caches)",
    "block_table": "continuous batching (paged caches)",
}
_SIDES = tuple((f"cu_seq_lens_{x}", f"cu_seqlens_{x}", f"max_length_{x}", f"max_seqlen_{x}") for x in "qk")
_NO_INDICES = {"indices": "sparse attention but by a mask: use cutlass_fmha"}
_WITHOUT_MASK = {**_REFUSED, **_NO_INDICES, "cu_seq_lens_q": "packed sequences without masks: use cutlass_fmha_flash"}
_BY_LENGTHS = {**_REFUSED, **_NO_INDICES, "position_bias": "a position bias with lengths: use cutlass_fmha"}


def register(name: str = NAME) -> str:
    """Make ``attn_implementation=name``, and that name with "_flash", available to models; returns the name.

    A model of transformers that would not use one as it is meant raises ValueError when it is told to: one
    that computes its attention itself and, for the second, one that has no flash attention in transformers.

    Raises ImportError when transformers is missing or older than 5.4.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        from cutlass_fmha.integrations.transformers_masks import flash_mask
    except ImportError as error:
        raise ImportError(
            f"this integration needs transformers 5.4 or newer (pip install transformers): {error}"
        ) from error
    # sdpa_mask answers None exactly where SDPA's is_causal flag, or no mask at all, says the same: see
    # attention_forward.
    models: Any = PreTrainedModel
    for each, forward, mask in (
        (name, attention_forward, sdpa_mask),
        (f"{name}_flash", flash_forward, flash_mask),
    ):
        AttentionInterface.register(each, forward)
        AttentionMaskInterface.register(each, mask)
        check = models._check_and_adjust_attn_implementation
        models._check_and_adjust_attn_implementation = _checked(check, each)
    return name


def _checked(check: Callable[..., str], name: str) -> Callable[..., str]:
    """transformers' check of a name, but for ours.

    For names with "flash" in them it looks for a module of flash_attn's functions, as if nothing were
    registered, and some models (gpt-oss) exchange those that they don't know for one from the hub.
    """
    if name in getattr(check, "names", ()):
        return check

    @functools.wraps(check)
    def checked(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation != name:
            return check(self, attn_implementation, *args, **kwargs)
        kind = type(self)
        if kind.__module__.startswith("transformers.models.") and not self._can_set_attn_implementation():
            raise ValueError(f"{kind.__name__} computes its attention itself: {name} would never be called")
        if name.endswith("_flash") and not getattr(self, _HAS_FLASH):
            raise ValueError(
                f"{kind.__name__} has no flash attention in transformers: use {name.removesuffix('_flash')}"
            )
        return str(self.get_correct_attn_implementation(name))

    vars(checked)["names"] = (name, *getattr(check, "names", ()))
    return checked


class _Neighbours:
    """Biases whose keys are neighbours in memory, as kernels for many queries read them. In T5's the heads are.

    A copy takes as long as two layers, and layers share their bias: the last one is kept, until its bias is gone or
    changes. Not in what is captured or compiled, which may run again with other numbers in the same memory.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, tuple[object, ...], Tensor] | None = None

    def of(self, bias: Tensor) -> Tensor:
        strides = bias.stride()
        if strides[-1] == 1 or 0 in strides or bias.size(-2) < _MANY_QUERIES:
            return bias
        if torch.compiler.is_compiling() or bias.is_inference():
            return bias.contiguous()
        stream = None
        if bias.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return bias.contiguous()
            stream = torch.cuda.current_stream(bias.device).cuda_stream
        made = (bias._version, torch.is_grad_enabled(), stream)
        last = self._last
        if last is not None and last[0]() is bias and last[1] == made:
            return last[2]
        copy = bias.contiguous()
        self._last = (weakref.ref(bias, self._forget), made, copy)
        return copy

    def _forget(self, reference: Any) -> None:
        if self._last is not None and self._last[0] is reference:
            self._last = None


_MANY_QUERIES = 32
_neighbours = _Neighbours()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer of a model with "cutlass_fmha".

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim];
    returns ([batch, seqlen_q, num_heads, head_dim_v], None): there are no attention weights to return.
    scaling: softmax scale, 1/sqrt(head_dim) when None. is_causal: ``module.is_causal`` when None.

    attention_mask: bool, False hides a key, or numbers to add to the scores; with one, is_causal and windows
    have no say, as they are part of the mask. Passed on: softcap, s_aux (sinks), position_bias and
    deterministic.

    Raises NotImplementedError for what would have to be dropped.
    """
    said = _said_of_scores(dropout, kwargs, _WITHOUT_MASK if attention_mask is None else _REFUSED)
    if "bias" in said:
        said["bias"] = _neighbours.of(said["bias"])
    if attention_mask is not None:
        # Masks of a static cache are longer than the keys. A slice of all of it would cost 1 us of host time.
        keys, seen = key.size(2), attention_mask
        if seen.size(-1) != keys:
            seen = seen[..., :keys]
        if kwargs.get("cu_seq_lens_q") is not None:
            seen = _apart(seen, kwargs)
        if seen.dtype is torch.bool:
            said["mask"] = seen
        else:
            said["bias"] = seen + said["bias"] if "bias" in said else seen
        return _attend(query, key, value, False, scaling, said)
    # No mask means what it means to SDPA: is_causal aligned top-left, except that a single query (a decoding
    # step) sees every key.
    causal = _is_causal(module, is_causal) and query.shape[2] > 1
    return _attend(query, key, value, "top-left" if causal else False, scaling, said)


def flash_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer of a model with "cutlass_fmha_flash".

    As ``attention_forward``, but the last query stands at the last key, and attention_mask may also be one of
    padding, [batch, seqlen_k seen], 1 (True) for a token, or the number of its sequence, which is passed on as lengths.
    sliding_window: so many keys a query sees on either side, itself included. Passed on, too: cu_seq_lens_q,
    cu_seq_lens_k, max_length_q and max_length_k; without them and padding, position_ids [1, seqlen_q] that begin anew
    say the same. No position_bias.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    said = _said_of_scores(dropout, kwargs, _BY_LENGTHS)
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    found = None if attention_mask is None else getattr(attention_mask, SAID, None)
    if found is None:
        found = _read(attention_mask, queries, keys, _is_causal(module, is_causal), sliding_window)
    arguments = found.arguments
    if kwargs.get("cu_seq_lens_q") is not None:
        if arguments and arguments.keys() & {"mask", "leftpad_k", "seqused_k"}:
            raise ValueError("cu_seq_lens_q and an attention_mask with padding exclude each other.")
        arguments = arguments | _packed(kwargs)
    elif (
        batch == 1 and 1 < queries == found.seen and len(arguments) == ("window" in arguments)
        and (positions := kwargs.get("position_ids")) is not None
        and (packed := _restarts(positions, queries, module))
    ):  # fmt: skip
        arguments = arguments | packed
    if found.seen < keys and (queries > 1 or "seqused_k" not in arguments):
        key, value = key[:, :, : found.seen], value[:, :, : found.seen]
    causal = found.causal and (queries > 1 or "cu_seqlens_q" in arguments)
    return _attend(query, key, value, causal, scaling, {**said, **arguments})


def _apart(mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """A dense mask that also hides what packed sequences have not in common. Graphs have one, where FA2 has none."""
    numbers = []
    for starts, size in zip(_starts(kwargs), mask.shape[-2:], strict=True):
        rows = torch.arange(size, device=mask.device, dtype=starts.dtype)
        numbers.append(torch.searchsorted(starts[1:].contiguous(), rows, right=True))
    own = numbers[0][:, None] == numbers[1]
    return mask & own if mask.dtype is torch.bool else mask.masked_fill(~own, -torch.inf)


def _read(mask: Tensor | None, queries: int, keys: int, causal: bool, window: int | None) -> Said:
    """What a mask says that ``flash_mask`` did not make, and the layer's own window."""
    arguments: dict[str, Any] = {}
    if window is not None and keys > window:
        arguments["window"] = (window - 1, window - 1)
    if mask is None:
        return Said(causal, keys, arguments)
    mask = mask[:, :keys]
    # One of ours that was copied, to another device say, has lost what it carried: its numbers tell sequences.
    numbers = mask.dtype is not torch.bool and mask.shape[1] == queries
    if torch.compiler.is_compiling():
        of_key = mask[:, None, None, :]
        arguments["mask"] = of_key.bool() & (of_key == mask[:, None, :, None]) if numbers else of_key.bool()
    elif numbers and mask.max() > 1:
        arguments |= packing(mask)
    else:
        arguments |= padding(mask.bool(), queries, causal or "window" in arguments)
    return Said(causal, mask.shape[1], arguments)


def _restarts(positions: Tensor, queries: int, module: torch.nn.Module) -> dict[str, Any]:
    """Sequences packed in one row, by positions that begin anew: with a cache, transformers' masks don't tell them.

    A sequence begins at the least position, as for flash_attention_2; gaps, as of images, begin none. The first
    layer of a forward looks, which waits for the device, the others find what it kept. It is known by its coming again.
    """
    if torch.compiler.is_compiling():
        return {}
    kept: Any = getattr(positions, SAID, None)
    if kept is None or kept[0] == id(module) or (kept[1] is not None and kept[1] != positions._version):
        from transformers.utils.import_utils import is_tracing

        if positions.shape != (1, queries) or is_tracing(positions):
            return {}
        version, begins = None if positions.is_inference() else positions._version, positions == positions.min()
        kept = (id(module), version, packing(begins.cumsum(1)) if begins[:, 1:].any() else {})
        setattr(positions, SAID, kept)
    found: dict[str, Any] = kept[2]
    return found


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _said_of_scores(dropout: float, kwargs: dict[str, Any], refused: dict[str, str]) -> dict[str, Any]:
    """The arguments of ``attention`` that a model gave, but for which keys are seen."""
    said: dict[str, Any] = {"dropout_p": dropout} if dropout else {}
    for name, value in kwargs.items():
        if value is None or value is False:
            continue
        if name in refused:
            raise NotImplementedError(f"cutlass_fmha does not support {refused[name]} (this model passes {name}).")
        if name in _PASSED:
            said[_PASSED[name]] = value
    return said


def _starts(kwargs: dict[str, Any]) -> list[Tensor]:
    """Where packed sequences begin, of queries and of keys."""
    found = [kwargs.get(each[0]) for each in _SIDES]
    if any(each is None for each in found):
        raise ValueError("cu_seq_lens_q is only taken with cu_seq_lens_k.")
    return found  # type: ignore[return-value]


def _packed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers' words for packed sequences in ours. A longest length on the device is waited for."""
    said: dict[str, Any] = {}
    for tensor, (_, starts, their_longest, longest) in zip(_starts(kwargs), _SIDES, strict=True):
        said[starts] = tensor if tensor.dtype is torch.int32 else tensor.int()
        if (number := kwargs.get(their_longest)) is not None:
            said[longest] = int(number)
    return said


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | str,
    scaling: float | None,
    said: dict[str, Any],
) -> tuple[Tensor, None]:
    """The one call: [batch, num_heads, seqlen, head_dim] in, [batch, seqlen, num_heads, head_dim] out."""
    if not have_contiguous_rows(query, key, value):  # attention of channels (Florence-2) transposes them
        query, key, value = map(contiguous_rows, "qkv", (query, key, value))
    if "cu_seqlens_q" not in said:
        out: Tensor = attention(query, key, value, causal=causal, scale=scaling, layout="bhsd", **said)
        return out.transpose(1, 2), None  # which is how its memory lies
    return packed_attention(query, key, value, causal=causal, scale=scaling, **said), None
