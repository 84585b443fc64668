"""Stands in for the module of vLLM 0.33."""

import torch


def reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Rows of tokens beyond slot_mapping, and of slot -1, go nowhere."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        for row, slot in zip(rows, slot_mapping.tolist(), strict=False):
            if slot >= 0:
                cache[divmod(slot, cache.shape[1])] = row
