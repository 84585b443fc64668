from dataclasses import dataclass

import torch


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc)


class MHATokenToKVPool:
    def get_kv_buffer(self, layer_id):
        return self.k, self.v

    def set_kv_buffer(
        self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, dcp_kv_mask=None
    ):
        self.k[loc_info.loc], self.v[loc_info.loc] = cache_k, cache_v
