"""The compiled extension: its rows, its parameters, what it refuses to launch, its stubs, what it needs of a system."""

import __future__

import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import elf
import pytest
import resources

from cutlass_fmha import _C
from cutlass_fmha.dispatch.table import PLAIN, WIDE

ROOT = Path(__file__).resolve().parents[1]
assert _C.__file__ is not None
EXTENSION = Path(_C.__file__)
WITH_CUDA = bool(_C.build_info()["cuda"])
ROWS = _C.rows()


ARCHS_OF = {"${ALL}": "89;90;120", "${TMA}": "90;120"}  # the manifest's variables
BEGINS = {"wide": "wide", "wide_scored": "wide", "backward": "bwd", "query_product": "bwd", "backward_wide": "widebwd"}


def manifest_begins() -> list[str]:
    """How the names of src/rows.cmake's rows begin, in its order, read independently of CMake."""
    text = (ROOT / "src" / "rows.cmake").read_text()
    found = re.findall(r'^fmha_(\w+)\("?([^" ]+)"? +"?([\w;]+)"? ', text, re.MULTILINE)
    rows = [(BEGINS.get(kind, "fwd"), ARCHS_OF.get(of, of).split(";"), dtypes.split(";")) for kind, of, dtypes in found]
    return [f"{begin}_sm{arch}_{dtype}" for begin, archs, dtypes in rows for arch in archs for dtype in dtypes]


def test_the_build_holds_the_manifests_rows_and_says_how_it_was_made():
    info: dict[str, Any] = _C.build_info()
    table, in_subset = (*ROWS, *_C.backward_rows()), resources.manifest_rows()
    assert ["_".join(name.split("_")[:3]) for name in in_subset] == manifest_begins()
    names, subset = [row.name for row in table], info["source_hash"].endswith("+subset")
    built = [name for name in in_subset if int(name.split("_")[1][2:]) in info["architectures"]]
    assert names == [name for name in built if in_subset[name] or not subset]
    assert all(f"m{row.tile_m}n{row.tile_n}w{row.warps}" in row.name for row in table)
    assert bool(names) == WITH_CUDA
    assert [row.index for row in (*table, *_C.helpers())] == list(range(len(names) + len(_C.helpers())))
    rows = [row for row in resources.whole_table() if row.family == "plain"]
    dtypes, head_dims = ("float16", "bfloat16"), (32, 64, 96, 128, 192, 256)
    every = itertools.product({row.arch for row in ROWS}, dtypes, head_dims, (False, True))
    assert {(row.arch, row.dtype, row.head_dim, row.copy == "element") for row in rows} == set(every)
    assert info["architectures"] == sorted({row.arch for row in ROWS})
    assert "ptx_compiler" in info and info["proxy"] in ({}, {120: 90})
    older = {f"{older}{own}" for older in ("80", "86", "80,86") for own in ("", ",89")}
    targets = {89: {"89"} | older, 90: {"90a"}, 120: {"120", "120a", "120f", "90a"}}
    assert list(info["compiled_for"]) == info["architectures"]
    assert all(target in targets[arch] for arch, target in info["compiled_for"].items())
    if WITH_CUDA:
        assert info["nvcc_version"].startswith(f"{info['cuda_version']}.")
        assert re.fullmatch(r"\d+\.\d+\.\d+", info["cutlass_version"])


