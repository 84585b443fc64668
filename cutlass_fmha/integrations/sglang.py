"""Attention of SGLang's models through this package.

    sglang serve --model-path MODEL --attention-backend cutlass_fmha --page-size 64

SGLang calls ``register`` itself: an installed cutlass_fmha is among its plugins (the entry point group
sglang.srt.plugins), which only adds that name. See docs/sglang.md.

Made for SGLang 0.5.23, which is imported by ``register`` only.
"""

from __future__ import annotations

from typing import Any

NAME = "cutlass_fmha"
"""The backend that ``register`` adds."""


def register() -> str:
    """Make "cutlass_fmha" an attention backend of SGLang in this process; returns the name.

    Raises ImportError when SGLang is missing or has no such registry. SGLang logs what a plugin raises, and
    goes on without it.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        raise ImportError(f"this integration needs SGLang 0.5.23 or newer (pip install sglang): {error}") from error
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)
    return NAME


def create(runner: Any) -> Any:
    """What SGLang calls for a model's runner: the backend. Raises NotImplementedError with the reason."""
    from cutlass_fmha.integrations import sglang_backend

    return sglang_backend.Backend(runner)
