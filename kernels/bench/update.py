"""Time updates of served experts on one GPU: Qwen3-30B-A3B, int4 in groups of 128, Marlin's order.

    PYTHONPATH=.:kernels python kernels/bench/update.py --out update.json

Checked first: the bytes of the gather kernel against those of the CPU, a CUDA graph that was captured before an update
and replayed after it, updates on one stream beside reads on another, digests against those of the CPU, and an expert
that the writer places as it is stored. Then a layer and an expert are timed, written through `moeq.Writer` and by the
kernel alone, and `moeq.snapshot` of the layer; the model's times are those of its 48 layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

import moeq
from moeq.layouts.layout import Layout
from moeq.layouts.padding import PaddingPlan
from moeq.layouts.registry import get_layout
from moeq.load.ranks import Rank
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.shards import Range
from moeq.update.layers import WritableLayer
from moeq.update.placing import placement_of
from moeq.update.quantize import quantize
from moeq.update.snapshot import is_gathered, read_digests
from moeq.update.writer import Writer
from moeq_kernels.blake3 import digests
from moeq_kernels.index_maps import Packing
from moeq_kernels.placement import Write, place_together

#: Where everything lies; tests take `cpu`, for Triton's interpreter.
DEVICE = "cuda"

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 48, 128, 2048, 768, 128

#: Checkpoint whose encoding the layer has: compressed-tensors, int4 in groups of 128.
CHECKPOINT = "tests/data/checkpoints/ct-int4-g128-qwen3moe"

SPECS = {
    "w13": MatrixSpec("w13", 2 * INTERMEDIATE, HIDDEN, "int4", GROUP, "bf16", gated=True),
    "w2": MatrixSpec("w2", HIDDEN, INTERMEDIATE, "int4", GROUP, "bf16"),
}


def marlin() -> Layout:
    return get_layout("marlin-wna16/1")


def targets(experts: int) -> dict[str, dict[str, Tensor]]:
    """Tensors of `experts` experts as a kernel reads them."""
    layout = marlin()
    return {
        role: {
            name: torch.zeros(
                experts, *one.shape, dtype={"I32": torch.int32, "BF16": torch.bfloat16}[one.dtype], device=DEVICE
            )
            for name, one in layout.tensors(spec).items()
        }
        for role, spec in SPECS.items()
    }


def writer(tensors: dict[str, dict[str, Tensor]]) -> Writer:
    """Return the writer of one layer that lies in `tensors`."""
    layer = WritableLayer(
        layer=0,
        layout=marlin(),
        scheme=moeq.open(CHECKPOINT).scheme_of(0),
        specs=SPECS,
        written=SPECS,
        padding=PaddingPlan(marlin().padding, SPECS["w13"], SPECS["w2"], SPECS["w13"], SPECS["w2"]),
        intermediate=Range(0, INTERMEDIATE),
        adds_w2_bias=True,
        tensors=tensors,
        experts=tuple(range(EXPERTS)),
        num_experts=EXPERTS,
        digests={},
        rank=Rank(),
        interleaved=None,
    )
    return Writer([layer])


class Places:
    """Placements of both matrices, made once."""

    def __init__(self) -> None:
        layout = marlin()
        self.found = {}
        for role, spec in SPECS.items():
            for name, part in layout.parts(spec).items():
                rows, columns = layout.element_shape(part, spec)
                placement = placement_of(part, (rows, columns))
                assert placement is not None
                self.found[role, name] = placement

    def writes(
        self, role: str, codes: Tensor, scales: Tensor, into: dict[str, Tensor], row: int | slice, packing: Packing
    ) -> list[Write]:
        """Return the writes of one matrix, or of several."""
        spec = SPECS[role]
        return [
            Write(source, into[name][row], self.found[role, name], shape, form)
            for name, source, shape, form in (
                ("weight", codes, (spec.n, spec.k), packing),
                ("scale", scales, (spec.n, spec.num_groups), Packing()),
            )
        ]

    def write(self, *given: Any) -> None:
        """Write what `writes` says."""
        place_together(self.writes(*given))


def packed_words(codes: Tensor) -> Tensor:
    """compressed-tensors' int32 words of eight codes along K."""
    spread = codes.view(codes.shape[0], -1, 8).long() << (4 * torch.arange(8, device=codes.device))
    found = spread.sum(2)
    return (found - ((found >> 31) << 32)).to(torch.int32)


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def check_bytes(places: Places) -> None:
    """Check every byte against the CPU's, from codes and from words."""
    layout = marlin()
    for role, spec in SPECS.items():
        weight = torch.randn(spec.n, spec.k).to(torch.bfloat16)
        matrix: QuantizedMatrix = quantize(weight, spec, "compressed-tensors")
        wanted = layout.pack(matrix)
        for packing in (Packing(), Packing(8)):
            into = targets(1)[role]
            codes = matrix.codes.to(DEVICE)
            source = codes if packing.per == 1 else packed_words(codes)
            places.write(role, source, matrix.scales.to(DEVICE), into, 0, packing)
            for name in wanted:
                assert torch.equal(into[name][0].cpu(), wanted[name]), (role, name, packing)
        on_gpu = quantize(weight.to(DEVICE), spec, "compressed-tensors")
        assert torch.equal(on_gpu.codes.cpu(), matrix.codes), "the GPU rounds as the CPU does"
        assert torch.equal(on_gpu.scales.cpu(), matrix.scales)


