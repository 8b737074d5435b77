"""Options that several commands share, spelled once. Deployment options are the same on every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import completion
from moeq.errors import MoeqError
from moeq.pipeline.plan.options import ConvertOptions

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment

DEPLOY = "Deployment"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Hub revision: branch, tag or commit.")]
SignOption = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY", help="Sign moeq.json with this minisign secret key.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Threads (default: the cores, at most 8).")]
RereadOption = Annotated[
    bool, typer.Option("--reread", help="Read the source's tensors twice and compare: one read trusts this machine.")
]
EventsOption = Annotated[
    Path | None, typer.Option("--events", metavar="FILE", help="Append what happens to FILE, as JSON lines.")
]

HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write a self-contained HTML page.")
]
MaxMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory limit, such as 8GiB or 500MB; fewer workers run if needed (default: 1GiB, not enforced).",
    ),
]
#: The fields of `moeq.pipeline.plan.options.ConvertOptions` as `plan` and `convert` take them.
CONVERT: dict[str, Any] = {
    "layout": Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Layout id, one that a backend reads there (default: the best fit).",
            autocompletion=completion.layouts,
        ),
    ],
    "force_layout": Annotated[
        bool, typer.Option("--force-layout", help="Write the layout even if nothing loads it there.")
    ],
    "regroup": Annotated[
        int | None,
        typer.Option(
            "--regroup", metavar="N", help="Cut groups into groups of N: the same values, more tensor parallelism."
        ),
    ],
    "skip_unfit": Annotated[
        bool, typer.Option("--skip-unfit", help="Copy layers that cannot be converted instead of refusing.")
    ],
    "allow_lossy": Annotated[
        bool, typer.Option("--allow-lossy", help="Allow layouts that change stored numbers; they are counted.")
    ],
    "no_code": Annotated[
        bool,
        typer.Option("--no-code", help="Leave out Python files, pickles and auto_map; restore then lacks the files."),
    ],
}


#: Options of `transcode` by the keywords of `moeq.transcode.survey.TranscodeKeywords`, with their defaults.
TRANSCODE: dict[str, Any] = {
    "regroup": Annotated[
        int | None,
        typer.Option("--regroup", min=1, metavar="N", help="Groups of N integer codes: scales are repeated."),
    ],
    "names": Annotated[
        str,
        typer.Option("--names", help="Names of experts: source, mlp, block-sparse-moe, per-expert or stacked."),
    ],
    "allow_lossy": Annotated[
        bool, typer.Option("--allow-lossy", help="Where values do not fit, write the nearest ones and report them.")
    ],
    "sort_act_order": Annotated[
        bool,
        typer.Option(
            "--sort-act-order",
            help="Sort the columns of down projections by activation order, and the rows of gate and up with them.",
        ),
    ],
    "numa": Annotated[
        int, typer.Option("--numa", min=1, max=8, metavar="N", help="NUMA nodes that kt-amx experts are cut for.")
    ],
}
_TRANSCODE_DEFAULTS = {"regroup": None, "names": "source", "allow_lossy": False, "sort_act_order": False, "numa": 2}


def _option(type_: Any, name: str, help_: str, **more: Any) -> Any:
    return Annotated[type_ | None, typer.Option(name, help=help_, rich_help_panel=DEPLOY, **more)]


_SIZE = {"min": 1}

#: The deployment options, the same on every command that takes a deployment.
DEPLOYMENT: dict[str, Any] = {
    "gpu": _option(
        str,
        "--gpu",
        "H100, a100, sm90, gfx942, cpu, ... (default: the GPU found here; see `moeq gpus`).",
        autocompletion=completion.gpus,
    ),
    "tp": _option(int, "--tp", "Tensor-parallel size (default: 1).", **_SIZE),
    "ep": _option(int, "--ep", "Expert-parallel size (default: 1).", **_SIZE),
    "dp": _option(int, "--dp", "Data-parallel size (default: 1).", **_SIZE),
    "pcp": _option(int, "--pcp", "Prefill-context-parallel size (default: 1).", **_SIZE),
    "dtype": _option(str, "--dtype", "Activation dtype: bf16 or fp16 (default: bf16)."),
    "backend": _option(
        str,
        "--backend",
        "Force a backend; unsupported is an error (default: auto).",
        autocompletion=completion.backends,
    ),
    "engine": _option(
        str,
        "--engine",
        "Whose rules decide: vllm@0.33.0, vllm (the installed one), sglang or moeq.",
        autocompletion=completion.engines,
    ),
    "batched": _option(bool, "--batched/--standard", "Activations as \\[E, max_tokens, K]."),
    "lora": _option(bool, "--lora/--no-lora", "LoRA adapters on the experts."),
    "eplb": _option(bool, "--eplb/--no-eplb", "Expert load balancing."),
    "redundant_experts": _option(int, "--redundant-experts", "Replicas that load balancing adds to a layer.", min=0),
    "all2all": _option(str, "--all2all", "All-to-all kind of the engine."),
    "quantization": _option(str, "--quantization", "Method named to the engine (moe_wna16)."),
    "package": _option(list[str], "--package", "humming=no, aiter=yes ...: what the engine has installed."),
    "env": _option(list[str], "--env", "Environment variable of the engine, as NAME=VALUE."),
    "deploy": _option(Path, "--deploy", "TOML file with these options; the command line wins."),
}
#: The only deployment option that `backends` takes.
EngineOption = DEPLOYMENT["engine"]

_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class GivenDeployment:
    """The deployment options as they were given; None for those that were not."""

    options: Mapping[str, Any]

    def make(self, **other: Any) -> Deployment:
        """Return the deployment that the options and the `--deploy` file describe; `other` replaces options.

        Raises MoeqError as `moeq.deploy.options.make_deployment` does.
        """
        from moeq.deploy.options import make_deployment

        given = {**self.options, **other}
        file = given.pop("deploy")
        given["packages"], given["env"] = _packages(given.pop("package")), _pairs("env", given["env"])
        return make_deployment(given, file)

    @property
    def named(self) -> dict[str, Any]:
        """Options that were given, here or in the `--deploy` file; the command line wins. Raises as `make`."""
        from moeq.deploy.options import read_deploy_file

        file = self.options["deploy"]
        typed = {name: value for name, value in self.options.items() if value is not None and name != "deploy"}
        return {**(read_deploy_file(file) if file else {}), **typed}

    @property
    def empty(self) -> bool:
        """Whether no deployment option was given."""
        return all(value is None for value in self.options.values())


def with_deployment(**other: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the deployment options: it is called with one `given: GivenDeployment` for all of them.

    A command that takes `choices: ConvertOptions` gets the options of `CONVERT` as well.
    """

    table = {**DEPLOYMENT, **other}
    groups = {
        "given": OptionGroup(table, dict.fromkeys(table), GivenDeployment),
        "choices": OptionGroup(CONVERT, asdict(ConvertOptions()), lambda options: ConvertOptions(**options)),
    }
    return lambda command: _grouped(command, groups)


