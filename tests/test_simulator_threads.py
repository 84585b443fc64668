"""How the simulator runs threads: divergence, what lanes exchange, barriers, and what it finds wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import ptx
import pytest

SEEDS = range(12)
#: %n is the thread, %o the address of its element of p0.
BEGIN = (
    ".reg .b32 %n, %x, %y, %z; .reg .b64 %o, %w; .reg .pred %p, %q; mov.u32 %n, %tid.x;"
    "ld.param.u64 %o, [p0]; mad.wide.u32 %o, %n, 4, %o;"
)
END = "st.global.u32 [%o], %x; ret;"
SHARED = ".extern .shared .align 16 .b8 memory[];"


def results(body: str, threads: int = 32, **options: Any) -> np.ndarray:
    """What each thread leaves in %x."""
    out = np.full(threads, 0xDEAD, dtype=np.uint32)
    ptx.run(BEGIN + body + END, out, threads=threads, **options)
    return out


def of_each(model: Any, threads: int = 32) -> np.ndarray:
    return np.array([model(n) for n in range(threads)], dtype=np.uint32)


# ---- divergence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_branches_nest_and_meet(seed: int):
    body = """
        setp.lt.u32 %p, %n, 20; mov.u32 %x, 1;
        @!%p bra ELSE;
        and.b32 %y, %n, 1; setp.eq.u32 %q, %y, 0;
        @%q bra EVEN;
        add.u32 %x, %x, 10; bra.uni JOINED;
    EVEN:
        add.u32 %x, %x, 100;
    JOINED:
        vote.sync.ballot.b32 %z, %q, 0xfffff;
        add.u32 %x, %x, %z; bra.uni END;
    ELSE:
        add.u32 %x, %x, 1000;
    END:
        shfl.sync.idx.b32 %y, %x, 31, 31, -1; add.u32 %x, %x, %y;
    """
    expected = of_each(lambda n: (1 + (10 if n % 2 else 100) + 0x55555 if n < 20 else 1001) + 1001)
    assert np.array_equal(results(body, seed=seed), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_leave_a_loop_one_by_one(seed: int):
    body = """
        mov.u32 %x, 0; mov.u32 %y, 0;
    LOOP:
        setp.ge.u32 %p, %y, %n;
        @%p bra OUT;
        add.u32 %y, %y, 1; mad.lo.u32 %x, %y, %y, %x;
        bra.uni LOOP;
    OUT:
        vote.sync.any.pred %q, %p, -1; selp.u32 %z, 7, 9, %q; add.u32 %x, %x, %z;
    """
    expected = of_each(lambda n: sum(i * i for i in range(n + 1)) + 7)
    assert np.array_equal(results(body, seed=seed), expected)


def test_lanes_that_ended_are_not_waited_for():
    out = np.zeros(32, dtype=np.uint32)
    body = """
        mov.u32 %x, 5; setp.lt.u32 %p, %n, 8;
        @%p ret;
        setp.lt.u32 %p, %n, 16;
        @%p bra SIDE;
        add.u32 %x, %x, 1;
    SIDE:
        activemask.b32 %y; add.u32 %x, %x, %y;
    """
    ptx.run(BEGIN + body + END, out)
    assert np.array_equal(out, of_each(lambda n: 0 if n < 8 else (5 if n < 16 else 6) + 0xFFFFFF00))


def test_a_guarded_instruction_leaves_other_lanes_alone():
    assert np.array_equal(
        results("mov.u32 %x, 3; setp.gt.u32 %p, %n, 9; @%p add.u32 %x, %x, %n; @!%p mul.lo.u32 %x, %x, 4;"),
        of_each(lambda n: 3 + n if n > 9 else 12),
    )


def test_a_part_of_a_warp_and_dimensions_of_blocks():
    out = np.zeros(40, dtype=np.uint32)
    body = """
        mov.u32 %y, %tid.y; mov.u32 %z, %ntid.x; mad.lo.u32 %y, %y, %z, %n; mov.u32 %x, %ntid.y;
        ld.param.u64 %o, [p0]; mad.wide.u32 %o, %y, 4, %o; mad.lo.u32 %x, %x, 100, %y;
    """
    ptx.run(BEGIN + body + END, out, threads=(10, 4, 1))
    assert np.array_equal(out, of_each(lambda n: 400 + n, 40))


# ---- what lanes exchange -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "distance", "clamp", "model"),
    [
        ("bfly", 5, 31, lambda n: n ^ 5),
        ("bfly", 2, 0x1C03, lambda n: n ^ 2),
        ("idx", 6, 31, lambda n: 6),
        ("idx", 6, 0x1807, lambda n: n // 8 * 8 + 6),
    ],
)
def test_shuffles(mode: str, distance: int, clamp: int, model: Any):
    body = f"mul.lo.u32 %y, %n, 3; shfl.sync.{mode}.b32 %x|%p, %y, {distance}, {clamp}, -1;"
    assert np.array_equal(results(body), of_each(lambda n: 3 * model(n)))


def test_votes_and_elections():
    assert set(results("setp.eq.u32 %p, %n, 4; vote.sync.any.pred %q, %p, -1; selp.u32 %x, 1, 0, %q;")) == {1}
    assert set(results("setp.eq.u32 %p, %n, 32; vote.sync.any.pred %q, %p, -1; selp.u32 %x, 1, 0, %q;")) == {
        0
    }
    assert np.count_nonzero(results("elect.sync %y|%p, -1; selp.u32 %x, 1, 0, %p;")) == 1


def test_a_warp_that_parted_can_not_vote_together():
    with pytest.raises(ptx.SimulationError, match="must execute this together"):
        results("setp.lt.u32 %p, %n, 4; @%p bra A; vote.sync.any.pred %q, %p, -1; A: mov.u32 %x, 0;")
    with pytest.raises(ptx.SimulationError, match="all lanes of the warp must execute this together"):
        results("setp.lt.u32 %p, %n, 4; mov.u32 %x, 0; @%p bar.sync 0;")


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_wait_for_each_other_in_bar_warp_sync(seed: int):
    body = """
        mov.u32 %y, memory; mov.u32 %x, 0; setp.eq.u32 %p, %n, 3;
        @!%p bra READ;
        st.shared.u32 [%y], 42; bar.warp.sync -1; bra.uni DONE;
    READ:
        bar.warp.sync -1; ld.shared.u32 %x, [%y];
    DONE:
        add.u32 %x, %x, 1;
    """
    expected = of_each(lambda n: 1 if n == 3 else 43)
    assert np.array_equal(results(body, shared=16, seed=seed, declarations=SHARED), expected)


# ---- barriers ----------------------------------------------------------------------------------------------

REVERSE = """
    mov.u32 %y, memory; mad.lo.u32 %z, %n, 4, %y; st.shared.u32 [%z], %n;
    {barrier}
    xor.b32 %z, %n, 127; mad.lo.u32 %z, %z, 4, %y; ld.shared.u32 %x, [%z];
