"""How tools build and what they start: errors in a sentence, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import building
import pytest


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


@pytest.mark.parametrize(
    ("popen", "first"),
    [
        (LatePopen, "open('ready', 'w').close()"),
        (subprocess.Popen, "os.kill(os.getppid(), signal.SIGINT)"),
        (InterruptedPopen, ""),
    ],
)
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
        ("89", "", "89", "89,code=[sm_89,compute_89]"),
        ("80", "", "80", "80,code=[sm_80,compute_80]"),
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
