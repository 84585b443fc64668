"""From ``attention``'s keyword arguments about features to those of the op ``attend``.

The op has numbers and tensors where a caller says a tuple, leaves something to be chosen, or says nothing
with None, 0 or False. What says nothing is left out: a call that is left with no arguments is a plain one.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.check import check_tensor, dtype_name
from cutlass_fmha.features import NO_LIMIT

TENSORS = frozenset(
    {"mask", "bias", "prefix_lengths", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"}
    | {"seqused_k", "leftpad_k", "page_table", "cache_batch_idx"}
)
INTEGERS = frozenset({"max_seqlen_q", "max_seqlen_k", "num_splits"})
FLOATS = frozenset({"softcap", "dropout_p"})
OTHERS = frozenset({"window", "block_mask", "dropout_seed", "batch_invariant"})

#: torch.randint's upper end for int64: all numbers that are not negative but the last.
SEEDS = 2**63 - 1


def op_arguments(query: Tensor, keywords: Mapping[str, Any], query_name: str = "query") -> dict[str, Any]:
    """The op's keyword arguments; empty when nothing is said.

    Raises TypeError for a name or a type that ``attention`` does not take, ValueError for some wrong values.
    """
    check_tensor(query_name, query)
    arguments: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in TENSORS:
            if value is not None:
                arguments[name] = _tensor(name, value)
        elif name in INTEGERS:
            if value is not None:
                arguments[name] = _integer(name, value)
        elif name in FLOATS:
            if value is not None and (number := _number(name, value)) != 0.0:
                arguments[name] = number
        elif name not in OTHERS:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    if "sinks" in arguments:
        arguments["sinks"] = _sinks(query, arguments["sinks"])
    arguments |= _window(keywords.get("window"))
    arguments |= _block_mask(keywords.get("block_mask"))
    if _flag("batch_invariant", keywords.get("batch_invariant")):
        arguments["batch_invariant"] = True
    if "dropout_p" in arguments:
        arguments["dropout_seed"] = _seed(query, keywords.get("dropout_seed"))
    return arguments


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(value).__name__}")
    return value


def _integer(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def _window(window: Any) -> dict[str, Any]:
    """A pair (left, right); None and -1 are no limit."""
    if window is None:
        return {}
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) or None, got {window!r}")
    sides = zip(("window_left", "window_right"), window, strict=True)
    given = {name: _integer(name, side) for name, side in sides if side is not None}
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
        raise TypeError(f"block_mask must end with a pair (block_m, block_n), got {block!r}")
    return {
        "block_counts": _tensor("block_counts", counts),
        "block_indices": _tensor("block_indices", indices),
        "block_m": _integer("block_m", block[0]),
        "block_n": _integer("block_n", block[1]),
    }


def _sinks(query: Tensor, sinks: Tensor) -> Tensor:
    """In the dtype that scores are computed in. The kernels read fp32."""
    if sinks.dtype not in (query.dtype, torch.float32):
        raise ValueError(
            f"sinks must be float32 or of the tensors' dtype {dtype_name(query.dtype)}, "
            f"got {dtype_name(sinks.dtype)}"
        )
    return sinks.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _seed(query: Tensor, seed: Any) -> Tensor:
    """int64 [1] on the tensors' device. Drawn there, without a copy: a replayed CUDA graph draws anew."""
    if seed is None:
        return torch.randint(SEEDS, (1,), dtype=torch.int64, device=query.device)
    if isinstance(seed, Tensor):
        return seed
    seed = _integer("dropout_seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must fit in 64 bits, got {seed}")
    return torch.full((1,), seed, dtype=torch.int64, device=query.device)
