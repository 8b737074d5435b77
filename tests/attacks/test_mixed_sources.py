"""Two fine-tunes of one model have equal shapes, names and configs: work on one never becomes part of the other."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
from attacks.running import content, moeq_command

__all__ = ["moeq_command"]

NAME = "gptq-int4-g32-qwen3moe"
WEIGHTS = "model.safetensors"


def header(path: Path) -> tuple[dict[str, dict[str, list[int]]], int]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), 8 + length


def fine_tune(source: Path, target: Path, *wanted: str, places: tuple[float, ...] = (0.0, 0.5, 1.0)) -> Path:
    """A copy with other bytes in the tensors that have these words in their names; config and headers are equal."""
    shutil.copytree(source, target)
    table, base = header(target / WEIGHTS)
    with (target / WEIGHTS).open("r+b") as file:
        for name, entry in table.items():
            fixed = name == "__metadata__" or "qzeros" in name or "g_idx" in name
            if not fixed and all(word in name for word in wanted):
                start, stop = entry["data_offsets"]
                for place in places:
                    at = base + start + int(place * (stop - start - 1))
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 0x11]))
    return target


@pytest.fixture
def first(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "first"))


#: What differs between the two: everything, and ever less.
CHANGES = {
    "everything": ("",),
    "one layer": ("layers.1.",),
    "experts": ("experts", "qweight"),
    "scales": ("experts", "scales"),
    "one expert": ("layers.1.", "experts.3.", "down_proj.qweight"),
    "attention": ("layers.0.self_attn.o_proj.qweight",),
    "one tensor": ("model.norm.weight",),
}


@pytest.mark.cover
@pytest.mark.parametrize("words", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("same_times", [False, True], ids=["other times", "same times"])
class TestShards:
    """`--shard 0/2` of A and then B, in every way of going on."""

    @pytest.fixture
    def second(self, first: Path, words: tuple[str, ...], same_times: bool, tmp_path: Path) -> Path:
        second = fine_tune(first, tmp_path / "second", *words)
        if same_times:
            for path in first.iterdir():
                state = path.stat()
                os.utime(second / path.name, ns=(state.st_atime_ns, state.st_mtime_ns))
        return second

    @pytest.mark.cover(every=14)
    @pytest.mark.parametrize("shard", [0, 1])
    def test_the_rest_of_another_model(self, first, second, shard, tmp_path, moeq_command) -> None:
        """Either way it is refused, or what comes out is the conversion of one of them and nothing else."""
        alone = tmp_path / "alone"
        assert moeq_command("convert", second, alone, "--gpu", "a100").code == 0
        out = tmp_path / "out"
        assert moeq_command("convert", first, out, "--gpu", "a100", "--shard", f"{shard}/2").code == 0
        answer = moeq_command("convert", second, out, "--gpu", "a100")
        if answer.code == 0:
            weights = {name: data for name, data in content(out).items() if name.endswith(".safetensors")}
            assert weights == {name: data for name, data in content(alone).items() if name.endswith(".safetensors")}
            assert moeq_command("verify", out, "--source", second).code == 0
        else:
            assert answer.code in (2, 4)
            assert not out.exists()

    @pytest.mark.cover(every=7)
    def test_finalize(self, first, second, tmp_path, moeq_command) -> None:
        out = tmp_path / "out"
        assert moeq_command("convert", first, out, "--gpu", "a100", "--shard", "0/2").code == 0
        answer = moeq_command("convert", second, out, "--gpu", "a100", "--shard", "1/2")
        if answer.code == 0:
            answer = moeq_command("finalize", out)
        if answer.code == 0:
            assert moeq_command("verify", out, "--source", first).code == 0
        else:
            assert answer.code in (1, 2, 4)
            assert not out.exists()


def test_a_source_replaced_in_its_place(first, tmp_path, moeq_command) -> None:
    """Another model moved to the path of the first, with all times of the first."""
    out = tmp_path / "out"
    second = fine_tune(first, tmp_path / "second", "experts")
    assert moeq_command("convert", first, out, "--gpu", "a100", "--shard", "0/2").code == 0
    times = {path.name: path.stat() for path in first.iterdir()}
    first.rename(tmp_path / "gone")
    second.rename(first)
    for name, state in times.items():
        os.utime(first / name, ns=(state.st_atime_ns, state.st_mtime_ns))
    answer = moeq_command("convert", first, out, "--gpu", "a100")
    assert answer.code == 4, answer.err
    assert not out.exists()


@pytest.mark.slow
def test_a_true_copy_elsewhere_continues(first, tmp_path, moeq_command) -> None:
    """The same bytes at another place, with other times: another machine's disk, say."""
    out = tmp_path / "out"
    copy = tmp_path / "copy"
    shutil.copytree(first, copy, copy_function=shutil.copyfile)
    assert moeq_command("convert", first, out, "--gpu", "a100", "--shard", "0/2").code == 0
    assert moeq_command("convert", copy, out, "--gpu", "a100", "--shard", "1/2").code == 0
    assert moeq_command("finalize", out).code == 0
    assert moeq_command("verify", out, "--source", first).code == 0


