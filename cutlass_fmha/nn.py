"""Modules of a decoder block by this package's ops: ``import cutlass_fmha.nn``.

Constructors are as torch.nn's, names in the state dict as in Llama's and Qwen's checkpoints. Where several
projections read the same rows their weights are one parameter and one product; the state dict has its parts,
which are views of it, and takes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cutlass_fmha.arguments import check, tensors
from cutlass_fmha.arguments.signature import refuse_name
from cutlass_fmha.attention import attention
from cutlass_fmha.gates import gelu_and_mul, silu_and_mul, swiglu_mlp
from cutlass_fmha.kv_cache import TAKEN, advances, check_cache, with_kv_cache
from cutlass_fmha.norm import rms_norm
from cutlass_fmha.ops.rows import check_like, computed_in
from cutlass_fmha.qk_norm_rope import qk_norm_rope
from cutlass_fmha.rotary import rotary_qk

__all__ = ["Attention", "KVCache", "RMSNorm", "SwiGLU", "rotary_table"]

Table = tuple[Tensor, Tensor]

#: Of ``attention``, but not of a layer; and of ``with_kv_cache``, where an append's rows go.
_RESULTS = frozenset({"layout", "return_lse", "out", "lse"})
_PLACES = frozenset({"cache_batch_idx", "page_table", "leftpad_k"})
#: What a step may say to ``with_kv_cache`` besides, once keys are in the cache.
_OF_A_STEP = TAKEN | {"scale", "causal", "row"}
#: What ``with_kv_cache`` calls arguments of ``qk_norm_rope`` and ``rotary_qk``.
_ROTARY = {"rotary_interleaved": "interleaved", "rotary_seqlens": "offsets"}


def untouched(module: Any) -> bool:
    """Whether nobody put another forward in a module's place, or a hook, which a fused call would pass by."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return "forward" not in vars(module) and not any(hooks)


class RMSNorm(nn.RMSNorm):
    """As ``torch.nn.RMSNorm``, and the sum before it in the same launch.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch's. The last dimensions alone are of
            it; eps=None is the machine epsilon of what is computed in: float32, for a float64 input float64.
        weight_offset: added to the weight, which then begins as 0: 1 for Gemma's checkpoints.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.weight_offset = float(weight_offset)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x [..., *normalized_shape]; with a residual of that shape (norm(x + residual), x + residual)."""
        count = len(self.normalized_shape)
        check.check_tensor("x", x)
        if x.shape[-count:] != self.normalized_shape:
            raise ValueError(f"x must end in {self.normalized_shape}, the normalized shape, got {tuple(x.shape)}")
        said: Any = self._said(x)
        factor = self._factor(x)
        if count == 1:
            return rms_norm(x, factor, residual=residual, **said)
        rows, weight = x.flatten(-count), None if factor is None else factor.flatten(-count)
        if residual is None:
            return rms_norm(rows, weight, **said).view(x.shape)
        check_like("residual", residual, "x", x)
        other = residual.flatten(-count)
        return tuple(y.view(x.shape) for y in rms_norm(rows, weight, residual=other, **said))

    def _said(self, x: Tensor) -> dict[str, float]:
        """For an input."""
        eps = self.eps
        if eps is None:
            eps = torch.finfo(computed_in(x.dtype)).eps
        return {"eps": eps, "weight_offset": self.weight_offset if self.elementwise_affine else 0.0}

    def _factor(self, x: Tensor) -> Tensor | None:
        """The weight for an input: the op knows one of the input's dtype or float32, torch's module any."""
        weight: Tensor | None = self.weight
        return weight if weight is None or weight.dtype in (x.dtype, torch.float32) else weight.float()

    def extra_repr(self) -> str:
        return super().extra_repr() + f", weight_offset={self.weight_offset}" * bool(self.weight_offset)


class _Joined(nn.Module):
    """Linear projections of one input whose weights are one parameter, ``<name>_weight`` (and ``_bias``)."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, dict[str, int]] = {}

    def _join(self, name: str, parts: dict[str, int], in_features: int, bias: bool, like: dict[str, Any]) -> None:
        rows = sum(parts.values())
        self._parts[name] = parts
        self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(rows, in_features, **like)))
        self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(rows, **like)) if bias else None)

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear`` does it."""
        for name in self._parts:
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if bias is not None:
                nn.init.uniform_(bias, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)

    def _names(self, prefix: str) -> list[tuple[str, dict[str, int]]]:
        """Of each parameter that is there: its name, and its parts' names with their rows."""
        return [
            (f"{prefix}{name}_{kind}", {f"{prefix}{part}.{kind}": rows for part, rows in parts.items()})
            for name, parts in self._parts.items()
            for kind in ("weight", "bias")
            if getattr(self, f"{name}_{kind}") is not None
        ]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parts in self._names(prefix):
            if name in destination:  # which it is not where it is parametrized or pruned
                destination.update(zip(parts, destination.pop(name).split([*parts.values()]), strict=True))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        for name, parts in self._names(prefix):
            given = {part: state_dict.pop(part) for part in parts if part in state_dict}
            if not given:
                continue
            own = getattr(self, name.removeprefix(prefix)).detach()
            wanted = {part: (rows, *own.shape[1:]) for part, rows in parts.items()}
            if wrong := [part for part, x in given.items() if tuple(x.shape) != wanted[part]]:
                sizes = ", ".join(f"{part} {tuple(given[part].shape)}, not {wanted[part]}" for part in wrong)
                errors.append(f"size mismatch: the checkpoint gives {sizes}")
            absent = [part for part in parts if part not in given]
            missing.extend(absent)
            if absent and own.is_meta:
                errors.append(f"{absent[0]} is needed with {next(iter(given))}: what is joined is on meta")
            if wrong or (absent and own.is_meta):
                state_dict[name] = own  # which is not what is missing
            else:  # parts may come one by one, as shards of checkpoints have them
                device = next(iter(given.values())).device
                all_parts = dict(zip(parts, own.split([*parts.values()]), strict=True)) | given
                state_dict[name] = torch.cat([x.to(device) for x in all_parts.values()])
        lacking: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, lacking, unexpected, errors)
        parts_of = dict(self._names(prefix))
        missing.extend(part for name in lacking for part in parts_of.get(name, (name,)))


