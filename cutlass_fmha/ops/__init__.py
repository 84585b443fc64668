"""The ops, one a file: schema, what it does for each dispatch key, autocast's rule."""

from cutlass_fmha.ops import (
    append_kv,
    attend,
    attend_backward,
    attend_out,
    forward,
    gated,
    merge_states,
    qk_norm_rope,
    qk_norm_rope_append,
    rms_norm,
    rotary,
    rotary_qk,
)

__all__ = [
    "append_kv",
    "attend",
    "attend_backward",
    "attend_out",
    "forward",
    "gated",
    "merge_states",
    "qk_norm_rope",
    "qk_norm_rope_append",
    "rms_norm",
    "rotary",
    "rotary_qk",
]
