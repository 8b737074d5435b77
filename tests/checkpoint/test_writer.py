from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.writer import (
    BLOCK,
    OutputFile,
    SafetensorsWriter,
    file_form,
    prepare_file,
    require_free_space,
)
from moeq.errors import ExitCode, MoeqError

TENSORS = {"a": ((2, 3), "I32"), "b": ((5,), "U8"), "empty": ((0, 4), "F16")}


def test_the_file_is_what_the_format_library_reads(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    b = np.arange(5, dtype=np.uint8)
    with SafetensorsWriter(OutputFolder(tmp_path), "x.safetensors", TENSORS, {"format": "pt", "by": "test"}) as writer:
        writer.write("b", memoryview(b))  # any order
        writer.write("a", memoryview(a[1]).cast("B"), offset=12)
        writer.write("a", memoryview(a[0]).cast("B"), offset=0)
        writer.finish()
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}
        np.testing.assert_array_equal(file.get_tensor("a"), a)
        np.testing.assert_array_equal(file.get_tensor("b"), b)
        assert file.get_tensor("empty").shape == (0, 4)
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize(("name", "size", "offset"), [("b", 6, 0), ("b", 1, 5), ("b", 1, -1), ("empty", 1, 0)])
def test_writes_outside_a_tensor_are_refused(tmp_path: Path, name: str, size: int, offset: int) -> None:
    with (
        SafetensorsWriter(OutputFolder(tmp_path), "x.safetensors", TENSORS) as writer,
        pytest.raises(ValueError, match="do not fit"),
    ):
        writer.write(name, memoryview(bytes(size)), offset)


class TestOutputFile:
    """Pieces of every size and place, on file systems that can be written past the page cache and on others."""

    @pytest.mark.parametrize("direct", [True, False])
    def test_every_piece_lands_in_its_place(self, tmp_path: Path, direct: bool, monkeypatch) -> None:
        if not direct:
            monkeypatch.delattr(os, "O_DIRECT", raising=False)
        size = 3 << 20
        form = file_form({"w": ((size,), "U8")})
        assert len(form.header) % BLOCK == 0, "whole blocks of data are whole blocks of the file"
        prepare_file(OutputFolder(tmp_path), "x", form.header, form.size)
        wanted = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        room = np.empty(size + BLOCK, np.uint8)
        aligned = room[-room.ctypes.data % BLOCK :][:size]
        aligned[:] = wanted
        cuts = [0, 4096, 4096 + (1 << 20), (1 << 20) + 8192 + 100, 2 << 20, (2 << 20) + (1 << 19), size - 5, size]
        file = OutputFile(OutputFolder(tmp_path), "x")
        for start, stop in pairwise(cuts):
            file.write(aligned[start:stop].data, len(form.header) + start)
        unaligned = np.concatenate([np.zeros(1, np.uint8), wanted])[1:]  # memory that no disk can read from
        file.write(unaligned[: 1 << 20].data, len(form.header))
        file.sync()
        file.close()
        assert (tmp_path / "x").read_bytes() == form.header + wanted.tobytes()

    def test_small_pieces_do_not_wait_for_the_end(self, tmp_path: Path) -> None:
        form = file_form({"w": ((5 << 20,), "U8")})
        prepare_file(OutputFolder(tmp_path), "x", form.header, form.size)
        file = OutputFile(OutputFolder(tmp_path), "x")
        for number in range(5 << 20 >> 13):
            file.write(memoryview(b"x" * (1 << 13)), len(form.header) + (number << 13))
        assert (tmp_path / "x").read_bytes()[len(form.header) :].startswith(b"x" * (4 << 20))
        file.close()

    def test_a_file_system_that_refuses_on_the_way(self, tmp_path: Path, monkeypatch) -> None:
        """Opening past the page cache works, writing does not (some network file systems)."""
        form = file_form({"w": ((1 << 20,), "U8")})
        prepare_file(OutputFolder(tmp_path), "x", form.header, form.size)
        file, real = OutputFile(OutputFolder(tmp_path), "x"), os.pwrite

        def pwrite(fd: int, data: memoryview, position: int) -> int:
            if fd != file.fd:
                raise OSError(errno.EINVAL, "no")
            return real(fd, data, position)

        monkeypatch.setattr(os, "pwrite", pwrite)
        file.write(memoryview(b"x" * (1 << 20)), len(form.header))
        file.sync()
        file.close()
        assert (tmp_path / "x").read_bytes() == form.header + b"x" * (1 << 20)


