"""Cases, and a result of them, as other benchmarks read them, so that others can run them again.

Formats, as of: KernelBench's problem files (2026-03), robust-kbench's task directories (2025-11) and
flashinfer-bench's trace set (2026-04). ``rbk_config.yaml`` and ``rbk_report`` are none of robust-kbench's own
files: they name runners and shapes, and hold baseline, candidate and peer beside each other.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import report, timing
from .cases import Case
from .contenders import INSTALLED, OURS, PEERS, TITLES
from .report import Result
from .runner import BUDGET_S

Files = dict[str, str]
"""Path below the directory -> content."""

FORWARD = """\
    group = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    scores = q.float().transpose(1, 2) @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
{mask}\
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).to(q.dtype)
"""
MASK = """\
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
"""


class Kind(NamedTuple):
    """What cases share that differ in batch and lengths alone."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def name(self) -> str:
        words = [f"gqa_h{self.num_heads}_kv{self.num_heads_kv}_d{self.head_dim}", self.dtype]
        return "_".join([*words, *(["causal"] if self.causal else [])])

    @property
    def forward(self) -> str:
        return FORWARD.format(mask=MASK if self.causal else "")


def exportable(case: Case) -> bool:
    """Whether it is attention of q, k and v alone; masks, lengths and gradients have no place there."""
    return not (case.featured or case.backward)


def kinds(cases: Iterable[Case]) -> dict[Kind, list[Case]]:
    found: dict[Kind, list[Case]] = {}
    for case in cases:
        kind = Kind(case.num_heads, case.num_heads_kv, case.head_dim, case.dtype, case.causal)
        found.setdefault(kind, []).append(case)
    return found


def write(name: str, cases: list[Case], result: Result | None, directory: Path) -> tuple[list[str], list[str]]:
    """Writes FORMATS[name]. Returns the paths, and the names of cases that the format has no place for."""
    files = FORMATS[name]([case for case in cases if exportable(case)], result)
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(content, encoding="utf-8")
    return list(files), [case.name for case in cases if not exportable(case)]


# ---- KernelBench -------------------------------------------------------------------------------------------

PROBLEM = '''\
import torch
import torch.nn as nn


class Model(nn.Module):
    """Scaled dot-product attention, {label}."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, {arguments})


def get_inputs():
    shapes = ({query}, {key}, {key})
    return [torch.randn(*shape, dtype=torch.{dtype}) for shape in shapes]


def get_init_inputs():
    return []
'''
SOLUTION = """\
import cutlass_fmha
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cutlass_fmha.scaled_dot_product_attention(q, k, v, {arguments})
"""


def kernelbench(cases: list[Case], result: Result | None) -> Files:
    """A problem a case, and this package as its solution."""
    files = {}
    for number, case in enumerate(cases, 1):
        grouped = case.num_heads != case.num_heads_kv
        said = {
            "arguments": f"is_causal={case.causal}, enable_gqa={grouped}",
            "label": case.label,
            "query": (case.batch, case.num_heads, case.seqlen_q, case.head_dim),
            "key": (case.batch, case.num_heads_kv, case.seqlen_k, case.head_dim),
            "dtype": case.dtype,
        }
        name = f"level1/{number}_{case.name.replace('-', '_')}.py"
        files[f"KernelBench/{name}"] = PROBLEM.format(**said)
        files[f"solutions/{name}"] = SOLUTION.format(**said)
    return files


# ---- robust-kbench -----------------------------------------------------------------------------------------

TASK = '''\
import math

import torch
import torch.nn as nn


def forward_fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """
    Computes scaled dot-product attention{causal}, softmax(q k^T / sqrt(head_dim)) v, of {heads} heads of
    queries that share {heads_kv} of keys and values.

    Args:
        q (torch.Tensor): [batch, seqlen_q, {heads}, {head_dim}], {dtype}
        k, v (torch.Tensor): [batch, seqlen_k, {heads_kv}, {head_dim}]

    Returns:
        torch.Tensor: as q
    """
{forward}

class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fn=forward_fn) -> torch.Tensor:
        return fn(q, k, v)


def get_inputs(batch_size: int = 1, seqlen_q: int = 128, seqlen_k: int = 128):
    q = torch.randn(batch_size, seqlen_q, {heads}, {head_dim}, dtype=torch.{dtype})
    k, v = (torch.randn(batch_size, seqlen_k, {heads_kv}, {head_dim}, dtype=torch.{dtype}) for _ in range(2))
    return [q, k, v]


input_names = ["q", "k", "v"]
'''