"""


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync.aligned 3, 128;"])
@pytest.mark.parametrize("seed", SEEDS)
def test_threads_exchange_through_shared_memory(seed: int, barrier: str):
    body = REVERSE.format(barrier=barrier)
    found = results(body, threads=128, shared=512, seed=seed, declarations=SHARED)
    assert np.array_equal(found, of_each(lambda n: 127 - n, 128))


def test_a_missing_barrier_is_found():
    body = REVERSE.format(barrier="")
    found = [results(body, threads=128, shared=512, seed=seed, declarations=SHARED)[:64] for seed in SEEDS]
    assert any((x == 0x7FDA7FDA).any() for x in found), "what was not written yet is NaN"


def test_arrivals_without_waiting_and_two_barriers_at_once():
    body = """
        mov.u32 %x, 0; shr.u32 %y, %n, 5; setp.eq.u32 %p, %y, 0; mov.u32 %z, memory;
        @%p bra FIRST;
        bar.sync 2, 64; ld.shared.u32 %x, [%z]; bra.uni END;
    FIRST:
        st.shared.u32 [%z], 8; bar.arrive 2, 64;
    END:
    """
    for seed in SEEDS:
        found = results(body, threads=64, shared=16, seed=seed, declarations=SHARED)
        assert np.array_equal(found, of_each(lambda n: 8 if n >= 32 else 0, 64))


def test_a_deadlock_says_who_waits_for_what():
    body = "mov.u32 %x, 0; setp.lt.u32 %p, %n, 32; @%p bra END; bar.sync 5, 96; END:"
    with pytest.raises(ptx.SimulationError, match="deadlock; .*for barrier 5, where 32 of 96 threads are"):
        results(body, threads=64)
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p, [%y], 0; @!%p bra W;"
    body = f"mov.u32 %x, 0; mov.u32 %y, memory; mbarrier.init.shared.b64 [%y], 33; {wait}"
    with pytest.raises(ptx.SimulationError, match="deadlock; .*for parity 0 of the mbarrier at 1024"):
        results("mov.u32 %x, %n;" + body, shared=16, declarations=SHARED)


def test_threads_that_disagree_about_a_barrier():
    body = "mov.u32 %x, 0; setp.lt.u32 %p, %n, 32; @%p bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:"
    with pytest.raises(ptx.SimulationError, match="barrier 1 is for (64|96) threads by others"):
        results(body, threads=64)


PIPELINE = """
    .reg .b32 %full, %empty, %i, %parity;
    mov.u32 %full, memory; add.u32 %empty, %full, 8; mov.u32 %x, 0; mov.u32 %i, 0;
    setp.eq.u32 %p, %n, 0;
    @%p mbarrier.init.shared.b64 [%full], 32;
    @%p mbarrier.init.shared.b64 [%empty], 32;
    bar.sync 0;
    setp.ge.u32 %p, %n, 32; and.b32 %z, %n, 31; mad.lo.u32 %z, %z, 4, %full;
    @%p bra CONSUME;
