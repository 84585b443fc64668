"""The benchmark without a GPU: cases, statistics, error check, report, picture, refusals."""

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_build import make_build
from oracle import CAUSAL, visible

from cutlass_fmha import UnsupportedError, bench
from cutlass_fmha.bench import against, contenders, gradients, lineup, machine, peers, report, runner, timing
from cutlass_fmha.bench import cases as bench_cases
from cutlass_fmha.bench.cases import CASES, FEATURES, GROUPS, Case, select_cases, visible_pairs
from cutlass_fmha.bench.features import Feature
from cutlass_fmha.dispatch import table as tables

CASE = Case("dense", 2, 4, 2, 64, 64, 32, "float16", causal=True)
SMALL = Case("latency", 2, 4, 2, 48, 48, 32, "float16", causal=True)
PACKED = Case("packed", 3, 4, 2, 40, 40, 32, "float16", lengths=(7, 33, 40))
DECODE = Case("decode", 2, 4, 2, 1, 128, 32, "float16")


def test_cases_have_pairs_flop_bytes_and_a_name_that_selects_them():
    for seqlen_q, seqlen_k, causal in itertools.product(range(6), range(6), CAUSAL):
        diagonal = {"none": None, "top-left": 0, "bottom-right": seqlen_k - seqlen_q}[causal]
        assert visible_pairs(seqlen_q, seqlen_k, diagonal) == int(visible(seqlen_q, seqlen_k, causal).sum())
    case = Case("dense", 2, 16, 16, 8192, 8192, 128, "bfloat16")
    assert (case.flop, case.moved_bytes) == (4 * 2 * 16 * 8192 * 8192 * 128, 4 * 2 * 16 * 8192 * 128 * 2)
    packed = replace(case, batch=3, lengths=(5, 1, 7), seqlen_q=7, seqlen_k=7)
    assert (packed.flop, packed.input_bytes) == (4 * 16 * (25 + 1 + 49) * 128, 3 * 13 * 16 * 128 * 2)
    cached = replace(packed, causal=True, seqlen_k=64, used=(5, 9, 8))
    assert cached.visible_pairs == 5 * 6 // 2 + 9 + (8 * 9 // 2 - 1)
    assert replace(case, causal=True, used=(8192, 9000)).visible_pairs == 8192 * (8193 + 808)
    assert replace(case, causal=True).flop == 4 * 2 * 16 * (8192 * 8193 // 2) * 128
    decode = Case("decode", 8, 32, 8, 1, 8192, 128, "bfloat16")
    assert decode.input_bytes == 2 * (2 * 8 * 8192 * 8 * 128) + 2 * 8 * 32 * 128
    assert [select_cases([case.name]) for case in CASES] == [[case] for case in CASES]
    assert select_cases(None) == list(CASES)
    assert sum(len(select_cases([group])) for group in GROUPS) == len(CASES)
    of_float32 = lineup.line_up(select_cases(["wide"])[0], SimpleNamespace(), list(contenders.PEERS))
    assert list(of_float32) == ["ours", "efficient"]


def test_inputs_rotate_past_the_cache_graphs_visit_all_sets_and_times_are_summarised() -> None:
    l2 = 50 * 2**20
    for call_us, input_bytes in itertools.product((1.0, 8.0, 60.0, 900.0, 6000.0), (2**17, 2**20, 2**24, 2**28)):
        sets = timing.input_sets(input_bytes, l2)
        assert sets * input_bytes > l2 or sets == timing.MAX_CALLS_PER_GRAPH
        calls = timing.calls_per_graph(call_us, sets)
        assert sets <= calls <= timing.MAX_CALLS_PER_GRAPH and calls % sets == 0
        count = timing.replays(calls * call_us, budget_s=0.4)
        assert 15 <= count <= 400 and count % timing.ROUNDS == 0
    assert timing.summarise([*map(float, range(1, 12))], 3) == timing.Timing(6.0, 10.0, 1.0, 11, 3)
    assert timing.summarise([4.0, 1.0, 3.0, 2.0], 1).p50_us == 2.5


def test_the_error_check_accepts_a_right_result_and_finds_a_wrong_one():
    for case in (SMALL, replace(SMALL, causal=False, seqlen_q=1), replace(SMALL, seqlen_q=200, seqlen_k=200)):
        inputs = contenders.make_inputs(case, 2, torch.device("cpu"))
        check = contenders.ErrorCheck(case, inputs)
        rows = torch.arange(case.seqlen_q)
        right, other = (contenders.reference(*x, case.causal, rows, precise=True).half() for x in inputs)
        assert 0.0 < check(right).ratio < 0.6 and not check(other).within
        assert check(contenders.sdpa(replace(case))(*inputs[0])).within
        for change in (0.1, math.nan):  # in one element that the sample holds
            wrong = right.clone()
            wrong[-1, -1, 0, 0] += change
            assert not check(wrong).within
    rows = contenders.sample_rows(16384, 64).tolist()
    assert (rows[0], rows[-1], len({*rows})) == (0, 16383, 64)
    assert contenders.sample_rows(3, 64).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="top-left"):  # torch's SDPA aligns that mask otherwise
        contenders.sdpa(replace(SMALL, seqlen_q=1))


