"""What vLLM's attention backend CUSTOM is once ``integrations.vllm`` registered it. Imports vLLM."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm._custom_ops import reshape_and_cache_flash
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from cutlass_fmha import tally
from cutlass_fmha.arguments.check import PAGE_UNIT, dtype_name
from cutlass_fmha.attention import attention
from cutlass_fmha.dispatch.problem import typical_length
from cutlass_fmha.integrations.serving import why_not
from cutlass_fmha.integrations.vllm import NAME

calls = tally.Tally("vLLM")


def _nothing() -> None:
    """A cache that is gone."""


_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclasses.dataclass
class Metadata:
    """Of a batch, in vLLM's words: packed queries, of prompts, parts of prompts and single tokens alike.

    The longest lengths change with each step and a call of new numbers is prepared anew, so that they are
    those that stand for their class. Nothing waits for the device.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM isn't there for mypy
    """Passes on the runner's own tensors, which are those that a replayed graph reads."""

    # A graph's launches are as many as its longest query needs: one of single tokens fits no prompt.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("cutlass_fmha has no causality that differs within a batch")
        if common.mm_req_doc_ranges is not None:
            raise NotImplementedError("cutlass_fmha has no tokens of images that see each other in vLLM")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=typical_length(common.max_query_len),
            query_start_loc=common.query_start_loc,
            max_seq_len=typical_length(common.max_seq_len),
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        found = copy.copy(metadata)  # with what vLLM's own builders have hung on it
        found.block_table, found.slot_mapping = blk_table, slot_mapping
        return found


class Impl(AttentionImpl):  # type: ignore[misc]
    """A layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not Backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(f"cutlass_fmha has no {kv_cache_dtype} cache of keys and values")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._window = None if sliding_window is None else sliding_window - 1
        # What is None is left out: each name that ``attention`` hears costs host time.
        self._said: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if logits_soft_cap:
            self._said["softcap"] = logits_soft_cap
        self._kept: tuple[Any, ...] = (_nothing,)
        if alibi_slopes is not None:
            self._said["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        if envs.VLLM_BATCH_INVARIANT:
            self._said["batch_invariant"] = True

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """After each load of weights: captured graphs read the sinks where they were."""
        if self.sinks is None:
            return
        kept, new = self._said["sinks"], self.sinks.detach()
        if new.dtype != torch.float32 and kept.dtype == torch.float32:
            kept.copy_(new)
        else:
            self._said["sinks"] = new.float()  # once, and not at each call

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch, written to ``output``.

        query, output [tokens, num_heads, head_size]; kv_cache [blocks, num_kv_heads, block_size,
        2 * head_size] in any order in memory, read as it lies; key, value [tokens, num_kv_heads, head_size],
        which ``do_kv_cache_update`` has written there. An encoder, which has no cache, attends to them. Rows
        that pad a batch belong to no request, and stay undefined.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("cutlass_fmha does not quantize its output")
        if attn_metadata is None:  # vLLM finds out how much memory is left
            return output.fill_(0)
        meta = attn_metadata
        said, causal = self._said, meta.causal
        if self.attn_type in _ENCODERS:
            keys, values, causal, longest = key, value, False, meta.max_query_len
            of_keys: dict[str, Any] = {"cu_seqlens_k": meta.query_start_loc}
        else:
            keys, values = self._pages(kv_cache)
            longest, of_keys = meta.max_seq_len, {"page_table": meta.block_table, "seqused_k": meta.seq_lens}
        if self._window is not None:
            said = {**said, "window": (self._window, None if causal else self._window)}
        attention(
            query,
            keys,
            values,
            scale=self.scale,
            causal=causal,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=longest,
            out=output,
            **of_keys,
            **said,
        )
        calls.count(self.attn_type)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """By vLLM's own kernel: its slots say more than lengths do, of drafts that were turned down."""
        if self.attn_type not in _ENCODERS:
            scales = (layer._k_scale, layer._v_scale)
            pages = self._pages(kv_cache)
            reshape_and_cache_flash(key, value, *pages, slot_mapping, self.kv_cache_dtype, *scales)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, block_size, num_kv_heads, head_size] each, where they lie."""
        kept = self._kept
        if kept[0]() is not kv_cache or kept[1].data_ptr() != kv_cache.data_ptr():
            blocks, heads, size, _ = kv_cache.shape
            of_block, of_head, of_row, one = kv_cache.stride()
            begin, dim, memory = kv_cache.storage_offset(), self.head_size, kv_cache.untyped_storage()
            where = (blocks, size, heads, dim), (of_block, of_row, of_head, one)
            with torch.inference_mode(False):
                # A view would keep its cache alive, and vLLM drops one that it tried graphs with.
                new = (kv_cache.new_empty(0).set_(memory, begin + i * dim * one, *where) for i in (0, 1))
                kept = self._kept = weakref.ref(kv_cache, self._forget), *new
        return kept[1], kept[2]

    def _forget(self, cache: Any) -> None:
        if self._kept[0] is cache:
            self._kept = (_nothing,)


class Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it chooses."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return NAME  # by which vLLM finds the backend in its registry

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(PAGE_UNIT)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Our own sentence, which ``validate_configuration`` puts behind its words."""
        if use_mla:
            return "cutlass_fmha has no cache of latents: MLA is computed by another backend"
        if kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes):
            return f"cutlass_fmha has no {kv_cache_dtype} cache of keys and values"
        if kv_cache_dtype not in (None, "auto", dtype_name(dtype)):
            return f"cutlass_fmha needs queries in the cache's dtype {kv_cache_dtype}, got {dtype_name(dtype)}"
        size = PAGE_UNIT if block_size is None else block_size
        capability = (device_capability.major, device_capability.minor)
        reason = why_not(capability, head_size, dtype, size, ("sinks",) if has_sink else ())
        return None if reason is None else f"cutlass_fmha: {reason}"
