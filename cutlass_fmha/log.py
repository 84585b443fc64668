"""The package's logger, and what it says once."""

from __future__ import annotations

import logging
from collections.abc import Hashable

logger = logging.getLogger("cutlass_fmha")

_said: set[Hashable] = set()


def warn_once(cause: Hashable, message: str, *values: object) -> None:
    """One warning for each cause, however many calls have it."""
    if cause not in _said:
        _said.add(cause)
        logger.warning(message, *values)


def forget() -> None:
    """Everything is said once more: for tests."""
    _said.clear()
