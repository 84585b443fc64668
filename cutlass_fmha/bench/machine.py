"""What a figure was measured on and with: GPU, driver, clocks, library versions, the source's commit."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

COMMIT = "CUTLASS_FMHA_COMMIT"
"""Names the sources of a package that is measured away from its checkout."""
CLOCK_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def describe(device: int) -> dict[str, object]:
    """The report's ``machine`` entry: GPU, driver, versions, commit, date. What can't be read is None."""
    properties = torch.cuda.get_device_properties(device)
    cudnn: int | None = torch.backends.cudnn.version()
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": read_smi(device)["driver"],
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "package": package_version(),
        "build": build(),
        "forced_arch": os.environ.get("CUTLASS_FMHA_FORCE_ARCH") or None,
        "commit": commit(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def package_version() -> str:
    import cutlass_fmha

    return cutlass_fmha.__version__


def build() -> dict[str, object]:
    """``_C.build_info()`` with JSON's key types."""
    from cutlass_fmha import _C

    info = dict(_C.build_info())
    proxy = info.get("proxy")
    if isinstance(proxy, dict):
        info["proxy"] = {str(arch): runs_on for arch, runs_on in proxy.items()}
    return info


def read_smi(device: int) -> dict[str, str | float | None]:
    """Driver version, clocks (MHz), power (W) and temperature now, as nvidia-smi tells them, else None."""
    unknown: dict[str, str | float | None] = dict.fromkeys(CLOCK_FIELDS.values())
    if shutil.which("nvidia-smi") is None:
        return unknown
    # torch numbers the visible devices only, nvidia-smi all of them: the UUID names the same one for both.
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")).removeprefix("GPU-")
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader,nounits"]
    if uuid:
        command.append(f"--id=GPU-{uuid}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return unknown
    return parse_smi(answer)


def parse_smi(answer: str) -> dict[str, str | float | None]:
    """First line of nvidia-smi's CSV for ``CLOCK_FIELDS``, numbers as floats, what isn't readable as None."""
    values: dict[str, str | float | None] = dict.fromkeys(CLOCK_FIELDS.values())
    lines = answer.strip().splitlines()
    fields = [field.strip() for field in lines[0].split(",")] if lines else []
    if len(fields) != len(CLOCK_FIELDS):
        return values
    for name, field in zip(CLOCK_FIELDS.values(), fields, strict=True):
        if name == "driver":
            values[name] = field or None
            continue
        try:
            values[name] = float(field)
        except ValueError:  # "[N/A]"
            values[name] = None
    return values


def commit(directory: Path) -> str | None:
    """What COMMIT says, or the checkout's of ``directory``, with "-dirty" when files differ; else None."""
    if named := os.environ.get(COMMIT):
        return named

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            )
        except (subprocess.SubprocessError, OSError):
            return None
        return done.stdout.strip()

    # An installed package can lie inside somebody else's repository: only one that tracks it counts.
    if not git("ls-files", "--", "."):
        return None
    head = git("rev-parse", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
