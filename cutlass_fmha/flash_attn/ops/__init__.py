"""flash_attn.ops, as far as they are offered here: rms_norm, activations.swiglu, and triton's names."""
