"""Name the experts that an update had written when an error ended it."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from moeq.errors import MoeqError


class Progress:
    """Experts that an update has written so far. As a context, it names them in an error that ends the update."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._layer: int | None = None
        self._experts: list[int] = []

    def wrote(self, layer: int, experts: Iterable[int]) -> None:
        """Note experts of a layer as written. Experts of another layer mean that the layer before is finished."""
        if self._layer not in (layer, None):
            self.finished()
        self._layer = layer
        self._experts += experts

    def finished(self) -> None:
        """Note that the layer has all of its new experts."""
        if self._layer is not None:
            self._layers.append(self._layer)
        self._layer, self._experts = None, []

    def __str__(self) -> str:
        """Return what was written; empty if nothing was."""
        written = []
        if self._layers:
            written.append(f"{'layers' if len(self._layers) > 1 else 'layer'} {_runs(self._layers)}")
        if self._experts:
            noun = "experts" if len(self._experts) > 1 else "expert"
            written.append(f"{noun} {_runs(self._experts)} of layer {self._layer}")
        return " and ".join(written)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        told = str(self)
        if error is None or not told:
            return
        told = f"new weights are in {told}, old ones in all other experts; the same update again completes it"
        if isinstance(error, MoeqError):
            raise MoeqError(error.code, f"{error.message}; {told}", error.hint) from error
        error.add_note(f"moeq: {told}")


def _runs(numbers: Iterable[int]) -> str:
    """Return numbers as `0 to 5, 7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)
