"""The simulator's cp.async and TMA against numpy, and the mistakes with them that it must find."""

import ctypes

import numpy as np
import ptx
import pytest

RNG = np.random.default_rng(2)
SHARED = ".extern .shared .align 1024 .b8 memory[];"
#: %n is the thread, %a<i> the address of its 16 bytes of parameter i.
BEGIN = ".reg .b32 %n, %m, %x<16>; .reg .b64 %a<4>; .reg .pred %p; mov.u32 %n, %tid.x; mov.u32 %m, memory;"
FOUR = "{%x0, %x1, %x2, %x3}"


def addresses(count: int) -> str:
    return "".join(f"ld.param.u64 %a{i}, [p{i}]; mad.wide.u32 %a{i}, %n, 16, %a{i};" for i in range(count))


# ---- cp.async ----------------------------------------------------------------------------------------------

COPY = f"""
    mad.lo.u32 %m, %n, 16, %m;
    cp.async.cg.shared.global.L2::128B [%m], [%a0], 16%READ; cp.async.commit_group;
    add.u32 %x8, %m, 512;
    cp.async.cg.shared.global [%x8], [%a0], 16; cp.async.commit_group;
    %WAIT
    ld.shared.v4.b32 {FOUR}, [%m]; st.global.v4.b32 [%a1], {FOUR};
    ld.shared.v4.b32 {FOUR}, [%x8]; st.global.v4.b32 [%a2], {FOUR}; ret;
"""
ABSENT = 0x7FDA7FDA  # what was not written yet


@pytest.mark.parametrize(
    ("wait", "read", "there"),
    [
        ("cp.async.wait_all;", "", (4, 4)),
        ("cp.async.wait_group 0;", "", (4, 4)),
        ("cp.async.wait_group 1;", "", (4, 0)),
        ("", "", (0, 0)),
        ("cp.async.wait_all;", ", 8", (2, 4)),  # bytes that are not read become zero
        ("cp.async.wait_all;", ", 0", (0, 4)),
    ],
)
def test_two_groups_of_copies_are_there_after_the_wait(wait: str, read: str, there: tuple[int, int]):
    source = RNG.integers(0, 2**30, (32, 4), dtype=np.uint32)
    found = np.zeros_like(source), np.zeros_like(source)
    body = BEGIN + addresses(3) + COPY.replace("%WAIT", wait).replace("%READ", read)
    ptx.run(body, source, *found, shared=1024, declarations=SHARED)
    for words, result in zip(there, found, strict=True):
        assert np.array_equal(result[:, :words], source[:, :words])
        assert (result[:, words:] == (0 if read else ABSENT)).all()


def test_a_copy_that_lands_late_overwrites_what_was_stored():
    source, out = np.ones((32, 4), dtype=np.uint32), np.zeros((32, 4), dtype=np.uint32)
    body = (
        "mad.lo.u32 %m, %n, 16, %m; cp.async.cg.shared.global [%m], [%a0], 16; cp.async.commit_group;"
        "mov.u32 %x0, 9; st.shared.v4.b32 [%m], {%x0, %x0, %x0, %x0}; cp.async.wait_group 0;"
        f"ld.shared.v4.b32 {FOUR}, [%m]; st.global.v4.b32 [%a1], {FOUR}; ret;"
    )
    ptx.run(BEGIN + addresses(2) + body, source, out, shared=512, declarations=SHARED)
    assert (out == 1).all()


# ---- TMA ---------------------------------------------------------------------------------------------------


def tensor_of(*shape: int) -> np.ndarray:
    """Four dimensions of 16-bit elements; those that are left out are 1."""
    return RNG.integers(1, 2**16, (1,) * (4 - len(shape)) + shape, dtype=np.uint16)


def encode(
    tensor: np.ndarray, box: tuple[int, ...], swizzle: int = 0, stride: int = 0, shift: int = 0
) -> tuple[int, bytes]:
    """The CUresult and the description of boxes of so many rows and columns. ``swizzle``: CUtensorMapSwizzle;
    ``stride``: of rows, in place of their own; ``shift``: bytes by which the tensor begins later."""
    space = np.zeros(256, dtype=np.uint8)
    begin = -space.ctypes.data % 128
    extents, steps = np.uint64(tensor.shape[::-1]), np.uint64(tensor.strides[-2::-1])
    steps[:1] = stride or steps[:1]
    pointers = (space.ctypes.data + begin, tensor.ctypes.data + shift, extents.ctypes.data, steps.ctypes.data)
    sizes = (ctypes.c_uint32 * 4)(*box[::-1], 1, 1)
    status = ptx.library().simulator_encode(*map(ctypes.c_void_p, pointers), sizes, ctypes.c_uint32(swizzle))
    return status, space[begin : begin + 128].tobytes()