class FakeTimer:
    """Stands in for a CUDA graph: the call runs once, the time is given."""

    graph_us, rounds = 1000.0, 0

    def __init__(self, call: Any, sets: int) -> None:
        call(sets - 1)

    def run_round(self, count: int) -> None:
        assert count > 0
        self.rounds += 1

    def result(self) -> timing.Timing:
        assert self.rounds == timing.ROUNDS
        return timing.Timing(10.0, 11.0, 9.0, 40, 100)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner on the CPU: real but for the clock, graphs, SDPA's kernel and an L2 cache that asks for two sets."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**17))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runner, "GraphTimer", FakeTimer)
    monkeypatch.setattr(runner.memory, "peak", lambda call: 4096)
    monkeypatch.setattr(runner.memory, "planned", lambda *problem: 3072)
    monkeypatch.setattr(runner, "only", lambda name: contenders.nullcontext())
    monkeypatch.setattr(runner, "make_inputs", lambda case, sets, _: contenders.make_inputs(case, sets, "cpu"))
    monkeypatch.setattr(runner, "selected_row", lambda *problem: "fwd_row")


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(("case", "others"), [
    (SMALL, ["flash"]), (replace(DECODE, seqlen_k=256), ["paged", "flash", "copy"]),
    (replace(DECODE, seqlen_k=250), ["flash", "copy"]),  # no whole pages
    (PACKED, []), (replace(PACKED, causal=True), []), (replace(SMALL, group="ranges", used=(40, 30)), ["plain"]),
    (replace(PACKED, group="paged", causal=True, seqlen_k=256, used=(60, 256, 41)), list(contenders.PAGES)),
])  # fmt: skip
def test_a_case_is_measured_and_checked(case: Case, others: list[str]) -> None:
    results: Any = runner.measure_case(case, ["flash"], None, 0.1, 0)["results"]
    if case.lengths:
        assert results.pop("flash")["status"] == "unsupported", "torch has that op for CUDA alone"
    assert list(results) == ["ours", *others]
    for name, result in results.items():
        unchecked = name in ("plain", "copy")
        assert ("row" in result, "error_ratio" in result) == (name == "ours", not unchecked)
        assert unchecked or 0.0 <= result["error_ratio"] <= 1.0
    expected = {"status": "ok", "p50_us": 10.0, "samples": 40, "row": "fwd_row", "peak_bytes": 4096}
    expected |= {"planned_bytes": 3072, "tflops": round(case.flop / 10e-6 / 1e12, 2)}
    assert expected.items() <= results["ours"].items()
    assert 0.0 < results["ours"]["mean_abs_error"] < results["ours"]["max_abs_error"]
    inputs, _, check = runner.problem(case, 0)
    if "copy" in others:
        assert results["copy"]["tbytes_per_s"] == round(case.moved_bytes / 10e-6 / 1e12, 3)
        assert lineup.copy(case, inputs)(1).numel() * 2 == case.moved_bytes
    if case.featured:
        wrong = lineup.with_feature(Feature(replace(case, causal=not case.causal), torch.device("cpu")), None)
        assert not check(wrong(*inputs[0])).within


@pytest.mark.usefixtures("fake_gpu")
def test_a_refusal_is_reported_and_a_failure_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: Any, name: str, error: Exception) -> None:
        monkeypatch.setattr(module, name, Mock(return_value=Mock(side_effect=error)))

    fail(lineup, "ours", UnsupportedError("no row has head_dim 96:\n  fwd_row: ..."))
    fail(lineup, "sdpa", RuntimeError("No available kernel. Aborting execution."))
    results = runner.measure_case(SMALL, ["efficient"], None, 0.1, 0)["results"]
    refused = {"ours": "no row has head_dim 96", "efficient": "No available kernel. Aborting execution."}
    assert results == {name: {"status": "unsupported", "reason": why} for name, why in refused.items()}
    fail(lineup, "ours", RuntimeError("CUDA error: invalid argument"))
    with pytest.raises(RuntimeError, match="invalid argument"):
        runner.measure_case(SMALL, [], None, 0.1, 0)
    # A device that a peer broke is no refusal.
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.is_refusal("flash", RuntimeError("something"))


