"""What a refusal says, to the letter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType

import pytest

from moeq.errors import MoeqError


@contextmanager
def refuses(code: str, message: str, hint: str | EllipsisType | None = ...) -> Iterator[None]:
    """The block raises a MoeqError with exactly that code, message and, where one is given, hint."""
    with pytest.raises(MoeqError) as caught:
        yield
    assert (caught.value.code, caught.value.message) == (code, message)
    assert hint is ... or caught.value.hint == hint