LOAD = """
    setp.eq.u32 %p, %n, 0; add.u32 %x9, %m, 1024; mov.b64 %a3, map;
    @%p mbarrier.init.shared.b64 [%x9], 1;
    fence.proxy.async.shared::cta; bar.sync 0;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%x9], {expected};
    @%p cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint
        [%m], [%a3, {{{origin}}}], [%x9], %a0;
W:  mbarrier.try_wait.parity.shared.b64 %p, [%x9], 0;
    @!%p bra W;
    mov.u32 %x0, %n;
L:  mad.wide.u32 %a2, %x0, 4, %a0; mad.lo.u32 %x1, %x0, 4, %m;
    ld.shared.u32 %x2, [%x1]; st.global.u32 [%a2], %x2;
    add.u32 %x0, %x0, 32; setp.lt.u32 %p, %x0, 256;
    @%p bra L;
    ret;
"""


def run_with_map(body: str, array: np.ndarray, description: bytes, shared: int, seed: int = 0) -> None:
    """A kernel with the address of an array in %a0, and a tensor's description in its parameter ``map``."""
    body = f"{BEGIN} ld.param.u64 %a0, [p0]; {body}"
    text = ptx.module(body, 1, SHARED, ".param .align 128 .b8 map[128]")
    ptx.run_text(text, [array, description], shared=shared, seed=seed)


def load_box(tensor: np.ndarray, box: tuple[int, int], origin: tuple[int, ...], swizzle: int = 0, more: int = 0):
    """The 512 elements of a box in shared memory; ``more`` bytes are expected than come."""
    status, description = encode(tensor, box, swizzle)
    assert status == 0
    out = np.zeros(512, dtype=np.uint16)
    body = LOAD.format(expected=1024 + more, origin=", ".join(map(str, origin[::-1])))
    run_with_map(body, out, description, shared=1032, seed=1)
    return out


@pytest.mark.parametrize("origin", [(1, 2, 20, 0), (1, 2, -3, 0), (5, 0, 0, 0), (0, -1, 0, 0), (1, 1, 0, 8)])
def test_what_is_outside_of_a_tensor_is_zero(origin: tuple[int, ...]):
    tensor = tensor_of(2, 3, 24, 16)
    box = tuple(slice(40 + at, 40 + at + size) for at, size in zip(origin, (1, 1, 32, 16), strict=True))
    assert np.array_equal(load_box(tensor, (32, 16), origin), np.pad(tensor, 40)[box].reshape(-1))


def test_a_phase_does_not_end_before_all_its_bytes_came():
    with pytest.raises(ptx.SimulationError, match="deadlock"):
        load_box(tensor_of(40, 64), (8, 64), (0, 0, 0, 0), swizzle=3, more=16)


STORE = """
    mov.b64 %a3, map; mad.lo.u32 %x0, %n, 16, %m; mad.wide.u32 %a0, %n, 16, %a0;
    ld.global.v4.b32 {%x1, %x2, %x3, %x4}, [%a0]; st.shared.v4.b32 [%x0], {%x1, %x2, %x3, %x4};
    fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p, %n, 0;
    @!%p bra END;
    cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%a3, {0, 5, 0, 0}], [%m];
    cp.async.bulk.commit_group;
    END: ret;
"""


def test_shared_memory_must_outlive_a_store():
    """That boxes are stored where the tensor is, all rows that copy by TMA show (test_simulated_parity.py)."""
    status, description = encode(to := tensor_of(10, 32), (8, 32))
    assert status == 0
    with pytest.raises(ptx.SimulationError, match="before a copy by TMA has read its shared memory"):
        [run_with_map(STORE, to, description, 512, seed) for seed in range(20)]


def test_a_description_is_checked_as_the_driver_does():
    tensor = tensor_of(40, 64)
    assert encode(tensor, (16, 64), 3)[0] == 0
    assert encode(tensor, (16, 64), 2)[0] != 0, "a row is longer than the swizzle's span"
    assert encode(tensor, (257, 64), 3)[0] != 0, "more than 256 elements"
    assert encode(tensor, (16, 4))[0] != 0, "a row of 8 bytes"
    assert encode(tensor, (16, 64), 3, stride=120)[0] != 0, "a stride that is no multiple of 16"
    assert encode(tensor, (16, 64), 3, shift=2)[0] != 0, "an unaligned address"
    assert encode(tensor[:0], (16, 64), 3)[0] != 0, "an empty tensor"


@pytest.mark.parametrize("body", ["mov.b64 %a3, map; prefetch.tensormap [%a3]; ret;", LOAD])
def test_a_map_that_was_not_made_is_not_read(body: str):
    body, out = body.format(expected=1024, origin="0, 0, 0, 0"), np.zeros(512, dtype=np.uint16)
    run_with_map(body, out, encode(tensor_of(40, 64), (16, 32))[1], shared=1032)
    with pytest.raises(ptx.SimulationError, match="no tensor is described at the address of a tensor map"):
        run_with_map(body, out, bytes(128), shared=1032)
