"""The way past the dispatcher, and a torch without private names."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import oracle_features
import pytest
import torch
from tensors import qkv
from torch.autograd import forward_ad

import cutlass_fmha
from cutlass_fmha import private_torch
from cutlass_fmha.ops import dispatcher

# Of torch's own making: what its compiler and its forward-mode derivatives use inside.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


# ---- past the dispatcher -----------------------------------------------------------------------------------


class LooksLikeCuda(torch.Tensor):
    """What ``can_skip_dispatcher`` would see on a GPU; its type stands in for torch.Tensor there."""

    is_cuda = True


@pytest.fixture
def cuda_like(monkeypatch):
    monkeypatch.setattr(dispatcher, "Tensor", LooksLikeCuda)
    return [x.as_subclass(LooksLikeCuda) for x in qkv(dtype=torch.float32)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_plain_tensors_are_needed(cuda_like, which: int):
    others = [None, 3, qkv()[0], torch.nn.Parameter(qkv()[0]), qkv()[0].to("meta")]
    for other in others:
        inputs = list(cuda_like)
        inputs[which] = other
        assert not dispatcher.can_skip_dispatcher(*inputs)
    inputs = list(cuda_like)
    inputs[which] = inputs[which].detach().requires_grad_()
    assert not dispatcher.can_skip_dispatcher(*inputs)
    with torch.no_grad():
        assert dispatcher.can_skip_dispatcher(*inputs)
    inputs[which] = torch._neg_view(cuda_like[which])
    assert inputs[which].is_neg() and not dispatcher.can_skip_dispatcher(*inputs)


def test_the_dispatcher_is_skipped_only_where_nothing_listens(cuda_like):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import BaseTorchDispatchMode

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert not any(x is y for x in args for y in cuda_like), "the mode saw what was asked"
            return func(*args, **(kwargs or {}))

    answers = []

    def ask(x):
        answers.append(dispatcher.can_skip_dispatcher(*cuda_like))
        return x * 1

    x = torch.ones(2)
    for listener in (BaseTorchDispatchMode, FunctionMode, torch.profiler.profile, forward_ad.dual_level):
        with listener():
            ask(x)
    torch.func.vmap(ask)(x)
    make_fx(ask)(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert len(answers) == 7 and not any(answers)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            ask(x)
    assert len(answers) == 10 and all(answers[7:])


# ---- another torch -----------------------------------------------------------------------------------------

SOURCE = Path(private_torch.__file__)
PRIVATE = sorted(set(re.findall(r'"(_(?!AutoDispatch)[a-zA-Z_]+)"', SOURCE.read_text())))


@pytest.mark.parametrize("name", [*PRIVATE, "all of them"])
def test_a_torch_without_a_private_name_serves_every_call(name: str, cuda_like, monkeypatch):
    spec = importlib.util.spec_from_file_location("private_torch_of_another_torch", SOURCE)
    another = importlib.util.module_from_spec(spec)
    holders = (torch._C, forward_ad, torch.autograd.profiler, torch.ops.aten)
    with monkeypatch.context() as without:
        for each, holder in itertools.product(PRIVATE if name == "all of them" else [name], holders):
            if hasattr(holder, each):
                without.delattr(holder, each, raising=False)
        if name in ("_scaled_dot_product_flash_attention_for_cpu", "all of them"):
            without.setattr(torch.ops, "aten", object())
        spec.loader.exec_module(another)
    for each in [x for x in vars(another) if not x.startswith("_")]:
        monkeypatch.setattr(private_torch, each, getattr(another, each))

    listens = name in LISTENERS or name == "all of them"
    assert dispatcher.can_skip_dispatcher(*cuda_like) is not listens
    monkeypatch.setattr(dispatcher, "Tensor", torch.Tensor)  # the calls below are real ones
    q, k, v = qkv(heads_kv=4)
    out = cutlass_fmha.attention(q, k, v, causal="top-left")
    oracle_features.compare(out, None, q, k, v, causal="top-left").check()
    slopes = torch.ones(q.shape[2], requires_grad=True)
    with pytest.raises(NotImplementedError, match="no backward yet"):
        cutlass_fmha.attention(q, k, v, alibi_slopes=slopes)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    product = v * torch.ones(1, requires_grad=True)
    torch.ops.cutlass_fmha.append_kv_(k, v, q[:, :2], q[:, :2], lengths)
    assert torch.equal(k[1, 5:7], q[1, :2]) and private_torch.raw_stream is another.raw_stream
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


LISTENERS = {
    "_len_torch_function_stack", "_len_torch_dispatch_stack", "_functorch", "_get_tracing_state",
    "_current_level", "_is_profiler_enabled",
}  # fmt: skip


def test_private_names_are_looked_up_in_one_place():
    assert set(PRIVATE) > LISTENERS
    for path in SOURCE.parent.rglob("*.py"):
        if path != SOURCE and "bench" not in path.parts:
            assert not re.search(
                r"torch\._(?!_)|aten\._|(?<!private_torch\.)(forward_ad|profiler)\._", path.read_text()
            ), path
