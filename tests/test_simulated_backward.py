"""Rows that compute gradients, by their PTX on the simulator, against dense fp64: docs/simulation.md.

Each problem is one of the op ``attend_backward``, with the output and LSE of the CPU backend. A gradient may
be off by twice what unfused maths of the dtype is, and a few units in the last place.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]

#: One of each kind and head dim, and each architecture: (name, largest head dim).
ROWS = {
    "bwd_sm89_bf16_d32_m64n256w8": 32,
    "bwd_sm89_f16_d64_m64n256w8": 64,
    "bwd_sm120_bf16_d96_m64n128w8": 96,
    "bwd_sm120_f16_d128_m64n128w8": 128,
    "bwd_sm90_bf16_d128_m64n128w8_groups": 128,
    "bwd_sm90_f16_d256_m32n64w8_groups": 256,
}


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


#: (batch, query heads, heads of keys, queries, keys) and what else is said. Lengths are no multiples of
#: tiles, but where a whole number of half tiles broke others; few, many, and none of the keys are seen.
PROBLEMS: list[tuple[tuple[int, int, int, int, int], dict[str, Any]]] = [
    ((1, 1, 1, 1, 1), {}),
    ((1, 2, 1, 17, 113), {}),
    ((2, 2, 2, 113, 17), {"causal": "bottom-right"}),
    ((1, 4, 2, 129, 300), {"causal": "bottom-right"}),
    ((1, 2, 2, 300, 129), {"causal": "top-left"}),
    ((1, 1, 1, 192, 192), {"causal": "bottom-right", "shift": 3.0}),  # scores near -120
    ((1, 2, 1, 1, 300), {"causal": "bottom-right"}),
    ((1, 2, 1, 129, 257), {"window_left": 40, "window_right": 30}),
    ((1, 1, 1, 320, 320), {"window_left": 50, "causal": "bottom-right"}),
    ((2, 2, 1, 130, 70), {"scale": -0.2, "layout": "bhsd"}),
    ((2, 2, 1, 100, 150), {"causal": "bottom-right", "seqused_k": int32(50, 0), "seqused_q": int32(77, 3)}),
    ((2, 2, 1, 100, 150), {"leftpad_k": int32(3, 60)}),
    ((2, 2, 1, 100, 150), {"causal": "bottom-right", "prefix_lengths": int32(20, 140)}),
    (
        (4, 2, 1, 150, 150),
        {
            "causal": "bottom-right",
            "cu_seqlens_q": int32(0, 5, 5, 105, 150),
            "cu_seqlens_k": int32(0, 50, 60, 60, 150),
            "max_seqlen_q": 100,
            "max_seqlen_k": 90,
        },
    ),
]


@functools.cache
def extension() -> Path:
    """The build with ROWS, made when it is not there or older than its sources."""
    from simulator import DIRECTORY, build_extension

    return build_extension("^(" + "|".join(ROWS) + ")$", DIRECTORY / "backward")


@pytest.mark.parametrize("row", ROWS)
def test_row_agrees_with_fp64(row: str):
    environment = os.environ | {"CUTLASS_FMHA_FORCE_ARCH": row.partition("_sm")[2].partition("_")[0]}
    command = [sys.executable, str(Path(__file__)), str(extension()), row]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == len(PROBLEMS), done.stdout


# ---- in a process of its own, with the simulator's extension -----------------------------------------------


def gradients(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dlse: Tensor,
    dtype: torch.dtype,
    scale: float,
    said: dict[str, Any],
) -> list[Tensor]:
    """dQ, dK and dV by dense maths in ``dtype``, each step rounded to it."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    starts = [said.get(f"cu_seqlens_{x}") for x in "qk"]
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(len(q) if starts[0] is None else len(starts[0]) - 1):
        own = [slice(None) if s is None else slice(int(s[b]), int(s[b + 1])) for s in starts]
        where = zip((q, k, v), (*starts, starts[1]), (*own, own[1]), strict=True)
        entry = [x[b] if s is None else x[o] for x, s, o in where]
        used = [int(said[n][b]) if n in said else None for n in ("seqused_q", "seqused_k", "leftpad_k")]
        own_q, own_k, own_v = (
            entry[0][: used[0]],
            entry[1][: used[1]][used[2] :],
            entry[2][: used[1]][used[2] :],
        )
        if len(own_q) == 0 or len(own_k) == 0:
            continue
        group = own_q.shape[1] // own_k.shape[1]
        own_k, own_v = own_k.repeat_interleave(group, 1), own_v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * scale
        n_q, n_k = scores.shape[1:]
        i = torch.arange(n_q)[:, None] + (0 if said.get("causal") == "top-left" else n_k - n_q)
        j = torch.arange(n_k)[None]
        right = 0 if said.get("causal") else said.get("window_right", -1)
        left = said.get("window_left", -1)
        visible = torch.ones(n_q, n_k, dtype=torch.bool)
        visible &= (j <= i + right) if right >= 0 else True
        visible &= (j >= i - left) if left >= 0 else True
        if "prefix_lengths" in said:
            visible |= j < said["prefix_lengths"][b]
        some = visible.any(-1)
        scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~some[:, None], 0.0)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1) * some[:, None], own_v)
        own_dout = dout[b] if starts[0] is None else dout[own[0]]
        own_dlse = dlse[b] if starts[0] is None else dlse[:, own[0]]
        loss = loss + (out * own_dout[:n_q].to(dtype)).sum().double()
        loss = loss + (scores.logsumexp(-1) * own_dlse[:, :n_q].to(dtype) * some).sum().double()
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in (q, k, v)]
    return [x.double() for x in torch.autograd.grad(loss, (q, k, v))]


