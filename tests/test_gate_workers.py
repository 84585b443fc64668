"""The gate in several processes: the report is what one process would write, and nothing lost goes unnoticed.

The real conftest.py and parity_report.py beside tests, a GPU and a torch that are made up: processes start at once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")
TESTS = Path(__file__).parent

FILES = {
    "pytest.ini": "[pytest]\npythonpath = .\nmarkers = gpu",
    "torch.py": """
import os
from types import SimpleNamespace

cuda = SimpleNamespace(empty_cache=lambda: None, mem_get_info=lambda: (0, int(os.environ.get('PLACES', 1)) * 2**34))
threads = 16
def set_num_threads(number):
    global threads
    threads = number
""",
    "source_hash.py": "def source_hash(): return 'hash'",
    "oracle.py": """
from types import SimpleNamespace

class Errors(SimpleNamespace):
    def check(self):
        assert self.out_ratio <= 1.0, "too far off"
""",
    "gpu.py": """
import os
from types import SimpleNamespace
import parity_report

def rows(): return [SimpleNamespace(name=name) for name in os.environ.get("ROWS", "one two").split()]
scored_rows = wide_rows = backward_rows = list
def rows_arch(): return 90
def mode(): return "native"
def simulated(): return False
def unusable(): return os.environ.get("UNUSABLE")
def other_sources(): return os.environ.get("OTHER_SOURCES")
def without_tma(): return "there is no TMA"

MACHINE = dict.fromkeys(("capability", "driver", "python", "torch", "cuda", "package"), "")
parity_report.environment = lambda arch, mode, source_hash: {
    "date": "2026-11-20", "gpu": "none", "arch": arch, "mode": mode, "source_hash": source_hash, **MACHINE
}
""",
    "test_parity_tma.py": "raise AssertionError",
    "test_parity.py": """
import os
import pytest
import torch
from oracle import Errors

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("row", ["one", "two"])
def test_row(row, number, parity):
    assert torch.threads == (1 if "PYTEST_XDIST_WORKER" in os.environ else 16), "processes share the cores"
    asked = {name for name in ("CRASH", "SKIP", "WRONG") if os.environ.get(name) == f"{row}{number}"}
    if "CRASH" in asked:
        os._exit(3)
    if "SKIP" in asked:
        pytest.skip("asked to")
    errors = Errors(out=number * 1e-3, out_ratio=5.0 if asked else number / 12, lse=1e-6, lse_ratio=0.5)
    parity.record(row, f"problem {number}", errors)
""",
    "test_parity_far.py": """
import os
import pytest

@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("number", range(8))
def test_far(number):
    if "PLACES" not in os.environ:
        os.mkdir("far")  # there is one place
        os.rmdir("far")
""",
}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in ("conftest.py", "parity_report.py"):
        shutil.copy(TESTS / name, tmp_path)
    return tmp_path


def run(gate: Path, *arguments: str, workers: int = 2, **environment: str) -> tuple[int, str]:
    """The exit status and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal"]
    command += ["--parity-report", "report", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and Path(path) != TESTS)
    done = subprocess.run(command, cwd=gate, env=kept | environment, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout + done.stderr


def report(gate: Path) -> dict[str, Any]:
    (path,) = (gate / "report").glob("*.json")
    return json.loads(path.read_text())


def test_workers_write_the_report_that_one_process_writes(gate: Path):
    found = []
    for workers, places in ((1, {}), (2, {}), (2, {"PLACES": "2"})):
        status, output = run(gate, workers=workers, **places)
        assert status == 0, output
        assert "parity report: report" in output
        assert "test_parity_tma.py is left out: there is no TMA" in output
        content = report(gate)
        assert content.pop("processes") == workers
        found.append(content)
    assert found[0] == found[1] == found[2]
    assert found[1]["passed"] and found[1]["tests"] == {"passed": 32}
    assert found[1]["rows_expected"] == ["one", "two"]
    errors = {"out_ratio": 11 / 12, "out_error": 0.011, "lse_ratio": 0.5, "lse_error": 1e-6}
    assert found[1]["rows"]["two"] == {"problems": 12, **errors, "worst_problem": "problem 11"}


WHOLE = "a parity report is of the whole gate"


@pytest.mark.parametrize(
    ("arguments", "asked", "tests", "problems", "sentence"),
    [
        ([], {"CRASH": "one5"}, {"passed": 31, "failed": 1}, [11, 12], "1 failed"),  # nothing else is lost
        ([], {"WRONG": "two3"}, {"passed": 31, "failed": 1}, [12, 12], "two: problem 3: too far off"),
        ([], {"SKIP": "two3"}, {"passed": 31, "skipped": 1}, [12, 11], "1 skipped"),
        ([], {"ROWS": "one two three"}, {"passed": 32}, [12, 12], "rows that nothing covered: three"),
        (["-k", "far"], {}, {}, [], f"{WHOLE}: 24 of the GPU tests are left out"),
        (["test_parity.py"], {}, {}, [], f"{WHOLE}: nothing of test_parity_far.py is run"),
        ([], {"UNUSABLE": "there is none"}, {}, [], "GPU tests can't run: there is none"),
        ([], {"OTHER_SOURCES": "yesterday"}, {}, [], "a parity report would be of other sources: yesterday"),
        (["-m", "not gpu"], {}, {}, [], "--parity-report needs the GPU tests: add -m gpu"),
    ],
)
def test_what_fails_the_gate(gate: Path, arguments: list, asked: dict, tests: dict, problems: list[int], sentence: str):
    status, output = run(gate, *arguments, **asked)
    assert status == 1 and sentence in output, output
    assert (gate / "report").exists() == bool(tests)
    if tests:
        content = report(gate)
        assert (content["passed"], content["tests"]) == (False, tests)
        assert [row["problems"] for row in content["rows"].values()] == problems
        assert (content["rows_missing"] == ["three"]) == ("ROWS" in asked)
        assert (content["rows"]["two"]["worst_problem"] == "problem 3") == ("WRONG" in asked)


@pytest.mark.parametrize("slow", [0, 3, 9])
def test_shares_of_a_gate_begin_with_its_slowest_tests(slow: int):
    names = [f"test_any.py::test_{n}" for n in range(60)]
    names += [f"test_parity_features.py::test_listed_problems[widebwd_{n}]" for n in range(slow)]
    found = [item.nodeid for item in conftest.spread([SimpleNamespace(nodeid=name) for name in names], 4)]
    assert sorted(found) == sorted(names)
    each = len(names) // 4
    places = [place % each for place, name in enumerate(found) if "widebwd" in name]
    assert places == [n for share in range(4) for n in range(len(range(share, slow, 4)))]
