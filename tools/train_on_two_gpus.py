"""The gradient under DDP and FSDP2 with NCCL on two GPUs: the test that gloo runs on the CPU, and a record.

    python tools/train_on_two_gpus.py OUT.json

Each process has half of a batch; what they average is held against the whole batch with torch's attention on
one GPU. Writes each setting's largest error, as a share of the largest element; fails where it is too large.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import test_training
import torch
import two_processes

from cutlass_fmha.bench import machine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("result", type=Path, metavar="OUT.json")
    options = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        print(f"two GPUs are needed, and there are {torch.cuda.device_count()}")
        return 1
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        two_processes.run(test_training.one_of_two_gpus, Path(folder))
        both = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    errors = {name: max(of_one[name] for of_one in both) for name in both[0]}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    content = {"machine": machine.describe(0), "gpus": 2, "nccl": nccl, "errors": errors}
    options.result.write_text(json.dumps(content, indent=1) + "\n")
    for name, error in errors.items():
        print(f"{name:<32} {error:.1e}")
    print(f"NCCL {nccl}, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
