"""The package's logger, what the environment has it say, and what it says once."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

WHICH = "CUTLASS_FMHA_LOG"
LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}

logger = logging.getLogger("cutlass_fmha")

_said: set[Hashable] = set()


def configure() -> None:
    """Does what the environment says: the level, and stderr where the program has no handlers of its own."""
    asked = os.environ.get(WHICH, "")
    if not asked:
        return
    if asked.lower() not in LEVELS:
        logger.warning("%s must be %s, got %r: no decision is logged", WHICH, " or ".join(LEVELS), asked)
        return
    logger.setLevel(LEVELS[asked.lower()])
    handler = logging.StreamHandler()
    handler.addFilter(lambda _: not logging.getLogger().handlers)  # asked each time: they may come later
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)


def warn_once(cause: Hashable, message: str, *values: object) -> None:
    """One warning for each cause, however many calls have it."""
    if cause not in _said:
        _said.add(cause)
        logger.warning(message, *values)


def forget() -> None:
    """Everything is said once more: for tests."""
    _said.clear()
