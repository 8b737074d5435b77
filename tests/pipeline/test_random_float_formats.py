"""Random NVFP4, FP8 and MXFP8 experts of odd sizes in every layout and rank: the fast path against the reference path.

Values are drawn to hit what layouts treat apart: negative zeros, scales of 0, tiny and huge ones, scales that are alike
within a matrix or are not, global scales of gate and up that differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from moeq.checkpoint.manifest import StackedRole
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.registry import LAYOUTS
from moeq.model import Checkpoint
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.prove.restore import restore
from moeq.prove.verify import verify

from .fast_path_cases import OnFastPath, Packed, Sizes, fast_paths, on_reference_path, write_checkpoint

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

ROLES: tuple[StackedRole, ...] = ("w13", "w2")

#: Why values may be refused that sizes allow; float16 makes large scales infinite.
_REFUSALS = {"answer.lossy", "usage.scale-range", "usage.scales-not-shared", "source.bad-data"}


@pytest.fixture(autouse=True)
def fast_paths_for_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", 0)


def draw(options: tuple, generator: Generator):  # type: ignore[no-untyped-def,type-arg]
    return options[int(torch.randint(len(options), (), generator=generator))]


class Numbers:
    """Scales of some type, in one of several ranges; now and then one of each tensor is special."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._low, self._high = draw(((-20, 0), (-10, 0), (-8, 4), (-140, 120)), generator)
        self._fine = draw((1, 4, 1 << 20), generator)
        self._special = draw((None, None, None, 0.0, 1e-11, 1e38), generator)
        self._dtype = draw(_FLOATS, generator)

    def draw(self, *shape: int) -> Tensor:
        powers = torch.randint(self._low, self._high, shape, generator=self._generator).float().exp2()
        found = powers * (1 + torch.randint(self._fine, shape, generator=self._generator) / self._fine)
        if draw((True, False, False), self._generator):
            found = found.reshape(-1)[:1].expand(found.numel()).reshape(shape).clone()
        if self._special is not None:
            found.view(-1)[int(torch.randint(found.numel(), (), generator=self._generator))] = self._special
        return found.to(self._dtype)


def _scales(of: str, shape: Callable[[Tensor], tuple[int, ...]], generator: Generator) -> Callable[[dict], None]:
    """Other scales in place of those that the recipe has drawn, all of one type."""

    def edit(tensors: dict[str, Tensor]) -> None:
        numbers = Numbers(generator)
        for name in [name for name in tensors if name.endswith(of)]:
            module = name.removesuffix(of)
            codes = tensors[f"{module}weight"].view(torch.uint8)
            found = numbers.draw(*shape(tensors[name]))
            if of == "weight_scale" and draw((True, False), generator) and "up_proj" in name:
                found = tensors[name.replace("up_proj", "gate_proj")].clone()
            tensors[name] = found
            if draw((True, False), generator):
                codes[torch.rand(codes.shape, generator=generator) < 0.05] = 0x80

    return edit


def _exponents(generator: Generator) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            shape = tensors[name].shape
            tensors[name] = torch.randint(255, shape, generator=generator).byte().view(torch.float8_e8m0fnu)

    return edit


def _nvfp4(generator: Generator) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            octets = torch.randint(draw((16, 64), generator), 0x7F, tensors[name].shape, generator=generator)
            tensors[name] = octets.byte().view(torch.float8_e4m3fn)
        apart = draw((False, False, True), generator)
        for name in [name for name in tensors if name.endswith("weight_scale_2")]:
            tensors[name] = torch.tensor(0.003 if apart and "up_proj" in name else 0.002)

    return edit


_TENSOR = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    }
}  # fmt: skip

#: Recipe, what edits its tensors, what its config says besides.
KINDS = {
    "nvfp4": ("nvfp4", _nvfp4, {}),
    "fp8-block": ("fp8-block", lambda g: _scales("weight_scale_inv", lambda old: tuple(old.shape), g), {}),
    "fp8-block-e8m0": ("fp8-block", _exponents, {"scale_fmt": "ue8m0"}),
    "fp8-channel": ("fp8-channel", lambda g: _scales("weight_scale", lambda old: tuple(old.shape), g), {}),
    "fp8-tensor": ("fp8-channel", lambda g: _scales("weight_scale", lambda old: (1,), g), _TENSOR),
    "mxfp8": ("mxfp8", lambda g: lambda tensors: None, {}),
}
#: Kinds with layouts that round their scales.
_MARLIN = ("marlin-fp8/1", "marlin-fp8-fp16/1")
ROUNDING = {
    "fp8-block": (*_MARLIN, "trtllm-fp8-block/1", "flashinfer-cutlass-fp8-block/1"),
    "fp8-channel": _MARLIN,
    "fp8-tensor": _MARLIN,
}