def robust_kbench(cases: list[Case], result: Result | None) -> Files:
    """A task for each kind of case; runners and shapes; of a result, baseline, candidate and peer."""
    files: Files = {}
    shapes: list[dict[str, object]] = []
    for kind, same in kinds(cases).items():
        task = f"tasks/{kind.name}"
        said = {"heads": kind.num_heads, "heads_kv": kind.num_heads_kv, "head_dim": kind.head_dim}
        causal = ", causal" if kind.causal else ""
        text = TASK.format(**said, dtype=kind.dtype, causal=causal, forward=kind.forward)
        inputs = [{"batch_size": c.batch, "seqlen_q": c.seqlen_q, "seqlen_k": c.seqlen_k} for c in same]
        config: dict[str, Any] = {
            f"{many}_{of}_configs": [{}] for many in ("single", "multi") for of in ("init", "shared")
        }
        config |= {"single_input_configs": inputs[:1], "multi_input_configs": inputs}
        files |= {f"{task}/func_forward.py": text, f"{task}/config_forward.json": _json(config)}
        shapes += [
            {"name": c.name, "task": task, **kind._asdict(), **each} for c, each in zip(same, inputs, strict=True)
        ]
    files["rbk_config.yaml"] = rbk_config(shapes, [case.name for case in cases])
    if result is not None:
        found = three_ways(result)
        files |= {"rbk_report.json": _json(found), "rbk_report.md": rbk_markdown(found)}
    return files


