"""Do the committed parity reports, and the report of the machine code, prove the sources as they are now?
Exit status 1 when not, with the reasons.

For the rows of each architecture the newest report of ``make parity`` counts: it must have passed, have covered every
row, and carry the hash of the present src/. tools/resources.py's must carry it too, and complain about nothing.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import resources
from source_hash import SOURCES, source_hash

REPORTS = SOURCES.parent / "benchmarks" / "results" / "parity"
KIND = "cutlass_fmha parity report"

#: Architecture of the rows -> ways to run them that count; CONTRIBUTING.md says how to do it without such a GPU.
REQUIRED = {90: ("native",), 89: ("native", "ptx"), 120: ("native", "proxy")}
NEEDED = ("arch", "mode", "passed", "source_hash", "rows", "rows_expected")


def read(path: Path) -> dict[str, Any]:
    """What a release depends on in a parity report; resources.ReportError when ``path`` is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["kind"] != KIND:
            raise ValueError(f"its kind is {content['kind']!r}")
        own = {"file": path.name, "date": datetime.datetime.fromisoformat(content["date"])}
        return own | {name: content[name] for name in NEEDED}
    except (KeyError, TypeError, ValueError) as error:
        raise resources.ReportError(f"{path} is not a parity report: {error!r}") from error


def complaints(reports: Sequence[dict[str, Any]], current: str) -> Iterator[str]:
    """Why these reports do not prove sources with the hash ``current``."""
    for arch, modes in REQUIRED.items():
        how = f"make parity on an sm_{arch} GPU, or as CONTRIBUTING.md says"
        of_arch = [report for report in reports if report["arch"] == arch and report["mode"] in modes]
        newest = max(of_arch, key=lambda report: report["date"], default=None)
        if newest is None:
            yield f"the sm_{arch} rows have no parity report ({' or '.join(modes)}): {how}"
            continue
        file, of = newest["file"], newest["source_hash"]
        missing = ", ".join(sorted({*newest["rows_expected"]} - {*newest["rows"]}))
        checks = (
            (of == current, f"is of other sources (hash {of[:12]}, src/ has {current[:12]}): {how}"),
            (not missing, f"leaves rows uncovered: {missing}"),
            (newest["rows"], "covers no row at all"),
            (newest["passed"] is True, "is the report of a failed run"),
        )
        yield from (f"{file} {sentence}" for fine, sentence in checks if not fine)


def machine_code_complaints(report: dict[str, Any], current: str) -> list[str]:
    """The same of tools/resources.py's report."""
    found, file, of = resources.report_complaints(report), resources.REPORT.name, report["source_hash"]
    recorded = {name for name, row in report["rows"].items() if "warps" in row["config"]}
    rows = resources.manifest_rows()
    if recorded ^ rows.keys() or report["rows"].keys() - recorded != resources.helper_names(rows):
        found.append(f"{file} is not of the manifest's rows and helpers: {resources.UPDATE}")
    if of != current:
        found.append(f"{file} is of other sources (hash {of[:12]}, src/ has {current[:12]}): {resources.UPDATE}")
    return found


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args(arguments)
    current = source_hash(SOURCES)
    try:
        found = [*complaints([read(path) for path in sorted(REPORTS.glob("*.json"))], current)]
        found += machine_code_complaints(resources.read_report(resources.REPORT), current)
    except resources.ReportError as error:
        found = [str(error)]
    for sentence in found or [f"the reports prove the present sources ({current[:12]})"]:
        print(f"release-check: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
