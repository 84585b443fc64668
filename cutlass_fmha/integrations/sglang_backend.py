"""The attention backend that ``integrations.sglang`` adds. Imports SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor

from cutlass_fmha import tally
from cutlass_fmha.arguments.check import PAGE_UNIT, dtype_name
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.call import attend_known
from cutlass_fmha.dispatch.problem import typical_length
from cutlass_fmha.integrations.serving import why_not

calls = tally.Tally("SGLang")


@dataclasses.dataclass
class Metadata:
    """Of a batch: packed queries over pages. The longest lengths are those that stand for their class."""

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    #: Where layers with a window have a pool of their own: their pages, and where new rows go.
    window_table: Tensor | None = None
    window_rows: Tensor | None = None
    #: The op's arguments, by what a layer says: the same for all layers that say the same.
    arguments: dict[Any, dict[str, Any]] = dataclasses.field(default_factory=dict, init=False)


class OfLayer(NamedTuple):
    """What a layer says to ``attention`` at each call, and the sizes of queries and of a row that leaves."""

    scale: float
    causal: bool
    said: tuple[tuple[str, Any], ...]
    heads: int
    head_dim: int
    width: int


class Backend(AttentionBackend):  # type: ignore[misc]  # SGLang isn't there for mypy
    """Of a model's runner."""

    # Lengths stay on the device: those of prompts the host knows by other fields.
    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if (reason := _refusal(model_runner)) is not None:
            raise NotImplementedError(f"cutlass_fmha {reason}: use another --attention-backend")
        self.page_size = model_runner.page_size
        self.pool = model_runner.token_to_kv_pool
        #: [requests, pages]: the first row of each page of a request, in rows of the pool.
        self._rows = model_runner.req_to_token_pool.req_to_token[:, :: self.page_size]
        self._has_window_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self._said: dict[str, Any] = {}
        if get_exec().deterministic.enable_deterministic_inference:
            self._said["batch_invariant"] = True
        self._one_each = self._counts(model_runner.req_to_token_pool.size)
        self._of_graphs: dict[int, Metadata] = {}
        self._layers: dict[Any, OfLayer] = {}
        #: By layer: the pool's tensors, which stay what they are, and their pages.
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self.forward_metadata: Metadata | None = None

    def _counts(self, batch: int) -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=self._rows.device)

    # ---- what is known of a batch before its layers --------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Outside of graphs."""
        batch = forward_batch
        seqused_k, capacity = batch.seq_lens.to(torch.int32), self._rows.shape[1] * self.page_size
        if batch.forward_mode.is_decode_or_idle():
            if batch.batch_size >= len(self._one_each):  # sequences of nobody, for other ranks of attention
                self._one_each = self._counts(batch.batch_size)
            starts, longest_q, longest_k = self._one_each[: batch.batch_size + 1], 1, capacity
        elif batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            sums = torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32)
            starts = torch.nn.functional.pad(sums, (1, 0))
            new, old = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
            longest_q, longest_k = max(new), max(map(sum, zip(new, old, strict=True)))
        else:
            raise NotImplementedError(f"cutlass_fmha has no batches of {batch.forward_mode.name} in SGLang")
        longest_q, longest_k = typical_length(longest_q), typical_length(longest_k)
        pages = min(-(-longest_k // self.page_size), self._rows.shape[1])
        tables = self._tables(batch.req_pool_indices, pages)
        rows = self._window_rows(batch.out_cache_loc)
        self.forward_metadata = Metadata(starts, seqused_k, tables[0], longest_q, longest_k, tables[1], rows)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured graphs of decoding read, for all their sizes."""
        device, pages = self._rows.device, self._rows.shape[1]
        table = torch.zeros(max_bs, pages, dtype=torch.int32, device=device)
        lengths = torch.zeros(max_bs, dtype=torch.int32, device=device)
        rows = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        own = (table.clone(), rows) if self._has_window_pool else (None, None)
        longest = typical_length(pages * self.page_size)
        self._graph = Metadata(self._counts(max_bs), lengths, table, 1, longest, *own)
        self._of_graphs = {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            mode = forward_batch.forward_mode.name
            raise NotImplementedError(f"cutlass_fmha has no CUDA graphs of {mode} in SGLang")
        batch, whole = forward_batch.batch_size, self._graph
        if batch not in self._of_graphs:
            self._of_graphs[batch] = dataclasses.replace(
                whole,
                cu_seqlens_q=whole.cu_seqlens_q[: batch + 1],
                seqused_k=whole.seqused_k[:batch],
                page_table=whole.page_table[:batch],
                window_table=None if whole.window_table is None else whole.window_table[:batch],
                window_rows=None if whole.window_rows is None else whole.window_rows[:batch],
            )
        self.forward_metadata = self._of_graphs[batch]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded, and run again by each replay."""
        meta = self._of_graphs[forward_batch.batch_size]
        meta.seqused_k.copy_(forward_batch.seq_lens)
        table, window_table = self._tables(forward_batch.req_pool_indices, self._rows.shape[1])
        rows = self._window_rows(forward_batch.out_cache_loc)
        of_windows = ((meta.window_table, window_table), (meta.window_rows, rows))
        for place, found in ((meta.page_table, table), *of_windows):
            if place is not None and found is not None:
                place.copy_(found)
        self.forward_metadata = meta

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _tables(self, requests: Tensor, pages: int) -> tuple[Tensor, Tensor | None]:
        """int32 [batch, pages]: which pages hold a request's rows; and in the pool of windows."""
        rows = self._rows[:, :pages].index_select(0, requests)
        table = (rows // self.page_size).int()
        if not self._has_window_pool:
            return table, None
        # Rows that a window has left behind are in no page: any will do, as no query sees them.
        own = self.pool.translate_loc_from_full_to_swa(rows).clamp(min=0)
        return table, (own // self.page_size).int()

    def _window_rows(self, rows: Tensor | None) -> Tensor | None:
        if not self._has_window_pool or rows is None:
            return None
        found: Tensor = self.pool.translate_loc_from_full_to_swa(rows)
        return found

    # ---- a layer -------------------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer, after its new keys and values were written to the pool.

        q [tokens, num_heads * head_dim], k and v [tokens, num_heads_kv, head_dim]; returns [tokens,
        num_heads * head_dim of v]. kwargs: sinks; another one raises NotImplementedError.
        """
        meta = self.forward_metadata
        assert meta is not None
        scale, causal, said, heads, dim, width = self._layers.get(layer) or self._of_layer(layer)
        known = meta.arguments.get(said) or self._arguments(meta, said, q)
        own: dict[str, Any] = {}
        if kwargs:
            sinks = kwargs.pop("sinks", None)
            _refuse(name for name, value in kwargs.items() if value is not None and value is not False)
            if sinks is not None:
                own["sinks"] = sinks
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=meta.window_rows)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = self._pages(layer.layer_id)
        output = forward_batch._attn_output  # where a graph of a prompt has room
        if output is not None:
            own["out"] = output.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        found = attend_known(q.reshape(-1, heads, dim), keys, values, scale, causal, known, own)
        calls.count(layer.attn_type._value_)
        return found.view(-1, width)

    def _of_layer(self, layer: Any) -> OfLayer:
        """Looked at once, since each word of it costs host time."""
        _refuse(_unknown(layer))
        causal = layer.attn_type == AttentionType.DECODER
        said = dict(self._said)
        if layer.logit_cap:
            said["softcap"] = layer.logit_cap
        before = layer.sliding_window_size  # as many keys before a query's own
        if before is not None and before > -1:
            said["window"] = (before, None if causal else before)
        heads = layer.tp_q_head_num
        sizes = heads, layer.qk_head_dim, heads * layer.v_head_dim
        found = self._layers[layer] = OfLayer(float(layer.scaling), causal, tuple(said.items()), *sizes)
        return found

    def _arguments(self, meta: Metadata, said: tuple[tuple[str, Any], ...], q: Tensor) -> dict[str, Any]:
        """Of a batch: the op's arguments of the layers that say this."""
        features = dict(said)
        windows = "window" in features and meta.window_table is not None
        features["page_table"] = meta.window_table if windows else meta.page_table
        for name in ("max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "seqused_k"):
            features[name] = getattr(meta, name)
        found = meta.arguments[said] = op_arguments(q, features, "q")
        return found

    def _pages(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """[pages, page_size, num_heads_kv, head_dim] of rows, or of pages whose heads come first."""
        k, v = self.pool.get_kv_buffer(layer_id)
        kept = self._views.get(layer_id)
        if kept is None or kept[0] is not k or kept[1] is not v:  # 4 us of host time
            pages = (x.transpose(1, 2) if x.dim() == 4 else x.unflatten(0, (-1, self.page_size)) for x in (k, v))
            kept = self._views[layer_id] = (k, v, *pages)
        return kept[2], kept[3]

    #: Single tokens are a batch like any other.
    forward_decode = forward_extend


#: Models with --enable-multimodal whose masks SGLang tells its own Triton backend alone.
SEES_IMAGES = frozenset({"Gemma3ForConditionalGeneration"})


def _refusal(runner: Any) -> str | None:
    """Why a model's runner is none for this backend; None where it is."""
    config, dtype = runner.model_config, runner.kv_cache_dtype
    if runner.use_mla_backend:
        return "has no cache of latents, and computes no MLA in SGLang"
    if config.is_encoder_decoder:
        return "has no cross attention in SGLang"
    if config.is_multimodal and SEES_IMAGES.intersection(config.hf_config.architectures or ()):
        return "has no images whose tokens see each other in SGLang"
    if runner.spec_algorithm.is_speculative():
        return "has no speculative decoding in SGLang"
    if get_parallel().attn_dcp_size > 1:
        return "has no context parallelism in SGLang"
    if runner.kv_index_translator is not None and runner.kv_index_translator.is_translating:
        return "has no unified pool of SGLang's"
    if dtype not in (torch.float16, torch.bfloat16) or dtype != config.dtype:
        return (
            f"needs a cache in the model's dtype, float16 or bfloat16, got {dtype_name(dtype)} "
            f"of a model in {dtype_name(config.dtype)}"
        )
    if runner.page_size % PAGE_UNIT != 0:
        return f"needs pages of a multiple of {PAGE_UNIT} rows, got --page-size {runner.page_size}"
    capability = torch.cuda.get_device_capability(runner.gpu_id)
    reason = why_not(capability, config.head_dim, dtype, runner.page_size)
    return None if reason is None else f"can't run this model: {reason}"


def _unknown(layer: Any) -> Iterator[str]:
    """What a layer says and ``attention`` would not hear."""
    if layer.is_cross_attention:
        yield "is_cross_attention"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield "logit_capping_method"
    if (layer.xai_temperature_len or 0) > 0:
        yield "xai_temperature_len"
    if layer.use_irope:
        yield "use_irope"


def _refuse(names: Iterable[str]) -> None:
    if said := sorted(names):
        raise NotImplementedError(f"cutlass_fmha does not know what {', '.join(said)} says in SGLang")
