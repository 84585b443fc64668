from collections.abc import Callable
from functools import wraps

from torch.nn.functional import scaled_dot_product_attention

REGISTERED_ATTENTION_FUNCTIONS = {}


def register_attention_function(name: str, func: Callable):
    REGISTERED_ATTENTION_FUNCTIONS.setdefault(name, func)


def wrap_attn(func):
    """The outermost call asks for a model's override, which gets the function in its place."""

    @wraps(func)
    def wrapper(*args, **kwargs):
        kwargs.pop("preferred_attention", None)
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        outermost = "_inside_attn_wrapper" not in kwargs
        kwargs["_inside_attn_wrapper"] = True
        if outermost and override is not None:
            return override(func, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    if not skip_reshape:
        dim = q.shape[-1] // heads
        q, k, v = (x.view(*x.shape[:2], -1, dim).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (3 - mask.dim())].unsqueeze(1)
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = scaled_dot_product_attention(q, k, v, mask, **extra)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