TIMES = {
    "ours": 8.0, "pages16": 9.5, "paged": 9.0, "pages256": 8.5, "plain": 6.0, "flash": 10.0, "cudnn": 5.0,
    "efficient": 20.0, "causal": 16.0, "copy": 4.0,
}  # fmt: skip


def synthetic(cases: Sequence[Case] = CASES, ratio: float = 0.5, **machine: str) -> report.Result:
    """A whole result with made-up times; the plain row does three times the work. Ours lacks head dims 96 and 256,
    the memory-efficient kernel 8 heads of keys, and flash is not asked for a bias. Ours has that error."""
    entries = []
    for case in cases:
        results: dict[str, dict[str, Any]] = {}
        for name, us in TIMES.items():
            if {"ours": case.head_dim in (96, 256), "efficient": case.num_heads_kv == 8}.get(name):
                results[name] = {"status": "unsupported", "reason": f"{name} has no row for it"}
            elif (name, case.feature) != ("flash", "bias"):
                results[name] = {
                    "status": "ok", "max_abs_error": 1e-3, "tolerance": 2e-3,
                    "error_ratio": ratio if name == "ours" else 0.5,
                    "tflops": case.flop * (3 if name == "plain" else 1) / us / 1e6,
                    "tbytes_per_s": case.moved_bytes / us / 1e6,
                    **vars(timing.Timing(us, us + 1, us - 1, 50, 100)),
                    **({"row": "fwd_sm90_row"} if name == "ours" else {}),
                }  # fmt: skip
        entries.append({**case.as_dict(), "input_sets": 4, "results": results})
    described = {
        "gpu": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "cuda": "13.0", "cudnn": "9.19.0",
        "torch": "2.11.0", "package": "0.1", "build": {"proxy": {"120": 90}}, "commit": "0123456",
        "date": "2026-01-02", "clocks_after": {"sm_clock_mhz": 1980.0},
    }  # fmt: skip
    loop = {"calls": 9, "us": 9.94, "reserved_mib": 64.0, "never_used": 0.25, "allocations": 12}
    return {
        "schema": report.SCHEMA, "machine": described | machine, "method": runner.METHOD,
        "host_us": {"repeated, S128 D64": {"attention": 9.9, "torch SDPA": 15.6}}, "loop": {"torch": loop},
        "peers": ["flash", "cudnn", "efficient"], "cases": entries,
    }  # fmt: skip


def test_the_report_has_ratios_rates_means_refusals_and_the_machine() -> None:
    dense, decode, *_ = report.sections(synthetic())
    row = dict(zip(dense.headings, next(x for x in dense.rows if x[0] == "B2 H16 S8192 D128 bf16"), strict=True))
    assert [row[name] for name in ("to torch flash (FA2)", "to cuDNN", "ours p50")] == ["1.25x", "0.62x", "8.0"]
    beside_plain = report.sections(synthetic(select_cases(["ranges", "scores"])))[0]
    rates = beside_plain.headings.index(f"of {contenders.TITLES['plain']}")
    assert {row[rates] for row in beside_plain.rows} == {"0.25x"}, "rates, not times"
    row, moved = dict(zip(decode.headings, decode.rows[0], strict=True)), select_cases(["decode"])[0].moved_bytes
    assert row["TB/s"] == f"{moved / 8e6:.2f}, 50%", "and beside a copy"
    text, markdown = report.text(synthetic()), report.markdown(synthetic())
    assert "; memory-efficient 2.50x (worst 2.50x, 9 of 12 cases)" in text
    assert "B4 H16 S4096 D96 bf16 causal, cutlass_fmha: unsupported: ours has no row for it" in text
    facts = ("NVIDIA H200", "torch 2.11.0", "SM clock 1980 MHz", "0123456", "sm_120 rows are compiled for sm_90")
    assert all(fact in markdown for fact in facts)
    assert sum(line.startswith("| ") for line in markdown.splitlines()) == len(CASES) + len(report.SECTIONS)
    result = synthetic(select_cases(["latency"]))
    for size, name in enumerate(("ours", "flash"), 1):
        result["cases"][0]["results"][name]["peak_bytes"] = size * 2**20
    result["cases"][0]["results"]["ours"]["planned_bytes"] = 2**19
    result["cases"][0]["results"]["flash"]["error_ratio"] = math.nan
    assert "not exact, errors up to inf of the tolerance" in report.markdown(result)
    assert "| B1 H8 S256 D64 fp16 | 0.50 | 1.00 | 2.00 |" in report.markdown(result)


