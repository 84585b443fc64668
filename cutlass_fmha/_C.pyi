"""The compiled extension: a table of kernels, one way to launch them, and the device's properties. Knows no torch."""

class Row:
    """One compiled kernel: a row of the table. Sizes in elements unless the name says bytes.

    What rows of a family don't have raises AttributeError.
    """

    @property
    def index(self) -> int:
        """Row number, the first argument of ``run``."""
    @property
    def name(self) -> str:
        """Unique name, also the kernel's symbol: what a profiler shows."""
    @property
    def family(self) -> str:
        """What a row is for, which decides what ``run`` takes.

        Of attention: ``"plain"``, which knows no more than a diagonal, and ``"few_query"``, the same for few query
        rows, whose warps divide the keys; ``"ranged"``, for every range of keys; ``"score_mod"``,
        the same where scores are capped, get ALiBi's distances, or are dropped; ``"masked"``, where a mask
        hides keys or a 16-bit bias is added; ``"scored"`` and ``"few_query_scored"``, for every mask, score and shape;
        ``"wide"``, for float32 and head dims above 256, and ``"wide_scored"``, for every mask, score and shape of
        those. Beside it: ``"combine"`` (of split keys), ``"merge_tail"`` (of a plain row's tail), ``"pack_mask"``
        (for masked rows), ``"merge"`` (of states), ``"append"`` (to caches), ``"rotary"``; ``"backward"``, with
        ``"backward_before"``, ``"backward_after"`` and ``"backward_lists"``, for gradients, ``"query_product"``, dQ of
        dS in memory, and ``"backward_wide"``; ``"rms_norm"`` and ``"gated"`` (units), whose gradients are
        ``"rms_norm_backward"``, ``"rms_norm_weights"``, ``"gated_backward"``.
        """
    @property
    def arch(self) -> int:
        """Architecture the row is made for: 89, 90 or 120."""
    @property
    def dtype(self) -> str:
        """``"float16"``, ``"bfloat16"`` or ``"float32"``."""
    @property
    def threads(self) -> int:
        """Threads of a block."""
    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch, in bytes. An emulation build asks for more than the kernel uses."""
    @property
    def dependent_launch(self) -> bool:
        """Whether a launch may start before what is ahead of it in the stream is complete; the kernel waits itself."""

    # Of rows of attention:

    @property
    def head_dim(self) -> int:
        """The head dim that a plain row takes, and the largest that another one does."""
    @property
    def head_dim_v(self) -> int:
        """The same of value and output; another one than ``head_dim`` only in rows that take features."""
    @property
    def tile_m(self) -> int:
        """Query rows per thread block."""
    @property
    def tile_n(self) -> int:
        """Keys per main loop step, of one warp where ``kv_warps`` share their query rows."""
    @property
    def warps(self) -> int: ...
    @property
    def min_blocks(self) -> int: ...
    @property
    def mma(self) -> str:
        """What multiplies: ``"m16n8k16"``, ``"tf32x3"`` or ``"simt"``."""
    @property
    def takes_features(self) -> bool:
        """Whether the row takes every range of keys, and head dims up to its own."""
    @property
    def scored(self) -> bool:
        """Whether it takes masks, biases and whatever else becomes of scores, too."""
    @property
    def writes_scores(self) -> bool:
        """Whether a row of the backward writes dS to memory, of which a row of ``"query_product"`` makes dQ."""
    @property
    def alignment(self) -> int:
        """Bytes that every pointer and every stride must be a multiple of; of a wide row, also the head dims."""
    @property
    def element_bytes(self) -> int: ...

    # Of those up to head dim 256 in 16 bits:

    @property
    def kv_warps(self) -> int:
        """Warps that share their query rows and divide the keys: a main loop step takes a tile of each."""
    @property
    def stages(self) -> int: ...
    @property
    def q_in_registers(self) -> bool: ...
    @property
    def ping_pong(self) -> bool: ...
    @property
    def reads_mask_bytes(self) -> bool:
        """Of masked rows: whether a mask is read as it is, by four keys at once, where it is not packed."""

    @property
    def reads_mask_bits(self) -> bool:
        """Of masked rows: whether any mask can be packed for them (``mask_bits``)."""

    def mask_words(self, params: AttentionParams) -> int:
        """Words of room that ``mask_bits`` of a masked row needs; 0 of one that reads no such."""

    @property
    def copy(self) -> str:
        """``"cp_async_16"``, ``"element"``, ``"tma"`` or ``"ldg_16"``."""

    # Of those that compute gradients, whose tile_n is the keys of a thread block and tile_m the queries of a step:

    @property
    def chunk(self) -> int:
        """Queries whose scores a warp holds at a time."""
    @property
    def groups(self) -> int:
        """Of warps, which divide the products of the same keys; 1: each warp has all of its own."""
    @property
    def tail(self) -> int:
        """Last keys, up to so many, have a walk of their own, which is as much shorter; 0: none has."""

    # Of wide ones:

    @property
    def accumulates(self) -> bool:
        """Whether it keeps O in memory, for which 16-bit rows want room in float32."""
    @property
    def example(self) -> bool:
        """Whether its main loop is that of CUTLASS's example 41; otherwise it is our own."""

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

