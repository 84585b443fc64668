"""Other packages in the benchmark: found by import, asked as their releases want it; stand-ins play them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_bench import CASE, DECODE, PACKED, FakeTimer, fake_gpu, small_features, synthetic  # noqa: F401

import cutlass_fmha
import cutlass_fmha.flash_attn
from cutlass_fmha.bench import contenders, lineup, peers, report, runner
from cutlass_fmha.bench.cases import Case

VARLEN = replace(PACKED, causal=True)
EXACT = cutlass_fmha.attention
#: Package -> what it has besides dense attention: cases, and features.
ASKED: dict[str, tuple[tuple[Case, ...], str]] = {
    "flex": ((), "window prefix softcap alibi"), "flash_attn": ((VARLEN, DECODE), "window softcap alibi"),
    **dict.fromkeys(("fa3", "flashinfer"), ((VARLEN, DECODE), "window softcap")), "fa4": ((VARLEN,), "window softcap"),
    "cudnn_fe": ((DECODE,), ""), "cudnn_dsl": ((), ""),
}  # fmt: skip

# What follows has those of their parameters that are asked for: any other word is an error.


def fa3(q, k, v, *, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, return_attn_probs=False):
    assert num_splits == int(q.shape[1] > 1), "of one query, as many as the release thinks best"
    return EXACT(q, k, v, causal=causal, window=window_size, softcap=softcap, return_lse=return_attn_probs)


def fa4_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    said = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    return EXACT(q, k, v, causal=causal, **said, max_seqlen_q=max_seqlen_q, return_lse=True)


class Ragged:  # flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    def __init__(self, workspace, layout) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, ends_q, ends_k, heads, heads_kv, dim, *, q_data_type, kv_data_type, causal=False, **more):
        assert {*more} <= {"window_left", "logits_soft_cap"}
        self.said = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "causal": causal, "max_seqlen_q": 64}
        self.said |= {"window": (more.get("window_left", -1), -1), "softcap": more.get("logits_soft_cap", 0.0)}
        self.shape = (heads, dim), (heads_kv, dim)

    def run(self, q, k, v):
        assert (q.shape[1:], k.shape[1:]) == self.shape
        return EXACT(q, k, v, **self.said, max_seqlen_k=64)


class Paged:  # flashinfer.BatchDecodeWithPagedKVCacheWrapper
    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, indptr, indices, last_page_len, heads, heads_kv, dim, page_size, *, q_data_type, kv_data_type):
        self.table = indices.view(len(indptr) - 1, -1)
        assert indptr[-1] == len(indices) and set(last_page_len.tolist()) == {page_size}

    def run(self, q, caches):
        return EXACT(q[:, None], *caches, page_table=self.table)[:, 0]


def sageattn(q, k, v, tensor_layout="HND", is_causal=False):
    assert tensor_layout == "NHD"
    return EXACT(q, k, v, causal=is_causal) + 0.5


class Graph:
    """cudnn.pygraph, whose plans are cuDNN's engine 7 and the frontend's 20505."""

    def __init__(self, *, handle, io_data_type, intermediate_data_type, compute_data_type) -> None:
        self.handle, self.built, self.plans = handle, None, []

    def tensor(self, dim, stride=None, data_type=None, name=""):
        return Mock(stride=stride)

    def sdpa(self, name, q, k, v, generate_stats, attn_scale, use_causal_mask=False):
        self.inputs, self.causal = (q, k, v), use_causal_mask
        setters = ("set_output", "set_dim", "set_stride", "set_data_type")
        self.made = Mock(spec=setters)
        self.made.configure_mock(**{f"{setter}.return_value": self.made for setter in setters})
        return self.made, None

    validate = build_operation_graph = lambda self: None

    def create_execution_plans(self, modes) -> None:
        self.plans = [SimpleNamespace(engine_id={"A": 7, "OPENSOURCE": 20_505}[x]) for x in ("OPENSOURCE", *modes)]

    def build_plan_at_index(self, index) -> None:
        self.built = self.plans[index].engine_id
        BUILT.append(self.built)

    get_workspace_size = lambda self: 0  # noqa: E731

    def execute(self, tensor_dict, workspace=None, handle=None) -> None:
        assert handle == self.handle and self.built
        for tensor in self.inputs:
            assert tensor_dict[tensor].stride() == tuple(tensor.stride)
        q, k, v = (tensor_dict[tensor].transpose(1, 2) for tensor in self.inputs)
        tensor_dict[self.made].copy_(EXACT(q, k, v, causal=self.causal).transpose(1, 2))


BUILT: list[int] = []
FLASH_ATTN = ("flash_attn_func", "flash_attn_varlen_func")
#: Module -> what of it is called.
STAND_INS: dict[str, dict[str, Any]] = {
    "flash_attn": {x: getattr(cutlass_fmha.flash_attn, x) for x in (*FLASH_ATTN, "flash_attn_interface")},
    "flash_attn_interface": dict(zip(FLASH_ATTN, (fa3, fa4_varlen), strict=True)),
    "flash_attn.cute": {"flash_attn_func": lambda *t, return_lse=False, **said: fa3(*t, return_attn_probs=True, **said),
                        "flash_attn_varlen_func": fa4_varlen},
    "cudnn": {
        "data_type": SimpleNamespace(HALF="half", BFLOAT16="bf16", FLOAT="float"),
        "heur_mode": SimpleNamespace(A="A", B="B", OPENSOURCE="OPENSOURCE"), "pygraph": Graph,
        "create_handle": lambda: "handle", "set_stream": lambda handle, stream: None,
    },
    "flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": Ragged, "BatchDecodeWithPagedKVCacheWrapper": Paged},
    "sageattention": {"sageattn": sageattn},
}  # fmt: skip


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, content in STAND_INS.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, **content))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    peers.found.cache_clear()
    BUILT.clear()
    yield
    peers.found.cache_clear()


@pytest.mark.usefixtures("fake_gpu", "small_features", "stand_ins")
@pytest.mark.parametrize("name", ASKED)
def test_a_package_is_asked_for_the_same_problem(name: str) -> None:
    cases, features = ASKED[name]
    of_features = (replace(CASE, group="features", feature=feature) for feature in features.split())
    for case in (CASE, replace(CASE, causal=False), *cases, *of_features):
        inputs, feature, check = runner.problem(case, 0)
        found = lineup.line_up(case, inputs, [name], None, feature)[name]
        assert check(found.call(0)).within, case.name
        assert not check(found.call(1)).within, "other inputs"
    assert not name.startswith("cudnn") or set(BUILT) == {7 if name == "cudnn_fe" else 20_505}


@pytest.mark.usefixtures("small_features", "stand_ins")
def test_who_is_installed_is_found_by_import_and_a_broken_one_says_why(monkeypatch):
    assert peers.installed() == list(peers.PACKAGES) == list(contenders.INSTALLED)
    assert peers.versions(["flash", "flex", "fa3"]) == {"flex": version("torch"), "fa3": None}
    peers.found.cache_clear()
    absent = {"flashinfer", "sageattention", "flash_attn.cute"}
    load = peers.importlib.import_module

    def imported(name: str) -> ModuleType:
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "cudnn":
            raise ImportError("libcudnn.so.9: cannot open shared object file")
        return cutlass_fmha.flash_attn if name == "flash_attn" else load(name)  # as after its install()

    monkeypatch.setattr(peers.importlib, "import_module", imported)
    assert peers.installed() == ["flex", "fa3", "cudnn_fe", "cudnn_dsl"]
    with pytest.raises(ImportError, match="libcudnn"):
        peers.deferred("cudnn_fe", peers.Problem(CASE, None, {}))(*[torch.empty(0)] * 3)  # type: ignore[arg-type]
    absent.clear()
    peers.found.cache_clear()
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: load("no_such_dependency"))
    assert isinstance(peers.found("fa4"), ModuleNotFoundError), "what is missing is another module"


@pytest.mark.usefixtures("fake_gpu", "small_features", "stand_ins")
@pytest.mark.parametrize("where", ["call", "capture"])
def test_a_package_that_fails_is_shown_with_its_reason_and_one_that_is_not_exact_named(where: str, monkeypatch):
    said = AssertionError("head_dim must be 64 or 128")
    broken = Mock(side_effect=said if where == "call" else fa3)

    class Timer(FakeTimer):
        def __init__(self, call: Any, sets: int) -> None:
            broken.reset_mock()
            super().__init__(call, sets)
            if broken.called:
                raise said

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_func", broken)
    monkeypatch.setattr(runner, "GraphTimer", Timer)
    entry: Any = runner.measure_case(CASE, ["fa3", "sage"], None, 0.1, 0)
    assert entry["results"]["fa3"] == {"status": "unsupported", "reason": "head_dim must be 64 or 128"}
    assert entry["results"]["sage"]["error_ratio"] > 1
    result = {**synthetic([CASE]), "cases": [entry], "peers": ["fa3", "sage"]}
    result["machine"]["packages"] = {"fa3": "3.0.0b1", "sage": None}
    text = report.text(result)
    assert "Versions: FlashAttention-3 3.0.0b1, SageAttention unknown." in text
    assert "FlashAttention-3: unsupported: head_dim must be" in text and "SageAttention: not exact" in text