class TestPreparing:
    def test_a_prepared_file_is_whole_but_for_its_data(self, tmp_path: Path) -> None:
        form = file_form(TENSORS, {"format": "pt"})
        prepare_file(OutputFolder(tmp_path), "x.safetensors", form.header, form.size)
        assert (tmp_path / "x.safetensors").stat().st_size == form.size
        with safe_open(tmp_path / "x.safetensors", "numpy") as file:
            assert set(file.keys()) == set(TENSORS)
            np.testing.assert_array_equal(file.get_tensor("a"), np.zeros((2, 3), np.int32))

    @pytest.mark.parametrize("size", [0, 9, 200, 5000])
    def test_preparing_again_keeps_the_data(self, tmp_path: Path, size: int) -> None:
        """Another process may have written meanwhile, and a crash may have left the file short or long."""
        path, form = tmp_path / "x.safetensors", file_form(TENSORS)
        prepare_file(OutputFolder(tmp_path), path.name, form.header, form.size)
        start, stop = form.ranges["a"]
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * (stop - start))
        before = path.read_bytes()
        os.truncate(path, size)
        prepare_file(OutputFolder(tmp_path), path.name, form.header, form.size)
        expected = before[:size] + bytes(max(form.size - size, 0))
        assert path.read_bytes() == form.header + expected[len(form.header) : form.size]

    def test_a_full_disk(self, tmp_path: Path) -> None:
        form = file_form({"huge": ((1 << 60,), "U8")})
        with pytest.raises(MoeqError, match="needs 1,152,921,504,606,8") as caught:
            prepare_file(OutputFolder(tmp_path), "x.safetensors", form.header, form.size)
        assert caught.value.exit_code == ExitCode.RESOURCES

    def test_no_room_for_all_of_them(self, tmp_path: Path) -> None:
        """Every file alone would fit."""
        status = os.statvfs(tmp_path)
        half = status.f_bavail * status.f_frsize // 2 // BLOCK * BLOCK
        sizes = dict.fromkeys(("a", "b", "c"), half)
        with pytest.raises(MoeqError, match=r"3 files need [\d,]+ bytes more; .* too few") as caught:
            require_free_space(OutputFolder(tmp_path), sizes)
        assert caught.value.code == "resources.disk-full"
        require_free_space(OutputFolder(tmp_path), dict.fromkeys(("a", "b"), BLOCK))

    def test_space_that_files_hold_already_is_not_asked_for_again(self, tmp_path: Path, monkeypatch) -> None:
        """A run that is resumed has its files, which took what was free before."""
        held, free = 8 * 2**20, 2 * 2**20
        with OutputFolder(tmp_path) as folder:
            fd = folder.open("held", os.O_CREAT | os.O_WRONLY)
            os.posix_fallocate(fd, 0, held)
            os.close(fd)
            rest = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)
            monkeypatch.setattr(os, "statvfs", lambda fd: rest)
            require_free_space(folder, {"held": held + free})
            require_free_space(folder, {"held": held, "new": free})
            for sizes in ({"held": held + free + 4096}, {"held": held, "new": free + 4096}, {"other": held}):
                with pytest.raises(MoeqError, match="too few"):
                    require_free_space(folder, sizes)

    def test_where_it_cannot_be_written(self, tmp_path: Path) -> None:
        form = file_form(TENSORS)
        with pytest.raises(MoeqError, match="cannot write") as caught:
            prepare_file(OutputFolder(tmp_path), "x" * 300, form.header, form.size)
        assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_a_full_disk_is_reported_at_once(tmp_path: Path) -> None:
    too_much = {"huge": ((1 << 60,), "U8")}
    with pytest.raises(MoeqError, match="needs 1,152,921,504,606,8") as caught:
        SafetensorsWriter(OutputFolder(tmp_path), "x.safetensors", too_much)
    assert caught.value.exit_code == ExitCode.RESOURCES
