"""Calibration as a file: what is kept, which file counts, the command that makes it, and explain's times."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import resources
import torch
from fake_build import L4, make_build
from fake_calibration import BUILD, a_calibration, fake_gpu, predicted, true_costs

import cutlass_fmha
from cutlass_fmha import _C, cli, cost
from cutlass_fmha.calibrate import command, problems
from cutlass_fmha.cost import PRICES, datasheet, store
from cutlass_fmha.dispatch import choose, device
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.problem import Problem

pytestmark = pytest.mark.usefixtures("hermetic")


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_calibration_survives_its_file(tmp_path):
    given = a_calibration()
    store.save(given, tmp_path / "deep" / "c.json")
    found = store.loads((tmp_path / "deep" / "c.json").read_text(), given.origin)
    assert found.rows.keys() == given.rows.keys()
    for name, expected in given.rows.items():
        assert asdict(found.rows[name].cost) == pytest.approx(asdict(expected.cost), rel=1e-3)
    assert replace(found, rows={}) == replace(given, rows={})
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c.json"]  # nothing temporary is left


def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.save(a_calibration(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def damaged(**changes: object) -> str:
    content = json.loads(store.dumps(a_calibration()))
    for place, value in changes.items():
        if place in (*PRICES, "resident", "error"):
            next(iter(content["rows"].values()))[place] = value
        elif value is None:
            del content[place]
        else:
            content[place] = value
    return json.dumps(content)


DAMAGES = [
    ("", "it is no JSON"),
    (damaged(resident=0), "0 is no count"),
    ("[1]", "its schema is not 'cutlass_fmha-costs-"),
    (damaged(schema="cutlass_fmha-costs-2"), "its schema is not 'cutlass_fmha-costs-3'"),
    (damaged(rows=None), "it lacks 'rows'"),
    (damaged(step=-1.0), "-1.0 is no finite number from 0 on"),
    (damaged(step=math.nan), "nan is no finite number"),
    (damaged(step="fast"), "'fast' is no finite number"),
    (damaged(scale={"sm89_tile": 0}), "a scale of 0"),
    (damaged(sm_count=0), "0 is no count"),
    (damaged(rows=[]), "'list' object has no attribute"),
    (damaged(gpu="NVIDIA L40S"), "it is of NVIDIA L40S with 58 SMs"),
    (damaged(sm_count=57), "it is of NVIDIA L4 with 57 SMs"),
    (damaged(package="0.0.1"), "it is of cutlass_fmha 0.0.1"),
    (damaged(source_hash="other"), "it is of kernels from other sources"),
]


@pytest.mark.parametrize(("text", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_damaged_or_stale_file_is_ignored_with_one_warning(hermetic, caplog, text: str, message: str):
    caplog.set_level(logging.WARNING, logger="cutlass_fmha")
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    problem = Problem(1, 512, 512, 8, 8, 64, "float16")
    expected = choose.choose(problem, L4, table=BUILD, calibration=store.default(L4))
    for _ in range(3):
        assert choose.choose(problem, L4, table=BUILD) == expected
    (record,) = caplog.records
    assert message in record.getMessage() and str(path) in record.getMessage()
    assert "`python -m cutlass_fmha calibrate` renews it" in record.getMessage()


def test_without_a_home_or_a_cache_there_is_no_calibration(hermetic, monkeypatch, caplog):
    store.user_file(L4.name, cutlass_fmha.__version__).mkdir(parents=True)  # which can't be read
    assert store.for_device(L4) == store.default(L4)
    assert len(caplog.records) == 1
    monkeypatch.setenv(store.CACHE_DIR, str(Path(__file__) / "cache"))
    store.forget()
    assert store.for_device(L4).origin == store.default(L4).origin
    monkeypatch.delenv(store.CACHE_DIR)
    usual = Path.home() / ".cache"
    for named, base in (("", usual), ("/elsewhere", Path("/elsewhere")), ("x", usual)):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert store.cache_directory() == base / "cutlass_fmha"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    store.forget()
    assert store.for_device(L4).origin == store.default(L4).origin
    assert len(caplog.records) == 1
    with pytest.raises(FileNotFoundError, match=f"no home directory.* set {store.CACHE_DIR}"):
        store.user_file(L4.name, "1")


# ---- which one counts --------------------------------------------------------------------------------------


def test_the_users_calibration_counts_and_says_so(hermetic):
    assert store.for_device(L4) == store.default(L4)
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    assert path == hermetic / f"costs-nvidia-l4-{cutlass_fmha.__version__}.json"
    store.save(a_calibration(), path)
    assert store.for_device(L4) == store.default(L4)  # looked for once
    store.forget()
    found = store.for_device(L4)
    assert found.origin == f"measured on this machine, {path}"
    row = BUILD.by_name("fwd_sm89_f16_d64_m64n64w4")
    assert found.cost(row, L4) == found.rows[row.name].cost
    absent = BUILD.by_name("fwd_sm89_f16_d128_m64n64w4")
    assert found.cost(absent, L4) == datasheet.row_cost(absent, L4).scaled(1.25)  # the scale of its kind
    split = BUILD.by_name("fwd_sm89_f16_d128_m16n16w8k8")
    assert found.cost(split, L4) == datasheet.row_cost(split, L4)
    assert store.for_device(device.PRESETS["rtx4090"]).rows == {}


def test_a_gpu_that_takes_rows_of_another_architecture_pays_its_own_rates():
    h200, gb10, build = device.PRESETS["h200"], device.PRESETS["gb10"], make_build((89, 120))
    for name in ("fwd_sm89_f16_d128_m256n64w8", "fwd_sm89_f16_d128_m16n16w8k8", "fwd_sm120_f16_d128_m64n64w4"):
        row = build.by_name(name)
        assert datasheet.row_cost(row, h200) == datasheet.row_cost(replace(row, arch=90), h200)
        assert datasheet.row_cost(row, h200) != datasheet.row_cost(row, replace(h200, capability=(8, 9)))
    row = build.by_name("fwd_sm120_f16_d128_m64n64w4")  # the datasheets have no capability 12.1
    assert datasheet.row_cost(row, gb10) == datasheet.row_cost(row, replace(gb10, capability=(12, 0)))


def test_the_shipped_calibration_counts_after_the_users(hermetic, tmp_path, monkeypatch):
    shipped = a_calibration(source_hash="of the release", package="the same")
    path = tmp_path / "shipped.json"
    store.save(shipped, path)
    monkeypatch.setattr(store, "shipped_file", lambda gpu: path if gpu == L4.name else tmp_path / "absent")
    assert store.for_device(L4).origin == "measured on NVIDIA L4, shipped with the package"
    assert store.for_device(replace(L4, sm_count=30)).rows == {}  # a part of one
    store.save(a_calibration(), store.user_file(L4.name, cutlass_fmha.__version__))
    store.forget()
    assert "measured on this machine" in store.for_device(L4).origin


def test_the_environment_turns_files_off_or_names_one(hermetic, tmp_path, monkeypatch):
    store.save(a_calibration(), store.user_file(L4.name, cutlass_fmha.__version__))
    monkeypatch.setenv(store.WHICH, "off")
    assert store.for_device(L4) == store.default(L4)
    named = tmp_path / "named.json"
    store.save(a_calibration(source_hash="of a build in progress", scale={}), named)
    monkeypatch.setenv(store.WHICH, str(named))
    assert store.for_device(L4).origin == f"{named}, named by {store.WHICH}"
    assert store.for_device(device.PRESETS["rtx4090"]).rows == {}  # it is of another GPU
    named.write_text("{")
    store.forget()
    with pytest.raises(store.InvalidCalibration, match="named.json can't be used: it is no JSON"):
        store.for_device(L4)


SHIPPED = sorted((Path(cutlass_fmha.__file__).parent / "data" / "costs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_valid_and_of_rows_of_the_manifest(path: Path):
    found = store.loads(path.read_text(), "")
    assert path.stem == store.slug(found.gpu)
    assert found.rows and found.scale
    assert len({name.split("_")[1] for name in found.rows}) == 1  # one architecture
    stale = set(found.rows) - resources.manifest_rows().keys()
    assert not stale, f"calibrate {found.gpu} again: these rows are no more"


# The row that was the fastest of these on an H200, with its microseconds in a CUDA graph, full and causal.
FASTEST_ON_AN_H200 = [
    (32, 256, "m32n64w8k8", 3.36, 3.56),
    (32, 512, "m32n64w8k8", 4.59, 4.40),
    (64, 512, "m32n32w8k8", 5.16, 4.91),
]


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize(("head_dim", "seqlen", "tile", "full_us", "causal_us"), FASTEST_ON_AN_H200)
def test_the_shipped_costs_find_the_row_that_was_measured_to_be_the_fastest(
    head_dim: int, seqlen: int, tile: str, full_us: float, causal_us: float, causal: str
):
    h200 = device.PRESETS["h200"]
    shipped = store.for_device(h200)
    assert shipped.origin == "measured on NVIDIA H200, shipped with the package"
    build = tables.Table(tuple(row for row in make_build((90,)).rows if row.name in shipped.rows))
    problem = Problem(1, seqlen, seqlen, 8, 8, head_dim, "float16", causal)
    chosen = choose.choose(problem, h200, table=build)
    assert chosen.name == f"fwd_sm90_f16_d{head_dim}_{tile}_pdl"
    measured = full_us if causal == "none" else causal_us
    assert choose.predicted_us(chosen, problem, h200) == pytest.approx(measured, rel=0.2)


# ---- the command -------------------------------------------------------------------------------------------


def test_calibrate_measures_fits_and_keeps(hermetic, monkeypatch, capsys, tmp_path):
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setattr(problems, "DRAWN", 4)
    assert cli.main(["calibrate", "--report", "--timings", str(tmp_path / "t.json")]) == 0
    out, err = capsys.readouterr()
    path = store.user_file(L4.name, cutlass_fmha.__version__)
    assert f"kept in {path}" in out and "calibrate: " in err and gpu.launches
    assert all(f"\n{row.name} " in "\n" + out for row in BUILD.rows if not row.takes_features)
    assert "of the picks are within 5% of the best row" in out
    found = store.for_device(L4)
    assert found.origin == f"measured on this machine, {path}"
    assert {row.name for row in BUILD.rows if not row.takes_features} <= set(found.rows)
    again = tmp_path / "again.json"
    assert cli.main(["calibrate", "--from-timings", f"{tmp_path}/t.json", "--output", str(again)]) == 0
    refitted = store.loads(again.read_text(), found.origin)  # from times that were rounded to a nanosecond
    assert replace(refitted, rows={}, scale={}) == replace(found, rows={}, scale={})
    for name, one in refitted.rows.items():
        problem = Problem(2, 1024, 1024, 8, 8, BUILD.by_name(name).head_dim, "float16")
        row = BUILD.by_name(name)
        assert predicted(row, problem, refitted) == pytest.approx(predicted(row, problem, found), rel=0.01)
        assert one.samples == found.rows[name].samples


def test_calibrate_refuses_what_could_not_be_used(capsys, monkeypatch, tmp_path):
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_available", lambda: False)
        assert command.main([]) == 1
        err = capsys.readouterr().err
        assert err.startswith("calibrate: a GPU is timed and ") and len(err.splitlines()) == 1
    fake_gpu(monkeypatch)
    monkeypatch.setenv(device.FORCE_ARCH, "89")
    assert command.main([]) == 1
    assert "unset it, or name a file with --output" in capsys.readouterr().err
    monkeypatch.delenv(device.FORCE_ARCH)
    with monkeypatch.context() as emulation:
        emulation.setattr(_C, "build_info", lambda: {"emulation": True, "source_hash": "0"})
        assert command.main([]) == 1
        assert "this build emulates other GPUs" in capsys.readouterr().err
    monkeypatch.setattr(tables, "this_build", lambda: make_build((120,)))
    assert command.main([]) == 1
    assert "holds rows for sm_120 only, none of which NVIDIA L4" in capsys.readouterr().err
    assert command.main(["--from-timings", str(tmp_path / "absent.json")]) == 1
    assert "absent.json holds no timings" in capsys.readouterr().err


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_measures_every_eligible_row(monkeypatch, capsys):
    gpu = fake_gpu(monkeypatch, noise=0.0)
    slow = "fwd_sm89_f16_d64_m256n64w8"
    found = cutlass_fmha.explain(shape=(1, 512, 8, 64), dtype="float16", device=0, measure=True)
    assert found.costs == "the default for GPUs that were never measured"
    for verdict in found.rows:
        expected = cost.predict(verdict.row, found.problem, L4, true_costs()[verdict.row.name])
        assert verdict.measured_us == (pytest.approx(expected) if verdict.eligible else None)
    gpu.law = lambda row, problem: 30.0 if row.name == slow else 40.0
    found = cutlass_fmha.explain(shape=(1, 512, 8, 64), dtype="float16", measure=True)
    assert found.winner != slow and found.lost == pytest.approx(1 / 3)
    assert str(found).endswith(f"measured: {slow} is the fastest; the row that runs takes 33.3% longer")
    assert cli.main(["explain", "--shape", "1,512,8,64", "--dtype", "float16", "--measure"]) == 0
    text = capsys.readouterr().out
    assert "  measured\n" in text and "       40.0 us  eligible\n" in text
    forced = cutlass_fmha.explain(shape=(1, 512, 8, 64), dtype="float16", row=slow, measure=True)
    assert forced.lost == 0 and str(forced).endswith("measured: no eligible row is faster")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h200"}, r"measured on a CUDA device of this machine, and NVIDIA H200 .* is none"),
        ({"device": "cpu"}, "and the CPU is none"),
        ({"arch": 89}, "and NVIDIA GeForce RTX 4090 .* is none"),
        ({"shape": (0, 512, 8, 64)}, "an empty problem launches nothing"),
    ],
)
def test_explain_measures_only_what_is_there(monkeypatch, arguments: dict, message: str):
    fake_gpu(monkeypatch)
    with pytest.raises(ValueError, match=message):
        cutlass_fmha.explain(**{"shape": (1, 512, 8, 64), "measure": True, **arguments})
