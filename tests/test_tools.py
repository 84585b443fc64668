"""tools/: how they build and what they start, the hash of the sources, the release check, the sanitizer's driver."""

import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import building
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
    (tmp_path / "src" / "forward").mkdir(parents=True)
    for name, text in (("a.h", "one"), ("forward/b.cuh", "two")):
        (tmp_path / "src" / name).write_text(text)
    return tmp_path / "src"


def test_the_hash_depends_on_names_and_contents_only(sources: Path, tmp_path: Path):
    hashes = {source_hash(sources)}
    copy = sources.rename(tmp_path / "elsewhere")
    (copy / "a.h").touch()
    (copy / ".a.h.swp").write_text("an editor's")
    assert {source_hash(copy)} == hashes and len(min(hashes)) == 64
    (copy / "a.h").write_text("One")
    hashes.add(source_hash(copy))
    other = (copy / "forward" / "b.cuh").rename(copy / "forward" / "c.cuh")
    for texts in (("ab", "c"), ("a", "bc"), ("abc", "")):  # as much text in both together
        (copy / "a.h").write_text(texts[0])
        other.write_text(texts[1])
        hashes.add(source_hash(copy))
    assert len(hashes) == 5
    files = [path.as_posix() for path in source_files(SOURCES)]
    assert files == sorted(files) and {"rows.cmake", "core/online_softmax.cuh"} <= {*files}
    told = subprocess.check_output([sys.executable, ROOT / "tools" / "source_hash.py"], text=True)
    assert told == f"{source_hash()}\n"
    with pytest.raises(FileNotFoundError, match="no sources under"):
        source_hash(ROOT / "no-such-directory")


MODES = {90: "native", 89: "ptx", 120: "proxy"}


def make_report(arch: int, date: str = "2026-11-20T10:00:00+00:00", **changes: Any):
    """A report as a parity run writes it, made by the code that makes the real ones."""
    report = ParityReport(expected=[f"fwd_sm{arch}_f16_d64", f"fwd_sm{arch}_bf16_d64"])
    for name in report.expected:
        report.record(name, "b2 h2 q64 k64 none", Errors(1e-3, 0.4, 1e-6, 0.1))
    environment = {"date": date, "arch": arch, "mode": MODES[arch], "gpu": "NVIDIA H200"}
    environment |= {"source_hash": source_hash(release_check.SOURCES)}
    environment |= dict.fromkeys(("driver", "capability", "python", "torch", "cuda", "package"), "9.0")
    report.write(release_check.REPORTS, {**report.content(True, {"passed": 2}, environment), **changes})


