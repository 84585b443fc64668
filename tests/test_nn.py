"""cutlass_fmha.nn: torch's conventions, Llama's names, and torch's numbers."""

import copy

import pytest
import torch
from oracle_helpers import rotate
from torch.nn import functional

from cutlass_fmha import nn, rms_norm


def close(found: object, wanted: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def check_with_gradients(layer: torch.nn.Module, x: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> None:
    close(found, wanted)
    close(*(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, wanted)))
    found.sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())


@pytest.mark.parametrize(("shape", "offset"), [((24,), 0.0), ((24,), 1.0), ((3, 8), 0.0)])
def test_rms_norm_is_torchs(shape: tuple[int, ...], offset: float):
    ours, theirs = nn.RMSNorm(shape, weight_offset=offset, dtype=torch.float32), torch.nn.RMSNorm(shape)
    x, residual = torch.randn(2, 2, 5, *shape).unbind()
    close(ours(x), theirs(x))  # as they are made
    with torch.no_grad():
        theirs.weight.normal_()
        ours.weight.copy_(theirs.weight - offset)
    close(ours(x), theirs(x))
    close(ours(x, residual), (theirs(x + residual), x + residual))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    close(nn.RMSNorm(shape, 1e-5, False)(x), torch.nn.RMSNorm(shape, 1e-5, False)(x))


