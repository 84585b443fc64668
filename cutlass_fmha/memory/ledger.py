"""What torch allocates inside a ``with``, and what attention does that has its scores in memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cutlass_fmha import private_torch
from cutlass_fmha.dispatch.problem import Problem


class Ledger(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive, ``now``, and the most that were at once, ``peak``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):  # made elsewhere, if it isn't known
                self._known.setdefault(x.untyped_storage(), 0)
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self._known:
                size = self._known[storage] = storage.nbytes()
                weakref.finalize(storage, self._add, -size)
                self._add(size)
        if func is private_torch.softmax_backward:
            # gradient times output is a tensor inside of CUDA's kernel, which no dispatch sees (aten/.../SoftMax.cu)
            self.peak = max(self.peak, self.now + result.nbytes)
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def unfused(problem: Problem, backward: bool) -> int:
    """Bytes that attention of these sizes takes with its scores in memory, tensors and gradients included."""
    with (ledger := Ledger()):
        run_unfused(problem, backward, "meta")
    return ledger.peak


def run_unfused(problem: Problem, backward: bool, device: str) -> None:
    """As lean as eager torch is: nothing is in a wider dtype, what was used is freed, and of what is as large as
    the scores only the probabilities are kept for the gradients."""
    p = problem
    with torch.device(device), torch.set_grad_enabled(backward):
        kwargs = {"dtype": getattr(torch, p.dtype), "requires_grad": backward}
        of_keys = p.batch, p.num_heads_kv, p.seqlen_k
        q = torch.empty(p.batch, p.num_heads, p.seqlen_q, p.head_dim, **kwargs)
        k, v = torch.empty(*of_keys, p.head_dim, **kwargs), torch.empty(*of_keys, p.value_dim, **kwargs)
        rows = p.num_heads // max(1, p.num_heads_kv) * p.seqlen_q  # heads that share keys are one matrix
        grouped = q.view(p.batch, p.num_heads_kv, rows, p.head_dim)
        scores = (grouped @ k.transpose(2, 3)).view(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
        scores = scores * p.head_dim**-0.5
        if p.diagonal is not None:
            hidden = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool).triu_(p.diagonal + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        probabilities = scores.softmax(-1)
        del scores
        out = probabilities.view(*grouped.shape[:3], p.seqlen_k) @ v
        del probabilities
        if backward:
            out.backward(torch.empty_like(out))
