"""What a call allocates: by torch's allocator, and by the plan that the package makes of it before.

And what a loop of drawn lengths does to that allocator, which a Workspace and ``out`` leave alone.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable

import torch

from .cases import Case
from .contenders import Inputs
from .features import Feature
from .gradients import arguments_of


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call holds on the current device at once, its result among them."""
    # Autograd's thread lets go of gradients only after it handed them over: of all before, once it has another turn.
    torch.zeros((), device="cuda", requires_grad=True).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def planned(
    case: Case, inputs: Inputs, feature: Feature | None, row: str | None = None, device: str | None = None
) -> int:
    """The same of this package, by ``memory_plan``; of a backward without the gradient that it is given.

    device: one that needn't be here, as ``explain`` takes it; the inputs' when None.
    """
    from cutlass_fmha.memory.plan import memory_plan  # not above: another build may lack it (``against``)

    if case.backward:
        given = {"causal": case.causal, **arguments_of(case, inputs.query.device)}
        plan = memory_plan(*inputs[0], backward=True, device=device, **given)
        return plan.backward - plan.of_backward["output's gradient"]
    arguments = feature.arguments if feature else {"causal": case.causal}
    return memory_plan(*inputs[0], row=row, device=device, **arguments).forward


CALLS = 10_000
LONGEST = (512, 8192)
"""Queries, of which every second call has one, and keys of a call."""
ALIVE = 8
"""Outputs that are there at a time: where each is gone before the next, nothing could be fragmented."""
Loop = dict[str, dict[str, float]]


def loop(
    calls: int = CALLS,
    longest: tuple[int, int] = LONGEST,
    device: str = "cuda",
    planned_for: str | None = None,
) -> Loop:
    """Calls of drawn lengths, with torch's allocator, and with a Workspace and ``out``: microseconds a call,
    MiB that torch reserves for them, the share of those that was never in use, and allocations.

    planned_for: a GPU by name, where the tensors are on none.
    """
    import cutlass_fmha  # not above: another build may lack a Workspace (``against``)

    draw = random.Random(1)
    queries = [1] * 16 + [draw.randint(2, longest[0]) for _ in range(16)]
    keys = [draw.randint(1, longest[1]) for _ in range(32)]
    lengths = [(draw.choice(queries), draw.choice(keys)) for _ in range(calls)]
    q, k, v = (
        torch.randn(1, rows, heads, 128, device=device).to(torch.bfloat16)
        for rows, heads in ((longest[0], 32), (longest[1], 8), (longest[1], 8))
    )

    def attend(m: int, n: int, out: torch.Tensor | None) -> torch.Tensor:
        return cutlass_fmha.attention(q[:, :m], k[:, :n], v[:, :n], causal=True, out=out)

    distinct = sorted(set(lengths))
    plans = (
        cutlass_fmha.memory_plan(q[:, :m], k[:, :n], v[:, :n], causal=True, device=planned_for) for m, n in distinct
    )
    workspace = cutlass_fmha.Workspace(max(plan.workspace for plan in plans), q.device)
    rooms = [torch.empty_like(q) for _ in range(ALIVE)]

    def by_torch() -> None:
        alive: deque[torch.Tensor] = deque(maxlen=ALIVE)
        for m, n in lengths:
            alive.append(attend(m, n, None))

    def by_workspace() -> None:
        with workspace:
            for number, (m, n) in enumerate(lengths):
                attend(m, n, rooms[number % ALIVE][:, :m])

    with torch.inference_mode():
        for m, n in distinct:  # what is prepared once
            attend(m, n, None)
            attend(m, n, rooms[0][:, :m])
        return {
            "torch's allocator": _counted(by_torch, calls),
            f"a Workspace of {workspace.size / 2**20:.1f} MiB and out": _counted(by_workspace, calls),
        }


def _counted(work: Callable[[], None], calls: int) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    took, after = time.perf_counter() - begin, torch.cuda.memory_stats()

    def more(name: str, when: str) -> int:
        return int(after.get(f"{name}.all.{when}", 0) - before.get(f"{name}.all.current", 0))

    reserved, used = more("reserved_bytes", "peak"), more("allocated_bytes", "peak")
    count = "allocation.all.allocated"
    return {
        "calls": calls,
        "us": round(took / calls * 1e6, 2),
        "reserved_mib": round(reserved / 2**20, 1),
        "never_used": round(1.0 - used / reserved, 3) if reserved else 0.0,
        "allocations": int(after.get(count, 0) - before.get(count, 0)),
    }
