"""Attention of vLLM's models through this package.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls ``plugin`` itself: an installed cutlass_fmha is among its plugins (the entry point group
vllm.general_plugins), which changes nothing until that backend is asked for. See docs/vllm.md.

Made for vLLM 0.33, which is imported by ``register`` only.
"""

from __future__ import annotations

from typing import Any

from cutlass_fmha import log

NAME = "CUSTOM"
"""The backend's name: of vLLM's names the one that is there for others."""

BACKEND = "cutlass_fmha.integrations.vllm_backend.Backend"


def plugin() -> None:
    """What vLLM calls: ``register``, or a line in the log why not. It must not stop vLLM."""
    try:
        register()
    except ImportError as error:
        log.warn_once(("vLLM", str(error)), "vLLM's attention backend %s is not cutlass_fmha: %s", NAME, error)


def register() -> None:
    """Make this package what vLLM's attention backend CUSTOM is, in this process.

    A name of our own would be lost on the way to vLLM's other processes, which read the configuration before
    they load plugins. Where another plugin is CUSTOM already it stays that, and the log says so. Raises
    ImportError when vLLM is missing or older than this is made for.
    """
    try:
        import vllm.v1.kv_cache_layout  # noqa: F401  before it, caches lay in memory in other ways
        from vllm.v1.attention.backends import registry
    except ImportError as error:
        raise ImportError(f"this integration needs vLLM 0.33 or newer (pip install vllm): {error}") from error
    slot: Any = registry.AttentionBackendEnum[NAME]
    if slot.is_overridden() and slot.get_path() != BACKEND:
        log.warn_once(
            ("vLLM", slot.get_path()),
            "vLLM's attention backend %s is %s, not cutlass_fmha: VLLM_PLUGINS says which plugins to load",
            NAME,
            slot.get_path(),
        )
        return
    registry.register_backend(slot, BACKEND)
