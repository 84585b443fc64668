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
    def head_dim(self) -> int: ...
    @property
    def tile_m(self) -> int:
        """Query rows per thread block."""
    @property
    def tile_n(self) -> int:
        """Keys per main loop step."""
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
    def alignment(self) -> int:
        """Bytes that every pointer and every stride must be a multiple of."""
    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch, in bytes. An emulation build asks for more than the kernel uses."""

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
) -> None:
    """Launch row ``row`` on ``stream`` of CUDA device ``device``. Returns at once: no allocation, no synchronisation.

    pointers: q, k, v, o, lse device addresses; lse may be 0 when it is not wanted.
    sizes: batch, seqlen_q, seqlen_k, num_heads, num_heads_kv.
    strides: (batch, seqlen, head) of q, then of k, v and o, in elements; head_dim is contiguous.
    scale: softmax scale, any finite float.
    diagonal: key j is visible to query i when j <= i + diagonal; None: every key is.

    Raises ValueError for sizes the kernel can't take and RuntimeError when CUDA refuses the launch.
    """

def device_count() -> int:
    """CUDA devices that can be used; 0 without a driver. Raises RuntimeError when the driver is too old."""

def device_properties(device: int) -> DeviceProperties: ...
def build_info() -> dict[str, object]:
    """What this build was made with and for.

    ``cuda`` (bool), ``cuda_version`` ("13.0"), ``nvcc_version`` ("13.0.88"), ``cutlass_version``, ``source_hash``
    (of src/, as tools/source_hash.py prints it), ``architectures`` (list of int), ``proxy``: {120: 90} when the
    sm_120 rows of this build were compiled for sm_90, else {}; ``emulation`` (bool) and ``mma_passes`` (int, 1 unless
    it is one): a build that makes an sm_90 GPU resemble others, in which each mma pass runs that often.
    """

def driver_version() -> int:
    """CUDA version the driver supports, as 13000 for 13.0; 0 without a driver."""

# The submodule _C.host, in builds with CUDA: the kernels' softmax, mask, scheduler and shared-memory arithmetic, run on
# the host for tests/test_host_model.py. Not an interface.
