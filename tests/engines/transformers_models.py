"""transformers' own models. It is imported when the first test runs, since that takes seconds in each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeq.engines.transformers_versions import check_version
from moeq.errors import MoeqError

try:
    check_version()
except MoeqError:
    pytest.skip("transformers 5.1 is not installed", allow_module_level=True)


def auto(kind: str = "AutoModelForCausalLM") -> Any:
    """A class of transformers that finds the model's, once moeq is registered there."""
    import transformers

    import moeq.engines.transformers  # noqa: F401 - registers moeq's experts

    return getattr(transformers, kind)


def load(folder: Path, **options: Any) -> Any:
    """The model in a folder."""
    return auto().from_pretrained(folder, **options)


def packing_config(folder: Path, **options: Any) -> Any:
    """The config with which a source is packed while it is loaded."""
    from moeq.engines.transformers import packing_config

    return packing_config(str(folder), **options)
