"""Golden vectors: what the libraries that write each format really put on disk, decoded by our formats.

`tests/data/formats/vectors.json` holds outputs of the named library versions. Every vector is either decoded here or
listed in `NOT_READ` with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schemes.vectors import DTYPES, NOT_READ, VECTORS, Case, build, gptq, i32, u8
from torch import Tensor

from moeq.errors import MoeqError
from moeq.model.tensor_bytes import as_bytes
from moeq.schemes.bits import lane_codes, pack_stream, stream_codes
from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import dequantize
from moeq.schemes.format import Context, Described, Format, PartSig, ReadOnlyFormat
from moeq.schemes.mxfp4 import Mxfp4Blocks
from moeq.schemes.registry import FORMATS, get_format, match_format

CASES = [pytest.param(case, id=label) for name in VECTORS if name not in NOT_READ for label, case in build(name)]


def test_every_vector_is_decoded_or_listed() -> None:
    assert {name for name in VECTORS if not build(name)} <= set(NOT_READ)
    assert len(VECTORS) == 120


def described_as(case: Case) -> tuple[dict[str, PartSig], Described, Format]:
    sigs = {part: PartSig(DTYPES[tensor.dtype], tuple(tensor.shape)) for part, tensor in case.parts.items()}
    if case.format == "deepseek-fp4":  # such scales are read as their bytes
        sigs["scale"] = sigs["scale"]._replace(dtype="F8_E8M0")
    found = match_format(sigs, case.declared)
    assert found is not None
    assert found.id == case.format
    return sigs, found.describe(sigs, Context("module", "gate", case.declared, k_hint=case.k)), found


def decode(case: Case) -> Any:
    _, described, found = described_as(case)
    return found.unpack(case.parts, described.spec, described.scheme)


@pytest.mark.parametrize("case", CASES)
def test_vector(case: Case) -> None:
    matrix = decode(case)
    if case.codes.numel():
        assert torch.equal(matrix.codes, case.codes)
    if case.zeros is not None:
        assert torch.equal(matrix.zeros.to(torch.int64), case.zeros.to(torch.int64))
    if case.values is not None:
        exact = dequantize(matrix)
        rounded = exact.bfloat16().float() if case.computed_in_bf16 else exact
        assert torch.equal(rounded, case.values.float())


def is_rebuilt(case: Case) -> bool:
    """Widths that do not divide 8 are left out: writers fill the last word differently, and those tensors are kept."""
    return get_format(case.format).refusal is None and 8 % (case.declared.bits or 4) == 0


def rebuilt_parts(case: Case) -> dict[str, Tensor | None]:
    """Every stored part, made again from the decoded matrix."""
    sigs, described, stored_as = described_as(case)
    matrix = stored_as.unpack(case.parts, described.spec, described.scheme)
    return {part: stored_as.rebuild(matrix, part, sig, described.scheme) for part, sig in sigs.items()}


@pytest.mark.parametrize("case", [param for param in CASES if is_rebuilt(param.values[0])])
def test_what_real_tools_wrote_is_rebuilt_bit_for_bit(case: Case) -> None:
    for part, found in rebuilt_parts(case).items():
        assert found is not None, f"{case.format} forgets {part}"
        assert found.dtype == case.parts[part].dtype
        assert as_bytes(found) == as_bytes(case.parts[part]), part


def test_every_format_that_is_converted_has_vectors() -> None:
    convertible = {name for name in FORMATS if get_format(name).refusal is None}
    assert convertible <= {param.values[0].format for param in CASES}


@pytest.mark.parametrize("case", CASES)
def test_formats_read_only_the_parts_that_they_declare(case: Case) -> None:
    """Anything else would not be scanned for damage, and would not be there when a checkpoint is decoded."""
    sigs, described, stored_as = described_as(case)
    assert case.parts.keys() <= stored_as.parts.keys()
    asked = Asked(sigs), Asked(case.parts)
    stored_as.describe(asked[0], Context("module", "gate", case.declared, k_hint=case.k))
    stored_as.unpack(asked[1], described.spec, described.scheme)
    for names in asked:
        assert names.names <= stored_as.parts.keys(), f"{case.format}: missing in `parts`"


class Asked(dict[str, Any]):
    """A mapping that remembers which names it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def test_a_format_without_a_way_back_cannot_be_made() -> None:
    class Forgetful(Format):
        matches = out_features = describe = unpack = Mxfp4Blocks.unpack  # type: ignore[assignment]

    with pytest.raises(TypeError, match="repack"):
        Forgetful()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="Silent has to say in `refusal` why it is not converted"):

        class Silent(ReadOnlyFormat):
            pass


