"""A cache of what was used lately, cheap enough for every call."""

from __future__ import annotations

from typing import Generic, TypeVar

#: More than any model's shapes. A decoding loop makes one plan per length.
MAX_PLANS = 8192

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A mapping that keeps what was used last: of ``size`` entries the half that was asked for most recently.

    Two dictionaries: what is found in the old one moves to the young one, and when that is full, the old one
    is forgotten. An entry is lost only when ``size / 2`` others were used since; a hit in the young one is
    one look-up, where an ordered dictionary would have to hash the key twice. None is no value.
    """

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
