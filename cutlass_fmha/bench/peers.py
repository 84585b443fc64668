"""Attention of other packages: who is installed, and how each computes a case. None of them is required.

A package's part is built at its first call, so that what it can't do is told with its reason, as any refusal.
Names and arguments are those of flash-attn 2.8, FlashAttention-3's ``flash_attn_interface``, flash-attn-4
4.0.0b36, nvidia-cudnn-frontend 1.32, flashinfer-python 0.7.2 and sageattention 1.0.6 and 2.2.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
from torch import Tensor

from .cases import PREFIX, WINDOW, Case
from .contenders import Attention, Inputs
from .features import DROPOUT, SOFTCAP, Feature
from .gradients import Call, arguments_of, gradients_of

PAGE = 64
WORKSPACE = 128 << 20
"""Bytes that FlashInfer's examples give it."""
CUDNN_ENGINES, OWN_ENGINES = range(10_000), range(20_000, 30_000)
"""Ids of cuDNN's engines, and of cuDNN-frontend's own, written in CuTe DSL."""


class Problem(NamedTuple):
    """A case as a package is asked for it: its tensors are those of input set 0, but for their values."""

    case: Case
    inputs: Inputs
    given: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[0]


class Package(NamedTuple):
    """``function`` tells the package from a namesake; ``features``: those of cases that it has, too."""

    distribution: str
    module: str
    function: str
    build: Callable[[ModuleType, Problem], Attention]
    features: tuple[str, ...] = ()
    packed: bool = False
    gradients: Callable[[ModuleType, Problem], Call] | None = None


def installed() -> list[str]:
    """Names of the packages that are here, broken ones included."""
    return [name for name in PACKAGES if found(name) is not None]


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Of those of the packages that are here; None where it has none."""
    return {name: _version(PACKAGES[name].distribution) for name in names if name in installed()}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def found(name: str) -> ModuleType | Exception | None:
    """A package's module, what importing it raised, or None where it is not installed."""
    package = PACKAGES[name]
    try:
        module = importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        absent = f"{package.module}.".startswith(f"{error.name}.")
        return None if absent else error
    except Exception as error:
        return error
    # This package answers to flash_attn's name, too, and flash-attn-4 lies in a namespace of that name.
    ours = module.__name__.startswith("cutlass_fmha")
    return module if hasattr(module, package.function) and not ours else None


def line_up(case: Case, inputs: Inputs, names: Iterable[str], feature: Feature | None) -> dict[str, Any]:
    """Those of the packages that have the case's problem: an Attention each, of a backward a Call."""
    return {
        name: deferred(name, Problem(case, inputs, feature.arguments if feature else {}))
        for name in names
        if name in PACKAGES and has(PACKAGES[name], case)
    }


def has(package: Package, case: Case) -> bool:
    if case.backward:
        return package.gradients is not None and not case.feature and (package.packed or not case.lengths)
    if case.used or case.group == "wide":
        return False
    return package.packed if case.lengths else case.feature in ("", *package.features)


def deferred(name: str, problem: Problem) -> Callable[..., Any]:
    """The package's attention or gradients, built when it is first called."""
    built: list[Callable[..., Any]] = []

    def call(*given: Any) -> Any:
        if not built:
            module = found(name)
            if isinstance(module, Exception):
                raise module
            if module is None:
                raise RuntimeError(f"{PACKAGES[name].module} is not installed")
            package = PACKAGES[name]
            build = package.gradients if problem.case.backward else package.build
            assert build is not None
            built.append(build(module, problem))
        return built[0](*given)

    return call


# ---- each ------------------------------------------------------------------------------------------------