#: Hidden and intermediate sizes: any, and such as blocks of 128 divide.
_SIZES = ((32, 64, 96, 128, 160, 192, 256, 320, 384, 512), (128, 256, 384, 512))


def packed_or_refused(checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, expert: int) -> Packed | None:
    """What the reference path makes of an expert; None where it refuses its values."""
    try:
        return on_reference_path(checkpoint, plan, role, expert)
    except MoeqError as error:
        if error.code not in _REFUSALS:
            raise
        return None


def check(kind: str, seed: int, folder: Path) -> int:
    """One random checkpoint in every layout that takes its sizes; how many experts the fast path packed."""
    generator = Generator().manual_seed(seed)
    recipe, edit, config = KINDS[kind]
    drawn = draw(_SIZES, generator)
    sizes = Sizes(draw(drawn, generator), draw(drawn, generator), draw((1, 2, 3), generator))
    checkpoint = write_checkpoint(folder, recipe, sizes, edit(generator), **config)
    tp, expert, count = draw((1, 1, 2, 3), generator), draw(tuple(range(sizes.experts)), generator), 0
    for layout in LAYOUTS:
        try:
            plan, on = fast_paths(checkpoint, layout, tp=tp)
        except MoeqError:
            continue  # the layout does not hold it, or it cannot be cut so
        for role in ROLES:
            reference = packed_or_refused(checkpoint, plan, role, expert)
            if role in on:
                packed = OnFastPath(checkpoint, plan, role, expert, on[role]).packed()
                # What refuses values is the reference path, and nothing else may be left to it: it is slow.
                assert packed == reference, (layout, role, sizes, tp)
                count += packed is not None
    return count


def converted(source: Path, out: Path, layout: str, tp: int) -> dict[str, bytes] | str:
    """Files of a conversion that may round; the code of the error where it is refused all the same."""
    deployment = Deployment(gpu=parse_gpu("A100"), tp=tp)
    try:
        convert(source, out, deployment, layout=layout, force_layout=True, allow_lossy=True, workers=1)
    except MoeqError as error:
        return error.code
    return {path.name: path.read_bytes() for path in out.iterdir()}


def rounded_either_way(kind: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """One random checkpoint whose scales may be rounded, converted by both paths; numbers that were rounded."""
    generator = Generator().manual_seed(seed)
    recipe, edit, config = KINDS[kind]
    sizes = Sizes(draw(_SIZES[1], generator), draw(_SIZES[1], generator), draw((1, 2, 3), generator))
    write_checkpoint(folder / "source", recipe, sizes, edit(generator), **config)
    layout, tp = draw(ROUNDING[kind], generator), draw((1, 1, 2, 4), generator)
    ways = []
    for way, least in (("fast", 0), ("reference", 1 << 60)):
        monkeypatch.setattr(words, "COMPILED_FROM", least)
        ways.append(converted(folder / "source", folder / way, layout, tp))
    assert ways[0] == ways[1], (kind, seed, layout, tp)
    if not isinstance(ways[0], dict):
        return 0
    assert verify(folder / "fast", folder / "source", workers=1).ok  # by the reference path
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    restore(folder / "fast", folder / "back", workers=1)
    for path in (folder / "source").iterdir():
        assert (folder / "back" / path.name).read_bytes() == path.read_bytes(), (kind, seed, layout, tp)
    layers: list[dict[str, int]] = json.loads(ways[0]["moeq.json"])["layers"]
    return sum(layer["losses"] for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDING)
def test_rounding_by_either_path(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = [rounded_either_way(kind, seed, tmp_path / str(seed), monkeypatch) for seed in range(8)]
    assert any(rounded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDING)
def test_rounding_by_either_path_at_length(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = [rounded_either_way(kind, seed, tmp_path / str(seed), monkeypatch) for seed in range(100, 140)]
    assert sum(map(bool, rounded)) > 3


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("kind", KINDS)
def test_fast_path_against_reference(kind: str, tmp_path: Path) -> None:
    packed = [check(kind, seed, tmp_path / str(seed)) for seed in range(8)]
    assert sum(packed) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fast_path_against_reference_at_length(kind: str, tmp_path: Path) -> None:
    packed = [check(kind, seed, tmp_path / str(seed)) for seed in range(100, 160)]
    assert sum(packed) > 80
