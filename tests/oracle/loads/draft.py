"""A checkpoint while it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from oracle.loads.formats import Encoding, Part, Row
from oracle.loads.models import DENSE, DENSE_INTER, EXPERTS, LAYERS, Model

#: A tensor's place: layer, expert, projection (`gate`, `up`, `down`), part.
Place = tuple[int, int, str, str]


@dataclass
class Draft:
    """A checkpoint while it is made: twists change it.

    Attributes:
        rng: what decides.
        model: its class.
        encoding: how the config says that experts are encoded.
        config: quantisation config, or None.
        hidden: hidden size.
        inter: intermediate size.
        inter_of_second_set: intermediate size of the second set, which has as many experts; None with one set.
        experts: parts of single experts.
        stacked: parts of all experts, of gpt-oss: layer, leaf and part.
        form: how names of experts are spelled: `single`, `listed`, `stacked`, or `path|gate,up,down` of another family.
        stem: what stands above `layers`.
        total: experts of a layer.
        count: experts that config.json names.
        declared: sizes in config.json that are not those of the tensors.
        router: whether routers are encoded as experts are.
        linears: encodings of the other linear modules, by layer and path; None stands for plain numbers, and layer -1
            for the output head.
        dense: layers in front that have no experts.
        shared: intermediate size of shared experts.
        stale: tensors of a second listed file, whose index names the first file's, and whether the index names them.
        side: files beside config.json.
    """

    rng: Random
    model: Model
    encoding: Encoding
    config: Row | None
    hidden: int
    inter: int
    inter_of_second_set: int | None = None
    experts: dict[Place, Part] = field(default_factory=dict)
    stacked: dict[tuple[int, str, str], Part] = field(default_factory=dict)
    form: str = "single"
    stem: str = ""
    total: int = EXPERTS
    count: int = EXPERTS
    declared: Row = field(default_factory=dict)
    router: bool = False
    linears: dict[tuple[int, str], Encoding | None] = field(default_factory=dict)
    dense: int = 0
    shared: int = 0
    stale: dict[Place, Part] = field(default_factory=dict)
    side: dict[str, Row] = field(default_factory=dict)

    def sizes(self, projection: str, expert: int = 0) -> tuple[int, int]:
        """N and K of an expert's projection."""
        second = self.inter_of_second_set if expert >= self.total // self.model.sets else None
        inter = second or self.inter
        return (self.hidden, inter) if projection == "down" else (inter, self.hidden)

    def encode(self, encoding: Encoding, layer: int, expert: int, projection: str) -> None:
        """Store a matrix in that encoding, in place of what is there."""
        for place in [place for place in self.experts if place[:3] == (layer, expert, projection)]:
            del self.experts[place]
        for part, row in encoding.parts(*self.sizes(projection, expert)).items():
            self.experts[layer, expert, projection, part] = row

    def every(self) -> list[tuple[int, int, str]]:
        """Every matrix there is."""
        return list(dict.fromkeys(place[:3] for place in self.experts))

    def scope(self) -> Callable[[tuple[int, int, str]], bool]:
        """A random part of all matrices."""
        layer, expert = self.rng.randrange(LAYERS), self.rng.randrange(self.total)
        projection = self.rng.choice(("gate", "up", "down"))
        tests: tuple[Callable[[tuple[int, int, str]], bool], ...] = (
            lambda at: True,
            lambda at: at[0] == layer,
            lambda at: at[1] == expert,
            lambda at: at[:2] == (layer, expert),
            lambda at: at[2] == projection,
            lambda at: at == (layer, expert, projection),
        )
        return self.rng.choice(tests)

    def routers(self) -> list[str]:
        """Module names of the routers, which no exporter quantises."""
        return [f"{self.model.above}layers.{layer}.{self.model.router}" for layer in range(self.dense, LAYERS)]

    def linear(self, layer: int, path: str) -> str:
        """Module name of a linear module that is no expert's."""
        return path if layer < 0 else f"{self.model.above}layers.{layer}.{path}"

    def linear_name(self, layer: int, path: str) -> str:
        """Name of such a module in the file, whose wrapper may be another than the config's."""
        return path if layer < 0 else f"{self.stem}.layers.{layer}.{path}".removeprefix(".")

    def linear_size(self, layer: int, path: str) -> tuple[int, int]:
        """N and K of a linear module that is no expert's."""
        sizes = {"hidden": self.hidden, "inter": self.inter, "shared": self.shared, "dense": DENSE_INTER}
        n, k = (64, "hidden") if layer < 0 else {**self.model.linears, **DENSE}[path]
        return (sizes.get(n, n), sizes.get(k, k))  # type: ignore[arg-type, return-value]

    def plain_modules(self) -> list[str]:
        """Module names that hold plain numbers, as an exporter lists them."""
        plain = [self.linear(*at) for at, encoding in self.linears.items() if encoding is None and at[0] >= 0]
        return [*self.routers(), *plain]

    def module(self, layer: int, expert: int | str, projection: str) -> str:
        """Module name of a matrix, as config entries spell it."""
        leaf = self.model.leaves[("gate", "up", "down").index(projection)]
        return f"{self.model.above}layers.{layer}.{self.model.experts}.{expert}.{leaf}"


def add_exclusions(config: Row, encoding: Encoding, entries: list[str], rng: Random) -> None:
    """Write module names into a config's list of exclusions."""
    assert encoding.skip is not None
    key, spelling = encoding.skip
    if key == "dynamic":  # the engine sees which modules are quantised, and here there are none but experts
        patterns = [*map(as_regex, entries), r".*\.gate$"]
        config[key] = {**config.get(key, {}), **{spelling.format(pattern): {} for pattern in patterns}}
    elif key == "extra_config":
        config[key] = {**config.get(key, {}), **{entry: {"bits": 16, "data_type": "float"} for entry in entries}}
    else:
        where = config.get("quantization", config)
        regex = key == "ignore" and rng.random() < 0.5
        where[key] = [*where.get(key, ()), *(f"re:{as_regex(entry)}" if regex else entry for entry in entries)]


def drop_exclusions(config: Row, encoding: Encoding, entries: list[str]) -> None:
    """Take module names out of a config's list of exclusions."""
    assert encoding.skip is not None
    key = encoding.skip[0]
    where = config.get("quantization", config)
    if isinstance(where.get(key), list):
        where[key] = [entry for entry in where[key] if entry not in {*entries, *(f"re:{as_regex(e)}" for e in entries)}]
    elif key == "extra_config":
        where[key] = {entry: rule for entry, rule in where.get(key, {}).items() if entry not in entries}


def as_regex(entry: str) -> str:
    return entry.replace(".", r"\.").replace("*", ".*")
