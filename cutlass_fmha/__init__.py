"""Exact fused attention for sm_89 and sm_120 GPUs: CUTLASS templates, picked by shape and device.

>>> import cutlass_fmha
>>> out = cutlass_fmha.attention(q, k, v, causal=True)  # [batch, seqlen, num_heads, head_dim]
>>> print(cutlass_fmha.explain(q, k, v, causal=True))   # which kernel ran, and why
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

try:
    __version__ = _version("cutlass-fmha")
except _PackageNotFoundError:  # the sources, found before the installed package: the next import says so
    __version__ = "of the sources"

#: Why the package can't be used, for the command line, whose `info` says so. Others get it raised.
import_error: Exception | None = None


def _runs_as_a_command() -> bool:
    """Whether the package is imported for `python -m cutlass_fmha` or `cutlass-fmha`."""
    program = _sys.argv[0] if _sys.argv else ""
    if program == "-m":  # while Python looks for the module that -m names, which imports the package of it
        return _sys.orig_argv[-len(_sys.argv)].endswith("cutlass_fmha")
    return _Path(program).stem == "cutlass-fmha"


def _refuse_a_part(extension: str | None) -> None:
    """Raises ImportError where a file of the extension ends before it should, as after a copy that broke off: the
    loader would end the process there, without a word."""
    if extension is None or _sys.platform != "linux":
        return
    with open(extension, "rb") as file:
        head = file.read(64)
    begin, of_each, count = (int.from_bytes(head[at : at + size], "little") for at, size in ((40, 8), (58, 2), (60, 2)))
    if head[:4] == b"\x7fELF" and begin + of_each * count > _Path(extension).stat().st_size:  # its last table
        _sys.modules["cutlass_fmha._C"] = None  # type: ignore[assignment]  # `info` won't load it either
        raise ImportError(f"{extension} is a part of what it should be: install the package anew")


try:
    try:
        if _runs_as_a_command() and (_found := _find_spec("cutlass_fmha._C")) is not None:
            _refuse_a_part(_found.origin)
        _import_module("cutlass_fmha._C")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the compiled extension cutlass_fmha._C is not in {__path__[0]}: install the package with "
            "`pip install .`, and start Python outside the source tree or with -P"
        ) from error

    from cutlass_fmha.attention import attention
    from cutlass_fmha.cascade import cascade_attention, merge_states
    from cutlass_fmha.dispatch.explain import explain
    from cutlass_fmha.dispatch.gradients import set_deterministic_workspace
    from cutlass_fmha.dropout import dropout_mask
    from cutlass_fmha.errors import UnsupportedError
    from cutlass_fmha.gates import explain_swiglu_mlp, geglu, gelu_and_mul, silu_and_mul, swiglu, swiglu_mlp
    from cutlass_fmha.kv_cache import with_kv_cache
    from cutlass_fmha.launch.workspace import Workspace
    from cutlass_fmha.log import configure as _configure_log
    from cutlass_fmha.memory.plan import memory_plan
    from cutlass_fmha.norm import rms_norm
    from cutlass_fmha.qk_norm_rope import qk_norm_rope
    from cutlass_fmha.rotary import rotary, rotary_qk
    from cutlass_fmha.scaled_dot_product import scaled_dot_product_attention
    from cutlass_fmha.torch_sdpa import sdpa

    _configure_log()
except Exception as _error:  # whatever a torch that doesn't fit here makes of it
    if not _runs_as_a_command():
        raise
    import_error = _error

__all__ = [
    "UnsupportedError",
    "Workspace",
    "__version__",
    "attention",
    "cascade_attention",
    "dropout_mask",
    "explain",
    "explain_swiglu_mlp",
    "geglu",
    "gelu_and_mul",
    "memory_plan",
    "merge_states",
    "qk_norm_rope",
    "rms_norm",
    "rotary",
    "rotary_qk",
    "scaled_dot_product_attention",
    "sdpa",
    "set_deterministic_workspace",
    "silu_and_mul",
    "swiglu",
    "swiglu_mlp",
    "with_kv_cache",
]
