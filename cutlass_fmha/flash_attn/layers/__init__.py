"""flash_attn.layers, as far as it is offered here: rotary."""
