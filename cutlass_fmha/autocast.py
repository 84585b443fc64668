"""torch.autocast: what it does to torch's scaled_dot_product_attention, it does to the ops.

float16, bfloat16 and float32 are cast to autocast's dtype, float64 is not, and inside an op autocast is off:
what a backend computes with is its own choice. A cache of keys and values is never cast, which would copy
all of it at each step: where a call has one, its dtype takes the place of autocast's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from cutlass_fmha import private_torch

#: The dispatch keys, and the device types that they are of.
KEYS = {"AutocastCUDA": "cuda", "AutocastCPU": "cpu"}
DEVICE_TYPES = tuple(KEYS.values())

#: What is cast, and what to.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: What autocast to a dtype makes of an op's arguments. Called as the op is, with the dtype in front.
Rule = Callable[..., Arguments]

T = TypeVar("T")


def off(device_type: str) -> AbstractContextManager[Any]:
    """Without autocast, at least that of a device type."""
    if private_torch.disable_autocast is None or torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    guard: AbstractContextManager[Any] = private_torch.disable_autocast()
    return guard


def dtype_of(tensor: object) -> torch.dtype | None:
    """What autocast casts to on the device of a tensor; None where it is off."""
    if not isinstance(tensor, Tensor):
        return None
    kind = tensor.device.type
    if kind not in DEVICE_TYPES or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(value: T, dtype: torch.dtype) -> T:
    """A tensor of one of ``DTYPES`` in another of them; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in DTYPES and dtype in DTYPES and value.dtype != dtype:
        return value.to(dtype)  # type: ignore[return-value]
    return value


def operands(
    q: T, k: T, v: T, features: Mapping[str, Any], dtype: torch.dtype | None = None
) -> tuple[T, T, T, Mapping[str, Any]]:
    """Query, key, value and features of a call of attention or of its ops, as autocast has them.

    ``dtype``: what autocast casts to; None: what ``dtype_of`` says of q. A bias is cast as torch does it;
    sinks, which are read in float32, become that; slopes are float32 always. With a page table or
    cache_batch_idx key and value are a cache. A float64 query leaves everything as it is.
    """
    dtype = dtype_of(q) if dtype is None else dtype
    if dtype is None or not isinstance(q, Tensor) or q.dtype not in DTYPES:
        return q, k, v, features
    if is_cache(features) and isinstance(k, Tensor):
        dtype = k.dtype
    else:
        k, v = cast(k, dtype), cast(v, dtype)
    wanted = {"bias": dtype, "sinks": torch.float32}
    others = {name: cast(features[name], to) for name, to in wanted.items() if name in features}
    return cast(q, dtype), k, v, {**features, **others}


def is_cache(features: Mapping[str, Any]) -> bool:
    """Whether key and value of a call are a cache, by what it says about them."""
    return features.get("page_table") is not None or features.get("cache_batch_idx") is not None


# ---- the ops -----------------------------------------------------------------------------------------------


def attention_rule(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **features: Any
) -> Arguments:
    """Of ``forward`` and ``attend``."""
    *tensors, said = operands(query, key, value, features, dtype)
    return (*tensors, *rest), dict(said)


def as_it_is(dtype: torch.dtype, *args: Any, **kwargs: Any) -> Arguments:
    """Of ops that torch would cast nothing for, such as elementwise ones: they compute in float32 anyway."""
    return args, kwargs


def register(library: torch.library.Library, name: str, rule: Rule) -> None:
    """Under autocast the op is called anew, without it, with what ``rule`` makes of the arguments."""
    for key, device_type in KEYS.items():
        library.impl(name, functools.partial(_call, name, device_type, rule), key)


def _call(name: str, device_type: str, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = rule(torch.get_autocast_dtype(device_type), *args, **kwargs)
    with off(device_type):
        return getattr(torch.ops.cutlass_fmha, name).default(*args, **kwargs)