def rbk_config(shapes: list[dict[str, object]], names: list[str]) -> str:
    """Runners and shapes as YAML, each a line of JSON, which is YAML, too."""
    roles = {OURS: "candidate", **dict.fromkeys(PEERS, "baseline"), **dict.fromkeys(INSTALLED, "peer")}
    runners = [{"name": name, "role": role, "title": TITLES[name]} for name, role in roles.items()]
    measured = {"percentiles": [50, 90], "seconds": BUDGET_S, "rounds": timing.ROUNDS, "cuda_graphs": True}
    command = "cutlass-fmha bench --json FILE --preset " + " ".join(names)
    lines = ["name: cutlass_fmha", f"command: {json.dumps(command)}", f"measurement: {json.dumps(measured)}"]
    for title, entries in (("runners", runners), ("shapes", shapes)):
        lines += [f"{title}:", *(f"  - {json.dumps(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


FIELDS = ("p50_us", "p90_us", "tflops", "tbytes_per_s", "max_abs_error", "mean_abs_error", "error_ratio")


def three_ways(result: Result) -> dict[str, Any]:
    """Of each case this package, the first of torch's kernels that ran, and the fastest other one."""
    rows = []
    for case in result["cases"]:
        ran = {name: entry for name, entry in case["results"].items() if entry["status"] == "ok"}
        baseline = next((name for name in ("flash", "efficient", "cudnn") if name in ran), None)
        others = [name for name in ran if name in {**PEERS, **INSTALLED} and name != baseline]
        exact = [name for name in others if float(ran[name].get("error_ratio", 0.0)) <= 1.0]
        peer = min(exact, key=lambda name: float(ran[name]["p50_us"]), default=None)
        names = {"baseline": baseline, "candidate": OURS if OURS in ran else None, "peer": peer}
        row: dict[str, Any] = {"case": case["name"], "label": case["label"]}
        for role, name in names.items():
            fields = {} if name is None else {key: ran[name][key] for key in FIELDS if key in ran[name]}
            row[role] = None if name is None else {"runner": name, "title": TITLES[name], **fields}
            if role != "candidate":
                row[f"speedup_to_{role}"] = None if name is None else report.speedup(case, name)
        if OURS not in ran:
            row["reason"] = case["results"][OURS]["reason"]
        rows.append(row)
    means = {}
    for role in ("baseline", "peer"):
        ratios = [row[f"speedup_to_{role}"] for row in rows if row[f"speedup_to_{role}"] is not None]
        means[role] = report.geometric_mean(ratios) if ratios else None
    return {"machine": result["machine"], "method": result["method"], "mean_speedup": means, "results": rows}


def rbk_markdown(found: dict[str, Any]) -> str:
    machine = found["machine"]
    headings = ["case", "baseline, us", "candidate, us", "peer, us", "to baseline", "to peer"]
    lines = [
        f"# cutlass_fmha {machine['package']} on {machine['gpu']}",
        "",
        f"torch {machine['torch']}, driver {machine['driver']}, commit {machine['commit'] or 'unknown'}, "
        f"{machine['date']}. p50; 'to X' 1.20x: X takes 1.20 times as long as the candidate.",
        "",
    ]
    rows = []
    for row in found["results"]:
        roles = (row["baseline"], row["candidate"], row["peer"])
        times = ["-" if x is None else f"{report.microseconds(x['p50_us'])} ({x['title']})" for x in roles]
        times[1] = times[1].partition(" (")[0] if row["candidate"] else f"unsupported: {row['reason']}"
        rows.append([row["label"], *times, *(_ratio(row[f"speedup_to_{role}"]) for role in ("baseline", "peer"))])
    means = [_ratio(found["mean_speedup"][role]) for role in ("baseline", "peer")]
    return "\n".join([*lines, *report.table(headings, [*rows, ["geometric mean", "", "", "", *means]]), ""])


def _ratio(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}x"


# ---- flashinfer-bench --------------------------------------------------------------------------------------

RUN = """\
import cutlass_fmha


def run(q, k, v):
    return cutlass_fmha.attention(q, k, v, causal={causal})
"""


def flashinfer_bench(cases: list[Case], result: Result | None) -> Files:
    """A trace set: a definition for each kind of case, its workloads, and this package as a solution."""
    files = {}
    for kind, same in kinds(cases).items():
        axes: dict[str, dict[str, object]] = {name: {"type": "var"} for name in ("batch", "seqlen_q", "seqlen_k")}
        sizes = {"num_qo_heads": kind.num_heads, "num_kv_heads": kind.num_heads_kv, "head_dim": kind.head_dim}
        axes |= {name: {"type": "const", "value": value} for name, value in sizes.items()}
        query, key = (
            {"shape": ["batch", f"seqlen_{of}", heads, "head_dim"], "dtype": kind.dtype}
            for of, heads in (("q", "num_qo_heads"), ("k", "num_kv_heads"))
        )
        definition = {
            "name": kind.name,
            "op_type": "gqa",
            "description": f"Attention{', causal' if kind.causal else ''}, from cutlass_fmha's benchmark.",
            "axes": axes,
            "constraints": ["seqlen_q == seqlen_k"] if kind.causal else [],
            "inputs": {"q": query, "k": key, "v": key},
            "outputs": {"output": query},
            "reference": f"import math\n\nimport torch\n\n\ndef run(q, k, v):\n{kind.forward}",
        }
        workloads = [
            {
                "definition": kind.name,
                "solution": None,
                "workload": {
                    "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, case.name)),
                    "axes": {"batch": case.batch, "seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k},
                    "inputs": {name: {"type": "random"} for name in "qkv"},
                },
                "evaluation": None,
            }
            for case in same
        ]
        solution = {
            "name": f"cutlass_fmha_{kind.name}",
            "definition": kind.name,
            "author": "cutlass_fmha",
            "spec": {
                "language": "python",
                "target_hardware": ["cuda"],
                "entry_point": "main.py::run",
                "dependencies": [],
                "destination_passing_style": False,
            },
            "sources": [{"path": "main.py", "content": RUN.format(causal=kind.causal)}],
        }
        files[f"definitions/gqa/{kind.name}.json"] = _json(definition)
        files[f"workloads/gqa/{kind.name}.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in workloads)
        files[f"solutions/gqa/{solution['name']}.json"] = _json(solution)
    return files


def _json(content: Any) -> str:
    from cutlass_fmha.cli import output  # not above: another build's benchmark is this one (``against``)

    return output.to_json(content)


FORMATS: dict[str, Callable[[list[Case], Result | None], Files]] = {
    "kernelbench": kernelbench,
    "robust-kbench": robust_kbench,
    "flashinfer-bench": flashinfer_bench,
}