def with_transcode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `TRANSCODE`: it is called with one mapping `choices` for all of them."""
    return _grouped(command, {"choices": OptionGroup(TRANSCODE, _TRANSCODE_DEFAULTS, dict)})


@dataclass(frozen=True)
class OptionGroup:
    """Options that a command takes as one argument."""

    table: Mapping[str, Any]
    defaults: Mapping[str, Any]
    make: Callable[[dict[str, Any]], Any]


def _grouped(command: Callable[..., Any], groups: Mapping[str, OptionGroup]) -> Callable[..., Any]:
    """Return the command with options in place of each argument that has a group's name."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    taken = {name: group for name, group in groups.items() if name in signature.parameters}
    for parameter in signature.parameters.values():
        group = taken.get(parameter.name)
        if group is None:
            parameters.append(parameter)
            continue
        for option, kind in group.table.items():
            default = group.defaults[option]
            parameters.append(parameter.replace(name=option, default=default, annotation=kind))

    def run(**values: Any) -> Any:
        for name, group in taken.items():
            values[name] = group.make({option: values.pop(option) for option in group.table})
        return command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _pairs(name: str, given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    split = [text.partition("=") for text in given]
    if any(not sign for _, sign, _ in split):
        raise MoeqError("usage.deployment", f"--{name} takes NAME=VALUE, not {' '.join(given)}")
    return {key: value for key, _, value in split}


def _packages(given: list[str] | None) -> dict[str, bool] | None:
    pairs = _pairs("package", given)
    if pairs is None:
        return None
    unknown = [value for value in pairs.values() if value.lower() not in _WORDS]
    if unknown:
        raise MoeqError("usage.deployment", f"--package takes NAME=yes or NAME=no, not {unknown[0]}")
    return {key: _WORDS[value.lower()] for key, value in pairs.items()}
