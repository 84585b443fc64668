class SWAKVPool:
    def get_kv_buffer(self, layer_id):
        return (self.swa_kv_pool if layer_id else self.full_kv_pool).get_kv_buffer(0)

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        of_window = type(loc_info)(loc_info.swa_loc)
        pool, where = (self.swa_kv_pool, of_window) if layer.layer_id else (self.full_kv_pool, loc_info)
        pool.set_kv_buffer(layer, where, cache_k, cache_v)
