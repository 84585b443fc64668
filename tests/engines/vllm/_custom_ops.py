def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Rows of tokens beyond slot_mapping, and of slot -1, go nowhere."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        for row, slot in zip(rows, slot_mapping.tolist(), strict=False):
            if slot >= 0:
                cache[divmod(slot, cache.shape[1])] = row
