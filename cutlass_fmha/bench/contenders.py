"""This package's op and torch's three fused SDPA kernels on the same tensors, and the check of results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from .cases import Case
from .features import Feature

OURS = "ours"
PAGES = {"pages16": 16, "paged": 64, "pages256": 256}
"""This package with keys and values in pages of so many keys."""
DETERMINISTIC = "deterministic"
"""This package's gradients in a fixed order, by the route that is chosen."""
OWN = (OURS, DETERMINISTIC, *PAGES)
"""Contenders whose results must be right."""
PEERS: dict[str, str] = {
    "flash": "torch flash (FA2)",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
}
INSTALLED: dict[str, str] = {
    "flex": "FlexAttention",
    "flash_attn": "flash_attn (FA2)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn_fe": "cuDNN-frontend",
    "cudnn_dsl": "cuDNN-frontend, CuTe DSL",
    "flashinfer": "FlashInfer",
    "sage": "SageAttention",
}
"""Peers of other packages, where they are found (peers.py)."""
COPY = "copy"
CAUSAL = "causal"
PLAIN = "plain"
OTHER = "other"
TITLES: dict[str, str] = {
    OURS: "cutlass_fmha",
    DETERMINISTIC: "cutlass_fmha, deterministic",
    **{name: f"cutlass_fmha, pages of {size}" for name, size in PAGES.items()},
    PLAIN: "cutlass_fmha, plain",
    **PEERS,
    **INSTALLED,
    CAUSAL: "FA2, plain causal",
    OTHER: "other build",
    COPY: "copy",
}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query, key and value, [batch, seqlen, num_heads, head_dim] or packed, to an output of query's shape."""


