"""From ``attention``'s keyword arguments about features to those of the op ``attend``.

The op has numbers and tensors where a caller says a tuple, leaves something to be chosen, or says nothing
with None, 0 or False. What says nothing is left out: a call that is left with no arguments is a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import dropout
from cutlass_fmha.arguments.check import (
    check_optional_tensor,
    check_tensor,
    dtype_name,
    flag,
    integer,
    number_of,
    shown,
)
from cutlass_fmha.arguments.results import LSE_ALONE, RESULTS
from cutlass_fmha.arguments.signature import refuse_name
from cutlass_fmha.features import NO_LIMIT

TENSORS = frozenset(
    {"mask", "bias", "prefix_lengths", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"}
    | {"seqused_k", "leftpad_k", "page_table", "cache_batch_idx"}
)
INTEGERS = frozenset({"max_seqlen_q", "max_seqlen_k", "num_splits", "deterministic_workspace"})
FLOATS = frozenset({"softcap", "dropout_p"})
OTHERS = frozenset({"window", "block_mask", "dropout_seed", "batch_invariant", "deterministic"})

#: torch.randint's upper end for int64: all numbers that are not negative but the last.
SEEDS = 2**63 - 1


def op_arguments(
    query: Tensor, keywords: Mapping[str, Any], query_name: str = "query", results: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The op's keyword arguments; empty when nothing is said. ``results``: those of ``RESULTS`` to take.

    Raises TypeError for a name or a type that ``attention`` does not take, ValueError for some wrong values.
    """
    if not isinstance(query, Tensor):
        check_tensor(query_name, query)  # type: ignore[unreachable]
    arguments: dict[str, Any] = {}
    others = False
    for name, value in keywords.items():
        if name in TENSORS:
            if value is not None:
                check_optional_tensor(name, value)
                arguments[name] = value
        elif name in INTEGERS:
            if value is not None:
                arguments[name] = integer(name, value)
        elif name in FLOATS:
            if value is not None and (number := number_of(name, value)) != 0.0:
                arguments[name] = number
        elif name in RESULTS:
            if value is None:
                continue
            if name not in results:
                raise TypeError(
                    LSE_ALONE
                    if results
                    else f"{name} is where a call writes to, which is none of its problem: leave it out"
                )
            arguments[name] = _tensor(name, value)
        elif name in OTHERS:
            others = True
        else:
            refuse_name("attention", name)
    if "sinks" in arguments:
        arguments["sinks"] = _sinks(query, arguments["sinks"])
    if others:
        arguments.update(window_sides(keywords.get("window")))  # torch 2.6 compiles no |=
        arguments.update(_block_mask(keywords.get("block_mask")))
        for name in ("batch_invariant", "deterministic"):
            if (said := keywords.get(name)) is not None and flag(name, said):
                arguments[name] = True
    if "dropout_p" in arguments:
        arguments["dropout_seed"] = _seed(query, keywords.get("dropout_seed"))
    elif others and (seed := keywords.get("dropout_seed")) is not None:
        _check_seed(seed)  # which says nothing without dropout
    return arguments


def _tensor(name: str, value: Any) -> Tensor:
    check_optional_tensor(name, value)
    found: Tensor = value
    return found


def window_sides(window: Any) -> dict[str, Any]:
    """A pair (left, right); None and -1 are no limit."""
    if window is None:
        return {}
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        way_out = ": pass a mask, or numbers that the host knows" if isinstance(window, Tensor) else ""
        raise TypeError(f"window must be a pair (left, right) or None, got {shown(window)}{way_out}")
    sides = zip(("window_left", "window_right"), window, strict=True)
    given = {name: integer(name, side) for name, side in sides if side is not None}
    return {name: side for name, side in given.items() if side != NO_LIMIT}


def _block_mask(block_mask: Any) -> dict[str, Any]:
    """A triple (block_counts, block_indices, (block_m, block_n))."""
    if block_mask is None:
        return {}
    if not isinstance(block_mask, (tuple, list)) or len(block_mask) != 3:
        raise TypeError(
            "block_mask must be a triple (block_counts, block_indices, (block_m, block_n)) or None, "
            f"got {type(block_mask).__name__}"
        )
    counts, indices, block = block_mask
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise TypeError(f"block_mask must end with a pair (block_m, block_n), got {shown(block)}")
    return {
        "block_counts": _tensor("block_counts", counts),
        "block_indices": _tensor("block_indices", indices),
        "block_m": integer("block_m", block[0], or_else=""),
        "block_n": integer("block_n", block[1], or_else=""),
    }


def _sinks(query: Tensor, sinks: Tensor) -> Tensor:
    """In the dtype that scores are computed in. The kernels read fp32."""
    if sinks.dtype not in (query.dtype, torch.float32):
        raise ValueError(
            f"sinks must be float32 or of the tensors' dtype {dtype_name(query.dtype)}, got {dtype_name(sinks.dtype)}"
        )
    return sinks.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _check_seed(seed: Any) -> None:
    if isinstance(seed, Tensor):
        dropout.check_seed(seed)
    else:
        integer("dropout_seed", seed)


def _seed(query: Tensor, seed: Any) -> Tensor:
    """int64 [1] on the tensors' device. Drawn there, without a copy: a replayed CUDA graph draws anew."""
    if seed is None:
        return torch.randint(SEEDS, (1,), dtype=torch.int64, device=query.device)
    if isinstance(seed, Tensor):
        return seed
    return dropout.seed_tensor(integer("dropout_seed", seed), query.device)
