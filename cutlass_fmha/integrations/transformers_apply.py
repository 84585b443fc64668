"""Norms, rotary embedding and MLPs of transformers models by this package's ops. Imports no transformers.

A module keeps its parameters, hooks and names, and gets another class, which is its own with another
``forward``: nothing is copied, and taking the class back undoes it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutlass_fmha.gates import geglu, swiglu
from cutlass_fmha.nn import untouched
from cutlass_fmha.norm import rms_norm
from cutlass_fmha.qk_norm_rope import qk_norm_rope
from cutlass_fmha.rotary import rotary_qk

Forward = Callable[..., Any]


class Family(NamedTuple):
    """What models of transformers.models.<name>.modeling_<name> have in common."""

    prefix: str
    #: Added to a norm's weight: Gemma's are 0 where others are 1.
    weight_offset: float = 0.0
    #: A norm behind attention and MLP, too, before the sum.
    norms_results: bool = False
    #: What its attention says besides, of itself.
    says: Callable[[Any], dict[str, Any]] = lambda layer: {}


def _window(layer: Any) -> dict[str, Any]:
    return {"sliding_window": layer.sliding_window}


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", says=lambda layer: {"sliding_window": getattr(layer.config, "sliding_window", None)}),
    "qwen2": Family("Qwen2", says=_window),
    "qwen3": Family("Qwen3", says=_window),
    "gemma": Family("Gemma", 1.0),
    "gemma2": Family("Gemma2", 1.0, True, lambda layer: _window(layer) | {"softcap": layer.attn_logit_softcapping}),
    "gemma3": Family("Gemma3", 1.0, True, _window),
}
#: transformers' names of activations, as ours.
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "swish": swiglu,
    "gelu": functools.partial(geglu, approximate="none"),
    "gelu_pytorch_tanh": functools.partial(geglu, approximate="tanh"),
}
PARTS = {"RMSNorm": "norm", "Attention": "rotary", "MLP": "mlp", "DecoderLayer": "norm"}
OURS = "_cutlass_fmha_instead_of"


class Applied:
    """What ``apply`` changed in a model; ``print`` tells it. A context that undoes it at its end.

    Attributes:
        swapped: how many modules of each class of transformers' compute by this package.
        left: modules that do not, by name, although they are of a class that could, and why.
    """

    def __init__(self, model: str, modules: list[tuple[nn.Module, type]], left: dict[str, str]) -> None:
        self.model, self.left, self._modules = model, left, modules
        self.swapped = dict(Counter(kind.__name__ for _, kind in modules))

    def __str__(self) -> str:
        lines = [f"{self.model}: by cutlass_fmha" if self._modules else f"{self.model}: as it was"]
        lines += [f"  {count} {name}" for name, count in self.swapped.items() if self._modules]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.left.items())])

    def undo(self) -> None:
        """Give the modules back their classes; a second time nothing happens.

        Raises RuntimeError, and changes none, where somebody else gave one another class since.
        """
        for module, kind in self._modules:
            if vars(type(module)).get(OURS) is not kind:
                raise RuntimeError(
                    f"{type(module).__name__} is not what apply made of {kind.__name__}: undo first what came after it"
                )
        for module, kind in self._modules:
            module.__class__ = kind
        self._modules = []

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def apply(model: nn.Module, *, norm: bool = True, rotary: bool = True, mlp: bool = True) -> Applied:
    """Have a model's RMSNorms, rotary embeddings and gated MLPs computed by this package, in place.

    For Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, and what has their layers inside. Parameters and names of
    the state dict stay what they are, training and inference work on. Attention is another matter:
    ``register``.

    Args:
        model: any module; what is of the families' classes within it is swapped.
        norm: RMSNorm, and, where a norm's input is a sum, that sum in the same launch.
        rotary: queries and keys rotated in one launch; where they are normed (Qwen 3, Gemma 3), that too.
        mlp: the activation of the gate times up, in one launch, where the activation is SiLU or GELU.

    Returns:
        A handle: what was swapped, ``undo()``, and a context manager.

    Raises:
        TypeError: model is no ``torch.nn.Module``.
        ValueError: nothing in the model is of a known class, or it was applied to before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wanted, name_of_model = {"norm": norm, "rotary": rotary, "mlp": mlp}, type(model).__name__
    found, left = [], {}
    for name, module in model.named_modules():
        kind = type(module)
        if OURS in vars(kind):
            raise ValueError(f"apply was called on this {name_of_model} before: undo() that first")
        if (known := _known(kind)) is None or not wanted[PARTS[known[1]]]:
            continue
        if why := _obstacle(module, *known):
            left[name] = why
        else:
            found.append((module, kind, *known))
    if not found and not left:
        families = ", ".join(family.prefix for family in FAMILIES.values())
        raise ValueError(
            f"{name_of_model} has no layer that apply knows (or none was asked for): it knows those of "
            f"transformers' {families}"
        )
    for module, kind, family, part in found:
        module.__class__ = _swapped(kind, family, part)  # type: ignore[arg-type]
    return Applied(name_of_model, [(module, kind) for module, kind, *_ in found], left)


def _known(kind: type) -> tuple[Family, str] | None:
    *package, name, module = ["", *kind.__module__.split(".")][-4:]
    family = FAMILIES.get(name)
    if package != ["transformers", "models"] or family is None or module != f"modeling_{name}":
        return None
    part = kind.__name__.removeprefix(family.prefix)
    return (family, part) if part in PARTS and part != kind.__name__ else None


