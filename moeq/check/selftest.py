"""Self-test of `run-check`: damage a converted checkpoint in memory in every known way and expect a report of each.

All damages of a format are done at once, each at a site (expert and projection) of its own. Since every site is judged
on its own, one run shows which damages are caught and whether undamaged sites are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeq.check.results import CheckReport, SabotageResult, SelftestReport
from moeq.check.run_check import DTYPES, Opened, check_opened, open_both, prepare_device
from moeq.check.sabotage import SABOTAGES, Sabotage
from moeq.check.sampling import CheckOptions
from moeq.checkpoint.manifest import LayerEntry, Projection, StackedRole
from moeq.checkpoint.source import LocalSource
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.registry import get_layout
from moeq.load.packed_sample import load_packed
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint, written_padding

#: Token counts of the damaged checkpoint's runs, beside the run whose tokens all go to the same experts.
TOKENS = (33,)

_ROLE: dict[Projection, StackedRole] = {"gate": "w13", "up": "w13", "down": "w2"}


class OverlaySource(LocalSource):
    """Local folder that is read with the bytes of `patch` in place of stored ones; the files stay unchanged."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._patches: list[tuple[str, int, bytes]] = []

    def patch(self, tensor: str, row: int, data: bytes) -> None:
        """Make `tensor[row]` read as `data`, which must be all of its bytes. A later patch wins over an earlier one."""
        entry = self.entry(tensor)
        size = (entry.end - entry.start) // entry.shape[0]
        if len(data) != size:
            raise ValueError(f"{tensor}[{row}] is {size} bytes, not {len(data)}")
        self._patches.append((entry.file, entry.start + row * size, bytes(data)))

    def read_into(self, fd: int, view: memoryview, start: int, file: str) -> None:
        super().read_into(fd, view, start, file)
        target = view.cast("B")
        for patched, first, changed in self._patches:
            low, high = max(start, first), min(start + len(target), first + len(changed))
            if patched == file and low < high:
                target[low - start : high - start] = changed[low - first : high - first]


@dataclass(frozen=True)
class Site:
    """Site of one damage: projections of an expert."""

    expert: int
    projections: tuple[Projection, ...]


@dataclass(frozen=True)
class Planted:
    """A damage that was done."""

    name: str  #: name of the kind of damage
    text: str  #: description of what was changed
    sites: tuple[Site, ...]  #: damaged sites


def selftest(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    seed: int = 0,
    device: str = "auto",
) -> SelftestReport:
    """Damage a converted checkpoint in memory, then check it by its digests and, separately, by the kernels.

    Args:
        dst: output of `moeq convert`; read, never written.
        source: the checkpoint that was converted (see `run_check`).

    Raises MoeqError as `run_check`, and `usage.selftest` where the checkpoint has no room for the damages.
    """
    opened = open_both(dst, source)
    entry = next((one for one in opened.manifest.layers if not one.ranks), None)
    if entry is None:
        raise MoeqError("usage.selftest", f"{dst} is written rank by rank", "self-test a conversion for one rank")
    overlay = OverlaySource(Path(dst), str(dst))
    converted = ConvertedCheckpoint(overlay, opened.manifest)
    planted = _plant(converted, overlay, entry, torch.Generator().manual_seed(seed))
    experts = sorted({site.expert for one in planted for site in one.sites} | set(range(min(2, entry.num_experts))))
    damaged = replace(opened, converted=converted)  # its reference reads the files, which stay undamaged
    by_digest = check_opened(damaged, CheckOptions(kernels=False, digest_layers=(entry.layer,)))
    numeric = CheckOptions(
        layers=(entry.layer,), experts=experts, tokens=TOKENS, seed=seed, device=device, digests=False, whole=False
    )
    by_kernel = check_opened(damaged, numeric)
    results = [_outcome(one, by_digest, by_kernel) for one in planted]
    results.append(_swapped_arguments(opened, entry, by_kernel.dtype, device))
    return SelftestReport(
        destination=str(dst),
        scheme=by_kernel.scheme,
        layout=by_kernel.layout,
        device=by_kernel.device,
        layer=entry.layer,
        results=tuple(results),
        false_alarms=tuple(_false_alarms(planted, by_digest, by_kernel)),
    )


def _plant(
    converted: Checkpoint, overlay: OverlaySource, entry: LayerEntry, generator: torch.Generator
) -> list[Planted]:
    """Do every damage that the format can have, as patches of the overlay, and return the damages."""
    layer = entry.layer
    matrices: dict[tuple[StackedRole, int], QuantizedMatrix] = {}
    planted = []
    free = _Sites(entry)
    for sabotage in SABOTAGES:
        site = free.take(sabotage)
        if site is None:
            continue
        role = _ROLE[site.projections[0]]
        before = matrices.get((role, site.expert)) or converted.matrix(layer, site.expert, role)
        found = sabotage.damage(before, _rows(before, site), generator)
        if found is not None:
            matrices[role, site.expert], damage = found
            planted.append(Planted(sabotage.name, damage, (site,)))
    layouts = {role: _layout(converted, entry, role) for role in entry.matrices}
    for (role, expert), matrix in matrices.items():
        _write(overlay, entry, layouts[role], role, expert, matrix)
    pair = free.take_pair(set(matrices))
    if pair is not None:
        role = _ROLE[pair[0].projections[0]]
        # Read both before writing either: the overlay shows a patch at once.
        contents = [converted.matrix(layer, site.expert, role) for site in pair]
        for site, matrix in zip(pair, reversed(contents), strict=True):
            _write(overlay, entry, layouts[role], role, site.expert, matrix)
        text = f"{role} of experts {pair[0].expert} and {pair[1].expert} exchanged"
        planted.append(Planted("swap two experts", text, pair))
    return planted