@dataclass
class Inputs:
    """Query, key and value of a case, several sets of each: [sets, batch, seqlen, num_heads, head_dim], or
    [sets, rows, num_heads, head_dim] where they are packed."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def sets(self) -> int:
        return self.query.shape[0]

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query[number], self.key[number], self.value[number]


def make_inputs(case: Case, sets: int, device: torch.device, seed: int = 0) -> Inputs:
    """Normally distributed, contiguous as the case's ``shapes`` say; for every contender."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(shape: tuple[int, ...], heads: int) -> torch.Tensor:
        size = (sets, *shape, heads, case.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    of_query, of_key = case.shapes
    query = draw(of_query, case.num_heads)
    return Inputs(query, key=draw(of_key, case.num_heads_kv), value=draw(of_key, case.num_heads_kv))


def ours(case: Case, row: str | None = None) -> Attention:
    """The op of this package on a case without a feature, by selection or with one row forced."""
    scale = 1.0 / math.sqrt(case.head_dim)
    causal = "bottom-right" if case.causal else "none"
    forward = torch.ops.cutlass_fmha.forward

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(query, key, value, scale, causal, False, row)[0]
        return output

    return attention


def sdpa(case: Case, mask: torch.Tensor | None = None, dropout_p: float = 0.0) -> Attention:
    """torch's scaled_dot_product_attention; the surrounding ``only`` context chooses the kernel.

    mask: bool, or a bias of the inputs' dtype, broadcastable to [batch, num_heads, seqlen_q, seqlen_k].
    """
    if case.causal and case.seqlen_q != case.seqlen_k:
        raise ValueError(
            "torch aligns a causal mask top-left: a causal case needs equal lengths to be the same problem"
        )
    grouped = case.num_heads != case.num_heads_kv
    function = torch.nn.functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = function(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=case.causal,
            enable_gqa=grouped,
        )
        return output.transpose(1, 2)

    return attention


@contextmanager
def only(name: str) -> Iterator[None]:
    """Restrict SDPA to the kernel of peer ``name``; no restriction for what is no peer."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    context = sdpa_kernel([backends[name]]) if name in backends else nullcontext()
    with context, warnings.catch_warnings():
        # A kernel that can't take a problem warns once per reason and then raises; the raised sentence is
        # reported.
        warnings.simplefilter("ignore", UserWarning)
        yield


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    rows: torch.Tensor,
    precise: bool,
    feature: Feature | None = None,
) -> torch.Tensor:
    """Dense attention of a few query rows: the fp64 truth, or what unfused math of the inputs' dtype gives.

    query [batch, seqlen_q, num_heads, head_dim]; rows: query positions to compute, a 1-d integer tensor.
    Returns [batch, len(rows), num_heads, head_dim], fp64 when ``precise``. The mask is bottom-right aligned.
    With a feature, tensors are those of the last sequence and its first heads. A row without a key is 0.
    """
    if precise:
        query, key, value = query.double(), key.double(), value.double()
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    group = query.shape[2] // key.shape[2]
    key = key.permute(0, 2, 3, 1).repeat_interleave(group, dim=1)
    value = value.permute(0, 2, 1, 3).repeat_interleave(group, dim=1)
    scores = (query[:, rows].transpose(1, 2) @ key) * (1.0 / math.sqrt(query.shape[-1]))
    keys = torch.arange(seqlen_k, device=rows.device)
    visible = keys <= rows[:, None] + (seqlen_k - seqlen_q) if causal else torch.ones_like(keys) > 0
    if feature is not None:
        scores, visible = feature.scores(scores, rows), feature.visible(visible, rows, keys)
    scores = scores.masked_fill(~visible, -math.inf)
    if feature is not None and "sinks" in feature.arguments:
        sinks = feature.arguments["sinks"][: scores.shape[1], None, None].to(scores.dtype)
        weights = torch.softmax(torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    if feature is not None:
        weights = feature.weights(weights, rows)
    return (weights @ value).transpose(1, 2)


@dataclass(frozen=True)
class Error:
    """Worst and mean absolute difference from fp64 over the sampled rows, and how much the worst may be."""

    max_abs: float
    tolerance: float
    mean_abs: float

    @property
    def ratio(self) -> float:
        """Difference over tolerance; above 1 (or NaN) the result is wrong."""
        return self.max_abs / self.tolerance

    @property
    def within(self) -> bool:
        return self.ratio <= 1.0


class ErrorCheck:
    """Compares outputs of one case with fp64 on a sample of rows, so that long sequences stay cheap.

    The tolerance is twice the error that unfused math of the same dtype makes on the same rows, plus two ulp
    of the largest output. The sample is the last sequence, two groups of heads and up to 64 rows, the first
    and last included.
    """

    MAX_ROWS = 64

    def __init__(self, case: Case, inputs: Inputs, feature: Feature | None = None) -> None:
        query, key, value = inputs[0]
        self.lengths = case.lengths
        self.rows = sample_rows(case.lengths[-1] if case.lengths else case.seqlen_q, self.MAX_ROWS)
        self.rows = self.rows.to(query.device)
        heads_kv = min(2, case.num_heads_kv)
        self.heads = heads_kv * (case.num_heads // case.num_heads_kv)
        query = self._last(query)[:, :, : self.heads]
        used = case.used[-1] if case.used else None
        key, value = (self._last(x)[:, :used, :heads_kv] for x in (key, value))
        self.truth = reference(query, key, value, case.causal, self.rows, True, feature)
        unfused = reference(query, key, value, case.causal, self.rows, False, feature)
        rounding = 2.0 * torch.finfo(query.dtype).eps * self.truth.abs().max().item()
        self.tolerance = 2.0 * (unfused.double() - self.truth).abs().max().item() + rounding

    def _last(self, tensor: torch.Tensor) -> torch.Tensor:
        """[1, seqlen, heads, head_dim] of the last sequence."""
        return tensor[-1:] if tensor.dim() == 4 else tensor[None, -self.lengths[-1] :]

    def __call__(self, output: torch.Tensor) -> Error:
        sampled = self._last(output)[:, self.rows, : self.heads]
        # A NaN must not vanish: max() of a tensor that holds one is NaN, and NaN is not within any tolerance.
        difference = (sampled.double() - self.truth).abs()
        return Error(difference.max().item(), self.tolerance, difference.mean().item())


def sample_rows(seqlen_q: int, count: int) -> torch.Tensor:
    """Up to ``count`` query positions, evenly spread, the first and the last among them."""
    if seqlen_q <= count:
        return torch.arange(seqlen_q)
    return torch.linspace(0, seqlen_q - 1, count, dtype=torch.float64).round().long()
