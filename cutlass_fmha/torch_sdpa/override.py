"""``cutlass_fmha.sdpa``: has torch's scaled_dot_product_attention come to this package, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.backends import mha
from torch.library import Library
from torch.nn import attention

from cutlass_fmha import _C, private_torch
from cutlass_fmha.torch_sdpa import composite, flash
from cutlass_fmha.torch_sdpa.calls import calls

NAME = "cutlass_fmha"
"""What torch.nn.attention's registry knows this package as."""

DEVICE_TYPES = {"cuda": "CUDA", "cpu": "CPU"}
_BUILD = str(_C.build_info()["source_hash"])[:12]

#: torch 2.11 and newer can hand a call back to the kernel that stood there before.
_HAS_REGISTRY = hasattr(attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")


def _is_op(name: str) -> bool:
    """Whether this torch has an op of its flash backend, and can hand its calls back."""
    return _HAS_REGISTRY and hasattr(torch.ops.aten, name)


def _forget_kernels() -> None:
    for name in (composite.NAME, *filter(_is_op, flash.OPS)):
        private_torch.forget_kernels(getattr(torch.ops.aten, name).default)


class _Kernels:
    """Our kernels in torch's dispatcher, from when it is made to ``remove``: torch's FlashAttentionHandle."""

    def __init__(self, device_types: tuple[str, ...]) -> None:
        composite.refused.clear()
        self.device_types = device_types
        self._library: Library | None = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for key in (DEVICE_TYPES[each] for each in device_types):
                self._library.impl(composite.NAME, composite.attend, key)
                self._library.impl(composite.NAME, composite.attend, f"Autograd{key}")
                for name in filter(_is_op, flash.OPS):
                    self._library.impl(name, flash.kernel(name, key), key, with_keyset=True)
            for key, reason in composite.NEVER_OURS.items():
                self._library.impl(composite.NAME, composite.go_on(reason, device_types), key)
        _forget_kernels()
        # torch's files of compiled graphs are found by a program's calls, whoever computed them.
        private_torch.tag_graphs(f" cutlass_fmha {_BUILD} {sorted(device_types)}")
        # A jagged tensor takes its calls before the dispatcher does, to a function of this module.
        self._jagged, self._of_jagged = private_torch.jagged_module(), None
        if self._jagged is not None:
            self._of_jagged = getattr(self._jagged, private_torch.OF_JAGGED)
            setattr(self._jagged, private_torch.OF_JAGGED, composite.attend_jagged(self._of_jagged, device_types))
        # nn.MultiheadAttention's and nn.TransformerEncoder's fast path is a kernel that calls no attention
        # where there is a mask, and on the CPU never.
        self._fast_path = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        if self._library is not None:
            self._library, self.device_types = None, ()  # a library without an owner takes its kernels out
            _forget_kernels()
            private_torch.tag_graphs("")
            mha.set_fastpath_enabled(self._fast_path)
            if self._jagged is not None:
                setattr(self._jagged, private_torch.OF_JAGGED, self._of_jagged)


@dataclasses.dataclass(eq=False)
class _Block:
    """An open ``with sdpa():``, which may end before one that began later, in another thread."""

    before: tuple[str, ...]  # what is enabled after it


class Override:
    """torch's scaled_dot_product_attention by this package, for the whole process.

        cutlass_fmha.sdpa.enable()          # until disable()
        with cutlass_fmha.sdpa(): ...       # for a block

    What the package declines goes on to torch, with one line in the log ``cutlass_fmha`` for each reason. See
    docs/sdpa.md.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kernels: _Kernels | None = None
        self._wanted: tuple[str, ...] = ("cuda",)  # of who activates by the registry's name
        self._before: str | None = None  # the flash implementation that another package had activated
        self._blocks: list[_Block] = []
        if _HAS_REGISTRY:
            attention.register_flash_attention_impl(NAME, register_fn=self._take_over)

    @property
    def enabled(self) -> tuple[str, ...]:
        """The device types whose calls come here; none when disabled."""
        return () if self._kernels is None else self._kernels.device_types

    @property
    def counts(self) -> Mapping[str, int]:
        """How many calls of each of torch's ops this package has computed, since ``reset_counts``.

        A call in a compiled graph is counted when it is traced; running the graph counts nothing.
        """
        return MappingProxyType(calls.counts)

    @property
    def declined(self) -> Mapping[str, int]:
        """How many calls went on to torch, by the reason, since ``reset_counts``."""
        return MappingProxyType(calls.declined)

    def reset_counts(self) -> None:
        calls.clear()

    def enable(self, device_types: Sequence[str] = ("cuda",)) -> None:
        """Has calls on tensors of these device types, "cuda" and "cpu", come here, in place of any before.

        Raises ValueError for another device type.
        """
        given = (device_types,) if isinstance(device_types, str) else tuple(device_types)
        for each in given:
            if each not in DEVICE_TYPES:
                raise ValueError(f'device_types must be of "cuda" and "cpu", got {each!r}')
        if not given:
            raise ValueError("device_types must name at least one: disable() is for none")
        with self._lock:
            if set(given) == set(self.enabled):
                return
            self._wanted, others = given, self._wanted
            try:
                if _HAS_REGISTRY:
                    active = attention.current_flash_attention_impl()
                    self._before = self._before if active == NAME else active
                    attention.activate_flash_attention_impl(NAME)
                else:
                    self._take_over()
            finally:
                self._wanted = others

    def disable(self) -> None:
        """Gives the calls back to torch, or to the implementation that was active before."""
        with self._lock:
            if not self.enabled:
                return
            if not _HAS_REGISTRY:
                self._leave()
                return
            attention.restore_flash_attention_impl()
            before, self._before = self._before, None
            if before is not None:
                attention.activate_flash_attention_impl(before)

    @contextlib.contextmanager
    def __call__(self, device_types: Sequence[str] = ("cuda",)) -> Iterator[Override]:
        """``enable`` for a block; after it, all is as before, also inside another block, or beside another thread's."""
        with self._lock:
            block = _Block(self.enabled)
            self.enable(device_types)
            self._blocks.append(block)
        try:
            yield self
        finally:
            with self._lock:
                place = self._blocks.index(block)
                del self._blocks[place]
                if place < len(self._blocks):  # a later one is still open, and will leave what this one found
                    self._blocks[place].before = block.before
                elif block.before:
                    self.enable(block.before)
                else:
                    self.disable()

    def _take_over(self) -> _Kernels:
        self._leave()
        self._kernels = _Kernels(self._wanted)
        return self._kernels

    def _leave(self) -> None:
        if self._kernels is not None:
            self._kernels.remove()
            self._kernels = None


sdpa = Override()
