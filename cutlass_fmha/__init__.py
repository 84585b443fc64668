"""Exact fused attention for sm_89 and sm_120 GPUs: CUTLASS templates, picked by shape and device.

>>> import cutlass_fmha
>>> out = cutlass_fmha.attention(q, k, v, causal=True)  # [batch, seqlen, num_heads, head_dim]
>>> print(cutlass_fmha.explain(q, k, v, causal=True))   # which kernel ran, and why
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version

try:
    _import_module("cutlass_fmha._C")
except ModuleNotFoundError as error:  # the sources, found before the installed package
    raise ImportError(
        f"the compiled extension cutlass_fmha._C is not in {__path__[0]}: install the package with "
        "`pip install .`, and start Python outside the source tree or with -P"
    ) from error

from cutlass_fmha.attention import attention, scaled_dot_product_attention
from cutlass_fmha.cascade import cascade_attention, merge_states
from cutlass_fmha.dispatch.explain import explain
from cutlass_fmha.dropout import dropout_mask
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.kv_cache import with_kv_cache
from cutlass_fmha.memory.plan import memory_plan
from cutlass_fmha.rotary import rotary
from cutlass_fmha.torch_sdpa import sdpa

__all__ = [
    "UnsupportedError",
    "__version__",
    "attention",
    "cascade_attention",
    "dropout_mask",
    "explain",
    "memory_plan",
    "merge_states",
    "rotary",
    "scaled_dot_product_attention",
    "sdpa",
    "with_kv_cache",
]

__version__ = _version("cutlass-fmha")
