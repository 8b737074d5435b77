"""The reference's own reading of stored NVFP4, FP8 and MXFP8, code by code against torch's 8-bit types."""

from __future__ import annotations

import pytest
import torch

from moeq.reference.stored_floats import E2M1, E4M3, e8m0, stored_weight


def test_every_code() -> None:
    assert E2M1.values(torch.arange(16)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(E4M3.values(codes), wanted, rtol=0, atol=0, equal_nan=True)
    assert e8m0(codes)[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert e8m0(codes)[255].isnan()


def random_codes(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k)
    return torch.randint(0, 120, (n, k), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("second", ["weight_scale_2", "weight_global_scale"])
def test_nvfp4(second: str) -> None:
    packed = torch.tensor([[0x21, 0x0F] * 4], dtype=torch.uint8)  # 0.5, 1, -6, 0, ...
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    number = torch.tensor(0.25 if second == "weight_scale_2" else 4.0)
    weight = stored_weight({"weight": packed, "weight_scale": scale, second: number})
    assert weight is not None
    assert weight.tolist() == [[0.25, 0.5, -3.0, 0.0] * 4]


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("n", [96, 128, 200])
def test_blocks_end_in_partial_ones(n: int, name: str) -> None:
    codes, scale = random_codes(n, 160), torch.rand(-(-n // 128), 2)
    weight = stored_weight({"weight": codes, name: scale})
    assert weight is not None
    for row, column in ((0, 0), (n - 1, 159), (n - 1, 127), (0, 128)):
        wanted = codes[row, column].double() * scale[row // 128, column // 128].double()
        assert float(weight[row, column]) == float(wanted.float())


@pytest.mark.parametrize("shape", [(), (1,), (64, 1), (64,)])
def test_one_scale_for_a_row_or_for_all(shape: tuple[int, ...]) -> None:
    codes, scale = random_codes(64, 32), torch.rand(shape)
    weight = stored_weight({"weight": codes, "weight_scale": scale})
    assert weight is not None
    torch.testing.assert_close(weight, codes.float() * scale.reshape(-1, 1), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("shape", [(1,), (200, 1), (200, 5)])
def test_scales_of_blocks_have_no_other_shape(shape: tuple[int, ...], name: str) -> None:
    assert stored_weight({"weight": random_codes(200, 160), name: torch.rand(shape)}) is None


@pytest.mark.parametrize("k", [64, 33])
def test_exponents(k: int) -> None:
    codes = random_codes(8, k)
    scale = torch.randint(100, 130, (8, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    weight = stored_weight({"weight": codes, "weight_scale": scale})
    assert weight is not None
    wanted = codes.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)[:, :k]
    assert torch.equal(weight, wanted)


def test_other_formats_are_left_alone() -> None:
    codes = random_codes(8, 64)
    assert stored_weight({"qweight": codes}) is None
    assert stored_weight({"weight": codes}) is None
    assert stored_weight({"weight_scale": torch.rand(8, 1)}) is None
    assert stored_weight({"weight": codes[None], "weight_scale": torch.rand(8, 1)}) is None
    packed, second = torch.zeros(8, 8, dtype=torch.uint8), torch.tensor([0.25, 0.5])
    nvfp4 = {"weight": packed, "weight_scale": codes[:, :1], "weight_scale_2": second[:1]}
    assert stored_weight(nvfp4) is not None
    assert stored_weight(nvfp4 | {"weight_scale": torch.rand(8, 1)}) is None
    assert stored_weight(nvfp4 | {"weight_scale": codes[:, :2]}) is None
    assert stored_weight(nvfp4 | {"weight_scale_2": second}) is None
    assert stored_weight({"weight": codes.to(torch.int8), "weight_scale": torch.rand(8, 1)}) is None
    assert stored_weight({"weight": codes, "weight_scale": torch.rand(8, 5)}) is None
    assert stored_weight({"weight": torch.zeros(8, 8, dtype=torch.uint8), "weight_scale": codes[:, :1]}) is None