class SwiGLU(_Joined):
    """The gated MLP of Llama: down(silu(gate(x)) * up(x)), gate and up one product.

    State dict: gate_proj, up_proj and down_proj, ``.weight`` each and with bias ``.bias``. Parameters:
    gate_up_weight, gate_up_bias, down_proj.

    Args:
        in_features, hidden_features: of gate and up.
        out_features: in_features when None.
        bias: of all three.
        activation: of the gate: "silu", "gelu" or "gelu_tanh" (Gemma).
        device, dtype: as torch.nn.Linear's.

    Raises ValueError for another activation.
    """

    gate_up_weight: nn.Parameter
    gate_up_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        *,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"activation must be 'silu', 'gelu' or 'gelu_tanh', got {activation!r}")
        like = {"device": device, "dtype": dtype}
        self.activation = activation
        parts = {"gate_proj": hidden_features, "up_proj": hidden_features}
        self._join("gate_up", parts, in_features, bias, like)
        self.down_proj = nn.Linear(hidden_features, out_features or in_features, bias, **like)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features]; returns [..., out_features]."""
        bias = self.gate_up_bias
        down: Any = self.down_proj  # or what somebody put in its place
        plain = getattr(down, "bias", None) is None and type(down) is nn.Linear and untouched(down)
        if self.activation == "silu" and bias is None and plain:
            return swiglu_mlp(x, self.gate_up_weight, down.weight)
        rows = functional.linear(x, self.gate_up_weight, bias)
        if self.activation == "silu":
            gated = silu_and_mul(rows)
        else:
            gated = gelu_and_mul(rows, approximate="none" if self.activation == "gelu" else "tanh")
        result: Tensor = down(gated)
        return result


class KVCache:
    """Keys and values of a layer, to which ``Attention`` appends.

    Attributes:
        k, v: [batch, capacity, num_heads_kv, head_dim].
        lengths: int32 [batch], rows in use, on the device; a call of the layer adds its tokens in place.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_heads_kv: int,
        head_dim: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (batch, capacity, num_heads_kv, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int32)


def rotary_table(positions: int, rotary_dim: int, base: float = 10000.0, *, device: Any = None) -> Table:
    """cos and sin, float32 [positions, rotary_dim / 2], of angles p / base^(2r / rotary_dim).

    Scaled frequencies (Llama 3.1, YaRN) are the caller's to make: any two tables of this shape do.
    """
    pairs = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] / base ** (pairs / rotary_dim)
    return angles.cos(), angles.sin()


