"""``attention`` of JAX arrays: what is said becomes a ``calls.Problem``, and that a call of XLA's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy
import torch
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from cutlass_fmha import _C
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arrays import is_traced
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.jax import calls

TARGET = "cutlass_fmha_attention"
for _platform, _handler in zip(("cpu", "CUDA"), _C.xla_handlers(calls.answer), strict=True):
    jax.ffi.register_ffi_target(TARGET, _handler, platform=_platform)

#: Tensors whose first dimension is of sequences, or 1: what ``vmap`` makes one batch of.
_BY_SEQUENCE = {"mask": 4, "bias": 4, "prefix_lengths": 1, "seqused_q": 1, "seqused_k": 1, "leftpad_k": 1}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Call(NamedTuple):
    """What a call says that is known when it is traced."""

    causal: str
    scale: float
    row: str | None
    numbers: tuple[tuple[str, Any], ...]
    given: tuple[str, ...]
    return_lse: bool


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str | None = False,
    return_lse: bool = False,
    row: str | None = None,
    **features: Any,
) -> Any:
    """``cutlass_fmha.attention`` of JAX arrays, where ``jax.jit``, ``grad`` and ``vmap`` know of it.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], float16, bfloat16 or float32 (on the CPU also float64).
        k, v: [batch, seqlen_k, num_heads_kv, head_dim], of q's dtype; v may have another head_dim.
        scale, causal, return_lse, row: as there, known when the function is traced.
        features: as there, arrays in place of tensors; but no ``out``, ``lse`` or ``layout``. Numbers, as
            window, softcap and dropout_p, are known when the function is traced. With dropout_p comes
            dropout_seed: an int, or uint32 [2], as ``jax.random.key_data`` makes.

    Returns:
        The output, of q's shape (with v's head_dim) and dtype; with ``return_lse`` a pair of it and the
        natural-log LSE, float32 [batch, num_heads, seqlen_q].

    Gradients, once, in reverse mode: of q, k, v, bias and sinks, by the output and the LSE. ``vmap`` makes
    one batch of all, or, with packed sequences, caches, pages, dropout or arrays by heads that are mapped, a
    loop of calls.

    Raises, when traced: TypeError, ValueError, UnsupportedError, NotImplementedError, as
    ``cutlass_fmha.attention``. What is only known when it runs is a jax.errors.JaxRuntimeError.
    """
    causal = "none" if causal is False else "bottom-right" if causal is True else causal
    return of_call(q, k, v, features, (scale, causal, return_lse, row))


#: Scale, causal, return_lse and row of a call.
Options = tuple[float | None, bool | str | None, bool, str | None]
#: Features that are no arrays.
Said = tuple[tuple[str, Any], ...]


def of_call(q: Any, k: Any, v: Any, features: Mapping[str, Any], options: Options) -> Any:
    """``attention``, whose call is a program of its own where it is no part of one; JAX keeps it."""
    said, arrays = _sides(features) if features else ((), {})
    kind = type(q)
    alone = not arrays and type(k) is kind and type(v) is kind
    if any(map(is_traced, (kind,) if alone else map(type, (q, k, v, *arrays.values())))):
        return _attention(options, said, q, k, v, arrays)
    try:
        hash((options, said))
    except TypeError:  # which the function itself takes, or says what is wrong with
        return _attention(options, said, q, k, v, arrays)
    return _compiled(options, said, q, k, v, arrays)


def _attention(options: Options, said: Said, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    scale, causal, return_lse, row = options
    features = {**dict(said), **arrays}
    if "block_indices" in features:
        features["block_mask"] = tuple(features.pop(name) for name in _LISTS) + features["block_mask"]
    operands = [_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    for name, x in zip("qkv", operands, strict=True):
        if x.dtype.name not in _DTYPES:
            raise ValueError(f"{name} must be of {', '.join(_DTYPES)}, got {x.dtype.name}")
    check.flag("return_lse", return_lse)
    for name in ("out", "lse", "layout"):
        if name in features:
            raise TypeError(f"cutlass_fmha.jax.attention has no {name}: XLA says where results lie")
    metas = [_meta(x) for x in operands]
    given, keywords = _split(features)
    arguments = op_arguments(metas[0], keywords, "q")
    numbers = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
    names = tuple(name for name, x in arguments.items() if isinstance(x, torch.Tensor))
    if "sinks" in names:
        given["sinks"] = given["sinks"].astype(calls.name_of(arguments["sinks"].dtype))
    call = _Call(
        check.causal_name(causal),
        metas[0].shape[-1] ** -0.5 if scale is None else check.finite_scale(_known("scale", scale)),
        row,
        tuple(sorted(numbers.items())),
        names,
        return_lse,
    )
    found = _attend(call, *operands, tuple(given[name] for name in names))
    return found if return_lse else found[0]


_compiled = jax.jit(_attention, static_argnums=(0, 1))

#: The arrays of ``block_mask``, before its block.
_LISTS = ("block_counts", "block_indices")


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, numpy.ndarray))


def _sides(features: Mapping[str, Any]) -> tuple[Said, dict[str, Any]]:
    """What is no array, and the arrays, those of ``block_mask`` apart from its block."""
    said: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, value in features.items():
        if value is None:
            continue
        if name == "block_mask" and isinstance(value, (tuple, list)) and all(map(_is_array, value[:2])):
            arrays |= zip(_LISTS, value, strict=False)
            said[name] = tuple(value[2:])
        elif name == "dropout_seed" and _is_seed(value):
            arrays[name] = _halves(int(value))
        elif name in calls.NUMBERS and _is_array(value) and not isinstance(value, jax.core.Tracer):
            number = value.tolist()
            said[name] = tuple(number) if isinstance(number, list) else number
        else:
            (arrays if _is_array(value) else said)[name] = value
    return tuple(said.items()), arrays


def _array(name: str, value: Any) -> Any:
    if _is_array(value):
        return jnp.asarray(value)
    raise TypeError(f"{name} must be an array of JAX or NumPy, got {type(value).__name__}")


def _meta(x: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=calls.dtype_of(x.dtype.name), device="meta")


def _known(name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known when the function is traced, and is an argument of it: make it static "
            "(static_argnames)"
        )
    return value


def _split(features: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by the names that the op has for them, and keywords with meta tensors in place of them."""
    given: dict[str, Any] = {}
    keywords: dict[str, Any] = {}

    def stand_in(name: str, value: Any) -> Any:
        given[name] = _array(name, value)
        return _meta(given[name])

    for name, value in features.items():
        if name == "block_mask" and isinstance(value, (tuple, list)) and len(value) == 3:
            counts, indices, block = value
            keywords[name] = (stand_in("block_counts", counts), stand_in("block_indices", indices), block)
        elif name == "dropout_seed":
            continue
        elif name in calls.NUMBERS or not _is_array(value):
            keywords[name] = _known(name, value)
        else:
            keywords[name] = stand_in(name, value)
    if keywords.get("dropout_p"):
        given["dropout_seed"] = _seed(features.get("dropout_seed"))
        keywords["dropout_seed"] = torch.empty(1, dtype=torch.int64, device="meta")
    return given, keywords


