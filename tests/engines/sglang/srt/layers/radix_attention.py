from enum import Enum


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
        sliding_window_size=-1, is_cross_attention=False, pos_encoding_mode="NONE", logit_capping_method="tanh",
        quant_config=None, attn_type=AttentionType.DECODER, use_irope=False, prefix="",
        use_prefill_attention_wrapper=True,
    ):  # fmt: skip
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.attn_type = scaling, layer_id, attn_type
        self.logit_cap, self.logit_capping_method = logit_cap, logit_capping_method
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.use_irope = is_cross_attention, use_irope
        self.k_scale = self.v_scale = None
        self.xai_temperature_len = -1
