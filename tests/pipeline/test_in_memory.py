"""Packing the experts of a rank into memory gives the bytes that the rank reads from the converted folder."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_scripts import make_checkpoint
from load.deployments import LAYOUTS, convert
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.parts import TensorSpec, torch_dtype
from moeq.load.ranks import Rank, plan_rank
from moeq.load.torch_loader import open_converted, read_parts, uneven_unit
from moeq.pipeline import in_memory
from moeq.pipeline.in_memory import RankPacker
from moeq.pipeline.pack.inputs import ALIGNMENT
from moeq.pipeline.plan.options import Ranks

pytest.importorskip("numba")

from moeq.layouts.loops.tape import Player

#: Deployments by name: `(tp, ep)`.
WHERE = {"whole": (1, 1), "tp": (2, 1), "ep": (1, 2)}

FLOATS = {
    "ct-fp8-block-qwen3moe": "marlin-fp8/1",
    "ct-mxfp8-qwen3moe": "marlin-mxfp8/1",
    "modelopt-nvfp4-qwen3moe": "marlin-nvfp4/1",
    "modelopt-fp8-qwen3moe": "flashinfer-cutlass-fp8-tensor/1",
}


@pytest.mark.cover(every=14)
@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("name", [*LAYOUTS, *FLOATS])
def test_bytes_are_those_of_the_converted_folder(name: str, where: str, checkpoints: Path, tmp_path: Path) -> None:
    tp, ep = WHERE[where]
    layout = {**LAYOUTS, **FLOATS}[name]
    try:
        folder = convert(checkpoints / name, tmp_path / "out", layout, allow_lossy=False, tp=tp, ep=ep)
    except MoeqError as error:
        with pytest.raises(MoeqError, match=error.message.partition(":")[0]):
            RankPacker(moeq.open(checkpoints / name), {1: layout}, Ranks(tp, ep), 0)
        return
    converted = open_converted(folder)
    layers = [entry.layer for entry in converted.manifest.layers]
    for number in range(tp * ep):
        packer = RankPacker(
            moeq.open(checkpoints / name), dict.fromkeys(layers, layout), Ranks(tp, ep), number, prove="all"
        )
        rank = Rank(number, tp) if tp > 1 else Rank(0, 1, number, ep)
        for layer in layers:
            entry = converted.manifest.layer(layer)
            part = plan_rank(entry, rank, uneven_unit(converted, layer))
            wanted = {
                f"{role}_{name}": tensor
                for role in STACKED_ROLES
                for name, tensor in read_parts(converted, entry, part, part.matrices[role]).items()
            }
            found = {
                name: torch.full_like(tensor.view(torch.uint8), 255).view(tensor.dtype).view(tensor.shape)
                for name, tensor in wanted.items()
            }
            packer.pack(layer, found)
            for tensor_name, tensor in wanted.items():
                bits = [one.contiguous().view(-1).view(torch.uint8) for one in (found[tensor_name], tensor)]
                assert torch.equal(*bits), (layer, number, tensor_name)


def filled(packer: RankPacker, count: int, layer: int = 1) -> dict[str, torch.Tensor]:
    """Pack a layer into new tensors on the CPU."""
    shard = packer.layer(layer).shards[0]
    tensors = {
        f"{role}_{part}": torch.zeros(count, *spec.shape, dtype=torch_dtype(spec.dtype))
        for role in STACKED_ROLES
        for part, spec in shard.parts[role].items()
    }
    packer.pack(layer, tensors)
    return tensors


@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "modelopt-nvfp4-qwen3moe"])
@pytest.mark.parametrize("experts_at_once", [1, 3, 4])
def test_bytes_do_not_depend_on_how_many_experts_are_packed_at_once(name, experts_at_once, checkpoints, monkeypatch):
    monkeypatch.setattr(words, "COMPILED_FROM", 0)  # the reference path takes one after the other
    layout, checkpoint = {**LAYOUTS, **FLOATS}[name], moeq.open(checkpoints / name)
    count = checkpoint.experts(1).num_experts
    whole = filled(RankPacker(checkpoint, {1: layout}, Ranks(), 0, prove="all"), count)
    sizes_of = in_memory.SampledPacker._batch
    batch = staticmethod(lambda *given: (experts_at_once, sizes_of(*given)[1]))
    monkeypatch.setattr(in_memory.SampledPacker, "_batch", batch)
    parted = filled(RankPacker(checkpoint, {1: layout}, Ranks(), 0, prove="all"), count)
    assert whole.keys() == parted.keys()
    for part, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), parted[part].view(torch.uint8)), part


#: Checkpoint and layout to whether several experts are packed with one call, which numbers read by Python prevent.
AT_ONCE = {
    ("gptq-int4-g32-qwen3moe", "marlin-wna16/1"): True,
    ("awq-int4-g32-qwen3moe", "marlin-wna16/1"): True,
    ("ct-int4-asym-g32-mixtral", "marlin-wna16/1"): True,
    ("ct-int4-g128-qwen3moe", "marlin-wna16/1"): True,
    ("ct-w8a8-qwen3moe", "int8-w8a8/1"): True,
    ("ct-fp8-block-qwen3moe", "marlin-fp8/1"): True,
    ("ct-fp8-channel-qwen3moe", "marlin-fp8/1"): True,
    ("mxfp4-gptoss", "moeq-mxfp4/1"): True,
    ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4/1"): False,
}


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "layout"), AT_ONCE)
def test_experts_packed_at_once_are_those_packed_one_by_one(name, layout, tp, checkpoints, monkeypatch) -> None:
    """With one call for all of them, one by one on the fast path, and on the reference path."""
    players, constants, player_of = [], [], in_memory.SampledPacker._player

    def kept(*given: Any) -> Any:
        player = player_of(*given)  # several threads come here, each for its own player
        players.append(player)
        constants.extend((one, one.copy()) for one in (player._tape.constants if player else ()))
        return player

    def packed() -> dict[str, torch.Tensor]:
        packer = RankPacker(moeq.open(checkpoints / name), {1: layout}, Ranks(tp), 0, prove="all")
        return filled(packer, packer.layer(1).shards[0].shard.experts.size)

    wanted = packed()
    monkeypatch.setattr(words, "COMPILED_FROM", 0)  # matrices this small take the reference path otherwise
    monkeypatch.setattr(in_memory.SampledPacker, "_player", kept)
    at_once = packed()
    assert players
    assert {player is not None for player in players} == {AT_ONCE[name, layout]}
    assert all(np.array_equal(one, before) for one, before in constants), "threads share what is not traced"
    monkeypatch.setattr(in_memory.SampledPacker, "_player", lambda *given: None)
    for found in (at_once, packed()):
        assert found.keys() == wanted.keys()
        for part, tensor in wanted.items():
            assert torch.equal(tensor.view(torch.uint8), found[part].view(torch.uint8)), part


def test_an_unusual_expert_among_those_packed_at_once_is_packed_like_any(checkpoints, tmp_path, monkeypatch) -> None:
    """Expert 2 has a placeholder for its group index, which takes another branch than those that were recorded."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    (path,) = source.glob("*.safetensors")
    tensors = load_file(path)
    changed = [name for name in tensors if ".1.mlp.experts.2." in name and name.endswith("g_idx")]
    assert len(changed) == 3
    save_file({name: torch.zeros_like(one) if name in changed else one for name, one in tensors.items()}, path)
    wanted = filled(RankPacker(moeq.open(source), {1: "marlin-wna16/1"}, Ranks(), 0), 4)
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    done, play = [], Player.play

    def played(*given: Any) -> list[bool]:
        found = play(*given)
        done.append(found)
        return found

    monkeypatch.setattr(Player, "play", played)
    found = filled(RankPacker(moeq.open(source), {1: "marlin-wna16/1"}, Ranks(), 0), 4)
    assert done == [[True, True, False, True]] * 2
    assert all(torch.equal(tensor.view(torch.uint8), found[part].view(torch.uint8)) for part, tensor in wanted.items())