class TestBelief:
    """What an interrupted run left is read again, and what it claims is not taken as it is."""

    @pytest.fixture
    def half(self, first: Path, tmp_path: Path, moeq_command) -> Path:
        assert moeq_command("convert", first, tmp_path / "out", "--gpu", "a100", "--shard", "0/1").code == 0
        return tmp_path / "out.moeq-partial"

    @pytest.fixture
    def whole(self, first: Path, tmp_path: Path, moeq_command) -> dict[str, bytes | str]:
        assert moeq_command("convert", first, tmp_path / "whole", "--gpu", "a100").code == 0
        return content(tmp_path / "whole")

    @pytest.mark.cover(every=12)
    @pytest.mark.parametrize("size", [8, 64, 512, 4096])
    @pytest.mark.parametrize("file", [1, 2, 3])
    def test_two_blocks_exchanged(self, size, file, first, half, whole, tmp_path, moeq_command) -> None:
        """The sum of their words stays the same."""
        path = half / f"model-{file:05d}-of-00003.safetensors"
        data = bytearray(path.read_bytes())
        one, block = 4096, data[4096 : 4096 + size]
        others = [place for place in range(8192, len(data) - size, size) if data[place : place + size] != block]
        two = others[len(others) // 2]
        data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
        path.write_bytes(data)
        assert moeq_command("convert", first, tmp_path / "out", "--gpu", "a100").code == 0
        assert content(tmp_path / "out") == whole

    @pytest.mark.cover(every=6)
    @pytest.mark.parametrize("size", [8, 512, 4096])
    @pytest.mark.parametrize("copied", [False, True])
    def test_two_blocks_of_one_unit_exchanged(self, size, copied, first, half, whole, tmp_path, moeq_command) -> None:
        """Whatever a unit's check adds up comes to the same: of one expert, and of one tensor that is copied."""
        done = []
        for path in sorted(half.glob("*.safetensors")):
            table, base = header(path)
            data = bytearray(path.read_bytes())
            for name, entry in table.items():
                if name == "__metadata__" or ("experts" in name) == copied:
                    continue
                start, stop = (base + offset for offset in entry["data_offsets"])
                one = start if copied else stop - (stop - start) // entry["shape"][0]  # its last expert
                others = range(one + size, stop - size + 1, size)
                two = next((at for at in others if data[at : at + size] != data[one : one + size]), None)
                if two is not None:
                    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
                    done.append(name)
            path.write_bytes(data)
        assert done
        assert moeq_command("convert", first, tmp_path / "out", "--gpu", "a100").code == 0
        assert content(tmp_path / "out") == whole

    @pytest.mark.cover(every=12)
    @pytest.mark.parametrize("cut", range(12))
    def test_a_journal_cut_anywhere(self, cut, first, half, whole, tmp_path, moeq_command) -> None:
        """At every kind of place: in the first line, at its end, within lines, and within seals."""
        (journal,) = half.glob("moeq-journal*")
        raw = journal.read_bytes()
        ends = [at for at, byte in enumerate(raw) if byte == 10]
        places = [0, 1, 20, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 30, ends[1], ends[2] + 2]
        at = (*places, len(raw) - 2, len(raw) - 1, len(raw) // 2)[cut]
        journal.write_bytes(raw[:at])
        answer = moeq_command("convert", first, tmp_path / "out", "--gpu", "a100")
        if at < ends[0]:  # nothing tells whose the files are any more
            assert answer.code == 2
            assert not (tmp_path / "out").exists()
        else:
            assert answer.code == 0
            assert content(tmp_path / "out") == whole

    @pytest.mark.slow
    @pytest.mark.parametrize("every_line", [False, True], ids=["one line of a kind", "every line"])
    def test_every_claim_of_a_journal(self, every_line, first, half, whole, tmp_path, moeq_command) -> None:
        """Each value of each line replaced in turn: the unit is done again, or the run refuses."""
        (journal,) = half.glob("moeq-journal*")
        original = journal.read_bytes()
        saved = tmp_path / "saved"
        shutil.copytree(half, saved)
        lines = original.splitlines()
        kinds = {tuple(json.loads(line)): number for number, line in enumerate(lines)}
        for number, line in enumerate(lines):
            for key in json.loads(line) if every_line or number in kinds.values() else ():
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                shutil.rmtree(half, ignore_errors=True)
                shutil.copytree(saved, half)
                row = json.loads(line)
                row[key] = altered(row[key])
                changed = [*lines[:number], json.dumps(row, separators=(",", ":")).encode(), *lines[number + 1 :]]
                journal.write_bytes(b"\n".join(changed) + b"\n")
                answer = moeq_command("convert", first, tmp_path / "out", "--gpu", "a100")
                if answer.code == 0:
                    assert content(tmp_path / "out") == whole, (number, key)
                else:
                    assert answer.code in (2, 4), (number, key)

    @pytest.mark.slow
    def test_lines_of_another_journal(self, first, half, whole, tmp_path, moeq_command) -> None:
        """Units of a fine-tune, taken over line by line with their files left as they are."""
        second = fine_tune(first, tmp_path / "second", "experts")
        assert moeq_command("convert", second, tmp_path / "other", "--gpu", "a100", "--shard", "0/1").code == 0
        (journal,), (foreign,) = half.glob("moeq-journal*"), (tmp_path / "other.moeq-partial").glob("moeq-journal*")
        lines = [journal.read_bytes().splitlines()[0], *foreign.read_bytes().splitlines()[1:]]
        journal.write_bytes(b"\n".join(lines) + b"\n")
        assert moeq_command("convert", first, tmp_path / "out", "--gpu", "a100").code == 0
        assert content(tmp_path / "out") == whole


def altered(value: object) -> object:
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    if isinstance(value, bool) or value is None:
        return "x"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value, "x"]
    return {key: altered(one) for key, one in value.items()} if isinstance(value, dict) else value
