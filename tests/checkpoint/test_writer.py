from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from moeq.checkpoint.writer import SafetensorsWriter, file_form, prepare_file
from moeq.errors import ExitCode, MoeqError

TENSORS = {"a": ((2, 3), "I32"), "b": ((5,), "U8"), "empty": ((0, 4), "F16")}


def test_the_file_is_what_the_format_library_reads(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    b = np.arange(5, dtype=np.uint8)
    with SafetensorsWriter(tmp_path / "x.safetensors", TENSORS, {"format": "pt", "by": "test"}) as writer:
        writer.write("b", memoryview(b))  # any order
        writer.write("a", memoryview(a[1]).cast("B"), offset=12)
        writer.write("a", memoryview(a[0]).cast("B"), offset=0)
        assert not (tmp_path / "x.safetensors").exists(), "only a finished file has its final name"
        writer.finish()
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}
        np.testing.assert_array_equal(file.get_tensor("a"), a)
        np.testing.assert_array_equal(file.get_tensor("b"), b)
        assert file.get_tensor("empty").shape == (0, 4)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "x.safetensors", TENSORS):
        assert os.listdir(tmp_path) == ["x.safetensors.partial"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "size", "offset"), [("b", 6, 0), ("b", 1, 5), ("b", 1, -1), ("empty", 1, 0)])
def test_writes_outside_a_tensor_are_refused(tmp_path: Path, name: str, size: int, offset: int) -> None:
    with (
        SafetensorsWriter(tmp_path / "x.safetensors", TENSORS) as writer,
        pytest.raises(ValueError, match="do not fit"),
    ):
        writer.write(name, memoryview(bytes(size)), offset)


class TestPreparing:
    def test_a_prepared_file_is_whole_but_for_its_data(self, tmp_path: Path) -> None:
        form = file_form(TENSORS, {"format": "pt"})
        prepare_file(tmp_path / "x.safetensors", form)
        assert (tmp_path / "x.safetensors").stat().st_size == form.size
        with safe_open(tmp_path / "x.safetensors", "numpy") as file:
            assert set(file.keys()) == set(TENSORS)
            np.testing.assert_array_equal(file.get_tensor("a"), np.zeros((2, 3), np.int32))

    @pytest.mark.parametrize("size", [0, 9, 200, 5000])
    def test_preparing_again_keeps_the_data(self, tmp_path: Path, size: int) -> None:
        """Another process may have written meanwhile, and a crash may have left the file short or long."""
        path, form = tmp_path / "x.safetensors", file_form(TENSORS)
        prepare_file(path, form)
        start, stop = form.ranges["a"]
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * (stop - start))
        before = path.read_bytes()
        os.truncate(path, size)
        prepare_file(path, form)
        expected = before[:size] + bytes(max(form.size - size, 0))
        assert path.read_bytes() == form.header + expected[len(form.header) : form.size]

    def test_a_full_disk(self, tmp_path: Path) -> None:
        with pytest.raises(MoeqError, match="needs 1,152,921,504,606,84") as caught:
            prepare_file(tmp_path / "x.safetensors", file_form({"huge": ((1 << 60,), "U8")}))
        assert caught.value.exit_code == ExitCode.RESOURCES

    def test_where_it_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(MoeqError, match="cannot write") as caught:
            prepare_file(tmp_path / "no" / "x.safetensors", file_form(TENSORS))
        assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_a_full_disk_is_reported_at_once(tmp_path: Path) -> None:
    too_much = {"huge": ((1 << 60,), "U8")}
    with pytest.raises(MoeqError, match="needs 1,152,921,504,606,84") as caught:
        SafetensorsWriter(tmp_path / "x.safetensors", too_much)
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert os.listdir(tmp_path) == []