class _Sites:
    """Free sites, each of which is handed out once: one projection after the other, expert by expert."""

    def __init__(self, entry: LayerEntry) -> None:
        self._specs = {role: matrix.spec for role, matrix in entry.matrices.items()}
        names: tuple[Projection, ...] = ("gate", "up", "down") if self._specs["w13"].gated else ("up", "down")
        self._names = names
        self._free = [(expert, name) for expert in range(entry.num_experts) for name in names]

    def take(self, sabotage: Sabotage) -> Site | None:
        """Reserve the first free site where a damage is possible; return None if there is none."""
        if sabotage.both_halves:
            return self._take_halves(sabotage)
        for expert, name in self._free:
            if sabotage.possible(self._specs[_ROLE[name]]):
                self._free.remove((expert, name))
                return Site(expert, (name,))
        return None

    def _take_halves(self, sabotage: Sabotage) -> Site | None:
        if not sabotage.possible(self._specs["w13"]):
            return None
        for expert in dict.fromkeys(expert for expert, _ in self._free):
            if {(expert, "gate"), (expert, "up")} <= set(self._free):
                self._free = [one for one in self._free if one not in ((expert, "gate"), (expert, "up"))]
                return Site(expert, ("gate", "up"))
        return None

    def take_pair(self, used: set[tuple[StackedRole, int]]) -> tuple[Site, Site] | None:
        """Return two experts whose w2, or else w13, is free and undamaged; None if there are none."""
        for role in ("w2", "w13"):
            names = tuple(name for name in self._names if _ROLE[name] == role)
            experts = sorted({expert for expert, _ in self._free})
            whole = [e for e in experts if all((e, name) in self._free for name in names) and (role, e) not in used]
            if len(whole) >= 2:
                return Site(whole[0], names), Site(whole[-1], names)
        return None


def _rows(matrix: QuantizedMatrix, site: Site) -> slice:
    half = matrix.spec.n // 2
    if matrix.spec.role != "w13" or not matrix.spec.gated:
        return slice(0, matrix.spec.n)
    return slice(0, half) if site.projections[0] == "gate" else slice(half, matrix.spec.n)


def _layout(converted: Checkpoint, entry: LayerEntry, role: StackedRole) -> Layout:
    """Build the layout as the conversion had it: some are calibrated on all experts of a layer."""
    layout = get_layout(entry.layout, allow_lossy=True)
    if layout.calibration_scope is None:
        return layout
    seen = (layout.calibrate(converted.matrix(entry.layer, expert, role)) for expert in range(entry.num_experts))
    return layout.with_calibration(max((one for one in seen if one is not None), default=0.0))


def _write(
    overlay: OverlaySource, entry: LayerEntry, layout: Layout, role: StackedRole, expert: int, matrix: QuantizedMatrix
) -> None:
    """Pack a matrix and make the overlay read it in place of that expert's."""
    for part, tensor in layout.pack(written_padding(layout, entry.matrices).pad(matrix)).items():
        name = entry.matrices[role].tensors[part]
        overlay.patch(name, expert, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _outcome(planted: Planted, by_digest: CheckReport, by_kernel: CheckReport) -> SabotageResult:
    places = {(site.expert, name) for site in planted.sites for name in site.projections}
    digests = [one.text for one in by_digest.digest_mismatches if (one.expert, one.projection) in places]
    found = {(one.expert, result.name): one for result in by_kernel.results for one in result.experts}
    errors = [found[place] for place in sorted(places)]
    worst = max(errors, key=lambda one: one.exceedance)
    return SabotageResult(
        sabotage=planted.name,
        place=", ".join(f"expert {expert} {name}" for expert, name in sorted(places)),
        damage=planted.text,
        digest=digests[0] if len(digests) == len(places) else None,
        numeric=worst.text if all(not one.passed for one in errors) else None,
        exceedance=worst.exceedance,
    )


def _false_alarms(planted: list[Planted], by_digest: CheckReport, by_kernel: CheckReport) -> Iterator[str]:
    """Yield the reports about sites that were not damaged."""
    places = {(site.expert, name) for one in planted for site in one.sites for name in site.projections}
    for mismatch in by_digest.digest_mismatches:
        if (mismatch.expert, mismatch.projection) not in places:
            yield mismatch.text
    for result in by_kernel.results:
        for one in result.failed:
            if (one.expert, result.name) not in places:
                yield f"{result.name} {one.text}"


def _swapped_arguments(opened: Opened, entry: LayerEntry, dtype: str, device: str) -> SabotageResult:
    """Call `fused_moe` with ids and weights, both `[tokens, top_k]`, exchanged, which it has to refuse."""
    from moeq_kernels import KernelArgumentError, fused_moe

    where = prepare_device(device)
    experts = load_packed(opened.converted, entry, (0,), where)[0].experts
    x = torch.zeros(1, entry.matrices["w13"].spec.k, dtype=DTYPES[dtype], device=where)
    ids, weights = torch.zeros(1, 1, dtype=torch.int64, device=where), torch.ones(1, 1, device=where)
    refused = None
    try:
        fused_moe(x, experts, ids, weights)
    except KernelArgumentError as error:
        refused = f"refused: {error.message}"
    damage = "ids passed as weights, and weights as ids"
    return SabotageResult("swap topk arguments", "the call of the kernels", damage, None, refused, data=False)
