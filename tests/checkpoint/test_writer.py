from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from moeq.checkpoint.writer import SafetensorsWriter
from moeq.errors import ExitCode, MoeqError

TENSORS = {"a": ((2, 3), "I32"), "b": ((5,), "U8"), "empty": ((0, 4), "F16")}


def test_the_file_is_what_the_format_library_reads(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    b = np.arange(5, dtype=np.uint8)
    with SafetensorsWriter(tmp_path / "x.safetensors", TENSORS, {"format": "pt", "by": "test"}) as writer:
        writer.write("b", memoryview(b))  # any order
        writer.write("a", memoryview(a[1]).cast("B"), offset=12)
        writer.write("a", memoryview(a[0]).cast("B"), offset=0)
        assert writer.read("a", 12, 12) == a[1].tobytes()
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


def test_reads_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    with (
        SafetensorsWriter(tmp_path / "x.safetensors", TENSORS) as writer,
        pytest.raises(ValueError, match="lie outside"),
    ):
        writer.read("b", 3, 3)


def test_copying_from_another_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, 5, dtype=np.uint8)
    save_file({"b": data}, tmp_path / "source.safetensors")
    size = (tmp_path / "source.safetensors").stat().st_size
    fd = os.open(tmp_path / "source.safetensors", os.O_RDONLY)
    with SafetensorsWriter(tmp_path / "x.safetensors", TENSORS) as writer:
        writer.copy_from("b", fd, size - 5)
        assert writer.read("b", 0, 5) == data.tobytes()
        with pytest.raises(MoeqError, match="ends 2 bytes inside tensor 'b'") as caught:
            writer.copy_from("b", fd, size - 3)
    os.close(fd)
    assert caught.value.exit_code == ExitCode.SOURCE


def test_a_full_disk_is_reported_at_once(tmp_path: Path) -> None:
    too_much = {"huge": ((1 << 60,), "U8")}
    with pytest.raises(MoeqError, match="needs 1,152,921,504,606,84") as caught:
        SafetensorsWriter(tmp_path / "x.safetensors", too_much)
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert os.listdir(tmp_path) == []
