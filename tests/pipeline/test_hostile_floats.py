"""Float checkpoints with numbers that no quantiser should write, from the source to a rank and back.

Scales that are zero, subnormal, infinite, NaN or negative; scales of activations that some experts lack, in shapes of
every tool. A conversion is exact to the bit and loads, or is refused with a reason.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pipeline.test_random_float_formats import KINDS, draw
from torch import Generator, Tensor

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.load.activation_scales import activation_scales
from moeq.load.torch_loader import layer_entry, open_converted
from moeq.pipeline.convert import convert
from moeq.prove.restore import restore
from moeq.prove.verify import verify

from .fast_path_cases import Sizes, write_checkpoint

#: As float32 bits: zeros, the least and the greatest subnormal number, infinities, NaN with two payloads, and others.
_NUMBERS = (0.0, -0.0, 1e-45, 1.1754942e-38, math.inf, -math.inf, math.nan, -1.0, -3e-3, 3.4e38, 65520.0, 1e-8)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
#: Why a conversion may be refused, or a layer not load.
_REASONS = ("usage.", "source.", "answer.")


def _spoil(tensors: dict[str, Tensor], generator: Generator) -> None:
    """Put some such numbers into scales; add scales of activations, and leave some out."""
    scales = [name for name in tensors if ".experts." in name and "scale" in name]
    for name in scales:
        flat = tensors[name].reshape(-1).clone()
        if draw((True, False, False), generator):
            place = int(torch.randint(flat.numel(), (), generator=generator))
            if flat.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8):
                flat.view(torch.uint8)[place] = draw((0, 0x7F, 0x80, 0xFF, 1, 0x88), generator)
            else:
                flat[place] = draw(_NUMBERS, generator)
        tensors[name] = flat.reshape(tensors[name].shape)
    shape, how = draw(_SHAPES, generator), draw(("none", "all", "some"), generator)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight") and how != "none"]:
        if how == "all" or draw((True, True, True, False), generator):
            number = draw((0.01, 0.01, 0.02, *_NUMBERS), generator)
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.full(shape, number)


def there_and_back(kind: str, seed: int, folder: Path) -> str:
    """What became of one checkpoint: `loaded`, or the code of the reason why not."""
    generator = Generator().manual_seed(seed)
    recipe, edit, config = KINDS[kind]
    sizes = Sizes(draw((128, 256), generator), draw((64, 128, 256), generator), draw((2, 4), generator))
    inner = edit(generator)

    def spoiled(tensors: dict[str, Tensor]) -> None:
        inner(tensors)
        _spoil(tensors, generator)

    checkpoint = write_checkpoint(folder / "source", recipe, sizes, spoiled, **config)
    tp, ep = draw(((1, 1), (1, 1), (2, 1), (1, 2)), generator)
    w2 = checkpoint.experts(0).kinds()[0].kind.spec("w2")
    layouts = tuple(name for name in LAYOUTS if not get_layout(name).problems(w2))
    layout, lossy = draw(layouts, generator), draw((True, False), generator)
    where = Deployment(gpu=parse_gpu("A100"), tp=tp, ep=ep)
    options = {"layout": layout, "force_layout": True, "allow_lossy": lossy, "workers": 1}
    try:
        convert(folder / "source", folder / "out", where, **options)  # type: ignore[arg-type]
    except MoeqError as error:
        if not error.code.startswith(_REASONS):
            raise
        return error.code
    assert verify(folder / "out", folder / "source", workers=1).ok, (kind, seed, layout)
    restore(folder / "out", folder / "back", workers=1)
    for path in (folder / "source").iterdir():
        assert (folder / "back" / path.name).read_bytes() == path.read_bytes(), (kind, seed, layout)
    opened = open_converted(folder / "out")
    entry = layer_entry(opened, opened.manifest.layers[0].layer)
    try:
        for rank in range(tp * ep):
            ranks = {"tp_rank": rank % tp, "tp_size": tp, "ep_rank": rank // tp, "ep_size": ep}
            moeq.load_tensors(folder / "out", entry.layer, verify=True, check_gpu=False, **ranks)
        activation_scales(opened, entry)
    except MoeqError as error:
        if error.code != "source.missing-part":
            raise
        return error.code
    return "loaded"


@pytest.fixture(autouse=True)
def fast_paths_for_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", 0)


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("kind", KINDS)
def test_from_the_source_to_a_rank_and_back(kind: str, tmp_path: Path) -> None:
    found = [there_and_back(kind, seed, tmp_path / str(seed)) for seed in range(6)]
    assert len(found) == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_the_source_to_a_rank_and_back_at_length(kind: str, tmp_path: Path) -> None:
    found = [there_and_back(kind, seed, tmp_path / str(seed)) for seed in range(100, 160)]
    assert "loaded" in found
    assert len(set(found)) > 2
