"""``python -m cutlass_fmha.bench.models``: an attention call as transformers models make it, by each of four.

Masks and T5's position bias are made by transformers' own functions, outside of what is timed. Errors are those of
one sequence and key head, its tokens alone, against fp64; times are the GPU's (CUDA graphs), on the CPU those of the
wall. On a GPU the host time of a call through each surface is added.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha.demo.measure import times_in_turns
from cutlass_fmha.integrations import transformers as integration

from . import kept
from .report import table
from .surfaces import HEADINGS, measure_surfaces, rows

OURS = (integration.NAME, f"{integration.NAME}_flash")
CONTENDERS = ("eager", "sdpa", *OURS)


class Model(NamedTuple):
    """The attention of a model: of one GPU where eight share it (DeepSeek-V3)."""

    name: str
    #: transformers.models.<module>, whose eager attention is asked.
    module: str
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = True
    #: Keys that a query sees, its own the last of them; if not causal, so many on each side of its own.
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    #: T5's: numbers by distance and head, added to the scores.
    position_bias: bool = False
    #: Whether queries come as they meet keys: the call's scale is 1.
    prescaled: bool = False
    #: Whether the model lays out its tensors by heads, then tokens.
    heads_first: bool = False
    #: Of cross attention; else as many as queries.
    keys: int | None = None
    #: Whether the model pads: images and Whisper's sounds are of one size.
    pads: bool = True

    def contenders(self) -> list[str]:
        """SDPA has no softcap and no sinks, "_flash" no bias."""
        lacks = {"sdpa": self.softcap or self.sinks, OURS[1]: self.position_bias}
        return [name for name in CONTENDERS if not lacks.get(name)]

    def modes(self) -> list[str]:
        return [*MODES] if self.pads else ["full"]


MODELS = (
    Model("BERT large", "bert", 16, 16, 64, 64, causal=False),
    Model("ModernBERT large, window", "modernbert", 16, 16, 64, 64, causal=False, window=64),
    Model("ViT large", "vit", 16, 16, 64, 64, causal=False, pads=False),
    Model("T5 large, encoder", "t5", 16, 16, 64, 64, causal=False, position_bias=True, prescaled=True),
    Model("Whisper large-v3, decoder", "whisper", 20, 20, 64, 64, prescaled=True, heads_first=True),
    Model(
        "Whisper large-v3, cross to 1500", "whisper", 20, 20, 64, 64, causal=False, prescaled=True, heads_first=True,
        keys=1500, pads=False,
    ),
    Model("Llama 3.1 8B", "llama", 32, 8, 128, 128),
    Model("Qwen3 8B", "qwen3", 32, 8, 128, 128),
    Model("Mistral 7B", "mistral", 32, 8, 128, 128, window=4096),
    Model("Gemma 2 9B", "gemma2", 16, 8, 256, 256, softcap=50.0),
    Model("Gemma 2 9B, window", "gemma2", 16, 8, 256, 256, window=4096, softcap=50.0),
    Model("Gemma 3 12B", "gemma3", 16, 8, 256, 256),
    Model("Gemma 3 12B, window", "gemma3", 16, 8, 256, 256, window=1024),
    Model("gpt-oss 20B, window", "gpt_oss", 64, 8, 64, 64, window=128, sinks=True),
    Model("DeepSeek-V3 / 8", "deepseek_v3", 16, 16, 192, 128),
)  # fmt: skip
MODULES = [*dict.fromkeys(model.module for model in MODELS)]
#: Of four sequences, the part of each that is tokens; half of "half padding" is not.
MODES = {"full": (1.0, 1.0, 1.0, 1.0), "half padding": (1.0, 0.5, 0.25, 0.25)}


class Problem:
    """Tensors of a model's layer, and what each contender computes of them."""

    def __init__(self, model: Model, mode: str, seqlen: int, device: torch.device) -> None:
        self.model, self.seqlen = model, seqlen
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        batch, sizes = len(MODES[mode]), (model.head_dim, model.head_dim, model.head_dim_v)
        heads = (model.num_heads, model.num_heads_kv, model.num_heads_kv)
        lengths = (seqlen, model.keys or seqlen, model.keys or seqlen)
        self.operands = [drawn(batch, *each).transpose(1, 2) for each in zip(lengths, heads, sizes, strict=True)]
        scale = model.head_dim**-0.5
        if model.prescaled:
            self.operands[0] *= scale
        if model.heads_first:
            self.operands = [x.contiguous() for x in self.operands]
        self.said = {"softcap": model.softcap, "scaling": 1.0 if model.prescaled else scale, "dropout": 0.0}
        begins = torch.tensor([round(seqlen * (1 - part)) for part in MODES[mode]], device=device)
        self.tokens = torch.arange(seqlen, device=device) >= begins[:, None]  # padding is on the left
        self.padded = not bool(self.tokens.all())
        sinks = drawn(model.num_heads) if model.sinks else None
        self.layer = self._layer(sinks)
        self.modeling = importlib.import_module(f"transformers.models.{model.module}.modeling_{model.module}")
        self.eager = self.modeling.eager_attention_forward
        self.bias = self._position_bias(drawn) if model.position_bias else None

    def _layer(self, sinks: Tensor | None) -> Any:
        model = self.model
        groups = {"num_key_value_groups": model.num_heads // model.num_heads_kv, "head_dim": model.head_dim}
        return SimpleNamespace(is_causal=model.causal, training=False, sinks=sinks, **groups)

    def _position_bias(self, drawn: Callable[..., Tensor]) -> Tensor:
        """As T5 makes it [1, num_heads, seqlen, seqlen]: a pair's numbers of all heads are neighbours in memory."""
        config = self.modeling.T5Config(num_heads=self.model.num_heads)
        layer = self.modeling.T5Attention(config, has_relative_attention_bias=True)
        table = drawn(config.relative_attention_num_buckets, config.num_heads)
        layer.relative_attention_bias = torch.nn.Embedding.from_pretrained(table)
        made: Tensor = layer.compute_bias(self.seqlen, self.seqlen)
        return made

    def mask(self, name: str) -> Tensor | None:
        from transformers import masking_utils

        model, like = self.model, self.operands[0]
        kind = "causal" if model.causal else "bidirectional"
        function = getattr(masking_utils, f"{kind}_mask_function")
        if model.window is not None:
            function = getattr(masking_utils, f"sliding_window_{kind}_mask_function")(model.window)
        made: Tensor | None = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name](
            len(self.tokens), like.shape[2], self.operands[1].shape[2], mask_function=function, local_size=model.window,
            attention_mask=self.tokens if self.padded else None, allow_is_causal_skip=model.causal,
            allow_is_bidirectional_skip=not model.causal, dtype=like.dtype, device=like.device,
        )  # fmt: skip
        return made

    def call(self, name: str) -> Callable[[], Any]:
        from transformers import AttentionInterface

        model = self.model
        interface: Any = AttentionInterface
        function = interface().get_interface(name, self.eager)
        window = model.window if model.window is None or model.causal else model.window + 1  # with the query's own
        said = self.said | {"s_aux": self.layer.sinks, "sliding_window": window, "position_bias": self.bias}
        mask = self.mask(name)
        return lambda: function(self.layer, *self.operands, mask, **said)[0]

    def errors(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Largest difference of the last sequence's tokens under the first key head."""
        heads = self.model.num_heads // self.model.num_heads_kv
        q, k, v = (x[-1:, :n].double() for x, n in zip(self.operands, (heads, 1, 1), strict=True))
        mask = self.mask("eager")
        sinks = None if self.layer.sinks is None else self.layer.sinks[:heads].double()
        said = self.said | {"position_bias": None if self.bias is None else self.bias[:, :heads].double()}
        seen = None if mask is None else mask[-1:].double()
        wanted = self.eager(self._layer(sinks), q, k, v, seen, **said)[0][0, self.tokens[-1]]
        return {
            name: (call()[-1, self.tokens[-1], :heads].double() - wanted).abs().max().item()
            for name, call in calls.items()
        }


@torch.no_grad()
def measure(modules: list[str], seqlens: list[int], device: torch.device, budget_s: float) -> Iterator[dict[str, Any]]:
    """Of each model, mode and length the contenders' errors and microseconds; none where memory is short."""
    for model in (each for each in MODELS if each.module in modules):
        for mode in model.modes():
            for seqlen in seqlens:
                problem = Problem(model, mode, seqlen, device)
                calls = {name: problem.call(name) for name in model.contenders()}
                short = [name for name, call in calls.items() if not _fits(call, device.type == "cuda")]
                calls = {name: call for name, call in calls.items() if name not in short}
                errors, times = problem.errors(calls), times_in_turns(calls, device.type, budget_s)
                case = {"model": model.name, "mode": mode, "seqlen": seqlen, "error": errors, "us": times}
                print(*_row(case), sep="  ", file=sys.stderr, flush=True)
                yield case


def _fits(call: Callable[[], object], cuda: bool) -> bool:
    """Whether a call's graph will have room, which keeps all that the call takes."""
    if not cuda:
        return True
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        call()
    except torch.OutOfMemoryError:
        return False
    return torch.cuda.max_memory_allocated() < 0.7 * torch.cuda.get_device_properties(0).total_memory


def _row(result: dict[str, Any]) -> list[str]:
    def cell(values: dict[str, float], name: str, form: str) -> str:
        return format(values[name], form) if name in values else "-"

    cells = [result["model"], result["mode"], str(result["seqlen"])]
    cells += [cell(result["error"], name, ".1e") for name in CONTENDERS]
    cells += [cell(result["us"], name, ".1f") for name in CONTENDERS]
    us = result["us"]
    ours = us.get(OURS[1]) or us[OURS[0]]  # "_flash" wherever it takes the model
    return [*cells, *(f"{us[name] / ours:.2f}x" if name in us else "-" for name in CONTENDERS[:2])]


def text(result: dict[str, Any]) -> str:
    """The tables of a result, as Markdown."""
    columns = [f"{what}, {name}" for what in ("worst error", "us") for name in CONTENDERS]
    columns += [f"{name} takes, of ours" for name in CONTENDERS[:2]]
    lines = table(["model", "mode", "seqlen", *columns], map(_row, result["results"]))
    lines += ["", *table(HEADINGS, rows(result["host_us"]))] if result["host_us"] else []
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutlass_fmha.bench.models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODULES, default=MODULES, metavar="NAME")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of each contender and case")
    kept.add_options(parser)
    arguments = parser.parse_args(argv)

    def found(device: torch.device) -> Iterator[dict[str, Any]]:
        integration.register()
        result: dict[str, Any] = {"results": [], "host_us": {}}
        for case in measure(arguments.models, arguments.seqlens, device, arguments.budget):
            result["results"].append(case)
            yield result
        if device.type == "cuda":
            yield result | {"host_us": measure_surfaces()}

    kept.run(arguments, found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
