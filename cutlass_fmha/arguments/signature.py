"""Names of arguments: which functions take which, and what a name from another library is called here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from cutlass_fmha import features

_CAUSAL = 'pass causal=True (the last query sees the last key) or causal="top-left" (torch\'s is_causal)'
_DROPOUT = "pass dropout_p, and dropout_seed for the same numbers again"
_KV_LENGTHS = "pass seqused_k, or call with_kv_cache, which takes cache_seqlens"
_LAYOUT = 'pass layout="bshd" (NHD) or layout="bhsd" (HND)'
_LSE = "pass return_lse=True; the probabilities are never formed"
_MASK = "pass mask (bool, True shows a key) or bias (numbers that are added to the scores)"
_MAX = "pass max_seqlen_q and max_seqlen_k"
_PADDING = "pass mask=keep[:, None, None, :] (bool, True shows a key), seqused_k or packed sequences"
_PAGES = "pass page_table"
_QUANTIZED = "there is no FP8 or INT8 here: pass float16, bfloat16 or float32 tensors without scales"
_SCALE = "pass scale"
_SINKS = "pass sinks"
_SOFTCAP = "pass softcap"
_WINDOW = "pass window=(left, right), where None or -1 is no limit"

#: What other libraries call their arguments (torch, flash_attn, flashinfer, xformers, Triton and Transformer
#: Engine, sageattention, vLLM, transformers), and the way to say the same here.
FOREIGN = {
    "alibi_bias": "pass alibi_slopes",
    "attention_mask": _MASK,
    "attn_bias": "pass bias",
    "attn_mask": _MASK,
    "block_table": _PAGES,
    "block_tables": _PAGES,
    "cache_leftpad": "pass leftpad_k",
    "cache_seqlens": _KV_LENGTHS,
    "cu_seq_lens_k": "pass cu_seqlens_k",
    "cu_seq_lens_q": "pass cu_seqlens_q",
    "cu_seqlens": "pass cu_seqlens_q and cu_seqlens_k",
    "cu_seqlens_kv": "pass cu_seqlens_k",
    "dropout": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "enable_gqa": "leave it out: k and v may have fewer heads, a divisor of q's",
    "generator": _DROPOUT,
    "is_causal": _CAUSAL,
    "k_cache": "call with_kv_cache, which takes k_cache and v_cache",
    "k_descale": _QUANTIZED,
    "kernel_options": "leave it out, or pass row, the name of a kernel",
    "key": "pass q, k and v",
    "key_padding_mask": _PADDING,
    "kv_layout": _LAYOUT,
    "learnable_sink": _SINKS,
    "logits_soft_cap": _SOFTCAP,
    "max_seq_len": _MAX,
    "max_seqlen": _MAX,
    "max_seqlen_kv": "pass max_seqlen_k",
    "need_weights": _LSE,
    "output_attentions": _LSE,
    "p": _DROPOUT,
    "pack_gqa": "leave it out: heads are packed where that is faster",
    "pos_encoding_mode": "pass alibi_slopes, or call rotary first",
    "q_descale": _QUANTIZED,
    "qkv_format": _LAYOUT,
    "query": "pass q, k and v",
    "return_attn_probs": _LSE,
    "return_attn_weights": _LSE,
    "return_softmax": _LSE,
    "return_softmax_lse": _LSE,
    "rotary_cos": "call with_kv_cache, which rotates, or rotary first",
    "rotary_sin": "call with_kv_cache, which rotates, or rotary first",
    "s_aux": _SINKS,
    "scaling": _SCALE,
    "score_mod": "pass bias, softcap or alibi_slopes: no function is compiled into a kernel",
    "seqlens_k": _KV_LENGTHS,
    "sink": _SINKS,
    "sm_margin": "leave it out",
    "sm_scale": _SCALE,
    "sliding_window": _WINDOW,
    "softmax_scale": _SCALE,
    "tensor_layout": _LAYOUT,
    "use_alibi": "pass alibi_slopes",
    "v_cache": "call with_kv_cache, which takes k_cache and v_cache",
    "v_descale": _QUANTIZED,
    "value": "pass q, k and v",
    "window_left": _WINDOW,
    "window_right": _WINDOW,
    "window_size": _WINDOW,
}

Function = TypeVar("Function", bound=Callable[..., Any])


def lists_features(function: Function) -> Function:
    """Has ``inspect.signature`` and help() name every feature that ``function`` takes as ``**features``.

    Parameters of its own would cost each call a quarter of a microsecond. What only catches errors, ``*rest``
    and ``**unknown``, is not listed.
    """
    own = inspect.signature(function)
    catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [each for each in own.parameters.values() if each.kind not in catch_all]
    if "features" in own.parameters and own.parameters["features"].kind == inspect.Parameter.VAR_KEYWORD:
        listed = own.parameters["features"].annotation.removeprefix("Unpack[").removesuffix("]")
        for name, hint in getattr(features, listed).__annotations__.items():
            annotation = getattr(hint, "__forward_arg__", hint)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def refuse_positions(function: str, names: str, given: int) -> NoReturn:
    raise TypeError(
        f"{function}() takes {names} by position and everything else by name, as causal=True or scale=0.1, "
        f"got {given} positional arguments"
    )


def refuse_name(function: str, name: str) -> NoReturn:
    """TypeError for an argument that there is not, with what to say instead where another library has it."""
    import cutlass_fmha

    taken = inspect.signature(getattr(cutlass_fmha, function)).parameters
    hint = FOREIGN.get(name, "")
    said = re.match(r"pass (\w+)", hint)
    if not hint or (said and said[1] not in taken):
        hint = f"help(cutlass_fmha.{function}) lists what it takes"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {hint}")
