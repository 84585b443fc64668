from types import SimpleNamespace


def get_parallel():
    return get_parallel.bag


def get_exec():
    return get_exec.bag


get_parallel.bag = SimpleNamespace(attn_dcp_size=1)
get_exec.bag = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
