"""The attention problems that the benchmark times, and how much work each of them is.

The presets are fixed so that figures of different GPUs, versions and kernels can be laid side by side. Cases
that the package can't run yet stay in the list and are reported as unsupported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

BYTES_PER_ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4}

WINDOW = 1024
PREFIX = 2048
DOCUMENTS = 4
"""Documents of the same length that a batch entry is divided into."""

FEATURES: dict[str, str] = {
    "window": f"window {WINDOW}",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "dropout": "dropout 0.1",
    "documents": f"{DOCUMENTS} documents packed",
    "prefix": f"prefix-LM {PREFIX}",
    "bias": "bias [1, 1, Sq, Sk]",
    "mask": "mask [1, 1, Sq, Sk]",
}
"""What a case may have besides its shape, as tables print it; features.py knows what each means."""
IN_MEMORY = ("bias", "mask")
"""Those that say by themselves which keys are visible: their cases are not causal."""


@dataclass(frozen=True)
class Case:
    """One attention problem. ``causal`` is bottom-right aligned when the lengths differ; no preset is.

    ``feature``: one of FEATURES, or nothing.
    """

    group: str
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    feature: str = ""

    @property
    def name(self) -> str:
        """Short, unique and readable as a shape: ``b1_h32-8_s8192_d128_bf16_causal``."""
        heads = f"h{self.num_heads}" + (
            "" if self.num_heads == self.num_heads_kv else f"-{self.num_heads_kv}"
        )
        lengths = (
            f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"q{self.seqlen_q}_k{self.seqlen_k}"
        )
        dtype = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        tail = ("_causal" if self.causal else "") + (f"_{self.feature}" if self.feature else "")
        return f"b{self.batch}_{heads}_{lengths}_d{self.head_dim}_{dtype}{tail}"

    @property
    def label(self) -> str:
        """The name as the tables and the picture print it."""
        heads = f"H{self.num_heads}" + (
            "" if self.num_heads == self.num_heads_kv else f"/{self.num_heads_kv}"
        )
        lengths = (
            f"S{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"Sq{self.seqlen_q} Sk{self.seqlen_k}"
        )
        dtype = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        tail = (" causal" if self.causal else "") + (f" {FEATURES[self.feature]}" if self.feature else "")
        return f"B{self.batch} {heads} {lengths} D{self.head_dim} {dtype}{tail}"

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one head that the mask leaves, counted exactly (not as half of the square).

        A mask in memory is random: it leaves no part of the work out, and all pairs count.
        """
        if self.feature == "window":
            return sum(min(row + 1, WINDOW + 1) for row in range(self.seqlen_q))
        if self.feature == "prefix":
            return sum(max(row + 1, PREFIX) for row in range(self.seqlen_q))
        if self.feature == "documents":
            length = self.seqlen_q // DOCUMENTS
            return DOCUMENTS * visible_pairs(length, length, 0 if self.causal else None)
        return visible_pairs(
            self.seqlen_q, self.seqlen_k, self.seqlen_k - self.seqlen_q if self.causal else None
        )

    @property
    def flop(self) -> int:
        """Floating-point operations of Q K^T and P V over the visible pairs, without the softmax's."""
        return 4 * self.batch * self.num_heads * self.visible_pairs * self.head_dim

    @property
    def input_bytes(self) -> int:
        """Bytes of one set of Q, K and V."""
        elements = (
            self.batch
            * self.head_dim
            * (self.seqlen_q * self.num_heads + 2 * self.seqlen_k * self.num_heads_kv)
        )
        return elements * BYTES_PER_ELEMENT[self.dtype]

    @property
    def moved_bytes(self) -> int:
        """Bytes that a fused kernel has to move at least: Q, K and V read once, O written once."""
        output = self.batch * self.head_dim * self.seqlen_q * self.num_heads
        return self.input_bytes + output * BYTES_PER_ELEMENT[self.dtype]

    @property
    def memory_bound(self) -> bool:
        """Whether its rate is bytes per second: one query meets all keys."""
        return self.group == "decode"

    def as_dict(self) -> dict[str, object]:
        """The case as the JSON report holds it."""
        return {
            "name": self.name,
            "label": self.label,
            **asdict(self),
            "flop": self.flop,
            "bytes": self.moved_bytes,
        }


def visible_pairs(seqlen_q: int, seqlen_k: int, diagonal: int | None) -> int:
    """Number of (query, key) pairs with key <= query + diagonal; None: of all pairs."""
    if diagonal is None:
        return seqlen_q * seqlen_k
    first = max(0, -diagonal)  # queries before it see nothing, from `full` on they see every key
    full = min(seqlen_q, max(first, seqlen_k - 1 - diagonal))
    rising = full - first
    return rising * (first + diagonal + 1) + rising * (rising - 1) // 2 + max(0, seqlen_q - full) * seqlen_k


def _mha(
    group: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, causal: bool = False
) -> Case:
    return Case(group, batch, heads, heads, seqlen, seqlen, head_dim, dtype, causal)


def _both(case: Case) -> tuple[Case, Case]:
    return case, replace(case, causal=True)


CASES: tuple[Case, ...] = (
    *_both(_mha("latency", 1, 8, 256, 64, "float16")),
    *_both(_mha("latency", 1, 8, 512, 64, "float16")),
    *_both(_mha("latency", 1, 8, 1024, 64, "float16")),
    *_both(_mha("dense", 4, 32, 4096, 64, "bfloat16")),
    _mha("dense", 32, 16, 512, 128, "bfloat16"),
    _mha("dense", 8, 16, 2048, 128, "bfloat16", causal=True),
    *_both(_mha("dense", 2, 16, 8192, 128, "bfloat16")),
    _mha("dense", 1, 16, 16384, 128, "bfloat16", causal=True),
    Case("dense", 1, 32, 8, 8192, 8192, 128, "bfloat16", causal=True),
    _mha("dense", 4, 16, 4096, 96, "bfloat16", causal=True),
    _mha("dense", 4, 8, 4096, 256, "bfloat16", causal=True),
    Case("decode", 8, 32, 8, 1, 8192, 128, "bfloat16"),
    Case("decode", 1, 32, 8, 1, 32768, 128, "bfloat16"),
    Case("decode", 32, 32, 8, 1, 2048, 128, "bfloat16"),
    Case("decode", 16, 32, 32, 1, 2048, 128, "bfloat16"),
    Case("decode", 8, 64, 8, 1, 8192, 64, "bfloat16"),
    *_both(_mha("wide", 4, 16, 2048, 64, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 128, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 256, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 320, "bfloat16")),
    *_both(_mha("wide", 4, 16, 2048, 512, "bfloat16")),
    _mha("wide", 1, 8, 512, 64, "float32"),
    _mha("wide", 32, 16, 512, 128, "float32"),
    *(
        replace(_mha("features", 2, 16, 8192, 128, "bfloat16", causal=name not in IN_MEMORY), feature=name)
        for name in FEATURES
    ),
)

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES))


def select_cases(presets: list[str] | None) -> list[Case]:
    """The cases of the presets, each one of GROUPS or a case; all when None.

    Raises ValueError when a preset is neither.
    """
    if not presets:
        return list(CASES)
    known = {*GROUPS, *(case.name for case in CASES)}
    unknown = [preset for preset in presets if preset not in known]
    if unknown:
        names = ", ".join(case.name for case in CASES)
        raise ValueError(f"unknown preset {unknown[0]!r}: take one of {', '.join(GROUPS)} or a case: {names}")
    return [case for case in CASES if case.group in presets or case.name in presets]
