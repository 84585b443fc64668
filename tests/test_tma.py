"""Rows that copy by TMA, and those whose launches overlap, without a GPU: what CMake makes of their lines, and nvcc of
their kernels. What they compute, and that calls don't overtake each other, the parity gate asks."""

import collections
import re
import subprocess
from pathlib import Path

import building
import cubin
import mainloop
import pytest

from cutlass_fmha import _C
from cutlass_fmha.dispatch import table as tables

ROOT = Path(__file__).resolve().parents[1]
OVERLAPPING = [row.name for row in _C.rows() if row.family == "few_query" and row.dependent_launch]
OF_GRADIENTS = ("backward", "query_product", "backward_before", "backward_lists", "backward_after")
GRADIENTS = [x.name for x in (*_C.backward_rows(), *_C.helpers()) if x.family in OF_GRADIENTS and x.dependent_launch]
GLOBAL_ACCESSES = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UTMALDG", "UTMASTG"}
ROWS = {row.name: row for row in _C.rows() if row.family in tables.PLAIN and row.copy == "tma"}


def test_every_architecture_that_has_tma_has_rows_of_it_and_no_thread_of_theirs_copies(
    machine_code: list[cubin.Kernel],
):
    built = {row.arch for row in _C.rows()}
    assert built, "this build has no CUDA kernels to inspect: build with CUTLASS_FMHA_CUDA=ON, as make does"
    assert {row.arch for row in ROWS.values()} == {90, 120} & built
    assert {row.alignment for row in ROWS.values()} == {16}
    kernels = {kernel.name: kernel for kernel in machine_code if kernel.name in ROWS}
    assert kernels.keys() == ROWS.keys()
    for name, kernel in kernels.items():
        assert kernel.count("LDGSTS") == 0, name
        if ROWS[name].kv_warps == 1:
            assert kernel.count("UTMASTG") >= ROWS[name].head_dim // 64, "a box for each panel of O"


REGISTER = re.compile(r"\bR(\d+)\b")


def successors(code: list[cubin.Instruction]) -> list[list[int]]:
    """Of each instruction, those that may be executed after it, by number."""
    numbers, blocks = {instruction.address: n for n, instruction in enumerate(code)}, mainloop.blocks_of(code)
    found = [[n + 1] for n in range(len(code))]
    for block in blocks:
        found[numbers[block.code[-1].address]] = [numbers[blocks[n].code[0].address] for n in block.successors]
    return found


def being_read(code: list[cubin.Instruction]) -> dict[int, set[str]]:
    """Opcodes of matrices that may still be read from shared memory, by the address of each arrival at a barrier.

    ldmatrix come in the order in which a warp asked for them: one whose registers something uses is there, and so are
    those before it. A proxy fence waits for all.
    """
    loads = {n: int(REGISTER.search(x.operands)[1]) for n, x in enumerate(code) if x.base == "LDSM"}
    filled = {n: frozenset(range(first, first + 4)) for n, first in loads.items()}
    named = [frozenset(map(int, REGISTER.findall(x.operands))) for x in code]
    after, found = successors(code), collections.defaultdict(set)
    for load, registers in filled.items():
        # Where it may still be read, with the registers that it and the loads behind it fill.
        work, seen = [(n, registers) for n in after[load]], set()
        while work:
            n, awaited = state = work.pop()
            if code[n].opcode.startswith("SYNCS.ARRIVE") and "A1T0" in code[n].opcode:
                found[code[n].address].add(code[load].opcode)
            if state in seen or named[n] & awaited or code[n].opcode.startswith("FENCE.VIEW.ASYNC"):
                continue
            seen.add(state)
            work += [(m, awaited | filled.get(n, frozenset())) for m in after[n]]
    return found


def early_releases(kernel: cubin.Kernel) -> list[int]:
    """Where a tile is released though a matrix may still be read from it: the copy unit would write there.

    Arrivals under a predicate, which waits for a product, release what that was made of; the others, tiles that are not
    read. P V is not waited for itself, but Q K^T behind it: then nothing that is transposed, as V is, is still being
    read. In gradients' kernels other barriers are for what no copy unit writes.
    """
    guards = {x.address: x.guard for x in kernel.code}
    return [
        address
        for address, opcodes in being_read(kernel.code).items()
        if any("MT" in opcode for opcode in opcodes) and (guards[address] or kernel.name.startswith("fwd"))
    ]


