"""Trains a small GPT with torch's SDPA and with this package, on padded and on packed documents.

    python examples/train_gpt.py            # on a GPU 11 M parameters; without one as --tiny
    python examples/train_gpt.py --tiny     # about a minute on a CPU
    python examples/train_gpt.py --seeds 2 --output PART    # a part: each run is kept when it ends
    python examples/train_gpt.py --from-json PART...        # the table and the picture of kept runs, joined

The text is the Python standard library that runs this, a byte a token; what stands between two blank lines is
a document. All ways see the same documents in the same order from the same weights: with the same seed they
differ by rounding alone. Where the loss on held-out documents differs from that with torch's SDPA by more
than seeds differ from each other, the exit status is 1. Speed on a CPU says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import cutlass_fmha

LEAST_TEXT = 5_000_000  # bytes
LEAST_DOCUMENT = 32
NOT_PYTHONS_OWN = {"site-packages", "dist-packages", "test", "tests"}
NO_TARGET = -100


class Size(NamedTuple):
    layers: int
    heads: int
    head_dim: int
    context: int
    documents: int  # of a step
    steps: int
    rate: float


SIZES = {"gpt": Size(6, 6, 64, 4096, 16, 2000, 1e-3), "tiny": Size(2, 2, 32, 128, 4, 300, 1e-2)}


# ---- the text ----------------------------------------------------------------------------------------------


def documents(context: int) -> list[Tensor]:
    """Pieces of at most ``context`` + 1 bytes: each byte but the last has a next one to be told."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [x for x in sorted(root.rglob("*.py")) if not NOT_PYTHONS_OWN & set(x.relative_to(root).parts)]
    text = b"\n\n\n".join(path.read_bytes() for path in paths)
    if len(text) < LEAST_TEXT:
        raise SystemExit(f"{root} has {len(text)} bytes of Python, and {LEAST_TEXT} are needed")
    step, found = context + 1, []
    for whole in text.split(b"\n\n\n"):
        pieces = (whole[i : i + step] for i in range(0, len(whole), step))
        found += [bytes_of(piece) for piece in pieces if len(piece) >= LEAST_DOCUMENT]
    return found


def bytes_of(piece: bytes) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()


