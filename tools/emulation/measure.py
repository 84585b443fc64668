"""Measures one emulation build on the GPU at hand: the mma ceiling, FlashAttention-2's tiles, every row.

Run by tools/emulate.py in a process of its own, since a process holds one extension:
python measure.py EXTENSION REFERENCE RESULT --head-dims 64 128 --seconds 0.06
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # not as "emulation": this file is run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulation.cases import Case, cases

ROOT = Path(__file__).resolve().parents[2]
CEILING_SECONDS = 0.004  # of one launch, long enough for clocks and power to settle over a few
PACE = 128  # head dimension of the mma that a kernel is timed in turns with
CHECKED_ROWS = 64


class StandardTile(ctypes.Structure):
    """FmhaStandardTile of reference.h."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("tile_m", "tile_n", "warps", "smem_bytes", "registers", "blocks_per_sm")
    ]


def load_module(name: str, path: Path) -> Any:
    """A module by its file: the build's ``_C``, which is no installed package's."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timing = load_module("timing", ROOT / "cutlass_fmha" / "bench" / "timing.py")


def describe(build: dict[str, Any]) -> dict[str, Any]:
    """GPU, driver, clocks after the run, versions and commit, under the benchmark's names for them."""
    machine = load_module("machine", ROOT / "cutlass_fmha" / "bench" / "machine.py")
    properties, smi = torch.cuda.get_device_properties(0), machine.read_smi(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": smi["driver"],
        "clocks_after": smi,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "build": {**build, "proxy": {str(arch): on for arch, on in build["proxy"].items()}},
        "commit": machine.commit(ROOT),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def load_reference(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.fmha_launch_ceiling.restype = ctypes.c_double
    library.fmha_launch_ceiling.argtypes = [number, number, number, pointer]
    library.fmha_launch_standard_tile.argtypes = [
        *(number, number, number, pointer, pointer, pointer, pointer),
        *(number, number, number, ctypes.c_float, pointer),
    ]
    library.fmha_standard_tile.argtypes = [number, number, ctypes.POINTER(StandardTile)]
    return library


def median_seconds(launch: Callable[[], object], budget: float) -> float:
    """Median over launches back to back, at least five and about ``budget`` seconds of them."""
    launch()
    torch.cuda.synchronize()
    return statistics.median(timed([launch] * rounds(launch, budget)))


def rounds(launch: Callable[[], object], budget: float) -> int:
    return max(5, min(50, math.ceil(budget / timed([launch])[0])))


def timed(launches: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each, launched back to back."""
    return [us * 1e-6 for us in timing.elapsed_us(launches)]


class Tensors:
    """Q, K, V and O of a case, and what O must be on a few rows of the last head."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(case.head_dim)
        shape = (case.batch, case.seqlen, case.num_heads, case.head_dim)
        self.case = case
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self.o = torch.empty_like(self.q)
        self.scale = case.head_dim**-0.5
        step = max(1, (case.seqlen - 1) // (CHECKED_ROWS - 1))
        self.checked = torch.arange(0, case.seqlen, step, device="cuda")[:CHECKED_ROWS]
        self.expected, self.tolerance = self._expect()

    def _expect(self) -> tuple[torch.Tensor, float]:
        """Dense fp64 attention, and twice the error of unfused bf16 math plus two ulp."""
        q, k, v = (tensor[-1, :, -1] for tensor in (self.q, self.k, self.v))
        q = q[self.checked]
        hidden = torch.arange(self.case.seqlen, device="cuda") > self.checked[:, None]

        def attend(dtype: torch.dtype, probability: torch.dtype) -> torch.Tensor:
            scores = q.to(dtype) @ k.to(dtype).T * self.scale
            if self.case.causal:
                scores.masked_fill_(hidden, -math.inf)
            p = scores.softmax(-1).to(probability)
            output: torch.Tensor = p.to(dtype) @ v.to(dtype)
            return output

        exact = attend(torch.float64, torch.float64)
        unfused = attend(torch.float32, torch.bfloat16).to(torch.bfloat16)
        error = float((unfused.double() - exact).abs().max())
        ulp = 2.0 ** (math.floor(math.log2(float(exact.abs().max()))) - 7)
        return exact, 2 * error + 2 * ulp

    def error_ratio(self) -> float:
        """Largest error over the tolerance; above 1 the kernel computes something else. NaN is 1e9."""
        error = (self.o[-1, :, -1][self.checked].double() - self.expected).abs().max()
        ratio = float(error) / self.tolerance
        return ratio if math.isfinite(ratio) else 1e9

    def pointers(self) -> tuple[int, ...]:
        return self.q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), self.o.data_ptr(), 0

    def strides(self) -> tuple[int, ...]:
        return tuple(stride for t in (self.q, self.k, self.v, self.o) for stride in t.stride()[:3])


class Bench:
    """One build on one GPU."""

    def __init__(self, extension: Path, reference: Path, budget: float) -> None:
        self.module, self.library = load_module("_C", extension), load_reference(reference)
        self.budget = budget
        self.stream = torch.cuda.current_stream().cuda_stream
        self.build = self.module.build_info()
        if not self.build.get("emulation"):
            raise RuntimeError(f"{extension} is no emulation build: CUTLASS_FMHA_EMULATION is OFF")
        self.passes = int(self.build["mma_passes"])
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.mma_alone = {head_dim: self.long_enough(head_dim) for head_dim in (64, 128)}

    def launch_mma(self, head_dim: int, blocks: int) -> float:
        """The mma of so many key blocks alone. Returns their useful operations, counted as of all rows."""
        flop = float(self.library.fmha_launch_ceiling(head_dim, blocks, self.sms, self.stream))
        if flop < 0:
            raise RuntimeError("the ceiling's kernel could not be launched")
        return flop

    def long_enough(self, head_dim: int) -> Callable[[], float]:
        seconds = median_seconds(partial(self.launch_mma, head_dim, 100), 0.0)
        return partial(self.launch_mma, head_dim, math.ceil(100 * CEILING_SECONDS / seconds))

    def ceiling(self) -> dict[str, float]:
        """TFLOP/s of the mma alone, by head dimension."""
        return {
            str(head_dim): call() / median_seconds(call, self.budget) * 1e-12
            for head_dim, call in self.mma_alone.items()
        }

    def rate_and_share(self, launch: Callable[[], object], flop: float) -> tuple[float, float]:
        """FLOP per second, and the median share of what the mma alone reaches in turns with ``launch``.

        The GPU changes its clock by steps of almost 1 %; so both have the same.
        """
        mma, launches = self.mma_alone[PACE], rounds(launch, self.budget)
        useful = mma()
        seconds = timed([launch, mma] * launches)
        own, alone = seconds[::2], seconds[1::2]
        shares = [flop / mine / (useful / other) for mine, other in zip(own, alone, strict=True)]
        return flop / statistics.median(own), statistics.median(shares)

    def entry(self, tensors: Tensors, launch: Callable[[], object], **about: Any) -> dict[str, Any]:
        tensors.o.fill_(math.nan)
        rate, share = self.rate_and_share(launch, tensors.case.flop)
        return {
            **about,
            "head_dim": tensors.case.head_dim,
            "causal": tensors.case.causal,
            "passes": self.passes,
            "tflops": rate * 1e-12,
            "share": share,
            "error_ratio": tensors.error_ratio(),
        }

    def standards(self, tensors: Tensors) -> list[dict[str, Any]]:
        """FlashAttention-2's tiles for the head dimension: one or two."""
        found = {}
        for other in (False, True):
            tile = StandardTile()
            self.check(self.library.fmha_standard_tile(tensors.case.head_dim, other, ctypes.byref(tile)))
            name = f"FA2 {tile.tile_m}x{tile.tile_n} w{tile.warps}"
            if name not in found:
                found[name] = self.standard(tensors, other, name, tile)
        return list(found.values())

    def standard(self, tensors: Tensors, other: bool, name: str, tile: StandardTile) -> dict[str, Any]:
        case = tensors.case

        def launch() -> None:
            status = self.library.fmha_launch_standard_tile(
                *(case.head_dim, other, case.causal, *tensors.pointers()[:4]),
                *(case.batch, case.seqlen, case.num_heads, tensors.scale, self.stream),
            )
            self.check(status)

        about = {field: getattr(tile, field) for field in ("smem_bytes", "registers", "blocks_per_sm")}
        return self.entry(tensors, launch, row=name, arch=None, **about)

    def row(self, tensors: Tensors, row: Any) -> dict[str, Any]:
        case = tensors.case
        sizes = case.batch, case.seqlen, case.seqlen, case.num_heads, case.num_heads
        diagonal = 0 if case.causal else None
        arguments = tensors.pointers(), sizes, tensors.strides(), tensors.scale, diagonal, 0, self.stream

        def launch() -> None:
            self.module.run(row.index, *arguments)

        return self.entry(tensors, launch, row=row.name, arch=row.arch, smem_bytes=row.smem_bytes)

    @staticmethod
    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"a kernel of FlashAttention-2's tiles: CUDA error {status}")

    def run(self, head_dims: list[int]) -> dict[str, Any]:
        rows = [row for row in self.module.templates() if row.dtype == "bfloat16" and row.family == "plain"]
        if not rows:
            raise RuntimeError("the build holds no row to measure: see --rows")
        ceilings, results = [self.ceiling()], []
        for case in cases(head_dims):
            tensors = Tensors(case)
            results += self.standards(tensors)
            results += [self.row(tensors, row) for row in rows if row.head_dim == case.head_dim]
        ceilings.append(self.ceiling())  # again: the clock may have gone either way
        ceiling = {dim: max(found[dim] for found in ceilings) for dim in ceilings[0]}
        machine = describe(self.build)
        return {"passes": self.passes, "ceiling": ceiling, "results": results, "machine": machine}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extension", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--head-dims", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=0.06)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0)[0] != 9:
        found = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
        print(f"emulation needs an sm_90 GPU (H100, H200), and there is {found}", file=sys.stderr)
        return 1
    bench = Bench(options.extension, options.reference, options.seconds)
    options.result.write_text(json.dumps(bench.run(options.head_dims)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
