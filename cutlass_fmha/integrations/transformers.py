"""Attention of Hugging Face transformers models through this package.

    from cutlass_fmha.integrations import transformers
    transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="cutlass_fmha")

A name is registered for the attention function and for the mask function: without the second, transformers
hands every attention function a mask of None and padding is silently attended to.

Works with transformers 5.x, which is imported by ``register`` only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from cutlass_fmha.attention import attention

if TYPE_CHECKING:
    from torch import Tensor

NAME = "cutlass_fmha"
"""The ``attn_implementation`` that ``register`` adds."""

# What a model may pass and SDPA honours or an eager forward would: dropping one changes the result without a
# word.
_UNSUPPORTED = {
    "position_bias": "a position bias",
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences (cu_seq_lens)",
    "cu_seq_lens_k": "packed sequences (cu_seq_lens)",
}


def register(name: str = NAME) -> str:
    """Make ``attn_implementation=name`` available to every transformers model; returns the name.

    Raises ImportError when transformers is missing or too old to have both registries.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"this integration needs transformers 5 or newer (pip install transformers): {error}"
        ) from error
    AttentionInterface.register(name, attention_forward)
    # sdpa_mask answers None exactly where SDPA's is_causal flag, or no mask at all, says the same: see
    # attention_forward.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


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
    """The function that transformers calls in every attention layer.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k, head_dim];
    returns ([batch, seqlen_q, num_heads, head_dim], None): there are no attention weights to return. scaling:
    softmax scale, 1/sqrt(head_dim) when None. is_causal: ``module.is_causal`` when None.

    attention_mask: bool, False hides a key, or numbers to add to the scores; with one, is_causal has no say,
    as it is part of the mask.

    Raises NotImplementedError for dropout, and for anything else that is not passed on.
    """
    if dropout:
        raise NotImplementedError(
            f"cutlass_fmha has no backward, and dropout ({dropout}) is for training: call model.eval() first."
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "cutlass_fmha never forms the attention weights: attn_implementation='eager' returns them."
        )
    for argument, title in _UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise NotImplementedError(
                f"cutlass_fmha does not support {title} yet, and this model passes {argument}."
            )

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # A mask of None means what it means to SDPA: is_causal aligned top-left, except that a single query (a
    # decoding step) sees every key.
    causal = "top-left" if is_causal and query.shape[2] > 1 else "none"
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    if attention_mask is not None:
        # Masks of a static cache are longer than the keys.
        seen = attention_mask[..., : key.shape[2]]
        mask, bias = (seen, None) if seen.dtype == torch.bool else (None, seen)
        masked = attention(query, key, value, scale=scale, layout="bhsd", mask=mask, bias=bias)
        return masked.transpose(1, 2), None
    output, _ = torch.ops.cutlass_fmha.forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, causal, False, None
    )
    return output, None
