"""What every kernel needs is defined once, in ``src/``; guides name files that there are. Needs no build."""

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
FOLDERS = ("src", "cutlass_fmha", "tests", "tools", "docs", "cmake", "build_backend")
FOLDERS += ("benchmarks", "examples", ".ci", ".github")
PAST = ROOT / "docs/performance-log.md"  # names files that were
GUIDES = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]

#: What -> how its formula is written, and the only files that have it. float32 and head dims above 256
#: (src/wide) multiply and sum in their own way.
DEFINITIONS: dict[str, tuple[str, str]] = {
    "where a lane reads for ldmatrix": (r"\blane % 16\b|\blane / 8 % 2", "core/tile.cuh"),
    "ldmatrix": (r"_LDSM_[NT]>?\b", "core/product.cuh wide/wide_heads.cuh"),
    "mma": (
        r"\bgemm\(|\bfma\(c\[0\]|::fma\(",
        "core/product.cuh core/mma_passes.cuh wide/wide_heads.cuh wide/tf32x3.cuh",
    ),
    "the weight of a partial result": (r"exp2_approx\(fine|expf\(lse", "core/merge.cuh"),
    "a sum of weighted partial results": (r"fmaf\(weight", "core/merge.cuh"),
    "log-sum-exp": (r"\blog2?f\(", "core/online_softmax.cuh core/merge.cuh wide/lane_scores.cuh"),
    "keys of a query": (r"VisibleKeys visible_keys\(|int visible_keys\(", "core/visibility.h"),
    "queries of a key": (r"VisibleQueries visible_queries\(", "core/visibility.h"),
    "a walk over key blocks": (r"struct (Key|Query)Walk\b", "core/visibility.h"),
    "turns and rings": (r"struct (Turns|TilePipeline)\b|mbarrier\.", "core/pipeline.cuh"),
    "a value that stays where it was computed": (r"shfl\.sync\.idx", "core/registers.cuh"),
    "registers to spare": (r"65536 /", "config.h"),
    "the order of tiles": (r"WorkTile work_tile\(|\.by_share", "core/scheduler.h"),
    "a walk with turns": (r"keys\.take\(\)", "forward/tile_walk.cuh"),
    # Two: of tiles by turns, and step by step. The host's is for tests.
    "a walk over keys": (r"\.(template )?step<", "forward/tile_walk.cuh forward/step_walk.cuh host_model.cpp"),
    "a launch, and what a kernel may use": (r"cudaLaunchKernel\(|cudaFuncSetAttribute\(", "table.cpp"),
    "a launch that overlaps": (r"cudaLaunchKernelExC\(", "dependent_launch.h"),
    "the device of a launch": (r"DeviceGuard guard\(", "device_guard.h"),
    "where key parts meet": (r"softmax\.row_sum.*\n.*Layout::sums", "core/key_parts.cuh"),
}


@pytest.mark.parametrize("what", DEFINITIONS)
def test_what_every_kernel_needs_is_defined_once(what: str):
    formula, expected = DEFINITIONS[what]
    files = [f for f in SOURCES.rglob("*") if f.suffix in (".cuh", ".h", ".cpp") and f.is_file()]
    found = {str(f.relative_to(SOURCES)) for f in files if re.search(formula, re.sub(r"//.*", "", f.read_text()))}
    assert found == set(expected.split())


def expanded(path: str) -> list[str]:
    """``a.{h,cpp}`` -> ``a.h``, ``a.cpp``."""
    if not (braces := re.search(r"\{([^{}]*)\}", path)):
        return [path]
    return [p for part in braces[1].split(",") for p in expanded(path.replace(braces[0], part, 1))]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda g: g.stem)
def test_links_of_a_guide_lead_somewhere_and_files_that_it_names_exist(guide: Path):
    text = guide.read_text()
    assert guide.name != "README.md" or len(text.splitlines()) <= 150
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = guide.parent / path if path else guide
        assert target.exists() and (not anchor or anchor in anchors(target)), link
    there = ["/" + str(f.relative_to(ROOT)) for folder in FOLDERS for f in (ROOT / folder).rglob("*")]
    there += [f"/{folder}" for folder in FOLDERS] + [f"/{f.name}" for f in ROOT.iterdir()]
    named = {path for word in re.findall(r"`([\w./{},*-]+)`", text) for path in expanded(word)}
    ours = re.compile(r"\w\*?\.(py|pyi|cuh|h|cpp|cmake|sh)$|^\w[\w/]*/$")  # ends as our files do, or as a directory
    absent = {path for path in named if ours.search(path) and not fnmatch.filter(there, f"*/{path.rstrip('/')}")}
    assert guide == PAST or not absent
