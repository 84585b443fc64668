"""The parity report, and the rule that GPU tests without a GPU are a failure, not a skip."""

import contextlib
import itertools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import parity_report
import pytest
from parity_report import ParityReport

with contextlib.suppress(ImportError):  # Windows has none
    import fcntl

REPORT = pytest.StashKey[ParityReport]()
LEFT_OUT = pytest.StashKey[int]()
TMA_TESTS = "test_parity_tma.py"
#: Without a GPU, the files that take minutes: a worker has a file whole, and nobody waits for one that began last.
LONGEST = ("test_simulated_parity.py", "test_tune.py", "test_resources.py", "test_wheel.py", "test_training.py")
#: Of a gate, the tests that take minutes.
SLOWEST = re.compile(r"::test_listed_problems\[widebwd|\[compiled")
BYTES_OF_MUCH = 2**34  # at most half of that lies between the strides that don't fit an int
WRITTEN = pytest.StashKey[str]()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # the tests of tools/ import them by name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-report", type=Path, metavar="DIR", help="write the report as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu" or is_worker(config):
        import torch

        # Without a GPU tensors are small, and a gate has a process for each core: more threads gain nothing, and spin
        # where others want the core.
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # of children, too
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of a gate's GPU
    config.stash[REPORT] = ParityReport()
    config.pluginmanager.register(config.stash[REPORT])
    config.stash[LEFT_OUT] = 0
    # A first launch loads or even compiles code, and the machine may be busy; fixtures of a function say what is the
    # same for every example.
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    patient: dict[str, Any] = {"deadline": None, "suppress_health_check": checks, "print_blob": True}
    hypothesis.settings.register_profile("fmha", **patient)
    drawn = int(os.environ.get("CUTLASS_FMHA_DRAWN", "30"))  # problems a row, which a gate in a hurry may want fewer of
    hypothesis.settings.register_profile("parity", **patient, database=None, max_examples=drawn)
    hypothesis.settings.load_profile("fmha")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the tests of a kind of row that the rows under test don't have. Named on the command line,
    the file is collected all the same, and fails."""
    import gpu

    return (collection_path.name == TMA_TESTS and gpu.without_tma() is not None) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config) and config.getoption("markexpr") == "gpu":
        items[:] = spread(items, config.workerinput["workercount"])
    else:
        items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


def spread(items: list[Any], shares: int) -> list[Any]:
    """Each process's share, as pytest-xdist's worksteal makes them, begins with some of the slowest tests: the rest is
    stolen by whoever is free, and nobody waits for a test that began last."""
    slow = [item for item in items if SLOWEST.search(item.nodeid)]
    others = iter([item for item in items if not SLOWEST.search(item.nodeid)])
    firsts = [slow[n::shares] for n in range(shares)]
    rest = [[*first, *itertools.islice(others, max(0, len(items) // shares - len(first)))] for first in firsts]
    return [*itertools.chain(*rest), *others]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT] += item.get_closest_marker("gpu") is not None


def refusal(session: pytest.Session) -> str | None:
    """Why the collected tests must not run, in one sentence; None when they may."""
    import gpu

    reporting = session.config.getoption("--parity-report") is not None
    if not any(item.get_closest_marker("gpu") for item in session.items):
        return "--parity-report needs the GPU tests: add -m gpu" if reporting else None
    if reporting and (left_out := session.config.stash[LEFT_OUT]):
        return f"a parity report is of the whole gate: {left_out} of the GPU tests are left out"
    files = {path.name for path in Path(__file__).parent.glob("test_parity*.py")}
    files -= {item.path.name for item in session.items} | ({TMA_TESTS} if gpu.without_tma() else set())
    if reporting and files:
        return f"a parity report is of the whole gate: nothing of {' and '.join(sorted(files))} is run"
    if (reason := gpu.unusable()) is not None:
        return f"GPU tests can't run: {reason}"
    if reporting and gpu.simulated():
        return "a parity report is of a GPU, and this build is a simulator"
    if reporting and (reason := gpu.other_sources()) is not None:
        return f"a parity report would be of other sources: {reason}"
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a run of GPU tests on a machine that can't run them with exit status 1 and the reason."""
    if (reason := refusal(session)) is not None:
        if is_worker(session.config):
            session.config.workeroutput["refusal"] = reason
        pytest.exit(reason, returncode=1)