def _obstacle(module: Any, family: Family, part: str) -> str | None:
    """Why a module is left alone."""
    if "forward" in vars(module):
        return "somebody put another forward in its place (accelerate does for offloading)"
    if part == "MLP" and _activation(module) not in GATES:
        return f"its activation is {_activation(module)}"
    norms = "post_attention_layernorm", "pre_feedforward_layernorm"
    if part == "DecoderLayer" and _known(type(getattr(module, norms[family.norms_results]))) is None:
        return "its norm is not transformers'"
    return None


def _activation(module: Any) -> str:
    config = module.config
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


@functools.cache
def _swapped(kind: type, family: Family, part: str) -> type:
    """The class with another forward. Its name stays: transformers and others look at it."""
    make: dict[str, Callable[[type, Family], Forward]] = {
        "RMSNorm": _norm, "Attention": _attention, "MLP": _mlp, "DecoderLayer": _layer
    }  # fmt: skip
    said = {"forward": make[part](kind, family), OURS: kind, "__module__": kind.__module__}
    said["__reduce_ex__"] = _reduce
    return type(kind.__name__, (kind,), {**said, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """How a module is pickled and copied: what its class was is said by name, and swapped again."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    _, _, *state = reduced
    return _made, (vars(type(module))[OURS],), *state


def _made(kind: type) -> Any:
    known = _known(kind)
    assert known is not None
    return object.__new__(_swapped(kind, *known))


def _norm(kind: type, family: Family) -> Forward:
    offset = family.weight_offset

    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        eps = self.eps if offset else self.variance_epsilon
        weight, x = self.weight, hidden_states
        # Gemma answers in its input's dtype, the others in what weight and input have in common.
        dtype = x.dtype if offset else torch.promote_types(x.dtype, weight.dtype)
        if residual is not None and residual.dtype != x.dtype:  # under autocast a sum has another dtype
            total = residual + x
            return forward(self, total), total
        said: Any = {"eps": eps, "weight_offset": offset, "out_dtype": None if dtype == x.dtype else dtype}
        if weight.dtype not in (x.dtype, torch.float32):
            weight = weight.to(x.dtype)
        return rms_norm(x, weight, residual=residual, **said)

    return forward


def _mlp(kind: type, family: Family) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate: Callable[[Tensor, Tensor], Tensor] = GATES[_activation(self)]
        result: Tensor = self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))
        return result

    return forward


def _attention(kind: type, family: Family) -> Forward:
    module = sys.modules[kind.__module__]
    functions, eager = vars(module)["ALL_ATTENTION_FUNCTIONS"], vars(module)["eager_attention_forward"]
    its_norm = vars(module)[f"{family.prefix}RMSNorm"]
    # Since transformers 5.24. A paged one then says by what arguments attention reads it, in place; before, it was the
    # attention function's, and a layer's own past_key_values.
    takes_cache = "cache" in inspect.signature(vars(kind)["forward"]).parameters

    def fuses(norm: Any) -> bool:
        return getattr(type(norm), OURS, type(norm)) is its_norm and untouched(norm)

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if cache is not None and not takes_cache:
            kwargs["cache"], cache = cache, None
        cache = past_key_values if cache is None else cache
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q, k, v = (x(hidden_states).view(heads) for x in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin, said = _table(*position_embeddings)
        norm = getattr(self, "q_norm", None)
        if norm is not None and fuses(norm) and fuses(self.k_norm):
            eps = norm.eps if family.weight_offset else norm.variance_epsilon
            weights = norm.weight, self.k_norm.weight
            said |= {"eps": eps, "weight_offset": family.weight_offset}
            q, k = qk_norm_rope(q, k, None, *weights, cos=cos, sin=sin, **said)[:2]
        else:
            if norm is not None:
                q, k = norm(q), self.k_norm(k)
            q, k = rotary_qk(q, k, cos, sin, **said)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, **({"kwargs": kwargs} if takes_cache else {}))
        attend = functions.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        said = {"dropout": dropout, "scaling": self.scaling, **family.says(self), **kwargs}
        out, weights = attend(self, q, k, v, attention_mask, **said)
        return self.o_proj(out.reshape(*shape, -1).contiguous()), weights

    return forward


def _table(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """transformers' angles [1 or batch, seqlen, head_dim], both halves alike, as a table with a row for each
    token, and where in it a sequence begins."""
    batch, seqlen, dim = cos.shape
    cos, sin = (x[..., : dim // 2].reshape(batch * seqlen, dim // 2) for x in (cos, sin))
    if batch == 1:
        return cos, sin, {}
    return cos, sin, {"offsets": torch.arange(batch, dtype=torch.int32, device=cos.device) * seqlen}


def _layer(kind: type, family: Family) -> Forward:
    its_own: Forward = vars(kind)["forward"]

    def sum_and_norm(norm: Any, x: Tensor, residual: Tensor) -> Any:
        if hasattr(norm, OURS) and untouched(norm):
            return norm(x, residual=residual)
        total = residual + x
        return norm(total), total

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:  # whose order differs between models, which say all by name
            return its_own(self, hidden_states, *args, **kwargs)
        residual = hidden_states
        x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if family.norms_results:
            x = self.post_attention_layernorm(x)
            x, residual = sum_and_norm(self.pre_feedforward_layernorm, x, residual)
            return residual + self.post_feedforward_layernorm(self.mlp(x))
        x, residual = sum_and_norm(self.post_attention_layernorm, x, residual)
        return residual + self.mlp(x)

    return forward
