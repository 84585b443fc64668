"""``cutlass-fmha memory``: what a problem takes, or the longest sequences that fit on each GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cutlass_fmha.cli import output
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.memory.plan import STAND_INS, MemoryPlan, memory_plan

#: Heads, heads of key and value, head dim of a model's attention.
MODELS: Mapping[str, tuple[int, int, int]] = {
    "GPT-2": (12, 12, 64),
    "Llama 3 8B": (32, 8, 128),
    "Gemma 2 9B": (16, 8, 256),
}
GPUS = ("l4", "l40s", "rtx4090", "rtx5080", "rtx5090", "rtxpro6000")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
STEP = 1024
TOTALS = ("forward", "backward", "saved", "total", "unfused", "share_saved")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha memory",
        description="Print what attention allocates on a GPU, which needn't be here.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shape",
        type=output.sizes,
        metavar="B,S,H,D",
        help="batch, seqlen_q, num_heads, head_dim",
    )
    what.add_argument("--table", action="store_true", help="the longest sequences of usual models on usual GPUs")
    parser.add_argument("--seqlen-k", type=int, metavar="S", help="number of keys (default: seqlen_q)")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="heads of key and value (default: num_heads)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="of value and output, if another one")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="a causal mask, bottom-right")
    parser.add_argument("--backward", action="store_true", help="and gradients")
    parser.add_argument(
        "--features",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAMES",
        help="what comes with the problem, separated by commas: " + ", ".join(STAND_INS),
    )
    parser.add_argument("--device", metavar="NAME", help="as explain takes it (default: cuda:0)")
    output.add_json(parser)
    arguments = parser.parse_args(argv)
    if arguments.table:
        said = {name for name, x in vars(arguments).items() if x != parser.get_default(name)} - {"table", "json"}
        if said:
            parser.error(f"--table takes no {', '.join(f'--{name}' for name in sorted(said)).replace('_', '-')}")
    try:
        if arguments.table:
            content: dict[str, Any] = figures()
            text = drawn(content) if output.draws() else [markdown(content)]
        else:
            plan = _plan(arguments)
            content, text = asdict(plan), output.told(plan)
            content |= {name: getattr(plan, name) for name in TOTALS}
    except (TypeError, ValueError, RuntimeError) as error:  # no row; an old driver
        parser.error(str(error))
    output.emit(content, text, arguments.json)
    return 0


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    return memory_plan(
        shape=arguments.shape,
        seqlen_k=arguments.seqlen_k,
        num_heads_kv=arguments.kv_heads,
        head_dim_v=arguments.head_dim_v,
        dtype=arguments.dtype,
        causal=arguments.causal,
        backward=arguments.backward,
        features=arguments.features,
        device=arguments.device,
    )


def of_model(model: str, seqlen: int, device: str, backward: bool) -> MemoryPlan:
    """One layer's attention of a sequence, causal, in bfloat16."""
    heads, heads_kv, head_dim = MODELS[model]
    shape = (1, seqlen, heads, head_dim)
    return memory_plan(shape=shape, num_heads_kv=heads_kv, causal=True, device=device, backward=backward)


def longest(model: str, device: str, room: int, unfused: bool) -> int:
    """The longest sequence that is trained in ``room`` bytes, in steps of STEP."""

    def fits(steps: int) -> bool:
        plan = of_model(model, steps * STEP, device, backward=True)
        return (plan.unfused if unfused else plan.total) <= room

    least, most = 0, 1
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least * STEP


def figures() -> dict[str, list[dict[str, Any]]]:
    """By length, what is saved; by GPU, the tokens that fit. Of each model two, see the names."""
    both = {"forward": False, "with_backward": True}
    saved = [
        {
            "tokens": seqlen,
            "models": {m: {x: of_model(m, seqlen, "l4", y).share_saved for x, y in both.items()} for m in MODELS},
        }
        for seqlen in LENGTHS
    ]
    how = {"fused": False, "unfused": True}
    fits = []
    for gpu in GPUS:
        gb, name = devices.MEMORY_GB[gpu], devices.PRESETS[gpu].name.removeprefix("NVIDIA ")
        models = {m: {x: longest(m, gpu, gb * 10**9, y) for x, y in how.items()} for m in MODELS}
        fits.append({"gpu": name, "gb": gb, "models": models})
    return {"share_saved": saved, "longest": fits}


def tables(found: dict[str, list[dict[str, Any]]]) -> list[output.Table]:
    saved = [
        [f"{row['tokens']:,}", *(" / ".join(f"{x:.0%}" for x in of.values()) for of in row["models"].values())]
        for row in found["share_saved"]
    ]
    fits = [
        [row["gpu"], str(row["gb"]), *(" / ".join(f"{x:,}" for x in of.values()) for of in row["models"].values())]
        for row in found["longest"]
    ]
    return [output.Table(["tokens", *MODELS], saved), output.Table(["GPU", "GB", *MODELS], fits)]


def drawn(found: dict[str, list[dict[str, Any]]]) -> list[str | output.Table]:
    saved, fits = tables(found)
    return ["Saved: of a call / with gradients", saved, "Longest sequence trained: fused / with scores in memory", fits]


def markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    return "\n\n".join(
        "\n".join([_row(*x.headings), _row("---", *["---:"] * (len(x.headings) - 1)), *(_row(*row) for row in x.rows)])
        for x in tables(found)
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
