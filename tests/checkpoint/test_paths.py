"""Names of files that a checkpoint lists: together they have to be files on every system."""

from __future__ import annotations

import pytest

from moeq.checkpoint.paths import safe_names
from moeq.errors import MoeqError


def test_good_names_are_returned_in_order() -> None:
    assert safe_names(["b/c.json", "a.json", "b/d.json"], "x") == ("b/c.json", "a.json", "b/d.json")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/b", "a"], "'a' is both a file and the folder of 'a/b'"),
        (["a/b", "c", "a/b/c/d"], "'a/b' is both a file and the folder of 'a/b/c/d'"),
        (["A/b", "a"], "'a' is both a file and the folder of 'A/b'"),
        (["a.json", "A.json"], "'a.json' and 'A.json' are one file on systems that ignore case"),
    ],
)
def test_names_that_exclude_each_other_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(MoeqError) as caught:
        safe_names(names, "index.json")
    assert caught.value.code == "source.unsafe-path"
    assert caught.value.message == f"index.json: {message}"
