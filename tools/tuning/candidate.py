"""One line of the manifest without its architectures and dtypes: what a tuner may choose."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

DTYPES = {"f16": "float16", "bf16": "bfloat16"}  # the manifest's names, and the package's
SHORT = {long: short for short, long in DTYPES.items()}


@dataclass(frozen=True, order=True)
class Candidate:
    """A kernel but for architecture and dtype: the manifest's columns, which src/config.h describes."""

    head_dim: int
    tile_m: int
    tile_n: int
    warps: int
    kv_warps: int
    stages: int
    min_blocks: int
    q_in_registers: bool
    ping_pong: bool
    copy: str
    dependent_launch: bool = False

    @property
    def rows_per_warp(self) -> int:
        return self.tile_m * self.kv_warps // self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns from HEAD_DIM on, as the manifest spells them; the last one, where it is true."""
        values = list(asdict(self).values())[: None if self.dependent_launch else -1]
        return tuple(str(value).lower() if isinstance(value, bool) else str(value) for value in values)

    @functools.cached_property
    def key(self) -> str:
        """What a leaderboard files it under: ``64 256 64 8 1 2 1 true true cp_async_16``."""
        return " ".join(self.columns)

    @property
    def tag(self) -> str:
        """A short name that is good in a symbol, for builds that hold many candidates."""
        return "t" + hashlib.sha256(self.key.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """How tables print it: ``256x64 8w s2 b1 q pp cp_async_16``."""
        words = [f"{self.tile_m}x{self.tile_n}", f"{self.warps}w"]
        words += [f"k{self.kv_warps}"] if self.kv_warps > 1 else []
        words += [f"s{self.stages}", f"b{self.min_blocks}"]
        words += ["q"] if self.q_in_registers else []
        words += ["pp"] if self.ping_pong else []
        return " ".join([*words, self.copy])

    @classmethod
    def of_columns(cls, columns: list[str]) -> Candidate:
        """The inverse of ``columns``. Raises ValueError for a wrong number of them or a bad value."""
        least = len(COLUMNS) - 1
        if len(columns) not in (least, least + 1):
            raise ValueError(
                f"a manifest line has {least} columns after DTYPES or one more, not {len(columns)}"
            )
        values: dict[str, Any] = {}
        for name, text in zip(COLUMNS, columns, strict=False):
            if name in ("q_in_registers", "ping_pong", "dependent_launch"):
                if text not in ("true", "false"):
                    raise ValueError(f"{name} must be true or false, got {text!r}")
                values[name] = text == "true"
            elif name == "copy":
                if not re.fullmatch(r"[a-z]\w*", text):
                    raise ValueError(f"copy must be a name, got {text!r}")
                values[name] = text
            elif re.fullmatch(r"[1-9]\d*", text):
                values[name] = int(text)
            else:
                raise ValueError(f"{name} must be a positive number, got {text!r}")
        return cls(**values)

    @classmethod
    def of_key(cls, key: str) -> Candidate:
        return cls.of_columns(key.split())


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Candidate))
