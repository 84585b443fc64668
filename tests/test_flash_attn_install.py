"""``import flash_attn`` finds this package, and scripts written for it run unmodified."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import randn
from torch import Tensor

from cutlass_fmha import flash_attn
from cutlass_fmha.flash_attn.layers import rotary


def run(script: str, *path: Path) -> list[str]:
    """What it prints, line by line, in a process of its own: what is imported there is imported nowhere else."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[*map(str, path)]!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_install_answers_everyone_who_asks_and_is_reversible():
    def installed() -> bool:
        return "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None

    assert not installed()
    flash_attn.install()
    flash_attn.install()
    try:
        for name in (
            "flash_attn_func", "bert_padding.unpad_input", "layers.rotary.RotaryEmbedding",
            "flash_attn_interface._wrapped_flash_attn_backward", "layers.rotary.apply_rotary_emb",
            "ops.activations.swiglu", "ops.rms_norm.RMSNorm", "ops.triton.layer_norm.rms_norm_fn",
        ):  # fmt: skip
            found, ours = (pkgutil.resolve_name(f"{root}.{name}") for root in ("flash_attn", flash_attn.__name__))
            assert found is ours
        assert flash_attn.__spec__.name == "cutlass_fmha.flash_attn" and sys.modules["flash_attn"] is flash_attn
        for name in ("flash_attn", "flash-attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert "flash_attn" in importlib.metadata.packages_distributions()
        specs = [importlib.util.find_spec(f"flash_attn{part}") for part in ("", ".layers.rotary", ".losses")]
        assert [spec is not None for spec in specs] == [True, True, False]
        with pytest.raises(ModuleNotFoundError, match="flash_attn.modules"):
            importlib.import_module("flash_attn.modules.mha")
    finally:
        flash_attn.uninstall()
    flash_attn.uninstall()
    assert not installed() and not any(name.startswith("flash_attn") for name in sys.modules)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_an_installed_one_is_replaced_only_when_told(tmp_path: Path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    found = run(
        "from cutlass_fmha.flash_attn import install, uninstall\n"
        "try: install()\n"
        "except ImportError as error: print(error)\n"
        "import flash_attn; print(flash_attn.real)\n"
        "install(replace=True)\n"
        "import flash_attn as ours; print(ours.__version__, hasattr(ours, 'real'))\n"
        "uninstall()\n"
        "import flash_attn as theirs; print(theirs is flash_attn)\n",
        tmp_path,
    )
    assert found[0].startswith("flash_attn is installed here: remove it, or take") and found[1:] == [
        "True",
        "2.8.3 False",
        "True",
    ]


GENERATION = """
import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

project = torch.nn.Parameter(torch.randn(64, 3 * 64) / 8)
q, k, v = (torch.randn(2, 17, 64) @ project).unflatten(-1, (3, 4, 16)).unbind(2)
angles = torch.outer(torch.arange(64), 10000.0 ** -(torch.arange(8) / 8)).to(q)
cos, sin = angles.cos(), angles.sin()
k_cache, v_cache = torch.zeros(2, 2, 64, 4, 16).unbind(0)
lengths, steps = torch.zeros(2, dtype=torch.int32), []
for new in (slice(0, 5), *(slice(i, i + 1) for i in range(5, 17))):
    steps.append(flash_attn_with_kvcache(
        q[:, new], k_cache, v_cache, k[:, new], v[:, new], rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        causal=True, rotary_interleaved=False,
    ))
    assert not steps[-1].requires_grad
    lengths += steps[-1].shape[1]
q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
whole = flash_attn_func(q, k, v, causal=True)
print(whole.shape, (torch.cat(steps, 1) - whole).abs().max().item() / whole.abs().max().item())
"""

ENCODER = """
import torch
from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input

batch, seqlen, heads, head_dim = 3, 17, 4, 32
layers = torch.nn.ModuleList(torch.nn.Linear(heads * head_dim, 3 * heads * head_dim) for _ in range(2))
mask = torch.arange(seqlen) < torch.tensor([17, 5, 0])[:, None]
hidden = torch.randn(batch, seqlen, heads * head_dim).requires_grad_()

def flash(x, p=0.0):
    x, indices, cu_seqlens, max_seqlen, *_ = unpad_input(x, mask)
    for layer in layers:
        qkv = layer(x).unflatten(-1, (3, heads, head_dim))
        x = x + flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=p).flatten(-2)
    return pad_input(x, indices, batch, seqlen)

def eager(x):
    for layer in layers:
        q, k, v = layer(x).unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * head_dim**-0.5).masked_fill(~mask[:, None, None], -1e4)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return x * mask[..., None]

results = []
for call in (flash, eager):
    out = call(hidden)
    results.append((out, *torch.autograd.grad(out.pow(2).sum(), (hidden, *layers.parameters()))))
worst = max((x - y).abs().max().item() / y.abs().max().item() for x, y in zip(*results))
print(flash(hidden, 0.1).shape, worst)
"""

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
ids, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
mask[1, :3] = 0
found = []
for name in ("flash_attention_2", "eager"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        found.append(model(ids, attention_mask=mask).logits[mask.bool()])
print(found[0].shape, (found[0] - found[1]).abs().max().item() / found[1].abs().max().item())
"""

DIFFUSERS = """
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

q, k, v = torch.randn(3, 2, 7, 4, 32)
mask = torch.arange(7) < torch.tensor([[7], [4]])
flash = dispatch_attention_fn(q, k, v, backend="flash", is_causal=True)
flash = torch.stack((flash, dispatch_attention_fn(q, k, v, backend="flash_varlen", attn_mask=mask)))
native = dispatch_attention_fn(q, k, v, backend="native", is_causal=True)
native = torch.stack((native, dispatch_attention_fn(q, k, v, backend="native", attn_mask=mask)))
print(flash.shape, (flash - native).abs().max().item())
"""

#: What each needs, its calls of ours, and the shape that it prints.
SCRIPTS = {
    "generation": (GENERATION, None, 14, [2, 17, 4, 16]),
    "encoder": (ENCODER, None, 4, [3, 17, 128]),
    "transformers, flash_attention_2": (LLAMA, "transformers", 2, [15, 50]),
    "diffusers, flash": (DIFFUSERS, "diffusers", 2, [2, 2, 7, 4, 32]),
}


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", "float32", 1e-5), pytest.param("cuda", "float16", 1e-2, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_written_for_it_runs_unmodified(name: str, device: str, dtype: str, tolerance: float, tmp_path: Path):
    """As it is started: on a device, in a dtype, from a seed. The last number that it prints is its error."""
    script, package, calls, shape = SCRIPTS[name]
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "script.py").write_text(script)
    begin = "import runpy, torch; from cutlass_fmha.flash_attn import install; install()\n"
    begin += "from cutlass_fmha.demo.measure import CountCalls\n"
    if device == "cpu":  # transformers would not ask for flash_attn
        begin += "torch.cuda.is_available = lambda: True\n"
    begin += f"torch.set_default_device({device!r}); torch.set_default_dtype(torch.{dtype}); torch.manual_seed(0)\n"
    begin += f"with CountCalls() as counter: runpy.run_path({str(tmp_path / 'script.py')!r})\n"
    *_, found, counted = run(f"{begin}print(counter.calls)", tmp_path)
    printed, _, error = found.rpartition(" ")
    assert (printed, int(counted)) == (f"torch.Size({shape})", calls) and float(error) <= tolerance


def test_a_compiled_call_is_whole():
    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        qkv = rotary.apply_rotary_emb_qkv_(qkv * 1.0, cos, sin, num_heads_q=4)
        return flash_attn.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True, window_size=(3, 0), softcap=9.0)

    def drop(x: Tensor, *_: Tensor) -> Any:
        return flash_attn.flash_attn_func(x, x, x, 0.3, return_attn_probs=True)

    given = randn(2, 5, 8, 16), torch.rand(9, 4), torch.rand(9, 4)
    for each in (call, drop):
        found = []
        for function in (torch.compile(each, fullgraph=True, backend="aot_eager"), each):
            torch.manual_seed(0)
            found.append(function(*given))
        torch.testing.assert_close(*found, rtol=0, atol=0)
