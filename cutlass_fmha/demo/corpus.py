"""The text that the demo searches: excerpts of public-domain works, in passages of equal token length."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

HEADER = ("title", "author", "source", "licence")

Tokenise = Callable[[str, int], tuple[list[int], int]]
"""(text, limit) to (at most ``limit`` token ids, special ones included; characters they cover)."""

# A sentence ends at . ! or ?, perhaps with a closing quote, unless the full stop belongs to a title or an
# initial.
_SENTENCE_END = re.compile(r"""(?<!\bMr)(?<!\bMrs)(?<!\b[A-Z])(?<!\betc)[.!?]["')]?\s+(?=["'(]?[A-Z])|\n+""")
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Work:
    """One file of the corpus: its header's fields and its text, paragraphs on a line each."""

    name: str
    title: str
    author: str
    source: str
    licence: str
    text: str


@dataclass(frozen=True)
class Passage:
    """A piece of a work, and the token ids that the model reads for it."""

    work: Work
    text: str
    tokens: tuple[int, ...]


def load_works() -> list[Work]:
    """Every work that the package ships, by file name."""
    folder = resources.files("cutlass_fmha.demo") / "text"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return [parse_work(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8")) for file in files]


def parse_work(name: str, content: str) -> Work:
    """A work from its file's content. Raises ValueError when the header isn't the four fields in order."""
    header, _, body = content.partition("\n\n")
    fields = dict(line.partition(": ")[::2] for line in header.splitlines())
    if tuple(fields) != HEADER or not all(fields.values()):
        raise ValueError(f"{name}: the header must give {', '.join(HEADER)}, got {', '.join(fields)}")
    paragraphs = [" ".join(paragraph.split()) for paragraph in body.split("\n\n")]
    return Work(name=name, text="\n".join(filter(None, paragraphs)), **fields)


def sentence_starts(text: str) -> list[int]:
    """Character offsets at which the sentences of a text begin, 0 included; a paragraph begins one too."""
    return [0, *(match.end() for match in _SENTENCE_END.finditer(text) if match.end() < len(text))]


def cut(work: Work, tokenise: Tokenise, limit: int) -> list[Passage]:
    """Passages of exactly ``limit`` tokens, and a shorter last one; together they cover the whole text.

    Equal lengths are what lets passages share a batch without a padding mask. Each begins with the sentence
    that the one before left unfinished, so that a passage makes sense on its own; a sentence longer than a
    passage goes on in the middle.
    """
    starts = sentence_starts(work.text)
    passages = []
    begin = 0
    while begin < len(work.text):
        rest = work.text[begin : begin + limit * _CHARACTERS_PER_TOKEN]
        tokens, covered = tokenise(rest, limit)
        end = begin + covered
        finished = not work.text[end:].strip()
        text = work.text[begin:end].replace("\n", " ")
        passages.append(Passage(work, text if finished or end in starts else text + " ...", tuple(tokens)))
        if finished:
            break
        unfinished = [start for start in starts if begin < start <= end]
        begin = unfinished[-1] if unfinished else max(work.text.rfind(" ", begin + 1, end), begin + 1)
    return passages
