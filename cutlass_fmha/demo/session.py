"""One run of the demo: load, embed, search, compare, explain, time, inspect; each adds to the report."""

from __future__ import annotations

import math
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.integrations import transformers as integration

from . import binary, corpus
from .measure import MIN_COSINE, Agreement, CountCalls, attention_times, wall_times
from .model import CannotLoad, SentenceEncoder, batches, model_directory

OURS = integration.NAME
STOCK = "sdpa"


class CannotRun(RuntimeError):
    """The demo can't run as asked; the message says why."""


@dataclass
class Report:
    """What was printed, as lines of Markdown, and what is wrong with the result, empty when nothing is.

    ``found``: the same for programs. ``quiet``: print nothing.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    quiet: bool = False

    def say(self, *lines: str) -> None:
        for line in () if self.quiet else lines:
            print(line, flush=True)
        self.lines += lines

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Search:
    """The encoder, the passages of the corpus, the queries, and the embeddings of both with our attention."""

    encoder: SentenceEncoder
    passages: list[corpus.Passage]
    queries: tuple[str, ...]
    passage_tokens: list[tuple[int, ...]]
    query_tokens: list[tuple[int, ...]]

    @property
    def all_tokens(self) -> list[tuple[int, ...]]:
        return self.passage_tokens + self.query_tokens

    @property
    def biggest_batch(self) -> list[tuple[int, ...]]:
        return [self.passage_tokens[number] for number in batches(self.passage_tokens)[0]]


def run(
    queries: tuple[str, ...],
    top: int,
    device: str | None,
    dtype: str | None,
    tokens: int,
    directory: Path | None,
    inspect_binary: bool,
    quiet: bool = False,
) -> Report:
    """Run every step and return the report. Raises CannotRun, CannotLoad or binary.WrongCode."""
    chosen = choose_device(device)
    data_type = getattr(torch, dtype or ("float16" if chosen.type == "cuda" else "float32"))
    report = Report(quiet=quiet)
    search = load(report, queries, chosen, data_type, tokens, directory)
    ours = embed(report, search)
    show_nearest(report, search, ours, top)
    compare(report, search, ours)
    explain(report, search)
    show_times(report, search)
    if chosen.type == "cpu" and inspect_binary:
        show_kernels(report)
    return report


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the GPU when torch and this build can both use one. Raises CannotRun."""
    usable = torch.cuda.is_available() and bool(_C.rows())
    if name == "cuda" and not usable:
        lacks = "cutlass_fmha was built without CUDA" if torch.cuda.is_available() else "torch finds no CUDA device"
        raise CannotRun(f"--device cuda: {lacks}.")
    if name is not None:
        return torch.device(name)
    return torch.device("cuda" if usable else "cpu")


