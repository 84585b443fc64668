"""Main loops as the compiler made them: no class of instructions has grown past its committed count, and the
parts that count them and model them do what they say. Needs no GPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cubin
import loop_counts
import mainloop
import measured
import pytest
import roofline
import sass

from cutlass_fmha import _C

assert _C.__file__ is not None
EXTENSION = Path(_C.__file__)


@pytest.fixture(scope="module")
def loops() -> list[sass.RowLoop]:
    rows = sass.rows_of(None)[1]
    assert rows, "this build has no CUDA kernels to inspect: build with CUTLASS_FMHA_CUDA=ON, as make does"
    return sass.read_rows(EXTENSION, rows)


@pytest.fixture(scope="module")
def built(loops: list[sass.RowLoop]) -> dict[str, Any]:
    """The counts of the rows that are compiled for their own architecture, which a proxy's aren't."""
    own = [loop for loop in loops if loop.kernel.arch == loop.row.arch]
    return loop_counts.build_counts(own, EXTENSION)


# ---- the gate ----------------------------------------------------------------------------------------------


def test_the_committed_counts_are_of_the_compiler_of_this_build(built: dict[str, Any]):
    committed = loop_counts.read_counts()["nvcc"]
    assert built["nvcc"] == committed, (
        f"counts of nvcc {committed}, build of {built['nvcc']}: {sass_update()}"
    )


def test_no_main_loop_has_grown(built: dict[str, Any]):
    assert built["rows"]
    lines = loop_counts.changes(loop_counts.read_counts(), built)
    assert not lines, "\n".join(lines)


def sass_update() -> str:
    return f"build with the pinned one (make does), or after changing the pin {loop_counts.UPDATE}"


def test_only_split_and_general_rows_are_left_out(loops: list[sass.RowLoop]):
    rows = _C.templates()
    left_out = {row.name for row in rows} - {loop.row.name for loop in loops}
    assert left_out == {row.name for row in rows if row.family != "plain"}
    assert left_out, "without such rows, the exception in tools/sass.py can go"


# ---- what holds for every main loop ------------------------------------------------------------------------


def test_a_loop_holds_the_mma_of_one_block_of_keys(loops: list[sass.RowLoop]):
    for loop in loops:
        row = loop.row
        tiles = row.tile_m // row.warps // 16 * (row.tile_n // 8) * (row.head_dim // 16)
        assert loop.loop.counts["mma"] == 2 * tiles, row.name


def test_a_loop_holds_each_exponential_once(loops: list[sass.RowLoop]):
    """Neither the second pass after a failed trial nor a copy outside the loop is counted."""
    for loop in loops:
        row = loop.row
        assert loop.loop.counts["mufu"] == row.tile_m // row.warps * row.tile_n // 32, row.name
        assert loop.loop.opcodes["SHFL"] == 0, row.name


def test_a_loop_loads_its_fragments_and_its_share_of_the_tiles(loops: list[sass.RowLoop]):
    for loop in loops:
        row = loop.row
        fragments = 2 * (row.tile_n // 16) * (row.head_dim // 16)
        queries = 0 if row.q_in_registers else row.tile_m // row.warps // 16 * (row.head_dim // 16)
        assert loop.loop.counts["ldsm"] == fragments + queries, row.name
        bytes_per_copy = {"cp_async_16": 512, "element": 64}.get(row.copy)
        if bytes_per_copy:
            kind = "copy" if row.copy == "cp_async_16" else "global"
            assert loop.loop.counts[kind] * bytes_per_copy == sass.copied_bytes(row), row.name


def test_nearly_every_instruction_has_a_class(loops: list[sass.RowLoop]):
    for loop in loops:
        assert loop.loop.counts["other"] <= 2, (loop.row.name, loop.loop.opcodes)


# ---- the gate, on planted counts ---------------------------------------------------------------------------

ROW = "fwd_sm90_f16_d64_m64n64w4"


@pytest.fixture
def committed() -> dict[str, Any]:
    loop = {"mma": 64, "mufu": 32, "fp32": 500, "alu": 40}
    return {"nvcc": "13.0.88", "update": "", "rows": {ROW: {"registers": 128, "loop": loop}}}


@pytest.mark.parametrize(
    ("kind", "count", "found"),
    [
        ("alu", 44, None),
        ("alu", 45, "alu in the main loop grew from 40 to 45"),
        ("alu", 44.5, "alu in the main loop grew from 40 to 44.5"),
        ("fp32", 510, None),
        ("fp32", 511, "fp32 in the main loop grew from 500 to 511"),
        ("alu", 20, None),
        ("nop", 5, "nop in the main loop grew from 0 to 5"),
        ("mma", 60, "mma per iteration of the main loop went from 64 to 60"),
    ],
)
def test_growth_is_told(committed: dict[str, Any], kind: str, count: float, found: str | None):
    new = copy.deepcopy(committed)
    new["rows"][ROW]["loop"][kind] = count
    lines = loop_counts.changes(committed, new)
    assert bool(lines) == (found is not None)
    if found is not None:
        assert lines[0].startswith(f"{ROW}: {found}; ")
        assert loop_counts.UPDATE in lines[0]


def test_a_little_of_everything_is_told_by_the_sum(committed: dict[str, Any]):
    new = copy.deepcopy(committed)
    new["rows"][ROW]["loop"] = {"mma": 64, "mufu": 36, "fp32": 504, "alu": 44, "move": 4}
    (line,) = loop_counts.changes(committed, new)
    assert "all classes in the main loop grew from 636 to 652" in line


def test_registers_may_grow_within_their_step(committed: dict[str, Any]):
    new = copy.deepcopy(committed)
    new["rows"][ROW]["registers"] = 136
    assert loop_counts.changes(committed, new) == []
    new["rows"][ROW]["registers"] = 137
    (line,) = loop_counts.changes(committed, new)
    assert line.startswith(f"{ROW}: registers grew from 128 to 137; ")


def test_rows_that_one_side_lacks_are_told(committed: dict[str, Any]):
    row = committed["rows"][ROW]
    both = {**committed, "rows": {ROW: row, ROW + "_element": row}}
    assert loop_counts.changes(committed, both) == [
        f"{ROW}_element has no committed counts: {loop_counts.UPDATE}"
    ]
    assert loop_counts.changes(both, committed) == [
        f"{ROW}_element has committed counts and is not in the build: {loop_counts.UPDATE}"
    ]
    only_89 = {**committed, "rows": {ROW.replace("sm90", "sm89"): row}}
    both = {**committed, "rows": {**committed["rows"], **only_89["rows"]}}
    assert loop_counts.changes(both, only_89) == []  # a build for one architecture


def test_counts_survive_the_file(committed: dict[str, Any], tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match="counts.json is missing: python tools/sass.py --write-counts"
    ):
        loop_counts.read_counts(tmp_path / "counts.json")
    loop_counts.write_counts(committed, tmp_path / "counts.json")
    assert loop_counts.read_counts(tmp_path / "counts.json") == committed


def test_counts_with_spills_are_not_written(committed: dict[str, Any], tmp_path: Path):
    committed["rows"][ROW]["loop"]["spill"] = 2
    with pytest.raises(ValueError, match=f"{ROW}: spills in the main loop, nothing was written"):
        loop_counts.write_counts(committed, tmp_path / "counts.json")
    assert not (tmp_path / "counts.json").exists()


def test_counts_of_a_proxy_are_refused(loops: list[sass.RowLoop]):
    proxy = SimpleNamespace(row=SimpleNamespace(name="fwd", arch=120), kernel=loops[0].kernel, loop=None)
    proxy.kernel = cubin.Kernel("fwd", 90)
    with pytest.raises(ValueError, match="fwd is compiled for another architecture"):
        loop_counts.build_counts([proxy], EXTENSION)  # type: ignore[list-item]


# ---- finding the loop --------------------------------------------------------------------------------------

LOOP = """
    HMMA.16816.F32 R0, R4, R8, R0        // a copy of the loop's code before it
    HMMA.16816.F32 R0, R4, R8, R0
    HMMA.16816.F32 R0, R4, R8, R0