def test_what_is_read_of_a_tile_comes_before_the_copy_unit_writes_it(machine_code: list[cubin.Kernel]):
    """An arrival at a barrier alone overtakes reads, where other blocks keep shared memory busy."""
    kernels = [x for x in machine_code if x.name.startswith(("fwd", "bwd")) and "_tma" in x.name and x.count("LDSM")]
    assert len(kernels) > len(ROWS), "ranged rows, and gradients"
    waiting = [x for x in kernels if any(i.guard and "A1T0" in i.opcode for i in x.code)]
    assert len(waiting) > len(kernels) * 0.9, "all but those that are fenced"
    assert {x.name: found for x in kernels if (found := early_releases(x))} == {}


V, ARRIVAL, USE = "LDSM.16.MT88.4 R8, [R2]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "HMMA R20, R16, R{}, R20"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ([V, f"@!P0 {ARRIVAL}"], True),
        ([V, USE.format(10), f"@!P0 {ARRIVAL}"], False),
        ([V, "LDSM.16.M88.4 R12, [R3]", USE.format(12), f"@!P0 {ARRIVAL}"], False),  # what comes later is there
        (["LDSM.16.M88.4 R12, [R3]", V, USE.format(12), f"@!P0 {ARRIVAL}"], True),
        ([V, "FENCE.VIEW.ASYNC.S", ARRIVAL], False),
        ([V, ARRIVAL], True),
        (["LDSM.16.M88.4 R12, [R3]", ARRIVAL], False),  # of Q, which stays in registers
        ([f"@!P0 {ARRIVAL}", V, "@P1 BRA 0x0"], True),  # of the loop's turn before
        (["@P1 BRA 0x20", USE.format(8), V, "@P2 BRA 0x10", f"@!P0 {ARRIVAL}"], True),
    ],
)
def test_a_release_that_overtakes_reads_is_found(lines: list[str], early: bool):
    pattern = re.compile(r"(?:@(\S+) )?(\S+) ?(.*)")
    parts = [match.groups(default="") for line in [*lines, "EXIT"] if (match := pattern.match(line))]
    code = [cubin.Instruction(16 * n, *part) for n, part in enumerate(parts)]
    assert bool(early_releases(cubin.Kernel("fwd_planted_tma", 90, code=code))) == early


def test_decoding_rows_what_follows_them_and_what_is_beside_attention_overlap_where_they_can():
    rows = [*_C.rows(), *_C.backward_rows(), *_C.helpers()]
    families = {"few_query", "few_query_scored", "combine", "gated", "gated_backward"}
    families |= {"rms_norm", "rms_norm_backward", "rms_norm_weights", "rope", "rope_backward", "rope_weights"}
    families |= set(OF_GRADIENTS)
    can = {row.name for row in rows if row.family in families and row.arch >= 90}
    assert can == {row.name for row in rows if row.dependent_launch}


def waiting(name: str, machine_code: list[cubin.Kernel]) -> tuple[dict[str, list[int]], int]:
    """Where a kernel has which instructions, and where it waits: before anything global."""
    (kernel,) = (kernel for kernel in machine_code if kernel.name == name)
    places = collections.defaultdict(list)
    for place, instruction in enumerate(kernel.code):
        places[instruction.base].append(place)
    (wait,) = places["ACQBULK"]
    assert kernel.code[wait].guard == "", "every thread waits"
    accesses = [place for opcode in GLOBAL_ACCESSES for place in places[opcode]]
    assert accesses and wait < min(accesses)
    assert min(places["EXIT"]) > wait, "no thread leaves before it has waited"
    assert not [i for i in kernel.code if i.base == "LDG" and "CONSTANT" in i.opcode]
    return places, wait


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_wait_before_anything_and_let_the_next_launch_in_at_once(name: str, machine_code: list[cubin.Kernel]):
    places, wait = waiting(name, machine_code)
    assert len(places["PREEXIT"]) == 1 and places["PREEXIT"][0] > wait


@pytest.mark.parametrize("name", OVERLAPPING)
def test_nothing_global_is_accessed_before_the_wait(name: str, machine_code: list[cubin.Kernel]):
    places, wait = waiting(name, machine_code)
    assert max(places["CCTL"]) < wait, "a prefetch that comes after the wait is for nothing"
    # The next launch is let in after the first loads and before the output: it waits for this one's end whenever it
    # comes, so that this is a matter of speed.
    triggers = places["PREEXIT"]
    assert len(triggers) == 2, "by the middle of the keys, and where there is no middle"
    assert min(places["LDG"] + places["UTMALDG"]) < min(triggers) and max(triggers) < min(places["STG"])