class Batch(NamedTuple):
    """[documents, longest], or packed, [tokens], with where each document begins."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    starts: Tensor | None
    longest: int


def padded(chosen: list[Tensor]) -> Batch:
    """A causal mask hides what fills up a document: it comes last."""
    tokens = pad_sequence([x[:-1] for x in chosen], batch_first=True)
    targets = pad_sequence([x[1:] for x in chosen], batch_first=True, padding_value=NO_TARGET)
    return Batch(tokens, targets, torch.arange(tokens.shape[1]), None, tokens.shape[1])


def packed(chosen: list[Tensor]) -> Batch:
    lengths = [len(x) - 1 for x in chosen]
    tokens, targets = torch.cat([x[:-1] for x in chosen]), torch.cat([x[1:] for x in chosen])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Batch(tokens, targets, torch.cat(list(map(torch.arange, lengths))), starts, max(lengths))


# ---- the model ---------------------------------------------------------------------------------------------


def torchs(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    if batch.starts is None:
        return cutlass_fmha.attention(q, k, v, causal=True)
    starts, longest = batch.starts, batch.longest
    packing = {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    return cutlass_fmha.attention(q, k, v, causal=True, **packing)


REFERENCE = "torch, padded"
WAYS: dict[str, tuple[Callable[..., Tensor], Callable[[list[Tensor]], Batch]]] = {
    REFERENCE: (torchs, padded),
    "cutlass_fmha, padded": (ours, padded),
    "cutlass_fmha, packed": (ours, packed),
}


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [..., tokens, heads, head_dim], in x's dtype: the same in all ways."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, size: Size, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.heads, self.attend = size.heads, attend
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor, batch: Batch, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = rotated(q, angles), rotated(k, angles)
        x = x + self.out(self.attend(q, k, v, batch).flatten(-2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Only attention knows whether tokens have a batch dimension."""

    def __init__(self, size: Size, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.tokens = nn.Embedding(256, width)
        steps = torch.arange(0, size.head_dim, 2) / size.head_dim
        self.register_buffer("frequencies", 10_000.0**-steps, persistent=False)
        self.blocks = nn.ModuleList(Block(size, attend) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.tokens)
        angles = batch.positions[:, None, None] * self.frequencies
        for block in self.blocks:
            x = block(x, batch, angles)
        return self.head(self.norm(x))


# ---- training ----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    way: str
    seed: int
    final: float  # loss on held-out documents, nats a byte
    tokens_per_s: float
    losses: list[float]


def loss_of(model: GPT, batch: Batch, device: torch.device) -> Tensor:
    batch = Batch(*(moved(x, device) if isinstance(x, Tensor) else x for x in batch))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(batch)
    return functional.cross_entropy(logits.float().flatten(0, -2), batch.targets.flatten())


def moved(x: Tensor, device: torch.device) -> Tensor:
    """From memory that is pinned nobody waits for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def train(way: str, seed: int, size: Size, texts: list[Tensor], held_out: list[Tensor], device: torch.device) -> Run:
    attend, batched = WAYS[way]
    torch.manual_seed(seed)
    model = GPT(size, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), fused=True)
    warmup = max(2, size.steps // 20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, size.rate, size.steps, pct_start=warmup / size.steps, cycle_momentum=False
    )
    order = torch.randint(len(texts), (size.steps, size.documents)).tolist()
    losses, tokens, began = [], 0, 0.0
    for i, numbers in enumerate(order):
        if i == warmup:  # what happens once is over
            tokens, began = 0, now(device)
        chosen = [texts[number] for number in numbers]
        loss = loss_of(model, batched(chosen), device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        tokens += sum(map(len, chosen)) - len(chosen)
    rate = tokens / (now(device) - began)
    with torch.no_grad():
        groups = [held_out[i : i + size.documents] for i in range(0, len(held_out), size.documents)]
        final = sum(float(loss_of(model, batched(group), device)) for group in groups) / len(groups)
    return Run(way, seed, final, rate, [round(loss, 4) for loss in torch.stack(losses).tolist()])


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- the comparison ----------------------------------------------------------------------------------------


def judged(runs: list[Run]) -> dict[str, float]:
    """How far seeds lie apart with torch's SDPA, and at most a way from it with the same seed."""
    of_torch = {run.seed: run.final for run in runs if run.way == REFERENCE}
    return {
        "between_seeds": max(of_torch.values()) - min(of_torch.values()),
        "between_ways": max(abs(run.final - of_torch[run.seed]) for run in runs if run.seed in of_torch),
    }


def rate_of(way: str, runs: list[Run]) -> float:
    rates = [run.tokens_per_s for run in runs if run.way == way]
    return sum(rates) / len(rates)


def table(runs: list[Run]) -> str:
    lines = ["| | held-out loss, a seed each | tokens/s | to torch |", "|---|---|---:|---:|"]
    for way in WAYS:
        losses, rate = ", ".join(f"{run.final:.4f}" for run in runs if run.way == way), rate_of(way, runs)
        lines.append(f"| {way} | {losses} | {rate:,.0f} | {rate / rate_of(REFERENCE, runs):.2f}x |")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for colour, way in zip(("#3b4252", "#b5d96b", "#76b900"), WAYS, strict=True):
        for run in (run for run in runs if run.way == way):
            curves.plot(run.losses, color=colour, linewidth=0.8, label=way if run.seed == 0 else None)
        bars.barh(way, rate_of(way, runs) / 1e6, color=colour)
    curves.set(xlabel="step", ylabel="loss, nats a byte")
    curves.legend(frameon=False)
    bars.set(xlabel="million tokens/s, longer is better")
    bars.invert_yaxis()
    figure.savefig(path, dpi=120)


def told(runs: list[Run], output: Path) -> bool:
    """Prints the table, draws the picture; whether ways lie no further apart than several seeds."""
    apart, seeds = judged(runs), len({run.seed for run in runs})
    verdict = seeds < 2 or apart["between_ways"] <= apart["between_seeds"]
    said = "as they should be" if verdict else "TOO MUCH"
    print(
        f"\n{table(runs)}\n\nheld-out losses: seeds {apart['between_seeds']:.4f} apart, "
        f"ways at most {apart['between_ways']:.4f}: {'one seed tells nothing' if seeds < 2 else said}"
    )
    try:
        draw(runs, output.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed")
    return verdict


def keep(about: dict[str, Any], runs: list[Run], output: Path) -> None:
    """Whoever ends this leaves the file before or this one, not half of it."""
    result = {**about, **judged(runs), "runs": [run._asdict() for run in runs]}
    part = output.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(output.with_suffix(".json"))


def joined(paths: list[Path]) -> tuple[dict[str, Any], list[Run]]:
    """What kept results say of all their runs, and these, by seeds. Of a run that two have, the last's."""
    abouts, found = [], {}
    for path in paths:
        result = json.loads(path.read_text())
        found |= {(run["seed"], [*WAYS].index(run["way"])): Run(**run) for run in result.pop("runs")}
        abouts.append({name: x for name, x in result.items() if not name.startswith("between_")})
    if any(about != abouts[0] for about in abouts):
        raise SystemExit("results that differ in more than their runs can't be joined")
    return abouts[0], [found[key] for key in sorted(found)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--steps", type=int, help="of each run, 3 or more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of each way (default: 0 1 2)")
    parser.add_argument("--output", type=Path, default=Path("build/train_gpt"), help="of a .json and a .png")
    parser.add_argument("--from-json", type=Path, nargs="+", metavar="PATH", help="tell of kept results, joined")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 3:  # two warm up, and what comes behind is timed
        parser.error(f"--steps must be 3 or more, got {arguments.steps}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.from_json:
        about, runs = joined(arguments.from_json)
        keep(about, runs, arguments.output)
        return 0 if told(runs, arguments.output) else 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"a CPU ({platform.machine()})"
    size = SIZES["tiny" if arguments.tiny or device.type == "cpu" else "gpt"]
    size = size._replace(steps=arguments.steps or size.steps)
    every = documents(size.context)
    held_out, texts = every[::20][: 16 * size.documents], [x for i, x in enumerate(every) if i % 20]
    weights = sum(weight.numel() for weight in GPT(size, torchs).parameters())
    text = sum(map(len, texts))
    print(f"{weights / 1e6:.1f} M parameters on {name}, {text / 1e6:.1f} MB of text")
    about = {"device": name, "torch": torch.__version__, "cutlass_fmha": cutlass_fmha.__version__}
    about |= {"parameters": weights, "bytes_of_text": text, **size._asdict()}
    runs = []
    for seed in arguments.seeds:
        for way in WAYS:
            runs.append(train(way, seed, size, texts, held_out, device))
            print(
                f"seed {seed}, {way}: loss {runs[-1].final:.4f}, {runs[-1].tokens_per_s:,.0f} tokens/s",
                flush=True,
            )
            keep(about, runs, arguments.output)  # what there is, should the next run not come to its end
    return 0 if told(runs, arguments.output) else 1


if __name__ == "__main__":
    sys.exit(main())