head:
    @P6 BRA second
    LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]
    LDGSTS.E.BYPASS.LTC128B.128 [R1+0x800], desc[UR4][R2.64]
second:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6
    @!P1 BRA spin
ready:
    LDSM.16.M88.4 R8, [R1]
    HMMA.16816.F32 R0, R4, R8, R0
    HMMA.16816.F32 R0, R4, R8, R0
    @!P6 BRA masks
    LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]
    LDGSTS.E.BYPASS.LTC128B.128 [R1+0x800], desc[UR4][R2.64]
masks:
    @!P2 BRA trial
    FSEL R0, R0, -INF , P3
    FSEL R1, R1, -INF , P4
    FSEL R2, R2, -INF , P4
trial:
    FFMA R0, R0, R1, R2
    MUFU.EX2 R0, R0
    BRA.DIV ~URZ, divergent
voted:
    VOTE.ANY P0, P0
    @!P0 BRA done
    MUFU.EX2 R0, R0
    FMUL R1, R1, R0
    FMUL R2, R2, R0
done:
    ISETP.GE.AND P5, PT, R9, R10, PT
    @!P5 BRA head
    HMMA.16816.F32 R0, R4, R8, R0        // and one after it
    EXIT
spin:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6
    @!P1 BRA spin
    BRA ready
