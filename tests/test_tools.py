"""tools/: the hash of the sources, the release check and the sanitizer's driver."""

from __future__ import annotations

import itertools
import json
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_engines
import pytest
import release_check
import resources
import sanitize
from oracle import Errors
from parity_report import ParityReport
from source_hash import SOURCES, source_files, source_hash

from cutlass_fmha import _C

ROOT = Path(__file__).resolve().parents[1]
TOOLS = [file.stem for file in (ROOT / "tools").glob("*.py") if "def main(" in file.read_text()]


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_tells_what_it_does(name: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    """Where Python leaves a script's directory out, too (-P)."""
    tools = ROOT / "tools"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != tools])
    for file in tools.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(tools / f"{name}.py"), run_name="__main__")
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "src"
    (directory / "forward").mkdir(parents=True)
    (directory / "a.h").write_text("one")
    (directory / "forward" / "b.cuh").write_text("two")
    return directory


def test_the_hash_depends_on_names_and_contents_only(sources: Path, tmp_path: Path):
    hashes = {source_hash(sources)}
    copy = sources.rename(tmp_path / "elsewhere")
    (copy / "a.h").touch()
    (copy / ".a.h.swp").write_text("an editor's")
    assert {source_hash(copy)} == hashes and len(min(hashes)) == 64
    (copy / "a.h").write_text("One")
    hashes.add(source_hash(copy))
    (copy / "forward" / "b.cuh").rename(copy / "forward" / "c.cuh")
    for text, other in (("ab", "c"), ("a", "bc"), ("abc", "")):  # as much text in both together
        (copy / "a.h").write_text(text)
        (copy / "forward" / "c.cuh").write_text(other)
        hashes.add(source_hash(copy))
    assert len(hashes) == 5
    files = [path.as_posix() for path in source_files(SOURCES)]
    assert files == sorted(files) and {"rows.cmake", "core/online_softmax.cuh"} <= {*files}
    told = subprocess.check_output([sys.executable, ROOT / "tools" / "source_hash.py"], text=True)
    assert told == f"{source_hash()}\n"
    with pytest.raises(FileNotFoundError, match="no sources under"):
        source_hash(ROOT / "no-such-directory")


MODES = {90: "native", 89: "ptx", 120: "proxy"}


def make_report(directory: Path, sources: Path, arch: int, date: str = "2026-11-20T10:00:00+00:00", **changes: Any):
    """A report as a parity run writes it, made by the code that makes the real ones."""
    report = ParityReport(expected=[f"fwd_sm{arch}_f16_d64", f"fwd_sm{arch}_bf16_d64"])
    for name in report.expected:
        report.record(name, "b2 h2 q64 k64 none", Errors(1e-3, 0.4, 1e-6, 0.1))
    environment = {"date": date, "arch": arch, "mode": MODES[arch], "gpu": "NVIDIA H200"}
    environment |= {"source_hash": source_hash(sources)}
    environment |= dict.fromkeys(("driver", "capability", "python", "torch", "cuda", "package"), "9.0")
    report.write(directory, {**report.content(True, {"passed": 2}, environment), **changes})