def main(extension: str, name: str) -> int:
    sys.path.insert(0, str(ROOT / "tools"))
    from building import load_extension

    load_extension(Path(extension))
    importlib.import_module("cutlass_fmha.ops")  # registers them
    from cutlass_fmha.dispatch import gradients as choice
    from cutlass_fmha.dispatch import table as tables

    torch.set_num_threads(1)
    row = tables.backward().by_name(name)
    choice.choose = lambda problem, device: row  # type: ignore[assignment]
    ratios = [ratio(number, name, getattr(torch, row.dtype)) for number in range(len(PROBLEMS))]
    return int(not all(x <= 1 for x in ratios))


def ratio(number: int, name: str, dtype: torch.dtype) -> float:
    """The largest error of a problem's gradients, as a part of what is allowed."""
    (batch, heads, heads_kv, n_q, n_k), problem = PROBLEMS[number]
    generator = torch.Generator().manual_seed(number)
    said = dict(problem)
    # Every other problem has a smaller head dim than the row, and some another one of V.
    dim = ROWS[name] - 8 * (number % 2)
    dim_v = dim - 8 * (number % 4 == 3)
    scale, shift = said.pop("scale", dim**-0.5), said.pop("shift", 0.0)
    layout, causal = said.pop("layout", "bshd"), said.get("causal", "none")
    packed = "cu_seqlens_q" in said

    def drawn(n: int, h: int, d: int) -> Tensor:
        x = torch.randn((n, h, d) if packed else (batch, n, h, d), generator=generator).to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bhsd" else x

    q, k = drawn(n_q, heads, dim) + shift, drawn(n_k, heads_kv, dim) - shift
    v, dout = drawn(n_k, heads_kv, dim_v), drawn(n_q, heads, dim_v)
    dlse = torch.randn((heads, n_q) if packed else (batch, heads, n_q), generator=generator)
    exact = gradients((q, k, v), dout, dlse, torch.float64, scale, said)
    unfused = gradients((q, k, v), dout, dlse, dtype, scale, said)
    asked = {key: value for key, value in said.items() if key != "causal"}
    os.environ["CUTLASS_FMHA_SIMULATE"] = "0"
    out, lse = torch.ops.cutlass_fmha.attend(q, k, v, scale, causal, True, None, **asked)
    os.environ["CUTLASS_FMHA_SIMULATE"] = "1"
    arguments = (dout, q, k, v, out, lse, dlse, scale, causal)
    found = torch.ops.cutlass_fmha.attend_backward(*arguments, **asked)
    worst = 0.0
    for x, low, reference in zip(found, unfused, exact, strict=True):
        largest = float(reference.abs().max())
        bound = 2 * float((low - reference).abs().max()) + 2 * torch.finfo(dtype).eps * largest + 1e-5
        share = float((x.double() - reference).abs().max()) / bound
        worst = share if not share <= worst else worst  # a NaN stays
    print(f"{name} {problem}: {worst:.3f} of what is allowed".replace("\n", " "))
    return worst


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
