"""Do the committed parity reports, and the report of the machine code, prove the sources as they are now?
Exit status 1 when not, with the reasons.

    python tools/release_check.py [--reports benchmarks/results/parity]

For the rows of each architecture the newest report counts: it must have passed, have covered every row, and
carry the hash of the present src/. Reports are what ``make parity`` writes:
<date>-<gpu>-<mode>-sm<arch>.json. The other one is tools/resources.py's, of all rows: it must carry that hash
too, and leave nothing to complain about.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import resources
from source_hash import SOURCES, source_hash

REPORTS = SOURCES.parent / "benchmarks" / "results" / "parity"
KIND = "cutlass_fmha parity report"

#: Architecture of the rows -> ways to run them that count, and how to make such a report without such a GPU.
REQUIRED: dict[int, tuple[tuple[str, ...], str]] = {
    90: (("native",), ""),
    89: (("native", "ptx"), ", or CUTLASS_FMHA_FORCE_ARCH=89 make parity on a newer one"),
    120: (
        ("native", "proxy"),
        ", or CUTLASS_FMHA_FORCE_ARCH=120 make parity with a build of CUTLASS_FMHA_SM120_PROXY=90 on an sm_90 one",
    ),
}
#: What a release depends on in a report.
NEEDED = ("date", "arch", "mode", "passed", "source_hash", "rows", "rows_expected")


def read(path: Path) -> dict[str, Any]:
    """Raises resources.ReportError when ``path`` is no parity report."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["kind"] != KIND:
            raise ValueError(f"its kind is {content['kind']!r}")
        date = datetime.datetime.fromisoformat(content["date"])
        return {name: content[name] for name in NEEDED} | {"file": path.name, "date": date}
    except (KeyError, TypeError, ValueError) as error:
        raise resources.ReportError(f"{path} is not a parity report: {error!r}") from error


def complaints(reports: Sequence[dict[str, Any]], current: str) -> list[str]:
    """Why these reports do not prove sources with the hash ``current``; empty when they do."""
    found = []
    for arch, (modes, otherwise) in REQUIRED.items():
        how = f"make parity on an sm_{arch} GPU{otherwise}"
        of_arch = [report for report in reports if report["arch"] == arch and report["mode"] in modes]
        if not of_arch:
            found.append(f"the sm_{arch} rows have no parity report ({' or '.join(modes)}): {how}")
            continue
        newest = max(of_arch, key=lambda report: report["date"])
        file, of = newest["file"], newest["source_hash"]
        if of != current:
            found.append(f"{file} is of other sources (hash {of[:12]}, src/ has {current[:12]}): {how}")
        if missing := sorted({*newest["rows_expected"]} - {*newest["rows"]}):
            found.append(f"{file} leaves rows uncovered: {', '.join(missing)}")
        if not newest["rows"]:
            found.append(f"{file} covers no row at all")
        if newest["passed"] is not True:
            found.append(f"{file} is the report of a failed run")
    return found


def machine_code_complaints(report: dict[str, Any], current: str) -> list[str]:
    """The same of tools/resources.py's report."""
    found, file, of = resources.report_complaints(report), resources.REPORT.name, report["source_hash"]
    recorded = {name for name, row in report["rows"].items() if "warps" in row["config"]}
    if recorded ^ resources.manifest_rows().keys():
        found.append(f"{file} is not of the manifest's rows: {resources.UPDATE}")
    if of != current:
        found.append(f"{file} is of other sources (hash {of[:12]}, src/ has {current[:12]}): {resources.UPDATE}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reports", type=Path, default=REPORTS, help="directory of the reports' JSON files")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="whose hash the reports must carry")
    parser.add_argument("--resources", type=Path, default=resources.REPORT, help="that of tools/resources.py")
    options = parser.parse_args(arguments)
    current = source_hash(options.sources)
    try:
        found = complaints([read(path) for path in sorted(options.reports.glob("*.json"))], current)
        found += machine_code_complaints(resources.read_report(options.resources), current)
    except resources.ReportError as error:
        found = [str(error)]
    for sentence in found or [f"the reports prove the present sources ({current[:12]})"]:
        print(f"release-check: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