def device_title(device: torch.device) -> str:
    """What the device is called, and why it is this one where that is no matter of course."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if not torch.cuda.is_available():
        return f"CPU ({platform.machine()}): no GPU here, so the op's CPU backend computes, and no kernel runs"
    return f"CPU ({platform.machine()}): as asked for, or for lack of CUDA kernels in this build"


def load(
    report: Report,
    queries: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    limit: int,
    directory: Path | None,
) -> Search:
    """Load the model, register the attention, cut the corpus."""
    begin = time.perf_counter()
    encoder = SentenceEncoder(directory or model_directory(), device, dtype)
    try:
        integration.register()
    except ImportError as error:
        raise CannotLoad(str(error)) from error
    works = corpus.load_works()
    passages = [passage for work in works for passage in corpus.cut(work, encoder.tokenise, limit)]
    dtype_title = str(dtype).removeprefix("torch.")
    report.found |= {"device": device_title(device), "dtype": dtype_title, "passages": len(passages)}
    words = sum(len(work.text.split()) for work in works)
    report.say(
        f"# cutlass_fmha {cutlass_fmha.__version__}: semantic search with our attention",
        "",
        f"- model: {directory.name if directory else 'all-MiniLM-L6-v2'}, {encoder.shape}, {dtype_title}",
        f"- device: {device_title(device)}",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- text: {len(works)} public-domain works, {words} words",
        f"- passages: {len(passages)}, of up to {limit} tokens",
        f"- loaded in {time.perf_counter() - begin:.1f} s",
    )
    return Search(
        encoder,
        passages,
        queries,
        [passage.tokens for passage in passages],
        [tuple(encoder.tokenise(query, limit)[0]) for query in queries],
    )


def embed(report: Report, search: Search) -> torch.Tensor:
    """Embeddings of passages and queries with our attention, and the proof that our op computed it."""
    groups = batches(search.all_tokens)
    with CountCalls() as counter, search.encoder.attention(OURS):
        vectors = search.encoder.embed(search.all_tokens)
    layers = search.encoder.model.config.num_hidden_layers
    report.say(
        f"- {counter.calls} calls of torch.ops.cutlass_fmha.forward: {layers} layers x {len(groups)} batches "
        f"of equal length, the biggest of {len(groups[0])} sequences",
    )
    if counter.calls != layers * len(groups):
        report.problems.append(f"{counter.calls} calls of the op instead of {layers * len(groups)}.")
    return vectors


def show_nearest(report: Report, search: Search, vectors: torch.Tensor, top: int) -> None:
    """The passages nearest to each query, by cosine."""
    passages, queries = vectors[: len(search.passages)], vectors[len(search.passages) :]
    report.say("", "## Nearest passages", "")
    for query, scores in zip(search.queries, queries @ passages.T, strict=True):
        report.say(f"**{query}**", "")
        best = scores.topk(min(top, len(search.passages)))
        nearest = report.found.setdefault("nearest", {}).setdefault(query, [])
        for score, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            passage = search.passages[number]
            nearest.append({"score": score, "title": passage.work.title, "text": passage.text})
            report.say(f"- {score:.3f} *{passage.work.title}*: {shorten(passage.text)}")
        report.say("")


def shorten(text: str, length: int = 240) -> str:
    """The first ``length`` characters at most, ended at a word and marked when something is left out."""
    return text if len(text) <= length else text[: length - 4].rsplit(" ", 1)[0] + " ..."


def compare(report: Report, search: Search, ours: torch.Tensor) -> None:
    """Agreement with the model's stock attention in the same dtype, and with eager attention in fp32."""
    encoder = search.encoder
    with encoder.attention(STOCK):
        stock = encoder.embed(search.all_tokens)
    with encoder.attention("eager"):
        eager = encoder.embed(search.all_tokens)
    pairs = {
        "ours vs torch SDPA": (ours, stock),
        "ours vs eager": (ours, eager),
        "SDPA vs eager": (stock, eager),
    }
    if encoder.dtype is not torch.float32:
        encoder.model.float()
        with encoder.attention("eager"):
            exact = encoder.embed(search.all_tokens)
        encoder.model.to(encoder.dtype)
        pairs |= {"ours vs eager fp32": (ours, exact), "SDPA vs eager fp32": (stock, exact)}
    dtype = str(encoder.dtype).removeprefix("torch.")
    report.say(
        "## Agreement of the embeddings",
        "",
        f"Unit vectors of {ours.shape[1]} entries, model in {dtype}.",
        "",
        "| compared | max error | mean error | least cosine |",
        "|---|---:|---:|---:|",
    )
    for title, (one, other) in pairs.items():
        found = Agreement.of(one, other)
        report.found.setdefault("agreement", {})[title] = asdict(found)
        report.say(f"| {title} | {found.max_abs:.2e} | {found.mean_abs:.2e} | {found.min_cosine:.7f} |")
        if not found.good(encoder.dtype):
            least = MIN_COSINE[encoder.dtype]
            report.problems.append(f"{title}: least cosine {found.min_cosine:.7f} is below {least} for {dtype}.")
    if encoder.device.type == "cpu":
        report.say(
            "",
            "The CPU backend may take the kernel that torch's SDPA has; eager attention shares nothing.",
        )
    count = len(search.passages)
    same = (ours[count:] @ ours[:count].T).argmax(-1) == (stock[count:] @ stock[:count].T).argmax(-1)
    report.say("", f"The nearest passage is the same for {int(same.sum())} of {len(search.queries)} queries.", "")


