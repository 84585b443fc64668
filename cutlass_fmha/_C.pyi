"""The compiled extension: a table of kernels, one way to launch them, and the device's properties. Knows no torch."""

class Template:
    """One compiled kernel: a row of ``templates()``. Sizes in elements unless the name says bytes."""

    @property
    def index(self) -> int:
        """Row number, the first argument of ``run``."""
    @property
    def name(self) -> str:
        """Unique name, also the kernel's symbol: what a profiler shows."""
    @property
    def arch(self) -> int:
        """Architecture the row is made for: 89, 90 or 120."""
    @property
    def dtype(self) -> str:
        """``"float16"`` or ``"bfloat16"``."""
    @property
    def head_dim(self) -> int:
        """The head dim that a plain row takes, and the largest that a general one does."""
    @property
    def head_dim_v(self) -> int:
        """The same of value and output; another one than ``head_dim`` in general rows only."""
    @property
    def tile_m(self) -> int:
        """Query rows per thread block."""
    @property
    def tile_n(self) -> int:
        """Keys per main loop step, of one warp where ``kv_warps`` share their query rows."""
    @property
    def warps(self) -> int: ...
    @property
    def kv_warps(self) -> int:
        """Warps that share their query rows and divide the keys: a main loop step takes a tile of each."""
    @property
    def stages(self) -> int: ...
    @property
    def min_blocks(self) -> int: ...
    @property
    def q_in_registers(self) -> bool: ...
    @property
    def ping_pong(self) -> bool: ...
    @property
    def copy(self) -> str:
        """``"cp_async_16"``, ``"element"``, ``"tma"`` or ``"ldg_16"``."""
    @property
    def dependent_launch(self) -> bool:
        """Whether a launch may start before what is ahead of it in the stream is complete; the kernel waits itself."""
    @property
    def general(self) -> bool:
        """Whether ``run_general`` launches the row, which takes every mask, score and shape; otherwise ``run``."""
    @property
    def alignment(self) -> int:
        """Bytes that every pointer and every stride must be a multiple of."""
    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch, in bytes. An emulation build asks for more than the kernel uses."""

class FallbackTemplate:
    """One kernel for float32 or head dims above 256: a row of ``fallback_templates()``."""

    @property
    def index(self) -> int:
        """Row number, the first argument of ``run_fallback``."""
    @property
    def name(self) -> str: ...
    @property
    def arch(self) -> int: ...
    @property
    def dtype(self) -> str:
        """``"float16"``, ``"bfloat16"`` or ``"float32"``."""
    @property
    def head_dim(self) -> int:
        """The largest that it takes, of query and of value."""
    @property
    def head_dim_v(self) -> int: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def min_blocks(self) -> int: ...
    @property
    def math(self) -> str:
        """``"simt"``, ``"tf32x3"`` or ``"mma"``."""
    @property
    def alignment(self) -> int:
        """Bytes that addresses, strides and head dims must be a multiple of: 4 or 16."""
    @property
    def smem_bytes(self) -> int: ...
    @property
    def accumulates(self) -> bool:
        """Whether it keeps O in memory, for which 16-bit rows want room in float32."""
    @property
    def example(self) -> bool:
        """Whether its main loop is that of CUTLASS's example 41; otherwise it is our own."""
    @property
    def fallback(self) -> bool:
        """True: what tells these rows from the others."""

class DeviceProperties:
    @property
    def name(self) -> str: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def multiprocessor_count(self) -> int: ...
    @property
    def shared_memory_per_block_optin(self) -> int: ...
    @property
    def l2_cache_size(self) -> int: ...

def templates() -> list[Template]:
    """Every row of this build; empty when it was built without CUDA."""

