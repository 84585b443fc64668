"""Stands in for the module of SGLang 0.5.23."""

from types import SimpleNamespace

_EXEC = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
_PARALLEL = SimpleNamespace(attn_dcp_size=1)


def get_parallel():
    return _PARALLEL


def get_exec():
    return _EXEC