def explain(report: Report, search: Search) -> None:
    """Which row ran the biggest batch, and why; on a CPU also what a GPU would run."""
    query, key, value = search.encoder.first_layer_heads(search.biggest_batch)
    found = cutlass_fmha.explain(query, key, value)
    report.found |= {"row": found.winner, "why": found.note}
    report.say("## What ran, and why", "", f"- problem: {found.problem}", f"- device: {found.device or 'CPU'}")
    report.say(f"- runs: {found.note}")
    eligible = [verdict for verdict in found.rows if verdict.eligible]
    for verdict in eligible:
        report.say(f"    - {verdict.row.name}: eligible, predicted {verdict.predicted_us:.1f} us")
    refused = len(found.rows) - len(eligible)
    if refused:
        nearest = next(verdict for verdict in found.rows if not verdict.eligible)
        report.say(f"    - {refused} rows refused, such as {nearest.row.name}: {'; '.join(nearest.reasons)}")
    if found.device is None and found.rows:
        for name in ("rtx4090", "rtx5090"):
            there = cutlass_fmha.explain(shape=query.shape, dtype="float16", device=name)
            report.say(f"- on {there.device}, in float16: {there.note}")
    report.say("")


def show_times(report: Report, search: Search) -> None:
    """Attention alone on the biggest batch's first layer, and the whole text through the model."""
    encoder = search.encoder
    query, key, value = encoder.first_layer_heads(search.biggest_batch)
    attention = attention_times(query, key, value, 1.0 / math.sqrt(query.shape[-1]))

    def whole_text(name: str) -> object:
        with encoder.attention(name):
            return encoder.embed(search.passage_tokens)

    device = encoder.device.type
    model = wall_times({"cutlass_fmha": lambda: whole_text(OURS), "torch SDPA": lambda: whole_text(STOCK)}, device, 1.0)
    report.found["microseconds"] = {"attention": attention, "model": model}
    batch, seqlen, heads, head_dim = query.shape
    how = "replays of CUDA graphs" if device == "cuda" else "eager calls"
    where = "on the GPU" if device == "cuda" else f"on {torch.get_num_threads()} CPU threads"
    report.say(
        "## Time",
        "",
        "| what | cutlass_fmha | torch SDPA | ours is |",
        "|---|---:|---:|---:|",
        time_row(f"attention, B{batch} H{heads} S{seqlen} D{head_dim} ({how})", attention),
        time_row(f"all {len(search.passages)} passages through the model", model),
        "",
        f"Medians after a warm-up, in turns, {where}."
        + ("" if device == "cuda" else " Mostly the same CPU kernel either way: this says nothing of a GPU."),
        "",
    )


def time_row(title: str, times: dict[str, float]) -> str:
    """A row of the table of times, which are in microseconds: printed so when short, else in milliseconds."""
    ours, theirs = times["cutlass_fmha"], times["torch SDPA"]
    unit, name = (1.0, "us") if max(ours, theirs) < 1000 else (1e-3, "ms")
    return f"| {title} | {ours * unit:.1f} {name} | {theirs * unit:.1f} {name} | {theirs / ours:.2f}x |"


def show_kernels(report: Report) -> None:
    """Without a GPU: read one architecture's machine code, to show that the kernels were built as meant.

    A missing reader is said and no failure; kernels that are missing, spill or lack tensor-core instructions
    are.
    """
    rows = [*_C.rows(), *_C.backward_rows()]
    report.say("## The compiled kernels", "")
    if not rows:
        report.say("This build has no kernels (CUTLASS_FMHA_CUDA=OFF): there is nothing to inspect.", "")
        return
    arch = min(row.arch for row in rows)
    without_mma = (*tables.WIDE, "backward_wide")
    names = {row.name for row in rows if row.arch == arch and row.family not in without_mma}
    others = {row.name for row in (*rows, *_C.helpers()) if row.arch == arch} - names
    try:
        target = tables.this_build().architectures[arch].split(",")[-1].rstrip("af")
        kernels = binary.inspect(Path(_C.__file__), int(target))
    except binary.CannotInspect as error:
        report.say(f"Not inspected: {error}", "")
        return
    binary.check(kernels, names, others)
    report.say(
        "No GPU runs them here, so their machine code was read: "
        f"{len(kernels)} kernels for sm_{arch}, no stack, no spills.",
        "",
        "| kernel | registers | tensor-core instructions |",
        "|---|---:|---:|",
        *(f"| {kernel.name} | {kernel.registers} | {kernel.mma} |" for kernel in kernels),
        "",
    )
