"""What a call allocates: by torch's allocator, and by the plan that the package makes of it before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .cases import Case
from .contenders import Inputs
from .features import Feature
from .gradients import packing


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call holds on the current device at once, its result among them."""
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
        said = {"causal": case.causal, **packing(case, inputs.query.device)}
        plan = memory_plan(*inputs[0], backward=True, device=device, **said)
        return plan.backward - plan.of_backward["output's gradient"]
    arguments = feature.arguments if feature else {"causal": case.causal}
    return memory_plan(*inputs[0], row=row, device=device, **arguments).forward