PRODUCE:
    and.b32 %parity, %i, 1; xor.b32 %parity, %parity, {first_parity};
EMPTY:
    mbarrier.{ask}.parity.shared.b64 %q, [%empty], %parity;
    @!%q bra EMPTY;
    add.u32 %y, %n, %i; st.shared.u32 [%z+16], %y; mbarrier.arrive.shared.b64 _, [%full];
    add.u32 %i, %i, 1; setp.lt.u32 %q, %i, 5;
    @%q bra PRODUCE;
    bra.uni END;
CONSUME:
    and.b32 %parity, %i, 1;
FULL:
    mbarrier.{ask}.parity.shared.b64 %q, [%full], %parity;
    @!%q bra FULL;
    ld.shared.u32 %y, [%z+16]; mad.lo.u32 %x, %x, 7, %y; mbarrier.arrive.shared.b64 _, [%empty];
    add.u32 %i, %i, 1; setp.lt.u32 %q, %i, 5;
    @%q bra CONSUME;
END:
"""


def consumed(n: int) -> int:
    x = 0
    for i in range(5):
        x = 7 * x + n - 32 + i
    return x if n >= 32 else 0


@pytest.mark.parametrize("ask", ["try_wait", "test_wait"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_mbarriers(seed: int, ask: str):
    body = PIPELINE.format(ask=ask, first_parity=1)
    found = results(body, threads=64, shared=256, seed=seed, declarations=SHARED)
    assert np.array_equal(found, of_each(consumed, 64))


@pytest.mark.parametrize("ask", ["try_wait", "test_wait"])
def test_a_ring_that_begins_with_the_wrong_parity_locks_up(ask: str):
    body = PIPELINE.format(ask=ask, first_parity=0)
    with pytest.raises(ptx.SimulationError, match="deadlock"):
        results(body, threads=64, shared=256, declarations=SHARED)


@pytest.mark.parametrize(("others", "outcome"), [("arrive_drop", "ends"), ("arrive", "deadlock")])
def test_who_drops_out_of_an_mbarrier_is_not_expected_again(others: str, outcome: str):
    wait = "mbarrier.test_wait.parity.shared.b64 %q, [%y], {}; @!%q bra PHASE{};"
    body = f"""
        mov.u32 %y, memory; setp.eq.u32 %p, %n, 0; @%p mbarrier.init.shared.b64 [%y], 32; bar.sync 0;
        @%p mbarrier.arrive.shared.b64 _, [%y]; @!%p mbarrier.{others}.shared.b64 _, [%y];
    PHASE0: {wait.format(0, 0)}
        @%p mbarrier.arrive.shared.b64 _, [%y];
    PHASE1: {wait.format(1, 1)}
        add.u32 %x, %n, 7;
    """
    if outcome == "ends":
        found = results(body, shared=16, declarations=SHARED)
        assert np.array_equal(found, of_each(lambda n: n + 7, 32))
    else:
        with pytest.raises(ptx.SimulationError, match=outcome):
            results(body, shared=16, declarations=SHARED)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("mbarrier.arrive.shared.b64 _, [%y];", "no mbarrier at shared address 1024"),
        ("mbarrier.init.shared.b64 [%y], 1; mbarrier.arrive.shared.b64 _, [%y], 2;", "more arrivals than"),
        ("ld.shared.u32 %x, [%y+16];", "shared address 1040 is outside of the block's"),
        ("ld.shared.u32 %x, [%y+2];", "shared address 1026 is not aligned"),
        ("st.shared.u32 [%y+-4], %x;", "shared address 1020 is outside of the block's"),
        ("ld.global.u32 %x, [%o+2];", "is not aligned"),
        ("mov.u64 %w, 8; ld.global.u32 %x, [%w];", "address 8"),
        ("trap;", "the kernel stops itself"),
    ],
)
def test_what_a_gpu_would_refuse(body: str, complaint: str):
    with pytest.raises(ptx.SimulationError, match=complaint):
        results("mov.u32 %x, 0; mov.u32 %y, memory;" + body, shared=16, declarations=SHARED)


# ---- memory ------------------------------------------------------------------------------------------------


def test_vectors_and_narrow_types_are_loaded_into_wider_registers():
    body = """
        .reg .b32 %v<4>; .reg .b64 %l; mov.u32 %y, memory; mad.lo.u32 %y, %n, 16, %y;
        not.b32 %z, %n; st.shared.v4.b32 [%y], {%n, %z, 3, %n};
        ld.shared.v2.u32 {%v0, %v1}, [%y]; ld.shared.s8 %l, [%y+4]; cvt.u32.u64 %v2, %l;
        ld.shared.u8 %v3, [%y+4]; sub.u32 %v3, %v3, %v2; add.u32 %x, %v0, %v1; add.u32 %x, %x, %v3;
    """
    # n + ~n = -1, and 256 lie between a byte and what it is with a sign.
    assert set(results(body, shared=512, declarations=SHARED)) == {255}


def test_shared_memory_has_generic_addresses():
    body = """
        .reg .b64 %a, %b; mov.u32 %y, memory; cvt.u64.u32 %a, %y; cvta.shared.u64 %b, %a;
        mad.wide.u32 %b, %n, 4, %b; st.u32 [%b], %n; cvta.to.shared.u64 %a, %b; ld.shared.u32 %x, [%a];
    """
    assert np.array_equal(results(body, shared=128, declarations=SHARED), of_each(lambda n: n))
    with pytest.raises(ptx.SimulationError, match="outside of the block's"):
        results(body, shared=64, declarations=SHARED)


def test_static_constant_and_local_memory():
    body = """
        .local .align 8 .b8 own[8]; .reg .b64 %l; .shared .align 4 .b32 kept[32];
        mov.u64 %l, own; st.local.u32 [%l+4], %n;
        mov.u32 %y, kept; mad.lo.u32 %y, %n, 4, %y; st.shared.u32 [%y], %n;
        mov.u64 %w, table; ld.const.u32 %x, [%w+4]; ld.local.u32 %z, [own+4]; mad.lo.u32 %x, %x, %z, 0;
        ld.shared.u32 %z, [%y]; add.u32 %x, %x, %z;
    """
    declarations = ".const .align 4 .b32 table[2] = {1, 6};"
    assert np.array_equal(results(body, declarations=declarations), of_each(lambda n: 7 * n))


def test_atomics():
    out = np.zeros(64, dtype=np.uint32)
    body = "ld.param.u64 %o, [p0]; atom.global.add.u32 %x, [%o], 1; red.global.max.u32 [%o+4], %n; ret;"
    ptx.run(BEGIN + body, out, threads=64, blocks=5)
    assert tuple(out[:2]) == (320, 63)
    total = np.zeros(1, dtype=np.float32)
    ptx.run(BEGIN + "ld.param.u64 %o, [p0]; red.relaxed.gpu.global.add.f32 [%o], 0f3F000000; ret;", total)
    assert total[0] == 16
    four = np.zeros(4, dtype=np.float32)
    numbers = "0f3F800000, 0f40000000, 0f40400000, 0f40800000"
    ptx.run(BEGIN + "ld.param.u64 %o, [p0]; red.global.add.v4.f32 [%o], {" + numbers + "}; ret;", four)
    assert tuple(four) == (32, 64, 96, 128)


def test_blocks_are_told_apart():
    out = np.zeros(96, dtype=np.uint32)
    body = "mov.u32 %y, %ctaid.x; mad.wide.u32 %o, %y, 128, %o;"
    body += "mov.u32 %x, %nctaid.x; mad.lo.u32 %x, %x, 10, %y;"
    ptx.run(BEGIN + body + END, out, blocks=3, seed=1)
    assert np.array_equal(out, np.repeat([30, 31, 32], 32))
