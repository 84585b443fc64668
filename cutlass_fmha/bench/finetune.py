"""``python -m cutlass_fmha.bench.finetune``: a training step of transformers models, ours and torch's.

A step is forward, loss, backward and AdamW, on random tokens from random weights in bf16 (on a CPU fp32). All
contenders share one model, and take turns. Where memory is short for one of them, all are measured with
activation checkpointing. Gradients are held against eager's, on small models, before anything is timed.
torch's SDPA has no softcap and its flash backend no windows: of Gemma 2 it computes something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutlass_fmha.demo.measure import wall_times
from cutlass_fmha.integrations import transformers as integration

from . import kept
from .report import table
from .runner import first_sentence
from .timing import percentile

SHAPES = ("4x4096", "1x16384")


class Model(NamedTuple):
    kind: str
    config: dict[str, Any]
    #: Of the small one, on which gradients are held against eager's.
    small: dict[str, Any]
    applies: bool = True

    def make(self, size: str, longest: int, device: torch.device) -> Any:
        import transformers

        kind: Any = getattr(transformers, self.kind)
        said = {**self.config, **(self.small if size == "small" else {}), "max_position_embeddings": longest}
        torch.manual_seed(0)
        with device:
            return kind._from_config(kind.config_class(**said), dtype=dtype_on(device))


SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
MODELS = {
    "Llama 3.2 3B": Model(
        "LlamaForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "Gemma 2 2B": Model(
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        },
        {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 16},
    ),
    "BERT large": Model(
        "BertForMaskedLM",
        {
            "vocab_size": 30522, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
        },
        {**SMALL, "num_attention_heads": 2},
        applies=False,
    ),
}  # fmt: skip

SDPA, OURS = "torch SDPA, flash", integration.NAME
REGISTERED = "torch_attention"  # transformers looks for "sdpa" and "flash" in names
#: attn_implementation, and whether ``apply`` goes with it.
CONTENDERS = {
    SDPA: (REGISTERED, False),
    OURS: (OURS, False),
    f"{OURS}_flash": (f"{OURS}_flash", False),
    f"{OURS}_flash, apply": (f"{OURS}_flash", True),
}


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def register() -> None:
    """Ours, and torch's SDPA without masks: no sequence is padded, and its flash backend takes none. So the
    windows of Gemma 2 are not hidden from it, nor has it a softcap, for which transformers refuses "sdpa".
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    integration.register()
    interface: Any = AttentionInterface
    interface.register(
        REGISTERED,
        lambda *tensors, softcap=None, sliding_window=None, **said: sdpa_attention_forward(*tensors, **said),
    )
    AttentionMaskInterface.register(REGISTERED, lambda *said, **named: None)


@contextmanager
def contender(model: Any, name: str) -> Iterator[None]:
    """The model as one of CONTENDERS, or as eager."""
    implementation, applies = CONTENDERS.get(name, (name, False))
    model.set_attn_implementation(implementation)
    forced = name == SDPA and next(model.parameters()).is_cuda
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION) if forced else nullcontext(),
        integration.apply(model) if applies else nullcontext(),
    ):
        yield


def contenders(model: Model) -> list[str]:
    return [name for name, (_, applies) in CONTENDERS.items() if model.applies or not applies]


def tokens(model: Any, batch: int, seqlen: int) -> Tensor:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (batch, seqlen), generator=generator, device=device)


# ---- gradients ---------------------------------------------------------------------------------------------


def gradients(model: Any, name: str, ids: Tensor) -> Tensor:
    """All of them, one behind the other, on the host."""
    with contender(model, name):
        loss = model(input_ids=ids, labels=ids).loss
        found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True)
    return torch.cat([x.float().flatten().cpu() for x in found])


