"""The table of unit kinds and the classes that execute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.pipeline.pack.copying import Copier
from moeq.pipeline.pack.experts import Packer
from moeq.pipeline.pack.unit_worker import UnitWorker
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import CopyUnit, PackUnit, Unit

_WORKERS: Mapping[type[Unit], type[UnitWorker[Any, Any]]] = {PackUnit: Packer, CopyUnit: Copier}


def worker_of(work: Work, unit: Unit) -> type[UnitWorker[Any, Any]]:
    """Return the class that executes a unit."""
    return {**_WORKERS, **work.workers}[type(unit)]