def test_act_order_vector_keeps_its_group_index() -> None:
    vector = VECTORS["gptq_w4_g16_desc_act_gidx"]
    [(_, case), _] = build("gptq_w4_g16_desc_act_gidx")
    matrix = decode(case)
    assert matrix.spec.act_order
    assert matrix.group_index.tolist() == vector["g_idx"]


def test_zero_points_that_autogptq_destroyed_are_refused() -> None:
    case = gptq(VECTORS["autogptq_v1_w4_zero_point_zero_hazard"], version="gptq", zeros="qzeros_v1")
    with pytest.raises(MoeqError, match="corrupted by AutoGPTQ"):
        decode(case)


def test_zero_point_of_zero_is_recovered_by_whole_words() -> None:
    vector = VECTORS["gptq_v1_zero_point_zero_three_writers"]
    parts = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": i32([vector["qzeros_v1_gptqmodel"]]),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    case = Case("gptq", parts, Declared("gptq", "gptq", 4, 32, False), torch.zeros(8, 32, dtype=torch.uint8), 32)
    assert decode(case).zeros.flatten().tolist() == vector["decode_word_add"] == vector["zero_points"]


def test_stacked_experts_are_packed_slice_by_slice() -> None:
    vector = VECTORS["ct_pack_w4_3d_experts"]
    codes = torch.tensor(vector["signed_values"]) + 8
    assert torch.equal(stream_codes(i32(vector["packed"]), 4, 16).long(), codes)


def test_e8m0_bytes() -> None:
    from moeq.schemes.dequantize import e8m0_values

    vector = VECTORS["quark_e8m0_scale"]
    assert e8m0_values(u8(vector["stored"])).tolist() == vector["scale"]
    assert e8m0_values(u8([0, 254])).tolist() == [2.0**-127, 2.0**127]
    assert torch.isnan(e8m0_values(u8([255]))).all()


def test_lanes_leave_top_bits_unused() -> None:
    word = torch.tensor([[0b11_111_110_101_100_011_010_001_000_111_000]], dtype=torch.int64).to(torch.int32)
    assert lane_codes(word, 3, 10).tolist() == [[0, 7, 0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("format_id", ["gptq", "awq", "ct-pack", "ct-int8", "ct-mxfp4", "mxfp4"])
def test_the_formats_the_project_exists_for_are_converted(format_id: str) -> None:
    assert get_format(format_id).refusal is None


@pytest.mark.parametrize("zero", range(8))
def test_three_bit_zero_points_wrap_field_by_field(zero: int) -> None:
    """AutoGPTQ and AutoRound store z - 1 in each field of 3 bits, so that a zero point of 0 is stored as 7."""
    n, k = 32, 32
    parts = {
        "qweight": torch.zeros(k * 3 // 32, n, dtype=torch.int32),
        "qzeros": pack_stream(torch.tensor([[(zero - 1) % 8, 3] * (n // 2)], dtype=torch.uint8), 3, n * 3 // 32),
        "scales": torch.ones(1, n, dtype=torch.float16),
    }
    found = get_format("gptq")
    sigs = {
        name: PartSig({torch.int32: "I32", torch.float16: "F16"}[part.dtype], tuple(part.shape))
        for name, part in parts.items()
    }
    declared = Declared("gptq", variant="gptq", bits=3, group_size=-1, symmetric=False)
    described = found.describe(sigs, Context("module", "down", declared))
    zeros = found.unpack(parts, described.spec, described.scheme).zeros
    assert zeros is not None
    assert zeros.flatten().tolist() == [zero, 4] * (n // 2)
