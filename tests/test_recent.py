"""What was used lately, and what is asked again for every length: the caches of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import choose, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.problem import CAUSAL, EVEN, FEATURES, MAX_KEY_SPAN, Problem, typical
from cutlass_fmha.launch.recent import Recent


def found(cache: Recent[int, str], key: int) -> str | None:
    return cache.get(key) or cache.revive(key)


@given(st.lists(st.integers(0, 30)), st.integers(2, 12))
def test_what_was_used_last_is_there_and_no_more_than_there_is_room_for(keys, size):
    cache: Recent[int, str] = Recent(size)
    for place, key in enumerate(keys):
        if found(cache, key) is None:
            cache.put(key, str(key))
        assert len(cache) <= size
        before = list(dict.fromkeys(reversed(keys[: place + 1])))[: size // 2]  # the last different ones
        assert all(found(cache, key) == str(key) for key in reversed(before))
    cache.clear()
    assert len(cache) == 0


pytestmark = pytest.mark.usefixtures("hermetic")


def consistent(problem: Problem) -> Problem:
    """Windows and documents are features."""
    if "window" not in problem.features:
        problem = replace(problem, window=(-1, -1))
    mean_q, mean_k = problem.mean if "varlen" in problem.features else EVEN
    return replace(problem, mean=(problem.seqlen_q * mean_q // 3, problem.seqlen_k * mean_k // 9))


problems = st.builds(
    Problem,
    batch=st.sampled_from((1, 3, 16)),
    seqlen_q=st.integers(0, 9000),
    seqlen_k=st.integers(0, 40000),
    num_heads=st.sampled_from((8, 32)),
    num_heads_kv=st.sampled_from((2, 8)),
    head_dim=st.sampled_from((40, 64, 128, 320)),
    dtype=st.sampled_from(("float16", "bfloat16", "float32")),
    causal=st.sampled_from(CAUSAL),
    alignment=st.sampled_from((2, 16)),
    head_dim_v=st.sampled_from((None, 64)),
    features=st.lists(st.sampled_from(tuple(FEATURES)), max_size=2, unique=True).map(tuple),
    mean=st.sampled_from((EVEN, (1, 1), (0, 7))),  # of 3 and of 9
    window=st.sampled_from(((-1, -1), (100, 0), (700, 2000), (-1, 300))),
    key_span=st.sampled_from((0, MAX_KEY_SPAN, MAX_KEY_SPAN + 1)),
).map(consistent)
gpus = st.sampled_from(("l4", "h200", "rtx5090")).map(PRESETS.__getitem__)


@given(problems, gpus)
def test_the_rows_that_are_looked_up_are_those_without_a_reason(problem, gpu):
    build = tables.this_build()
    without = [row for row in build.rows if not eligibility.reasons(row, problem, gpu, build)]
    assert eligibility.eligible_rows(problem, gpu, build) == without


@given(problems, gpus)
def test_a_choice_is_that_of_its_class_of_lengths_and_costs_little(problem, gpu):
    build, known = tables.this_build(), store.for_device(gpu)
    if not (eligible := eligibility.eligible_rows(problem, gpu, build)):
        return
    chosen = choose.choose(problem, gpu)
    assert chosen in eligible
    of_class = typical(problem)
    assert typical(of_class) == of_class
    assert of_class.is_decode != problem.is_decode or choose.choose(of_class, gpu) is chosen
    if problem.mean == EVEN:
        assert problem.seqlen_k <= of_class.seqlen_k <= problem.seqlen_k * 17 / 16
    asked = choose.contenders(eligible, problem)
    prices = {row.name: choose.price(row, of_class, gpu, known) for row in asked}
    assert prices[chosen.name] == min(prices.values())


@given(problems, gpus)
@example(Problem(1, 2753, 225, 8, 2, 40, "float16", "bottom-right", 2), PRESETS["l4"])  # few tiles see a key
@example(Problem(1, 307, 1, 32, 2, 64, "float16", "bottom-right", 2), PRESETS["l4"])
@example(Problem(3, 65, 5807, 8, 8, 64, "float16", "bottom-right", 2, features=("bias",)), PRESETS["h200"])
@example(Problem(6, 1039, 1039, 4, 4, 128, "bfloat16", "top-left"), PRESETS["h200"])
@example(Problem(8, 3000, 3000, 8, 8, 64, "float16", features=("window",), window=(100, 0)), PRESETS["l4"])
def test_a_launch_costs_no_less_than_its_bounds(problem, gpu):
    """Rows whose bound is above another's price are never played through."""
    build, known = tables.this_build(), store.for_device(gpu)
    for row in eligibility.eligible_rows(problem, gpu, build):
        offers = eligibility.family(row).offers(row, problem, gpu, known)
        assert 0 <= offers.at_least(problem) <= offers.us(problem)


def test_a_length_never_seen_before_is_priced_only_where_its_class_is_new(monkeypatch):
    priced: list[Problem] = []
    cheapest = choose.cheapest

    def counting(asked, problem):
        priced.append(problem)
        return cheapest(asked, problem)

    monkeypatch.setattr(choose, "cheapest", counting)
    problem = Problem(2, 0, 0, 16, 16, 128, "bfloat16", "bottom-right")
    for length in range(60001, 60001 + 4000):
        choose.choose(replace(problem, seqlen_q=length, seqlen_k=length), PRESETS["h200"])
    assert 1 <= len(priced) <= 3
