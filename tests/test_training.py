"""The gradient in the settings of training: what torch wraps around a layer must not change it.

On the CPU and, in the gate, on a GPU, and on two with NCCL.
"""

import contextlib
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cutlass_fmha
from cutlass_fmha import attention

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 8
WIDTH = HEADS * HEAD_DIM
OPS = torch.ops.cutlass_fmha

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")])
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])
ours = functools.partial(attention, causal=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


class Layer(nn.Module):
    """Attention with its projections; ``around`` is put around attention itself."""

    def __init__(self, attend: Callable[..., Tensor] = ours, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A bias of keys moves all scores of a query alike: its gradient is 0.
        self.k, self.v = (nn.Linear(WIDTH, HEADS_KV * HEAD_DIM, bias=name == "v") for name in "kv")
        self.attend = attend if around is None else functools.partial(around, attend)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)) for part in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).flatten(-2))


def tokens(seqlen: int = 9, batch: int = 4, device: str | torch.device = "cpu") -> Tensor:
    drawn = torch.randn(batch, seqlen, WIDTH, generator=torch.Generator().manual_seed(seqlen))
    return drawn.to(device).requires_grad_()


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def gradients(layer: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}


def trained(x: Tensor, attend: Callable[..., Tensor] = theirs) -> dict[str, Tensor | None]:
    """The gradients that nothing comes between."""
    layer = Layer(attend).to(x.device)
    loss_of(layer(x)).backward()
    return gradients(layer)


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference, as a share of the largest element."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].detach().double(), grad.double()) for name, grad in expected.items()]
    return max(((x - y).abs().max() / y.abs().max()).nan_to_num(torch.inf).item() for x, y in pairs)


Run = Callable[[nn.Module, Tensor], Tensor]
AGAIN = functools.partial(checkpoint, use_reentrant=False)
SAVED = functools.partial(
    AGAIN, context_fn=functools.partial(create_selective_checkpoint_contexts, [OPS.forward.default])
)


as_it_is = nn.Module.__call__


def compiled(layer: nn.Module, x: Tensor, backend: str = "aot_eager") -> Tensor:
    call = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        call(tokens(11, 3, x.device))
        return call(x)


def offloaded(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


def inference_between(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x)
    with torch.inference_mode():
        seen = layer(x)
    assert seen.is_inference() and torch.equal(seen, out)
    return out


def autocast(run: Run, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return run(layer, x)


SETTINGS: dict[str, tuple[Run, Callable[..., Any] | None]] = {
    "plain": (as_it_is, None),
    "inference between": (inference_between, None),
    "reentrant checkpoint": (functools.partial(checkpoint, use_reentrant=True), None),
    "checkpoint": (AGAIN, None),
    "checkpoint inside": (as_it_is, AGAIN),
    "selective checkpoint": (as_it_is, SAVED),
    "offloaded": (offloaded, None),
    "compiled": (compiled, None),
    "compiled, checkpoint inside": (compiled, AGAIN),
    "autocast": (functools.partial(autocast, as_it_is), None),
    "autocast, checkpoint": (functools.partial(autocast, as_it_is), AGAIN),
    "autocast, compiled": (functools.partial(autocast, compiled), None),
}
INDUCTOR = functools.partial(autocast, functools.partial(compiled, backend="inductor"))
ON_A_GPU: dict[str, Any] = {**SETTINGS, "autocast, inductor, checkpoint inside": (INDUCTOR, AGAIN)}


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in SETTINGS] + [pytest.param(name, *CUDA.values, marks=CUDA.marks) for name in ON_A_GPU],
)
def test_the_gradient_is_that_of_torchs_sdpa(name: str, device: str):
    run, around = ON_A_GPU[name]
    layer, x = Layer(ours, around).to(device), tokens(device=device)
    loss_of(run(layer, x)).backward()
    share = 2e-2 if "autocast" in name else 1e-5
    assert worst(gradients(layer), trained(tokens(device=device))) <= allowed(share, device)


def allowed(share: float, device: str) -> float:
    """On a GPU, products in float32 are sums in another order."""
    return max(share, 1e-4) if device.startswith("cuda") else share


@on_both
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_drops_the_same(reentrant: bool, device: str):
    found = []
    for around in (None, functools.partial(checkpoint, use_reentrant=reentrant)):
        layer = Layer(functools.partial(ours, dropout_p=0.3), around).to(device)
        torch.manual_seed(7)
        loss_of(autocast(as_it_is, layer, tokens(device=device))).backward()
        found.append(gradients(layer))
    assert worst(*found) == 0.0