def test_results_are_kept_rendered_anew_and_joined_and_a_nan_stays_wrong(tmp_path: Path, printed) -> None:
    path, target, whole = tmp_path / "new" / "result.json", tmp_path / "result.md", synthetic()
    report.write_json(whole, path)
    assert report.read_json(path) == (kept := json.loads(json.dumps(whole)))
    assert "B2 H16 S8192 D128 bf16" in printed(bench.main, "--from-json", path, "--markdown", target).out
    assert target.read_text(encoding="utf-8").startswith("# cutlass_fmha 0.1 on NVIDIA H200")
    assert "B2 H16 S8192 D128 bf16" not in printed(bench.main, "--from-json", path, "--preset", "decode").out
    one, two, joined = (tmp_path / f"{name}.json" for name in ("one", "two", "joined"))
    report.write_json({**whole, "cases": whole["cases"][:9]}, one)
    report.write_json({**whole, "cases": whole["cases"][9:], "host_us": {}, "peers": whole["peers"][:1]}, two)
    assert bench.main(["--from-json", str(one), str(two), "--json", str(joined)]) == 0
    assert report.read_json(joined) == kept
    report.write_json(synthetic([SMALL], math.nan), path)
    assert "NaN" not in path.read_text(encoding="utf-8") and "nan" in report.text(report.read_json(path))
    assert len(report.wrong_results(report.read_json(path))) == 1
    assert [len(report.wrong_results(synthetic([SMALL], ratio))) for ratio in (0.5, 1.0, 1.01)] == [0, 0, 1]


