"""Compares what is known of names of experts with vLLM's own model classes, built on the meta device.

    python tests/engines/names_beside_classes.py SITE VERSION [ARCHITECTURE ...]

SITE holds the unpacked wheel. In a process of its own: vLLM is imported as on a CPU, whatever is here. Whole layers get
random names: every expert's tensor has to reach its place, or the class stops or leaves one out. Prints a line of JSON
for each class: how many namings it loaded, how many it did not, and those of which something else was known.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from moeq.oracle.engines.vllm.expert_names import EXPERT, SUFFIXES, StoredName, names_of_class
from vllm_tables import names as probe_names
from vllm_tables.model_classes import MODELS

SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"), ("w13", "w2"))
SPELLINGS += (("w1", "v1", "w2"), ("linear", "linear_v", "linear_1"))


def layer(rng: random.Random, own: Any, path: str, leaves: tuple[str, ...]) -> tuple[list[StoredName], Any, int]:
    """A layer's experts under random names: what they are called, and every tensor with its rows numbered."""
    n, k = {"down": own.hidden, "gate_up": 2 * own.inner, "half": own.inner}, {"down": own.inner}
    stacked = rng.random() < 0.5
    order = rng.choice(("halves", "transposed")) if stacked else "halves"
    part = rng.choice(SUFFIXES[:1] + SUFFIXES[2:5] if stacked else ("weight", "qweight", "weight_scale"))
    names, tensors = [], []
    shared = probe_names._NUMBERS.get(part, 1) if stacked else 1
    for leaf in leaves:
        role = "down" if leaf in ("down_proj", "w2", "linear_1") else "gate_up" if len(leaves) == 2 else "half"
        width = k.get(role, own.hidden) // shared
        tensor = torch.arange(n[role], dtype=torch.float32).view(-1, 1).expand(n[role], width)
        tensor = tensor.T if order == "transposed" else tensor
        if stacked:
            names.append(StoredName(f"{path}.{leaf}{part}", order))
            tensors.append((names[-1].path, role, tensor.expand(own.experts, *tensor.shape)))
            continue
        names.append(StoredName(f"{path}.{EXPERT}.{leaf}", order))
        tensors += [(f"{path}.{expert}.{leaf}.{part}", role, tensor) for expert in range(own.experts)]
    return names, tensors, shared


def loaded(own: Any, stack: str, tensors: Any, shared: int) -> bool:
    """Whether every expert's every projection reaches its place, once and with its own rows.

    `shared`: numbers of a row that one stored value stands for.
    """
    places: dict[tuple[int, str], tuple[Any, ...]] = {}
    for name, _, tensor in tensors:
        found = own.load(f"{stack}.{own._layer}.{name}", tensor)
        if found is None or not found[0]:
            return False
        for call in found[0]:
            assert (call.expert, call.shard) not in places
            first, second = (float(call.tensor[row, 0]) for row in (0, 1))
            places[call.expert, call.shard] = (*call.tensor.shape[-2:], first, second)
    half, whole = (own.inner, own.hidden // shared), (own.hidden, own.inner // shared)
    start = own.inner if any(role == "gate_up" for _, role, _ in tensors) else 0
    expected = {"w1": (*half, 0.0, 1.0), "w3": (*half, float(start), start + 1.0), "w2": (*whole, 0.0, 1.0)}
    return places == {(expert, shard): row for expert in range(own.experts) for shard, row in expected.items()}


def compare(version: str, model_type: str, count: int = 60) -> dict[str, Any]:
    """Random namings of a class's layers, beside what is known of it."""
    architecture, more = MODELS[model_type]
    known, rng = names_of_class(version, architecture), random.Random(model_type)
    assert known is not None
    own = probe_names.build(model_type, architecture, more, None)
    stack = next(path for path in probe_names._STACKS if _fits(own, path, known))
    own_paths = dict.fromkeys(path.partition(f".{EXPERT}.")[0] for path in known.modules)
    containers = [*own_paths, *rng.sample(probe_names.CONTAINERS, 2)]
    yes, no, wrong = 0, 0, []
    for _ in range(count):
        names, tensors, shared = layer(rng, own, rng.choice(containers), rng.choice(SPELLINGS))
        does = loaded(own, stack, tensors, shared)
        yes, no = yes + does, no + (not does)
        if does != (known.problem(names) is None):
            wrong.append([name.path for name in names])
    return {"architecture": architecture, "loaded": yes, "refused": no, "wrong": wrong}


def _fits(own: Any, stack: str, known: Any) -> bool:
    """Whether the class knows layers by that path."""
    head = next(iter(known.modules))
    return own.per_expert(stack, head, _role(head)) is not None


def _role(head: str) -> str:
    leaf = head.rpartition(".")[2]
    if leaf in ("gate_up_proj", "w13"):
        return "gate_up"
    return "down" if leaf in ("down_proj", "w2") else "gate" if leaf in ("gate_proj", "w1") else "up"


def main(site: str, version: str, *only: str) -> None:
    """Every class of that version that loads single experts."""
    probe_names.install(site)
    for model_type, (architecture, _) in MODELS.items():
        known = names_of_class(version, architecture)
        if known is None or not known.modules:  # gpt-oss, and Granite's hybrid up to 0.26.0: stacked only
            continue
        if not only or architecture in only:
            print(json.dumps(compare(version, model_type)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
