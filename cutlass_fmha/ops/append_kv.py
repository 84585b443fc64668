"""The op ``append_kv_``: new keys and values are written into a cache, and queries rotated, by one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast, private_torch
from cutlass_fmha.arguments import check, check_features, results, tensors
from cutlass_fmha.cpu.features import check_starts
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept, new_like
from cutlass_fmha.launch.workspace import Scratch
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.rotary import (
    check_rows,
    check_table,
    rotate,
    rotation,
    rows_of,
    sequences_of,
    set_addresses,
    table_of,
)

# One launch does everything around attention: it also rotates the queries and adds up the lengths.
SCHEMA = (
    "append_kv_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor key, Tensor value, Tensor cache_seqlens, *, "
    "Tensor? query=None, bool advance_query=True, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "bool rotary_interleaved=False, Tensor? rotary_seqlens=None, Tensor? cache_batch_idx=None, "
    "Tensor? page_table=None, Tensor? leftpad_k=None, Tensor? cu_seqlens_q=None) "
    "-> (Tensor rotated_query, Tensor seqused_k)"
)


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Rows that a cache has for a sequence."""
    tensors.check_dims("k_cache", k_cache, "batch_cache, seqlen_cache, num_heads_kv, head_dim")
    if page_table is not None:
        tensors.check_dims("page_table", page_table, "batch, pages")
    return k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])


def check_room(cache_seqlens: int, seqlen_new: int, capacity: int) -> None:
    if not 0 <= cache_seqlens <= capacity - seqlen_new:
        raise ValueError(
            f"cache_seqlens must leave room for {seqlen_new} new rows among the {capacity} that the cache "
            f"has for a sequence, got {cache_seqlens}"
        )


class Append(NamedTuple):
    """The arguments of the op ``append_kv_``. With cu_seqlens_q key, value and query are packed alike."""

    k_cache: Tensor
    v_cache: Tensor
    key: Tensor
    value: Tensor
    cache_seqlens: Tensor
    query: Tensor | None = None
    advance_query: bool = True
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    rotary_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    page_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    @property
    def batch(self) -> int:
        return sequences_of(self.key, self.cu_seqlens_q)

    @property
    def seqlen_new(self) -> Tensor | int:
        """Of each sequence."""
        return self.key.shape[1] if self.cu_seqlens_q is None else self.cu_seqlens_q.diff()

    @property
    def axes(self) -> str:
        """Of new rows, but for the heads."""
        return "batch, seqlen_new" if self.cu_seqlens_q is None else "total_q"

    @property
    def capacity(self) -> int:
        return capacity_of(self.k_cache, self.page_table)

    @property
    def first_position(self) -> tuple[Tensor, Tensor | None]:
        """Two vectors whose difference is the position of each sequence's first new key."""
        if self.rotary_seqlens is not None:
            return self.rotary_seqlens, None
        return self.cache_seqlens, self.leftpad_k

    def results(self) -> tuple[Tensor, Tensor]:
        """The rotated queries and the new lengths, still to be written."""
        rotated = self.key.new_empty(0) if self.query is None else self.query.new_empty(self.query.shape)
        return rotated, self.cache_seqlens.new_empty(self.cache_seqlens.shape)


Plan = helpers.Helper[_C.AppendParams]


def append(a: Append, room: Scratch | None = None) -> tuple[Tensor | None, Tensor]:
    """The op, or ``launch`` where nothing listens in between."""
    if not private_torch.any_autocast_enabled() and dispatcher.passes((a.k_cache, a.v_cache, a.key), a):
        return launch(a, room)
    rotated, seqused_k = torch.ops.cutlass_fmha.append_kv_(
        *[getattr(a, name) for name in Append._fields[:5]],
        **{name: getattr(a, name) for name in Append._fields[5:]},
    )
    return rotated, seqused_k


