"""``python -m cutlass_fmha bench``: this package against torch's attention and others', in one run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import against, cases, export, regression, report, runner
from .contenders import INSTALLED, PEERS

__all__ = ["main"]


def build_parser() -> argparse.ArgumentParser:
    from cutlass_fmha.cli import output  # not above: another build's benchmark is this one (``against``)

    parser = argparse.ArgumentParser(
        prog="cutlass-fmha bench",
        description="Time cutlass_fmha beside torch's attention and that of other packages found here.",
    )
    parser.add_argument(
        "--preset",
        nargs="+",
        metavar="NAME",
        help=f"groups ({', '.join(cases.GROUPS)}) or case names; default: all",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help=f"comma-separated, of {', '.join((*PEERS, *INSTALLED))}; default: all that are installed",
    )
    parser.add_argument("--row", metavar="NAME", help="force one row of _C.rows() instead of selecting")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="beside another build of the package, which lies in DIR"
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, for a first look")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device number; default: 0")
    output.add_json(parser)
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table as Markdown")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a picture (.png or .svg); needs matplotlib")
    parser.add_argument(
        "--from-json",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="render a recorded result (of it, the cases of --preset), or several joined; measure nothing",
    )
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("FORMAT", "DIR"),
        help=f"write the cases for another benchmark ({', '.join(export.FORMATS)}), with the results of "
        "--from-json where the format has room; measure nothing",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="PATH",
        help="with --from-json: exit with 1 when anything of ours is wrong, or slower than in that earlier result",
    )
    parser.add_argument(
        "--band",
        type=float,
        default=regression.BAND,
        metavar="PERCENT",
        help="of a case, what is noise; of the mean, half of it; default: %(default)s",
    )
    return parser


def parse_peers(text: str | None) -> list[str] | None:
    """Names of peers from a comma-separated list; ValueError for an unknown one."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS and name not in INSTALLED:
            raise ValueError(f"unknown peer {name!r}: take from {', '.join((*PEERS, *INSTALLED))}")
    return names


def require_row(name: str) -> None:
    """Raises ValueError for what is no row of a build that has some: without any it's the build that is wrong."""
    from cutlass_fmha.dispatch import table

    forward = table.this_build()
    if forward.rows and all(row.name != name for row in table.backward().rows):
        forward.by_name(name)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 for a wrong result or nothing to measure with, exits with 2 for a bad argument."""
    from cutlass_fmha.cli import output

    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        chosen = cases.select_cases(arguments.preset)
        peers = parse_peers(arguments.peers)
        if arguments.plot:
            report.require_picture(arguments.plot)
        if arguments.compare and not arguments.from_json:
            raise ValueError("--compare takes two recorded results: name the other with --from-json")
        if arguments.export and arguments.export[0] not in export.FORMATS:
            raise ValueError(f"unknown format {arguments.export[0]!r}: take one of {', '.join(export.FORMATS)}")
        if not arguments.band >= 0:  # nor NaN
            raise ValueError(f"--band must be at least 0, got {arguments.band:g}")
        if arguments.row is not None:
            require_row(arguments.row)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        sizes = [[case.group, case.name, f"{case.flop / 1e9:.2f}", f"{case.moved_bytes / 1e6:.1f}"] for case in chosen]
        table = output.Table(["group", "case", "GFLOP", "MB"], sizes, left=2)
        output.emit([case.as_dict() for case in chosen], [table], arguments.json)
        return 0

    try:
        if arguments.from_json:
            result = report.joined([report.read_json(path) for path in arguments.from_json])
            names = {case.name for case in chosen} if arguments.preset else None
            result["cases"] = [c for c in result["cases"] if names is None or c["name"] in names]
            if arguments.compare:
                found = regression.compare(report.read_json(arguments.compare), result, arguments.band, names)
                output.emit(found, regression.parts(found), arguments.json)
                return 1 if _tell_wrong(result) or found["slower"] else 0
        if arguments.export:
            name, directory = arguments.export
            files, left = export.write(name, chosen, result if arguments.from_json else None, Path(directory))
            lines = [f"wrote {len(files)} files in {directory}", *files]
            lines += [f"{len(left)} cases have no place in {name}: {', '.join(left)}"] if left else []
            output.emit({"directory": directory, "files": files, "left_out": left}, lines, arguments.json)
            return 0
        if arguments.from_json:
            pass
        elif arguments.against:
            rest = (arguments.row, arguments.quick, arguments.device)
            result = against.measure(chosen, arguments.against, *rest)
        else:
            result = runner.measure(chosen, peers, arguments.row, arguments.quick, arguments.device)
    except (report.InvalidReport, runner.CannotMeasure, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    output.emit(result, report.parts(result), arguments.json)
    if arguments.markdown:
        output.write_text(report.markdown(result), arguments.markdown)
    if arguments.plot:
        report.plot(result, arguments.plot)
    return 1 if _tell_wrong(result) else 0


def _tell_wrong(result: report.Result) -> bool:
    """Whether any of our results is wrong, which a line each says."""
    wrong = report.wrong_results(result)
    for line in wrong:
        print(f"bench: wrong result: {line}", file=sys.stderr)
    return bool(wrong)
