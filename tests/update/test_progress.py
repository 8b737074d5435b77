"""What an update that ends early says of the experts before it."""

from __future__ import annotations

import pytest

from moeq.errors import MoeqError
from moeq.update.progress import Progress

Wrote = list[tuple[int, list[int]] | None]  #: layers with their experts; None: the layer has all


@pytest.mark.parametrize(
    ("wrote", "told"),
    [
        ([], ""),
        ([(3, [])], ""),
        ([(3, [5])], "expert 5 of layer 3"),
        ([(3, [2]), (3, [0, 1, 7])], "experts 0 to 2, 7 of layer 3"),
        ([(3, [2]), None], "layer 3"),
        ([(3, [2]), None, None, (4, [1])], "layer 3 and expert 1 of layer 4"),
        ([(0, [2]), (1, [0]), (2, [0]), (5, [4, 3])], "layers 0 to 2 and experts 3 to 4 of layer 5"),
        ([(0, [0]), None, (2, [0]), None], "layers 0, 2"),
    ],
)
def test_what_was_written(wrote: Wrote, told: str) -> None:
    def made() -> Progress:
        progress = Progress()
        for one in wrote:
            if one is None:
                progress.finished()
            else:
                progress.wrote(*one)
        return progress

    assert str(made()) == told
    whole = f"new weights are in {told}, old ones in all other experts; the same update again completes it"
    with pytest.raises(MoeqError) as caught, made():
        raise MoeqError("source.bad-data", "why", "hint")
    assert (caught.value.code, caught.value.hint) == ("source.bad-data", "hint")
    assert caught.value.message == (f"why; {whole}" if told else "why")
    error = ValueError("why")
    with pytest.raises(ValueError, match=r"^why"), made():
        raise error
    assert getattr(error, "__notes__", []) == ([f"moeq: {whole}"] if told else [])
    with made():
        pass