def run(
    row: int,
    pointers: tuple[int, int, int, int, int],
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, int, int, int, int, int, int, int, int, int, int, int],
    scale: float,
    diagonal: int | None,
    device: int,
    stream: int,
    tail: tuple[int, int, int, int, int] | None = None,
) -> None:
    """Launch row ``row`` on ``stream`` of CUDA device ``device``. Returns at once: no allocation, no synchronisation.

    pointers: q, k, v, o, lse device addresses; lse may be 0 when it is not wanted.
    sizes: batch, seqlen_q, seqlen_k, num_heads, num_heads_kv.
    strides: (batch, seqlen, head) of q, then of k, v and o, in elements; head_dim is contiguous.
    scale: softmax scale, any finite float.
    diagonal: key j is visible to query i when j <= i + diagonal; None: every key is.

    Raises ValueError for sizes the kernel can't take and RuntimeError when CUDA refuses the launch.
    """

class GeneralParams:
    """What a launch of a general row reads: the fields of src/general/params.h, where each is described.

    Addresses are ints (0: not given), strides tuples in elements. New ones have no window, a scale of 1, and neither
    packed heads nor splits. Setting a number that is out of range raises ValueError.
    """

    def __init__(self) -> None: ...
    def copy(self) -> GeneralParams: ...

    q: int
    k: int
    v: int
    o: int
    lse: int
    q_stride: tuple[int, int, int]
    k_stride: tuple[int, int, int]
    v_stride: tuple[int, int, int]
    o_stride: tuple[int, int, int]
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    @property
    def vectors(self) -> bool:
        """Whether addresses, strides and head dims as they are allow 16-byte copies. A launch asks by itself."""
    @property
    def device_lengths(self) -> bool:
        """Whether it is said on the device which rows and keys a sequence has. A launch asks by itself."""
    cu_seqlens_q: int
    cu_seqlens_k: int
    seqused_q: int
    seqused_k: int
    leftpad_k: int
    batch_index_k: int
    page_table: int
    page_table_stride: int
    page_size: int
    bottom_right: bool
    window_left: int
    window_right: int
    prefix_lengths: int
    mask: int
    mask_stride: tuple[int, int, int, int]
    block_counts: int
    block_indices: int
    block_stride: tuple[int, int, int, int]
    count_stride: tuple[int, int, int]
    block_m: int
    block_n: int
    scale: float
    softcap: float
    bias_type: str
    """``"none"``, ``"same_as_q"`` or ``"float32"``."""
    bias: int
    bias_stride: tuple[int, int, int, int]
    alibi_slopes: int
    alibi_stride: tuple[int, int]
    sinks: int
    dropout_threshold: int
    dropout_scale: float
    dropout_seed: int
    pack: int
    splits: int
    partial_o: int
    partial_lse: int
    partial_low: int
    lse_batch_stride: int
    lse_head_stride: int
    lse_rows: int

def run_general(row: int, params: GeneralParams, device: int, stream: int) -> None:
    """Launch general row ``row`` as ``run`` launches a plain one, and with splits what merges their results.

    ``params`` is copied. Raises ValueError for fields that contradict each other or that the row can't take: what
    passes reads within its tensors, as far as the contents of the int32 tensors on the device allow.
    """

def fallback_templates() -> list[FallbackTemplate]:
    """Every row of CUTLASS's example 41 in this build; empty when it was built without CUDA."""

def run_fallback(row: int, params: GeneralParams, device: int, stream: int) -> None:
    """Launch row ``row`` of ``fallback_templates()`` as ``run_general`` does one of ``templates()``."""

def device_count() -> int:
    """CUDA devices that can be used; 0 without a driver. Raises RuntimeError when the driver is too old."""

def device_properties(device: int) -> DeviceProperties: ...
def build_info() -> dict[str, object]:
    """What this build was made with and for.

    ``cuda`` (bool), ``cuda_version`` ("13.0"), ``nvcc_version`` ("13.0.88"), ``cutlass_version``, ``source_hash``
    (of src/, as tools/source_hash.py prints it), ``architectures`` (list of int), ``compiled_for``: nvcc's name of each
    one's target, {89: "89", 90: "90", 120: "120f"} or, with nvcc 12.8, 120: "120a"; ``proxy``: {120: 90} when the
    sm_120 rows of this build were compiled for sm_90, else {}; ``emulation`` (bool) and ``mma_passes`` (int, 1 unless
    it is one): a build that makes an sm_90 GPU resemble others, in which each mma pass runs that often.
    """