def _halves(seed: int) -> Any:
    """uint32 [2] of an int64: JAX has no wider one by itself."""
    return numpy.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], numpy.uint32)


def _is_seed(value: Any) -> bool:
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool)


def _seed(seed: Any) -> Any:
    if _is_seed(seed):
        return jnp.asarray(_halves(int(seed)))
    if _is_array(seed) and (seed.shape, str(seed.dtype)) == ((2,), "uint32"):
        return jnp.asarray(seed)
    raise TypeError("dropout_p needs a dropout_seed: an int, or uint32 of shape (2,), as jax.random.key_data(key) is")


# ---- gradients ---------------------------------------------------------------------------------------------


@jax.tree_util.register_static
class _Wanted(tuple[bool, ...]):
    """Which gradients somebody wants, in the order of the op; no array, and kept with arrays."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Any, k: Any, v: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return _forward(call, call.return_lse, q, k, v, given)


def _attend_forward(call: _Call, q: Any, k: Any, v: Any, given: tuple[Any, ...]) -> Any:
    primals = {"query": q, "key": k, "value": v, **dict(zip(call.given, given, strict=True))}
    perturbed = [name for name, x in primals.items() if x.perturbed]
    differentiable = ("query", "key", "value", "bias", "sinks")
    if others := [name for name in perturbed if name not in differentiable]:
        raise NotImplementedError(
            f"cutlass_fmha has no backward yet for {', '.join(others)}: pass jax.lax.stop_gradient of it"
        )
    wanted = _Wanted(name in perturbed for name in differentiable)
    q, k, v, *rest = (x.value for x in primals.values())
    out, lse = _forward(call, True, q, k, v, tuple(rest))
    saved = (wanted, q, k, v, out, lse, tuple(rest))
    check_gradients(call, saved)
    return (out, lse) if call.return_lse else (out,), saved


def check_gradients(call: _Call, saved: tuple[Any, ...]) -> None:
    """Raises NotImplementedError and UnsupportedError before a forward ran for nothing."""
    wanted, q, k, v, out, lse, given = saved
    if any(wanted):
        problem = _backward_problem(call, wanted, False, (out, q, k, v, out, lse, *given))
        calls.check_problem(problem)
        _workspace(problem)


def _attend_backward(call: _Call, saved: tuple[Any, ...], incoming: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted, q, k, v, out, lse, given = saved
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in (*incoming, SymbolicZero(None))[:2])
    primals = {"query": q, "key": k, "value": v, **dict(zip(call.given, given, strict=True))}
    found: dict[str, Any] = {}
    if any(wanted) and not (dout is None and dlse is None):
        dout = jnp.zeros_like(out) if dout is None else dout
        some = () if dlse is None else (dlse,)
        operands = (dout, q, k, v, out, lse, *some, *given)
        names = [n for n, need in zip(("query", "key", "value", "bias", "sinks"), wanted, strict=True) if need]
        results = _mapped(call, wanted, dlse is not None)(*operands)
        found = dict(zip(names, results, strict=True))
    gradients = [
        found.get(name, jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else _no_gradient(x))
        for name, x in primals.items()
    ]
    return (*gradients[:3], tuple(gradients[3:]))


def _no_gradient(x: Any) -> Any:
    return numpy.zeros(x.shape, jax.dtypes.float0)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# ---- batches of batches ------------------------------------------------------------------------------------


def _forward(call: _Call, lse: bool, q: Any, k: Any, v: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return _mapped(call, None, lse)(q, k, v, *given)  # type: ignore[no-any-return]


def _mapped(call: _Call, wanted: _Wanted | None, lse: bool) -> Any:
    """The call, or with ``wanted`` that of gradients, which ``vmap`` makes one batch of where it can."""

    def run(*operands: Any) -> tuple[Any, ...]:
        if wanted is None:
            return _execute(_forward_problem(call, lse, operands), operands)
        return _execute(_backward_problem(call, wanted, lse, operands), operands)

    found = custom_vmap(run)
    rows = 3 if wanted is None else 7 if lse else 6  # operands that have a batch

    @found.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], Any]:
        given = dict(zip(call.given, is_mapped[rows:], strict=True))
        foldable = all(name in _BY_SEQUENCE or not each for name, each in given.items())
        foldable = foldable and set(given) <= {*_BY_SEQUENCE, "sinks"} and not any((wanted or ())[3:])
        if foldable:
            ranks = [operands[i].ndim - each for i, each in enumerate(is_mapped[:rows])]
            ranks += [_BY_SEQUENCE.get(name, 0) for name in call.given]
            batch = operands[1].shape[is_mapped[1]]
            may_be_one = [False] * rows + [name in ("mask", "bias") for name in call.given]
            folded = [
                _fold(x, each, size, batch, rank, may)
                for x, each, rank, may in zip(operands, is_mapped, ranks, may_be_one, strict=True)
            ]
            results = tuple(x.reshape(size, batch, *x.shape[1:]) for x in _mapped(call, wanted, lse)(*folded))
        else:
            loop = [x for x, each in zip(operands, is_mapped, strict=True) if each]

            def one(mapped_operands: list[Any]) -> tuple[Any, ...]:
                several = iter(mapped_operands)
                own = (next(several) if each else x for x, each in zip(operands, is_mapped, strict=True))
                found: tuple[Any, ...] = _mapped(call, wanted, lse)(*own)
                return found

            results = jax.lax.map(one, loop)
        return results, tuple(True for _ in results)

    return found


def _fold(x: Any, is_mapped: bool, size: int, batch: int, rank: int, may_be_one: bool) -> Any:
    """[size * batch, ...] of what has ``rank`` dimensions, the first of which is of sequences or 1."""
    if rank == 0:  # the same for all
        return x
    x = x if is_mapped else x[None]
    x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.ndim), *x.shape[1:])
    if may_be_one and x.shape[:2] == (1, 1):
        return x[0]
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


# ---- the call ----------------------------------------------------------------------------------------------


def _described(names: Sequence[str], operands: Sequence[Any]) -> tuple[calls.Array, ...]:
    return tuple(
        ("int64", (1,)) if name == "dropout_seed" else (x.dtype.name, tuple(x.shape))
        for name, x in zip(names, operands, strict=True)
    )


def _forward_problem(call: _Call, lse: bool, operands: Sequence[Any]) -> calls.Problem:
    q, _, v, *_ = operands
    out = (*q.shape[:-1], v.shape[-1])
    *batch, seqlen, heads = q.shape[:-1]
    results = [(q.dtype.name, out)]
    if lse:
        results.append(("float64" if q.dtype.name == "float64" else "float32", (*batch, heads, seqlen)))
    names = ("q", "k", "v", *call.given)
    return calls.Problem(
        False, call.causal, call.scale, call.row, call.numbers, call.given, lse, (),
        _described(names, operands), tuple(results),
    )  # fmt: skip


def _backward_problem(call: _Call, wanted: _Wanted, lse: bool, operands: Sequence[Any]) -> calls.Problem:
    names = ("dout", "q", "k", "v", "out", "softmax_lse", *(("dlse",) if lse else ()), *call.given)
    arrays = _described(names, operands)
    by_name = dict(zip(names, arrays, strict=True))
    results = (by_name[name] for name, need in zip(("q", "k", "v", "bias", "sinks"), wanted, strict=True) if need)
    return calls.Problem(
        True,
        call.causal,
        call.scale,
        None,
        call.numbers,
        call.given,
        lse,
        tuple(wanted),
        arrays,
        tuple(results),
    )


def _varying(x: Any) -> frozenset[str]:
    """The axes of ``jax.shard_map`` along which an array differs: XLA's results don't say."""
    found: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return found


@functools.cache
def _cuda_device() -> int | None:
    """The number of JAX's first CUDA device; None where it has none."""
    try:
        return int(jax.local_devices(backend="cuda")[0].local_hardware_id)
    except RuntimeError:
        return None