TILE = "64 64 64 4 1 2 2 true false"
NO_TMA = "asks for fwd_sm89_bf16_d64_m64n64w4_tma, and sm_89 has no TMA"
FEW_QUERY = "64 16 32 4 4 2 1 true false ldg_16"
NO_OVERLAP = "fwd_sm89_f16_d64_m16n32w4k4_pdl; only few-query rows from sm_90 on overlap"


def rows_of(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """CMake's rows of some manifest lines, a "name: configuration" each, without compiling any."""
    (tmp_path / "manifest.cmake").write_text("\n".join(lines))
    return building.script(
        tmp_path,
        "set(FMHA_SUPPORTED_ARCHITECTURES 89 90 120)\nset(FMHA_ARCHITECTURES 89 90 120)",
        f'set(CUTLASS_FMHA_MANIFEST "{tmp_path}/manifest.cmake")',
        f'include("{ROOT}/cmake/Instances.cmake")\nfmha_include_manifest()',
        "get_property(names GLOBAL PROPERTY FMHA_ROW_NAMES)\nforeach(name IN LISTS names)",
        "  get_property(config GLOBAL PROPERTY FMHA_CONFIG_${name})",
        '  string(REPLACE "\\n" "" config "${config}")\n  message("${name}: ${config}")\nendforeach()',
    )


def test_a_13th_column_makes_launches_overlap(tmp_path: Path):
    lines = f'"90" "f16" {FEW_QUERY} true', f'"90;89" "f16" {FEW_QUERY}', f'"120" "bf16" {FEW_QUERY} false'
    done = rows_of(tmp_path, *(f"fmha_forward({line})" for line in lines))
    assert done.returncode == 0, done.stderr
    configs = dict(line.split(": ", 1) for line in done.stderr.splitlines())
    rows = {f"fwd_{row}_d64_m16n32w4k4" for row in ("sm90_f16", "sm89_f16", "sm120_bf16")}
    assert configs.keys() == rows | {"fwd_sm90_f16_d64_m16n32w4k4_pdl"}
    for name, config in configs.items():
        assert ".copy = cutlass_fmha::Copy::ldg_16" in config
        assert (".dependent_launch = true" in config) == name.endswith("_pdl")


def test_a_line_that_asks_for_what_no_kernel_does_is_an_error_and_the_end(tmp_path: Path):
    for line, words in (
        (f'fmha_forward("89" "bf16" {TILE} tma)', NO_TMA),
        (f'fmha_forward("90;89" "bf16" {TILE} tma)', NO_TMA),
        ('fmha_forward("90" "bf16" 128 128 16 8 1 1 1 false true tma)', "turns need a TILE_N of at least 32"),
        ('fmha_masked("90" "f16" 256 256 128 16 8 2 1 false true tma)', "turns need a TILE_N of at least 32"),
        (f'fmha_forward("89" "f16" {FEW_QUERY} true)', NO_OVERLAP),
        (f'fmha_forward("90" "f16" {TILE} cp_async_16 true)', "only few-query rows from sm_90 on"),
        (f'fmha_forward("90" "f16" {FEW_QUERY} yes)', "too many columns"),
        (f'fmha_forward("90" "f16" {FEW_QUERY} true true)', "too many columns"),
    ):
        done = rows_of(tmp_path, f'fmha_forward("120" "f16" {TILE} tma)', line)
        assert done.returncode != 0 and words in " ".join(done.stderr.split()), line
        assert ".copy =" not in done.stderr, "nothing is written"


def test_sm_120_is_compiled_as_what_has_tma(tmp_path: Path):
    for version, copy, target in (
        ("12.8.93", "cp_async_16", "120"),  # also runs on 12.1, which 120a does not
        ("12.8.93", "tma", "120a"),
        ("12.9.41", "cp_async_16", "120f"),
        ("12.9.41", "tma", "120f"),
        ("13.0.88", "tma", "120f"),
    ):
        done = building.script(
            tmp_path,
            f"include({ROOT}/cmake/Architectures.cmake)\ninclude({ROOT}/cmake/Instances.cmake)",
            f"set(FMHA_NVCC_VERSION {version})\nset(FMHA_ARCHITECTURES 120)",
            f'fmha_forward(120 "bf16" {TILE} {copy})',
            'fmha_code_flags(120 found)\nmessage("${found}")',
            'fmha_set_compiled_for()\nmessage("${FMHA_COMPILED_FOR_CXX}")',
        )
        assert done.stderr.split() == [f"-gencode=arch=compute_{target},code=sm_{target}", "{120,", f'"{target}"}}']
