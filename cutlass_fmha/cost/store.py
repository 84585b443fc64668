"""Calibration data: what the rows cost on one GPU, as a file, and which file counts for a device.

A device gets the first of

1. the file that CUTLASS_FMHA_CALIBRATION names, if it is of that GPU (``off``: none of these files at all),
2. the user's own, from ``python -m cutlass_fmha calibrate``, in the cache directory,
3. the one shipped with the package,
4. the default: costs derived from datasheets (``datasheet.py``).

A user's file that is damaged, or of another package, source or GPU, is passed over with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlass_fmha import _C, log
from cutlass_fmha.cost import datasheet
from cutlass_fmha.cost.model import PRICES, RowCost
from cutlass_fmha.dispatch.device import Device

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from cutlass_fmha.dispatch.table import Row

SCHEMA = "cutlass_fmha-costs-3"
WHICH = "CUTLASS_FMHA_CALIBRATION"
CACHE_DIR = "CUTLASS_FMHA_CACHE_DIR"


class InvalidCalibration(ValueError):
    """A file that holds no usable calibration; the message says why."""


@dataclass(frozen=True)
class Fit:
    """A row's costs and how well they explain the timings they were fitted to."""

    cost: RowCost
    #: Median and worst relative error of the prediction.
    error: float
    worst: float
    samples: int


