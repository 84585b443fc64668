"""Who is timed on a case: this package, the peers that have the problem in one kernel, and yardsticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .cases import WINDOW, Case
from .contenders import CAUSAL, COPY, OURS, PAGED, Attention, Inputs, ours, sdpa
from .features import DROPOUT, Feature

PAGE_SIZE = 64


@dataclass(frozen=True)
class Contender:
    """``call`` takes the number of an input set. Not ``checked``: what it computes is another problem, or
    depends on random numbers of its own. ``flop`` and ``bytes`` are what it does, in a call."""

    call: Callable[[int], Tensor]
    flop: int
    bytes: int
    checked: bool = True


def line_up(
    case: Case, inputs: Inputs, peers: list[str], row: str | None = None, feature: Feature | None = None
) -> dict[str, Contender]:
    """The contenders of a case by name: ours first."""

    def contender(attention: Attention, of: Case = case, checked: bool = True) -> Contender:
        return Contender(lambda number: attention(*inputs[number]), of.flop, of.moved_bytes, checked)

    if feature is not None:
        found = {OURS: contender(with_feature(case, feature, row))}
        same = peers_with(case, feature)
        for name in peers:
            if name in same:
                found[name] = contender(same[name], checked=case.feature != "dropout")
        if not same and "flash" in peers:
            plain = replace(case, feature="")
            found[CAUSAL] = contender(flash_op(plain, {}), plain, checked=False)
        return found
    found = {OURS: contender(ours(case, row))}
    if case.memory_bound:
        found[PAGED] = Contender(paged(inputs), case.flop, case.moved_bytes)
    # fp32 and large head dims are beyond the other two.
    of_group = ["efficient"] if case.group == "wide" else peers
    found |= {name: contender(sdpa(case)) for name in peers if name in of_group}
    if case.memory_bound:
        found[COPY] = Contender(copy(case, inputs), case.flop, case.moved_bytes, checked=False)
    return found


# ---- features ----------------------------------------------------------------------------------------------


def with_feature(case: Case, feature: Feature, row: str | None) -> Attention:
    """This package's public function with the feature's arguments."""
    import cutlass_fmha

    packed = "cu_seqlens_q" in feature.arguments

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = [x.flatten(0, 1) for x in (query, key, value)] if packed else [query, key, value]
        output: Any = cutlass_fmha.attention(*given, causal=case.causal, row=row, **feature.arguments)
        return output.view(query.shape)  # type: ignore[no-any-return]

    return attention


def peers_with(case: Case, feature: Feature) -> dict[str, Attention]:
    """Torch's kernels that compute the same problem."""
    given = feature.arguments
    if case.feature in ("bias", "mask"):
        return {name: sdpa(case, given[case.feature]) for name in ("efficient", "cudnn")}
    if case.feature == "dropout":
        return {name: sdpa(case, dropout_p=DROPOUT) for name in ("flash", "efficient", "cudnn")}
    if case.feature in ("window", "documents"):
        return {"flash": flash_op(case, given)}
    return {}


def flash_op(case: Case, given: dict[str, Any]) -> Attention:
    """The op beneath torch's flash backend, which takes windows and packed sequences, too."""
    op = torch.ops.aten._flash_attention_forward
    ends, length = given.get("cu_seqlens_q"), given.get("max_seqlen_q", case.seqlen_q)
    window = {"window_size_left": WINDOW, "window_size_right": 0} if "window" in given else {}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = [query, key, value] if ends is None else [x.flatten(0, 1) for x in (query, key, value)]
        output: Tensor = op(*tensors, ends, ends, length, length, 0.0, case.causal, False, **window)[0]
        return output.view(query.shape)

    return attention


# ---- decoding ----------------------------------------------------------------------------------------------


def paged(inputs: Inputs) -> Callable[[int], Tensor]:
    """This package on the same keys and values in pages, which lie in random order."""
    import cutlass_fmha

    sets, batch, seqlen, *rest = inputs.key.shape
    count = batch * seqlen // PAGE_SIZE
    generator = torch.Generator(device=inputs.key.device).manual_seed(2)
    order = torch.randperm(count, generator=generator, device=inputs.key.device)
    table = order.to(torch.int32).view(batch, -1)
    caches = []
    for tensor in (inputs.key, inputs.value):
        pages = torch.empty((sets, count, PAGE_SIZE, *rest), dtype=tensor.dtype, device=tensor.device)
        pages[:, order] = tensor.view(pages.shape)
        caches.append(pages)

    def call(number: int) -> Tensor:
        keys, values = (pages[number] for pages in caches)
        output: Any = cutlass_fmha.attention(inputs.query[number], keys, values, page_table=table)
        return output  # type: ignore[no-any-return]

    return call


def copy(case: Case, inputs: Inputs) -> Callable[[int], Tensor]:
    """What memory allows: a copy that reads half of the bytes that the case has to move, and writes half."""
    shape = (inputs.sets, case.moved_bytes // 2)
    source, target = (torch.empty(shape, dtype=torch.uint8, device=inputs.key.device) for _ in range(2))
    return lambda number: target[number].copy_(source[number])