@pytest.fixture
def release(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[[], tuple[int, str]]:
    """The check, of a report of each architecture beside one of the machine code."""
    machine_code = {**resources.read_report(), "source_hash": source_hash(sources)}
    resources.write_report(machine_code, tmp_path / "resources.json")
    monkeypatch.setattr(resources, "REPORT", tmp_path / "resources.json")
    monkeypatch.setattr(release_check, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(release_check, "SOURCES", sources)
    for arch in MODES:
        make_report(arch)
    return lambda: (release_check.main([]), capsys.readouterr().out)


def test_the_newest_report_of_each_architecture_counts(release: Any):
    assert (release_check.REPORTS / "2026-11-20-nvidia-h200-ptx-sm89.json").exists()
    status, output = release()
    assert (status, output.count("\n")) == (0, 1) and "prove the present sources" in output
    # Newer by the clock though not by name: its time zone is another.
    make_report(90, "2026-11-20T09:30:00-02:00", source_hash="0" * 64, gpu="NVIDIA H100")
    status, output = release()
    assert status == 1
    assert "2026-11-20-nvidia-h100-native-sm90.json is of other sources (hash 000000000000" in output
    make_report(90, "2026-11-20T12:00:00+00:00")
    assert release()[0] == 0


@pytest.mark.parametrize(("name", "changes", "expected"), [
    *((f"sm{arch}", None, f"the sm_{arch} rows have no parity report ({' or '.join(modes)}): make parity")
      for arch, modes in release_check.REQUIRED.items()),
    ("sm90", {"passed": False}, "is the report of a failed run"),
    ("sm90", {"rows": {"fwd_sm90_f16_d64": {}}}, "leaves rows uncovered: fwd_sm90_bf16_d64"),
    ("sm90", {"rows": {}, "rows_expected": []}, "covers no row at all"),
    ("sm90", {"mode": "proxy"}, "the sm_90 rows have no parity report (native)"),
    ("resources", {"source_hash": "0" * 64}, "resources.json is of other sources (hash 000000000000"),
    ("resources", {"stack": 16}, "fwd_sm90_f16_d32_m64n64w4 (sm_90): a stack of 16 bytes"),
    ("resources", {"kind": "parity"}, "resources.json is no resource report: make build"),
    *(("odd", text, "odd.json is not a") for text in ("{}", "not json", '{"kind": "benchmark"}', "[]")),
])  # fmt: skip
def test_what_proves_less_is_told_in_a_sentence(name: str, changes: Any, expected: str, release: Any, tmp_path: Path):
    path = next(tmp_path.rglob(f"*{name}.json"), release_check.REPORTS / f"{name}.json")
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


def test_a_cmake_that_is_too_old_is_told_in_a_sentence(release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho 'CMake Error:\n  3.26 or higher is required.' >&2; exit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(resources, "find_program", lambda name: str(tmp_path / name))
    said = "release-check: CMake can't list the manifest's rows: CMake Error: 3.26 or higher is required.\n"
    assert release() == (1, said)


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
        (0, FINE, None), (0, WARNING, None), (0, "18 rows\n", "no summary"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", None),
        (1, FINE.replace("0 errors", "1 error"), "reports 1 errors"),
        (0, "== RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n", "reports 3 errors or haz"),
        (0, "== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", "reports 1 errors or"),
        (0, WARNING.replace(" 1 ", " 2 "), "reports 1 errors"),
        (0, WARNING.replace("bf16_dany_m32n128w4", "f32_dany_m32n128w4_tf32x3"), "reports 1 errors or hazards"),
        (0, WARNING.replace("and Write", "and Read"), "reports 1 errors or hazards"),
        (0, WARNING.replace("Warning", "Error"), "reports 1 errors or hazards"),
        (1, FINE, "the problems failed with exit status 1"), (sanitize.CUT, FINE, "time was over before every kernel"),
    ):  # fmt: skip
        found = sanitize.verdict("memcheck", status, output)
        assert found is None if expected is None else expected in str(found), output


def test_a_sanitizer_that_is_missing_or_finds_something_fails(tmp_path, monkeypatch, printed):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "compute-sanitizer was not found" in printed(sanitize.main, "--tool", "memcheck", status=1).out
    script = '#!/bin/sh\n[ "$2" = memcheck ] || SUMMARY="ERROR SUMMARY: 0 errors"\necho "$SUMMARY $@"\n'
    (program := tmp_path / "compute-sanitizer").write_text(script)
    program.chmod(0o755)
    for summary, status in (("ERROR SUMMARY: 0 errors", 0), ("RACECHECK SUMMARY: 2 hazards", 1), ("", 1)):
        monkeypatch.setenv("SUMMARY", summary)
        output = printed(sanitize.main, "--tool", "all", "--rows", "d64", status=status).out
        assert all(f"--tool {tool}" in output for tool in sanitize.TOOLS)
        assert output.count("--rows d64") == len(sanitize.TOOLS) and "--without _tma --rows d64" in output


def test_a_run_tells_which_kernels_its_parts_and_its_time_reached(monkeypatch: pytest.MonkeyPatch, printed):
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
        assert printed(sanitize.main, *asked.split(), status=status).out.endswith(told)


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="this build has no kernels")
def test_every_kernel_has_problems_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch):
    import small_problems

    for arch in (89, 90, 120):
        monkeypatch.setenv("CUTLASS_FMHA_FORCE_ARCH", str(arch))
        rows = (*_C.rows(), *_C.backward_rows(), *_C.helpers())
        found = small_problems.kernels()
        assert set(found) == {row.name for row in rows if row.arch == arch}
        assert all(isinstance(problems(), Iterator) for problems in found.values())


def test_a_release_that_calls_otherwise_is_told(tmp_path: Path, printed: Callable[..., Any]):
    wheel, module, stand_ins = tmp_path / "vllm-0.whl", "vllm/v1/attention/backend.py", check_engines.STAND_INS
    texts = {x.relative_to(stand_ins).as_posix(): x.read_text() for x in stand_ins.rglob("*.py")}
    changed = (
        ("causal: Any = True", "causal: Any = None", "CommonAttentionMetadata.causal is None, not True"),
        ("blk_table", "table", "is a function of self, metadata, table"),
        ("supports_sink", "name", f"{module}.AttentionBackend.supports_sink is not there"),
    )
    for changes in ((), changed):
        for old, new, _ in changes:
            texts[module], before = texts[module].replace(old, new), texts[module]
            assert texts[module] != before
        with zipfile.ZipFile(wheel, "w") as release:
            for name, text in texts.items():
                release.writestr(name, text)
        told = printed(check_engines.main, wheel, status=bool(changes)).out
    assert all(line in told for *_, line in changed)
    (tmp_path / "flash_attn").mkdir()
    text = (check_engines.FLASH_ATTN / "bert_padding.py").read_text()
    for own in (text, text.replace("batch:", "sizes:")):
        (tmp_path / "flash_attn" / "bert_padding.py").write_text(own)
        told = printed(check_engines.main, tmp_path, status=own != text).out
    assert "pad_input is a function of hidden_states, indices, sizes, seqlen, not" in told


def test_a_failed_build_ends_with_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sentence = "a sentence so long that CMake breaks it into lines" + ", word after word" * 9
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(x LANGUAGES NONE)\n"
        "add_custom_target(bad COMMAND echo 'x.cu(3): error: no such thing' COMMAND false)\n"
        f'if(WRONG)\n  message(FATAL_ERROR "cutlass_fmha: {sentence}")\nendif()\n'
        'message("${CUTLASS_FMHA_JOBS} ${Python_EXECUTABLE} ${pybind11_DIR} ${CMAKE_BUILD_TYPE}")\n'
    )
    monkeypatch.setattr(building, "ROOT", tmp_path)
    with pytest.raises(building.BuildError, match="(?s)build failed, .*error: no such thing"):
        building.Tree(tmp_path / "tree").build("bad", "*")
    with pytest.raises(building.BuildError, match=f"^cutlass_fmha: {sentence}$"):
        building.Tree(tmp_path / "tree", {"WRONG": 1}).configure()
    with pytest.raises(building.BuildError, match="the project has no CMake variable OTHER"):
        building.Tree(tmp_path / "tree", {"WRONG": 0, "OTHER": 1}).configure()
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(building.BuildError, match="cmake was not found: pip install -r requirements/bui"):
        building.find_program("cmake")


