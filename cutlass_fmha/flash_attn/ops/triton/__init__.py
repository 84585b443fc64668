"""flash_attn.ops.triton, as far as it is offered here, by this package's kernels: rotary, layer_norm."""
