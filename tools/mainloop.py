"""The main loop of a kernel in its machine code: what it holds, and what has grown in it since it was committed.

The loop is found by its shape, not by its place: that with the most mma among those that hold no smaller loop with
mma. Copies of the loop's code before and after it are no loops, and a barrier's spin loop, wherever the compiler put
it, holds no mma.

What is counted is the whole body: masks, the exact softmax's second pass over a block and both halves of the
copies, of which a step issues what it needs, stand in it once, too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import networkx as nx  # which torch needs, too
from cubin import Instruction, Kernel
from resources import UPDATE

#: Class of instructions -> opcodes; the order is the order of the tables. What no class names is "other".
CLASSES: dict[str, tuple[str, ...]] = {
    "mma": ("HMMA", "IMMA", "QMMA", "OMMA"),
    "mufu": ("MUFU",),
    "fp32": ("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "HFMA2", "HADD2", "HMUL2"),
    "convert": ("F2FP", "F2F", "F2I", "I2F", "I2FP"),
    "imad": ("IMAD",),
    "alu": (
        *("FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "ISETP", "SEL", "LOP3", "PLOP3", "PRMT", "SHF", "LEA"),
        *("IADD3", "IADD", "IABS", "IMNMX", "VIADD", "VIMNMX", "VIADDMNMX", "POPC", "FLO", "SGXT", "BMSK"),
        *("HMNMX2", "HSETP2", "P2R", "R2P", "VHMNMX"),
    ),
    "ldsm": ("LDSM",),
    "copy": ("LDGSTS", "UTMALDG", "UBLKCP"),
    "global": ("LDG", "STG"),
    "shared": ("LDS", "STS"),
    "spill": ("LDL", "STL"),
    "barrier": (
        *("BAR", "SYNCS", "ARRIVES", "ATOMS", "MEMBAR", "FENCE", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "ERRBAR"),
        *("NANOSLEEP", "CCTL"),
    ),
    "lanes": ("SHFL", "VOTE", "VOTEU", "MATCH", "REDUX"),
    "move": ("MOV", "CS2R", "S2R", "S2UR", "R2UR", "LDC", "LDCU", "ULDC", "UMOV", "CREDUX"),
    "branch": ("BRA", "BSSY", "BSYNC", "BREAK", "BMOV", "CALL", "RET", "EXIT", "YIELD"),
    "nop": ("NOP",),
    "uniform": (),  # the rest of the uniform data path: its opcodes begin with U
    "other": (),
}
_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}

_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_PREDICATE = re.compile(r"\bU?P\d+\b")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "JMP", "KILL", "BPT")


class LoopNotFoundError(ValueError):
    """A kernel has no loop with tensor-core instructions."""


def class_of(instruction: Instruction) -> str:
    """The class of CLASSES that an instruction belongs to."""
    if instruction.opcode.startswith("IMAD.MOV"):
        return "move"
    return _CLASS_OF.get(instruction.base, "uniform" if instruction.base.startswith("U") else "other")


class Block(NamedTuple):
    """Instructions without a branch into or out of their middle."""

    code: list[Instruction]
    successors: list[int]  # [fall through, taken] of a conditional branch, else at most one


def blocks_of(code: list[Instruction]) -> list[Block]:
    """The control-flow graph, entry first. A call is no edge: it returns, or leaves and never comes back."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    found = [_TARGET.search(x.operands) if x.base == "BRA" else None for x in code]
    targets = [index.get(int(match[1], 16)) if match else None for match in found]
    ends = {i + 1 for i, instruction in enumerate(code) if instruction.base in ("BRA", *_ENDS)}
    starts = sorted({0, *ends, *(target for target in targets if target is not None)} - {len(code)})
    number = {start: n for n, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        following = [number[x] for x in (end,) if x in number]
        taken = [number[x] for x in targets[end - 1 : end] if x is not None]
        conditional = last.guard or _PREDICATE.search(last.operands) or "URZ" in last.operands
        if last.base in _ENDS:
            successors = following if last.guard else []
        elif last.base != "BRA" or last.opcode.startswith("BRA.DIV"):  # which leads to code for a divergent warp
            successors = following
        elif last.opcode.startswith("BRA.CONV") or not conditional:  # over a call for a divergent warp
            successors = taken
        else:
            successors = following + taken
        blocks.append(Block(code[start:end], successors))
    return blocks


class Loop:
    """The main loop's code."""

    def __init__(self, code: list[Instruction]) -> None:
        self.opcodes = Counter(instruction.base for instruction in code)
        found = Counter(map(class_of, code))
        self.counts = {name: found[name] for name in CLASSES}
        self.entry = {name: count for name, count in self.counts.items() if count}  # what the report holds


def main_loop(kernel: Kernel) -> Loop:
    """The main loop of a kernel. Raises LoopNotFoundError when no loop has an mma in it."""
    blocks = blocks_of(kernel.code)
    mma = [sum(class_of(i) == "mma" for i in block.code) for block in blocks]

    def innermost(flow: nx.DiGraph) -> Iterator[set[int]]:
        """Loops with mma: where one can come back to its beginning, the blocks in it that are entered from outside."""
        for body in nx.strongly_connected_components(flow):
            inner = nx.DiGraph(flow.subgraph(body))
            if inner.edges and any(mma[n] for n in body):
                heads = {n for n in body if set(flow.pred[n]) - body} or {min(body)}
                inner.remove_edges_from(list(inner.in_edges(heads)))
                yield from list(innermost(inner)) or [body]

    flow = nx.DiGraph((n, s) for n, block in enumerate(blocks) for s in block.successors)
    flow.add_node(0)
    # Phases that need a mask may have a loop of their own, with as many mma and more of everything else.
    loops = list(innermost(flow.subgraph({0} | nx.descendants(flow, 0))))
    if not loops:
        raise LoopNotFoundError(f"{kernel.name} (sm_{kernel.arch}) has no loop with tensor-core instructions")
    body = max(loops, key=lambda body: (sum(mma[n] for n in body), -sum(len(blocks[n].code) for n in body)))
    return Loop([instruction for n in sorted(body) for instruction in blocks[n].code])


def loops_of(kernels: Iterable[Kernel], rows: Iterable[Any]) -> list[tuple[Any, Kernel, Loop]]:
    """The main loop of every kernel that is a counted one of ``rows`` (of ``_C.rows()``), in their order.

    Not where the warps of a block share the keys: such a loop loads straight into registers, runs a few times
    if at all (the first step stands before it), and is bound by latency. Nor in a scored row: most of its
    loop is branches that a problem takes or doesn't. Raises LoopNotFoundError for a kernel without one.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    wanted = [row for row in rows if row.family == "plain" and row.name in by_name]
    return [(row, by_name[row.name], main_loop(by_name[row.name])) for row in wanted]


# ---- what has grown since the committed counts (tests/data/resources.json) --------------------------------

ALLOWED_SHARE, ALLOWED_COUNT = 0.02, 4  # a class may grow by either, whichever is more
ALLOWED_REGISTERS = 8  # registers are given out in eights


def changes(committed: dict[str, Any], built: dict[str, Any]) -> list[str]:
    """A sentence for each count that has grown too far; of mma, for each that changed. Both: row -> its registers
    and its loop. Of rows that both have: ``make release-check`` tells whether the committed ones are all there are.
    """
    lines = []
    for name in filter(committed.__contains__, built):
        advice = f"look for the cause (python tools/resources.py --opcodes --rows {name}), or accept it: {UPDATE}"
        old, new = committed[name], built[name]
        if new["registers"] > old["registers"] + ALLOWED_REGISTERS:
            lines.append(f"{name}: registers grew from {old['registers']} to {new['registers']}; {advice}")
        before, after = (each["loop"] | {"all classes": sum(each["loop"].values())} for each in (old, new))
        for kind in (*CLASSES, "all classes"):
            was, now = before.get(kind, 0), after.get(kind, 0)
            if kind == "mma" and was != now:
                lines.append(f"{name}: mma in the main loop went from {was} to {now}; {advice}")
            elif now > was + max(ALLOWED_COUNT, ALLOWED_SHARE * was):
                lines.append(f"{name}: {kind} in the main loop grew from {was} to {now}; {advice}")
    return lines
