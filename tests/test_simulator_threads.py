"""How the simulator runs threads: divergence, what lanes exchange, barriers, and what it finds wrong."""

from collections.abc import Callable
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
SHARED = {"declarations": ".extern .shared .align 16 .b8 memory[];"}


def results(body: str, threads: int = 32, **options: Any) -> np.ndarray:
    """What each thread leaves in %x; 0xDEAD of one that leaves nothing."""
    out = np.full(threads, 0xDEAD, dtype=np.uint32)
    ptx.run(BEGIN + body + END, out, threads=threads, **options)
    return out


DROPPED = """
    mov.u32 %y, memory; setp.eq.u32 %p, %n, 0; @%p mbarrier.init.shared.b64 [%y], 32; bar.sync 0;
    @%p mbarrier.arrive.shared.b64 _, [%y]; @!%p mbarrier.{others}.shared.b64 _, [%y];
PHASE0: mbarrier.test_wait.parity.shared.b64 %q, [%y], 0; @!%q bra PHASE0;
    @%p mbarrier.arrive.shared.b64 _, [%y];
PHASE1: mbarrier.test_wait.parity.shared.b64 %q, [%y], 1; @!%q bra PHASE1;
    add.u32 %x, %n, 7;
"""

#: A body, what it leaves in %x of each thread of all blocks, and how it is launched.
PROGRAMS: dict[str, tuple[str, Callable[[int], int], dict[str, Any]]] = {
    "branches nest and meet": (
        """
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
        """,
        lambda n: (1 + (10 if n % 2 else 100) + 0x55555 if n < 20 else 1001) + 1001,
        {},
    ),
    "lanes leave a loop one by one": (
        """
            mov.u32 %x, 0; mov.u32 %y, 0;
        LOOP:
            setp.ge.u32 %p, %y, %n;
            @%p bra OUT;
            add.u32 %y, %y, 1; mad.lo.u32 %x, %y, %y, %x;
            bra.uni LOOP;
        OUT:
            vote.sync.any.pred %q, %p, -1; selp.u32 %z, 7, 9, %q; add.u32 %x, %x, %z;
        """,
        lambda n: sum(i * i for i in range(n + 1)) + 7,
        {},
    ),
    "lanes that ended are not waited for": (
        """
            mov.u32 %x, 5; setp.lt.u32 %p, %n, 8;
            @%p ret;
            setp.lt.u32 %p, %n, 16;
            @%p bra SIDE;
            add.u32 %x, %x, 1;
        SIDE:
            setp.gt.u32 %q, %n, 0; vote.sync.ballot.b32 %y, %q, -1; add.u32 %x, %x, %y;
        """,
        lambda n: 0xDEAD if n < 8 else (5 if n < 16 else 6) + 0xFFFFFF00,
        {},
    ),
    "who drops out of an mbarrier is not expected again": (
        DROPPED.format(others="arrive_drop"),
        lambda n: n + 7,
        {"shared": 16, **SHARED},
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_threads_leave(name: str, seed: int):
    body, model, options = PROGRAMS[name]
    found = results(body, seed=seed, **options)
    assert found.tolist() == [model(n) for n in range(len(found))]


def test_a_missing_barrier_is_found():
    body = """
        mov.u32 %y, memory; mad.lo.u32 %z, %n, 4, %y; st.shared.u32 [%z], %n;
        xor.b32 %z, %n, 127; mad.lo.u32 %z, %z, 4, %y; ld.shared.u32 %x, [%z];
    """
    found = [results(body, seed=seed, threads=128, shared=512, **SHARED)[:64] for seed in SEEDS]
    assert any((x == 0x7FDA7FDA).any() for x in found), "what was not written yet is NaN"


#: What a GPU would refuse, or hang in. %y is the address of 16 bytes of shared memory.
REFUSED = [
    ("mbarrier.arrive.shared.b64 _, [%y];", "no mbarrier at shared address 1024"),
    ("mbarrier.init.shared.b64 [%y], 1; mbarrier.arrive.shared.b64 _, [%y], 2;", "more arrivals than"),
    ("ld.shared.u32 %x, [%y+16];", "shared address 1040 is outside of the block's"),
    ("ld.shared.u32 %x, [%y+2];", "shared address 1026 is not aligned"),
    ("st.shared.u32 [%y+-4], %x;", "shared address 1020 is outside of the block's"),
    ("cvt.u64.u32 %w, %y; cvta.shared.u64 %w, %w; ld.u32 %x, [%w+16];", "outside of the block's"),
    ("ld.global.u32 %x, [%o+2];", "is not aligned"),
    ("mov.u64 %w, 8; ld.global.u32 %x, [%w];", "address 8"),
    # Lanes that parted.
    ("setp.lt.u32 %p, %n, 4; @%p bra A; vote.sync.any.pred %q, %p, -1; A: mov.u32 %x, 0;",
     "must execute this together"),
    ("setp.lt.u32 %p, %n, 4; @%p bar.sync 0;", "the lanes 0xffffffff must execute this together"),
    # Who waits for what.
    ("mbarrier.init.shared.b64 [%y], 33; W: mbarrier.try_wait.parity.shared.b64 %p, [%y], 0; @!%p bra W;",
     "deadlock; .*for parity 0 of the mbarrier at 1024"),
    (DROPPED.format(others="arrive"), "deadlock"),
]  # fmt: skip
REFUSED_OF_TWO_WARPS = [
    ("setp.lt.u32 %p, %n, 32; @%p bra END; bar.sync 5, 96; END:",
     "deadlock; .*for barrier 5, where 32 of 96 threads are"),
    ("setp.lt.u32 %p, %n, 32; @%p bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:",
     "barrier 1 is for (64|96) threads by others"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "complaint", "threads", "shared"),
    [*((*each, 32, 16) for each in REFUSED), *((*each, 64, 256) for each in REFUSED_OF_TWO_WARPS)],
)
def test_what_a_gpu_would_refuse(body: str, complaint: str, threads: int, shared: int):
    with pytest.raises(ptx.SimulationError, match=complaint):
        results("mov.u32 %x, 0; mov.u32 %y, memory;" + body, threads=threads, shared=shared, **SHARED)