def flash(module: ModuleType, problem: Problem) -> Attention:
    """flash_attn_func and flash_attn_varlen_func, whose names all of FlashAttention's releases share."""
    case, given = problem.case, problem.given
    of_features: dict[str, dict[str, Any]] = {
        "window": {"window_size": (WINDOW, 0)},
        "softcap": {"softcap": SOFTCAP},
        "alibi": {"alibi_slopes": given.get("alibi_slopes")},
        "dropout": {"dropout_p": DROPOUT},
    }
    function, said = module.flash_attn_func, of_features.get(case.feature, {})
    if case.lengths:
        function = module.flash_attn_varlen_func
        said = {x: given[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    elif case.memory_bound and "num_splits" in inspect.signature(function).parameters:
        said = {"num_splits": 0}  # as many as they think best; their default is one

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = function(query, key, value, causal=case.causal, **said)
        output: Tensor = found[0] if isinstance(found, tuple) else found  # with the LSE in some releases
        return output

    return attention


def flash_gradients(module: ModuleType, problem: Problem, step: Callable[..., Any], **with_lse: bool) -> Call:
    """Of what a release of FlashAttention found before, by the function beneath its autograd (``step``)."""
    case, inputs = problem.case, problem.inputs
    said, dout, scale = arguments_of(case, inputs.query.device), gradients_of(inputs), case.head_dim**-0.5
    forward = module.flash_attn_varlen_func if said else module.flash_attn_func
    kept = [forward(*inputs[n], causal=case.causal, **said, **with_lse)[:2] for n in range(inputs.sets)]

    def call(number: int) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = step(module, dout[number], inputs[number], kept[number], scale, case.causal, said)
        return made

    return call


def _step2(module: Any, dout: Tensor, qkv: Any, kept: Any, scale: float, causal: bool, said: Any) -> Any:
    made, of = tuple(map(torch.empty_like, qkv)), module.flash_attn_interface
    function = of._flash_attn_varlen_backward if said else of._flash_attn_backward
    rest = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    rest |= {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "deterministic": False}
    function(dout, *qkv, *kept, *made, **said, **rest)
    return made


def _step3(module: Any, dout: Tensor, qkv: Any, kept: Any, scale: float, causal: bool, said: Any) -> Any:
    made = tuple(map(torch.empty_like, qkv))
    ends = (said.get("cu_seqlens_q"), said.get("cu_seqlens_k"))
    longest = (said.get("max_seqlen_q"), said.get("max_seqlen_k"))
    module._flash_attn_backward(dout, *qkv, *kept, *ends, None, None, *longest, *made, scale, causal)
    return made


def _step4(module: Any, dout: Tensor, qkv: Any, kept: Any, scale: float, causal: bool, said: Any) -> Any:
    output, lse = kept
    function = module.interface._flash_attn_bwd
    return function(*qkv, output, dout, lse, softmax_scale=scale, causal=causal, **said)[:3]


def flex(module: ModuleType, problem: Problem) -> Attention:
    """FlexAttention, compiled for the case's shape alone."""
    case, given = problem.case, problem.given
    query = problem.tensors[0]
    score_mod = {"softcap": _softcap, "alibi": _alibi(given.get("alibi_slopes"))}.get(case.feature)
    mask = None
    if case.causal:
        visible = {"window": _in_window, "prefix": _in_prefix}.get(case.feature, _causal)
        sizes = (None, None, case.seqlen_q, case.seqlen_k)
        mask = module.create_block_mask(visible, *sizes, device=query.device)
    # Or the shapes of other cases would count towards its limit.
    torch.compiler.reset()
    compiled: Any = torch.compile(module.flex_attention, dynamic=False, fullgraph=True)
    grouped = case.num_heads != case.num_heads_kv

    def attention(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        output: Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)
        return output.transpose(1, 2)

    return attention


def flex_gradients(module: ModuleType, problem: Problem) -> Call:
    """By autograd, on the stream of their forward: that is made anew for each stream that calls come from,
    as a CUDA graph is captured on another than the check's."""
    inputs, forward = problem.inputs, flex(module, problem)
    dout = gradients_of(inputs)
    made: dict[int, list[tuple[Tensor, list[Tensor], Tensor]]] = {}

    def make(number: int) -> tuple[Tensor, list[Tensor], Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[number]]
        return forward(*leaves), leaves, dout[number].clone()

    def call(number: int) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream().cuda_stream
        # What was made in inference mode has no gradients; a forward that is kept gives its buffers to none.
        with torch.inference_mode(False), functorch.patch(donated_buffer=False):
            if stream not in made:
                made.clear()
                made[stream] = [make(n) for n in range(inputs.sets)]
            output, leaves, gradient = made[stream][number]
            return torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    return call


def _causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return q >= k


def _in_window(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= WINDOW)


def _in_prefix(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (q >= k) | (k < PREFIX)


def _softcap(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def _alibi(slopes: Tensor | None) -> Callable[..., Any] | None:
    return None if slopes is None else lambda score, batch, head, q, k: score - slopes[head] * (q - k).abs()


def flashinfer(module: ModuleType, problem: Problem) -> Attention:
    """Batch prefill over ragged keys; of one query a sequence, batch decode over pages that lie in order."""
    case = problem.case
    query, key, _ = problem.tensors
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device)
    heads = (case.num_heads, case.num_heads_kv, case.head_dim)
    dtypes = {"q_data_type": query.dtype, "kv_data_type": key.dtype}

    def ends(step: int, count: int = case.batch) -> Tensor:
        return torch.arange(count + 1, dtype=torch.int32, device=query.device) * step

    if case.memory_bound:
        pages = case.seqlen_k // PAGE
        last = torch.full((case.batch,), PAGE, dtype=torch.int32, device=query.device)
        grouped = case.num_heads >= 4 * case.num_heads_kv
        decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        decode.plan(ends(pages), ends(1, case.batch * pages)[:-1], last, *heads, PAGE, **dtypes)

        def one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            caches = tuple(x.reshape(-1, PAGE, *x.shape[2:]) for x in (key, value))
            output: Tensor = decode.run(query[:, 0], caches)
            return output[:, None]

        return one
    of_queries, of_keys = (problem.given.get(f"cu_seqlens_{name}") for name in "qk")
    of_queries = ends(case.seqlen_q) if of_queries is None else of_queries
    of_keys = ends(case.seqlen_k) if of_keys is None else of_keys
    said: dict[str, dict[str, Any]] = {
        "window": {"window_left": WINDOW},
        "softcap": {"logits_soft_cap": SOFTCAP},
    }
    prefill = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    prefill.plan(of_queries, of_keys, *heads, causal=case.causal, **said.get(case.feature, {}), **dtypes)

    def many(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        output: Tensor = prefill.run(*packed)
        return output.view(query.shape)

    return many


def sage(module: ModuleType, problem: Problem) -> Attention:
    """SageAttention, which quantises: its error is shown, it is no bar for ours."""
    causal = problem.case.causal
    return lambda q, k, v: module.sageattn(q, k, v, tensor_layout="NHD", is_causal=causal)


def cudnn(module: ModuleType, problem: Problem, own_engines: bool) -> Attention:
    case = problem.case

    def sdpa(graph: Any, operands: dict[str, Any], **said: Any) -> list[Any]:
        return [graph.sdpa(name="sdpa", **operands, generate_stats=False, **said)[0]]

    views = [x.transpose(1, 2) for x in problem.tensors]
    run = cudnn_graph(module, case, dict(zip("qkv", views, strict=True)), sdpa, "q", own_engines)

    def attention(*tensors: Tensor) -> Tensor:
        return run(*(x.transpose(1, 2) for x in tensors))[0].transpose(1, 2)

    return attention


def cudnn_gradients(module: ModuleType, problem: Problem, own_engines: bool) -> Call:
    """From this package's output and LSE, which cuDNN's "stats" are."""
    case, inputs = problem.case, problem.inputs
    forward, mask = torch.ops.cutlass_fmha.attend, "bottom-right" if case.causal else "none"
    dout, given = gradients_of(inputs), []
    for number in range(inputs.sets):
        out, lse = forward(*inputs[number], case.head_dim**-0.5, mask, True, None)
        views = (x.transpose(1, 2) for x in (*inputs[number], out, dout[number]))
        given.append((*views, lse[..., None]))

    def sdpa(graph: Any, operands: dict[str, Any], **said: Any) -> list[Any]:
        return list(graph.sdpa_backward(name="sdpa_backward", **operands, **said))

    operands = dict(zip(("q", "k", "v", "o", "dO", "stats"), given[0], strict=True))
    run = cudnn_graph(module, case, operands, sdpa, "qkv", own_engines)
    return lambda number: tuple(x.transpose(1, 2) for x in run(*given[number]))


def cudnn_graph(
    module: ModuleType,
    case: Case,
    operands: dict[str, Tensor],
    add: Callable[..., list[Any]],
    like: str,
    own_engines: bool,
) -> Callable[..., list[Tensor]]:
    """A graph of cuDNN-frontend's of what ``add`` adds, by cuDNN's engines, or by the frontend's own.

    Operands are [batch, heads, seqlen, head_dim], later ones as these; results as those that ``like`` names.
    """
    data, modes = module.data_type, module.heur_mode
    kinds = {torch.float16: data.HALF, torch.bfloat16: data.BFLOAT16, torch.float32: data.FLOAT}
    kind, handle = kinds[operands["q"].dtype], module.create_handle()
    graph = module.pygraph(
        handle=handle, io_data_type=kind, intermediate_data_type=data.FLOAT, compute_data_type=data.FLOAT
    )
    tensors = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kinds[x.dtype])
        for name, x in operands.items()
    }
    masked: dict[str, Any] = {"use_causal_mask": True} if case.causal else {}
    results = add(graph, tensors, attn_scale=1.0 / math.sqrt(case.head_dim), **masked)
    for result, x in zip(results, (operands[name] for name in like), strict=True):
        result.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
    ids, whose = (OWN_ENGINES, "cuDNN-frontend's own") if own_engines else (CUDNN_ENGINES, "cuDNN's")
    if hasattr(graph, "plans"):
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.OPENSOURCE if own_engines else modes.A])
        fit = [index for index, plan in enumerate(graph.plans) if plan.engine_id in ids]
        if not fit:
            raise RuntimeError(f"none of {whose} engines takes this problem")
        graph.build_plan_at_index(fit[0])
    elif own_engines:
        raise RuntimeError(f"this cuDNN-frontend, {getattr(module, '__version__', '')}, has no engines of its own")
    else:
        graph.build([modes.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=operands["q"].device)

    def run(*given: Tensor) -> list[Tensor]:
        made = [torch.empty_like(given["qkv".index(name)]) for name in like]
        module.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        bound = dict(zip((*tensors.values(), *results), (*given, *made), strict=True))
        graph.execute(bound, workspace, handle=handle)
        return made

    return run


PACKAGES: dict[str, Package] = {
    "flex": Package(
        "torch",
        "torch.nn.attention.flex_attention",
        "flex_attention",
        flex,
        features=("window", "prefix", "softcap", "alibi"),
        gradients=flex_gradients,
    ),
    "flash_attn": Package(
        "flash-attn",
        "flash_attn",
        "flash_attn_func",
        flash,
        features=("window", "softcap", "alibi", "dropout"),
        packed=True,
        gradients=partial(flash_gradients, step=_step2, return_attn_probs=True),
    ),
    "fa3": Package(
        "flash-attn-3",
        "flash_attn_interface",
        "flash_attn_func",
        flash,
        features=("window", "softcap"),
        packed=True,
        gradients=partial(flash_gradients, step=_step3, return_attn_probs=True),
    ),
    "fa4": Package(
        "flash-attn-4",
        "flash_attn.cute",
        "flash_attn_func",
        flash,
        features=("window", "softcap"),
        packed=True,
        gradients=partial(flash_gradients, step=_step4, return_lse=True),
    ),
    **{
        name: Package(
            "nvidia-cudnn-frontend",
            "cudnn",
            "pygraph",
            partial(cudnn, own_engines=own),
            gradients=partial(cudnn_gradients, own_engines=own),
        )
        for name, own in (("cudnn_fe", False), ("cudnn_dsl", True))
    },
    "flashinfer": Package(
        "flashinfer-python",
        "flashinfer",
        "BatchPrefillWithRaggedKVCacheWrapper",
        flashinfer,
        ("window", "softcap"),
        packed=True,
    ),
    "sage": Package("sageattention", "sageattention", "sageattn", sage),
}
