from vllm.v1.attention.backend import AttentionImpl, AttentionType


class FlashAttentionImpl(AttentionImpl):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
    ): ...  # fmt: skip
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping): ...