def launch(a: Append, room: Scratch | None = None, plan: Plan | None = None) -> tuple[Tensor | None, Tensor]:
    """Past the dispatcher: the rotated queries, if there are any, and the new lengths, both in ``room``."""
    found = _launch(a, room, plan)
    results.count_writes((a.k_cache, a.v_cache))
    return found


def check_append(a: Append, names: tuple[str, str] = ("key", "value")) -> None:
    """``names``: what the caller's arguments are called."""
    caches = {"k_cache": a.k_cache, "v_cache": a.v_cache}
    for name, cache in caches.items():
        axes = "batch_cache, seqlen_cache" if a.page_table is None else "pages, page_size"
        tensors.check_dims(name, cache, f"{axes}, num_heads_kv, head_dim")
    new = dict(zip(names, (a.key, a.value), strict=True))
    for name, rows in new.items():
        tensors.check_dims(name, rows, f"{a.axes}, num_heads_kv, head_dim")
    if a.cu_seqlens_q is not None:
        check_features.check_vector("cu_seqlens_q", a.cu_seqlens_q, None)
    query = {} if a.query is None else {"query": a.query}
    tensors.check_alike({**caches, **new, **query})
    for name, cache in caches.items():
        if any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{name} is written to and must not be expanded, got strides {cache.stride()}")
    _check_sizes(a, *names)
    _check_places(a)
    _check_rotary(a)


def _check_sizes(a: Append, key: str, value: str) -> None:
    for name, tensor, other_name, other in (
        ("v_cache", a.v_cache, "k_cache", a.k_cache),
        (value, a.value, key, a.key),
    ):
        if tensor.shape[:-1] != other.shape[:-1]:
            raise ValueError(
                f"{name} must have {other_name}'s shape but for the last dimension, "
                f"{tuple(other.shape[:-1])}, got {tuple(tensor.shape[:-1])}"
            )
    for name, rows, cache_name, cache in (
        (key, a.key, "k_cache", a.k_cache),
        (value, a.value, "v_cache", a.v_cache),
    ):
        if rows.shape[-2:] != cache.shape[2:]:
            raise ValueError(
                f"{name} must have {cache_name}'s heads and head_dim {tuple(cache.shape[2:])}, "
                f"got {tuple(rows.shape[-2:])}"
            )
    if max(a.capacity, a.key.shape[-3], a.k_cache.shape[0]) > check.MAX_SEQLEN:
        raise ValueError(
            f"k_cache must have sizes of 2**29 at most, got {tuple(a.k_cache.shape)} for {a.capacity} rows "
            "of a sequence"
        )


def _check_places(a: Append) -> None:
    """Which rows of the cache are a sequence's."""
    batch = a.batch
    vectors = {
        "cache_seqlens": a.cache_seqlens,
        "cache_batch_idx": a.cache_batch_idx,
        "leftpad_k": a.leftpad_k,
        "rotary_seqlens": a.rotary_seqlens,
    }
    others = {"page_table": a.page_table, "cu_seqlens_q": a.cu_seqlens_q}
    tensors.check_device("k_cache", a.k_cache, {**vectors, **others})
    tensors.check_vectors(vectors, batch)
    if a.page_table is None:
        if a.cache_batch_idx is None and a.k_cache.shape[0] != batch:
            whose = "key" if a.cu_seqlens_q is None else "cu_seqlens_q"
            raise ValueError(
                f"k_cache must have {whose}'s batch size {batch} without cache_batch_idx, got {a.k_cache.shape[0]}"
            )
        return
    if a.cache_batch_idx is not None:
        raise ValueError(
            "page_table and cache_batch_idx exclude each other: a row of the page table already belongs to a sequence"
        )
    if a.page_table.dtype != torch.int32 or a.page_table.shape[0] != batch:
        raise ValueError(
            f"page_table must be int32 with a row for each of {batch} sequences, got "
            f"{check.dtype_name(a.page_table.dtype)} of shape {tuple(a.page_table.shape)}"
        )
    tensors.check_rows("page_table", a.page_table)
    check.page_size("k_cache", a.k_cache.shape[1])


