"""Finds the main loop of a kernel in its machine code and counts what it holds.

The loop is found by its shape, not by its place: the natural loop (a back edge whose target dominates its
source) with the most mma among those that hold no smaller loop with mma. Copies of the loop's code before and
after it are no loops, and a barrier's spin loop, wherever the compiler put it, holds no mma.

What is counted is the whole body: masks, the exact softmax's second pass over a block and both halves of the
copies, of which a step issues what it needs, stand in it once, too.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import networkx as nx  # which torch needs, too
from cubin import Instruction, Kernel

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


@dataclass
class Block:
    """Instructions without a branch into or out of their middle."""

    code: list[Instruction]
    successors: list[int]  # [fall through, taken] of a conditional branch, else at most one


def branch_target(instruction: Instruction) -> int | None:
    """Address that a BRA goes to."""
    match = _TARGET.search(instruction.operands)
    return int(match[1], 16) if match and instruction.base == "BRA" else None


def blocks_of(code: list[Instruction]) -> list[Block]:
    """The control-flow graph, entry first. A call is no edge: it returns, or leaves and never comes back."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    targets = [index.get(branch_target(instruction)) for instruction in code]
    ends = {i + 1 for i, instruction in enumerate(code) if instruction.base == "BRA" or instruction.base in _ENDS}
    starts = sorted({0, *ends, *(target for target in targets if target is not None)} - {len(code)})
    number = {start: n for n, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last, target = code[end - 1], targets[end - 1]
        following = [number[end]] if end in number else []
        taken = [number[target]] if target is not None else []
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


def natural_loops(blocks: list[Block]) -> dict[int, set[int]]:
    """Head of a loop -> its blocks."""
    flow = nx.DiGraph((n, s) for n, block in enumerate(blocks) for s in block.successors)
    flow.add_node(0)
    dominators = nx.immediate_dominators(flow, 0)
    tree = nx.DiGraph((parent, node) for node, parent in dominators.items() if node != 0)
    tree.add_node(0)
    loops: dict[int, set[int]] = {}
    for n, head in flow.edges:
        if n in tree and nx.has_path(tree, head, n):  # a back edge: its target dominates its source
            body = loops.setdefault(head, {head})
            if n != head:
                body |= {n} | nx.ancestors(flow.subgraph(set(tree) - {head}), n)
    return loops


@dataclass(frozen=True)
class Loop:
    """The main loop's code."""

    code: list[Instruction]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Instructions by class; every class is named."""
        found = Counter(class_of(instruction) for instruction in self.code)
        return {name: found[name] for name in CLASSES}

    @cached_property
    def opcodes(self) -> Counter[str]:
        """The same by opcode without modifiers."""
        return Counter(instruction.base for instruction in self.code)


def main_loop(kernel: Kernel) -> Loop:
    """The main loop of a kernel. Raises LoopNotFoundError when no loop has an mma in it."""
    blocks = blocks_of(kernel.code)
    mma = [sum(class_of(i) == "mma" for i in block.code) for block in blocks]
    loops = [body for body in natural_loops(blocks).values() if any(mma[n] for n in body)]
    innermost = [body for body in loops if not any(other < body for other in loops)]
    if not innermost:
        raise LoopNotFoundError(f"{kernel.name} (sm_{kernel.arch}) has no loop with tensor-core instructions")
    # Phases that need a mask may have a loop of their own, with as many mma and more of everything else.
    sizes = [(sum(mma[n] for n in body), -sum(len(blocks[n].code) for n in body)) for body in innermost]
    body = innermost[sizes.index(max(sizes))]
    return Loop([instruction for n in sorted(body) for instruction in blocks[n].code])