def check_graph(places: Places) -> None:
    """Check that a graph that was captured before an update reads the new bytes when it is replayed."""
    spec, into = SPECS["w2"], targets(1)["w2"]
    seen = torch.zeros_like(into["weight"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(into["weight"])
    for seed in range(3):
        torch.manual_seed(seed)
        matrix = quantize(torch.randn(spec.n, spec.k).to(torch.bfloat16), spec, "compressed-tensors")
        places.write("w2", matrix.codes.to(DEVICE), matrix.scales.to(DEVICE), into, 0, Packing())
        graph.replay()
        assert torch.equal(seen[0].cpu(), marlin().pack(matrix)["weight"]), seed
    # Updates themselves can be captured, too.
    codes, scales = matrix.codes.to(DEVICE), matrix.scales.to(DEVICE)
    torch.cuda.synchronize()
    update = torch.cuda.CUDAGraph()
    with torch.cuda.graph(update):
        places.write("w2", codes, scales, into, 0, Packing())
    into["weight"].zero_()
    update.replay()
    assert torch.equal(into["weight"][0].cpu(), marlin().pack(matrix)["weight"])


def check_streams(places: Places) -> None:
    """Check that a reader on another stream that waits for an event finds whole experts, old or new."""
    spec, into = SPECS["w2"], targets(1)["w2"]
    versions = []
    for seed in range(2):
        torch.manual_seed(seed)
        matrix = quantize(torch.randn(spec.n, spec.k).to(torch.bfloat16), spec, "compressed-tensors")
        versions.append((matrix.codes.to(DEVICE), matrix.scales.to(DEVICE), marlin().pack(matrix)["weight"].to(DEVICE)))
    torch.cuda.synchronize()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    done = torch.cuda.Event()
    kept = []
    for turn in range(200):
        with torch.cuda.stream(writer):
            codes, scales, _ = versions[turn % 2]
            places.write("w2", codes, scales, into, 0, Packing())
            done.record(writer)
        with torch.cuda.stream(reader):
            reader.wait_event(done)
            kept.append((turn, into["weight"][0].clone()))
        writer.wait_stream(reader)
    torch.cuda.synchronize()
    for turn, weight in kept:
        assert torch.equal(weight, versions[turn % 2][2]), turn


def check_hashes(places: Places) -> None:
    """Check digests of random messages against the CPU's."""
    for length in (0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3 * 1024 + 7, 777_777, (1 << 20) + 1, 3_145_728):
        messages = torch.zeros(3, -(-max(length, 1) // 64) * 64, dtype=torch.uint8, device=DEVICE)
        messages[:, :length] = torch.randint(256, (3, length), dtype=torch.uint8, device=DEVICE)
        for message, digest in zip(messages.cpu(), digests(messages, length).cpu(), strict=True):
            assert digest.numpy().tobytes() == blake3(message[:length].numpy().data).digest(), length


#: Converted layers whose digests are checked: with gate and up rows in pairs, scales of blocks, and
#: zero points.
CONVERTED = {
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
    "ct-fp8-block-qwen3moe": "xpu-fp8-block/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
}


def check_snapshots(places: Places) -> None:
    """Check digests of layers in several layouts against those of the CPU, before and after an update."""
    for name, layout in CONVERTED.items():
        with tempfile.TemporaryDirectory() as folder:
            source, out = f"tests/data/checkpoints/{name}", f"{folder}/out"
            moeq.convert(source, out, gpu="H100", engine="moeq", layout=layout, force_layout=True)
            layer, cpu = (moeq.writable_layer(out, 0, device=one, check_gpu=False) for one in (DEVICE, "cpu"))
            assert is_gathered(layer), layout
            assert moeq.snapshot(layer) == moeq.snapshot(cpu) == Writer([cpu]).digest(0), layout
            spec = layer.specs["w2"]
            weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
            one, other = Writer([layer]), Writer([cpu])
            one.update(0, 1, "down", weight)
            other.update(0, 1, "down", weight)
            assert one.digest(0) == other.digest(0) == moeq.snapshot(layer), layout


class Inputs:
    """New weights of a layer's experts, in floats and as packed words, and the tensors that are written."""

    def __init__(self, places: Places) -> None:
        self.places, self.into = places, targets(EXPERTS)
        self.writer = writer(self.into)
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        self.weights = {
            role: torch.randn(EXPERTS, spec.n, spec.k, generator=generator, device=DEVICE).to(torch.bfloat16)
            for role, spec in SPECS.items()
        }
        self.scales, self.words = {}, {}
        for role in SPECS:
            codes, self.scales[role] = self.rounded(role)
            self.words[role] = torch.stack([packed_words(one) for one in codes])
        self.parts = {
            name: {
                "weight_packed": self.words[role][0].tensor_split(count)[i],
                "weight_scale": self.scales[role][0].tensor_split(count)[i],
                "weight_shape": torch.tensor([SPECS[role].n // count, SPECS[role].k]),
            }
            for name, role, count, i in (("gate", "w13", 2, 0), ("up", "w13", 2, 1), ("down", "w2", 1, 0))
        }

    def rounded(self, role: str) -> tuple[Tensor, Tensor]:
        """Quantise all experts of a layer as one tall matrix."""
        tall = self.weights[role].flatten(0, 1)
        found = quantize(tall, replace(SPECS[role], n=len(tall)), "compressed-tensors")
        return found.codes.unflatten(0, (EXPERTS, -1)), found.scales.unflatten(0, (EXPERTS, -1))

    def from_floats(self) -> None:
        """Quantise and write all experts of a layer, as a trainer does that sends them on the same GPU."""
        gate, up = self.weights["w13"].tensor_split(2, dim=1)
        self.writer.update_layer(0, "w13", {"gate": gate, "up": up})
        self.writer.update_layer(0, "down", self.weights["w2"])

    def from_words(self) -> None:
        """Write all experts of a layer from packed words."""
        writes = []
        for role in SPECS:
            given = self.words[role], self.scales[role], self.into[role], slice(None), Packing(8)
            writes += self.places.writes(role, *given)
        place_together(writes)

    def one_expert(self) -> None:
        """Write one expert through the writer, from the tensors that its checkpoint has."""
        self.writer.update_expert(0, 0, self.parts)

    def one_expert_placed(self) -> None:
        """Write one expert by the kernel alone: what is left of that without checks."""
        place_together(
            [
                write
                for role in SPECS
                for write in self.places.writes(
                    role, self.words[role][0], self.scales[role][0], self.into[role], 0, Packing(8)
                )
            ]
        )

    def hasher(self) -> Callable[[], object]:
        """Return a call that hashes as many bytes as the codes of a layer have."""
        size = EXPERTS * INTERMEDIATE * HIDDEN // 2
        messages = torch.randint(256, (EXPERTS, size // EXPERTS), dtype=torch.uint8, device=DEVICE)
        return lambda: [digests(messages, messages.shape[1]) for _ in range(3)]

    def copier(self) -> Callable[[], None]:
        """Return a call that copies a layer as it is, from other memory."""
        pairs = [(one, one.clone()) for parts in self.into.values() for one in parts.values()]
        return lambda: [one.copy_(other) for one, other in pairs] and None


def measure(places: Places) -> dict[str, float]:
    """Return seconds for the model and for a copy of a layer, and microseconds for one expert."""
    inputs = Inputs(places)
    inputs.from_words()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.from_words()
    floats, words = seconds(inputs.from_floats), seconds(inputs.from_words)
    replayed, copied = seconds(graph.replay, 20), seconds(inputs.copier(), 20)
    layer = inputs.writer.layers[0]
    by_kernel = moeq.snapshot(layer)
    inputs.one_expert()
    assert moeq.snapshot(layer) == by_kernel, "the writer places what the kernel alone placed"
    start = time.perf_counter()
    assert read_digests(layer, (), gather=False) == read_digests(layer, ())
    on_cpu = time.perf_counter() - start
    digested = seconds(lambda: moeq.snapshot(layer), 10)
    return {
        "model_from_bf16_s": LAYERS * floats,
        "model_from_words_s": LAYERS * words,
        "model_from_words_in_a_graph_s": LAYERS * replayed,
        "model_copy_s": LAYERS * copied,
        "words_rate_of_copy": copied / words,
        "graph_rate_of_copy": copied / replayed,
        "one_expert_us": 1e6 * seconds(inputs.one_expert, 50),
        "one_expert_placed_us": 1e6 * seconds(inputs.one_expert_placed, 50),
        "snapshot_of_layer_ms": 1e3 * digested,
        "snapshot_rate_of_copy": copied / digested,
        "hashes_of_layer_ms": 1e3 * seconds(inputs.hasher(), 10),
        "snapshot_of_layer_on_cpu_ms": 1e3 * on_cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    places = Places()
    for check in (check_bytes, check_graph, check_streams, check_hashes, check_snapshots):
        check(places)
        print(f"{check.__name__}: ok")
    found = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), **measure(places)}
    print(json.dumps(found, indent=1))
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