def _workspace(problem: calls.Problem) -> int:
    """Bytes; 0 where the problem can't run on the GPU, and may not be meant for it."""
    if (index := _cuda_device()) is None:
        return 0
    try:
        return calls.workspace_bytes(problem, index)
    except UnsupportedError:
        if jax.default_backend() == "gpu":
            raise
        return 0


def _execute(problem: calls.Problem, operands: Sequence[Any]) -> tuple[Any, ...]:
    calls.check_problem(problem)
    own = len(problem.results)

    def on(results: tuple[calls.Array, ...], *operands: Any) -> tuple[Any, ...]:
        shapes = [jax.ShapeDtypeStruct(shape, name) for name, shape in results]
        text = problem._replace(results=results).text()
        found = tuple(jax.ffi.ffi_call(TARGET, shapes)(*operands, call=text))[:own]
        axes = tuple(frozenset().union(*map(_varying, operands)))
        return tuple(jax.lax.pcast(x, axes, to="varying") for x in found) if axes else found

    on_host = functools.partial(on, problem.results)
    if _cuda_device() is None:
        return on_host(*operands)
    room = _workspace(problem)
    results = (*problem.results, *((("uint8", (room,)),) if room else ()))
    found: tuple[Any, ...] = jax.lax.platform_dependent(*operands, cpu=on_host, cuda=functools.partial(on, results))
    return found
