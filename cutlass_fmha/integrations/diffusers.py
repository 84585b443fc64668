"""Attention of Hugging Face diffusers models through this package.

    from cutlass_fmha.integrations import diffusers
    diffusers.register()
    pipeline.transformer.set_attention_backend("cutlass_fmha")

The names of diffusers' backends are an Enum, which ``register`` adds a member to, and the choice of a model's
backend a method, which it wraps. See docs/diffusers.md.

Works with diffusers 0.42, which is imported by ``register`` only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from cutlass_fmha import log
from cutlass_fmha.attention import attention
from cutlass_fmha.contiguous import contiguous_rows, have_contiguous_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAME = "cutlass_fmha"
"""The backend that ``register`` adds."""


def register() -> str:
    """Make "cutlass_fmha" a backend of diffusers' dispatcher, as "flash" or "sage" is; returns the name.

    Then ``model.set_attention_backend("cutlass_fmha")``, ``with attention_backend("cutlass_fmha"):`` and
    ``dispatch_attention_fn(..., backend="cutlass_fmha")`` take it. The first of these warns of attention
    processors that won't ask the dispatcher. Raises ImportError when diffusers is missing or has no such
    dispatcher.
    """
    try:
        from diffusers.models import attention_dispatch, modeling_utils
    except ImportError as error:
        raise ImportError(f"this integration needs diffusers 0.42 or newer (pip install diffusers): {error}") from error
    names: Any = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_names_.append(NAME.upper())
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
        type.__setattr__(names, NAME.upper(), member)
    attention_dispatch._AttentionBackendRegistry.register(names(NAME))(attention_forward)
    models: Any = modeling_utils.ModelMixin
    models.set_attention_backend = _told(models.set_attention_backend)
    return NAME


def _told(choose: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """diffusers' choice of a model's backend, which leaves out silently what never asks the dispatcher."""
    if hasattr(choose, NAME):
        return choose

    @functools.wraps(choose)
    def told(self: Any, backend: str) -> None:
        choose(self, backend)
        processors = {type(getattr(module, "processor", None)) for module in self.modules()} - {type(None)}
        if backend.lower() == NAME and (deaf := sorted(x.__name__ for x in processors if not _asks(x))):
            model, which = type(self).__name__, ", ".join(deaf)
            log.warn_once(
                ("diffusers", model, which),
                "%s: %s won't ask diffusers' dispatcher, so %s is not used there: within "
                "`with cutlass_fmha.sdpa():` it is, where they call torch's attention",
                *(model, which, NAME),
            )

    vars(told)[NAME] = True
    return told


def _asks(processor: Any) -> bool:
    """Whether a class of processors has a place for a backend, or asks for the active one."""
    code = getattr(processor.__call__, "__code__", None)
    return hasattr(processor, "_attention_backend") or "dispatch_attention_fn" in getattr(code, "co_names", ())


# The dispatcher passes on what is named here, and drops the rest.
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What the dispatcher calls.

    query [batch, seqlen_q, num_heads, head_dim], key and value [batch, seqlen_k, num_heads_kv, head_dim], of
    fewer heads only with enable_gqa. Returns the output, [batch, seqlen_q, num_heads, head_dim_v], and with
    return_lse the LSE, float32 [batch, num_heads, seqlen_q].

    attn_mask: bool, False hides a key, or numbers to add to the scores: [batch, seqlen_k] as the native
    backend has it, or broadcastable to [batch, num_heads, seqlen_q, seqlen_k]. is_causal: top-left.
    window_size: keys to the left and right, -1 for all.

    Raises NotImplementedError for context parallelism.
    """
    if _parallel_config is not None:
        raise NotImplementedError("cutlass_fmha has no context parallelism in diffusers: use another backend.")
    if not enable_gqa and key.size(2) != query.size(2):
        raise ValueError(f"key has {key.shape[2]} heads and query {query.shape[2]}: pass enable_gqa=True.")
    said: dict[str, Any] = {"dropout_p": dropout_p} if dropout_p else {}
    if window_size != (-1, -1):
        said["window"] = window_size
    if attn_mask is not None:
        if attn_mask.dim() == 2 and attn_mask.shape == (query.size(0), key.size(1)):
            attn_mask = attn_mask[:, None, None, :]
        said["mask" if attn_mask.dtype is torch.bool else "bias"] = attn_mask
    if return_lse:
        said["return_lse"] = True
    causal = "top-left" if is_causal else False
    if not have_contiguous_rows(query, key, value):
        query, key, value = map(contiguous_rows, "qkv", (query, key, value))
    found: Tensor | tuple[Tensor, Tensor] = attention(query, key, value, causal=causal, scale=scale, **said)
    return found