@pytest.mark.parametrize("row", [row for row in ROWS if row.family not in WIDE], ids=lambda row: row.name)
def test_a_rows_attributes_agree_with_its_name(row: _C.Row):
    dtype = {"float16": "f16", "bfloat16": "bf16"}[row.dtype]
    suffix = f"k{row.kv_warps}" if row.kv_warps > 1 else ""
    suffix += {"cp_async_16": "", "ldg_16": "", "element": "_element", "tma": "_tma"}[row.copy]
    suffix += "_pdl" if row.dependent_launch and not row.takes_features else ""
    suffix += ("_scored" if row.scored else f"_{row.family}") if row.takes_features else ""
    dims = f"d{row.head_dim}" + ("" if row.head_dim_v == row.head_dim else f"v{row.head_dim_v}")
    name = f"fwd_sm{row.arch}_{dtype}_{dims}_m{row.tile_m}n{row.tile_n}w{row.warps}{suffix}"
    assert row.name == ROWS[row.index].name == name
    assert (row.mma, row.element_bytes, row.threads) == ("m16n8k16", 2, 32 * row.warps)
    assert row.alignment == (2 if row.scored or row.copy == "element" else 16)
    assert row.arch >= 90 or not (row.copy == "tma" or row.dependent_launch)
    assert row.kv_warps > 1 or not row.dependent_launch
    assert row.tile_m % (16 * row.warps // row.kv_warps) == 0, "a warp's mma has 16 rows"
    assert row.tile_n % 16 == 0 and 0 < row.smem_bytes <= 99 * 1024
    assert repr(row) == f"<Row {name}>"
    with pytest.raises(AttributeError):
        row.tile_m = 1  # type: ignore[misc]


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
#: Of each family what its rows do not know.
UNKNOWN: dict[str, Iterable[str]] = {
    **dict.fromkeys(PLAIN, FEATURES),
    "ranged": ("mask", "block_counts", "splits", "softcap", "alibi_slopes"),
    "score_mod": ("mask", "block_counts", "splits"),
    "masked": ("block_counts", "splits", "softcap", "alibi_slopes"),
    "wide": ("page_table", "window_left", "prefix_lengths", "mask", "block_counts", "softcap", "alibi_slopes",
             "sinks", "dropout_threshold", "splits"),
}  # fmt: skip
READ_ONLY = {"vectors", "device_lengths"}  # are derived
#: Fields that nobody writes.
DERIVED = {"schedule", "by_page_size", "by_pack", "by_group", "by_splits", "by_block_tiles", "bias_vectors"}
DERIVED |= {"mask_vectors", "raw_scores", "block_tiles", "key_blocks", "keys_stand", "q_and", "q_xor"}
DERIVED |= {"bits_stride", "near_cap", "far_cap"}
DERIVED |= {"score_unit", "cap_scale", "keys_before", "modifier", "scale_log2", "kept", "near_first"}
TAIL = {"tail", "tail_tiles", "tail_parts", "tail_first", "tail_rest"}  # of the plain rows' struct
TAIL |= {"packs_mask"}  # what a call's room is for
ONE_OF = ("cu_seqlens_k", "batch_index_k")
ONE_TAIL = {"tail": SOMEWHERE, "tail_tiles": 1, "tail_parts": 2}


def params(**changes: Any) -> _C.AttentionParams:
    made = _C.AttentionParams()
    for name, value in {**RIGHT, **changes}.items():
        setattr(made, name, value)
    return made


def run(row: _C.Row, **changes: Any) -> None:
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim} if row.family in PLAIN else {}
    _C.run(row.index, params(**{**dims, **changes}), 0, 0)


def of(*families: str) -> list[_C.Row]:
    return [row for row in ROWS if row.family in families]


ALIGNED = [row for row in of("plain") if row.alignment == 16]
SCORED, RANGED = of("scored", "few_query_scored"), of("ranged", "score_mod", "masked")
TMA_RANGED = [row for row in RANGED if row.copy == "tma"]
#: Those of any head dim, of which a build of all rows has others beside them.
WIDE16, WIDE32 = (
    [row for row in of("wide") if (row.dtype, row.head_dim) == (dtype, 1 << 16)] for dtype in ("float16", "float32")
)
BITS, IN_RUNS = {"mask": SOMEWHERE, "mask_bits": SOMEWHERE}, (0, 0, 0, 1)
BIAS = {"bias": SOMEWHERE, "bias_type": "same_as_q", "partial_o": SOMEWHERE}
#: One that takes what is right here; a build without CUDA has none, and asks for none.
ANY_ROW = max(SCORED, key=lambda row: (row.head_dim_v, row.tile_m)).index if SCORED else 0


NAMES = [x for x in vars(_C.AttentionParams) if not x.startswith("_") and x not in {*READ_ONLY, "copy", "of_call"}]
DEFAULTS = {name: getattr(_C.AttentionParams(), name) for name in NAMES}


def declared_fields() -> set[str]:
    """Of the C++ struct."""
    header = (ROOT / "src" / "features" / "params.h").read_text()
    [struct] = re.findall(r"struct FeatureParams \{(.*?)\n\};", header, re.DOTALL)
    statements = filter(None, (" ".join(part.split()) for part in re.sub(r"//.*", "", struct).split(";")))
    named = (name for statement in statements for name in statement.split(", "))
    return {name.rpartition(" ")[2].partition("[")[0] for name in named}


