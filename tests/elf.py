"""What a shared library needs and shows, read from the file: no binutils on the machine, nothing loaded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


class Elf:
    """As much of a 64-bit little-endian ELF file as its dynamic section and symbols take."""

    DYNAMIC, SYMBOLS = 6, 11  # SHT_DYNAMIC, SHT_DYNSYM

    def __init__(self, file: Path):
        self.data = file.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{file} is no 64-bit little-endian ELF file"
        at = struct.unpack_from("<Q", self.data, 0x28)[0]
        size, count = struct.unpack_from("<HH", self.data, 0x3A)
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, at + i * size) for i in range(count)]

    def entries(self, kind: int, layout: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(offset of the string table, fields) of each entry of the sections of one kind."""
        for _, section_kind, _, _, offset, size, link, *_ in self.sections:
            if section_kind == kind:
                for entry in struct.iter_unpack(layout, self.data[offset : offset + size]):
                    yield self.sections[link][4], entry

    def string(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def needed(self) -> set[str]:
        """Libraries that the loader has to find (DT_NEEDED)."""
        return {
            self.string(strings + value)
            for strings, (tag, value) in self.entries(self.DYNAMIC, "<qQ")
            if tag == 1
        }

    def exported(self) -> set[str]:
        """Symbols that other libraries can see: defined, global or weak."""
        return {
            self.string(strings + name)
            for strings, (name, info, _, section, _, _) in self.entries(self.SYMBOLS, "<IBBHQQ")
            if section != 0 and info >> 4 in (1, 2)
        }
