"""Stands in for the module of SGLang 0.5.23."""

from types import SimpleNamespace


class ParallelContext: ...


_PARALLEL = ParallelContext()
_PARALLEL.attn_dcp_size = 1


def get_parallel():
    return _PARALLEL


def get_exec():
    return get_exec.bag


get_exec.bag = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
