"""Whether a device takes rows of a build at all. Without torch: the command line asks where it is not."""

from __future__ import annotations

from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.table import Table


def no_rows(device: Device, table: Table | None = None) -> str | None:
    """Why a device takes no row of a build at all, and what to do about it; None when it takes some."""
    table = table or tables.this_build()
    if not table.rows:
        return tables.NO_KERNELS
    if devices.rows_arch(device, table.architectures) is not None:
        return None
    held = ", ".join(f"sm_{arch}" for arch in table.architectures)
    if (forced := devices.forced_arch()) is not None:
        return f"{devices.FORCE_ARCH}={forced} asks for sm_{forced} rows, and this build holds rows for {held} only"
    if device.capability < (8, 0):
        return f"{device} is older than every kernel of cutlass_fmha: compute capability 8.0 or newer is needed"
    own, target, way_out = devices.own_arch(device), 89, ", or with its own architecture"
    if own in table.architectures:
        held += f" (sm_{own}'s compiled for {devices.described(table.architectures[own])})"
        way_out = ", or with nvcc 12.9 or newer, which compiles for the whole family"
    if device.capability < (8, 9):
        target, way_out = 86 if device.capability >= (8, 6) else 80, ""
    return (
        f"this build of cutlass_fmha holds rows for {held} only, none of which {device} takes: rebuild it "
        f"with `pip install . -C cmake.define.CMAKE_CUDA_ARCHITECTURES={target}`{way_out}"
    )
