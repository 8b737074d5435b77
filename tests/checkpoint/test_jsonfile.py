"""JSON of strangers: the key that occurs twice is named."""

from __future__ import annotations

import pytest

from moeq.checkpoint.jsonfile import DuplicateKeyError, unique_pairs


def test_the_key_that_occurs_twice_is_named() -> None:
    assert unique_pairs([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(DuplicateKeyError, match="duplicate key 'b'"):
        unique_pairs([("a", 1), ("b", 2), ("b", 3), ("a", 4)])
