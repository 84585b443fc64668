"""Hugging Face's ``kernels`` package takes attention from the installed cutlass_fmha, not from a repository of the hub.

    pip install kernels
    python examples/kernels_hub.py

Programs that load flash attention by name (accelerate, TRL, axolotl) get it so, without a change: ``hub.use`` sets
LOCAL_KERNELS, for child processes too. On a GPU the kernels run; without one, the ops' CPU backend.
"""

from __future__ import annotations

import torch
from kernels import get_kernel

from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import hub


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = get_kernel(hub.use("kernels-community/flash-attn2"), version=1)
    torch.manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(48, 4, 64, device=device, dtype=dtype) for _ in range(3))  # two documents
    starts = torch.tensor([0, 18, 48], dtype=torch.int32, device=device)
    with CountCalls() as counter:
        packed = kernel.flash_attn_varlen_func(q, k, v, starts, starts, 30, 30, causal=True, window_size=(8, 0))
        apart = [
            kernel.flash_attn_func(*(x[None, part] for x in (q, k, v)), causal=True, window_size=(8, 0))[0]
            for part in (slice(0, 18), slice(18, 48))
        ]
    error = (packed.float() - torch.cat(apart).float()).abs().max().item()
    print(f"on the {device}: {counter.calls} calls of cutlass_fmha's ops by {kernel.__name__}, {error:.1e} apart")
    assert counter.calls == 3 and error < 2e-3


if __name__ == "__main__":
    main()
