"""``python -m cutlass_fmha``: what this installation is, what it would run, how fast and what for."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.eligibility import no_rows
from cutlass_fmha.dispatch.problem import FEATURES
from cutlass_fmha.dispatch.table import backward, this_build


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status: 0, or 1 when nothing can run an explained problem."""
    argv = sys.argv[1:] if argv is None else argv
    parser, subparsers = _parsers()
    if not argv:
        parser.print_help()
        return 0
    # These have options of their own, which their modules know: they are imported when asked for only.
    if argv[0] == "bench":
        from cutlass_fmha import bench

        return bench.main(argv[1:]) or 0
    if argv[0] == "demo":
        from cutlass_fmha import demo

        return demo.main(argv[1:]) or 0
    if argv[0] == "calibrate":
        from cutlass_fmha.calibrate import command

        return command.main(argv[1:])
    if argv[0] == "memory":
        from cutlass_fmha.memory import command as memory

        return memory.main(argv[1:])
    arguments = parser.parse_args(argv)
    try:
        return _info(arguments) if arguments.command == "info" else _explain(arguments)
    except (TypeError, ValueError, RuntimeError) as error:  # no row; an old driver
        subparsers[arguments.command].error(str(error))


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m cutlass_fmha", description=cutlass_fmha.__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    info = commands.add_parser("info", help="versions, devices, and the rows of this build")
    info.add_argument("--rows", action="store_true", help="list every row, too")

    explain = commands.add_parser("explain", help="which kernel runs a problem, and why")
    explain.add_argument(
        "--shape", required=True, type=_sizes, metavar="B,S,H,D", help="batch, seqlen_q, num_heads, head_dim"
    )
    explain.add_argument("--seqlen-k", type=int, metavar="S", help="number of keys (default: seqlen_q)")
    explain.add_argument(
        "--kv-heads", type=int, metavar="H", help="heads of key and value (default: num_heads)"
    )
    explain.add_argument("--dtype", default="bfloat16", help="float16 or bfloat16 (default: %(default)s)")
    explain.add_argument(
        "--causal",
        nargs="?",
        const="bottom-right",
        default="none",
        choices=("none", "top-left", "bottom-right"),
        help="causal mask; bottom-right when nothing else is said",
    )
    explain.add_argument(
        "--alignment",
        type=int,
        default=16,
        metavar="BYTES",
        help="of pointers and strides (default: %(default)s)",
    )
    explain.add_argument(
        "--device",
        metavar="NAME",
        help="cuda:0, cpu, sm_89, sm_89:<SM count>, "
        + ", ".join(devices.PRESETS)
        + " (default: cuda:0, or cpu)",
    )
    explain.add_argument("--head-dim-v", type=int, metavar="D", help="of value and output, if another one")
    explain.add_argument(
        "--features",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAMES",
        help="what comes with the problem, separated by commas: " + ", ".join(FEATURES),
    )
    explain.add_argument("--row", metavar="ROW", help="force this row")
    explain.add_argument("--backward", action="store_true", help="which kernel computes the gradients")
    explain.add_argument(
        "--all",
        action="store_true",
        help="list rows for other architectures, dtypes and head dims one by one",
    )
    explain.add_argument(
        "--measure", action="store_true", help="also time every eligible row on this machine's GPU"
    )

    commands.add_parser("calibrate", help="measure what the rows cost on this GPU (calibrate --help)")
    commands.add_parser("memory", help="what attention allocates (memory --help for its options)")
    commands.add_parser("bench", help="time the kernels against torch's (bench --help for its options)")
    commands.add_parser("demo", help="sentence embeddings on real text (demo --help for its options)")
    return parser, {"info": info, "explain": explain}


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 4 or min(sizes) < 0:
        raise argparse.ArgumentTypeError(
            f"four sizes batch,seqlen_q,num_heads,head_dim are needed, got {text!r}"
        )
    return sizes


def _explain(arguments: argparse.Namespace) -> int:
    explanation = cutlass_fmha.explain(
        shape=arguments.shape,
        seqlen_k=arguments.seqlen_k,
        num_heads_kv=arguments.kv_heads,
        dtype=arguments.dtype,
        causal=arguments.causal,
        alignment=arguments.alignment,
        device=arguments.device,
        row=arguments.row,
        measure=arguments.measure,
        all_rows=arguments.all,
        head_dim_v=arguments.head_dim_v,
        features=arguments.features,
        backward=arguments.backward,
    )
    print(explanation)
    runs = explanation.winner is not None or (explanation.device is None and arguments.row is None)
    return 0 if runs else 1


def _info(arguments: argparse.Namespace) -> int:
    info = _C.build_info()
    print(f"cutlass_fmha {cutlass_fmha.__version__}, torch {torch.__version__}")
    if info["cuda"]:
        print(f"built with CUDA {info['cuda_version']} and CUTLASS {info['cutlass_version']}")
    else:
        print("built without CUDA (CUTLASS_FMHA_CUDA=OFF): the CPU backend only")
    build = this_build()
    counts = Counter(row.arch for row in build.rows)
    for arch, compiled_for in build.architectures.items():
        print(f"sm_{arch}: {counts[arch]} rows, compiled for sm_{compiled_for}")
    if arguments.rows:
        for row in (*build.rows, *backward().rows):
            print(f"  {row.name}: {row.smem_bytes} bytes of shared memory, {row.alignment}-byte alignment")
    _print_devices()
    return 0


def _print_devices() -> None:
    driver = _C.driver_version()
    print(f"driver: supports CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "driver: none")
    try:
        count = _C.device_count()
    except RuntimeError as error:  # a driver that is too old: the rest of the information is still true
        print(f"devices: none, {error}")
        return
    if count == 0:
        print("devices: none; CPU tensors are computed by the CPU backend")
    for index in range(count):
        device = devices.of_index(index)
        arch = devices.rows_arch(device, this_build().architectures)
        nothing = no_rows(device)
        print(f"cuda:{index}: {device}, " + (nothing or f"takes the sm_{arch} rows"))
        if nothing is None:
            print(f"        costs of rows: {store.for_device(device).origin}")


if __name__ == "__main__":
    sys.exit(main())
