"""A model of what bounds a main loop: how many clocks a warp's iteration costs on a GPU, from its counts.

A sub-core issues one warp instruction per clock, and an mma keeps its tensor pipe busy for ``mma_clk``
clocks. Four bounds follow: the tensor pipe, the exponentials, the issue slots, and the shared-memory port
of the SM. None of them explains what is measured, because other instructions take from the mma stream long
before the issue slots are used up. On an H200 that loss depends on the number of others per mma alone, and is
the same in clocks whether the tensor pipe is slowed threefold, fivefold or not. Its curve is ISSUE_MIX:

    clocks per iteration = mma * (mma_clk + curve(weight of the others per mma)) + wait

``wait`` is what an iteration loses to barriers and to the first loads after them, the median over VARIANTS.
What the model doesn't know: the latency of copies that go through registers, and that the two warps of a
sub-core fall into step when nothing keeps them apart (one block of 8 warps per SM and no turns: 358 TFLOP/s
were measured where it says 446).

On a GPU whose tensor pipe is slower by itself, rather than by repeating mma, nobody has measured for this
project whether an mma leaves more room to others. So a share there has two ends: ``low`` takes the loss of
the H200, clock for clock, and ``high`` takes the slower mma to hold the issue port as long as the H200's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

MMA_FLOP = 16 * 8 * 16 * 2
SUB_CORES = 4
REGISTERS_PER_SM = 64 * 1024
RESERVED_SHARED = 1024

MUFU_CLK = 8.0  # 4 lanes per clock
LDSM_CLK = 4.0  # .x4 reads 512 bytes of the SM's 128 per clock
SHARED_CLK = 1.0  # a full LDS or STS.32; wider ones are rare in a main loop


@dataclass(frozen=True)
class Gpu:
    """A GPU as its datasheet has it, but for the H200's tensor rate, which is measured."""

    name: str
    arch: int
    tflops: float  #: dense bf16 with fp32 accumulation, by mma.sync
    sms: int
    boost_ghz: float
    shared_per_sm: int = 100 * 1024
    warps_per_sm: int = 48

    @property
    def mma_clk(self) -> float:
        """Clocks of a sub-core per mma m16n8k16, at the boost clock."""
        return MMA_FLOP * SUB_CORES * self.sms * self.boost_ghz * 1e-3 / self.tflops


H200 = Gpu("H200", 90, 642.0, 132, 1.98, 228 * 1024, 64)
GPUS: tuple[Gpu, ...] = (
    H200,
    Gpu("L4", 89, 121.0, 58, 2.04),
    Gpu("L40S", 89, 362.0, 142, 2.52),
    Gpu("RTX 4090", 89, 165.0, 128, 2.52),
    Gpu("RTX PRO 6000", 120, 504.0, 188, 2.617),
    Gpu("RTX 5090", 120, 209.5, 170, 2.407),
)


@dataclass(frozen=True)
class Work:
    """What a warp issues in one iteration of a main loop, as far as the model cares."""

    mma: float
    others: float  #: every other instruction, but for the NOPs that sm_120's compiler puts behind each mma
    mufu: float
    ldsm: float
    shared: float = 0.0  #: LDS and STS, and the 16-byte writes of LDGSTS four times
    nops: float = 0.0

    @classmethod
    def of(cls, counts: Mapping[str, float]) -> Work:
        """From the counts of mainloop.Loop."""
        others = sum(counts.values()) - counts["mma"] - counts["nop"]
        shared = counts["shared"] + 4 * counts["copy"]
        return cls(counts["mma"], others, counts["mufu"], counts["ldsm"], shared, counts["nop"])


@dataclass(frozen=True)
class Variant:
    """A kernel of the experiment that preceded this project: counts of its machine code (sm_90, nvcc 13.0.88)
    and what it reached on an H200, with mma repeated: repetitions -> TFLOP/s."""

    name: str
    work: Work
    tflops: Mapping[int, float]


#: Others per mma and what share of the rate of a pure mma stream they cost, 8 warps per SM, H200.
ISSUE_MIX: dict[str, dict[float, float]] = {
    "fp32": {1.0: 0.05, 2.0: 0.23, 3.0: 0.32},
    "mufu": {0.5: 0.08},
    "ldsm": {0.5: 0.05},
}

VARIANTS: tuple[Variant, ...] = (
    Variant("D128 128x32, 4 warps, 2 blocks", Work(128, 416, 36, 48), {1: 339, 3: 167, 5: 111}),
    Variant("D128 16 rows, standard softmax", Work(128, 354, 34, 64), {1: 326, 3: 167, 5: 110}),
    Variant("D128 16 rows, lazy rescale", Work(128, 284, 32, 64), {1: 351, 3: 177, 5: 114}),
    Variant("D128 32 rows, standard softmax", Work(256, 604, 68, 80), {1: 387}),
    Variant("D128 32 rows, token", Work(256, 450, 64, 80), {1: 451, 3: 187, 5: 118}),
    Variant("D64 16 rows, standard softmax", Work(64, 338, 34, 32), {1: 324, 3: 163, 5: 108}),
    Variant("D64 32 rows, token", Work(128, 403, 64, 32), {1: 392, 3: 167, 5: 110}),
)