def test_the_picture_shows_bars_and_refusals(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from cutlass_fmha.bench import picture

    figures, save = [], picture.Figure.savefig
    monkeypatch.setattr(picture.Figure, "savefig", lambda x, *a, **k: (figures.append(x), save(x, *a, **k)))
    result, paths = synthetic(), [tmp_path / "new" / f"{n}.svg" for n in (0, 1)]
    for path in paths:
        report.plot(result, path)
    assert paths[0].read_text() == paths[1].read_text() and paths[0].read_text().startswith("<?xml")
    shown = [case for case in result["cases"] if case["group"] in {panel.group for panel in picture.PANELS}]
    axes = [axis for half in figures[0].subfigs for axis in half.axes]
    assert sum(len(axis.patches) for axis in axes) == sum(len(case["results"]) for case in shown)
    refusals = sum(entry["status"] != "ok" for case in shown for entry in case["results"].values())
    assert sum(text.get_text() == "unsupported" for axis in axes for text in axis.texts) == refusals


def test_what_fails_is_one_sentence(tmp_path, monkeypatch, printed):
    (tmp_path / "no-json").write_text("{")
    files = {"whole": synthetic(), "l4": synthetic(gpu="NVIDIA L4"), "other": synthetic(commit="x")}
    files |= {"wrong": synthetic([SMALL], 7.0), "list": [], "lacking": {"schema": 3}}
    for name, content in files.items():
        report.write_json(content, tmp_path / name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tables, "this_build", make_build)
    for arguments, status, said in (
        ("", 1, "bench: a GPU is timed"),
        ("--against {0}", 1, "bench: {0} holds no package cutlass_fmha\n"),
        ("--from-json {0}/wrong", 1, "wrong result: B2 H4/2 S48 D32 fp16 causal"),
        ("--from-json {0}/wrong --compare {0}/wrong", 1, "wrong result: B2 H4/2 S48 D32 fp16 causal"),
        ("--from-json {0}/whole --compare {0}/l4", 1, "of NVIDIA L4 and of NVIDIA H200 say"),
        ("--from-json {0}/whole {0}/other", 1, "results of two GPUs or builds"),
        ("--from-json {0}/no-json", 1, "not JSON"), ("--from-json {0}/list", 1, "no benchmark result"),
        ("--from-json {0}/lacking", 1, "lacks cases"),
        ("--plot picture.png", 2, "not installed: pip install matplotlib.\n"),
        ("--plot picture.txt", 2, "--plot writes .png or .svg, and not 'picture.txt'\n"),
        ("--preset x", 2, "unknown preset 'x': take one of latency, dense, decode, wide"),
        ("--peers flash,x", 2, "unknown"), ("--compare b.json", 2, "name the other with --from-json"),
        ("--row fwd_sm90_x", 2, "'fwd_sm90_x' is not a row of this build"),  # whether there is a GPU or not
        *((f"--band {x} --list", 2, f"--band must be at least 0, got {x}\n") for x in ("-5", "nan")),
        ("--export x {0}", 2, "take one of kernelbench, robust-kbench, flashinfer-bench"),
    ):  # fmt: skip
        out, err = printed(bench.main, *arguments.format(tmp_path).split(), status=status)
        assert said.format(tmp_path) in err, arguments
        assert status == 2 or err.count("\n") == 1
        assert (out == "") == ("wrong" not in arguments)
    # Rows of gradients can be forced, too; a build without rows is no wrong argument.
    monkeypatch.setattr(tables, "backward", lambda: SimpleNamespace(rows=[SimpleNamespace(name="bwd_x")]))
    for row in (make_build().rows[0].name, "bwd_x"):
        bench.require_row(row)
    monkeypatch.setattr(tables, "this_build", lambda: tables.Table(()))
    bench.require_row("x")


def test_what_is_slower_than_noise_or_does_not_run_fails(tmp_path, printed):
    now, before = tmp_path / "now.json", tmp_path / "before.json"
    report.write_json(synthetic(), before)
    for factors, said in (
        ([1.04, 0.9], None),  # within the band
        ([1.04] * len(CASES), "all cases take 1.040 of their time on average"),
        ([1, 1.06], "takes 1.060 of its time"), ([math.nan], "takes nan of its time"),
        ([], "no longer runs: why"), ([], "is missing"),
    ):  # fmt: skip
        result = synthetic()
        ran = [case for case in result["cases"] if case["results"]["ours"]["status"] == "ok"]
        for case, factor in zip(ran, factors, strict=False):
            case["results"]["ours"]["p50_us"] *= factor
        if said == "is missing":
            result["cases"].remove(ran[0])
        elif not factors:
            ran[0]["results"]["ours"] |= {"status": "unsupported", "reason": "why"}
        report.write_json(result, now)
        asked = ["--from-json", str(now), "--compare", str(before)]
        assert (said or "nothing is slower") in printed(bench.main, *asked, status=said is not None).out
        assert bench.main([*asked, "--band", "50"]) == (not factors or math.nan in factors)
        assert 1.04 not in factors or bench.main([*asked, "--preset", ran[0]["name"]]) == 0  # a mean of one
        there = [case["name"] for case in result["cases"]]  # what is missing is not asked for
        assert bench.main([*asked, "--preset", *there]) == (said not in (None, "is missing"))


def test_clocks_are_read_from_nvidia_smi_and_gaps_are_none(tmp_path: Path, monkeypatch) -> None:
    told = {"driver": "580.159.03", "sm_clock_mhz": 1980.0, "power_w": 112.43, "temperature_c": None}
    assert told.items() <= machine.parse_smi("580.159.03, 1980, 1980, 3201, 112.43, 700.00, [N/A]\n").items()
    assert {*machine.parse_smi("garbage").values(), *machine.parse_smi("").values()} == {None}
    assert machine.commit(tmp_path) is None, "outside of a checkout"
    monkeypatch.setenv(machine.COMMIT, "0123456")
    assert machine.commit(tmp_path) == "0123456"


@pytest.fixture
def small_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that suit 64 queries, wherever they are used."""
    for name, value in (("WINDOW", 9), ("PREFIX", 20), ("PAD", 5), ("BLOCK", 16)):
        for module in (bench_cases, sys.modules["cutlass_fmha.bench.features"], lineup, peers):
            monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.usefixtures("small_features", "fake_gpu")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_means_to_the_check_what_it_means_to_the_package(name: str) -> None:
    case = replace(CASE, group="features", feature=name)
    inputs, feature, check = runner.problem(case, 0)
    found = lineup.line_up(case, inputs, ["flash", "cudnn", "efficient"], None, feature)
    assert next(iter(found)) == "ours" and len(found) > 1
    if name == "softcap":  # what has no peer is timed beside plain causal attention
        assert list(found) == ["ours", "causal"] and not found["causal"].checked
        assert list(lineup.line_up(case, inputs, [], None, feature)) == ["ours"]
    assert check(found["ours"].call(0)).within
    if name != "topleft":  # which is no other problem where there are as many keys as queries
        assert not check(contenders.ours(case.plain)(*inputs[0])).within, "a result without the feature"
    if "mask" not in name:
        rows, keys = torch.arange(64), torch.arange(64)
        pairs = int(feature.visible(keys <= rows[:, None], rows, keys).sum())
        full = 64 * 65 // 2 if name == "leftpad" else pairs  # of its first sequence
        assert case.visible_pairs == pairs + full


class InProcess(against.Process):
    """What a process of its own answers, without one."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, []
        self.answers = against.serve((self.sent.pop() for _ in itertools.count()), name, None, 0)
        self.build = next(self.answers)

    def ask(self, **request: Any) -> Any:
        self.sent.append(json.loads(json.dumps(request)))
        return json.loads(json.dumps(next(self.answers)))


@pytest.mark.usefixtures("fake_gpu")
def test_another_build_takes_turns_and_may_not_know_what_this_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda number: contenders.nullcontext())
    monkeypatch.setattr(against, "select_cases", lambda names: [PACKED])
    ours, other = InProcess("ours"), InProcess("other")
    entry: Any = against.measure_case(PACKED, ours, other, 0.1)
    result = {**synthetic([SMALL]), "cases": [entry], "peers": ["other"]}
    result["machine"]["other"] = {"package": "0.0", "build": {"source_hash": "abc"}}
    [section] = report.sections(result)
    assert section.rows[0][:2] == [PACKED.label, "1.00x"]
    assert section.means == ["packed, geometric mean: other build 1.00x (worst 1.00x)."]
    assert "Other build: cutlass_fmha 0.0, sources abc" in report.text(result)
    assert entry["results"]["ours"]["row"] == "fwd_row"

    older = TypeError("attention() got an unexpected keyword argument 'cu_seqlens_q'")
    monkeypatch.setattr("cutlass_fmha.attention", Mock(side_effect=older))
    assert other.ask(prepare=PACKED.name)["result"]["reason"].endswith("'cu_seqlens_q'")
    with pytest.raises(TypeError, match="unexpected keyword"):
        ours.ask(prepare=PACKED.name)