def is_worker(config: pytest.Config) -> bool:
    """Whether this is a process that pytest-xdist started to run a share of the tests."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if reason := getattr(node, "workeroutput", {}).get("refusal"):
        pytest.exit(reason, returncode=1)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command's ``main`` says, ``out`` and ``err``, when it ends with this status."""

    def said(main: Callable[[list[str]], object], *arguments: object, status: int = 0) -> Any:
        capsys.readouterr()
        try:
            found = main([str(argument) for argument in arguments])
        except SystemExit as left:
            found = left.code
        assert found == status, arguments
        return capsys.readouterr()

    return said


@pytest.fixture
def refused(printed: Callable[..., Any]) -> Callable[..., str]:
    """What a command's ``main`` says of arguments that are wrong, with status 2."""

    def said(main: Callable[[list[str]], object], *arguments: object) -> str:
        out, err = printed(main, *arguments, status=2)
        assert out == ""
        return err

    return said


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Iterator[ParityReport]:
    """Where a test records the errors of each row."""
    found = ParityReport()
    yield found
    request.node.user_properties.append((parity_report.RECORDS, found.data()))


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """What torch compiled for other tests of this process counts towards its limit of versions."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture
def hermetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing of the user's settings; the cache directory, which is the test's own."""
    from cutlass_fmha.cost import store
    from cutlass_fmha.dispatch import device

    for name in (store.WHICH, device.FORCE_ARCH, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(store.CACHE_DIR, str(tmp_path / "cache"))
    store.forget()
    yield tmp_path / "cache"
    store.forget()


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests that take gigabytes: as many workers at a time as the GPU has room for; what one took is given back."""
    import torch

    places = max(1, torch.cuda.mem_get_info()[1] // BYTES_OF_MUCH)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % places
    # A worker's directory is one of several in that of the run.
    with (tmp_path_factory.getbasetemp().parent / f"much-memory-{number}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def machine_code(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> list[Any]:
    """Every kernel of the installed extension, disassembled by the worker that asks first: half a minute."""
    from cubin import read_kernels

    from cutlass_fmha import _C

    own = tmp_path_factory.getbasetemp()
    file = (own.parent if is_worker(pytestconfig) else own) / "machine-code.pickle"  # in the run's, of all workers
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(read_kernels(Path(_C.__file__))))
    return pickle.loads(file.read_bytes())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    directory = session.config.getoption("--parity-report")
    if is_worker(session.config) or directory is None:
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    tests = {name: len(stats[name]) for name in ("passed", "failed", "error", "skipped") if stats.get(name)}
    if not tests:  # refused, or no worker lived long enough to run any
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
        return
    import gpu
    from source_hash import source_hash

    report = session.config.stash[REPORT]
    under_test = (*gpu.rows(), *gpu.scored_rows(), *gpu.wide_rows(), *gpu.backward_rows())
    report.expected = [row.name for row in under_test]
    report.processes = session.config.getoption("numprocesses", None) or 1
    machine = parity_report.environment(gpu.rows_arch(), gpu.mode(), source_hash())
    content = report.content(exitstatus == 0 and set(tests) == {"passed"}, tests, machine)
    missing = f"; rows that nothing covered: {', '.join(report.missing)}" if report.missing else ""
    session.config.stash[WRITTEN] = f"parity report: {report.write(directory, content)}{missing}"
    if not content["passed"]:
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    import gpu

    if config.getoption("markexpr") == "gpu" and (reason := gpu.without_tma()) is not None:
        terminalreporter.write_line(f"{TMA_TESTS} is left out: {reason}")
    if (line := config.stash.get(WRITTEN, None)) is not None:
        terminalreporter.write_line(line)
