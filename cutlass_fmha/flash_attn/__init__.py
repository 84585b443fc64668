"""The names of flash_attn (FlashAttention-2) with its signatures, on this package's kernels.

>>> from cutlass_fmha.flash_attn import flash_attn_func, flash_attn_varlen_func
>>> import cutlass_fmha.flash_attn
>>> cutlass_fmha.flash_attn.install()  # from here on, "import flash_attn" means this

docs/flash_attn.md says what differs from attention(), and what is declined.
"""

from cutlass_fmha.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cutlass_fmha.flash_attn.importing import VERSION as __version__
from cutlass_fmha.flash_attn.importing import install, uninstall

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