@on_both
@pytest.mark.parametrize(("scale", "finite"), [(2.0**10, True), (2.0**40, False)])
def test_a_scaler_finds_what_overflows(scale: float, finite: bool, device: str):
    layer = Layer().to(device)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler(device, init_scale=scale)
    with torch.autocast(device, torch.float16):
        loss = loss_of(layer(tokens(device=device)))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (scale if finite else scale / 2)
    assert all(torch.equal(p, before[name]) != finite for name, p in layer.named_parameters())
    assert not finite or worst(gradients(layer), trained(tokens(device=device))) <= 5e-3


class Backwards(TorchDispatchMode):
    """What calls of the backward were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[list[bool]] = []
        self.deterministic: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        said = kwargs or {}
        if func is OPS.attend_backward.default:
            self.wanted.append([*said.get("wanted", (True, True, True, False, False))])
            self.deterministic.append(said.get("deterministic", False))
        return func(*args, **said)


@on_both
@pytest.mark.parametrize("frozen", ["", "q", "kv", "v", "qk", "qkv"])
def test_of_frozen_parameters_nothing_is_computed(frozen: str, device: str):
    layer, x = Layer().to(device), tokens(device=device).detach()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    with Backwards() as calls:
        loss_of(layer(x)).backward()
    assert calls.wanted == ([] if frozen == "qkv" else [[name not in frozen for name in "qkv"] + [False] * 2])
    found, expected = ({n: g for n, g in each.items() if n[0] not in frozen} for each in (gradients(layer), trained(x)))
    assert worst(found, expected) <= allowed(1e-5, device)


def test_torchs_deterministic_mode_is_obeyed():
    try:
        with Backwards() as calls:
            for mode in ("default", "warn", "error"):
                torch.set_deterministic_debug_mode(mode)
                loss_of(Layer()(tokens())).backward()
    finally:
        torch.set_deterministic_debug_mode("default")
    assert calls.deterministic == [False, False, True]


#: In a graph torch can't keep the state that its random numbers had.
WITHOUT_DROPOUT = functools.partial(AGAIN, preserve_rng_state=False)


class Step:
    """Forward, gradients and an optimizer's step, on tensors that stay where they are."""

    def __init__(self, around: Callable[..., Any] | None, starts: list[list[int]], **said: Any) -> None:
        self.x = tokens(16, 1, "cuda").detach()
        self.starts = torch.tensor(starts[0], dtype=torch.int32, device="cuda")
        self.layer = Layer(functools.partial(self.attend, said), around).cuda()
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)

    def attend(self, said: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packing = {f"cu_seqlens_{x}": self.starts for x in "qk"} | {f"max_seqlen_{x}": 16 for x in "qk"}
        return attention(q[0], k[0], v[0], causal=True, deterministic=True, **packing, **said)[None]

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(self.layer(self.x))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def graphed(step: Step) -> Callable[[], Tensor]:
    """As torch's guide has it: three steps on a stream of their own, then one that is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    step.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss.clone()

    return replay


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("around", [None, WITHOUT_DROPOUT], ids=["plain", "checkpoint"])
def test_a_graph_of_a_whole_step_trains_as_steps_do(around: Callable[..., Any] | None):
    starts = [[0, 5, 16], [0, 16, 16], [0, 9, 16], [0, 0, 16]]
    captured, stepped = Step(around, starts), Step(around, starts)
    replay = graphed(captured)
    for _ in range(3):
        stepped()
    for number, now in enumerate(starts):  # other tokens, and other lengths of the documents that are packed
        for each in (captured, stepped):
            each.x.copy_(tokens(16, 1).detach().roll(number, 1))
            each.starts.copy_(torch.tensor(now, dtype=torch.int32))
        torch.testing.assert_close(replay(), stepped(), rtol=1e-3, atol=1e-5)
    weights = [dict(each.layer.named_parameters()) for each in (captured, stepped)]
    assert worst(*weights) <= 1e-3
    assert worst(weights[0], dict(Layer().cuda().named_parameters())) > 1e-2, "nothing was learned"


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_graph_of_a_step_drops_anew_at_each_replay():
    step = Step(None, [[0, 16]], dropout_p=0.5)
    step.optimizer = torch.optim.SGD(step.layer.parameters(), lr=0.0)
    replay = graphed(step)
    assert len({float(replay()) for _ in range(4)}) == 4


def fsdp(dtype: torch.dtype | None, layer: nn.Module) -> nn.Module:
    from torch.distributed import fsdp

    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    kind = next(layer.parameters()).device.type
    return fsdp.fully_shard(layer, mesh=torch.distributed.init_device_mesh(kind, (2,)), mp_policy=policy)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": nn.parallel.DistributedDataParallel}
if hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6's FSDP2 knows no CPU
    WRAPPED |= {"FSDP2": functools.partial(fsdp, None), "FSDP2, bfloat16": functools.partial(fsdp, torch.bfloat16)}


def in_one_step(wrapped: nn.Module, part: Tensor) -> None:
    loss_of(wrapped(part)).backward()


def accumulated(wrapped: nn.Module, part: Tensor) -> None:
    """Gradients of all but the last micro-batch stay where they are."""
    ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
    for micro, last in zip(part.chunk(2), (False, True), strict=True):
        if not ddp:
            wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        with wrapped.no_sync() if ddp and not last else contextlib.nullcontext():
            (loss_of(wrapped(micro)) / 2).backward()


STYLES: dict[str, tuple[Callable[..., Any] | None, Callable[[nn.Module, Tensor], None]]] = {
    "plain": (None, in_one_step),
    "checkpoint": (AGAIN, in_one_step),
    "accumulated": (None, accumulated),
    "compiled, checkpoint": (AGAIN, lambda net, part: in_one_step(torch.compile(net, backend="aot_eager"), part)),
}


def one_of_two(rank: int, meeting: str, device: str = "cpu") -> None:
    """Half of the batch; gradients are averaged. How far off they are, as a share of the largest, and may be."""
    two_processes.meet(rank, meeting, "nccl" if device.startswith("cuda") else "gloo")
    x = tokens(device=device).detach()
    expected, errors = trained(x), {}
    for name, wrap in WRAPPED.items():
        for style, (around, step) in STYLES.items():
            layer = Layer(ours, around).to(device)
            wrapped = wrap(layer)  # its reducer lives as long as it does
            step(wrapped, x[rank::2])
            whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients(layer).items()}
            errors[f"{name}, {style}"] = worst(whole, expected), allowed(2e-2 if "bfloat16" in name else 1e-5, device)
    assert not (large := {name: error for name, error in errors.items() if not error[0] <= error[1]}), large


def one_of_two_gpus(rank: int, meeting: str) -> None:
    torch.cuda.set_device(rank)
    one_of_two(rank, meeting, f"cuda:{rank}")


#: Where there are two GPUs, a gate's, too.
WITH_NCCL = [pytest.param(one_of_two_gpus, marks=CUDA.marks)] * (torch.cuda.device_count() > 1)


@pytest.mark.parametrize("one", [one_of_two, *WITH_NCCL])
def test_two_processes_average_their_gradients(one: Callable[..., None], tmp_path: Path):
    two_processes.run(one, tmp_path)


# ---- examples/train_gpt.py in seconds: its comparison holds, and notices what is wrong --------------------------


def test_all_ways_learn_the_same_and_a_wrong_kernel_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], printed: Any, refused: Any
):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "examples")
    module = importlib.import_module("train_gpt")
    monkeypatch.setitem(module.SIZES, "tiny", module.Size(1, 2, 16, 64, 4, 40, 2e-2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for few in ("0", "2"):
        assert f"--steps must be 3 or more, got {few}" in refused(module.main, "--steps", few)
    train = functools.partial(module.main, ["--seeds", "0", "1", "--output", str(tmp_path / "result")])
    status, found = train(), json.loads((tmp_path / "result.json").read_text())
    assert [(each["seed"], each["way"]) for each in found["runs"]] == [(s, w) for s in (0, 1) for w in module.WAYS]
    for each in found["runs"]:
        assert len(each["losses"]) == 40 and each["tokens_per_s"] > 0
        assert each["final"] < each["losses"][0] - 1.5  # a byte at random is 5.5 nats
    assert status == 0 and found["between_ways"] < 1e-4 < found["between_seeds"]
    assert (tmp_path / "result.png").stat().st_size > 10_000
    table = capsys.readouterr().out.partition("\n\n")[2]
    parts = [tmp_path / "cut.json", tmp_path / "again.json"]  # one that was cut, and what was run again
    for path, runs in zip(parts, (found["runs"][:5], found["runs"][3:]), strict=True):
        path.write_text(json.dumps({**found, "runs": runs}))
    joined = printed(module.main, "--from-json", *parts, "--output", tmp_path / "joined").out
    assert joined.strip() == table.strip()
    assert (tmp_path / "joined.png").exists() and json.loads((tmp_path / "joined.json").read_text()) == found
    parts[1].write_text(json.dumps({**found, "steps": 41}))
    with pytest.raises(SystemExit, match="differ in more than their runs"):
        module.main(["--from-json", *map(str, parts)])

    def wrong(q: Any, k: Any, v: Any, **said: Any) -> Any:
        return attention(q, k, v, **said) + 9 * ("cu_seqlens_q" in said) * torch.randn_like(q)

    monkeypatch.setattr(cutlass_fmha, "attention", wrong)
    status, found = train(), json.loads((tmp_path / "result.json").read_text())
    assert status == 1 and found["between_ways"] > found["between_seeds"]
