from enum import Enum
from pkgutil import resolve_name


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname: bool = True) -> str:
        return _ATTN_OVERRIDES.get(self, self.value)

    def get_class(self):
        return resolve_name(self.get_path().replace(":", "."))

    def is_overridden(self) -> bool:
        return self in _ATTN_OVERRIDES


_ATTN_OVERRIDES = {}


def register_backend(backend, class_path: str | None = None, is_mamba: bool = False):
    _ATTN_OVERRIDES[backend] = class_path
    return lambda x: x
