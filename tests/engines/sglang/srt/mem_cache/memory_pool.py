"""Stands in for the module of SGLang 0.5.23."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc: Any = None, full_loc: Any = None):
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc)


class MHATokenToKVPool:
    def get_kv_buffer(self, layer_id: int):
        return self.k, self.v

    def set_kv_buffer(
        self, layer, loc_info, cache_k: torch.Tensor, cache_v: torch.Tensor, k_scale: float | None = None,
        v_scale: float | None = None, layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ):  # fmt: skip
        self.k[loc_info.loc], self.v[loc_info.loc] = cache_k, cache_v