def rows() -> list[Row]:
    """Every row of attention in this build, in the manifest's order; empty when it was built without CUDA."""

def backward_rows() -> list[Row]:
    """Every row that computes gradients, numbered among those of attention."""

def helpers() -> list[Row]:
    """The rows beside attention, whose numbers follow."""

class AttentionParams:
    """What a launch of attention is asked: the fields of src/features/params.h, where each is described, and a tail.

    Addresses are ints (0: not given), strides tuples in elements. New ones have no window, a scale of 1, and neither
    packed heads nor splits. Setting a number that is out of range raises ValueError. A causal mask is a
    ``window_right`` of 0. Plain and wide rows take less than all: ``run`` says what.
    """

    def __init__(self) -> None: ...
    def copy(self) -> AttentionParams: ...
    def of_call(self, q: int, k: int, v: int, o: int, lse: int, scale: float, room: int = 0) -> AttentionParams:
        """A copy with these addresses and this scale: for one call of a plan, which threads may share.

        ``room``: floats for the parts of split keys, splits * lse_rows * (head_dim_v + 2), or for a ``tail``;
        with ``packs_mask``, for ``mask_bits``.
        """

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
    entries_k: int
    rows_k: int
    head_dim: int
    head_dim_v: int
    def vectors(self, element_bytes: int) -> bool:
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
    packs_mask: bool
    window_left: int
    window_right: int
    prefix_lengths: int
    mask: int
    mask_bits: int
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
    #: How a plain row's last tiles are divided: ``tail_tiles`` of them, each into a part of ``tail_first`` steps of keys,
    #: the last ones, and ``tail_parts`` - 1 of ``tail_rest``. ``tail``: tail_tiles * tail_parts * tile_m * (head_dim + 2)
    #: floats; 0: no tail.
    tail: int
    tail_tiles: int
    tail_parts: int
    tail_first: int
    tail_rest: int

class BackwardParams(AttentionParams):
    """What a launch of a backward is asked: src/backward/params.h."""

    def __init__(self, forward: AttentionParams) -> None: ...
    def workspace_floats(self, tile_m: int, tile_n: int, row_dim: int) -> int:
        """Of a row with such a tile and head dim."""

    dout: int
    dlse: int
    # 0: nobody wants it.
    dq: int
    dk: int
    dv: int
    #: float32, added to; and as sinks.
    dbias: int
    dsinks: int
    #: The sums of dQ have the same bits each time.
    ordered: bool
    workspace: int
    #: Where rows that write dS have it, of so many heads of keys at a time.
    scores: int
    scores_turn: int
    def scores_bytes(self, tile_m: int, tile_n: int) -> int:
        """Of a head of keys, of a row with such tiles."""

    dout_stride: tuple[int, int, int]
    dq_stride: tuple[int, int, int]
    dk_stride: tuple[int, int, int]
    dv_stride: tuple[int, int, int]
    dbias_stride: tuple[int, int, int, int]

class CombineParams:
    """The parts of split keys become one output, as a scored row with splits does by itself: src/helpers/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> CombineParams: ...

    partial_o: int
    partial_lse: int
    partial_low: int
    o: int
    lse: int
    lse_batch_stride: int
    lse_head_stride: int
    lse_rows: int
    o_stride: tuple[int, int, int]
    batch: int
    seqlen_q: int
    num_heads: int
    head_dim_v: int
    splits: int

class MergeParams:
    """Two states become one: src/helpers/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> MergeParams: ...

    o_a: int
    o_b: int
    o: int
    lse_a: int
    lse_b: int
    lse: int
    o_a_stride: tuple[int, int, int]
    o_b_stride: tuple[int, int, int]
    o_stride: tuple[int, int, int]
    lse_a_stride: tuple[int, int, int]
    lse_b_stride: tuple[int, int, int]
    lse_stride: tuple[int, int, int]
    batch: int
    seqlen_q: int
    num_heads: int
    head_dim_v: int

class Rotary:
    """A table of angles; without ``cos``, nothing is rotated: src/helpers/params.h."""

    def __init__(self) -> None: ...

    cos: int
    sin: int
    cos_stride: int
    sin_stride: int
    positions: int
    dim: int
    interleaved: bool
    float32: bool

