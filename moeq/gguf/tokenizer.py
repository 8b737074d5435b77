"""The tokenizer in a GGUF file, as the files that transformers and engines load. transformers converts it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from moeq.errors import MoeqError

#: Files that `tokenizer_files` makes.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def can_convert() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


def tokenizer_files(path: Path, where: str) -> dict[str, bytes]:
    """Return the contents of `TOKENIZER_FILES`.

    Raises MoeqError `source.bad-tokenizer` if transformers cannot convert it.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, vocabulary, config = get_gguf_tokenizer(str(path))
        tokenizer, _ = convert_gguf_tokenizer(architecture, vocabulary)
        text = tokenizer.to_str()
    except Exception as error:  # noqa: BLE001 - a stranger's vocabulary in another library
        raise MoeqError(
            "source.bad-tokenizer",
            f"{where}: transformers cannot convert its tokenizer: {ascii(error)[:200]}",
            "put the model's own tokenizer.json into a folder beside the file, and name the folder",
        ) from None
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    texts = (text, json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    return {name: content.encode() for name, content in zip(TOKENIZER_FILES, texts, strict=True)}