@dataclass(frozen=True)
class Calibration:
    """Costs of rows on one GPU. A row that is not among them costs what datasheets say, times ``scale``."""

    gpu: str
    sm_count: int
    package: str
    source_hash: str
    date: str
    rows: Mapping[str, Fit]
    #: Measured over default, by kind of row: keeps rows that were not timed comparable with those that were.
    scale: Mapping[str, float] = field(default_factory=dict)
    #: Where it comes from, in words for ``explain``.
    origin: str = "the default for GPUs that were never measured"
    _derived: dict[tuple[str, Device], RowCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        if not self.rows:
            return self.origin
        return f"measured on {self.gpu}, {self.date[:10]}, cutlass_fmha {self.package}"

    def cost(self, row: Row, device: Device) -> RowCost:
        fit = self.rows.get(row.name)
        if fit is not None:
            return fit.cost
        if (found := self._derived.get((row.name, device))) is None:
            found = datasheet.row_cost(row, device).scaled(self.scale.get(kind(row), 1.0))
            self._derived[row.name, device] = found
        return found


def kind(row: Row) -> str:
    """Rows whose default costs err alike: ``sm90_tile``, ``_few_query``, ``_element``, ``_ranged``, ..."""
    if row.takes_features:
        return f"sm{row.arch}_{'scored' if row.scored else row.family}"
    form = "few_query" if row.kv_warps > 1 else "element" if row.copy == "element" else "tile"
    return f"sm{row.arch}_{form}"


def default(device: Device) -> Calibration:
    """What a GPU gets that nobody measured."""
    return Calibration(device.name, device.sm_count, "", "", "", {})


# ---- files -------------------------------------------------------------------------------------------------


def slug(gpu: str) -> str:
    """A GPU's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def cache_directory() -> Path:
    """Where the user's calibrations lie: CUTLASS_FMHA_CACHE_DIR, or the XDG's place for caches.

    Raises FileNotFoundError for a user without a home, as containers have.
    """
    if named := os.environ.get(CACHE_DIR):
        return _home(named)
    # A relative XDG_CACHE_HOME is to be ignored: XDG Base Directory Specification.
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else _home() / ".cache") / "cutlass_fmha"


def _home(path: str | None = None) -> Path:
    """The user's, or a path that may begin with one's."""
    try:
        return Path.home() if path is None else Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"there is no home directory to keep a calibration in: set {CACHE_DIR}") from error


def user_file(gpu: str, package: str) -> Path:
    return cache_directory() / f"costs-{slug(gpu)}-{package}.json"


def shipped_file(gpu: str) -> Traversable:
    return resources.files("cutlass_fmha") / "data" / "costs" / f"{slug(gpu)}.json"


def dumps(calibration: Calibration) -> str:
    """A calibration as the text of its file, a row per line."""
    content = {
        "schema": SCHEMA,
        "gpu": calibration.gpu,
        "sm_count": calibration.sm_count,
        "package": calibration.package,
        "source_hash": calibration.source_hash,
        "date": calibration.date,
        "scale": {name: round(value, 4) for name, value in sorted(calibration.scale.items())},
    }
    rows = []
    for name, fit in sorted(calibration.rows.items()):
        prices = {price: float(f"{getattr(fit.cost, price):.4g}") for price in (*PRICES, "memory")}
        prices["resident"] = fit.cost.resident
        quality = {"error": round(fit.error, 4), "worst": round(fit.worst, 4), "samples": fit.samples}
        rows.append(f"  {json.dumps(name)}: {json.dumps(prices | quality)}")
    return json.dumps(content, indent=1)[:-2] + ',\n "rows": {\n' + ",\n".join(rows) + "\n }\n}\n"


def save(calibration: Calibration, path: Path) -> None:
    """Writes a file so that another process sees the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(calibration))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def loads(text: str, origin: str) -> Calibration:
    """A calibration from the text of its file. Raises InvalidCalibration, saying why, for anything else."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCalibration(f"it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InvalidCalibration(f"its schema is not {SCHEMA!r}")
    try:
        return Calibration(
            gpu=_text(content["gpu"]),
            sm_count=_count(content["sm_count"]),
            package=_text(content["package"]),
            source_hash=_text(content["source_hash"]),
            date=_text(content["date"]),
            rows={_text(name): _fit(row) for name, row in content["rows"].items()},
            scale={_text(name): _positive(value) for name, value in content["scale"].items()},
            origin=origin,
        )
    except KeyError as error:
        raise InvalidCalibration(f"it lacks {error}") from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InvalidCalibration(str(error)) from error


def _fit(row: Mapping[str, Any]) -> Fit:
    prices = {price: _number(row[price]) for price in PRICES}
    if not sum(prices.values()) > 0:
        raise ValueError("a row that costs nothing")
    cost = RowCost(**prices, resident=_count(row["resident"]), memory=_number(row["memory"]))
    return Fit(cost, _number(row["error"]), _number(row["worst"]), _count(row["samples"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no finite number from 0 on")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) == 0:
        raise ValueError("a scale of 0")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


# ---- which one counts --------------------------------------------------------------------------------------


def for_device(device: Device) -> Calibration:
    """The calibration that selection uses for a device. Looked for once per device and ``WHICH``."""
    return _for(device, os.environ.get(WHICH, ""))


def forget() -> None:
    """Looks for files again: for tests, and after a calibration in this process."""
    _for.cache_clear()


@functools.cache
def _for(device: Device, which: str) -> Calibration:
    if which == "off":
        return default(device)
    if which:
        named = _named(which)
        if is_of(named, device):
            return named
    return _users(device) or _shipped(device) or default(device)


def is_of(calibration: Calibration, device: Device) -> bool:
    return (calibration.gpu, calibration.sm_count) == (device.name, device.sm_count)


def _named(which: str) -> Calibration:
    """The file that the environment names: whoever names one wants it, so that a damaged one is an error."""
    try:
        path = _home(which)
        return loads(path.read_text(encoding="utf-8"), f"{path}, named by {WHICH}")
    except (OSError, UnicodeDecodeError, InvalidCalibration) as error:
        raise InvalidCalibration(f"{WHICH}={which} can't be used: {error}") from error


def _users(device: Device) -> Calibration | None:
    """The user's own calibration, or None; a warning where there is one that can't be used.

    ``_for`` is cached, so that the warning comes once per device and process.
    """
    from cutlass_fmha import __version__

    try:
        path = user_file(device.name, __version__)
    except FileNotFoundError:  # no home
        return None
    try:
        found = loads(path.read_text(encoding="utf-8"), f"measured on this machine, {path}")
        require_current(found, device, __version__)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, InvalidCalibration) as error:
        renew = "`python -m cutlass_fmha calibrate` renews it"
        log.logger.warning("calibration %s is ignored: %s; %s", path, error, renew)
        return None
    return found


def require_current(calibration: Calibration, device: Device, package: str) -> None:
    """Raises InvalidCalibration for a calibration of another GPU, package or source than these."""
    if not is_of(calibration, device):
        raise InvalidCalibration(f"it is of {calibration.gpu} with {calibration.sm_count} SMs")
    if calibration.package != package:
        raise InvalidCalibration(f"it is of cutlass_fmha {calibration.package}")
    if calibration.source_hash != str(_C.build_info()["source_hash"]):
        raise InvalidCalibration("it is of kernels from other sources")


def _shipped(device: Device) -> Calibration | None:
    file = shipped_file(device.name)
    if not file.is_file():
        return None
    found = loads(file.read_text(encoding="utf-8"), "")
    if not is_of(found, device):
        return None
    return dataclasses.replace(found, origin=f"measured on {found.gpu}, shipped with the package")