def test_another_build_is_the_package_in_its_directory(tmp_path: Path) -> None:
    (package := tmp_path / "cutlass_fmha").mkdir()
    (package / "__init__.py").write_text("print('noise')\n__version__ = '0.0.1'\n")
    (package / "_C.py").write_text("def build_info():\n    return {'source_hash': 'abc'}\n")
    with against.Process("other", str(tmp_path), None, 0) as process:
        assert process.build == {"directory": str(package), "package": "0.0.1", "build": {"source_hash": "abc"}}
        with pytest.raises(runner.CannotMeasure, match="build 'other' ended with status 1"):
            process.ask(done=True)


@pytest.mark.gpu
def test_a_captured_call_is_timed_on_the_gpu() -> None:
    case = Case("latency", 1, 8, 8, 512, 512, 64, "float16")
    results: Any = runner.measure_case(case, ["flash", "efficient"], None, 0.05, 0)["results"]
    for name, result in results.items():
        assert result["status"] == "ok" and result["error_ratio"] <= 1.0, name
        assert 0.0 < result["min_us"] <= result["p50_us"] <= result["p90_us"]


@pytest.mark.usefixtures("small_features")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "of", [{}, {"lengths": (16, 40)}, *({"feature": x} for x in ("dropout", "mask", "head_bias", "block_mask"))]
)
def test_gradients_are_checked_and_a_wrong_one_is_found(causal: bool, of: dict[str, Any]) -> None:
    case = Case("backward", 2, 4, 2, 40, 40, 32, "float16", causal=causal, **of)
    inputs = contenders.make_inputs(case, 2, torch.device("cpu"))
    call, check = gradients.ours(case, inputs), gradients.GradientCheck(case, inputs)
    found = call(0)
    assert check(found).within and not check(call(1)).within
    for x in found:
        x[-1, -1, (0, -1)] += 0.1
        assert not check(found).within
        x[-1, -1, (0, -1)] -= 0.1
    assert case.name.endswith("_backward") and case.flop == 10 * 4 * case.visible_pairs * 32
