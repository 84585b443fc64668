"""What the selection knows of a GPU: read from the driver, or from a datasheet for a GPU that is not here."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from cutlass_fmha import _C

KIB = 1024
FORCE_ARCH = "CUTLASS_FMHA_FORCE_ARCH"
#: Those that rows are made for.
ARCHITECTURES = (89, 90, 120)

# Per SM and compute capability (CUDA C++ Programming Guide, technical specifications): resident warps.
_WARPS_PER_SM = {(8, 0): 64, (9, 0): 64, (10, 0): 64, (10, 3): 64}
_DEFAULT_WARPS_PER_SM = 48

# Shared memory that one block may ask for, for GPUs known by name only.
_SMEM_PER_BLOCK = {80: 163 * KIB, 87: 163 * KIB, 90: 227 * KIB}
_DEFAULT_SMEM_PER_BLOCK = 99 * KIB

#: Machine code of other GPUs of their generation doesn't run there (CUDA C++ Programming Guide, binary
#: compatibility): Orin, which has an SoC's GPU.
_PTX_ALONE = ((8, 7),)


@dataclass(frozen=True)
class Device:
    """A GPU: its capability, its SM count and the shared memory (bytes) that one thread block may ask for."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.capability, self.sm_count, self.smem_per_block))

    def __hash__(self) -> int:  # what dataclass makes takes three times as long, and each call asks
        return self._hash

    @property
    def smem_per_sm(self) -> int:
        """Bytes an SM shares among its blocks: one block's most, and the 1 KiB that CUDA keeps per block."""
        return self.smem_per_block + KIB

    @property
    def warps_per_sm(self) -> int:
        return _WARPS_PER_SM.get(self.capability, _DEFAULT_WARPS_PER_SM)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (capability {major}.{minor}, {self.sm_count} SMs)"


def _preset(name: str, arch: int, sm_count: int) -> Device:
    return Device(name, divmod(arch, 10), sm_count, _SMEM_PER_BLOCK.get(arch, _DEFAULT_SMEM_PER_BLOCK))


#: GPUs that ``explain`` knows by name, with the SM counts of their datasheets.
PRESETS: Mapping[str, Device] = {
    "a100": _preset("NVIDIA A100 80GB", 80, 108),
    "a10040gb": _preset("NVIDIA A100 40GB", 80, 108),
    "a10": _preset("NVIDIA A10", 86, 72),
    "a40": _preset("NVIDIA A40", 86, 84),
    "rtxa6000": _preset("NVIDIA RTX A6000", 86, 84),
    "rtx3090": _preset("NVIDIA GeForce RTX 3090", 86, 82),
    "rtx3090ti": _preset("NVIDIA GeForce RTX 3090 Ti", 86, 84),
    "orin": _preset("NVIDIA Jetson AGX Orin", 87, 16),
    "l4": _preset("NVIDIA L4", 89, 58),
    "l40s": _preset("NVIDIA L40S", 89, 142),
    "rtx4090": _preset("NVIDIA GeForce RTX 4090", 89, 128),
    "h200": _preset("NVIDIA H200", 90, 132),
    "rtx5080": _preset("NVIDIA GeForce RTX 5080", 120, 84),
    "rtx5090": _preset("NVIDIA GeForce RTX 5090", 120, 170),
    "rtxpro6000": _preset("NVIDIA RTX PRO 6000", 120, 188),
    "gb10": _preset("NVIDIA GB10", 121, 48),
}

#: GB of their memory, by the same names.
MEMORY_GB: Mapping[str, int] = {
    "a100": 80,
    "a10040gb": 40,
    "a10": 24,
    "a40": 48,
    "rtxa6000": 48,
    "rtx3090": 24,
    "rtx3090ti": 24,
    "orin": 64,
    "l4": 24,
    "l40s": 48,
    "rtx4090": 24,
    "h200": 141,
    "rtx5080": 16,
    "rtx5090": 32,
    "rtxpro6000": 96,
    "gb10": 128,
}

# The GPU that an architecture without an SM count stands for.
_TYPICAL = {
    80: "a100",
    86: "rtx3090",
    87: "orin",
    89: "rtx4090",
    90: "h200",
    120: "rtx5090",
    121: "gb10",
}
_KNOWN = ", ".join(map(str, _TYPICAL))


