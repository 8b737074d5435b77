"""Names of files that a checkpoint lists: together they have to be files on every system."""

from __future__ import annotations

import pytest

from moeq.checkpoint.paths import safe_name, safe_names
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


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (None, "is not a file name"),
        ("", "is not a file name"),
        ("a\n", "is not a file name"),
        ("/a", "leads out of the folder or is not a plain relative path"),
        ("a//b", "leads out of the folder or is not a plain relative path"),
        ("../a", "leads out of the folder or is not a plain relative path"),
        ("a\\b", "leads out of the folder or is not a plain relative path"),
        ("c:a", "leads out of the folder or is not a plain relative path"),
        ("a. /b", "is not a file name on every system"),
        ("a./b", "is not a file name on every system"),
        ("b/CON.txt", "is not a file name on every system"),
        ("é" * 128, "is longer than 255 bytes, or 1024 with its folders"),
        ("/".join(["a" * 255] * 5), "is longer than 255 bytes, or 1024 with its folders"),
    ],
)
def test_names_that_are_refused(name: object, problem: str) -> None:
    with pytest.raises(MoeqError) as caught:
        safe_name(name, "index.json")
    assert caught.value.code == "source.unsafe-path"
    assert caught.value.message == f"index.json: file {ascii(name)[:200]} {problem}"


def test_the_longest_names() -> None:
    whole = "/".join(["a" * 255] * 4 + ["b"])
    assert len(whole) == 1025
    assert safe_name("é" * 127 + "a", "x") == "é" * 127 + "a"
    assert safe_name(whole[1:], "x") == whole[1:]


@pytest.mark.parametrize("name", ["moeq.json", "MOEQ.json/a"])
def test_names_of_moeqs_own_files(name: str) -> None:
    with pytest.raises(MoeqError, match="only moeq's own files may have") as caught:
        safe_name(name, "index.json")
    assert caught.value.code == "source.reserved-name"
    assert safe_name("a/moeq.json", "x") == "a/moeq.json"
