"""Calls of layers that launch through the driver: what a call hands to its launches; without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import meta_experts
from support.pretended_driver import take_cpu
from support.recording_driver import Library, array, install

from moeq_kernels import cuda, prepare, programs, queued, warming
from moeq_kernels.areas import Area
from moeq_kernels.compiling import Warmed
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.gpu import GPUS, Gpu
from moeq_kernels.launch import Launch
from moeq_kernels.schedules import schedule

STREAM = 7


class Bound:
    """Launches that note what they are run with, and write sevens to `out`."""

    workspace_bytes = 1024

    def __init__(self) -> None:
        self.runs: list[tuple[list[int], list[int], int]] = []

    def run(self, addresses: list[int], maps: list[int], stream: int) -> None:
        self.runs.append((list(addresses), list(maps), stream))
        ctypes.memset(addresses[3], 7, 2 * 512)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices that a call has made torch's current one: 0 is, and its stream is STREAM."""
    found: list[Any] = []

    @contextmanager
    def device(index: Any) -> Iterator[None]:
        found.append(index)
        yield
        found.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    return found


def layer_of(**options: Any) -> Any:
    programs.program_of.cache_clear()
    layer = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=64, gpu="H200", **options)
    take_cpu(layer)
    return layer


def tokens(count: int, moved: int = 0) -> list[torch.Tensor]:
    """Tensors of a call, `moved` bytes behind a multiple of 16."""

    def placed(dtype: torch.dtype, size: int) -> torch.Tensor:
        memory = torch.zeros(count * size * dtype.itemsize + 64, dtype=torch.uint8)
        start = -memory.data_ptr() % 16 + moved
        return memory[start : start + count * size * dtype.itemsize].view(dtype).view(count, size)

    return [placed(torch.bfloat16, 512), placed(torch.float32, 2), placed(torch.int32, 2)]


@pytest.mark.usefixtures("entered")
def test_a_call_hands_over_the_addresses_of_its_roots() -> None:
    layer, given = layer_of(), tokens(3)
    bound = layer._program.bounds[3] = Bound()
    assert layer._program.roots[:6] == ("x", "topk_weights", "topk_ids", "out", "workspace", "expert_map")
    assert layer._program.weights == ["w13.weight", "w13.scale", "w2.weight", "w2.scale"]
    assert layer._program.roots[6:] == tuple(layer._program.weights)
    out, workspace = torch.empty_like(given[0]), torch.empty(1024 + 16, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 16 :][:1024]
    assert layer(*given, out=out, workspace=workspace) is out
    weights = [layer._tensors[name].data_ptr() for name in layer._program.weights]
    wanted = [*(one.data_ptr() for one in (*given, out, workspace)), 0, *weights]
    assert bound.runs == [(wanted, [], STREAM)]
    y = layer(*given)  # torch's allocator gives the rest
    addresses, *_ = bound.runs[1]
    assert addresses[:4] == [*(one.data_ptr() for one in given), y.data_ptr()]
    assert addresses[4] not in (0, workspace.data_ptr())
    layer(*tokens(0))
    assert len(bound.runs) == 2


def test_a_call_runs_on_its_layers_device(entered: list[Any]) -> None:
    layer = layer_of()
    bound = layer._program.bounds[3] = Bound()
    layer(*tokens(3))
    assert entered == []
    layer._program.device = 1  # torch's current one is 0
    layer(*tokens(3))
    assert entered == [1, "left"]
    assert [stream for *_, stream in bound.runs] == [STREAM, STREAM + 1]


@pytest.mark.usefixtures("entered")
@pytest.mark.parametrize("which", range(4))
def test_tensors_that_are_not_aligned_are_copied(which: int) -> None:
    layer = layer_of()
    bound = layer._program.bounds[1] = Bound()
    given, out = tokens(1), tokens(1)[0]
    if which < 3:
        given[which] = tokens(1, moved=8)[which]
        given[which] += 3
    else:
        out = tokens(1, moved=8)[0]
    layer(*given, out=out)
    ((addresses, *_),) = bound.runs
    assert all(one % 16 == 0 for one in addresses)
    assert addresses[which] != [*given, out][which].data_ptr()
    assert out.view(torch.uint8).unique().tolist() == [7]


