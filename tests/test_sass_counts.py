"""Main loops as the compiler made them: no class of instructions has grown past its committed count, and the
parts that count them do what they say. Needs no GPU."""

import re
from typing import Any

import cubin
import mainloop
import pytest
import resources

from cutlass_fmha import _C

Loops = list[tuple[Any, cubin.Kernel, mainloop.Loop]]


@pytest.fixture(scope="module")
def loops(machine_code: list[cubin.Kernel]) -> Loops:
    return mainloop.loops_of(machine_code, _C.rows())


def test_no_main_loop_has_grown(loops: Loops):
    """Of the plain rows in this build, without a proxy's, which are compiled for another architecture."""
    assert [row.name for row, _, _ in loops] == [row.name for row in _C.rows() if row.family == "plain"]
    own = {x.name: {"registers": x.registers, "loop": loop.entry} for row, x, loop in loops if x.arch == row.arch}
    assert own, "this build has no CUDA kernels to inspect: build with CUTLASS_FMHA_CUDA=ON, as make does"
    committed = {name: row for name, row in resources.read_report()["rows"].items() if "loop" in row}
    lines = mainloop.changes(committed, own)
    assert not lines, "\n".join(lines)


def test_a_loop_holds_what_one_block_of_keys_takes(loops: Loops):
    """Exponentials twice, in the trial and in the second pass, and one for each row that this rescales."""
    for row, _, loop in loops:
        rows, dim = row.tile_m // row.warps, row.head_dim // 16
        expected = {"mma": 2 * (rows // 16 * (row.tile_n // 8) * dim)}
        expected["mufu"] = 2 * (rows * row.tile_n // 32) + rows // 8
        expected["ldsm"] = 2 * (row.tile_n // 16) * dim + (0 if row.q_in_registers else rows // 16 * dim)
        # One half of the warps copies K, the other V: each runs half of what there is.
        copied = 2 * 2 * row.tile_n * row.head_dim * row.element_bytes // row.warps
        expected |= {"cp_async_16": {"copy": copied // 512}, "element": {"global": copied // 64}}.get(row.copy, {})
        assert expected.items() <= loop.counts.items(), (row.name, expected)
        assert loop.counts["other"] <= 2, (row.name, loop.opcodes)


# ---- the gate, on planted counts ---------------------------------------------------------------------------

ROW = "fwd_sm90_f16_d64_m64n64w4"
LOOP_COUNTS = {"mma": 64, "mufu": 32, "fp32": 500, "alu": 40}
COMMITTED = {ROW: {"registers": 128, "loop": LOOP_COUNTS}}


@pytest.mark.parametrize(
    ("registers", "counts", "found"),
    [
        (128, {"alu": 44}, None),
        (128, {"alu": 45}, "alu in the main loop grew from 40 to 45"),
        (128, {"fp32": 510}, None),
        (128, {"fp32": 511}, "fp32 in the main loop grew from 500 to 511"),
        (128, {"alu": 20}, None),
        (128, {"nop": 5}, "nop in the main loop grew from 0 to 5"),
        (128, {"mma": 60}, "mma in the main loop went from 64 to 60"),
        (136, {}, None),
        (137, {}, "registers grew from 128 to 137"),
        (128, {"mufu": 36, "fp32": 504, "alu": 44, "move": 4}, "all classes in the main loop grew from 636 to 652"),
    ],
)
def test_growth_is_told(registers: int, counts: dict[str, int], found: str | None):
    new = {"registers": registers, "loop": LOOP_COUNTS | counts}
    lines = mainloop.changes(COMMITTED, {ROW: new, f"{ROW}_element": new})  # a row that is not committed
    assert len(lines) == (found is not None)
    assert not lines or (lines[0].startswith(f"{ROW}: {found}; ") and resources.UPDATE in lines[0])


# ---- finding the loop --------------------------------------------------------------------------------------

MMA = "HMMA.16816.F32 R0, R4, R8, R0"
COPY = "LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]"
#: Copies of its code before and after it, code that is jumped over, a spin loop and a rare branch behind it.
LOOP = f"""
    {MMA}; {MMA}; {MMA}
head:
    @P6 BRA second; {COPY}; {COPY}
second:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6; @!P1 BRA spin
ready:
    LDSM.16.M88.4 R8, [R1]; {MMA}; {MMA}; @!P6 BRA masks; {COPY}; {COPY}
masks:
    @!P2 BRA trial; FSEL R0, R0, -INF , P3; FSEL R1, R1, -INF , P4; FSEL R2, R2, -INF , P4
trial:
    FFMA R0, R0, R1, R2; MUFU.EX2 R0, R0; BRA.DIV ~URZ, divergent
voted:
    VOTE.ANY P0, P0; @!P0 BRA done; MUFU.EX2 R0, R0; FMUL R1, R1, R0; FMUL R2, R2, R0
done:
    ISETP.GE.AND P5, PT, R9, R10, PT; @!P5 BRA head; {MMA}; EXIT
spin:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R6; @!P1 BRA spin; BRA ready
divergent:
    MOV R3, 0x10; BRA voted
"""


def assemble(text: str) -> cubin.Kernel:
    """A kernel whose branches go to labels."""
    labels, lines = {}, []
    for line in filter(None, (part.strip() for part in re.split("[;\n]", text))):
        if line.endswith(":"):
            labels[line[:-1]] = hex(16 * len(lines))
        else:
            lines.append(line)
    parts = re.findall(r"^(?:@(\S+) )?(\S+) ?(.*?)(\w*)$", "\n".join(lines), re.MULTILINE)
    code = [cubin.Instruction(16 * i, *x, rest + labels.get(last, last)) for i, (*x, rest, last) in enumerate(parts)]
    return cubin.Kernel("planted", 90, code=code)


def test_the_body_of_a_planted_loop():
    found = mainloop.main_loop(assemble(LOOP))
    assert {name: count for name, count in found.counts.items() if count} == {
        "mma": 2, "ldsm": 1, "fp32": 3, "mufu": 2, "alu": 4, "copy": 4, "lanes": 1, "barrier": 2,
        "branch": 9,
    }  # fmt: skip
    assert (found.opcodes["MUFU"], found.opcodes["FSEL"]) == (2, 3)


@pytest.mark.parametrize(
    ("added", "before", "alu"),
    [("LOP3.LUT R9, R9, 0x1, RZ", "FFMA", 1), ("FADD R9, R9, R9", "EXIT", 0), ("@P0 BRA again", "EXIT", 0)],
    ids=["inside", "beside", "a loop that holds it"],
)
def test_what_is_added_to_the_loop_is_counted_and_what_is_added_elsewhere_is_not(added: str, before: str, alu: int):
    counts = mainloop.main_loop(assemble(LOOP)).counts
    changed = "again:\n" + LOOP.replace(before, f"{added}; {before}")
    assert mainloop.main_loop(assemble(changed)).counts == counts | {"alu": counts["alu"] + alu}


def test_a_kernel_without_a_loop_is_an_error():
    with pytest.raises(mainloop.LoopNotFoundError, match="planted .sm_90. has no loop with tensor-core"):
        mainloop.main_loop(assemble("top:\n FADD R0, R0, R0\n @P0 BRA top\n HMMA.16816.F32 R0, R4, R8, R0\n EXIT"))
