"""Which row runs a problem, and why.

Eligibility is a list of reasons per row, empty when the row can run the problem; of the eligible ones the
cheapest by predicted cost runs. The rows are those of the build (``_C.templates()``), no other list exists.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cutlass_fmha import _C, cost
from cutlass_fmha import device as devices
from cutlass_fmha.calibration import store
from cutlass_fmha.device import Device
from cutlass_fmha.errors import UnsupportedError

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.calibration.store import Calibration

CAUSAL = ("none", "top-left", "bottom-right")
FULL_ALIGNMENT = 16  # bytes: the widest copy there is
NO_KERNELS = (
    "this build of cutlass_fmha has no CUDA kernels (CUTLASS_FMHA_CUDA=OFF): install a wheel with CUDA, "
    "or rebuild it with `pip install . -C cmake.define.CUTLASS_FMHA_CUDA=ON`"
)


@dataclass(frozen=True)
class Problem:
    """One forward call, as far as the choice of a row depends on it.

    ``alignment``: the largest power of two, at most 16, that divides every pointer and every stride in bytes.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: str = "none"
    alignment: int = FULL_ALIGNMENT

    @property
    def diagonal(self) -> int | None:
        """Key j is visible to query i when j <= i + diagonal; None when every key is."""
        return mask_diagonal(self.causal, self.seqlen_q, self.seqlen_k)

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, seqlen_q {self.seqlen_q}, seqlen_k {self.seqlen_k}, "
            f"num_heads {self.num_heads}, num_heads_kv {self.num_heads_kv}, head_dim {self.head_dim}, "
            f"{self.dtype}, causal {self.causal}, aligned to {self.alignment} bytes"
        )


def mask_diagonal(causal: str, seqlen_q: int, seqlen_k: int) -> int | None:
    """The diagonal of a causal mask; None also where it hides nothing, as in decoding with one query."""
    if causal == "none":
        return None
    diagonal = 0 if causal == "top-left" else seqlen_k - seqlen_q
    return None if diagonal >= seqlen_k - 1 else diagonal


@functools.cache
def this_build() -> Build:
    """The rows of this build."""
    info = _C.build_info()
    proxy = info["proxy"]
    assert isinstance(proxy, dict)
    return Build(tuple(_C.templates()), tuple(sorted(proxy.items())))


@dataclass(frozen=True)
class Build:
    """Rows, and which architecture's rows were compiled for another one (a proxy build of the tests)."""

    templates: tuple[Template, ...]
    proxy: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def architectures(self) -> frozenset[int]:
        return frozenset(template.arch for template in self.templates)

    def by_name(self, name: str) -> Template:
        for template in self.templates:
            if template.name == name:
                return template
        raise ValueError(
            f"template {name!r} is not a row of this build; `python -m cutlass_fmha info` lists its "
            f"{len(self.templates)} rows"
        )


class Predicate(Protocol):
    """One eligibility rule: a sentence why the row can't run the problem, or None."""

    def __call__(self, template: Template, problem: Problem, device: Device, build: Build) -> str | None: ...