def named(name: str) -> Device:
    """A preset (``"rtx4090"``), or an architecture (``"sm_89"``, ``"sm_89:58"`` with its SM count)."""
    key = name.lower().replace(" ", "").replace("_", "").replace("-", "")
    if key in PRESETS:
        return PRESETS[key]
    number, _, sm_count = key.removeprefix("sm").partition(":")
    if number.isdecimal() and int(number) in _TYPICAL and (sm_count.isdecimal() or not sm_count):
        return of_arch(int(number), int(sm_count) if sm_count else None)
    raise ValueError(
        f"device must be cuda, cuda:<index>, cpu, sm_<arch>[:<SM count>] with an arch of {_KNOWN}, "
        f"or one of {', '.join(PRESETS)}; got {name!r}"
    )


def of_arch(arch: int, sm_count: int | None = None) -> Device:
    """A GPU that is known by its architecture alone; the SM count defaults to that of a typical one."""
    if arch not in _TYPICAL:
        raise ValueError(f"arch must be one of {_KNOWN}, got {arch!r}")
    if sm_count is None:
        return PRESETS[_TYPICAL[arch]]
    if sm_count < 1:
        raise ValueError(f"sm_count must be at least 1, got {sm_count}")
    return _preset(f"an sm_{arch} GPU", arch, sm_count)


@functools.cache
def of_index(index: int) -> Device:
    """CUDA device ``index``, as the driver describes it."""
    properties = _C.device_properties(index)
    return Device(
        name=properties.name,
        capability=(properties.major, properties.minor),
        sm_count=properties.multiprocessor_count,
        smem_per_block=properties.shared_memory_per_block_optin,
    )


def simulated(built: Mapping[int, str]) -> Device:
    """The GPU that a simulator stands for: that of the rows in it."""
    return of_arch(forced_arch() or min(built))


def forced_arch() -> int | None:
    """The architecture whose rows CUTLASS_FMHA_FORCE_ARCH makes every device take."""
    text = os.environ.get(FORCE_ARCH, "")
    if not text:
        return None
    if text not in map(str, ARCHITECTURES):
        raise ValueError(f"{FORCE_ARCH} must be one of {', '.join(map(str, ARCHITECTURES))}, got {text!r}")
    return int(text)


def own_arch(device: Device) -> int:
    """The architecture whose rows are made for a device, whether there are any or not."""
    major, minor = device.capability
    return {8: 89, 12: 120}.get(major, 10 * major + minor)


def rows_arch(device: Device, built: Mapping[int, str]) -> int | None:
    """Which architecture's rows a device takes, of those that are built; None when there are none for it.

    A device takes the rows made for it, or for its family. One that has none, or none that it can execute,
    takes the sm_89 rows, whose PTX the driver compiles for it. ``built``: what each architecture's rows were
    compiled for.
    """
    if (forced := forced_arch()) is not None:
        return forced if forced in built else None
    for arch in (own_arch(device), 89):
        if arch in built and can_execute(built[arch], device.capability):
            return arch
    return None


def can_execute(compiled_for: str, capability: tuple[int, int]) -> bool:
    """Whether code runs on a device of this capability.

    ``compiled_for``: nvcc's name of the target, as ``build_info()["compiled_for"]`` has them: "120f" is the
    family, "120a" capability 12.0 alone. Of 8.x there may be several, "80,89", with the first one's PTX.
    """
    target = compiled_for.partition(",")[0]
    number = divmod(int(target.rstrip("af")), 10)
    if number[0] == 8:
        return capability >= number
    if target.endswith("a"):
        return capability == number
    return capability[0] == number[0] and capability >= number


def code_for(compiled_for: str, capability: tuple[int, int]) -> str:
    """What runs of code that a device can execute: "sm_80", or "compute_80", PTX that its driver compiles."""
    targets = compiled_for.split(",")
    numbers = [divmod(int(target.rstrip("af")), 10) for target in targets]
    fit = [
        target
        for target, number in zip(targets, numbers, strict=True)
        if number[0] == capability[0] and number <= capability and capability not in _PTX_ALONE
    ]
    return f"sm_{fit[-1]}" if fit else f"compute_{targets[0]}"


def described(compiled_for: str) -> str:
    """The targets as a sentence has them: "sm_80 and sm_89"."""
    return " and ".join(f"sm_{target}" for target in compiled_for.split(","))