def test_rms_norm_takes_dtypes_and_has_an_epsilon_as_torchs():
    for dtype, of_weight in (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "bfloat16")):
        x = (1e-3 * torch.randn(5, 24)).to(getattr(torch, dtype))  # so that the epsilon counts
        ours, theirs = (kind(24, dtype=getattr(torch, of_weight)) for kind in (nn.RMSNorm, torch.nn.RMSNorm))
        torch.testing.assert_close(ours(x), torch.rms_norm(x, (24,), theirs.weight.to(x.dtype)))
        wide = nn.RMSNorm((3, 8), dtype=theirs.weight.dtype)(x.view(5, 3, 8), x.view(5, 3, 8))[1]
        assert wide.dtype == x.dtype
    with pytest.raises(ValueError, match="weight must have x's dtype float32, got bfloat16"):
        rms_norm(x.float(), ours.weight)
    norm, layer, x = nn.RMSNorm(32), nn.Attention(32, 4, qk_norm=True), torch.randn(1, 5, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = norm(layer(x), residual=x)
    assert normed.dtype == total.dtype == torch.float32
    torch.autograd.grad(normed.sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_takes_and_gives_a_checkpoints_names(activation: str, bias: bool):
    torch.manual_seed(0)
    made, other = (nn.SwiGLU(16, 24, 8, bias, activation=activation) for _ in range(2))
    parts = made.state_dict()
    assert {*parts} == {f"{p}_proj.{k}" for p in ("gate", "up", "down") for k in ("weight", "bias")[: 1 + bias]}
    assert parts["gate_proj.weight"].data_ptr() == made.gate_up_weight.data_ptr()
    other.load_state_dict(parts)
    x = torch.randn(2, 5, 16, requires_grad=True)
    gate, up = (functional.linear(x, parts[f"{p}_proj.weight"], parts.get(f"{p}_proj.bias")) for p in ("gate", "up"))
    gates = {"silu": functional.silu, "gelu": functional.gelu}
    gated = gates.get(activation, lambda g: functional.gelu(g, approximate="tanh"))(gate) * up
    wanted = functional.linear(gated, parts["down_proj.weight"], parts.get("down_proj.bias"))
    check_with_gradients(other, x, other(x), wanted)


def test_a_checkpoint_that_does_not_fit_is_refused():
    made = torch.nn.ModuleDict({"mlp": nn.SwiGLU(4, 6), "attn": nn.Attention(8, 4, 2)})
    state = made.state_dict()
    assert [*state][:3] == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    gate, up, q = (f"{name}_proj.weight" for name in ("mlp.gate", "mlp.up", "attn.q"))
    for given, sentence in (
        ({key: x for key, x in state.items() if key != up}, rf'Missing key\(s\) in state_dict: "{up}"'),
        (state | {"mlp.q_proj.weight": state[up]}, 'Unexpected key.*"mlp.q_proj.weight"'),
        (state | {q: state["attn.k_proj.weight"]}, rf"{q} \(4, 8\), not \(8, 8\)"),
        (state | {up: torch.zeros(6, 5), gate: torch.tensor(1.0)}, rf"{gate} \(\), not \(6, 4\), {up} \(6, 5\)"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            made.load_state_dict(given)
    shard, kept = {up: torch.ones(6, 4)}, state[gate].clone()
    assert up not in copy.deepcopy(made).load_state_dict(shard, strict=False).missing_keys
    made.load_state_dict(shard, strict=False)  # a part alone, as in one of a checkpoint's files
    assert torch.equal(made.mlp.gate_up_weight, torch.cat([kept, shard[up]]))
    with pytest.raises(RuntimeError, match=f"{gate} is needed with {up}"):
        copy.deepcopy(made).to("meta").load_state_dict(shard, strict=False, assign=True)
    normed = torch.nn.utils.parametrizations.weight_norm(nn.SwiGLU(4, 6), "gate_up_weight")
    normed.load_state_dict(normed.state_dict())
    made.load_state_dict(state, assign=True)
    copy.deepcopy(made).to(torch.float64).load_state_dict(state)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_rows_have_positions_of_their_own_and_a_cache_its_padding(qk_norm: bool):
    layer, table = (nn.Attention(32, 4, 2, qk_norm=qk_norm, eps=None if qk_norm else 1e-6), nn.rotary_table(8, 8))
    x, starts = torch.randn(5, 32), torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = layer(x, table, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3)
    close(packed, torch.cat([layer(part[None], table)[0] for part in x.split([2, 3])]))
    cache, found = nn.KVCache(1, 8, 2, 8), []
    for pad in (0, 2):
        cache.lengths.fill_(pad)
        with torch.no_grad():
            found.append(layer(x[None], table, cache, leftpad_k=torch.tensor([pad], dtype=torch.int32)))
    close(*found)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_cache_moves_no_query_and_norms_are_what_their_modules_are(qk_norm: bool):
    layer, table, x = (
        nn.Attention(32, 4, 2, 16, qk_norm=qk_norm, causal=False),
        nn.rotary_table(32, 16),
        torch.randn(1, 7, 32),
    )
    pad = torch.tensor([2], dtype=torch.int32)
    interleaved = {"rotary_interleaved": True, "rotary_seqlens": 3}

    def cached(pads: int = 0, **said: object) -> torch.Tensor:
        cache = nn.KVCache(1, 16, 2, 16)
        cache.lengths.fill_(pads)
        with torch.no_grad():
            return layer(x, table, cache, **said)

    wanted, turned = layer(x, table), cached(**interleaved)
    close([cached(), cached(2, leftpad_k=pad)], [wanted, wanted])
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        close(compiled(x, table, nn.KVCache(1, 16, 2, 16)), wanted)
    close(cached(causal=True), layer(x, table, causal=True))
    assert (turned - wanted).abs().max() > 1e-3
    if qk_norm:
        layer.k_norm.register_forward_hook(lambda *_: None)  # then norms are called
        close([layer(x, table), cached(), cached(**interleaved)], [wanted, wanted, turned])
        layer.q_norm, layer.k_norm = nn.RMSNorm(16, 10.0), nn.RMSNorm(16, 1e-6, weight_offset=1.0)
        q, k = (functional.rms_norm(torch.ones(16), (16,), eps=eps) for eps in (10.0, 1e-6))
        close([y[0, 0, 0] for y in layer._normed(*torch.ones(2, 1, 1, 2, 16))], [q, k])
        assert (layer(x, table) - wanted).abs().max() > 1e-3
    cache = nn.KVCache(1, 16, 2, 16)
    with pytest.raises(ValueError, match="softcap"):
        layer(x, table, cache, softcap=-1.0)
    with pytest.raises(TypeError, match="dropout_p"):
        nn.Attention(32, 4, 2, 16, qk_norm=qk_norm)(x, table, cache, dropout_p=0.5)
    assert not cache.k.any()


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_a_sequence_has_the_length_of_its_entry(qk_norm: bool, causal: bool):
    layer, table = nn.Attention(32, 4, 2, qk_norm=qk_norm, causal=causal), nn.rotary_table(16, 8)
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for entries in ([1, 2, 0], [3, 5], [3]):
        cache, x, index = nn.KVCache(6, 16, 2, 8), torch.randn(6, 7, 32), torch.tensor(entries, dtype=torch.int32)
        for n in range(6):  # each gets another length
            layer(x[n, None, : n + 1], table, cache, cache_batch_idx=torch.tensor([n], dtype=torch.int32))
        found = step(torch.stack([x[n, n + 1 : n + 2] for n in entries]), table, cache, cache_batch_idx=index)
        close(found, torch.stack([layer(x[n, None, : n + 2], table)[0, -1:] for n in entries]))
        assert cache.lengths.tolist() == [n + 1 + (n in entries) for n in range(6)]
    with pytest.raises(ValueError, match="cache_batch_idx"):
        layer(x[:1], table, cache, cache_batch_idx=index + 9)


def test_a_product_that_is_another_module_is_called():
    layer, x = nn.SwiGLU(8, 16), torch.randn(2, 8)
    layer.down_proj = torch.nn.Linear(16, 8)
    torch.nn.init.constant_(layer.down_proj.bias, 100.0)
    assert layer(x).min() > 50.0
    layer.down_proj = torch.nn.Linear(16, 8, bias=False)
    layer.down_proj.register_forward_hook(lambda module, given, out: out + 100.0)
    assert layer(x).min() > 50.0


def dense(layer: nn.Attention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    state = layer.state_dict()

    def projected(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, state[f"{name}_proj.weight"], state.get(f"{name}_proj.bias"))

    def heads(name: str) -> torch.Tensor:
        y = projected(name, x).unflatten(-1, (-1, layer.head_dim))
        if f"{name}_norm.weight" in state:
            y = functional.rms_norm(y, (layer.head_dim,), state[f"{name}_norm.weight"], 1e-6)
        if name != "v":
            y = rotate(y, cos, sin, torch.arange(x.shape[1]).expand(x.shape[:2]), False).to(y)
        return y.transpose(1, 2)

    out = functional.scaled_dot_product_attention(*map(heads, "qkv"), is_causal=True, enable_gqa=True)
    return projected("o", out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_is_dense_attention_whole_and_step_by_step(qk_norm: bool, bias: bool):
    torch.manual_seed(0)
    layer = nn.Attention(32, 4, 2, 16, bias, out_bias=False, qk_norm=qk_norm)
    if qk_norm:
        torch.nn.init.normal_(layer.q_norm.weight)
    names = {"q_proj", "k_proj", "v_proj", "o_proj"} | ({"q_norm", "k_norm"} if qk_norm else set())
    assert {key.partition(".")[0] for key in layer.state_dict()} == names
    table = nn.rotary_table(16, 16, 100.0)
    x = torch.randn(2, 7, 32, requires_grad=True)
    wanted = dense(layer, x, *table)
    check_with_gradients(layer, x, layer(x, table), wanted)
    cache = nn.KVCache(2, 16, 2, 16)
    with torch.no_grad():
        steps = [layer(part, table, cache) for part in x.split([4, 1, 1, 1], 1)]
    close(torch.cat(steps, 1), wanted)
    assert cache.lengths.tolist() == [7, 7] and cache.lengths.dtype == torch.int32


def test_dropout_is_for_training_and_arguments_go_on():
    layer, x = nn.Attention(32, 4, dropout=0.5), torch.randn(1, 64, 32)
    wide = layer.eval()(x)
    close(wide, layer(x))
    assert not torch.equal(layer.train()(x), layer(x))
    narrow = layer.eval()(x, window=(3, 0))
    close(wide[:, :4], narrow[:, :4])
    assert (wide - narrow)[:, 4:].abs().max() > 1e-3