class RotaryParams:
    """Rows are rotated into a tensor of their own: src/helpers/params.h.

    The position of a sequence's first row: ``first_position``[sequence] - ``before_position``[sequence].
    """

    def __init__(self) -> None: ...
    def copy(self) -> RotaryParams: ...

    x: int
    out: int
    x_stride: tuple[int, int, int]
    out_stride: tuple[int, int, int]
    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    cu_seqlens: int
    sequences: int
    first_position: int
    before_position: int
    advance: bool
    rotary: Rotary

class AppendParams:
    """New rows are written into a cache: src/helpers/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> AppendParams: ...

    k_cache: int
    v_cache: int
    k: int
    v: int
    k_cache_stride: tuple[int, int, int]
    v_cache_stride: tuple[int, int, int]
    k_stride: tuple[int, int, int]
    v_stride: tuple[int, int, int]
    batch: int
    seqlen_new: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    cu_seqlens: int
    sequences: int
    cache_seqlens: int
    cache_batch_idx: int
    page_table: int
    page_table_stride: int
    page_size: int
    entries: int
    capacity: int
    seqused_k: int
    first_position: int
    before_position: int
    rotary: Rotary
    query: RotaryParams

class RopeRows:
    """Queries, keys or values of a launch: src/beside/rope_params.h."""

    def __init__(self) -> None: ...

    x: int
    out: int
    weight: int
    gradient: int
    partial: int
    weight_gradient: int
    x_stride: tuple[int, int, int]
    out_stride: tuple[int, int, int]
    gradient_stride: tuple[int, int, int]
    num_heads: int
    head_dim: int
    weight_float32: bool

class RopeParams:
    """Queries and keys are normed and rotated, keys and values go to a cache: src/beside/rope_params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> RopeParams: ...

    q: RopeRows
    k: RopeRows
    v: RopeRows
    batch: int
    seqlen: int
    head_dim: int
    cu_seqlens: int
    sequences: int
    first_position: int
    before_position: int
    start: int
    positions: int
    positions_stride: tuple[int, int]
    rotary: Rotary
    inv_freq: int
    inverse: bool
    norm: bool
    eps: float
    weight_offset: float
    cache_seqlens: int
    cache_batch_idx: int
    page_table: int
    page_table_stride: int
    page_size: int
    entries: int
    capacity: int
    seqused_k: int

class RopeBackwardParams(RopeParams):
    """The gradients of that; those of weights are summed in ``parts_of`` q or k parts, ``parts`` in all at most."""

    parts: int
    q: RopeRows
    k: RopeRows
    v: RopeRows
    batch: int
    seqlen: int
    head_dim: int
    cu_seqlens: int
    sequences: int
    first_position: int
    before_position: int
    start: int
    positions: int
    positions_stride: tuple[int, int]
    rotary: Rotary
    inv_freq: int
    inverse: bool
    norm: bool
    eps: float
    weight_offset: float
    cache_seqlens: int
    cache_batch_idx: int
    page_table: int
    page_table_stride: int
    page_size: int
    entries: int
    capacity: int
    seqused_k: int

    def __init__(self) -> None: ...
    def copy(self) -> RopeBackwardParams: ...
    def parts_of(self, rows: RopeRows) -> int: ...

class RmsNormParams:
    """Rows are normalised, or their sums with others: src/beside/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> RmsNormParams: ...

    dim: int
    x: int
    residual: int
    sum: int
    weight: int
    bias: int
    out: int
    rstd: int
    sizes: tuple[int, int, int]
    x_stride: tuple[int, int, int]
    residual_stride: tuple[int, int, int]
    sum_stride: tuple[int, int, int]
    out_stride: tuple[int, int, int]
    eps: float
    weight_offset: float
    out_type: str
    weight_type: str

class RmsNormBackwardParams:
    """Gradients of that: src/beside/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> RmsNormBackwardParams: ...
    def partial_floats(self) -> int: ...

    dim: int
    dout: int
    dsum: int
    x: int
    weight: int
    rstd: int
    dx: int
    dweight: int
    partial: int
    parts: int
    sizes: tuple[int, int, int]
    dout_stride: tuple[int, int, int]
    dsum_stride: tuple[int, int, int]
    x_stride: tuple[int, int, int]
    dx_stride: tuple[int, int, int]
    weight_offset: float
    out_type: str
    weight_type: str

