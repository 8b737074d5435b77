"""Which weight files count, which copy of a tensor does, and what is said about the others."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.checkpoint.header import Header, TensorEntry
from moeq.checkpoint.index import Weights, choose_weights, merge_headers
from moeq.errors import MoeqError

INDEX = "model.safetensors.index.json"


def chosen(*names: str, **index: Any) -> Weights:
    return choose_weights(names, lambda name: index, "it")


def said(weights: Weights) -> list[tuple[str, str]]:
    return [(warning.code, warning.message) for warning in weights.warnings]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (5, "a0.bin, a1.bin, a2.bin, a3.bin, a4.bin"),
        (1206, "a0.bin, a1.bin, a10.bin, a100.bin, a1000.bin and 1,201 more"),
    ],
)
def test_five_names_are_listed(count: int, shown: str) -> None:
    with pytest.raises(MoeqError) as caught:
        chosen(*(f"a{number}.bin" for number in range(count)))
    assert caught.value.message == f"it holds PyTorch pickles and no safetensors: {shown}"


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("a.pt", " holds PyTorch pickles and no safetensors: a.pt", "moeq refuses pickles"),
        ("a.pth", " holds PyTorch pickles and no safetensors: a.pth", "moeq refuses pickles"),
        ("a.gguf", " holds GGUF files and no safetensors: a.gguf", "moeq reads safetensors"),
        ("a.incomplete", " holds unfinished downloads and no safetensors: a.incomplete", "finish the download"),
        ("a.json", " has no *.safetensors file and no safetensors index", None),
    ],
)
def test_what_is_there_instead(name: str, text: str, hint: str | None) -> None:
    with pytest.raises(MoeqError) as caught:
        chosen(name)
    assert (caught.value.code, caught.value.message) == ("source.no-weights", f"it{text}")
    assert caught.value.hint == hint if hint is None else str(caught.value.hint).startswith(hint)


def test_files_without_an_index() -> None:
    assert chosen("b", "model.safetensors") == Weights(("model.safetensors",))
    several = chosen("b.safetensors", "model.safetensors", "a.safetensors")
    assert several.files == ("model.safetensors",)
    assert said(several) == [
        ("files.not-loaded", "only model.safetensors is read, not these files: a.safetensors, b.safetensors")
    ]
    unnamed = chosen("b.safetensors", "a.safetensors")
    assert unnamed.files == ("a.safetensors", "b.safetensors")
    text = "no index: all weight files are read, a.safetensors, b.safetensors"
    assert said(unnamed) == [("files.no-index", text)]


def test_files_with_an_index() -> None:
    tensors = {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    assert chosen(INDEX, "a.safetensors", "b.safetensors", weight_map=tensors) == Weights(
        ("a.safetensors", "b.safetensors"), tensors, INDEX
    )
    others = chosen("c.safetensors.index.json", INDEX, "d.safetensors", weight_map=tensors)
    assert others.index == INDEX
    assert said(others) == [
        (
            "files.several-indices",
            f"there are several index files (c.safetensors.index.json, {INDEX}); moeq reads {INDEX}",
        ),
        ("files.not-in-index", f"{INDEX} does not mention these files: d.safetensors"),
    ]
    assert chosen("d.safetensors.index.json", "c.safetensors.index.json", weight_map=tensors).index == (
        "c.safetensors.index.json"
    )


@pytest.mark.parametrize(
    ("total", "size"),
    [(0, 0), (1.5e3, 1500), (-1, None), ((1 << 63) - 1, (1 << 63) - 1), (1 << 63, None), ("1", None), (1e400, None)],
)
def test_sizes_that_an_index_states(total: Any, size: int | None) -> None:
    found = chosen(INDEX, weight_map={"x": "a.safetensors"}, metadata={"total_size": total})
    assert found.total_size == size


def header(file: str, **sizes: int) -> Header:
    entries, start = {}, 100
    for name, size in sizes.items():
        entries[name] = TensorEntry(name, "U8", (size,), file, start, start + size)
        start += size
    return Header(file, start, entries, {})


def test_a_tensor_twice_and_no_index() -> None:
    assert list(merge_headers(Weights(("a", "b")), [header("a", x=1), header("b", y=1)]).tensors) == ["x", "y"]
    with pytest.raises(MoeqError) as caught:
        merge_headers(Weights(("a", "b")), [header("a", x=1), header("b", x=1)])
    assert caught.value.code == "source.index-mismatch"
    assert caught.value.message == "tensor x is in a and in b, and no index says which one counts"


def test_tensors_that_the_index_names_and_no_file_holds() -> None:
    weights = Weights(("a",), {"x": "a", "y": "b", "z": "a"}, "index")
    with pytest.raises(MoeqError) as caught:
        merge_headers(weights, [header("a", x=1)])
    assert caught.value.message == "index names 2 tensors that their files do not hold, first 'y' in b"


@pytest.mark.parametrize(
    ("first", "last", "effect", "stale"),
    [
        ("a-9", "a-10", "engines take the copy of the last listed file (a-10); convert leaves it out", ["a-10"]),
        ("a-10", "a-9", "engines take the same copy, since its file is the last", []),
        ("a-b", "a-1", "engines take the same copy, since its file is the last", []),
    ],
)
def test_tensors_in_several_files(first: str, last: str, effect: str, stale: list[str]) -> None:
    """Files are read in the order of the numbers in their names, and words come after them."""
    weights = Weights((first, last), {"x": first, "y": last}, "index", 3)
    found = merge_headers(weights, [header(first, x=1), header(last, x=1, y=2)])
    assert {name: entry.file for name, entry in found.tensors.items()} == {"x": first, "y": last}
    assert [entry.file for entry in found.stale] == stale
    assert [(one.code, one.message) for one in found.warnings] == [
        ("index.duplicates", f"tensors in several files, the index decides: x; {effect}")
    ]


def test_a_tensor_that_the_index_leaves_out() -> None:
    weights = Weights(("a",), {"x": "a"}, "index", 4)
    found = merge_headers(weights, [header("a", x=1, y=2)])
    assert (list(found.tensors), [entry.name for entry in found.stale]) == (["x"], ["y"])
    unlisted, total = found.warnings
    assert unlisted.code == "index.unlisted"
    assert unlisted.message.startswith("tensors in files but not in the index, ignored: y; engines load them")
    assert (total.code, total.message) == ("index.total-size", "the index says tensors add up to 4 bytes, they are 1")
