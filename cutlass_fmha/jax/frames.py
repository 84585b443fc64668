"""XLA's foreign function interface, of which a handler is made without a compiler: xla/ffi/api/c_api.h.

A struct here ends with the last field that is read; XLA only adds behind (``XLA_FFI_API_MINOR``).
"""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

VERSION = (0, 1)
INVALID_ARGUMENT = 3
METADATA = 1  # the extension that asks a handler what it is


class _Extension(C.Structure):
    pass


_Extension._fields_ = [("size", C.c_size_t), ("type", C.c_int), ("next", C.POINTER(_Extension))]


class _Version(C.Structure):
    _fields_ = [("size", C.c_size_t), ("extension", C.c_void_p), ("major", C.c_int), ("minor", C.c_int)]


class _Metadata(C.Structure):
    _fields_ = [("size", C.c_size_t), ("version", _Version), ("traits", C.c_uint32)]


class _MetadataExtension(C.Structure):
    _fields_ = [("base", _Extension), ("metadata", C.POINTER(_Metadata))]


class _Buffer(C.Structure):
    _fields_ = [("size", C.c_size_t), ("extension", C.c_void_p), ("dtype", C.c_int), ("data", C.c_void_p)]


class _Buffers(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("extension", C.c_void_p),
        ("count", C.c_int64),
        ("types", C.c_void_p),
        ("buffers", C.POINTER(C.POINTER(_Buffer))),
    ]


class _Text(C.Structure):
    _fields_ = [("data", C.c_void_p), ("size", C.c_size_t)]


class _Attributes(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("extension", C.c_void_p),
        ("count", C.c_int64),
        ("types", C.c_void_p),
        ("names", C.c_void_p),
        ("values", C.POINTER(C.POINTER(_Text))),
    ]


class _Api(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("extension", C.c_void_p),
        ("version", _Version),
        ("internal", C.c_void_p),
        *((name, C.c_void_p) for name in ("error_create", "error_message", "error_destroy", "register")),
        ("stream_get", C.c_void_p),
        *((f"unused_{number}", C.c_void_p) for number in range(12)),
        ("device_ordinal_get", C.c_void_p),
    ]


class _Frame(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("extension", C.POINTER(_Extension)),
        ("api", C.POINTER(_Api)),
        ("context", C.c_void_p),
        ("stage", C.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


class _ErrorArguments(C.Structure):
    _fields_ = [("size", C.c_size_t), ("ext", C.c_void_p), ("message", C.c_char_p), ("code", C.c_int)]


class _Asked(C.Structure):
    """What is asked of a context: a stream, or the number of a device."""

    _fields_ = [("size", C.c_size_t), ("ext", C.c_void_p), ("context", C.c_void_p), ("found", C.c_void_p)]


_Handler = C.CFUNCTYPE(C.c_void_p, C.POINTER(_Frame))


class Call(NamedTuple):
    """One execution: the text that was said when the function was traced, and where its buffers are."""

    text: bytes
    arguments: list[int]
    results: list[int]
    #: (CUDA stream, number of the CUDA device); None for the host.
    where: tuple[int, int] | None


def handler(run: Callable[[Call], None], cuda: bool) -> Any:
    """A C function for XLA, which lives as long as it is kept: runs, or tells XLA what was raised."""

    def handle(address: Any) -> int | None:
        frame = address.contents
        if frame.extension and frame.extension.contents.type == METADATA:
            extension = C.cast(frame.extension, C.POINTER(_MetadataExtension)).contents
            version = extension.metadata.contents.version
            version.major, version.minor = VERSION
            extension.metadata.contents.traits = 0
            return None
        try:
            text = frame.attributes.values[0].contents
            api = frame.api.contents
            where = (
                (
                    _ask(api.stream_get, frame.context),
                    _ask(api.device_ordinal_get, frame.context) & 0x7FFFFFFF,
                )
                if cuda
                else None
            )
            said = C.string_at(text.data, text.size)
            run(Call(said, _addresses(frame.arguments), _addresses(frame.results), where))
        except BaseException as error:  # there is nobody else to tell
            return _error(frame.api.contents, f"{type(error).__name__}: {error}")
        return None

    return _Handler(handle)


def _addresses(buffers: Any) -> list[int]:
    return [buffers.buffers[number].contents.data or 0 for number in range(buffers.count)]


@functools.cache
def _function(address: int) -> Any:
    return C.CFUNCTYPE(C.c_void_p, C.c_void_p)(address)


def _ask(function: int, context: int) -> int:
    asked = _Asked(C.sizeof(_Asked), None, context, None)
    if _function(function)(C.byref(asked)):
        raise RuntimeError("XLA names no stream or no device")
    return asked.found or 0


def _error(api: Any, sentence: str) -> int | None:
    said = _ErrorArguments(C.sizeof(_ErrorArguments), None, sentence.encode(), INVALID_ARGUMENT)
    found: int | None = _function(api.error_create)(C.byref(said))
    return found
