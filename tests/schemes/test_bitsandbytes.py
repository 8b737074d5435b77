"""bitsandbytes: vectors that the library wrote on a CPU, decoded to its own numbers; whole checkpoints; damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from orphan_files import stored, vectors, write_bitsandbytes
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.model.missing_sizes import MAX_STATE_BYTES
from moeq.schemes.bitsandbytes import read_state
from moeq.transcode.transcode import check, transcode

VECTORS = vectors("bitsandbytes")


@pytest.mark.parametrize("name", VECTORS)
def test_the_numbers_of_the_library(name: str, tmp_path: Path) -> None:
    vector = VECTORS[name]
    found = open_checkpoint(write_bitsandbytes(tmp_path / "model", vector)).dequantize(0, 1, "gate")
    expected = stored(vector["values"]).float()
    if name == "int8":  # the library multiplies twice, by the magnitude and by 1 / 127
        assert torch.allclose(found, expected, rtol=2.0**-22, atol=0)
    else:
        assert torch.equal(found, expected)
    assert bool(found.any())


def test_the_whole_checkpoint_in_its_own_dtype(tmp_path: Path) -> None:
    """NF4 of a bfloat16 model is exact in bfloat16, attention included."""
    vector = VECTORS["nf4-nested-bfloat16"]
    found = transcode(write_bitsandbytes(tmp_path / "model", vector), tmp_path / "out", "bf16")
    assert found.exact
    written = load_file(next((tmp_path / "out").glob("*00001-of*.safetensors")))
    written |= {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    expected = stored(vector["values"])
    assert torch.equal(written["model.layers.0.mlp.experts.0.up_proj.weight"], expected)
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight"], expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_codebooks_are_no_integers(tmp_path: Path) -> None:
    source = write_bitsandbytes(tmp_path / "model", VECTORS["nf4-bfloat16"])
    with pytest.raises(MoeqError, match="but not floats"):
        check(source, "compressed-tensors")


SIZES = {"shape": [1, 2], "blocksize": 64, "dtype": "float16"}


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"{}", b"[" * 3000, b"\xff\x00", json.dumps(SIZES | {"nested_offset": float("nan")}).encode()),
        *(
            json.dumps(SIZES | change).encode()
            for change in (
                {"shape": [-1, 2]},
                {"shape": [1, 3]},
                {"shape": [1]},
                {"shape": [1, 1 << 40]},
                {"blocksize": 0},
                {"blocksize": True},
                {"dtype": "Tensor"},
                {"nested_blocksize": -1},
            )
        ),
    ],
)
def test_hostile_texts_of_sizes(raw: bytes) -> None:
    with pytest.raises(MoeqError, match="are no sizes"):
        read_state(raw, "m")


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("weight.absmax", torch.ones(3), "scales of blocks of 64"),
        ("weight.quant_map", torch.ones(15), "quant_map"),
        ("weight", torch.zeros(7, 1, dtype=torch.uint8), "7 bytes for 32 x 32 codes"),
        ("weight.absmax", torch.full((16,), float("inf")), "not finite"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, part: str, tensor: torch.Tensor, words: str) -> None:
    source = write_bitsandbytes(tmp_path / "model", VECTORS["nf4-bfloat16"], **{part: tensor})
    with pytest.raises(MoeqError, match=words):
        open_checkpoint(source).dequantize(0, 0, "gate")


def test_nested_scales_of_another_number(tmp_path: Path) -> None:
    vector = VECTORS["nf4-nested-bfloat16"]
    source = write_bitsandbytes(tmp_path / "model", vector, **{"weight.nested_absmax": torch.ones(7)})
    with pytest.raises(MoeqError, match="7 nested scales for 16 scales") as caught:
        open_checkpoint(source).dequantize(0, 0, "gate")
    assert caught.value.code == "source.bad-data"


def test_sizes_of_no_matrix(tmp_path: Path) -> None:
    """Texts that describe sizes stand beside a matrix of bytes, and are small."""
    vector = VECTORS["nf4-bfloat16"]
    state = next(part for part in vector["parts"] if "quant_state" in part)
    for number, changes in enumerate((
        {"weight": torch.zeros(512, 1, dtype=torch.int8)}, {"weight": None},
        {state: torch.zeros(MAX_STATE_BYTES + 1, dtype=torch.uint8)},
    )):  # fmt: skip
        source = write_bitsandbytes(tmp_path / str(number), vector, **changes)
        with pytest.raises(MoeqError, match=f"{state} describes no matrix of bytes called model.layers") as caught:
            open_checkpoint(source)
        assert caught.value.code == "source.inconsistent"