class GatedParams:
    """An activation of one tensor times another: src/beside/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> GatedParams: ...

    dim: int
    gate: int
    up: int
    out: int
    sizes: tuple[int, int, int]
    gate_stride: tuple[int, int, int]
    up_stride: tuple[int, int, int]
    out_stride: tuple[int, int, int]
    activation: str

class GatedBackwardParams:
    """Gradients of that: src/beside/params.h."""

    def __init__(self) -> None: ...
    def copy(self) -> GatedBackwardParams: ...

    dim: int
    gate: int
    up: int
    out: int
    dout: int
    dgate: int
    dup: int
    sizes: tuple[int, int, int]
    gate_stride: tuple[int, int, int]
    up_stride: tuple[int, int, int]
    out_stride: tuple[int, int, int]
    activation: str
    dout_stride: tuple[int, int, int]
    dgate_stride: tuple[int, int, int]
    dup_stride: tuple[int, int, int]

def launch(
    row: int,
    plan: AttentionParams,
    device: int,
    stream: int,
    q: int,
    k: int,
    v: int,
    o: int,
    lse: int,
    scale: float,
    room: int,
) -> None:
    """``run`` for one call of a plan: of ``plan.of_call(q, k, v, o, lse, scale, room)``, in less time."""

def xla_handlers(run: object) -> tuple[object, object]:
    """What XLA calls on the host and on CUDA devices: repeats the launches of ``xla_keep``, and has ``run`` (text,
    arguments, results, stream, device) for the others, which returns None, what was wrong, or True: it is kept now."""

def xla_keep(
    text: bytes,
    device: int,
    row: int,
    params: AttentionParams,
    scale: float,
    lse: bool,
    room: bool,
    places: list[tuple[int, str]],
) -> None:
    """A launch that is repeated for what was said with that text on that device, where q, k, v and the output are
    aligned. places: (number of an argument, which address of the parameters it is); the results are the output, with
    ``lse`` the LSE, and with ``room`` that of the parts of a launch."""

def xla_kept(text: bytes, device: int, arguments: list[int], results: list[int]) -> tuple[int, AttentionParams] | None:
    """The row, and with these addresses the parameters, that are launched for it; None where nothing is kept."""

def array_metadata(q: object, k: object, v: object) -> tuple[bytes, int, int, int] | None:
    """Of capsules of DLPack, which stay as they are: bytes that are equal where shapes, strides, dtypes, devices and
    what is odd of an address are, and the addresses. None where one is of another version or has more than 4 dims."""

def run(
    row: int,
    params: BackwardParams
    | AttentionParams
    | CombineParams
    | MergeParams
    | RotaryParams
    | AppendParams
    | RopeBackwardParams
    | RopeParams
    | RmsNormParams
    | RmsNormBackwardParams
    | GatedBackwardParams
    | GatedParams,
    device: int,
    stream: int,
) -> None:
    """Launch row ``row`` on ``stream`` of CUDA device ``device``. Returns at once: no allocation, no synchronisation.

    ``params``, those of the row's family, is copied. What merges the parts of split keys or of a tail follows.

    Raises TypeError for parameters that no family has, ValueError for those of another family, for fields that
    contradict each other or that the row can't take, and RuntimeError when CUDA refuses the launch. What passes reads
    within its tensors, as far as the contents of the int32 tensors on the device allow.
    """

def device_count() -> int:
    """CUDA devices that can be used; 0 without a driver. Raises RuntimeError when the driver is too old."""

def device_properties(device: int) -> DeviceProperties: ...
def build_info() -> dict[str, object]:
    """What this build was made with and for.

    ``cuda`` (bool), ``cuda_version`` ("13.0"), ``nvcc_version`` ("13.0.88"), ``cutlass_version``, ``source_hash``
    (of src/, as tools/source_hash.py prints it), ``architectures`` (list of int), ``compiled_for``: nvcc's name of each
    one's target, {89: "89", 90: "90", 120: "120f"} or, with nvcc 12.8, 120: "120a", and 89: "80,89" where older GPUs
    have code, too; ``proxy``: {120: 90} when the
    sm_120 rows of this build were compiled for sm_90, else {}; ``ptx_compiler`` ("the driver's compiler", or "ptxas 13.0.88"
    of a build with CUTLASS_FMHA_PTX_AHEAD): what makes code of sm_89's PTX for a GPU that has none; ``emulation`` (bool) and ``mma_passes`` (int, 1 unless
    it is one): a build that makes an sm_90 GPU resemble others, in which each mma pass runs that often.
    """

def driver_version() -> int:
    """CUDA version the driver supports, as 13000 for 13.0; 0 without a driver."""

# The submodule _C.host, in builds with CUDA: the kernels' softmax, mask, scheduler and shared-memory arithmetic, run on
# the host for tests/test_host_model.py. Not an interface.
