"""Who is timed on a case: this package, the peers that have the problem in one kernel, and yardsticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import gradients
from . import peers as packages
from .cases import WINDOW, Case
from .contenders import (
    CAUSAL,
    COPY,
    DETERMINISTIC,
    OURS,
    PAGES,
    PEERS,
    PLAIN,
    Attention,
    Inputs,
    make_inputs,
    ours,
    sdpa,
)
from .features import DROPOUT, Feature


@dataclass(frozen=True)
class Contender:
    """``call`` takes the number of an input set. Not ``checked``: what it computes is another problem, or
    depends on random numbers of its own. ``flop`` and ``bytes`` are what it does, in a call."""

    call: Callable[[int], Any]
    flop: int
    bytes: int
    checked: bool = True


def line_up(
    case: Case, inputs: Inputs, peers: list[str], row: str | None = None, feature: Feature | None = None
) -> dict[str, Contender]:
    """The contenders of a case by name: ours first."""

    def of(call: Callable[[int], Any]) -> Contender:
        return Contender(call, case.flop, case.moved_bytes)

    def contender(attention: Attention, of: Case = case, checked: bool = True) -> Contender:
        return Contender(lambda number: attention(*inputs[number]), of.flop, of.moved_bytes, checked)

    if case.backward:
        found = {OURS: of(gradients.ours(case, inputs, row))}
        if row is None:
            found[DETERMINISTIC] = of(gradients.ours(case, inputs, deterministic=True))
        if case.featured:
            found[PLAIN] = dense_backward(case, inputs)
        known = {"": ("cudnn", "efficient"), **dict.fromkeys(("mask", "block_mask", "head_bias"), ("efficient",))}
        dense = () if case.lengths else known.get(case.feature, ())
        if "flash" in peers and case.feature in ("", "dropout"):  # whose dropped numbers are its own
            found["flash"] = replace(of(gradients.flash(case, inputs)), checked=not case.feature)
        elif "flash" in peers and not dense:
            plain = gradients.flash(case, inputs)
            found[CAUSAL] = Contender(plain, case.plain.flop, case.plain.moved_bytes, checked=False)
        found |= {name: of(gradients.fused(case, inputs, name)) for name in dense if name in peers}
        return found | {name: of(x) for name, x in packages.line_up(case, inputs, peers, None).items()}
    if feature is not None:
        found = {OURS: contender(with_feature(feature, row))}
        if case.group in ("ranges", "scores"):
            return found | {PLAIN: contender(ours(case.plain), case.plain, checked=False)}
        if case.group == "paged":
            found |= {name: of(paged(case, inputs, size, feature)) for name, size in PAGES.items()}
        same = peers_with(case, feature)
        for name, attention in (same | packages.line_up(case, inputs, peers, feature)).items():
            if name in peers:
                found[name] = contender(attention, checked=case.feature != "dropout")
        if not same and "flash" in peers:
            found[CAUSAL] = contender(flash_op(case.plain, {}), case.plain, checked=False)
        return found
    found = {OURS: contender(ours(case, row))}
    if case.memory_bound and case.seqlen_k % PAGES["paged"] == 0:
        found["paged"] = of(paged(case, inputs, PAGES["paged"]))
    # fp32 and large head dims are beyond the other two.
    of_group = ["efficient"] if case.group == "wide" else peers
    found |= {name: contender(sdpa(case)) for name in peers if name in of_group and name in PEERS}
    found |= {name: contender(call) for name, call in packages.line_up(case, inputs, peers, None).items()}
    if case.memory_bound:
        found[COPY] = Contender(copy(case, inputs), case.flop, case.moved_bytes, checked=False)
    return found


def dense_backward(case: Case, inputs: Inputs) -> Contender:
    """Ours where all sequences are as long as the longest, without a feature."""
    plain = make_inputs(case.plain, 1, inputs.query.device)
    call = gradients.ours(case.plain, plain)
    return Contender(lambda _: call(0), case.plain.flop, case.plain.moved_bytes, checked=False)


# ---- features ----------------------------------------------------------------------------------------------


def with_feature(feature: Feature, row: str | None) -> Attention:
    """This package's public function with the feature's arguments."""
    import cutlass_fmha

    given = {**feature.arguments, **({} if row is None else {"row": row})}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = cutlass_fmha.attention(query, key, value, **given)
        return output

    return attention


def peers_with(case: Case, feature: Feature) -> dict[str, Attention]:
    """Torch's kernels that compute the same problem."""
    given = feature.arguments
    if case.feature in ("bias", "mask"):
        return {name: sdpa(case, given[case.feature]) for name in ("efficient", "cudnn")}
    if case.feature == "dropout":
        return {name: sdpa(case, dropout_p=DROPOUT) for name in ("flash", "efficient", "cudnn")}
    if case.feature == "window" or case.lengths:
        return {"flash": flash_op(case, given)}
    return {}


def flash_op(case: Case, given: dict[str, Any]) -> Attention:
    """The op beneath torch's flash backend, which takes windows, packed sequences and used lengths, too."""
    op = torch.ops.aten._flash_attention_forward
    begins, begins_k, used = (given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    if used is not None:  # a cache is packed keys of which some are in use
        begins_k = torch.arange(case.batch + 1, dtype=torch.int32, device=used.device) * case.seqlen_k
    sizes = (begins, begins_k, case.seqlen_q, case.seqlen_k, 0.0, case.causal, False)
    more = {"window_size_left": WINDOW, "window_size_right": 0} if "window" in given else {}
    more |= {} if used is None else {"seqused_k": used}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if used is not None:
            key, value = key.flatten(0, 1), value.flatten(0, 1)
        output: Tensor = op(query, key, value, *sizes, **more)[0]
        return output

    return attention


# ---- caches ------------------------------------------------------------------------------------------------


def paged(case: Case, inputs: Inputs, page_size: int, feature: Feature | None = None) -> Callable[[int], Tensor]:
    """This package on the same keys and values in pages, which lie in random order."""
    import cutlass_fmha

    sets, batch, seqlen, *rest = inputs.key.shape
    count = batch * seqlen // page_size
    generator = torch.Generator(device=inputs.key.device).manual_seed(2)
    order = torch.randperm(count, generator=generator, device=inputs.key.device)
    table = order.to(torch.int32).view(batch, -1)
    given = {**(feature.arguments if feature else {"causal": case.causal}), "page_table": table}
    caches = []
    for tensor in (inputs.key, inputs.value):
        pages = torch.empty((sets, count, page_size, *rest), dtype=tensor.dtype, device=tensor.device)
        pages[:, order] = tensor.view(pages.shape)
        caches.append(pages)

    def call(number: int) -> Tensor:
        keys, values = (pages[number] for pages in caches)
        output: Tensor = cutlass_fmha.attention(inputs.query[number], keys, values, **given)
        return output

    return call


def copy(case: Case, inputs: Inputs) -> Callable[[int], Tensor]:
    """What memory allows: a copy that reads half of the bytes that the case has to move, and writes half."""
    shape = (inputs.sets, case.moved_bytes // 2)
    source, target = (torch.empty(shape, dtype=torch.uint8, device=inputs.key.device) for _ in range(2))
    return lambda number: target[number].copy_(source[number])
