"""The interface of a fast path. Importing this loads no compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import StoredName

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: Stored bytes by projection and part: uint8, flat, each the part of one expert.
Inputs = Mapping[tuple[StoredName, str], "Array"]

#: Matrices of every projection by logical field (`moeq.pipeline.pack.fast.formats`).
Matrices = Sequence[dict[str, "Array"]]

#: Packed bytes by part, one mapping per shard: uint8, flat, each one expert's slot.
Outputs = Sequence[Mapping[str, "Array"]]


@dataclass(frozen=True)
class Proof:
    """What a proven matrix holds.

    Attributes:
        digests: projection and its logical digest, in the order of `moeq.matrix.split_projections`.
    """

    digests: tuple[tuple[Projection, str], ...]


class FastPath(Protocol):
    """The fast path of one layer's `w13` or `w2`. Immutable; any number of threads may use it.

    All buffers start at multiples of 8 bytes and belong to the caller; none is kept. Only `rebuild` writes to inputs.
    """

    @property
    def reads(self) -> tuple[tuple[StoredName, str], ...]:
        """Stored projection and part of everything that has to be read."""

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch buffer."""

    @property
    def calibrates(self) -> tuple[tuple[StoredName, str], ...]:
        """Projections and parts that `largest` looks at; none where no calibration is needed."""

    def largest(self, inputs: Inputs, scratch: Array) -> Sequence[float] | None:
        """The largest scale of one expert, for every shard. Arguments as for `read`, but only what `calibrates` names.

        Returns:
            None where a scale is no finite number.
        """

    def with_calibration(self, largest: Sequence[float]) -> FastPath:
        """This path for experts whose largest scales these are, shard by shard (`Layout.calibrate`)."""

    def stored_largest(self, outputs: Outputs) -> tuple[float, ...] | None:
        """The calibration that packed bytes were made with; None where they fit none."""

    def kept(self, inputs: Inputs, scratch: Array) -> Sequence[tuple[StoredName, str]]:
        """Stored projection and part of what cannot be rebuilt, after `read` with the same arguments."""

    def read(self, inputs: Inputs, scratch: Array) -> Matrices | None:
        """What is stored, as matrices. They lie in the inputs and in scratch, both of which have to stay for them.

        Args:
            inputs: the stored bytes of everything in `reads`.
            scratch: uint8, `scratch_bytes` or more; what it holds does not matter. The same for all three steps.

        Returns:
            None where a value needs the reference path, which handles it or says what is wrong. Otherwise packing
            loses nothing of them, and every source tensor but those of `kept` can be rebuilt from the matrices.
        """

    def losses(self, read: Matrices) -> int:
        """Stored numbers that differ from the source's, for all shards: 0 unless losses are allowed."""

    def pack(self, read: Matrices, outputs: Outputs, scratch: Array) -> None:
        """Fill the outputs."""

    def rebuild(self, outputs: Outputs, stored: Inputs, scratch: Array) -> None:
        """The inverse of `read` and `pack`: fill the stored bytes of everything in `reads` from packed bytes.

        Nothing here is trusted: `read` what was written and `prove` it against the packed bytes.
        """

    def prove(self, read: Matrices, outputs: Outputs, scratch: Array) -> Proof | None:
        """Unpack the outputs and compare them with the matrices. Takes nothing from an earlier `pack` but the outputs.

        Returns:
            The digests; None where the outputs do not hold what the matrices say, bit for bit.
        """