def _made_for_device(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    arch = devices.rows_arch(device, build.architectures)
    if arch == template.arch:
        return None
    if arch is None:
        return f"made for sm_{template.arch}, and this device takes no row of this build"
    return f"made for sm_{template.arch}, and this device takes the sm_{arch} rows"


def _executable(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    proxy = dict(build.proxy)
    if devices.can_execute(template.arch, device.capability, proxy):
        return None
    major, minor = device.capability
    compiled_for = proxy.get(template.arch, template.arch)
    return f"compiled for sm_{compiled_for}, which a device of capability {major}.{minor} can't execute"


def _dtype(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.dtype == problem.dtype:
        return None
    return f"computes {template.dtype}, and the tensors are {problem.dtype}"


def _head_dim(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.head_dim == problem.head_dim:
        return None
    return f"made for head_dim {template.head_dim}, and the tensors have {problem.head_dim}"


def _alignment(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if problem.alignment % template.alignment == 0:
        return None
    return (
        f"needs pointers and strides aligned to {template.alignment} bytes, "
        f"and these are aligned to {problem.alignment}"
    )


def _shared_memory(template: Template, problem: Problem, device: Device, build: Build) -> str | None:
    if template.smem_bytes <= device.smem_per_block:
        return None
    return (
        f"needs {template.smem_bytes} bytes of shared memory per block, "
        f"and this device has {device.smem_per_block}"
    )


PREDICATES: tuple[Predicate, ...] = (
    _made_for_device,
    _executable,
    _dtype,
    _head_dim,
    _alignment,
    _shared_memory,
)


def reasons(template: Template, problem: Problem, device: Device, build: Build | None = None) -> list[str]:
    """Why a row can't run a problem on a device, one sentence each; empty when it can."""
    build = build or this_build()
    sentences = (predicate(template, problem, device, build) for predicate in PREDICATES)
    return [sentence for sentence in sentences if sentence is not None]


def is_eligible(template: Template, problem: Problem, device: Device, build: Build) -> bool:
    """Whether a row has no reason against it. Asks until the first one, the quick and choosy rules first."""
    return all(predicate(template, problem, device, build) is None for predicate in reversed(PREDICATES))


def predicted_cost(
    template: Template, problem: Problem, device: Device, calibration: Calibration | None = None
) -> float:
    """Predicted microseconds of one launch: a model (``cost.py``) that ranks rows, not a measurement.

    ``calibration``: what the model was told of this GPU; the one that counts here when None.
    """
    calibration = calibration or store.for_device(device)
    return cost.predict(template, problem, device, calibration.cost(template, device))


def no_rows(device: Device, build: Build | None = None) -> str | None:
    """Why a device takes no row of a build at all, and what to do about it; None when it takes some."""
    build = build or this_build()
    if not build.templates:
        return NO_KERNELS
    if devices.rows_arch(device, build.architectures) is not None:
        return None
    held = ", ".join(f"sm_{arch}" for arch in sorted(build.architectures))
    if (forced := devices.forced_arch()) is not None:
        return (
            f"{devices.FORCE_ARCH}={forced} asks for sm_{forced} rows, "
            f"and this build holds rows for {held} only"
        )
    if device.capability < (8, 9):
        return (
            f"{device} is older than every kernel of cutlass_fmha: compute capability 8.9 or newer is needed"
        )
    return (
        f"this build of cutlass_fmha holds rows for {held} only, none of which {device} takes: rebuild it "
        "with `pip install . -C cmake.define.CMAKE_CUDA_ARCHITECTURES=89`, or with its own architecture"
    )


def select(
    problem: Problem,
    device: Device,
    template: str | None = None,
    build: Build | None = None,
    calibration: Calibration | None = None,
) -> Template:
    """The row that runs a problem: the cheapest eligible one, or the one named ``template``.

    ``calibration``: what is known of the rows' costs; that of the device (``store.for_device``) when None.
    Raises UnsupportedError with every row's reasons (with those of ``template`` when it is given), and
    ValueError for a name that no row has.
    """
    build = build or this_build()
    if (nothing := no_rows(device, build)) is not None:
        raise UnsupportedError(nothing)
    if template is not None:
        row = build.by_name(template)
        if why := reasons(row, problem, device, build):
            raise UnsupportedError(
                f"template {template} can't run this problem ({problem}) on {device}: {'; '.join(why)}"
            )
        return row
    eligible = [row for row in build.templates if is_eligible(row, problem, device, build)]
    if not eligible:
        refusals = {row.name: reasons(row, problem, device, build) for row in build.templates}
        fewest_first = sorted(refusals.items(), key=lambda item: len(item[1]))
        table = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in fewest_first)
        raise UnsupportedError(
            f"no template of this build can run this problem ({problem}) on {device}:\n{table}"
        )
    # Copying element by element is for operands that nothing else takes: with others it has never been the
    # fastest, and where all rows cost about the same, a prediction could err in its favour.
    eligible = [row for row in eligible if row.copy != "element"] or eligible
    calibration = calibration or store.for_device(device)
    return min(eligible, key=lambda row: predicted_cost(row, problem, device, calibration))
