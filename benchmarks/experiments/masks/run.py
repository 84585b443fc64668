"""Masked rows on a GPU: against fp64, then timed beside plain and scored rows, in a build of rows.txt."""
# ruff: noqa: B007, B023, E401, E731, F821, I001

import time, torch
from cutlass_fmha import _C, attention, explain

T0 = time.time()
torch.manual_seed(0)
dev, dt = "cuda", torch.bfloat16
rows = [r.name for r in _C.rows() if r.family != "wide"]
print(torch.cuda.get_device_name(), torch.__version__, len(rows), "rows")


def mk(*s):
    return torch.randn(*s, device=dev, dtype=dt)


def ref(q, k, v, mask, bias, causal, scale):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = q @ k.transpose(2, 3) * scale
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if causal:
        n, m = s.shape[2:]
        i, j = torch.arange(n, device=dev)[:, None], torch.arange(m, device=dev)[None]
        s = s.masked_fill(j > i + m - n, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.nan_to_num(torch.exp(s - lse[..., None].nan_to_num(neginf=0.0)))
    p = torch.where(torch.isneginf(lse)[..., None], torch.zeros_like(p), p)
    return (p @ v).transpose(1, 2), lse


bad = 0
for row in [r for r in rows if r.endswith("_masked")]:
    d, worst = (64 if "_d64_" in row else 128), 0.0
    for n, (B, H, Hk, Sq, Sk, causal) in enumerate(
        [
            (2, 4, 4, 300, 520, False),
            (1, 6, 2, 1000, 1000, True),
            (2, 2, 2, 77, 2052, False),
            (1, 2, 1, 513, 1236, True),
            (1, 1, 1, 4096, 4096, False),
            (1, 2, 2, 1, 64, False),
        ]
    ):
        q, k, v = mk(B, Sq, H, d), mk(B, Sk, Hk, d), mk(B, Sk, Hk, d)
        for kind in ("bhqk", "qk", "bk", "bias_hqk", "bias_qk", "bias_inf", "bias_k"):
            mask = bias = None
            if "bias" not in kind:
                shape = [B if "b" in kind else 1, H if "h" in kind else 1, Sq if "q" in kind else 1, Sk]
                mask = torch.rand(shape, device=dev) < 0.6
                if "q" in kind and Sq > 5:
                    mask[..., 3, :] = False
            else:
                shape = [1, H if "h" in kind else 1, 1 if kind == "bias_k" else Sq, Sk]
                bias = mk(*shape) * 3
                if kind == "bias_inf":
                    bias.masked_fill_(torch.rand_like(bias) < 0.3, -torch.inf)
            o, lse = attention(q, k, v, mask=mask, bias=bias, causal=causal, return_lse=True, row=row)
            ro, rl = ref(q, k, v, mask, bias, causal, d**-0.5)
            eo = (o.double() - ro).abs().max().item() / (ro.abs().max().item() or 1)
            el = (lse.double() - rl).nan_to_num(nan=0.0).abs()
            el = torch.where(torch.isinf(rl) & (rl == lse), torch.zeros_like(el), el).max().item()
            worst = max(worst, eo)
            if not (eo < 1e-2 and el < 1e-3):
                bad += 1
                if bad < 8:
                    print("BAD", row, (B, H, Hk, Sq, Sk, causal), kind, eo, el)
    print(f"{row}: worst {worst:.2e}")

# As it is called, of masks and biases that masked rows can read and others
taken = {}
for d in (64, 128, 40):
    for Sk in (1, 17, 113, 1023, 1024, 2052):
        for kind in ("mask", "bias"):
            for cut in (0, 1, 4):
                for causal in (False, True):
                    q, k, v = mk(2, 300, 4, d), mk(2, Sk, 2, d), mk(2, Sk, 2, d)
                    x = mk(2, 1, 300, Sk + 8)[..., cut : cut + Sk]
                    x = mk(2, 1, 300, Sk + 8).gt(-0.3)[..., cut : cut + Sk] if kind == "mask" else x
                    o, lse = attention(q, k, v, causal=causal, return_lse=True, **{kind: x})
                    ro, rl = ref(q, k, v, *((x, None) if kind == "mask" else (None, x)), causal, d**-0.5)
                    eo = (o.double() - ro).abs().max().item() / max(1.0, ro.abs().max().item())
                    same = torch.isinf(rl) & (rl == lse)
                    el = torch.where(same, 0.0, (lse.double() - rl).abs()).max().item()
                    if not (eo < 1e-2 and el < 1e-3):
                        bad += 1
                        print("BAD as called", d, Sk, kind, cut, causal)
                    name = explain(q, k, v, causal=causal, **{kind: x}).winner
                    taken[name] = taken.get(name, 0) + 1
print("taken:", taken)
print("bad:", bad, f"{time.time() - T0:.0f} s")


def bench(calls, n=6):
    for c in calls:
        c()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n):
            calls[i % len(calls)]()
    g.replay()
    torch.cuda.synchronize()
    best = []
    for _ in range(5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        best.append(a.elapsed_time(b) / n * 1e3)
    return sorted(best)[2]


for d, B, H, S in ((128, 2, 16, 4096), (64, 4, 16, 4096)):
    sets = [tuple(mk(B, S, H, d) for _ in range(3)) for _ in range(3)]
    of = lambda end: [r for r in rows if f"_d{d}_" in r and r.endswith(end)]
    plain = bench([lambda s=s: attention(*s, row=of("_tma")[0]) for s in sets])
    ranged = bench([lambda s=s: attention(*s, row=of("_ranged")[0]) for s in sets])
    tf = 4 * B * H * S * S * d / 1e6
    print(f"D{d} B{B} H{H} S{S} plain {plain:.0f} us {tf / plain:.0f} TFLOP/s; ranged row {plain / ranged:.3f}")
    for kind in (
        "mask 11SS",
        "mask BHSS",
        "mask B11S half",
        "mask 111S all",
        "bias 1HSS",
        "bias 11SS",
        "bias 111S",
        "causal mask 11SS",
        "causal bias 1HSS",
    ):
        what, shape = kind.replace("causal ", "").split()[:2]
        size = [{"1": 1, "B": B, "H": H, "S": S}[c] for c in shape]
        if what == "mask":
            x = torch.rand(size, device=dev) < 0.7
            if "half" in kind:
                x = (torch.arange(S, device=dev)[None] < torch.linspace(S // 4, S, B, device=dev)[:, None])[
                    :, None, None
                ]
            if "all" in kind:
                x = torch.ones(size, device=dev, dtype=torch.bool)
        else:
            x = torch.randn(size, device=dev, dtype=dt)
        causal = "causal" in kind
        base = bench([lambda s=s: attention(*s, causal=True, row=of("_tma")[0]) for s in sets]) if causal else plain
        line = []
        for row in of("_masked") + of("_scored"):
            us = bench([lambda s=s: attention(*s, causal=causal, row=row, **{what: x}) for s in sets])
            line.append(f"{row.split('_', 4)[4][:20]} {us:.0f} us {base / us:.3f}")
        us = bench([lambda s=s: attention(*s, causal=causal, **{what: x}) for s in sets])
        line.append(f"as called {us:.0f} us {base / us:.3f}")
        print(f"  {kind:16}", " | ".join(line), flush=True)
        del x
print(f"{time.time() - T0:.0f} s")
