"""A cache of what was used lately, cheap enough for every call."""

from __future__ import annotations

from typing import TypeVar

#: More than any model's shapes. A decoding loop makes one plan per length.
MAX_PLANS = 8192

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value]):
    """A mapping that keeps what was used last: of ``size`` entries the half that was asked for most recently.

    Two dictionaries: ``get`` looks in the young one, which this is, and ``revive`` moves to it what is found
    in the old one; when the young one is full, the old one is forgotten. An entry is lost only when
    ``size / 2`` others were used since; a hit is one look-up, where an ordered dictionary would have to hash
    the key twice. None is no value.
    """

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._old: dict[Key, Value] = {}

    def revive(self, key: Key) -> Value | None:
        """What ``get`` did not find, if it was there not so long ago."""
        value = self._old.get(key) if self._old else None  # a key may take long to hash
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        if len(self) >= self._half:
            self._old = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self._old = {}
