"""Stands in for the module of SGLang 0.5.23."""

from enum import Enum


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int,
        logit_cap: float = 0.0, v_head_dim: int = -1, sliding_window_size: int = -1,
        is_cross_attention: bool = False, pos_encoding_mode: str = "NONE", logit_capping_method: str = "tanh",
        quant_config=None, attn_type: AttentionType = AttentionType.DECODER, use_irope: bool = False,
        prefix: str = "", use_prefill_attention_wrapper: bool = True,
    ):  # fmt: skip
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention = is_cross_attention
        self.use_irope = use_irope
        self.k_scale = self.v_scale = None
        self.attn_type = attn_type
        self.logit_capping_method = logit_capping_method
        self.xai_temperature_len = -1
