"""_C.AttentionParams: every field is there, and what contradicts itself, or asks of a row what it doesn't do,
launches nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cutlass_fmha import _C
from cutlass_fmha.dispatch.table import PLAIN

WITH_CUDA = bool(_C.build_info()["cuda"])
ROWS = _C.rows()
SOMEWHERE = 4096

#: A call that is right but for there being nothing at its addresses.
RIGHT: dict[str, Any] = {
    **dict.fromkeys("qkvo", SOMEWHERE),
    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "o_stride"), (1024, 64, 8)),
    "batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 10, "seqlen_k": 20, "head_dim": 16,
    "head_dim_v": 8,
}  # fmt: skip
LSE = {"lse": SOMEWHERE, "lse_batch_stride": 40, "lse_head_stride": 10, "lse_rows": 80}
SPLITS = {**LSE, "splits": 3, "partial_o": SOMEWHERE, "partial_lse": SOMEWHERE, "partial_low": SOMEWHERE}
PAGES = {"page_table": SOMEWHERE, "page_size": 16, "page_table_stride": 2}
BLOCKS = {"block_counts": SOMEWHERE, "block_indices": SOMEWHERE, "block_m": 512, "block_n": 512}
#: What says on the device which rows and keys a tile has: a kernel waits before it reads one of these.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "batch_index_k")
LENGTHS += ("prefix_lengths", "block_counts")
#: What not every row knows, and a value that says something.
FEATURES: dict[str, dict[str, Any]] = {
    **{name: {name: SOMEWHERE} for name in ("mask", "alibi_slopes", "sinks", *LENGTHS[:-1])},
    "page_table": PAGES, "block_counts": BLOCKS, "splits": {**SPLITS, "splits": 2}, "pack": {"pack": 2},
    "window_left": {"window_left": 3}, "softcap": {"softcap": 1.0},
    "bias": {"bias": SOMEWHERE, "bias_type": "same_as_q"},
    "dropout_threshold": {"dropout_threshold": 7, "dropout_seed": SOMEWHERE},
}  # fmt: skip
#: Fields that nobody writes.
DERIVED = {"schedule", "by_page_size", "by_pack", "by_group", "by_splits", "by_block_tiles", "bias_vectors"}
DERIVED |= {"mask_vectors", "raw_scores", "block_tiles", "key_blocks", "keys_stand", "q_and", "q_xor"}
DERIVED |= {"score_unit", "cap_scale", "cap_on_trial", "cap_terms", "keys_before"}
#: What is derived and can be read.
READ_ONLY = {"vectors", "device_lengths"}
ONE_TAIL = {"tail": SOMEWHERE, "tail_tiles": 1, "tail_parts": 2}
TAIL = ("tail", "tail_tiles", "tail_parts", "tail_first", "tail_rest")


def params(**changes: Any) -> _C.AttentionParams:
    made = _C.AttentionParams()
    for name, value in {**RIGHT, **changes}.items():
        setattr(made, name, value)
    return made


def run(row: _C.Row, **changes: Any) -> None:
    """A call of a row that is right but for ``changes``."""
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim} if row.family in PLAIN else {}
    _C.run(row.index, params(**{**dims, **changes}), 0, 0)


def of(*families: str) -> list[_C.Row]:
    return [row for row in ROWS if row.family in families]


SCORED, RANGED = of("scored", "few_query_scored"), of("ranged", "score_mod", "masked")
TMA_RANGED = [row for row in RANGED if row.copy == "tma"]
#: Those of any head dim, of which a build of all rows has others beside them.
WIDE16, WIDE32 = (
    [row for row in of("wide") if (row.dtype, row.head_dim) == (dtype, 1 << 16)] for dtype in ("float16", "float32")
)
BIAS = {"bias": SOMEWHERE, "bias_type": "same_as_q", "partial_o": SOMEWHERE}
#: One that takes what is right here; a build without CUDA has none, and asks for none.
ANY_ROW = max(SCORED, key=lambda row: (row.head_dim_v, row.tile_m)).index if SCORED else 0


def declared_fields() -> dict[str, str]:
    """Type of each field of the C++ struct."""
    header = Path(__file__).resolve().parents[1] / "src" / "features" / "params.h"
    struct = re.search(r"struct FeatureParams \{(.*?)\n\};", header.read_text(), re.DOTALL)
    assert struct is not None
    code = re.sub(r"//.*", "", struct[1])
    found = {}
    for statement in filter(None, (" ".join(part.split()) for part in code.split(";"))):
        first, *others = statement.split(", ")
        kind, _, name = first.rpartition(" ")
        for each in (name, *others):
            found[each.partition("[")[0]] = kind
    return found


def test_every_field_of_the_struct_is_there_and_what_is_written_is_read():
    values: dict[str, Any] = {}
    for number, (name, kind) in enumerate(declared_fields().items(), start=1):
        count = {"Strides": 3, "ScoreStrides": 4}.get(kind, {"count_stride": 3, "alibi_stride": 2}.get(name))
        if name in DERIVED | READ_ONLY:
            continue
        if count is not None:
            values[name] = tuple(range(number, number + count))
        else:
            values[name] = {"bool": True, "BiasType": "float32", "float": float(number)}.get(kind, number)
    values |= {name: number for number, name in enumerate(TAIL, start=100)}
    there = {name for name in vars(_C.AttentionParams) if not name.startswith("_")}
    assert there - {"copy", "of_call"} == set(values) | READ_ONLY
    made = params(**values)
    assert {name: getattr(made, name) for name in values} == values
    copied = made.copy()
    made.q_stride, made.batch = (0, 0, 0), 0
    assert {name: getattr(copied, name) for name in values} == values


def test_a_call_gets_a_copy_of_its_own():
    plan = params(batch=3, softcap=2.0)
    made = plan.of_call(16, 32, 48, 64, 80, -0.5)
    assert (made.q, made.k, made.v, made.o, made.lse, made.scale) == (16, 32, 48, 64, 80, -0.5)
    assert (made.batch, made.softcap, made.q_stride) == (3, 2.0, plan.q_stride)
    assert (plan.q, plan.lse, plan.scale) == (SOMEWHERE, 0, 1.0)
    with pytest.raises(ValueError, match="scale must be a finite number of at most 2e38, got inf"):
        plan.of_call(16, 32, 48, 64, 80, float("inf"))


@pytest.mark.parametrize(
    ("changes", "vectors"),
    [
        ({}, True),
        ({"v": SOMEWHERE + 8}, False),
        ({"o": SOMEWHERE + 2}, False),
        ({"k_stride": (1024, 4, 8)}, False),
        ({"o_stride": (1023, 64, 8)}, False),
        ({"head_dim": 12}, False),
        ({"head_dim_v": 1}, False),
        ({"bias": SOMEWHERE + 2, "bias_type": "same_as_q"}, True),
    ],
)
def test_16_byte_copies_are_never_taken_on_trust(changes: dict[str, Any], vectors: bool):
    made = params(**changes)
    assert made.vectors(2) is vectors
    assert params(k_stride=(1024, 4, 8)).vectors(4), "as many bytes are fewer elements"
    with pytest.raises(AttributeError):
        made.vectors = True  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("name", [name for name, kind in declared_fields().items() if kind.endswith("*")])
def test_lengths_on_the_device_are_known_to_be_there(name: str):
    made = params(**{name: SOMEWHERE})
    assert made.device_lengths is (name in LENGTHS)
    with pytest.raises(AttributeError):
        made.device_lengths = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("batch", -1, "batch must be between 0 and 536870912, got -1"),
        ("seqlen_k", 2**29 + 1, "seqlen_k must be between 0 and 536870912, got 536870913"),
        ("head_dim", 0, "head_dim must be between 1 and"),
        ("pack", 0, "pack must be between 1 and"),
        ("splits", 0, "splits must be between 1 and 64, got 0"),
        ("splits", 65, "splits must be between 1 and 64, got 65"),
        ("window_left", 2**29 + 1, "window_left must be between -1 and 536870912"),
        ("window_right", 2**40, "window_right must be between -1 and 536870912"),
        ("dropout_threshold", 65536, "dropout_threshold must be between 0 and 65535, got 65536"),
        ("lse_rows", -1, "lse_rows must be between 0 and"),
        ("q_stride", (-8, 0, 0), "q_stride must be between 0 and"),
        ("scale", float("nan"), "scale must be a finite number of at most 2e38, got nan"),
        ("scale", -3e38, "scale must be a finite number of at most 2e38"),
        ("softcap", -1.0, "softcap must be a finite number from 0 on of at most 2e38"),
        ("dropout_scale", float("inf"), "dropout_scale must be a finite number from 0 on"),
        ("bias_type", "float16", "bias_type must be none, same_as_q or float32, got float16"),
    ],
)
def test_a_number_out_of_range_is_a_value_error_with_a_sentence(name: str, value: Any, sentence: str):
    made = params()
    before = getattr(made, name)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        setattr(made, name, value)
    assert getattr(made, name) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_heads": 3}, "num_heads (3) must be a multiple of num_heads_kv (2)"),
        ({"num_heads_kv": 0}, "num_heads (4) must be a multiple of num_heads_kv (0)"),
        ({"pack": 4}, "pack must be 1 or num_heads / num_heads_kv, got 4 with 4 and 2 heads"),
        ({"num_heads": 6, "pack": 3, "seqlen_q": 2**29}, "must be at most 2**30, got 536870912 times 3"),
        ({"q": 0}, "q and o must be addresses"),
        ({"o": 0}, "q and o must be addresses"),
        ({"v": 0}, "k and v must be addresses"),
        ({"k": SOMEWHERE + 1}, "k must be aligned to 2 bytes"),
        ({"seqused_q": SOMEWHERE + 2}, "seqused_q must be aligned to 4 bytes"),
        ({"dropout_seed": SOMEWHERE + 4}, "dropout_seed must be aligned to 8 bytes"),
        ({"page_size": 16}, "page_table and page_size go together"),
        ({"page_table": SOMEWHERE}, "page_table and page_size go together"),
        ({**PAGES, "page_size": 24}, "page_size must be a multiple of 16, got 24"),
        ({**PAGES, "cu_seqlens_k": SOMEWHERE}, "pages go neither with cu_seqlens_k nor with batch_index_k"),
        ({**PAGES, "batch_index_k": SOMEWHERE}, "pages go neither with cu_seqlens_k nor with batch_index_k"),
        ({"cu_seqlens_k": SOMEWHERE, "batch_index_k": 4096}, "cu_seqlens_k and batch_index_k don't go toge"),
        ({"bias": SOMEWHERE}, "bias and bias_type go together"),
        ({"bias_type": "float32"}, "bias and bias_type go together"),
        ({"bias": SOMEWHERE + 2, "bias_type": "float32"}, "bias must be aligned to 4 bytes"),
        ({"dropout_threshold": 1}, "dropout needs dropout_seed"),
        ({"block_counts": SOMEWHERE}, "block_counts and block_indices go together"),
        ({**BLOCKS, "block_n": 0}, "a block mask needs block_m and block_n"),
        ({**BLOCKS, "pack": 2}, "heads can't be packed under a block mask: pack must be 1"),
        ({"splits": 2}, "splits need partial_o, partial_lse and partial_low"),
        ({**SPLITS, "partial_o": SOMEWHERE + 4}, "partial_o must be aligned to 16 bytes"),
        ({**SPLITS, "lse_rows": 79}, "lse_rows (79) must hold the rows that lse_batch_stride and lse_head"),
        ({**LSE, "lse_batch_stride": 2**61, "lse_rows": 2**61}, "must hold the rows"),
        ({**LSE, "cu_seqlens_q": SOMEWHERE}, "with cu_seqlens_q, lse_batch_stride must be 0"),
        ({**LSE, "lse_batch_stride": 0, "lse_rows": 39, "cu_seqlens_q": 4096}, "lse_rows (39) must hold"),
    ],
)
def test_fields_that_contradict_each_other_are_a_value_error(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        _C.run(ANY_ROW, params(**changes), 0, 0)


def test_head_dims_must_be_set():
    with pytest.raises(ValueError, match="head_dim and head_dim_v must be set"):
        _C.run(ANY_ROW, _C.AttentionParams(), 0, 0)


@pytest.mark.parametrize(
    "changes", [{}, LSE, {"cu_seqlens_q": SOMEWHERE, **LSE, "lse_batch_stride": 0, "lse_rows": 40}, *FEATURES.values()]
)
def test_what_is_right_goes_on_to_a_device_which_is_not_there(changes: dict[str, Any]):
    with pytest.raises(RuntimeError, match="built without CUDA" if not WITH_CUDA else "cuda[GS]etDevice"):
        _C.run(ANY_ROW, params(**changes), 99, 0)


@pytest.mark.skipif(not WITH_CUDA, reason="a build without CUDA has no rows")
class TestRows:
    """What only a build with kernels can refuse."""

    @pytest.mark.parametrize("row", [-1, len(ROWS) + len(_C.backward_rows()) + len(_C.helpers())])
    def test_a_row_that_is_none(self, row: int):
        most = len(ROWS) + len(_C.backward_rows()) + len(_C.helpers()) - 1
        for launch, more in ((_C.run, ()), (_C.launch, (*[SOMEWHERE] * 5, 1.0, 0))):
            with pytest.raises(ValueError, match=f"row must be between 0 and {most}, got {row}"):
                launch(row, _C.AttentionParams(), 0, 0, *more)

    @pytest.mark.parametrize(
        ("family", "name"),
        [
            *((family, name) for family in PLAIN for name in FEATURES),
            *(("ranged", name) for name in ("mask", "block_counts", "splits", "softcap", "alibi_slopes")),
            *(("score_mod", name) for name in ("mask", "block_counts", "splits")),
            *(("masked", name) for name in ("block_counts", "splits", "softcap", "alibi_slopes")),
            *(("wide", name) for name in ("page_table", "window_left", "prefix_lengths", "mask", "block_counts")),
            *(("wide", name) for name in ("softcap", "alibi_slopes", "sinks", "dropout_threshold", "splits")),
        ],
    )
    def test_what_a_family_does_not_know(self, family: str, name: str):
        for row in of(family):
            with pytest.raises(ValueError, match=f"{row.name} does not know {name}"):
                run(row, **FEATURES[name])

    @pytest.mark.parametrize(
        ("rows", "changes", "sentence"),
        [
            (of(*PLAIN), {"head_dim": 40}, "{0.name} takes a head dim of"),
            (of(*PLAIN), {"head_dim_v": 40}, "{0.name} takes a head dim of"),
            (of(*PLAIN), {**LSE, "lse_head_stride": 2, "lse_rows": 99}, "{0.name}.* a contiguous lse"),
            (of(*PLAIN), ONE_TAIL, r"{0.name}.* (no tail here|can't divide 1 of \d tiles)"),
            (SCORED, ONE_TAIL, "has no tail"),
            (RANGED, {"q": SOMEWHERE + 2}, "{0.name} needs addresses, strides and head dims that are multi"),
            (of("masked"), {"mask": SOMEWHERE, "mask_stride": (0, 0, 0, 2)}, "{0.name} reads masks and biases by four"),
            (of("masked"), {"entries_k": 9, "rows_k": 999}, "{0.name} asks for a mask or a bias"),
            (TMA_RANGED, {}, "{0.name} copies by TMA, which asks for entries_k and rows"),
            (TMA_RANGED, {**PAGES, "leftpad_k": 4096}, "{0.name} does not know leftpad_k with a page_table"),
            (WIDE16, {"bias": 4096, "bias_type": "float32"}, "takes a bias of its own dtype only"),
            (WIDE16, {"head_dim": 65537}, "takes head dims from 1 to 65536, got 65537 and 8"),
            (WIDE16, {"pack": 2}, "takes packed heads with a seqlen_q of 1 only, got 10"),
            (WIDE16, {"k": 4104}, "needs k to be a multiple of 16 bytes"),
            (WIDE16, {"q_stride": (768, 252, 64)}, "needs q to be a multiple of 16 bytes"),
            (WIDE16, {"head_dim": 60}, "needs head_dim and head_dim_v to be a multiple of 16 bytes"),
            (WIDE16, {**BIAS, "bias": 4104, "bias_stride": (0, 0, 0, 1)}, "needs bias to be a multiple"),
            (WIDE16, {**BIAS, "bias_stride": (0, 0, 8, 8)}, "bias must be contiguous"),
            (WIDE16, {"seqlen_k": 1 << 26}, r"its offsets are 32-bit, and k spans \d+ rows with a stride of 64"),
            (WIDE16, {"v_stride": (0, 1 << 31, 64)}, r"its offsets are 32-bit, and v spans \d+ rows"),
            (WIDE16, {"o_stride": (0, 1 << 31, 64)}, "its offsets are 32-bit, and o spans 1 rows"),
            (WIDE16, {}, "needs partial_o: float32, as many elements as o"),
            (WIDE32[-1:], {"o_stride": (768, 264, 64)}, "needs partial_o"),
            (of("wide_scored"), {"k": 4104}, "needs addresses, strides and head dims that are multiples of 16"),
            (of("wide_scored"), {"head_dim": 520}, "takes head dims from 1 to {0.head_dim}, got 520 and 8"),
            (of("wide_scored"), {**BLOCKS, "block_m": 64, "block_n": 32}, "multiples of 64 x 64, got 64 x 32"),
        ],
    )
    def test_what_a_row_can_not_do(self, rows: list[_C.Row], changes: dict[str, int], sentence: str):
        for row in rows:
            with pytest.raises(ValueError, match=sentence.format(row)):
                run(row, **changes)

    @pytest.mark.parametrize("operand", "qkvo")
    def test_misaligned_pointers_and_strides(self, operand: str):
        aligned = next(row for row in of("plain") if row.alignment == 16)
        with pytest.raises(ValueError, match=f"pointers aligned to 16 bytes, and that of {operand} is not"):
            run(aligned, **{operand: SOMEWHERE + 8})
        for dimension in range(3):
            strides = [64, 64, 64]
            strides[dimension] += 4
            with pytest.raises(ValueError, match=f"multiples of 16 bytes, and a stride of {operand} is not"):
                run(aligned, **{f"{operand}_stride": tuple(strides)})

    @pytest.mark.parametrize("row", [*SCORED, *RANGED], ids=lambda row: row.name)
    def test_head_dims_and_blocks_beyond_a_row(self, row: _C.Row):
        sentence = f"{row.name} takes head dims up to {row.head_dim} and {row.head_dim_v}"
        for name in ("head_dim", "head_dim_v"):
            with pytest.raises(ValueError, match=sentence):
                run(row, **{name: getattr(row, name) + 8})
        keys = row.tile_n * row.kv_warps
        for name, size in (("block_m", row.tile_m), ("block_n", keys)) if row in SCORED else ():
            changes = {**BLOCKS, "block_m": row.tile_m, "block_n": keys, name: size + 8}
            with pytest.raises(ValueError, match=f"of a mask that are multiples of {row.tile_m} x {keys}"):
                run(row, **changes)

    @pytest.mark.parametrize("changes", [{}, ONE_TAIL])
    def test_a_row_of_another_family(self, changes: dict[str, int]):
        helper = _C.helpers()[0]
        with pytest.raises(ValueError, match=f"{helper.name} is of family combine"):
            _C.run(helper.index, params(**changes), 0, 0)

    @pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"num_heads": 0, "num_heads_kv": 0}])
    def test_nothing_to_compute_needs_no_gpu(self, sizes: dict[str, int]):
        for row in {row.family: row for row in ROWS}.values():
            run(row, **sizes)
