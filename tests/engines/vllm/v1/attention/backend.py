from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name(): ...
    @staticmethod
    def get_impl_cls(): ...
    @staticmethod
    def get_builder_cls(): ...
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    # None of these without a word of the backend.
    @classmethod
    def supports_sink(cls): ...
    @classmethod
    def supports_sliding_window(cls): ...
    @classmethod
    def supports_non_causal(cls): ...
    @classmethod
    def supports_batch_invariance(cls): ...
    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ): ...  # fmt: skip

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        use_per_head_quant_scales, device_capability, attn_type, has_sliding_window=False, use_non_causal=False,
        use_batch_invariant=False, use_kv_connector=False, use_pcp=False, use_adaptive_verification=False,
        use_dcp=False, use_rswa=False,
    ):  # fmt: skip
        (block_unit,) = cls.get_supported_kernel_block_sizes()
        asked = {
            "head_size not supported": cls.supports_head_size(head_size),
            "dtype not supported": dtype in cls.supported_dtypes,
            "kv_cache_dtype not supported": cls.supports_kv_cache_dtype(kv_cache_dtype),
            "block_size not supported": block_size is None or block_size % block_unit.base == 0,
            "attention sinks not supported": not has_sink or cls.supports_sink(),
            "attention type not supported": cls.supports_attn_type(attn_type),
            "sliding window not supported": not has_sliding_window or cls.supports_sliding_window(),
            "non-causal attention not supported": not use_non_causal or cls.supports_non_causal(),
            "batch invariance not supported": not use_batch_invariant or cls.supports_batch_invariance(),
        }
        own = (head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix)
        reasons = [reason for reason, supported in asked.items() if not supported]
        return [*reasons, *filter(None, [cls.supports_combination(*own, device_capability)])]


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    mm_req_doc_ranges: Any = None


class AttentionCGSupport(Enum):
    UNIFORM_BATCH = 2
    NEVER = 0


class AttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...
    def update_block_table(self, metadata, blk_table, slot_mapping): ...


class AttentionImplBase:
    def process_weights_after_loading(self, act_dtype): ...


class AttentionImpl(AttentionImplBase):
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...