def _check_rotary(a: Append) -> None:
    if (a.rotary_cos is None) != (a.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together")
    if a.rotary_cos is None or a.rotary_sin is None:
        if a.query is not None or a.rotary_seqlens is not None:
            raise ValueError("query and rotary_seqlens are for rotary embedding, and rotary_cos is None")
        return
    check_table(a.rotary_cos, a.rotary_sin, "key", a.key)
    packed = a.cu_seqlens_q is not None  # whose longest sequence the host doesn't know
    if not packed:
        check_rows("key", a.key, a.rotary_cos)
    if a.query is None:
        return
    tensors.check_dims("query", a.query, f"{a.axes.replace('new', 'q')}, num_heads, head_dim")
    if a.query.shape[0] != a.key.shape[0] or a.query.shape[-1] != a.key.shape[-1]:
        raise ValueError(
            f"query must have key's {'total_q' if packed else 'batch size'} {a.key.shape[0]} and head_dim "
            f"{a.key.shape[-1]}, got {a.query.shape[0]} and {a.query.shape[-1]}"
        )
    if a.advance_query and not packed:
        check_rows("query", a.query, a.rotary_cos)


def set_places(p: _C.AppendParams | _C.RopeParams, a: Append) -> None:
    """Where a call's new rows go: addresses."""
    p.cache_seqlens = a.cache_seqlens.data_ptr()
    if a.cache_batch_idx is not None:
        p.cache_batch_idx = a.cache_batch_idx.data_ptr()
    if a.page_table is not None:
        p.page_table = a.page_table.data_ptr()


def describe_places(p: _C.AppendParams | _C.RopeParams, a: Append) -> None:
    """Where new rows go, but for addresses."""
    p.entries, p.capacity = a.k_cache.shape[0], a.capacity
    if a.page_table is not None:
        p.page_table_stride, p.page_size = a.page_table.stride(0), a.k_cache.shape[1]


def _launch(a: Append, room: Scratch | None = None, plan: Plan | None = None) -> tuple[Tensor | None, Tensor]:
    if plan is None:
        plan = kept("append_kv_", a, lambda: prepare(a))
    like = new_like if room is None else room.like
    rotated = None if a.query is None else like(a.query)
    seqused_k = like(a.cache_seqlens)
    if room is not None:
        room.hold()
    if a.key.numel() == 0:
        seqused_k = a.cache_seqlens + a.seqlen_new  # nothing is written, and nobody counts
    p = plan.params.copy()
    p.k_cache, p.v_cache = a.k_cache.data_ptr(), a.v_cache.data_ptr()
    p.k, p.v, p.seqused_k = a.key.data_ptr(), a.value.data_ptr(), seqused_k.data_ptr()
    if a.cu_seqlens_q is not None:
        p.cu_seqlens = a.cu_seqlens_q.data_ptr()
    set_places(p, a)
    first, before = a.first_position
    p.first_position = first.data_ptr()
    if before is not None:
        p.before_position = before.data_ptr()
    if a.rotary_cos is not None and a.rotary_sin is not None:
        table = p.rotary
        table.cos, table.sin = a.rotary_cos.data_ptr(), a.rotary_sin.data_ptr()
        if a.query is not None and rotated is not None:
            set_addresses(p.query, a.query, rotated, first, before, a.rotary_cos, a.rotary_sin, a.cu_seqlens_q)
    helpers.launch(plan, p)
    return rotated, seqused_k


def prepare(a: Append) -> Plan:
    """Checks the arguments, and packs what calls with the same metadata have in common."""
    check_append(a)
    p = _C.AppendParams()
    p.k_cache_stride, p.v_cache_stride = helpers.strides(a.k_cache), helpers.strides(a.v_cache)
    p.k_stride, p.v_stride = helpers.strides(a.key), helpers.strides(a.value)
    p.batch, p.seqlen_new, p.num_heads_kv, p.head_dim = a.key.shape if a.key.dim() == 4 else (1, *a.key.shape)
    p.head_dim_v = a.value.shape[-1]
    if a.cu_seqlens_q is not None:
        p.sequences = a.batch
    describe_places(p, a)
    if a.rotary_cos is not None and a.rotary_sin is not None:
        p.rotary = table_of(a.rotary_cos, a.rotary_sin, a.rotary_interleaved)
        if a.query is not None:
            p.query = rotation(a.query, a.advance_query, p.rotary, a.cu_seqlens_q)
    return helpers.helper("append", p, a.key)


def write(a: Append) -> tuple[Tensor, Tensor]:
    """What a launch does, on CPU tensors."""
    check_append(a)
    if a.cu_seqlens_q is not None:
        check_starts("cu_seqlens_q", a.cu_seqlens_q, a.key.shape[0])
    new = torch.as_tensor(a.seqlen_new).expand(a.batch)
    for start, count in zip(a.cache_seqlens.tolist(), new.tolist(), strict=True):
        check_room(start, count, a.capacity)
    # Everything that may raise comes before the first write.
    rows, sequences, numbers = rows_of(a.key, a.cu_seqlens_q)
    key, rotated = a.key[rows], a.results()[0]
    if a.rotary_cos is not None and a.rotary_sin is not None:
        first, before = a.first_position
        first = first.to(torch.int64) - (0 if before is None else before)
        table = (a.rotary_cos, a.rotary_sin)
        key = rotate(key, *table, first[sequences] + numbers, a.rotary_interleaved)
        if a.query is not None:
            own, of, steps = rows_of(a.query, a.cu_seqlens_q)
            positions = first[of] + (steps if a.advance_query else 0)
            rotated[own] = rotate(a.query[own], *table, positions, a.rotary_interleaved)
    at = a.cache_seqlens.to(torch.int64)[sequences] + numbers
    places = (_entries(a, sequences, at), at if a.page_table is None else at % a.k_cache.shape[1])
    a.k_cache[places], a.v_cache[places] = key, a.value[rows]
    return rotated, a.cache_seqlens + a.seqlen_new


def _entries(a: Append, sequences: Tensor, at: Tensor) -> Tensor:
    """The entry or the page of the cache that each new row goes to, row ``at`` of its sequence."""
    name = "cache_batch_idx" if a.page_table is None else "page_table"
    entries = sequences
    if a.page_table is not None:
        entries = a.page_table.to(torch.int64)[sequences, at // a.k_cache.shape[1]]
    elif a.cache_batch_idx is not None:
        entries = a.cache_batch_idx.to(torch.int64)[sequences]
    if entries.numel() and not 0 <= int(entries.min()) <= int(entries.max()) < a.k_cache.shape[0]:
        raise ValueError(f"{name} must name one of the cache's {a.k_cache.shape[0]}, got {entries.tolist()}")
    return entries


def _cuda(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    arguments = Append(*args, **kwargs)
    rotated, seqused_k = _launch(arguments)
    return arguments.key.new_empty(0) if rotated is None else rotated, seqused_k


def _cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _cuda(*args, **kwargs) if dispatcher.simulated() else write(Append(*args, **kwargs))


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    arguments = Append(*args, **kwargs)
    check_append(arguments)
    return arguments.results()


def _casts(
    dtype: torch.dtype,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **others: Any,
) -> autocast.Arguments:
    """Autocast's rule: what is new becomes what the cache is. A table in neither its dtype nor float32 loses
    nothing in float32."""
    own = k_cache.dtype
    new = (autocast.cast(key, own), autocast.cast(value, own))
    for name, given in others.items():
        if name == "query":
            others[name] = autocast.cast(given, own)
        elif name in ("rotary_cos", "rotary_sin") and given is not None and given.dtype != own:
            others[name] = autocast.cast(given, torch.float32)
    return (k_cache, v_cache, *new, *rest), others


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, _casts)
dispatcher.register_writes("append_kv_", ("k_cache", "v_cache"))
