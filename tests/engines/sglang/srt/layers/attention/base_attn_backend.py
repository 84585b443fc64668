"""Stands in for the module of SGLang 0.5.23."""


class AttentionBackend:
    needs_cpu_seq_lens: bool = True

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int): ...

    def get_cuda_graph_seq_len_fill_value(self): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        decodes = forward_batch.forward_mode.is_decode()
        run = self.forward_decode if decodes else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs): ...

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs): ...
