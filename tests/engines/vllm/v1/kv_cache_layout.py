"""Stands in for the module of vLLM 0.33: older ones have other caches."""

from enum import Enum


class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