@pytest.mark.usefixtures("entered")
def test_a_workspace_that_does_not_fit_is_refused() -> None:
    layer, given = layer_of(), tokens(3)
    bound = layer._program.bounds[3] = Bound()
    memory = torch.empty(4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    for workspace in (memory[:1023], memory[8 : 8 + 1024], memory[:4096 - 64].view(torch.int8), memory[:2048:2],
                      torch.empty(1024, dtype=torch.uint8, device="meta")):  # fmt: skip
        with pytest.raises(KernelArgumentError, match=r"workspace is .*(has to be uint8 \[1024\]|on meta, but x)"):
            layer(*given, workspace=workspace)
    assert bound.runs == []
    for workspace in (memory[:1024], memory[16:2000]):
        layer(*given, workspace=workspace)
    assert len(bound.runs) == 2


@pytest.mark.usefixtures("entered")
def test_an_expert_map_is_handed_over_as_int32() -> None:
    layer = layer_of(num_experts=16)
    bound = layer._program.bounds[3] = Bound()
    found = []
    bound.run = lambda addresses, *_: found.append(array(ctypes.c_int32, addresses[5], 16))  # type: ignore[method-assign]
    layer.device = torch.device("cpu")  # as its tensors say
    places = [*range(8), *[-1] * 8]
    for dtype in (torch.int32, torch.int64):
        layer(*tokens(3), expert_map=torch.tensor(places, dtype=dtype))
    assert found == [places] * 2


def test_launches_are_planned_once_for_a_number_of_tokens(entered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(cuda, "Bound", lambda *given: made.append(given) or Bound())
    monkeypatch.setattr(programs, "MAX_KEPT_COUNTS", 2)
    layer = layer_of()
    program = layer._program
    for count in (3, 4, 3, 5, 4, 3):
        layer(*tokens(count))
    assert [one[0] for one in made] == [schedule(layer.family, layer.problem, count) for count in (3, 4, 5, 3)]
    assert list(program.bounds) == [5, 3]
    assert made[0][1:] == (program.roots, program.maps, GPUS["H200"], 0)
    assert entered == [0, "left"] * 4


def test_descriptors_of_weights_are_encoded_when_new_boxes_come(
    entered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install(monkeypatch, Library())
    layer = layer_of()
    bound = layer._program.bounds[3] = Bound()
    area = Area.of("w2.weight", torch.uint8, 2, 32)
    second = Area.of("w2.weight", torch.uint8, 1, 32, offset=32)
    layer._program.maps[area, 3, (1, 32)] = 0
    layer(*tokens(3))
    layer(*tokens(3))
    layer._program.maps[second, 0, (1, 16)] = 1
    layer(*tokens(3))
    base = layer._tensors["w2.weight"].data_ptr()
    told = [(one[0], one[3], one[9], one[10]) for one in library.given("cuTensorMapEncodeTiled")]
    first, other = layer._maps
    assert told == [(first, base, 3, 2), (other, base + 32, 0, 2)]  # promotions of 128 bytes on an H200
    assert [maps for _, maps, _ in bound.runs] == [[first], [first], [first, other]]
    assert entered == [0, "left"] * 2


def launch() -> Launch:
    return Launch("device.blake3:nothing", (1,), {"x": Area.of("messages", torch.int32, 4)}, {})


@pytest.fixture
def cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"bound": [], "run": [], "triton": []}

    def bound(*given: Any) -> Any:
        found["bound"].append(given)
        return SimpleNamespace(run=lambda *given: found["run"].append(given))

    monkeypatch.setattr(cuda, "Bound", bound)
    monkeypatch.setattr(queued, "run_with_triton", lambda *given: found["triton"].append(given))
    monkeypatch.setattr(queued, "gpu_of", lambda device: GPUS["MI300X" if device.index == 9 else "H200"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=70 + index))
    return found


def placed(kind: str, index: int, address: int) -> Any:
    return SimpleNamespace(device=SimpleNamespace(type=kind, index=index), data_ptr=lambda: address)


def test_queued_launches_are_bound_once_for_each_device(entered: list[Any], cuda_tensors: dict[str, list[Any]]) -> None:
    one, launches = launch(), [launch()]
    found = queued.QueuedLaunches(launches, ("messages", "nodes"))
    assert found.launches == (one,)
    for index in (0, 1, 0, 1):
        found.run(placed("cuda", index, 0x1000), placed("cuda", index, 0x2000))
    assert [(given[0].launches, given[0].workspace_bytes, *given[1:]) for given in cuda_tensors["bound"]] == [
        ((one,), 0, ("workspace", "messages", "nodes"), {}, GPUS["H200"], index) for index in (0, 1)
    ]
    assert cuda_tensors["run"] == [((0, 0x1000, 0x2000), (), stream) for stream in (70, 71, 70, 71)]
    assert entered == [1, "left"] * 2
    assert cuda_tensors["triton"] == []


@pytest.mark.usefixtures("entered")
@pytest.mark.parametrize(("kind", "index", "address"), [("cpu", 0, 0x1000), ("cuda", 0, 0x1008), ("cuda", 9, 0x1000)])
def test_queued_launches_go_through_triton_elsewhere(
    kind: str, index: int, address: int, cuda_tensors: dict[str, list[Any]]
) -> None:
    """On CPUs and AMD GPUs, and where an address is no multiple of 16, for which nothing is compiled."""
    tensors = placed(kind, index, 0x1000), placed(kind, index, address)
    queued.QueuedLaunches([launch()], ("messages", "nodes")).run(*tensors)
    assert cuda_tensors["triton"] == [((launch(),), {"messages": tensors[0], "nodes": tensors[1]})]
    assert cuda_tensors["bound"] == cuda_tensors["run"] == []


@dataclass(frozen=True)
class Same:
    """A problem that is equal to others of its GPU."""

    gpu: Gpu
    interpret: bool


def test_warming_compiles_once_a_gpu_and_loads_on_each_device(
    entered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        warming, "builds", lambda family, problem, count: asked.append((family, count)) or {(family, count)}
    )
    compiled: list[Any] = []
    monkeypatch.setattr(warming, "compile_all", lambda *given: compiled.append(given) or Warmed(1, 1, 1.0))
    loaded: list[Any] = []
    monkeypatch.setattr(cuda, "load", lambda *given: loaded.append(given))

    def layer(gpu: str, device: str, most: int, direct: bool = True, family: str = "f", interpret: bool = False) -> Any:
        place = torch.device(device)
        problem = Same(GPUS[gpu], interpret)
        return SimpleNamespace(family=family, problem=problem, device=place, max_tokens=most, is_direct=direct)

    layers = [
        layer("H200", "cuda:0", 8),
        layer("H200", "cuda:0", 64),
        layer("H200", "cuda:2", 16),
        layer("H200", "cuda:0", 4, family="g"),
        layer("A100", "meta", 32, direct=False),
        layer("MI300X", "cuda:1", 8, direct=False),
        layer("L4", "cpu", 8, direct=False, interpret=True),
    ]
    total = warming.warmup(iter(layers))
    assert total == Warmed(2, 2, 2.0)
    assert sorted(asked) == [("f", 32), ("f", 64), ("g", 4)]
    assert compiled == [({("f", 64), ("g", 4)}, GPUS["H200"]), ({("f", 32)}, GPUS["A100"])]
    assert sorted(loaded, key=str) == sorted(
        [(("f", 64), GPUS["H200"], 0), (("g", 4), GPUS["H200"], 0), (("f", 64), GPUS["H200"], 2)], key=str
    )
    assert entered == [torch.device("cuda:0"), "left", torch.device("cuda:2"), "left"]
    asked.clear()
    warming.warmup(layers[:3], 5)
    assert asked == [("f", 5)]