class InterruptedPopen(subprocess.Popen[bytes]):
    """The interrupt comes when the process runs and its number is not yet anyone's."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **options)  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)


class LatePopen(subprocess.Popen[bytes]):
    """Time is over when the process says that it has started its child, however long that takes."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().wait()
        Path("ready").read_bytes()
        raise subprocess.TimeoutExpired(self.args, timeout)


@pytest.mark.parametrize(("popen", "first"), [
    (LatePopen, "open('ready', 'w').close()"), (InterruptedPopen, ""),
    (subprocess.Popen, "os.kill(os.getppid(), signal.SIGINT)"),
])  # fmt: skip
def test_what_ends_a_program_ends_all_that_it_started(popen: Any, first: str, tmp_path, monkeypatch):
    """A child and its child hold a lock until they are dead."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("ready")
    monkeypatch.setattr(subprocess, "Popen", popen)
    script = (
        "import fcntl, os, signal\nlock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        f"if os.fork() == 0: signal.pause()\n{first}\nsignal.pause()"
    )
    late = popen is LatePopen
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with nullcontext() if late else pytest.raises(KeyboardInterrupt):
            command = [sys.executable, "-c", script]
            assert building.run(command, tmp_path / "log", 2.0 if late else None) == (None, "")
    finally:
        signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
    waiting = ["flock", "--timeout", "300", str(tmp_path / "lock"), "true"]
    assert subprocess.run(waiting, check=False).returncode == 0, "one of both is alive"


def test_rows_of_sm_89_are_compiled_for_older_gpus_too(tmp_path: Path):
    """The least target has PTX, or what ptxas makes of it: for every GPU that none of the machine code runs on."""
    for asked, ahead, compiled_for, code in (
        ("89", "", "89", "89,code=[sm_89,compute_89]"), ("80", "", "80", "80,code=[sm_80,compute_80]"),
        ("89;86", "", "86,89", "86,code=[sm_86,compute_86];89,code=sm_89"),
        ("80;89", "90", "80,89", "80,code=sm_90;89,code=sm_89"),
        ("75", "", None, "contains \"75\", and there are kernels for 80, 86, 89, 90, 120 only"),
        ("80", "86", None, "CUTLASS_FMHA_PTX_AHEAD must be empty or 90, and it is \"86\""),
    ):  # fmt: skip
        done = building.script(
            tmp_path,
            f'include({building.ROOT}/cmake/Architectures.cmake)\nset(CUTLASS_FMHA_SM120_PROXY "")',
            f'set(CUTLASS_FMHA_PTX_AHEAD "{ahead}")',
            f'set(CMAKE_CUDA_ARCHITECTURES "{asked}")\nfmha_set_architectures()\nfmha_set_compiled_for()',
            'fmha_code_flags(89 found)\nmessage("${FMHA_ARCHITECTURES} ${FMHA_COMPILED_FOR_CXX} ${found}")',
        )
        told, flags = " ".join(done.stderr.split()), code.replace(";", ";-gencode=arch=compute_")
        if compiled_for is None:
            assert done.returncode and code in told
        else:
            assert told == f'89 {{89, "{compiled_for}"}} -gencode=arch=compute_{flags}'