def driver_version() -> int:
    """CUDA version the driver supports, as 13000 for 13.0; 0 without a driver."""

class SupportKernel:
    """A kernel that computes no attention: a row of ``support_kernels()``."""

    @property
    def name(self) -> str:
        """Unique name, also the kernel's symbol."""
    @property
    def kind(self) -> str:
        """``"combine"``, ``"merge"``, ``"append"`` or ``"rotary"``."""
    @property
    def arch(self) -> int: ...
    @property
    def dtype(self) -> str:
        """``"float16"``, ``"bfloat16"`` or ``"float32"``."""
    @property
    def threads(self) -> int:
        """Threads of a block."""

def support_kernels() -> list[SupportKernel]:
    """The kernels beside attention of this build; empty when it was built without CUDA."""

# The functions below launch one of them and return at once: no allocation, no synchronisation. Pointers are device
# addresses, 0 for what is not given; strides are in elements. target: dtype, arch, device, stream. They raise ValueError
# for sizes that a kernel can't take, or when the build has none for the target, and RuntimeError when CUDA refuses.

def combine(
    pointers: tuple[int, int, int, int, int],
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, int, int, int, int, int],
    target: tuple[str, int, int, int],
) -> None:
    """Make the parts of split keys one output. A general row that splits does it by itself.

    pointers: partial_o [splits, rows, head_dim_v] and partial_lse [splits, rows] in float32, what to add to the
    latter in as many more (may be 0), o, lse (may be 0).
    sizes: batch, seqlen_q, num_heads, head_dim_v, splits.
    strides: (batch, seqlen, head) of o, then batch and head stride of lse, and its rows.
    """

def merge_states(
    pointers: tuple[int, int, int, int, int, int],
    sizes: tuple[int, int, int, int],
    strides: tuple[int, ...],
    target: tuple[str, int, int, int],
) -> None:
    """Make two states one.

    pointers: o_a, o_b, o, lse_a, lse_b, lse.
    sizes: batch, seqlen_q, num_heads, head_dim_v.
    strides: 18: (batch, seqlen, head) of o_a, o_b and o, then (batch, head, seqlen) of lse_a, lse_b and lse.
    """

def append_kv(
    pointers: tuple[int, int, int, int, int, int, int, int, int, int],
    sizes: tuple[int, int, int, int, int, int, int, int],
    strides: tuple[int, ...],
    rotary: tuple[tuple[int, int], tuple[int, int, int, int], tuple[bool, bool]] | None,
    query: tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, ...], bool] | None,
    target: tuple[str, int, int, int],
) -> None:
    """Write new rows into a cache.

    pointers: k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, page_table, seqused_k (written), then two int32
    vectors whose difference is the position of a sequence's first new key.
    sizes: batch, seqlen_new, num_heads_kv, head_dim, head_dim_v, entries or pages of the cache, rows that it has for a
    sequence, page_size (0 without a page table).
    strides: 13: (batch, seqlen, head) of k_cache, v_cache, k and v, then the page table's.
    rotary: (cos, sin), (their strides, positions, rotary dim), (interleaved, float32); None: k is not rotated.
    query: the first four arguments of ``rotary``, for queries that are rotated in the same launch.
    """

def rotary(
    pointers: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int],
    strides: tuple[int, ...],
    advance: bool,
    rotary: tuple[tuple[int, int], tuple[int, int, int, int], tuple[bool, bool]],
    target: tuple[str, int, int, int],
) -> None:
    """Rotate rows into a tensor of their own.

    pointers: x, out, and two int32 vectors whose difference is the position of a sequence's first row.
    sizes: batch, seqlen, num_heads, head_dim.
    strides: 6: (batch, seqlen, head) of x and out. advance: each row is a position further. rotary: as append_kv.
    """

# The submodule _C.host, in builds with CUDA: the kernels' softmax, mask, scheduler and shared-memory arithmetic, run on
# the host for tests/test_host_model.py. Not an interface.