def test_what_is_written_is_read_and_a_call_gets_a_copy_of_its_own():
    assert set(NAMES) == (declared_fields() - DERIVED - READ_ONLY) | TAIL
    values = {}
    for number, (name, default) in enumerate(DEFAULTS.items(), start=1):
        scalar = {bool: True, str: "float32", float: float(number), int: number}.get(type(default))
        values[name] = tuple(range(number, number + len(default))) if scalar is None else scalar
    made = params(**values)
    assert {name: getattr(made, name) for name in values} == values
    copied = made.copy()
    made.q_stride, made.batch = (0, 0, 0), 0
    assert {name: getattr(copied, name) for name in values} == values
    plan = params(batch=3, softcap=2.0)
    made = plan.of_call(16, 32, 48, 64, 80, -0.5)
    assert (made.q, made.k, made.v, made.o, made.lse, made.scale) == (16, 32, 48, 64, 80, -0.5)
    assert (made.batch, made.softcap, made.q_stride) == (3, 2.0, plan.q_stride)
    assert (plan.q, plan.lse, plan.scale) == (SOMEWHERE, 0, 1.0)
    with pytest.raises(ValueError, match="scale must be a finite number of at most 2e38, got inf"):
        plan.of_call(16, 32, 48, 64, 80, float("inf"))


def test_what_is_derived_of_addresses_and_strides():
    odd: list[dict[str, Any]] = [{"v": SOMEWHERE + 8}, {"o": SOMEWHERE + 2}, {"head_dim": 12}, {"head_dim_v": 1}]
    odd += [{"k_stride": (1024, 4, 8)}, {"o_stride": (1023, 64, 8)}]
    assert [changes for changes in odd if params(**changes).vectors(2)] == []
    assert params().vectors(2) and params(bias=SOMEWHERE + 2, bias_type="same_as_q").vectors(2)
    assert params(k_stride=(1024, 4, 8)).vectors(4), "as many bytes are fewer elements"
    numbers = [name for name, default in DEFAULTS.items() if type(default) is int]
    assert {name for name in numbers if params(**{name: 64}).device_lengths} == set(LENGTHS)
    for name in READ_ONLY:
        with pytest.raises(AttributeError):
            setattr(params(), name, True)


def test_a_number_out_of_range_is_a_value_error_with_a_sentence():
    for name, value, sentence in (
        ("batch", -1, "batch must be between 0 and 536870912, got -1"),
        ("seqlen_k", 2**29 + 1, "seqlen_k must be between 0 and 536870912, got 536870913"),
        *[(x, 0, f"{x} must be between 1 and") for x in ("head_dim", "pack")],
        *[("splits", n, f"splits must be between 1 and 64, got {n}") for n in (0, 65)],
        ("window_left", 2**29 + 1, "window_left must be between -1 and 536870912"),
        ("window_right", 2**40, "window_right must be between -1 and 536870912"),
        ("dropout_threshold", 65536, "dropout_threshold must be between 0 and 65535, got 65536"),
        ("lse_rows", -1, "lse_rows must be between 0 and"), ("q_stride", (-8, 0, 0), "q_stride must be between 0 and"),
        ("scale", float("nan"), "scale must be a finite number of at most 2e38, got nan"),
        ("scale", -3e38, "scale must be a finite number of at most 2e38"),
        ("softcap", -1.0, "softcap must be a finite number from 0 on of at most 2e38"),
        ("dropout_scale", float("inf"), "dropout_scale must be a finite number from 0 on"),
        ("bias_type", "float16", "bias_type must be none, same_as_q or float32, got float16"),
    ):  # fmt: skip
        made = params()
        with pytest.raises(ValueError, match=re.escape(sentence)):
            setattr(made, name, value)
        assert getattr(made, name) == getattr(params(), name)


