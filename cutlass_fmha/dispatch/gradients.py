"""Which row computes the gradients of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

from cutlass_fmha import _C
from cutlass_fmha.arguments.check import integer
from cutlass_fmha.cost import gradients as cost
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families.family import (
    Rule,
    alignment,
    dtype,
    has_no,
    head_dims,
    made_for_device,
    shared_memory,
    whole_blocks,
)
from cutlass_fmha.dispatch.problem import FEATURES, Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.errors import UnsupportedError

#: What a call may say beyond a causal mask and be differentiable by every row: which keys a query sees, and
#: sinks, which the LSE knows; and by rows that know scores. Names of FEATURES.
KNOWN = frozenset({"window", "prefix", "varlen", "lengths", "leftpad", "sinks"})
SCORED = KNOWN | {"mask", "bias", "block_mask", "softcap", "alibi", "dropout"}
#: Queries and keys of a piece of a tile: blocks of lists are multiples of it, as all rows of the forward ask.
BLOCK = (16, 32)


def lacking(problem: Problem, known: frozenset[str] = SCORED) -> tuple[str, ...]:
    return tuple(name for name in problem.features if name not in known)


def _features(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    names = lacking(problem, SCORED if row.scored else KNOWN)
    return has_no(names) if names else None


def _bias_gradient(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if row.family == "backward_wide" or not problem.bias_gradient or "softcap" not in problem.features:
        return None
    return "has no gradient of a bias beside a softcap"


def _head_dim(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if max(problem.head_dim, problem.value_dim) <= row.head_dim:
        return None
    return f"made for head dims up to {row.head_dim}, and the tensors have {head_dims(problem)}"


def _block_mask(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return whole_blocks(problem, *BLOCK) if row.scored else None


RULES: tuple[Rule, ...] = (
    made_for_device,
    dtype,
    _head_dim,
    _features,
    _bias_gradient,
    _block_mask,
    shared_memory,
    alignment,
)

#: Bytes of dS that deterministic gradients may have in memory, where a call says nothing.
DEFAULT_WORKSPACE = 1 << 30
_workspace = DEFAULT_WORKSPACE


def set_deterministic_workspace(size: int | None) -> int:
    """Sets the bytes of dS that ``deterministic=True`` may have where no call says; returns those before.

    ``size`` None: 1 GiB, as it is at first. 0: gradients of q are summed in order. It holds for all threads,
    from the next backward on, whenever its forward was.

    Raises TypeError or ValueError for what is no size.
    """
    global _workspace
    if size is not None and integer("size", size, "") < 0:
        raise ValueError(f"size must be 0 bytes or more, or None, got {size}")
    before, _workspace = _workspace, DEFAULT_WORKSPACE if size is None else size
    return before


def deterministic_workspace() -> int:
    return _workspace


class Route(NamedTuple):
    """How gradients are computed, and why so, where there were two ways. ``heads``: of keys, whose dS is in
    memory at a time, and takes ``scores`` bytes there; 0 of a row that writes none."""

    row: Row
    heads: int = 0
    scores: int = 0
    why: str = ""


def scores_of_a_head(row: Row, problem: Problem) -> int:
    """Bytes of dS that a row writes of a head of keys, with all heads of queries that share it."""
    p = _C.AttentionParams()
    p.batch, p.seqlen_q, p.seqlen_k = problem.batch, problem.seqlen_q, problem.seqlen_k
    p.num_heads, p.num_heads_kv = problem.num_heads, problem.num_heads_kv
    p.bottom_right = problem.causal != "top-left"
    p.window_left, right = problem.window
    p.window_right = right if problem.causal == "none" else 0
    if "prefix" in problem.features:
        p.prefix_lengths = 4  # there is one: nothing reads it
    if problem.block_mask is not None:
        p.block_m = problem.block_mask[0]
    return _C.BackwardParams(p).scores_bytes(row.tile_m, row.tile_n)


def bias_sums(own: tuple[int, ...], whole: tuple[int, ...], deterministic: bool, most: int | None) -> tuple[int, ...]:
    """The shape of what a bias's gradient is summed in: its own, where sums over what it is broadcast along come in any
    order; where that has to be fixed that of all scores, ``whole``, which torch sums. Raises UnsupportedError where
    these take more bytes than ``most``, or than ``deterministic_workspace()``."""
    if not deterministic or (1,) * (4 - len(own)) + own == whole:
        return own
    most = deterministic_workspace() if most is None else most
    if (size := 4 * math.prod(whole)) > most:
        raise UnsupportedError(
            f"the gradient of a bias that is broadcast is summed, where its bits have to be the same each time, of one "
            f"of all scores, {size} bytes, and deterministic_workspace is {most}: pass more, or, of packed sequences, "
            "max_seqlen_q and max_seqlen_k"
        )
    return whole


def writes_scores(row: Row) -> bool:
    """Whether a row leaves dS in memory, of which another makes dQ."""
    return row.family == "backward" and row.writes_scores


def reasons(
    row: Row,
    problem: Problem,
    device: Device,
    table: Table,
    deterministic: bool = False,
    workspace: int | None = None,
) -> list[str]:
    """Why a row can't compute the gradients of a problem; empty when it can.

    ``workspace``: the bytes of dS that it may write; None: as many as are set.
    """
    found = [sentence for rule in RULES if (sentence := rule(row, problem, device, table)) is not None]
    if writes_scores(row):
        if (row.arch, row.dtype, row.head_dim) not in tables.query_products():
            found.append("writes dS, and this build has no row that makes dQ of it")
        most = _workspace if workspace is None else workspace
        if not found and (one := scores_of_a_head(row, problem)) > most:
            found.append(f"writes {one} bytes of dS for a head of keys, and deterministic_workspace is {most}")
    elif deterministic and not row.scored:
        found.append("sums dQ in no fixed order")
    return found


def choose(
    problem: Problem,
    device: Device,
    name: str | None = None,
    deterministic: bool = False,
    workspace: int | None = None,
) -> Route:
    """The row with the least head dim among those that can, which knows no more than it must; or that named. Of
    several such, that whose tiles of keys suit the lengths best.

    Of deterministic gradients the cheaper of two: one that sums dQ in order, one that writes dS.

    Raises UnsupportedError, and ValueError for a name that no row has.
    """
    table = tables.backward()
    if name is not None:
        row = table.by_name(name)
        if why := reasons(row, problem, device, table, deterministic, workspace):
            raise UnsupportedError(f"row {name} can't compute the gradients of {problem}: {'; '.join(why)}")
        return _route(row, problem, device, workspace)

    def ask(writing: bool) -> list[tuple[Row, list[str]]]:
        rows = (row for row in table.rows if writes_scores(row) == writing)
        return [(row, reasons(row, problem, device, table, deterministic, workspace)) for row in rows]

    # Where any order will do, bytes of dS are not asked: of sizes that are symbols they make constants.
    against = ask(writing=False)
    if deterministic or all(sentences for _, sentences in against):
        against += ask(writing=True)
    possible = sorted(
        (row for row, sentences in against if not sentences),
        key=lambda row: (row.head_dim, row.scored, row.index),
    )
    if possible and deterministic:
        return _cheaper(possible, problem, device, workspace)
    if possible:
        return _of_alike(alike(possible), problem, device, workspace)
    if not table.rows:
        raise UnsupportedError("this build of cutlass_fmha has no kernels that compute gradients")
    nearest = sorted(against, key=lambda entry: len(entry[1]))[:3]
    lines = [f"  {row.name}: {'; '.join(sentences)}" for row, sentences in nearest]
    raise UnsupportedError(f"no kernel of this build computes the gradients of {problem}:\n" + "\n".join(lines))


def alike(possible: list[Row]) -> list[Row]:
    """The first of some rows, and those that differ from it in their tiles alone."""
    return [row for row in possible if (row.head_dim, row.scored) == (possible[0].head_dim, possible[0].scored)]


def _of_alike(rows: list[Row], problem: Problem, device: Device, workspace: int | None) -> Route:
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads, problem.num_heads_kv)
    # Sizes that are symbols of torch.compile are not compared: they would become constants.
    if len(rows) == 1 or any(type(size) is not int for size in (*sizes, *problem.window, *problem.mean)):
        return _route(rows[0], problem, device, workspace)
    prices = cost.prices(rows, device, store.for_device(device))
    us = [cost.walks_us(row, problem, device, price) for row, price in zip(rows, prices, strict=True)]
    (least, row), (next_least, other) = sorted(zip(us, rows, strict=True), key=lambda pair: pair[0])[:2]
    why = f"{least:.0f} us predicted, {next_least:.0f} by {other.name}"
    return _route(row, problem, device, workspace)._replace(why=why)


def _cheaper(possible: list[Row], problem: Problem, device: Device, workspace: int | None) -> Route:
    summing = [row for row in possible if not writes_scores(row)]
    sums = _of_alike(alike(summing), problem, device, workspace).row if summing else None
    product = next((row for row in possible if writes_scores(row)), None)
    if product is None:
        assert sums is not None
        return Route(sums)
    by_product = _route(product, problem, device, workspace)
    if sums is None:
        return by_product
    turns = cost.turns(problem, by_product.heads)
    written = cost.product_us(product, problem, device, by_product.heads)
    summed = cost.sums_us(sums, problem, device)
    if written <= summed:
        return by_product._replace(
            why=f"dS is written, {by_product.scores} bytes in {turns} turn{'s' * (turns != 1)}: "
            f"{written:.0f} us predicted, {summed:.0f} for sums of dQ in order"
        )
    return Route(sums, why=f"dQ is summed in order: {summed:.0f} us predicted, {written:.0f} where dS is written")


def _route(row: Row, problem: Problem, device: Device, workspace: int | None) -> Route:
    if not writes_scores(row):
        return Route(row)
    one, most = scores_of_a_head(row, problem), _workspace if workspace is None else workspace
    all_heads = problem.batch * problem.num_heads_kv
    heads = cost.heads_at_once(row, problem, device, max(1, all_heads if one == 0 else most // one))
    return Route(row, heads, min(heads, all_heads) * one)


def names_of(features: tuple[str, ...]) -> str:
    return ", ".join(FEATURES[name] for name in features)
