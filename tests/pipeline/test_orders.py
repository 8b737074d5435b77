"""Orders of elements that the fast path writes without tables, by the arrangement of a part."""

from __future__ import annotations

import pytest

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.parts import Part
from moeq.pipeline.pack.fast.orders import OwnOrder, ScatterOrder, TransposedOrder, order_of


@pytest.mark.parametrize(
    ("pattern", "bits", "expected"),
    [
        ("r, c -> r c", 8, OwnOrder()),
        ("r c4, g -> r c g", 16, OwnOrder()),
        ("h2 r, c -> ~h r c", 8, OwnOrder(halves_swapped=True)),
        ("h2 r, c -> r h c", 8, OwnOrder(interleaved=True)),
        ("r, c -> c r", 8, TransposedOrder("u1")),
        ("r, c -> c r", 16, TransposedOrder("u2")),
        ("r, c -> c r", 32, TransposedOrder("u4")),
    ],
)
def test_orders_of_scales(pattern: str, bits: int, expected: object) -> None:
    assert order_of(Part("scales", Arrangement(pattern), (8, 8), "U8", bits)) == expected


@pytest.mark.parametrize(("field", "bits", "element"), [("scales", 8, "u1"), ("scales", 16, "u2"), ("zeros", 4, "u1")])
def test_other_orders_go_by_tables(field: str, bits: int, element: str) -> None:
    arrangement = Arrangement("r2 s, c -> s r c")
    assert order_of(Part(field, arrangement, (8, 8), "U8", bits)) == ScatterOrder(arrangement, bits, element, None)


def test_codes_of_four_bits_keep_their_bytes_or_have_no_order() -> None:
    by_bytes = order_of(Part("codes", Arrangement("r, c k2 -> c r | k"), (8, 4), "U8", 4))
    assert by_bytes == ScatterOrder(Arrangement("r, c -> c r"), 8, "u1", None)
    assert order_of(Part("codes", Arrangement("r2 s, c -> c s | r"), (8, 4), "U8", 4)) is None