def test_fields_that_contradict_each_other_are_a_value_error():
    for changes, sentence in (
        ({"num_heads": 3}, "num_heads (3) must be a multiple of num_heads_kv (2)"),
        ({"num_heads_kv": 0}, "num_heads (4) must be a multiple of num_heads_kv (0)"),
        ({"pack": 4}, "pack must be 1 or num_heads / num_heads_kv, got 4 with 4 and 2 heads"),
        ({"num_heads": 6, "pack": 3, "seqlen_q": 2**29}, "must be at most 2**30, got 536870912 times 3"),
        *[({x: 0}, "q and o must be addresses") for x in "qo"], ({"v": 0}, "k and v must be addresses"),
        ({"k": SOMEWHERE + 1}, "k must be aligned to 2 bytes"),
        ({"seqused_q": SOMEWHERE + 2}, "seqused_q must be aligned to 4 bytes"),
        ({"dropout_seed": SOMEWHERE + 4}, "dropout_seed must be aligned to 8 bytes"),
        *[({x: 4096}, "page_table and page_size go together") for x in ("page_size", "page_table")],
        ({**PAGES, "page_size": 24}, "page_size must be a multiple of 16, got 24"),
        *[({**PAGES, x: 4096}, f"pages go neither with {' nor with '.join(ONE_OF)}") for x in ONE_OF],
        (dict.fromkeys(ONE_OF, SOMEWHERE), "cu_seqlens_k and batch_index_k don't go toge"),
        *[({x: y}, "bias and bias_type go together") for x, y in (("bias", 4096), ("bias_type", "float32"))],
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
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(sentence)):
            _C.run(ANY_ROW, params(**changes), 0, 0)
    with pytest.raises(ValueError, match="head_dim and head_dim_v must be set"):
        _C.run(ANY_ROW, _C.AttentionParams(), 0, 0)


def test_what_is_right_goes_on_to_a_device_which_is_not_there():
    packed = {"cu_seqlens_q": SOMEWHERE, **LSE, "lse_batch_stride": 0, "lse_rows": 40}
    for changes in ({}, LSE, packed, *FEATURES.values()):
        with pytest.raises(RuntimeError, match="cuda[GS]etDevice" if WITH_CUDA else "built without CUDA"):
            _C.run(ANY_ROW, params(**changes), 99, 0)


@pytest.mark.skipif(not WITH_CUDA, reason="a build without CUDA has no rows")
class TestRows:
    """What only a build with kernels can refuse."""

    def test_a_row_that_is_none_or_of_another_family_and_nothing_to_compute(self):
        number = len(ROWS) + len(_C.backward_rows()) + len(_C.helpers())
        for row, (launch, more) in itertools.product((-1, number), ((_C.run, ()), (_C.launch, (*[4096] * 5, 1.0, 0)))):
            with pytest.raises(ValueError, match=f"row must be between 0 and {number - 1}, got {row}"):
                launch(row, _C.AttentionParams(), 0, 0, *more)
        helper = _C.helpers()[0]
        for changes in ({}, ONE_TAIL):
            with pytest.raises(ValueError, match=f"{helper.name} is of family combine"):
                _C.run(helper.index, params(**changes), 0, 0)
        for row in {row.family: row for row in ROWS}.values():
            for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"num_heads": 0, "num_heads_kv": 0}):
                run(row, **sizes)

    def test_what_a_row_can_not_do(self):
        for rows, changes, sentence in (
            *[(of(x), FEATURES[y], f"{{0.name}} does not know {y}") for x, names in UNKNOWN.items() for y in names],
            *[(of(*PLAIN), {x: 40}, "{0.name} takes a head dim of") for x in ("head_dim", "head_dim_v")],
            (of(*PLAIN), {**LSE, "lse_head_stride": 2, "lse_rows": 99}, "{0.name}.* a contiguous lse"),
            (of(*PLAIN), ONE_TAIL, r"{0.name}.* (no tail here|can't divide 1 of \d tiles)"),
            *[(ALIGNED, {x: SOMEWHERE + 8}, f"aligned to 16 bytes, and that of {x} is not") for x in "qkvo"],
            *[(ALIGNED, {f"{x}_stride": strides}, f"multiples of 16 bytes, and a stride of {x} is not")
              for x, strides in itertools.product("qkvo", ((68, 64, 64), (64, 68, 64), (64, 64, 68)))],
            *[([row], {x: getattr(row, x) + 8}, "{0.name} .* up to {0.head_dim} and {0.head_dim_v}")
              for row, x in itertools.product((*SCORED, *RANGED), ("head_dim", "head_dim_v"))],
            *[([row], {**BLOCKS, "block_m": row.tile_m + m, "block_n": row.tile_n * row.kv_warps + n},
               f"of a mask that are multiples of {row.tile_m} x {row.tile_n * row.kv_warps}")
              for row in SCORED for m, n in ((8, 0), (0, 8))],
            (SCORED, ONE_TAIL, "has no tail"),
            (RANGED, {"q": SOMEWHERE + 2}, "{0.name} needs addresses, strides and head dims that are multi"),
            (of("masked"), {"mask": SOMEWHERE, "mask_stride": (0, 0, 0, 2)}, "{0.name} reads masks and biases by four"),
            ([row for row in ROWS if not getattr(row, "reads_mask_bits", False)], BITS, "{0.name} does not know mask"),
            (of("masked"), {**BIAS, "bias_stride": IN_RUNS, "mask_bits": 4096}, "{0.name} does not know mask_bits"),
            ([row for row in of("masked") if not row.reads_mask_bytes], {"mask": 4096, "mask_stride": IN_RUNS},
             "{0.name} reads a mask's bits, which need mask_bits"),
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
        ):  # fmt: skip
            for row in rows:
                with pytest.raises(ValueError, match=sentence.format(row)):
                    run(row, **changes)