@dataclass(frozen=True)
class Interference:
    """What others take from the mma stream, in clocks of the H200, by weight: FP32 instructions have 1."""

    curve: tuple[
        tuple[float, float], ...
    ]  #: weight per mma -> clocks lost per mma; straight in between and on
    mufu: float  #: weight of a MUFU
    ldsm: float  #: weight of an ldmatrix.x4
    wait: float  #: clocks per iteration

    def weight(self, work: Work) -> float:
        return work.others + (self.mufu - 1) * work.mufu + (self.ldsm - 1) * work.ldsm

    def per_mma(self, weight: float) -> float:
        for (x0, y0), (x1, y1) in pairwise(self.curve):
            if weight <= x1 or x1 == self.curve[-1][0]:
                return max(0.0, y0 + (weight - x0) / (x1 - x0) * (y1 - y0))
        raise AssertionError("a curve has two points")

    def clocks(self, work: Work, mma_clk: float = 0.0) -> float:
        """Clocks lost per iteration. ``mma_clk``: of a GPU whose slower mma hides as much as it can."""
        hidden = max(0.0, mma_clk - H200.mma_clk)
        return work.mma * max(0.0, self.per_mma(self.weight(work) / work.mma) - hidden)


def _inverse(curve: tuple[tuple[float, float], ...], clocks: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if clocks <= y1:
            return x0 + (clocks - y0) / (y1 - y0) * (x1 - x0)
    raise ValueError("beyond what was measured")


@cache
def interference() -> Interference:
    """The calibration: the curve of ISSUE_MIX's FP32 points, weights from its others, wait from VARIANTS."""

    def lost(kind: str) -> list[tuple[float, float]]:
        return [(x, H200.mma_clk * cost / (1 - cost)) for x, cost in ISSUE_MIX[kind].items()]

    curve = ((0.0, 0.0), *lost("fp32"))
    mufu, ldsm = (
        statistics.fmean(_inverse(curve, y) / x for x, y in lost(kind)) for kind in ("mufu", "ldsm")
    )
    without_wait = Interference(curve, mufu, ldsm, 0.0)
    waits = [
        v.work.mma * H200.mma_clk * (H200.tflops / tflops - passes) - without_wait.clocks(v.work)
        for v in VARIANTS
        for passes, tflops in v.tflops.items()
    ]
    return Interference(curve, mufu, ldsm, statistics.median(waits))


@dataclass(frozen=True)
class Prediction:
    """Clocks of a sub-core per iteration and warp, and the share of the tensor ceiling that follows."""

    gpu: Gpu
    passes: int  #: times each mma is run: 1, or the repetitions of an emulated slower tensor pipe
    clocks: dict[str, float]  #: tensor, mufu, issue, smem and loss (interference and wait), low end
    low: float
    high: float

    @property
    def bound(self) -> str:
        """The pipe with the most to do, or "issue loss" when more is lost than the tensor pipe works."""
        pipes = {name: clk for name, clk in self.clocks.items() if name != "loss"}
        name = max(pipes, key=lambda pipe: pipes[pipe])
        return "issue loss" if name == "tensor" and self.clocks["loss"] > pipes["tensor"] else name

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s of the whole GPU at the low end."""
        return self.low * self.gpu.tflops / self.passes


def predict(work: Work, gpu: Gpu, warps: float = 2.0, passes: int = 1) -> Prediction:
    """The model for ``warps`` resident warps per sub-core; one alone overlaps nothing with its own mma."""
    loss = interference()
    tensor = work.mma * gpu.mma_clk * passes
    clocks = {
        "tensor": tensor,
        "mufu": work.mufu * MUFU_CLK,
        "issue": work.mma * passes + work.others + work.nops,
        "smem": SUB_CORES * (work.ldsm * LDSM_CLK + work.shared * SHARED_CLK),
    }
    low, high = loss.clocks(work), loss.clocks(work, gpu.mma_clk)
    if warps < 2:
        low = high = loss.weight(work)
    floor = max(clocks.values())
    shares = [tensor / max(floor, tensor + lost + loss.wait) for lost in (low, high)]
    return Prediction(gpu, passes, {**clocks, "loss": low + loss.wait}, *shares)


def resident_warps(
    gpu: Gpu, registers: int, shared: int, warps: int, min_blocks: int, ping_pong: bool
) -> float:
    """Warps of a row that a sub-core holds, from registers per thread, dynamic shared memory in bytes and
    warps per block. A pair that takes turns counts as two."""
    if ping_pong:
        return 2.0
    per_block = -(-registers // 8) * 8 * 32 * warps
    blocks = min(
        REGISTERS_PER_SM // per_block,
        gpu.shared_per_sm // (shared + RESERVED_SHARED),
        gpu.warps_per_sm // warps,
    )
    return max(min_blocks, blocks) * warps / SUB_CORES


def variant_errors() -> list[tuple[str, int, float, float]]:
    """(variant, passes, measured share, predicted share): how far the model is from what it was fitted to."""
    return [
        (v.name, passes, tflops * passes / H200.tflops, predict(v.work, H200, passes=passes).low)
        for v in VARIANTS
        for passes, tflops in v.tflops.items()
    ]