divergent:
    MOV R3, 0x10
    BRA voted
"""


def assemble(text: str) -> cubin.Kernel:
    """A kernel as cuobjdump would print it, with labels in place of addresses."""
    lines = [line.partition("//")[0].strip() for line in text.splitlines() if line.strip()]
    labels, code = {}, []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = 16 * len(code)
        else:
            code.append(line)
    sass_text = "\tcode for sm_90\n\t\tFunction : planted\n"
    for i, line in enumerate(code):
        word = line.split()[-1]
        line = line.replace(word, hex(labels[word])) if word in labels else line
        sass_text += f"        /*{16 * i:04x}*/                   {line} ;    /* 0x0 */\n"
    usage = "arch = sm_90\n Function planted:\n  REG:8 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:4\n"
    (kernel,) = cubin.parse(usage, sass_text)
    assert len(kernel.code) == len(code)
    return kernel


def counts(loop: mainloop.Loop) -> dict[str, float]:
    return {name: count for name, count in loop.counts.items() if count}


def test_the_steady_state_of_a_planted_loop():
    expected = {"mma": 2, "ldsm": 1, "fp32": 1, "mufu": 1, "alu": 1, "lanes": 1, "barrier": 1, "branch": 7}
    assert counts(mainloop.main_loop(assemble(LOOP))) == {**expected, "copy": 4}
    halves = mainloop.main_loop(assemble(LOOP), copied_bytes=1024)
    assert counts(halves) == {**expected, "copy": 2}
    assert halves.opcodes["MUFU"] == 1 and halves.opcodes["FMUL"] == 0


def test_what_is_added_to_the_loop_is_counted_and_what_is_added_elsewhere_is_not():
    before = mainloop.main_loop(assemble(LOOP))
    inside = mainloop.main_loop(assemble(LOOP.replace("    FFMA", "    LOP3.LUT R9, R9, 0x1, RZ\n    FFMA")))
    assert inside.counts["alu"] == before.counts["alu"] + 1
    masked = mainloop.main_loop(assemble(LOOP.replace("    FSEL R2", "    FADD R9, R9, R9\n    FSEL R2")))
    assert masked.counts == before.counts


def test_the_loop_that_holds_the_main_loop_is_not_the_main_loop():
    outer = "again:\n" + LOOP.replace("    EXIT", "    @P0 BRA again\n    EXIT", 1)
    assert mainloop.main_loop(assemble(outer)).counts == mainloop.main_loop(assemble(LOOP)).counts


def test_a_kernel_without_a_loop_is_an_error():
    with pytest.raises(mainloop.LoopNotFoundError, match="planted .sm_90. has no loop with tensor-core"):
        mainloop.main_loop(
            assemble("top:\n FADD R0, R0, R0\n @P0 BRA top\n HMMA.16816.F32 R0, R4, R8, R0\n EXIT")
        )


# ---- the model ---------------------------------------------------------------------------------------------


def test_the_clocks_of_an_mma_are_the_known_ones():
    clks = {gpu.name: gpu.mma_clk for gpu in roofline.GPUS}
    assert clks["L4"] == pytest.approx(16, rel=0.02) and clks["L40S"] == pytest.approx(16, rel=0.02)
    assert clks["RTX 4090"] == pytest.approx(32, rel=0.02) and clks["RTX 5090"] == pytest.approx(32, rel=0.02)
    assert clks["RTX PRO 6000"] == pytest.approx(16, rel=0.02)
    assert 5.9 < clks["H200"] < 6.8


@pytest.mark.parametrize(
    ("kind", "per_mma", "cost"),
    [(kind, x, cost) for kind, mix in roofline.ISSUE_MIX.items() for x, cost in mix.items()],
)
def test_the_model_gives_back_the_issue_mix(kind: str, per_mma: float, cost: float):
    n = {"mufu": 0.0, "ldsm": 0.0, kind: 1000 * per_mma}
    work = roofline.Work(1000, 1000 * per_mma, n["mufu"], n["ldsm"])
    lost = roofline.interference().clocks(work) / 1000
    assert lost / (roofline.H200.mma_clk + lost) == pytest.approx(cost, abs=1e-6)


def test_the_model_is_near_what_it_was_calibrated_to():
    errors = [abs(model / real - 1) for *_, real, model in roofline.variant_errors()]
    assert sum(errors) / len(errors) < 0.06
    slowed = [abs(m / r - 1) for name, n, r, m in roofline.variant_errors() if n > 1 and "token" in name]
    assert len(slowed) == 4 and max(slowed) < 0.02


def test_more_work_never_predicts_more_and_a_slower_pipe_hides_more():
    base = roofline.Work(128, 400, 64, 32)
    l4 = next(gpu for gpu in roofline.GPUS if gpu.name == "L4")
    for gpu in roofline.GPUS:
        at = roofline.predict(base, gpu)
        assert 0 < at.low <= at.high <= 1
        for more in (roofline.Work(128, 500, 64, 32), roofline.Work(128, 464, 128, 32)):
            assert roofline.predict(more, gpu).low < at.low
    h200 = [roofline.predict(base, roofline.H200, passes=n) for n in (1, 3, 5)]
    assert h200[0].low < h200[1].low < h200[2].low and h200[0].tflops > h200[1].tflops > h200[2].tflops
    assert roofline.predict(base, l4).low < roofline.predict(base, l4).high
    assert roofline.predict(base, l4, warps=1).low < roofline.predict(base, l4).high


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (roofline.Work(256, 100, 16, 16), "tensor"),
        (roofline.Work(64, 200, 128, 16), "mufu"),
        (roofline.Work(64, 900, 16, 16), "issue"),
        (roofline.Work(64, 200, 16, 64), "smem"),
    ],
)
def test_each_bound_can_bind(work: roofline.Work, bound: str):
    assert roofline.predict(work, roofline.H200).bound == bound


# ---- measurements and the command --------------------------------------------------------------------------


def case(row: str, tflops: float, causal: bool = False, seqlen: int = 8192) -> dict[str, Any]:
    return {
        "group": "dense",
        "label": f"S{seqlen}",
        "causal": causal,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "results": {"ours": {"status": "ok", "row": row, "tflops": tflops}},
    }


def result(cases: list[dict[str, Any]], **machine: Any) -> dict[str, Any]:
    about = {"gpu": "NVIDIA H200", "capability": "9.0", "build": {}, "forced_arch": None, **machine}
    return {"schema": 1, "machine": about, "method": "", "peers": [], "cases": cases}


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    files = {
        "a": result(
            [case(ROW, 500, causal=True), case(ROW, 390), case(ROW, 400), case(ROW, 600, seqlen=512)]
        ),
        "slow": result([case(ROW, 150)], build={"mma_passes": 3}),
        "forced": result([case(ROW, 700)], forced_arch="90"),
        "proxy": result([case(ROW.replace("sm90", "sm120"), 700)], build={"proxy": {"120": 90}}),
        "other": result([case(ROW, 700)], gpu="NVIDIA L4", capability="8.9"),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_measurements_are_the_best_full_ones_of_the_gpus_own_rows(results: Path):
    best = measured.best_measurements(results)
    assert {key: found.tflops for key, found in best.items()} == {(ROW, 1): 400, (ROW, 3): 150}
    assert best[ROW, 1].file == "a.json"
    assert measured.best_measurements(results / "nowhere") == {}
    (results / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json is no benchmark result"):
        measured.best_measurements(results)


def test_an_emulations_rows_are_measurements_of_its_gpu(results: Path):
    entry = {"row": ROW.replace("sm90", "sm89"), "arch": 89, "head_dim": 64, "causal": False, "passes": 3}
    emulation = {
        "kind": "emulation",
        "machine": {"gpu": "NVIDIA H200"},
        "cases": [{"head_dim": 64, "causal": causal, "label": f"D64 {causal}"} for causal in (False, True)],
        "results": [
            {**entry, "tflops": 170.0},
            {**entry, "causal": True, "tflops": 180.0},
            {**entry, "row": "FA2 128x64 w4", "arch": None, "tflops": 150.0},
        ],
    }
    (results / "emulation.json").write_text(json.dumps(emulation))
    (results / "other.json").write_text(json.dumps({"kind": "tuning"}))
    best = measured.best_measurements(results)
    assert best[entry["row"], 3] == measured.Measurement(170.0, "D64 False", False, "emulation.json")
    assert set(best) == {(ROW, 1), (ROW, 3), (entry["row"], 3)}


def test_the_command_prints_and_writes_its_tables(
    loops: list[sass.RowLoop], results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    row = loops[0].row.name
    files = ["--markdown", str(tmp_path / "out.md"), "--json", str(tmp_path / "out" / "out.json")]
    options = ["--rows", f"^{row}$", "--results", str(results), "--opcodes", *files]
    assert sass.main([str(EXTENSION), *options]) == 0
    printed = capsys.readouterr().out
    assert f"\n{row} " in printed and "A MODEL" in printed and f"{row}: HMMA" not in printed.split("row")[0]
    assert f"| {row} |" in (tmp_path / "out.md").read_text()
    (entry,) = json.loads((tmp_path / "out" / "out.json").read_text())["rows"]
    assert entry["row"] == row and entry["loop"]["mma"] == loops[0].loop.counts["mma"]


def test_the_models_error_stands_beside_a_measurement(loops: list[sass.RowLoop]):
    kernel, loop = cubin.Kernel("x", 90, registers=128), loops[0].loop
    row = SimpleNamespace(name="x", smem_bytes=1024, warps=8, min_blocks=1, ping_pong=True)
    found = {("x", n): measured.Measurement(400.0 / n, "S8192", False, "a.json") for n in (1, 3)}
    entry = sass.RowLoop(row, kernel, loop)
    one, three, _ = (p.tflops * p.passes / 400 - 1 for p in entry.predictions())
    assert sass.cells(entry, found)[-3:] == [f"{one:+.0%}", f"{three:+.0%}", "-"]
    *_, title, of_one, of_three = sass.notes([entry], found)
    assert title == "The model against a.json:"
    assert of_one == f"x1: off by {abs(one):.1%} in the median of 1 rows, by {one:+.1%} at worst (x)."
    assert of_three.startswith(f"x3: off by {abs(three):.1%} in the median of 1 rows")


def test_the_median_and_the_worst_error_are_over_all_rows():
    found = [sass.Error(name, error, measured.Measurement(1, "", False, "f")) for name, error in
             (("a", 0.01), ("b", -0.2), ("c", 0.05))]  # fmt: skip
    assert sass.error_text(5, found) == "x5: off by 5.0% in the median of 3 rows, by -20.0% at worst (b)."


def test_a_row_for_another_gpu_is_predicted_on_the_h200_too(loops: list[sass.RowLoop]):
    """With as many blocks as its own GPU holds: that is what an emulation measures."""
    row = SimpleNamespace(name="x", smem_bytes=40 * 1024, warps=4, min_blocks=1, ping_pong=False)
    kernel = cubin.Kernel("x", 89, registers=64)
    entry = sass.RowLoop(row, kernel, loops[0].loop)
    predictions = entry.predictions()
    assert [(p.gpu.name, p.passes) for p in predictions[:3]] == [("H200", 1), ("H200", 3), ("H200", 5)]
    assert {p.gpu.arch for p in predictions[3:]} == {89} and len(predictions) > 3
    assert entry.resident_warps(roofline.H200) == 5 and entry.resident_warps(predictions[3].gpu) == 2
    assert predictions[0].low == roofline.predict(entry.work, roofline.H200, 2).low
    assert len(sass.cells(entry, {})) == len(sass.headings(89))


def test_an_emulation_build_is_refused():
    sass.refuse_repeated_mma({}, EXTENSION)
    with pytest.raises(ValueError, match="runs each mma pass 3 times .an emulation build.: take one that"):
        sass.refuse_repeated_mma({"mma_passes": 3}, EXTENSION)


def test_a_name_that_no_row_has_and_a_file_that_is_not_there_are_told(capsys: pytest.CaptureFixture[str]):
    assert sass.main([str(EXTENSION), "--rows", "no-such-row"]) == 1
    assert "whose name holds 'no-such-row'" in capsys.readouterr().err
    assert sass.main(["nowhere.cubin"]) == 1
    assert "nowhere.cubin is no file" in capsys.readouterr().err


def test_the_calibration_can_be_looked_at(capsys: pytest.CaptureFixture[str]):
    assert sass.main(["--calibration"]) == 0
    printed = capsys.readouterr().out
    assert all(variant.name in printed for variant in roofline.VARIANTS)