#: For a fresh interpreter that loads _C alone and sees no GPU: with the driver out of sight this also holds on a
#: machine with one.
ALONE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cutlass_fmha._C", {str(EXTENSION)!r})
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
params = _C.AttentionParams()
for name, value in {RIGHT!r}.items():
    setattr(params, name, value)
driver = sys.platform == "linux" and "libcuda" in open("/proc/self/maps").read()
print("torch" in sys.modules, driver, len(_C.rows()), _C.device_count())
for call, arguments in ((_C.device_properties, [0]), (_C.run, [{ANY_ROW}, params, 0, 0])):
    try:
        call(*arguments)
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


def test_it_loads_without_torch_and_the_driver_and_says_that_there_is_no_gpu():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.check_output([sys.executable, "-c", ALONE], text=True, env=environment)
    loaded, of_device, of_launch = told.splitlines()
    assert loaded == f"False False {len(ROWS)} 0"
    assert re.search("of the 0 CUDA devices here, got 0" if WITH_CUDA else "built without CUDA", of_device), of_device
    assert re.search("^RuntimeError .*(driver|device)" if WITH_CUDA else "built without CUDA", of_launch), of_launch


def public_names(module: Any, prefix: str = "") -> Iterator[str]:
    """Dotted: what a module or a class has or annotates, and so of its classes."""
    for name, value in {**vars(module), **getattr(module, "__annotations__", {})}.items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        yield prefix + name
        if isinstance(value, type):
            yield from public_names(value, f"{prefix}{name}.")


def test_the_stubs_say_what_is_there_and_the_arguments_of_a_launch():
    stubs, text = ModuleType("stubs"), (ROOT / "cutlass_fmha" / "_C.pyi").read_text()
    exec(compile(text, "_C.pyi", "exec", __future__.annotations.compiler_flag), vars(stubs))
    assert set(public_names(stubs)) == set(public_names(_C))
    signatures = re.findall(r"\d\. run\((.*)\)", str(_C.run.__doc__))
    annotations = inspect.get_annotations(stubs.run)
    assert all(re.findall(r"(\w+):", signature) == [*annotations][:-1] for signature in signatures)
    kinds = re.findall(r"params: cutlass_fmha\._C\.(\w+)", " ".join(signatures))
    assert signatures and kinds == annotations["params"].split(" | ")


def test_it_needs_nothing_but_the_c_and_cpp_runtimes_and_its_symbols_stay_its_own():
    needed, exported = elf.needed(EXTENSION), elf.exported(EXTENSION)
    assert "libc.so.6" in needed and "PyInit__C" in exported
    allowed = r"(libc|libm|libpthread|libdl|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+"
    assert not [name for name in needed if not re.fullmatch(allowed, name)]
    # torch has a CUDA runtime of its own in the process: one must not be mistaken for the other. Templates of the
    # standard library are weak and the same everywhere.
    assert not [name for name in exported if re.search("cuda|cutlass|fwd_|nv[A-Z]", name)]