class Attention(_Joined):
    """Self-attention with its projections, as in Llama, Qwen and Mistral.

    State dict: q_proj, k_proj, v_proj and o_proj, ``.weight`` each and with bias ``.bias``, and with qk_norm
    q_norm.weight and k_norm.weight. Parameters: qkv_weight, qkv_bias, o_proj, q_norm, k_norm.

    Args:
        embed_dim: of the input and the output.
        num_heads, num_heads_kv: the second, which divides the first, is the first when None.
        head_dim: embed_dim / num_heads when None.
        bias: of the projections of q, k and v.
        out_bias: of o_proj; as bias when None.
        qk_norm: RMSNorm of each head of q and k before they are rotated (Qwen 3), with eps, None as there.
        causal, window, softcap, scale: as ``cutlass_fmha.attention``.
        dropout: probability, while training.
        device, dtype: as torch.nn.Linear's.

    Raises ValueError for heads that don't divide.
    """

    qkv_weight: nn.Parameter
    qkv_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        eps: float | None = 1e-6,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if min(num_heads, heads_kv) < 1 or num_heads % heads_kv:
            raise ValueError(f"num_heads must be a multiple of num_heads_kv {heads_kv}, got {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads {num_heads}, or head_dim given, got {embed_dim}"
            )
        like = {"device": device, "dtype": dtype}
        self.num_heads, self.num_heads_kv = num_heads, heads_kv
        self.head_dim = size = embed_dim // num_heads if head_dim is None else head_dim
        self.said: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        self.dropout = dropout
        parts = {"q_proj": num_heads * size, "k_proj": heads_kv * size, "v_proj": heads_kv * size}
        self._join("qkv", parts, embed_dim, bias, like)
        self.o_proj = nn.Linear(num_heads * size, embed_dim, bias if out_bias is None else out_bias, **like)
        self.q_norm = RMSNorm(size, eps, **like) if qk_norm else None
        self.k_norm = RMSNorm(size, eps, **like) if qk_norm else None
        self.reset_parameters()

    def forward(self, x: Tensor, rotary: Table | None = None, cache: KVCache | None = None, **said: Any) -> Tensor:
        """x [batch, seqlen, embed_dim]; returns the same shape.

        rotary: cos and sin, as ``rotary_table`` has them. cache: x's tokens are appended, and see what is in
        it; nothing of a cache has a gradient. said: further arguments of ``attention``, or with a cache of
        ``with_kv_cache``, but for those of layouts and results. With cu_seqlens_q and no cache x is packed,
        [total, embed_dim], and positions are those in a sequence.
        """
        if found := _RESULTS.intersection(said):
            raise TypeError(f"{min(found)} is not for a layer, which returns its input's shape")
        packed = cache is None and said.get("cu_seqlens_q") is not None
        tensors.check_dims("x", x, f"{'total' if packed else 'batch, seqlen'}, embed_dim")
        rows = functional.linear(x, self.qkv_weight, self.qkv_bias).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.split([self.num_heads, self.num_heads_kv, self.num_heads_kv], -2)
        said = {**self.said, **said}
        out = self._attend(q, k, v, rotary, said) if cache is None else self._step(q, k, v, rotary, cache, said)
        result: Tensor = self.o_proj(out.flatten(-2))
        return result

    def _norms(self, q: Tensor) -> dict[str, Any] | None:
        """Both norms for ``qk_norm_rope``; None where it has no name for what they are."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if not all(type(norm) is RMSNorm and untouched(norm) for norm in (q_norm, k_norm)):
            return None
        assert q_norm is not None and k_norm is not None
        if (said := q_norm._said(q)) != k_norm._said(q):
            return None
        return {"q_weight": q_norm._factor(q), "k_weight": k_norm._factor(q), **said}

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rotary: Table | None, said: dict[str, Any]) -> Tensor:
        starts = said.get("cu_seqlens_q")
        if (norms := self._norms(q)) is not None:
            cos, sin = rotary or (None, None)
            q, k = qk_norm_rope(q, k, **norms, cos=cos, sin=sin, cu_seqlens=starts)
        else:
            q, k = self._normed(q, k)
            if rotary is not None:
                q, k = rotary_qk(q, k, *rotary, cu_seqlens=starts)
        if self.dropout and self.training:
            said = {"dropout_p": self.dropout, **said}
        out: Tensor = attention(q, k, v, **said)
        return out

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Table | None, cache: KVCache, said: dict[str, Any]
    ) -> Tensor:
        lengths, seqlen, norms, entries = cache.lengths, q.shape[1], self._norms(q), said.get("cache_batch_idx")
        if entries is not None:
            tensors.check_vectors({"cache_batch_idx": entries}, q.shape[0])
            # On a GPU nobody knows whether there are such entries; with_kv_cache drops what has none.
            places = entries.long().clamp(0, lengths.shape[0] - 1)
            lengths = lengths[places]
        cos, sin = rotary or (None, None)
        turned: dict[str, Any] = {}
        # with_kv_cache rotates as it appends, but without a mask all queries as the first new key.
        by_itself = norms is not None or (rotary is not None and not advances(said["causal"], said["window"]))
        if by_itself:
            for given, name in _ROTARY.items():
                if (x := said.pop(given, None)) is not None:
                    turned[name] = x
        elif rotary is not None:
            said = {"rotary_cos": cos, "rotary_sin": sin, **said}
        if norms is not None:
            if unknown := said.keys() - _OF_A_STEP:  # which with_kv_cache would say after the cache was written
                refuse_name("with_kv_cache", min(unknown))
            check_cache(q, cache.k, cache.v, lengths, **said)
            new: Any = {"v": v, "k_cache": cache.k, "v_cache": cache.v, "cache_seqlens": lengths}
            new |= {name: said[name] for name in _PLACES.intersection(said)}
            q, used = qk_norm_rope(q, k, **norms, cos=cos, sin=sin, **turned, **new)
            out = with_kv_cache(q, cache.k, cache.v, cache_seqlens=used, **said)
        else:
            q, k = self._normed(q, k)
            if rotary is not None and by_itself:
                pads = said.get("leftpad_k")
                first = lengths if pads is None else lengths - pads
                q, k = rotary_qk(q, k, *rotary, **{"offsets": first, **turned})
            out = with_kv_cache(q, cache.k, cache.v, k, v, cache_seqlens=lengths, **said)
        if entries is None:
            lengths += seqlen
        else:
            cache.lengths.index_add_(0, places, (places == entries).int() * seqlen)
        assert isinstance(out, Tensor)
        return out