def agreement(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Of each small model how far its gradients are off, over their norm; the reference is eager in fp32.

    A contender is right that is off no more than twice as far as eager in the model's dtype.
    """
    found = []
    for name in names:
        model = MODELS[name].make("small", 64, device).train()
        ids = tokens(model, 2, 48)
        eager = gradients(model, "eager", ids)
        of_dtype = {each: gradients(model, each, ids) for each in contenders(MODELS[name])}
        wanted = gradients(model.float(), "eager", ids)

        def off(x: Tensor, wanted: Tensor = wanted) -> float:
            return float((x - wanted).norm() / wanted.norm())

        bound = 2 * off(eager) + 1e-4
        # torch's SDPA has no softcap: it computes something else of Gemma 2.
        errors = {each: off(x) for each, x in of_dtype.items() if not (each == SDPA and "Gemma" in name)}
        right = all(error <= bound for each, error in errors.items())
        found.append({"model": name, "eager": off(eager), "errors": errors, "right": right})
    return found


# ---- speed -------------------------------------------------------------------------------------------------


def measure(name: str, size: str, batch: int, seqlen: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """One model and shape: milliseconds of a step, tokens a second and peak memory, by contender."""
    case = {"model": name, "batch": batch, "seqlen": seqlen}
    for checkpointing in (False, True):
        model = MODELS[name].make(size, seqlen, device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        fits, found = _measure(model, contenders(MODELS[name]), tokens(model, batch, seqlen), rounds)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if fits:
            break
    return {**case, "checkpointing": checkpointing, "contenders": found}


def _measure(model: Any, names: list[str], ids: Tensor, rounds: int) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Whether all had room, and what was found."""
    cuda = ids.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.config.use_cache = False
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    fits = True
    for number in range(rounds):
        for name in names:
            if "refused" in found[name]:
                continue
            try:
                with contender(model, name):
                    if number == 0:
                        found[name]["peak_bytes"] = _peak(step, cuda)
                    samples[name].append(wall_times({name: step}, "cuda" if cuda else "cpu", 0.0)[name])
            except torch.OutOfMemoryError:
                fits, found[name] = False, {"refused": "out of memory"}
            except RuntimeError as error:
                found[name] = {"refused": first_sentence(error)}
            optimizer.zero_grad()
            if not fits and not model.is_gradient_checkpointing:
                return False, found
    for name, values in samples.items():
        if values:
            us = percentile(values, 0.5)
            found[name] |= {"step_ms": us / 1e3, "tokens_per_s": ids.numel() / us * 1e6}
    return fits, found


def _peak(step: Callable[[], None], cuda: bool) -> int | None:
    """Of the second step: the first one makes the optimizer's state."""
    step()
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


# ---- the table ---------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    """Tokens a second, and how many times sdpa's they are; then what was refused, and gradients."""
    headings = ["model", "tokens", *CONTENDERS, *(f"{name} to {SDPA}" for name in [*CONTENDERS][1:])]
    headings += [f"GiB, {name}" for name in CONTENDERS]
    rows, refused = [], []
    for case in result["results"]:
        of = {name: case["contenders"].get(name, {}) for name in CONTENDERS}
        rate = {name: found.get("tokens_per_s") for name, found in of.items()}
        first, where = rate[SDPA], f"{case['batch']} x {case['seqlen']:,}"
        row = [case["model"], where + (", checkpointing" if case["checkpointing"] else "")]
        row += [f"{x:,.0f}" if x else "-" for x in rate.values()]
        row += [f"{x / first:.2f}x" if x and first else "-" for x in [*rate.values()][1:]]
        peaks = (found.get("peak_bytes") for found in of.values())
        rows.append([*row, *(f"{x / 2**30:.1f}" if x else "-" for x in peaks)])
        refused += [
            f"{case['model']}, {where}, {name}: {found['refused']}" for name, found in of.items() if "refused" in found
        ]
    lines = [f"Tokens a second of a training step, on {result['machine']['gpu'] or 'a CPU'}.", ""]
    lines += [*table(headings, rows), *([""] if refused else []), *refused, ""]
    names = ["eager", *CONTENDERS]
    cells = [
        [case["model"], *(f"{x:.1e}" if x is not None else "-" for x in map(_errors(case).get, names))]
        for case in result["gradients"]
    ]
    return "\n".join([*lines, *table(["gradients' error", *names], cells)]) + "\n"


def _errors(case: dict[str, Any]) -> dict[str, float]:
    return {"eager": case["eager"], **case["errors"]}


def _shape(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is no batch and length such as 4x4096")
    return text


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where gradients are wrong."""
    parser = argparse.ArgumentParser(prog="python -m cutlass_fmha.bench.finetune", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="BxS", help="default: %(default)s")
    parser.add_argument("--size", choices=("full", "small"), help="small is for a CPU, and its default")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contender, of five steps")
    kept.add_options(parser)
    arguments = parser.parse_args(argv)

    def found(device: torch.device) -> Iterator[dict[str, Any]]:
        register()
        size = arguments.size or ("full" if device.type == "cuda" else "small")
        result: dict[str, Any] = {"size": size, "results": []}
        result["gradients"] = agreement(arguments.models, device)
        for name in arguments.models:
            for shape in arguments.shapes:
                batch, seqlen = map(int, shape.split("x"))
                result["results"].append(measure(name, size, batch, seqlen, arguments.rounds, device))
                print(result["results"][-1], file=sys.stderr, flush=True)
                yield result

    result = kept.run(arguments, found, text)
    wrong = [case["model"] for case in result["gradients"] if not case["right"]]
    for name in wrong:
        print(f"finetune: gradients of {name} are further off than eager's allow", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