@pytest.fixture
def reports(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a report of each architecture, beside one of the machine code: those that are checked."""
    machine_code = {**resources.read_report(), "source_hash": source_hash(sources)}
    resources.write_report(machine_code, tmp_path / "resources.json")
    monkeypatch.setattr(resources, "REPORT", tmp_path / "resources.json")
    monkeypatch.setattr(release_check, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(release_check, "SOURCES", sources)
    for arch in MODES:
        make_report(release_check.REPORTS, sources, arch)
    return release_check.REPORTS


@pytest.fixture
def release(reports: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, str]]:
    return lambda: (release_check.main([]), capsys.readouterr().out)


def test_the_newest_report_of_each_architecture_counts(sources: Path, reports: Path, release: Any):
    assert (reports / "2026-11-20-nvidia-h200-ptx-sm89.json").exists()
    status, output = release()
    assert (status, output.count("\n")) == (0, 1) and "prove the present sources" in output
    # Newer by the clock though not by name: its time zone is another.
    newer = {"source_hash": "0" * 64, "gpu": "NVIDIA H100"}
    make_report(reports, sources, 90, "2026-11-20T09:30:00-02:00", **newer)
    status, output = release()
    assert status == 1
    assert "2026-11-20-nvidia-h100-native-sm90.json is of other sources (hash 000000000000" in output
    make_report(reports, sources, 90, "2026-11-20T12:00:00+00:00")
    assert release()[0] == 0


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        *(
            (f"sm{arch}", None, f"the sm_{arch} rows have no parity report ({' or '.join(modes)}): make parity")
            for arch, modes in release_check.REQUIRED.items()
        ),
        ("sm90", {"passed": False}, "is the report of a failed run"),
        ("sm90", {"rows": {"fwd_sm90_f16_d64": {}}}, "leaves rows uncovered: fwd_sm90_bf16_d64"),
        ("sm90", {"rows": {}, "rows_expected": []}, "covers no row at all"),
        ("sm90", {"mode": "proxy"}, "the sm_90 rows have no parity report (native)"),
        ("resources", {"source_hash": "0" * 64}, "resources.json is of other sources (hash 000000000000"),
        ("resources", {"stack": 16}, "fwd_sm90_f16_d32_m64n64w4 (sm_90): a stack of 16 bytes"),
        ("resources", {"kind": "parity"}, "resources.json is no resource report: make build"),
        *(("odd", text, "odd.json is not a") for text in ("{}", "not json", '{"kind": "benchmark"}', "[]")),
    ],
)
def test_what_proves_less_is_told_in_a_sentence(name: str, changes: Any, expected: str, reports: Path, release: Any):
    path = next(reports.parent.rglob(f"*{name}.json"), reports / f"{name}.json")
    if changes is None:
        path.unlink()
    elif isinstance(changes, str):
        path.write_text(changes)
    else:
        content = json.loads(path.read_text())
        row = content["rows"].get("fwd_sm90_f16_d32_m64n64w4", {})
        (row if "stack" in changes else content).update(changes)
        path.write_text(json.dumps(content))
    status, output = release()
    assert status == 1 and output.startswith("release-check: ") and output.count("\n") == 1
    assert expected in output


#: What racecheck prints of one hazard that is harmless.
WARNING = """\
========= Warning: Race reported between Write access at wide_sm90_bf16_dany_m32n128w4+0x5860
=========     and Write access at wide_sm90_bf16_dany_m32n128w4+0xaf30 [8192 hazards]
=========
========= RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warnings)
"""
FINE = "========= ERROR SUMMARY: 0 errors\n"


def test_what_counts_as_a_clean_sanitizer_run():
    for status, output, expected in (
        (0, FINE, None),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", None),
        (1, FINE.replace("0 errors", "1 error"), "reports 1 errors"),
        (0, "== RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n", "reports 3 errors or haz"),
        (0, "== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", "reports 1 errors or"),
        (0, WARNING, None),
        (0, WARNING.replace(" 1 ", " 2 "), "reports 1 errors"),
        (0, WARNING.replace("bf16_dany_m32n128w4", "f32_dany_m32n128w4_tf32x3"), "reports 1 errors or hazards"),
        (0, WARNING.replace("and Write", "and Read"), "reports 1 errors or hazards"),
        (0, WARNING.replace("Warning", "Error"), "reports 1 errors or hazards"),
        (1, FINE, "the problems failed with exit status 1"),
        (sanitize.CUT, FINE, "time was over before every kernel"),
        (0, "18 rows\n", "no summary"),
    ):
        found = sanitize.verdict("memcheck", status, output)
        assert found is None if expected is None else expected in str(found), output


def test_a_sanitizer_that_is_missing_or_finds_something_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert "compute-sanitizer was not found" in capfd.readouterr().out
    script = '#!/bin/sh\n[ "$2" = memcheck ] || SUMMARY="ERROR SUMMARY: 0 errors"\necho "$SUMMARY $@"\n'
    (tmp_path / "compute-sanitizer").write_text(script)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    for summary, status in (("ERROR SUMMARY: 0 errors", 0), ("RACECHECK SUMMARY: 2 hazards", 1), ("", 1)):
        monkeypatch.setenv("SUMMARY", summary)
        assert sanitize.main(["--tool", "all", "--rows", "d64"]) == status
        output = capfd.readouterr().out
        assert all(f"--tool {tool}" in output for tool in sanitize.TOOLS)
        assert output.count("--rows d64") == len(sanitize.TOOLS) and "--without _tma --rows d64" in output


def test_a_run_tells_which_kernels_its_parts_and_its_time_reached(monkeypatch: pytest.MonkeyPatch, capfd):
    problems = {"two": range(2), "none": (), "three": range(3)}
    kernels = {name: lambda own=own: iter(own) for name, own in problems.items()}
    monkeypatch.setitem(sys.modules, "small_problems", SimpleNamespace(kernels=lambda: kernels))
    for asked, status, told in (
        ("--seconds inf", 0, "3 of 3 kernels, 3 with all of their problems: 5\n"),
        ("--seconds 6", 0, "3 of 3 kernels, 1 with all of their problems: 4\n"),
        ("--seconds 3", sanitize.CUT, "2 of 3 kernels, 1 with all of their problems: 1\nnot reached: three\n"),
        ("--rows tw hr --without no", 0, "2 of 2 kernels, 2 with all of their problems: 5\n"),
        ("--without tw no", 0, "1 of 1 kernels, 1 with all of their problems: 3\n"),
        ("--rows no-such", 1, "0 of 0 kernels, 0 with all of their problems: 0\n"),
    ):
        clock = itertools.count()
        monkeypatch.setattr(sanitize, "time", SimpleNamespace(monotonic=lambda clock=clock: next(clock)))
        assert sanitize.main(asked.split()) == status
        assert capfd.readouterr().out.endswith(told)


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="this build has no kernels")
def test_every_kernel_has_problems_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch):
    import small_problems

    for arch in (89, 90, 120):
        monkeypatch.setenv("CUTLASS_FMHA_FORCE_ARCH", str(arch))
        rows = (*_C.rows(), *_C.backward_rows(), *_C.helpers())
        assert set(small_problems.kernels()) == {row.name for row in rows if row.arch == arch}


def test_a_release_that_calls_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wheel, module, stand_ins = tmp_path / "vllm-0.whl", "vllm/v1/attention/backend.py", check_engines.STAND_INS
    texts = {x.relative_to(stand_ins).as_posix(): x.read_text() for x in stand_ins.rglob("*.py")}
    changed = texts[module]
    for old, new in (("causal: Any = True", "causal: Any = None"), ("blk_table", "table"), ("supports_sink", "name")):
        assert old in changed
        changed = changed.replace(old, new)
    for text in (texts[module], changed):
        with zipfile.ZipFile(wheel, "w") as release:
            for name in texts:
                release.writestr(name, text if name == module else texts[name])
        assert check_engines.main([str(wheel)]) == (text == changed)
    told = capsys.readouterr().out
    assert "CommonAttentionMetadata.causal is None, not True" in told
    assert f"{module}.AttentionBackend.supports_sink is not there" in told
    assert "is a function of self, metadata, table" in told
    padding = tmp_path / "flash_attn" / "bert_padding.py"
    padding.parent.mkdir()
    text = (check_engines.FLASH_ATTN / padding.name).read_text()
    for own in (text, text.replace("batch:", "sizes:")):
        padding.write_text(own)
        assert check_engines.main([str(tmp_path)]) == (own != text)
    told = capsys.readouterr().out
    assert "pad_input is a function of hidden_states, indices, sizes, seqlen, not" in told
