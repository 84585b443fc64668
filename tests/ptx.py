"""Small PTX programs on the simulator (tools/simulator), for its tests."""

import ctypes
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))


class SimulationError(RuntimeError):
    """What the simulator says of a program that is wrong."""


@functools.cache
def library() -> ctypes.CDLL:
    """The simulator, built when it isn't yet."""
    from simulator import DIRECTORY, build_library

    # Beside the rows that test_simulated_parity.py builds, and with none of its own.
    return ctypes.CDLL(str(build_library(DIRECTORY / "ptx")))


def module(body: str, parameters: int, declarations: str = "", *more: str) -> str:
    """A program with one kernel, whose parameters p0, p1, ... are addresses, before others."""
    entries = ", ".join([*(f".param .u64 p{i}" for i in range(parameters)), *more])
    return (
        f".version 8.8\n.target sm_120a\n.address_size 64\n{declarations}\n"
        f".visible .entry kernel({entries})\n{{\n{body}\n}}\n"
    )


def run_text(
    text: str, arguments: Sequence[Any], threads: int = 32, blocks: int = 1, shared: int = 0, seed: int = 0
) -> None:
    """Launch a program's kernel. Arrays are passed by address, bytes as they are. Raises SimulationError."""
    values = [
        ctypes.c_uint64(x.ctypes.data) if isinstance(x, np.ndarray) else (ctypes.c_char * len(x))(*x) for x in arguments
    ]
    pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
    error = ctypes.create_string_buffer(1 << 16)
    sizes = map(ctypes.c_uint32, (blocks, threads, shared))
    end = (pointers, ctypes.c_uint64(seed), error, ctypes.c_size_t(len(error)))
    if library().simulator_run(text.encode(), b"kernel", *sizes, *end):
        raise SimulationError(error.value.decode())


def run(body: str, *arrays: np.ndarray, declarations: str = "", **options: Any) -> None:
    """Launch a kernel of these instructions, whose parameters are the arrays' addresses."""
    run_text(module(body, len(arrays), declarations), arrays, **options)


def apply(opcode: str, result: np.dtype, *arrays: np.ndarray) -> np.ndarray:
    """``opcode`` on arrays of equal length, element by element; or statements that make %out of %in0, %in1, ..."""
    out = np.zeros(len(arrays[0]), dtype=result)
    assert len(out) % 32 == 0, "whole warps"
    lines = [".reg .b32 %index, %t; .reg .b64 %a<16>; .reg .pred %p0; mov.u32 %index, %ctaid.x;"]
    lines += ["mov.u32 %t, %tid.x; mad.lo.u32 %index, %index, 32, %t;"]
    inputs = [f"%in{n}" for n in range(len(arrays))]
    for n, (name, x) in enumerate(zip((*inputs, "%out"), (*arrays, out), strict=True)):
        lines += [f".reg .b{8 * x.itemsize} {name}; ld.param.u64 %a{n}, [p{n}];"]
        lines += [f"mad.wide.u32 %a{n}, %index, {x.itemsize}, %a{n};"]
        lines += [f"ld.global.b{8 * x.itemsize} {name}, [%a{n}];"]
    lines += [opcode if "%out" in opcode else f"{opcode} %out, {', '.join(inputs)};"]
    lines += [f"st.global.b{8 * out.itemsize} [%a{len(arrays)}], %out; ret;"]
    run("\n".join(lines), *(np.ascontiguousarray(x) for x in arrays), out, blocks=len(out) // 32)
    return out
