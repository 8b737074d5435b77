"""The fast path: from the stored bytes of one expert's `w13` or `w2` to packed bytes, with a proof.

`read` views stored bytes as matrices, `pack` fills output buffers. `prove` takes output buffers (filled by `pack` or,
better, read back from the file), unpacks them by other loops than `pack` uses, compares them with the source and
computes the digest of the logical values. None of them allocates in proportion to the data, and all release the
interpreter's lock while they work on data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
from blake3 import blake3

from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import StoredName
from moeq.digest import field_header, new_digest
from moeq.layouts.float_bits import e4m3_values
from moeq.layouts.loops import transpose
from moeq.layouts.loops.columns import repeat_columns
from moeq.layouts.loops.compare import all_between
from moeq.matrix import MatrixSpec
from moeq.model.shards import Range
from moeq.pipeline.pack.fast.codecs import Codec, MarlinE5M3
from moeq.pipeline.pack.fast.formats import Fields, StoredProjection
from moeq.pipeline.pack.fast.parts import BLOCK, FastPart, Views, present
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.pipeline.pack.fast.shared import SharedScale, stored_largest

#: The order in which the digest takes the fields.
_FIELDS = ("codes", "scales", "zeros", "global_scale", "bias")

#: Field of the source's scales if rounded ones are written.
_SOURCE = "source scales"

#: Fields that are repeated for smaller groups, and the names under which the source's own values are kept.
_GROUPED = {"scales": "stored scales", "zeros": "stored zeros"}


#: Stored bytes by projection and part: uint8, flat, each the part of one expert.
Inputs = Mapping[tuple[StoredName, str], Array]

#: Packed bytes by part, one mapping per shard: uint8, flat, each one expert's slot.
Outputs = Sequence[Mapping[str, Array]]

#: Projection and its logical digest, in the order of `moeq.matrix.split_projections`.
Digests = tuple[tuple[Projection, str], ...]


class ReadMatrix(Protocol):
    """A stored projection as matrices that are read (`moeq.pipeline.pack.fast.formats`)."""

    @property
    def spec(self) -> MatrixSpec:
        """Sizes and types of the matrix."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Parts that are read."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that `read` needs."""

    def read(self, stored: Mapping[str, Array], scratch: Array) -> Fields | None:
        """Return the matrices, or None if a value needs the reference path."""


class FilledMatrix(ReadMatrix, Protocol):
    """A stored projection as matrices that are read or filled."""

    def blank(self, stored: Mapping[str, Array], scratch: Array) -> Fields:
        """Return the matrices to be filled."""

    def finish(self, stored: Mapping[str, Array], scratch: Array) -> None:
        """Write the parts that `blank` did not give in place."""


M = TypeVar("M", bound=ReadMatrix, covariant=True)


@dataclass(frozen=True)
class ProjectionReader(Generic[M]):
    """Reads one stored projection, and fills it again if its matrix can be filled."""

    name: StoredName  #: the projection, as stored
    stored: M  #: reader of the stored parts
    holds: tuple[tuple[Projection, MatrixSpec], ...]  #: the logical projections that it holds, with their specs
    interleaved: bool  #: whether rows of gate and up are interleaved
    region: Region  #: scratch of this reader

    def read(self, inputs: Inputs, scratch: Array) -> list[Fields] | None:
        """Return the fields of each logical projection."""
        fields = self.stored.read(*self._own(inputs, scratch, self.stored.reads))
        return None if fields is None else self._split(fields)

    def _own(self, inputs: Inputs, scratch: Array, parts: Sequence[str]) -> tuple[Mapping[str, Array], Array]:
        """Return the stored bytes of these parts and this reader's scratch."""
        return {part: inputs[self.name, part] for part in parts}, scratch[self.region.start : self.region.stop]

    def _split(self, fields: Fields) -> list[Fields]:
        if len(self.holds) == 1:
            return [fields]
        half = self.stored.spec.n // 2
        rows = (slice(0, None, 2), slice(1, None, 2)) if self.interleaved else (slice(0, half), slice(half, None))
        return [{name: matrix[cut] for name, matrix in fields.items()} for cut in rows]

    def blank(self: ProjectionReader[FilledMatrix], stored: Inputs, scratch: Array) -> list[Fields]:
        """Return the fields of each logical projection, to be filled; `finish` does the rest."""
        return self._split(self.stored.blank(*self._own(stored, scratch, self.stored.reads)))

    def finish(self: ProjectionReader[FilledMatrix], stored: Inputs, scratch: Array) -> None:
        """Write the stored parts that are not views among the fields of `blank`."""
        self.stored.finish(*self._own(stored, scratch, self.stored.reads))

    def kept(self: ProjectionReader[StoredProjection], inputs: Inputs, scratch: Array) -> tuple[str, ...]:
        """Return the stored parts that cannot be rebuilt from what was read."""
        return self.stored.kept(*self._own(inputs, scratch, self.stored.reads))

    def scales(self: ProjectionReader[StoredProjection], inputs: Inputs, scratch: Array) -> list[Fields] | None:
        """Return the scales of each logical projection; None if one is no finite number."""
        fields = self.stored.scales(*self._own(inputs, scratch, (self.stored.scale_part,)))
        return None if fields is None else self._split(fields)


