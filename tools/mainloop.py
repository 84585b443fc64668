"""Finds the main loop of a kernel in its machine code and counts what one iteration of it issues.

The loop is found by its shape, not by its place: the natural loop (a back edge whose target dominates its
source) with the most mma among those that hold no smaller loop with mma. Copies of the loop's code before and
after it are no loops, and a barrier's spin loop, wherever the compiler put it, holds no mma.

What is counted is the steady state of one warp: the path from the loop's head back to it on which

- no wait spins and no warp is divergent (BRA.DIV, BRA.CONV),
- a branch that depends on a vote is not taken: the exact softmax's second pass over a block,
- no block is masked: the side of a branch that writes -inf or exchanges data between lanes is left out,
- every other branch is followed through its longer side.

Copies from global memory that a branch gives to one half of the warps count with the share of the warps that
run them, which is known from the size of a tile: such counts can end in .5.
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
_MINUS_INFINITY = re.compile(r"-INF\b|0xff800000\b|-0x800000\b")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "JMP", "KILL", "BPT")
_COPIED_BYTES = {"32": 4, "64": 8, "128": 16, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class LoopNotFoundError(ValueError):
    """A kernel has no loop with tensor-core instructions."""


def class_of(instruction: Instruction) -> str:
    """The class of CLASSES that an instruction belongs to."""
    if instruction.opcode.startswith("IMAD.MOV"):
        return "move"
    name = _CLASS_OF.get(instruction.base)
    if name is None:
        return "uniform" if instruction.base.startswith("U") else "other"
    return name


@dataclass
class Block:
    """Instructions without a branch into or out of their middle."""

    code: list[Instruction]
    successors: list[int]  # [fall through, taken] of a conditional branch, else at most one

    @property
    def last(self) -> Instruction:
        return self.code[-1]

    def has(self, *opcodes: str) -> bool:
        return any(instruction.base in opcodes for instruction in self.code)


def branch_target(instruction: Instruction) -> int | None:
    """Address that a BRA goes to."""
    match = _TARGET.search(instruction.operands)
    return int(match[1], 16) if match and instruction.base == "BRA" else None


def blocks_of(code: list[Instruction]) -> list[Block]:
    """The control-flow graph, entry first. A call is no edge: it returns, or leaves and never comes back."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    leaders = {0}
    for i, instruction in enumerate(code):
        target = branch_target(instruction)
        if target is not None and target in index:
            leaders.add(index[target])
        if instruction.base == "BRA" or instruction.base in _ENDS:
            leaders.add(i + 1)
    starts = sorted(leader for leader in leaders if leader < len(code))
    number = {start: n for n, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        target = branch_target(last)
        following = [number[end]] if end in number else []
        taken = [number[index[target]]] if target is not None and target in index else []
        conditional = bool(last.guard or _PREDICATE.search(last.operands) or "URZ" in last.operands)
        if last.base == "BRA":
            if last.opcode.startswith("BRA.DIV"):  # to code for a divergent warp
                successors = following
            elif last.opcode.startswith("BRA.CONV"):  # over a call for a divergent warp
                successors = taken
            else:
                successors = following + taken if conditional else taken
        elif last.base in _ENDS:
            successors = following if last.guard else []
        else:
            successors = following
        blocks.append(Block(code[start:end], successors))
    return blocks


def dominators(flow: nx.DiGraph, entry: int) -> dict[int, int]:
    """Immediate dominator of each node that the entry leads to, but for the entry."""
    found = nx.immediate_dominators(flow, entry)
    return {node: parent for node, parent in found.items() if node != entry}


def natural_loops(blocks: list[Block]) -> dict[int, set[int]]:
    """Head of a loop -> its blocks."""
    flow = nx.DiGraph((n, s) for n, block in enumerate(blocks) for s in block.successors)
    flow.add_node(0)
    tree = nx.DiGraph([(parent, node) for node, parent in dominators(flow, 0).items()])
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
    """The main loop: its blocks, and the weight that each has in an iteration of the steady state."""

    blocks: list[Block]
    body: frozenset[int]
    weights: dict[int, float]

    @cached_property
    def counts(self) -> dict[str, float]:
        """Instructions that a warp issues per iteration, by class; every class is named."""
        counts = dict.fromkeys(CLASSES, 0.0)
        for n, weight in self.weights.items():
            for instruction in self.blocks[n].code:
                counts[class_of(instruction)] += weight
        return counts

    @cached_property
    def opcodes(self) -> Counter[str]:
        """The same by opcode without modifiers, rounded up: for a look, not for arithmetic."""
        exact: dict[str, float] = {}
        for n, weight in self.weights.items():
            for instruction in self.blocks[n].code:
                exact[instruction.base] = exact.get(instruction.base, 0.0) + weight
        return Counter({opcode: -int(-count // 1) for opcode, count in exact.items()})

    @property
    def addresses(self) -> tuple[int, int]:
        """First and last address of the path that is counted."""
        code = [instruction.address for n in self.weights for instruction in self.blocks[n].code]
        return min(code), max(code)


def main_loop(kernel: Kernel, copied_bytes: float | None = None) -> Loop:
    """The main loop of a kernel and its steady state.

    copied_bytes: what a warp copies from global memory per iteration, on average over the warps. Without it,
    every warp is taken to run every copy.
    Raises LoopNotFoundError when no loop has an mma in it.
    """
    blocks = blocks_of(kernel.code)
    mma = [sum(class_of(i) == "mma" for i in block.code) for block in blocks]
    loops = {head: body for head, body in natural_loops(blocks).items() if any(mma[n] for n in body)}
    innermost = [
        (head, body) for head, body in loops.items() if not any(other < body for other in loops.values())
    ]
    if not innermost:
        raise LoopNotFoundError(f"{kernel.name} (sm_{kernel.arch}) has no loop with tensor-core instructions")
    # Phases that need a mask may have a loop of their own, with as many mma and more of everything else.
    head, body = max(
        innermost,
        key=lambda loop: (sum(mma[n] for n in loop[1]), -sum(len(blocks[n].code) for n in loop[1])),
    )
    path = _Path(blocks, head, body)
    weights = path.weights()
    if copied_bytes is not None:
        path.share_copies(weights, copied_bytes)
    return Loop(blocks, frozenset(body), weights)


class _Path:
    """The walk through one iteration. Inside the body alone, with the way back to the head cut."""

    def __init__(self, blocks: list[Block], head: int, body: set[int]) -> None:
        self.blocks, self.head, self.body = blocks, head, body
        self.end = len(blocks)  # stands for the head's next visit
        loops = natural_loops(blocks)
        self.spins = {h for h, loop in loops.items() if h != head and loop < body}
        inner = {
            (n, s)
            for loop_head, loop_body in loops.items()
            if loop_head != head and loop_body < body
            for n in loop_body
            for s in blocks[n].successors
            if s == loop_head
        }
        self.following = {
            n: [
                self.end if s == head else s
                for s in blocks[n].successors
                if (s in body) and (n, s) not in inner
            ]
            for n in body
        }
        self.join = self._postdominators()

    def _postdominators(self) -> dict[int, int]:
        """Block -> where all ways from it to the end meet again."""
        ways_back = nx.DiGraph((s, n) for n, following in self.following.items() for s in following)
        return {**dominators(ways_back, self.end), self.end: self.end}

    def _region(self, start: int, join: int) -> set[int]:
        region: set[int] = set()
        pending = [start]
        while pending:
            n = pending.pop()
            if n not in (join, self.end) and n not in region:
                region.add(n)
                pending += self.following[n]
        return region

    def _is_rare(self, region: set[int], voted: bool) -> bool:
        """Whether the blocks are the second pass after a vote, a mask, or a wait that spins out of line."""
        if any(self.blocks[n].has(*CLASSES["mma"]) for n in region):
            return False
        if region & self.spins and not any(copied(self.blocks[n]) for n in region):
            return True
        return voted or any(
            self.blocks[n].has("SHFL") or any(_MINUS_INFINITY.search(i.operands) for i in self.blocks[n].code)
            for n in region
        )

    def _size(self, region: set[int]) -> tuple[int, int]:
        mma = sum(class_of(i) == "mma" for n in region for i in self.blocks[n].code)
        return mma, sum(len(self.blocks[n].code) for n in region)

    def weights(self) -> dict[int, float]:
        path: dict[int, float] = {}
        n = self.head
        while n != self.end:
            path[n] = 1.0
            following = [s for s in self.following[n] if s == self.end or s in self.join]
            if len(following) == 1:
                n = following[0]
                continue
            voted = depends_on_vote(self.blocks[n])
            sides = [(self._region(s, self.join[n]), s) for s in following]
            usual = [side for side in sides if not (side[0] and self._is_rare(side[0], voted))]
            n = max(usual or sides, key=lambda side: self._size(side[0]))[1]
        return path

    def share_copies(self, weights: dict[int, float], copied_bytes: float) -> None:
        """Lowers the weight of the branches that copy so that they bring ``copied_bytes`` together.

        A branch is the blocks between the one that decides on it and the one where both ways meet, so that
        its addresses and its waits count with its copies.
        """
        order = list(weights)
        branches: list[list[int]] = []
        for position, n in enumerate(order):
            if len(self.following[n]) < 2 or self.join[n] not in self.following[n]:
                continue  # no branch, or one with two sides
            join = self.join[n]
            inside = order[position + 1 : order.index(join) if join in weights else len(order)]
            has_mma = any(self.blocks[i].has(*CLASSES["mma"]) for i in inside)
            if not has_mma and any(copied(self.blocks[i]) for i in inside):
                branches.append(inside)
        outer = [b for b in branches if not any(set(b) < set(other) for other in branches)]
        brought = sum(copied(self.blocks[n]) for branch in outer for n in branch)
        if brought > copied_bytes:
            for branch in outer:
                for n in branch:
                    weights[n] = copied_bytes / brought


def depends_on_vote(block: Block) -> bool:
    """Whether the last writer of the predicate that a block's branch asks is a vote."""
    predicate = block.last.guard.lstrip("!") or next(iter(_PREDICATE.findall(block.last.operands)), "")
    for instruction in reversed(block.code[:-1]):
        written = instruction.operands.split(",")[:2]
        if any(operand.strip() == predicate for operand in written):
            return instruction.base in ("VOTE", "VOTEU")
    return False


def copied(block: Block) -> int:
    """Bytes that a warp brings from global memory in a block."""
    total = 0
    for instruction in block.code:
        if instruction.base in ("LDGSTS", "LDG"):
            width = next((_COPIED_BYTES[m] for m in instruction.opcode.split(".") if m in _COPIED_BYTES), 4)
            total += 32 * width
    return total
