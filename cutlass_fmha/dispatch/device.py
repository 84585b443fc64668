"""What the selection knows of a GPU: read from the driver, or from a datasheet for a GPU that is not here."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from cutlass_fmha import _C

KIB = 1024
FORCE_ARCH = "CUTLASS_FMHA_FORCE_ARCH"
ARCHITECTURES = (89, 90, 120)

# Per SM and compute capability (CUDA C++ Programming Guide, technical specifications): resident warps.
_WARPS_PER_SM = {(8, 9): 48, (9, 0): 64, (10, 0): 64, (10, 3): 64, (11, 0): 48, (12, 0): 48, (12, 1): 48}
_DEFAULT_WARPS_PER_SM = 48

# Shared memory that one block may ask for, for GPUs known by name only.
_SMEM_PER_BLOCK = {89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}


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
    return Device(name, divmod(arch, 10), sm_count, _SMEM_PER_BLOCK[arch])


#: GPUs that ``explain`` knows by name, with the SM counts of their datasheets.
PRESETS: Mapping[str, Device] = {
    "l4": _preset("NVIDIA L4", 89, 58),
    "l40s": _preset("NVIDIA L40S", 89, 142),
    "rtx4090": _preset("NVIDIA GeForce RTX 4090", 89, 128),
    "h200": _preset("NVIDIA H200", 90, 132),
    "rtx5080": _preset("NVIDIA GeForce RTX 5080", 120, 84),
    "rtx5090": _preset("NVIDIA GeForce RTX 5090", 120, 170),
    "rtxpro6000": _preset("NVIDIA RTX PRO 6000", 120, 188),
}

#: GB of their memory, by the same names.
MEMORY_GB: Mapping[str, int] = {
    "l4": 24,
    "l40s": 48,
    "rtx4090": 24,
    "h200": 141,
    "rtx5080": 16,
    "rtx5090": 32,
    "rtxpro6000": 96,
}

# The GPU that an architecture without an SM count stands for.
_TYPICAL = {89: "rtx4090", 90: "h200", 120: "rtx5090"}


def named(name: str) -> Device:
    """A preset (``"rtx4090"``), or an architecture (``"sm_89"``, ``"sm_89:58"`` with its SM count)."""
    key = name.lower().replace(" ", "").replace("_", "").replace("-", "")
    if key in PRESETS:
        return PRESETS[key]
    number, _, sm_count = key.removeprefix("sm").partition(":")
    if number.isdecimal() and int(number) in ARCHITECTURES and (sm_count.isdecimal() or not sm_count):
        return of_arch(int(number), int(sm_count) if sm_count else None)
    raise ValueError(
        "device must be cuda, cuda:<index>, cpu, sm_<arch>[:<SM count>] with an arch of "
        f"{', '.join(map(str, ARCHITECTURES))}, "
        f"or one of {', '.join(PRESETS)}; got {name!r}"
    )


def of_arch(arch: int, sm_count: int | None = None) -> Device:
    """A GPU that is known by its architecture alone; the SM count defaults to that of a typical one."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(map(str, ARCHITECTURES))}, got {arch!r}")
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
    return 120 if major == 12 else 10 * major + minor


def rows_arch(device: Device, built: Mapping[int, str]) -> int | None:
    """Which architecture's rows a device takes, of those that are built; None when there are none for it.

    A device takes the rows made for it. One that has none, or none that it can execute, takes the sm_89 rows,
    whose PTX the driver compiles for it. ``built``: what each architecture's rows were compiled for.
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
    family, "120a" capability 12.0 alone, and with "89" its PTX goes along.
    """
    number = divmod(int(compiled_for.rstrip("af")), 10)
    if compiled_for == "89":
        return capability >= number
    if compiled_for.endswith("a"):
        return capability == number
    return capability[0] == number[0] and capability >= number