@dataclass(frozen=True)
class ShardPath:
    """The packed parts of one rank."""

    parts: tuple[FastPart, ...]  #: packed parts; a second part of a field holds what the first cannot: signs of zeros
    features: Range  #: intermediate features of the rank
    holds_all: bool  #: whether the rank holds all of them
    is_first: bool  #: whether the rank is 0, which keeps the bias of w2
    shared: SharedScale | None = None  #: the global scale, if there is one

    @property
    def is_known(self) -> bool:
        """Whether the rank is calibrated, or needs no calibration."""
        return self.shared is None or self.shared.is_known

    def with_calibration(self, largest: float) -> ShardPath:
        """Return this path, calibrated for experts whose largest scale is `largest`."""
        if self.shared is None or self.shared.is_known:
            return self
        shared = self.shared.with_calibration(largest)
        widen = MarlinE5M3(shared.factor)
        parts = tuple(replace(part, widen=widen) if part.field == "scales" else part for part in self.parts)
        return replace(self, parts=parts, shared=shared)

    def exact(self, spec: MatrixSpec, read: Sequence[Fields]) -> bool:
        """Return whether every value that is packed in another form unpacks to what was read."""
        for part in self.parts:
            views = self.views(part.field, spec, read)
            codec = part.widen
            if not part.shares(views):
                return False
            if codec is not None and not all(codec.exact(view) for view in part.sampled(views) if view is not None):
                return False
        return self.shared is None or self.shared.exact(read)

    def views(self, field: str, spec: MatrixSpec, read: Sequence[Fields]) -> Views:
        """Cut the shard's slice out of a field of every projection."""
        return [self._cut(field, spec, fields[field]) for fields in read]

    def _cut(self, field: str, spec: MatrixSpec, matrix: Array) -> Array | None:
        start, stop = self.features.start, self.features.stop
        if self.holds_all:
            return matrix
        if spec.role != "w2":
            return matrix[start:stop]
        if field == "codes":
            per_word = 32 // spec.bits
            return matrix[:, start // per_word : stop // per_word]
        if field == "bias":
            return matrix if self.is_first else None
        if spec.num_groups == 1:
            return matrix
        return matrix[:, start // spec.group_size : -(-stop // spec.group_size)]


@dataclass(frozen=True)
class FastPath:
    """The fast path of one layer's `w13` or `w2`. Immutable; any number of threads may use it.

    All buffers start at multiples of 8 bytes and belong to the caller; none is kept. Only `rebuild` writes to inputs.
    """

    spec: MatrixSpec  #: the logical matrix, in the groups that are written
    readers: tuple[ProjectionReader[StoredProjection], ...]  #: one per stored projection
    shards: tuple[ShardPath, ...]  #: the packed parts of every rank
    #: Least and greatest scale, as an unsigned integer, that the layout holds exactly; None: any.
    scales: tuple[int, int] | None
    elements: Region  #: scratch for the elements of a part
    expected: Region  #: scratch for the expected elements, and for intermediate values
    scratch_bytes: int  #: size of the scratch buffer
    splits: int = 1  #: groups that are written per group of the source
    #: Scratch for repeated scales and zero points, for each logical projection.
    repeated: tuple[tuple[Region, Region], ...] = ()
    may_round: bool = False  #: whether scales may be rounded to what the layout holds

    @cached_property
    def reads(self) -> tuple[tuple[StoredName, str], ...]:
        """Stored projection and part of everything that has to be read."""
        return tuple((reader.name, part) for reader in self.readers for part in reader.stored.reads)

    def read(self, inputs: Inputs, scratch: Array) -> list[Fields] | None:
        """View stored bytes as matrices, which lie in the inputs and in scratch: keep both while they are used.

        Args:
            inputs: stored bytes of everything in `reads`.
            scratch: uint8, `scratch_bytes` or more, with any content; the same for `read`, `pack` and `prove`.

        Returns:
            The fields of every projection: packing loses none of their values, and every source tensor except those
            of `kept` can be rebuilt from them. None if a value needs the reference path.
        """
        if self.calibration_reads:
            raise ValueError("the largest scale of all local experts has to be known first")  # a bug, not input
        read: list[Fields] = []
        for reader in self.readers:
            fields = reader.read(inputs, scratch)
            if fields is None or (self.scales and not all(all_between(one["scales"], *self.scales) for one in fields)):
                return None
            read += fields
        if self.splits > 1:
            read = [self._regrouped(number, fields, scratch) for number, fields in enumerate(read)]
            for grouped in read:
                for field, stored in _GROUPED.items():
                    if field in grouped:
                        repeat_columns(grouped[stored], self.splits, grouped[field])
        if not self._exact(read) and not (self.may_round and self._round(read) and self._exact(read)):
            return None
        return read

    def _exact(self, read: Sequence[Fields]) -> bool:
        return all(shard.exact(self.spec, read) for shard in self.shards)

    def _round(self, read: Sequence[Fields]) -> bool:
        """Replace scales by the nearest that the layout holds. Return False if they cannot be rounded."""
        codec = self._codec
        for fields in read:
            rounded = None if codec is None else codec.rounded(fields["scales"])
            if rounded is None:
                return False
            fields |= {_SOURCE: fields["scales"], "scales": rounded}
        return True

    @property
    def _codec(self) -> Codec | None:
        """Codec of scales: the first rank's; other ranks may have another power of two, which changes no rounding."""
        return next(part.widen for part in self.shards[0].parts if part.field == "scales")

    def losses(self, read: Sequence[Fields]) -> int:
        """Count stored numbers that differ from the source's, over all shards: 0 unless losses are allowed."""
        if _SOURCE not in read[0]:
            return 0
        lost = 0
        for shard in self.shards:
            for fields in zip(*(shard.views(field, self.spec, read) for field in (_SOURCE, "scales")), strict=True):
                before, after = (present(view) for view in fields)
                lost += int((before != after).sum())
        return lost

    def kept(self, inputs: Inputs, scratch: Array) -> list[tuple[StoredName, str]]:
        """Return stored projection and part of what cannot be rebuilt, after `read` with the same arguments."""
        found = [(reader.name, part) for reader in self.readers for part in reader.kept(inputs, scratch)]
        codec = self._codec if self.may_round else None
        if codec is None:
            return found
        for reader in self.readers:
            scales = [fields["scales"] for fields in reader.scales(inputs, scratch) or ()]
            if not all(map(codec.exact, scales)):
                found.append((reader.name, reader.stored.scale_part))
        return found

    @property
    def calibration_reads(self) -> tuple[tuple[StoredName, str], ...]:
        """Projections and parts that `largest` looks at; none if no calibration is needed."""
        if all(shard.is_known for shard in self.shards):
            return ()
        return tuple((reader.name, reader.stored.scale_part) for reader in self.readers)

    def largest(self, inputs: Inputs, scratch: Array) -> list[float] | None:
        """Return the largest scale of one expert, for every shard; None if a scale is no finite number.

        Takes the arguments of `read`, but only what `calibration_reads` names.
        """
        read: list[Fields] = []
        for reader in self.readers:
            fields = reader.scales(inputs, scratch)
            if fields is None:
                return None
            read += fields
        found = []
        for shard in self.shards:
            views = [view for view in shard.views("scales", self.spec, read) if view is not None]
            positive = max(int(np.where(view < 0x80, view, 0).max(initial=0)) for view in views)
            found.append(float(e4m3_values()[positive]))
        return found

    def with_calibration(self, largest: Sequence[float]) -> FastPath:
        """Return this path for experts whose largest scales these are, shard by shard (`Layout.calibrate`)."""
        return replace(
            self, shards=tuple(shard.with_calibration(one) for shard, one in zip(self.shards, largest, strict=True))
        )

    def stored_largest(self, outputs: Outputs) -> tuple[float, ...] | None:
        """Return the largest scale of every shard that packed bytes were calibrated for; None if they fit none."""
        found = [stored_largest(packed) for packed in outputs]
        return None if None in found else tuple(one for one in found if one is not None)

    def _regrouped(self, number: int, fields: Fields, scratch: Array) -> Fields:
        """Add memory for the fields in smaller groups to the stored fields of a projection."""
        found = dict(fields)
        for region, (field, stored) in zip(self.repeated[number], _GROUPED.items(), strict=True):
            if field in fields:
                found[stored] = fields[field]
                shape = len(fields[field]), self.spec.num_groups
                found[field] = region.array(scratch, shape, fields[field].dtype.str)
        return found

    def pack(self, read: Sequence[Fields], outputs: Outputs, scratch: Array) -> None:
        for shard, packed in zip(self.shards, outputs, strict=True):
            for part in shard.parts:
                views = part.sampled(shard.views(_packed(part.field, read), self.spec, read))
                part.pack(views, packed[part.name], self.elements, scratch)
            if shard.shared is not None:
                shard.shared.fill(read, packed)

    def rebuild(self, outputs: Outputs, stored: Inputs, scratch: Array) -> None:
        """Invert `read` and `pack`: fill the stored bytes of everything in `reads` from packed bytes.

        Packed bytes are not trusted: `read` the result and `prove` it against them.
        """
        blank = [fields for reader in self.readers for fields in reader.blank(stored, scratch)]
        if self.splits > 1:
            blank = [self._regrouped(number, fields, scratch) for number, fields in enumerate(blank)]
        for shard, packed in zip(self.shards, outputs, strict=True):
            for part in shard.parts:
                views = shard.views(part.field, self.spec, blank)
                part.fill(packed[part.name], part.sampled(views), self.elements, self.expected, scratch)
                part.spread(views)
            if shard.shared is not None:
                shard.shared.rebuild(packed, blank)
        for fields in blank:
            for field, held in _GROUPED.items():
                if held in fields:
                    np.copyto(fields[held], fields[field][:, :: self.splits])
        for reader in self.readers:
            reader.finish(stored, scratch)

    def prove(self, read: Sequence[Fields], outputs: Outputs, scratch: Array) -> Digests | None:
        """Unpack the outputs and compare them with the matrices. Takes nothing from an earlier `pack` but the outputs.

        Returns:
            The digests; None if the outputs do not hold what the matrices say, bit for bit.
        """
        held = [projection for reader in self.readers for projection in reader.holds]
        digests = [new_digest(spec) for _, spec in held]
        for field in (name for name in _FIELDS if name in read[0]):
            hashed = _GROUPED[field] if self.splits > 1 and field in _GROUPED else field
            for digest, fields in zip(digests, read, strict=True):
                size = fields[hashed].size * (2 if field == "zeros" else fields[hashed].itemsize)
                digest.update(field_header(field, size))
            for projection, rows in self._proven(field, read, outputs, scratch):
                if rows is None:
                    return None
                if hashed == field:
                    self._feed(digests[projection], rows, field, scratch)
            if hashed != field:
                for digest, fields in zip(digests, read, strict=True):
                    self._feed(digest, fields[hashed], field, scratch)
        return tuple((name, digest.hexdigest()) for (name, _), digest in zip(held, digests, strict=True))

    def _proven(
        self, field: str, read: Sequence[Fields], outputs: Outputs, scratch: Array
    ) -> Iterator[tuple[int, Array | None]]:
        """Yield (projection, rows) of a field in order: rows as they were unpacked, or the equal ones of the source.

        Rows are None if a shard does not hold what was read.
        """
        if field == "global_scale":
            shared = [(shard.shared, packed) for shard, packed in zip(self.shards, outputs, strict=True)]
            if not all(one is not None and one.holds(read, packed) for one, packed in shared):
                yield 0, None
            yield from ((projection, fields[field]) for projection, fields in enumerate(read))
            return
        for shard, packed in zip(self.shards, outputs, strict=True):
            lead, *others = (part for part in shard.parts if part.field == field)
            for part in (lead, *others):
                views = part.sampled(shard.views(_packed(field, read), self.spec, read))
                for block in part.blocks:
                    found = part.unpack(packed[part.name], block, self.elements, self.expected, scratch)
                    if not part.holds(found, block, views, self.expected, scratch):
                        yield 0, None
                    elif part is lead and len(self.shards) == part.every == 1:
                        for r in block.rows:
                            own = found[r.elements] if part.is_whole else read[r.projection][field][r.source]
                            yield r.projection, own
        if len(self.shards) > 1 or lead.every > 1:
            yield from ((projection, fields[field]) for projection, fields in enumerate(read))

    def _feed(self, digest: blake3, matrix: Array, field: str, scratch: Array) -> None:
        """Add a matrix to a digest, row by row; zero points are widened to 16 bits."""
        if field != "zeros" and matrix.flags.c_contiguous:
            digest.update(matrix.reshape(-1).view(np.uint8).data)
            return
        dtype = "i2" if field == "zeros" else matrix.dtype.str
        size = max(1, BLOCK // (matrix.shape[1] * np.dtype(dtype).itemsize))
        for row in range(0, len(matrix), size):
            part = matrix[row : row + size]
            rows = self.expected.array(scratch, part.shape, dtype)
            np.copyto(rows, part) if field == "zeros" else transpose.copy(part, rows)
            digest.update(rows.reshape(-1).view(np.uint8).data)


def _packed(field: str, read: Sequence[Fields]) -> str:
    """Return the field that is packed as `field`: the source's scales, so that rounding happens only once."""
    return _SOURCE if field == "scales" and _SOURCE in read[0] else field
