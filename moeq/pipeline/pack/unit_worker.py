"""The protocol of a unit of work: items are read, packed and proven, and written; then the unit is recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from moeq.checkpoint.writer import Sink
from moeq.pipeline.pack.buffers import Buffers, Writes
from moeq.pipeline.pack.inputs import InputFile
from moeq.pipeline.pack.memory import Need, SpareMemory, Way
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.state.records import UnitRecord, tensor_digests

U = TypeVar("U", bound=Unit)
Item = TypeVar("Item")


class ItemResult(Protocol):
    """The result of one item, as far as every kind of unit has it."""

    @property
    def written(self) -> int:
        """Bytes written."""

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """BLAKE3 of every piece, in order (`Plan.pieces`)."""


class UnitWorker(ABC, Generic[U, Item]):
    """Executes one open unit, item by item. Any thread may execute any item.

    Args:
        work: plan and source.
        unit: the unit.
        inputs: open source files by name.
        output: the output file.
        spare: memory for items that turn out to need the reference path.
    """

    def __init__(self, work: Work, unit: U, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory) -> None:
        self._plan = work.plan
        self._checkpoint = work.checkpoint
        self._unit = unit
        self._inputs = inputs
        self._output = output
        self._spare = spare

    @classmethod
    @abstractmethod
    def way(cls, work: Work, unit: U) -> Way:
        """Return how units like this one are executed, as far as headers tell."""

    @classmethod
    @abstractmethod
    def need(cls, work: Work, unit: U) -> Need:
        """Return the memory that one thread needs for a unit."""

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Items of the unit, in order."""

    @abstractmethod
    def label(self, item: Item) -> str:
        """Describe what is being done, for progress."""

    @abstractmethod
    def read(self, item: Item, buffers: Buffers, slot: int) -> Any:
        """Read the stored bytes of one item; return None if `pack` will read them itself.

        Args:
            item: the item.
            buffers: memory of this worker.
            slot: number of the free input buffer.

        Raises:
            MoeqError: `source.truncated`, `source.unreadable`.
        """

    @abstractmethod
    def pack(self, item: Item, data: Any, buffers: Buffers, slot: int) -> tuple[Any, Writes]:
        """Pack and prove one item.

        Args:
            item: the item.
            data: what `read` returned.
            buffers: memory of this worker.
            slot: number of the free output buffer.

        Returns:
            The result, and what is left to write; nothing if the reference path packed it, which writes by itself.

        Raises:
            MoeqError: the item cannot be packed, or the packed bytes do not mean what the source means.
            OSError: the disk refuses.
        """

    def record(self, results: Sequence[Any]) -> UnitRecord:
        """Make the unit's record from the results of all its items, in order."""
        hashes = (value for result in results for value in result.hashes)
        return UnitRecord(
            unit=self._unit.id,
            bytes=sum(result.written for result in results),
            tensors=tensor_digests(zip(self._plan.pieces(self._unit), hashes, strict=True)),
            **self._findings(results),
        )

    def _findings(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of the record that only this kind of unit has."""
        return {}
