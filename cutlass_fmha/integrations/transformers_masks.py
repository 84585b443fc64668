"""What transformers' masks mean, in the words of ``attention``. Imports transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers.masking_utils
from torch import Tensor
from torch.nn import functional
from transformers.utils.import_utils import is_tracing

from cutlass_fmha.integrations.padding import SAID, Said, packing, padding

masking_utils: Any = transformers.masking_utils  # its hints say less than it takes
sdpa_mask = masking_utils.sdpa_mask
if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("the masks of the installed one have no q_offset")

_Function = Callable[..., Any]


class Pattern(NamedTuple):
    """What a mask function of transformers says."""

    causal: bool
    #: Keys that are further away than this are hidden.
    reach: int | None = None
    #: Of each token [batch, seqlen]: which of the sequences in its row it belongs to.
    sequences: Tensor | None = None


def _code(factory: str, *arguments: Any) -> object:
    """What the mask functions of a factory share, that of transformers' installed version if it has it."""
    made = getattr(masking_utils, factory, None)
    return made(*arguments).__code__ if made else object()


_BOTH = _code("and_masks")
_LEFT = _code("sliding_window_overlay", 1)
_AROUND = _code("sliding_window_bidirectional_overlay", 1)
_PACKED = _code("packed_sequence_mask_function", None)
_REMAPPED = _code("remap_positions_for_packed_sequence", None, None)


def pattern(function: _Function) -> Pattern | None:
    """What a mask function says; None when it is none of those that lengths and windows can say."""
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(causal=False)
    if getattr(function, "__code__", None) is not _BOTH:
        return None
    parts = _inside(function)["mask_functions"]
    if len(parts) != 2:
        return None
    # Until 5.20 the packed overlay came last, and the other function counted in the row: the same mask.
    overlay, base = reversed(parts) if getattr(parts[1], "__code__", None) is _PACKED else parts
    code = getattr(overlay, "__code__", None)
    if code is _PACKED:
        remapped = getattr(base, "__code__", None) is _REMAPPED
        of_each = pattern(_inside(base)["mask_function"] if remapped else base)
        return of_each and of_each._replace(sequences=_inside(overlay)["packed_sequence_mask"])
    of_base = pattern(base)
    if code is _LEFT and of_base == Pattern(causal=True):
        return Pattern(causal=True, reach=_inside(overlay)["sliding_window"] - 1)
    if code is _AROUND and of_base == Pattern(causal=False):
        return Pattern(causal=False, reach=_inside(overlay)["sliding_window"])
    return None


def _inside(function: _Function) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: _Function = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of "cutlass_fmha_flash": as ``flash_attention_mask``, but nothing that is masked is dropped.

    Returns:
        None where all keys are there, the last query stands at the last one and a window hides none. Else a
        mask [batch, keys seen] that carries what it means (``Said``), and in numbers for layers that get a copy:
        True for a token, or from 1 on which of the packed sequences it is of; or what ``sdpa_mask`` returns
        for patterns that lengths and windows can't say, and in graphs, where contents can't be looked at.
    """

    def dense() -> Tensor | None:
        given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
        mask: Tensor | None = sdpa_mask(*given, **{**kwargs, "allow_is_causal_skip": False})
        return mask

    if is_tracing(attention_mask) or (isinstance(q_offset, Tensor) and is_tracing(q_offset)):
        plain = mask_function is masking_utils.causal_mask_function and attention_mask is None
        known = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        return None if plain and known else dense()
    says, first = pattern(mask_function), int(q_offset) - kv_offset
    if says is None:
        return dense()
    # Behind the queries, a cache of fixed size has room.
    seen = first + q_length if says.causal else kv_length
    own_places = q_length == kv_length and first == 0
    if not max(first, 0) <= seen <= kv_length or not (own_places or says.sequences is None):
        return dense()
    if says.reach is not None and not (own_places or says.causal):
        return dense()
    arguments: dict[str, Any] = {}
    if says.reach is not None and seen - 1 > says.reach:
        arguments["window"] = (says.reach, says.reach)
    tokens = None
    if attention_mask is not None:
        if attention_mask.shape[1] == seen < kv_offset + seen:
            # One that this function made: ``generate`` has it made once, and a model without a dict of masks again.
            attention_mask = functional.pad(attention_mask, (kv_offset, 0))
        tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        tokens = tokens[:, kv_offset : kv_offset + seen]
        arguments |= padding(tokens, q_length, says.causal or "window" in arguments)
    if says.sequences is not None:
        tokens = says.sequences + 1
        arguments |= packing(says.sequences)
    if not arguments and seen == kv_length:
        return None
    device = kwargs.get("device", "cpu")
    if q_length == 1 and seen < kv_length and "mask" not in arguments:
        # Decoding: the cache as it is, so that each step is the same call.
        arguments.setdefault("seqused_k", torch.full((batch_size,), seen, dtype=torch.int32, device=device))
    if tokens is None:
        tokens = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, seen)
    tokens = tokens.view_as(tokens)
    setattr(tokens, SAID, Said(says.causal, seen, arguments))
    return tokens
