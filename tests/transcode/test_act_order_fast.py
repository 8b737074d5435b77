"""Columns sorted in compiled loops against numpy, and what the proof of it notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline.mixing import content, rewritten

from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import transcode
from moeq.transcode.transcoder import Transcoder

pytest.importorskip("numba")

from moeq.layouts.loops import columns


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_codes_in_another_order(seed: int, bits: int) -> None:
    draw = np.random.default_rng([seed, bits])
    n, k = int(draw.integers(1, 70)), 8 * int(draw.integers(1, 30))
    codes = draw.integers(0, 1 << bits, (k, n), dtype=np.uint32)
    order = draw.permutation(k)

    def packed(codes: np.ndarray) -> np.ndarray:
        fields = codes.reshape(-1, 32 // bits, n)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None]
        return np.bitwise_or.reduce(fields << shifts, axis=1)

    source, wanted = packed(codes), packed(codes[order])
    out = np.full_like(source, 0x5A5A5A5A)
    columns.take_codes(source, order, bits, out)
    assert np.array_equal(out, wanted)
    places = np.argsort(order)
    assert columns.holds_taken_codes(source, places, bits, out)
    for _ in range(20):
        place, bit = draw.integers(out.size), draw.integers(32)
        out.flat[place] ^= np.uint32(1 << bit)
        assert not columns.holds_taken_codes(source, places, bits, out)
        out.flat[place] ^= np.uint32(1 << bit)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_elements_in_another_order(dtype: type) -> None:
    draw = np.random.default_rng(1)
    source = draw.integers(0, 200, (9, 50)).astype(dtype)
    order, out = draw.permutation(50), np.empty_like(source)
    columns.take_elements(source, order, out)
    assert np.array_equal(out, source[:, order])
    assert columns.holds_taken_elements(source, np.argsort(order), out)
    out[3, 7] ^= 1
    assert not columns.holds_taken_elements(source, np.argsort(order), out)


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def ordered(*, seed: int, down: bool = True) -> Change:
    """Gate and up in order; down in a random order of full groups, or of groups that are not full."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if name.endswith("g_idx"):
                index = (torch.arange(len(tensor)) // 32).int()
                if "down_proj" in name and down:
                    index = index[torch.randperm(len(index), generator=generator)]
                elif "down_proj" in name:
                    index[0] = 1
                tensor.copy_(index)
        return tensors

    return change


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", ENGINE_TARGETS)
@pytest.mark.parametrize("name", ["gptq-int4-g32-actorder-qwen3moe", "gptq-int4-g32-qwen3moe"])
def test_both_paths_sort_alike(name, target, seed, checkpoints, tmp_path, monkeypatch) -> None:
    """Also where nothing is in another order, and where the config says that nothing is."""
    source = rewritten(checkpoints / name, tmp_path / "source", ordered(seed=seed))
    on_reference_path, slow = Transcoder._on_reference_path, []

    def noted(self, item):
        slow.append(item)
        return on_reference_path(self, item)

    monkeypatch.setattr(Transcoder, "_on_reference_path", noted)
    found = []
    for path, least in (("reference", 1 << 40), ("fast", 0)):
        monkeypatch.setattr(words, "COMPILED_FROM", least)
        slow.clear()
        try:
            transcode(source, tmp_path / path, target, workers=1, sort_act_order=True, allow_lossy=True)
        except MoeqError as error:
            found.append((error.code, error.message))
        else:
            found.append(content(tmp_path / path))
    assert found[0] == found[1]
    if name == "gptq-int4-g32-actorder-qwen3moe":
        assert not slow


def test_groups_that_are_not_full_are_refused(checkpoints, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    name = "gptq-int4-g32-actorder-qwen3moe"
    source = rewritten(checkpoints / name, tmp_path / "source", ordered(seed=0, down=False))
    with pytest.raises(MoeqError, match=r"g_idx has 31 of 128 columns in group 0; a group has 32") as caught:
        transcode(source, tmp_path / "out", "gptq", sort_act_order=True)
    assert caught.value.code == "source.bad-data"


def test_a_wrong_sort_is_noticed(checkpoints: Path, tmp_path, monkeypatch) -> None:
    """Where the loop that sorts does something else, the reference path writes what is right."""
    source = rewritten(checkpoints / "gptq-int4-g32-actorder-qwen3moe", tmp_path / "source", ordered(seed=1))
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    transcode(source, tmp_path / "right", "gptq", sort_act_order=True)
    take = columns.take_codes

    def wrong(source: np.ndarray, order: np.ndarray, bits: int, out: np.ndarray) -> None:
        take(source, order, bits, out)
        out[-1, -1] ^= 0x10000000

    monkeypatch.setattr(columns, "take_codes", wrong)
    transcode(source, tmp_path / "mended", "gptq", sort_act_order=True)
    assert content(tmp_path / "mended") == content(tmp_path / "right")
