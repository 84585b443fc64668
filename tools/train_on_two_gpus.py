"""The gradient under DDP and FSDP2 with NCCL on two GPUs: the test that gloo runs on the CPU, and a record.

    python tools/train_on_two_gpus.py --json benchmarks/results/two-gpus-h200.json

What two halves of a batch average is held against the whole. Tells each setting's largest error, as a share of the
largest element; fails where it is too large.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import test_training
import torch
import two_processes

from cutlass_fmha.bench import kept, report


def measure(device: str) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        two_processes.run(test_training.ONE_OF_TWO[device], Path(folder))
        one, other = (json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1))
    settings = {x: {"error": max(one[x][0], other[x][0]), "allowed": allowed} for x, (_, allowed) in one.items()}
    backend = "gloo" if device == "cpu" else f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    seconds = round(time.perf_counter() - begin, 1)
    yield {"processes": 2, "device": device, "backend": backend, "seconds": seconds, "settings": settings}


def text(result: dict[str, Any]) -> str:
    where = result["machine"]["gpu"] if result["device"] == "cuda" else "the CPU"
    rows = [[name, f"{x['error']:.1e}", f"{x['allowed']:.0e}"] for name, x in result["settings"].items()]
    head = f"Gradients of two processes beside those of one: {result['backend']}, {where}, {result['seconds']} s.\n"
    return "\n".join([head, *report.table(["setting", "largest error", "allowed"], rows)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: by gloo; default: cuda")
    kept.add_options(parser)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not options.from_json and torch.cuda.device_count() < 2:
        print(f"two GPUs are needed, and there are {torch.cuda.device_count()}", file=sys.stderr)
        return 1
    kept.run(options, lambda _: measure(options.device), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