def test_what_is_packed_at_once_is_proven(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong byte of a sampled expert ends the start."""
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    play = Player.play

    def damaging(player: Player, addresses: Any) -> list[bool]:
        done = play(player, addresses)
        packed = int(addresses[0, -2])  # the last part before scratch
        ctypes.memset(packed, ctypes.c_ubyte.from_address(packed).value ^ 1, 1)
        return done

    monkeypatch.setattr(Player, "play", damaging)
    packer = RankPacker(moeq.open(checkpoints / "gptq-int4-g32-qwen3moe"), {1: "marlin-wna16/1"}, Ranks(), 0)
    with pytest.raises(MoeqError) as caught:
        filled(packer, 4)
    assert caught.value.code == "bug.round-trip"


@pytest.mark.slow
def test_the_memory_for_packing_is_bounded(tmp_path: Path) -> None:
    """The process that packs Mixtral's experts, of 60 MB each, holds less than its ceiling beyond the tensors."""
    script = Path(make_checkpoint.__file__).with_name("direct_load.py")
    out = tmp_path / "out.json"
    argv = [sys.executable, str(script), "--layers", "1", "--case", "int4-mixtral", "--out", str(out)]
    subprocess.run([*argv, "--folder", str(tmp_path)], check=True, capture_output=True)
    assert 0 < json.loads(out.read_text())["cases"]["int4-mixtral"]["peak"] < in_memory.USUAL_CEILING


def test_scales_are_rounded_to_the_dtype_of_the_tensors(checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    packer = RankPacker(source, {1: "marlin-wna16/1"}, Ranks(), 0)
    shard = packer.layer(1).shards[0]
    made = {}
    for dtype in (torch.float16, torch.bfloat16):
        made[dtype] = {
            f"{role}_{part}": torch.zeros(4, *spec.shape, dtype=dtype if spec.dtype == "F16" else torch.int32)
            for role in STACKED_ROLES
            for part, spec in shard.parts[role].items()
        }
        packer.pack(1, made[dtype])
    for name, exact in made[torch.float16].items():
        assert torch.equal(made[torch.bfloat16][name], exact.to(made[torch.bfloat16][name].dtype))


def test_damage_is_found_and_nothing_is_written(checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    checkpoint = moeq.open(source)
    packer = RankPacker(checkpoint, {1: "marlin-wna16/1"}, Ranks(), 0)
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shard = packer.layer(1).shards[0]
    tensors = {
        f"{role}_{part}": torch.zeros(4, *spec.shape, dtype=torch.float16 if spec.dtype == "F16" else torch.int32)
        for role in STACKED_ROLES
        for part, spec in shard.parts[role].items()
    }
    with pytest.raises(MoeqError, match=r"ended before byte|truncated|changed"):
        packer.pack(1, tensors)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


class Runtime:
    """The CUDA runtime as far as locking pages needs it."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, status: int) -> None:
        self.status, self.told = status, list[tuple[Any, ...]]()

    def cudaHostRegister(self, *given: int) -> int:
        self.told.append(("register", *given))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.told.append(("unregister", address))
        return 0


@pytest.mark.parametrize("status", [0, 2])
def test_locked_memory_is_unlocked_when_it_is_freed(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = in_memory.pinned_memory(12_345)
    address = memory.ctypes.data
    assert (memory.nbytes, memory.dtype, address % ALIGNMENT) == (12_345, np.uint8, 0)
    assert runtime.told == [("register", address, 12_345, 0)]  # cudaHostRegisterDefault
    part = memory[:10]
    del memory
    gc.collect()
    assert len(runtime.told) == 1, "a part is in use"
    del part
    gc.collect()
    assert runtime.told[1:] == [("unregister", address)] * (status == 0)


def rows_filled(tensor: torch.Tensor, start: int = 100) -> torch.Tensor:
    """Fill rows 1 and 2 of a stack of `[4, 2, 3]` bfloat16 numbers that begins at byte 100 of its file."""
    numbers = torch.arange(24, dtype=torch.bfloat16).view(4, 2, 3)
    stack = in_memory._Stack(start, start + 48, tensor, TensorSpec((2, 3), "BF16"))
    stack.fill(memoryview(numbers.view(-1).view(torch.uint8).numpy())[12:36], start + 12)
    return tensor


def test_a_stack_takes_bytes_and_numbers_of_another_dtype() -> None:
    wanted = torch.zeros(4, 2, 3, dtype=torch.bfloat16)
    wanted[1:3] = torch.arange(6, 18).view(2, 2, 3)
    for tensor in (
        torch.zeros(4, 2, 3, dtype=torch.bfloat16),
        torch.zeros(4, 2, 3, dtype=torch.float32),
        torch.zeros(4, 2, 3, dtype=torch.float16),
        torch.zeros(4, 3, 2, dtype=torch.bfloat16).transpose(1, 2),
    ):
        assert torch.equal(rows_filled(tensor).to(torch.bfloat16), wanted)


class Stream:
    """A CUDA stream on which copies run; it notes when somebody waits for them."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def __enter__(self) -> None:
        self.told.append("on the stream")

    def __exit__(self, *_raised: object) -> None:
        self.told.append("off the stream")

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.told.append("waited"))


def test_parts_go_to_their_tensors_and_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    first, second = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)
    targets = {(108, 114): (second, TensorSpec((2,), "U8")), (100, 108): (first, TensorSpec((4,), "U8"))}
    sink = in_memory.TensorSink(targets)
    assert sink._stream is None
    sink.write(memoryview(bytearray([1, 2, 3, 4])), 104)
    assert first.tolist() == [[0] * 4, [1, 2, 3, 4]]
    sink._stream = Stream(told)  # type: ignore[assignment]
    sink.write(memoryview(bytearray([5, 6, 7, 8])), 110)
    assert second.tolist() == [[0, 0], [5, 6], [7, 8]]
    assert told == ["on the stream", "waited", "off the stream"]
