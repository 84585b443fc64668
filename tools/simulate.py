"""Runs rows on the CPU, by their PTX, and compares them with dense fp64: docs/simulation.md.

Builds what it needs in build/simulator; each row then runs the tests' short problems, and all of them so many drawn
ones as asked for. Exit status 1 with the first problem that a row gets wrong, or breaks a rule of the GPU with."""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from building import BuildError, load_extension
from simulator import DIRECTORY, build_extension

#: Example 41's kernels, and what makes dQ of the dS that other rows wrote.
NOT_ALONE = ("wide", "query_product")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="rows to build and run, by name")
    add("--archs", type=int, nargs="+", default=[89, 90, 120], help="whose rows; 80 and 86: sm_89's")
    add("--problems", type=int, default=0, metavar="N", help="problems to draw")
    add("--longest", type=int, default=300, metavar="N", help="sequence of a drawn problem")
    add("--seed", type=int, default=0, help="of the problems and of every order that the GPU leaves open")
    add("--extension", type=Path, metavar="FILE", help="a simulator build that is there already")
    options = parser.parse_args(arguments)
    try:
        extension = options.extension or build_extension(options.rows, DIRECTORY, options.archs)
    except (BuildError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    module = load_extension(extension)
    # Which find the extension in place of an installed one.
    import parity_run
    import torch

    from cutlass_fmha.dispatch import table as tables
    from cutlass_fmha.dispatch.gradients import writes_scores

    torch.set_num_threads(1)  # these problems are small, and others may run beside
    made_for = {89 if arch in (80, 86) else arch for arch in options.archs}
    every = [row for row in (*module.rows(), *module.backward_rows()) if row.family not in NOT_ALONE]
    rows = [row for row in every if re.search(options.rows, row.name) and row.arch in made_for]
    products = tables.query_products()
    for row in [row for row in rows if writes_scores(row) and (row.arch, row.dtype, row.head_dim) not in products]:
        rows.remove(row)
        print(f"{row.name}: left out, as --rows have no row that makes dQ of its dS")
    if not rows:
        parser.exit(1, f"no row has {options.rows!r} in its name\n")
    total, begin = parity_run.Tally(), time.perf_counter()
    for row in rows:
        tally = parity_run.Tally()
        parity_run.check_listed(row, options.seed, tally)
        if not tally.failure:
            print(f"{row.name:44} {len(tally.ran):8} problems, worst ratio {tally.worst[0]:.3f}", flush=True)
        total.add(tally)
    if options.problems and not total.failure:
        tally = parity_run.Tally()
        parity_run.check_drawn(rows, options.problems, options.seed, options.longest, tally)
        total.add(tally)
    return total.conclude(time.perf_counter() - begin)


if __name__ == "__main__":
    raise SystemExit(main())
