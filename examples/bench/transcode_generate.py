"""Compare what source and transcoded checkpoint generate in vLLM, without any plug-in.

    python examples/bench/transcode_generate.py --out results.json [--source NAME ...]

For every source (the checkpoints of the tests, and random models of several families in sizes that kernels take) and
every target that `moeq transcode` can write: transcode, start the engine on both, each in a process of its own, and
compare greedy tokens and the log-probabilities of all tokens of the vocabulary at every place, for prompts of several
lengths. On a GPU or a CPU; what lossy means is that `moeq transcode` wanted `--allow-lossy`.

| answer | |
| --- | --- |
| `bits` | equal tokens, and every log-probability equal to the bit |
| `tokens` | equal tokens; log-probabilities no further apart than rounding explains |
| `near tie` | as `tokens`, but of two tokens that are all but equally likely to the source, it chose the other |
| `as float32` | the engine takes the result only, or the source's router was at a tie; the result is near float32 |
| `defect` | none of these, and `moeq oracle` names the engine's defect beforehand |
| `activations` | none of these; kernels quantise activations, otherwise than the source's: figures only |
| `DIFFERENT` | none of these |
| `refused` | the engine does not take the result, or neither; the reasons are in the results |

Rounding explains three times the error of the same model in bf16 in transformers, measured from float32 with the
source's dequantised numbers. A pair says nothing (`blind`) where experts do not matter: with all of them at zero,
log-probabilities have to move ten times as far as they are apart.

Every answer of the engine is compared with what `moeq oracle` says beforehand; the script exits with 1 where they
disagree, or where a pair is DIFFERENT. Engines start from a process that has imported vLLM once. On a CPU,
`VLLM_CPU_OMP_THREADS_BIND=nobind` is what TP 2 needs on one NUMA node.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from generating import Answer, Engines, reason
from judging import Reference, compare
from make_family import write_family

import moeq
from moeq.deploy.detect import detect_cpu, detect_gpu
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import transcode

CHECKPOINTS = Path(__file__).parents[2] / "tests" / "data" / "checkpoints"
NEW = 8
LENGTHS = (1, 5, 14, 40)
_DROP_COMPILER = {"TORCH_COMPILE_DISABLE": "1", "VLLM_PLUGINS": "", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Pair:
    """A transcoding to compare with its source.

    Attributes:
        to: the target.
        options: further arguments of `transcode`.
        tp: tensor parallelism of both engines.
        source_tp: tensor parallelism of the source's engine, where it differs.
    """

    to: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    source_tp: int | None = None

    @property
    def text(self) -> str:
        """As on a command line."""
        words = [f"--to {self.to}"]
        words += [
            f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}") for key, value in self.options.items()
        ]
        return " ".join([*words, *([f"(TP {self.tp})"] if self.tp > 1 else [])])


@dataclass(frozen=True)
class Source:
    """A checkpoint to transcode.

    Attributes:
        name: in the results.
        write: makes it in a folder that does not exist.
        pairs: what is tried beside every target.
        targets: the targets that are tried; None for all.
    """

    name: str
    write: Callable[[Path], object]
    pairs: tuple[Pair, ...] = ()
    targets: tuple[str, ...] | None = None


#: Sizes of random models: what kernels of GPUs and CPUs take.
_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
_SIZES |= {"vocab_size": 128, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "initializer_range": 0.1}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
_MORE: dict[str, dict[str, Any]] = dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _MLA)


def _family(family: str, kind: str, *pairs: Pair, targets: tuple[str, ...] | None = None, **more: Any) -> Source:
    """Write a random model of a family in a format."""
    sizes = _SIZES | _MORE.get(family, {}) | more.pop("sizes", {})
    words = [word for word in ("attention", "act_order") if more.get(word)]
    name = "-".join([family, kind, *words, *more.pop("tags", ())])
    return Source(name, partial(write_family, model_type=family, kind=kind, **more, **sizes), pairs, targets)


_CT = "compressed-tensors"
_SORTED, _HALF = {"sort_act_order": True}, {"regroup": 64}
_FINER = Pair(_CT, {"regroup": 32})
_BLOCK_SPARSE = {"names": "block-sparse-moe"}
#: What is tried with the tests' checkpoints beside every target.
_BY_NAME: dict[str, tuple[Pair, ...]] = {
    # vLLM's Mixtral looks for the names of the model as published.
    "gptq-int4-g128-mixtral": (
        Pair(_CT, _BLOCK_SPARSE),
        Pair("gptq", _BLOCK_SPARSE),
        Pair("bf16", {"allow_lossy": True, **_BLOCK_SPARSE}),
    ),
    "ct-int4-g128-qwen3moe": (Pair(_CT, {"regroup": 64}), Pair("gptq", {"regroup": 32})),
}
SOURCES = {
    source.name: source
    for source in (
        *(
            Source(path.name, partial(shutil.copytree, path), _BY_NAME.get(path.name, ()))
            for path in sorted(filter(Path.is_dir, CHECKPOINTS.iterdir()))
        ),
        _family("qwen3_moe", "gptq", _FINER, Pair("gptq", {"regroup": 64})),
        _family("qwen3_moe", "gptq", attention=True),
        _family("qwen3_moe", "gptq", Pair(_CT, _SORTED), Pair("gptq", _SORTED), act_order=True),
        _family("qwen3_moe", "awq", _FINER),
        _family("qwen3_moe", "awq", attention=True),
        _family("qwen3_moe", "ct-int4", Pair(_CT, {"names": "stacked"}), Pair("gptq", {"names": "block-sparse-moe"})),
        *(_family("qwen3_moe", kind) for kind in ("w8a8", "fp8-block", "fp8-block-f32")),
        *(_family("qwen3_moe", kind) for kind in ("fp8-tensor", "fp8-channel", "mxfp8", "nvfp4")),
        _family("mixtral", "gptq", Pair(_CT, {"names": "mlp"}), Pair("bf16", {"names": "mlp", "allow_lossy": True})),
        _family("mixtral", "ct-int4"),
        _family("deepseek_v2", "gptq", gain=8.0),
        _family("deepseek_v3", "awq", gain=8.0, seed=1),  # with 0 a token's router is at a tie
        _family("deepseek_v3", "fp8-block-f32", sizes={"routed_scaling_factor": 2048.0}),  # beside its shared experts
        _family("glm4_moe", "gptq"),
        _family("olmoe", "awq"),
        _family("gpt_oss", "mxfp4"),
        # 384 = 3 groups of 128: two ranks cut one.
        _family(
            "qwen3_moe", "gptq", Pair(_CT, _HALF, tp=2, source_tp=1), Pair(_CT, _HALF, tp=2),
            Pair("gptq", _HALF, tp=2, source_tp=1), targets=(), sizes={"moe_intermediate_size": 384}, tags=("tp2",),
        ),
        _family(
            "mixtral", "gptq", Pair(_CT, tp=2), Pair("gptq", tp=2), targets=(), tags=("tp2",),
        ),
    )
}  # fmt: skip


def pairs_of(source: Source, only: Collection[str]) -> Iterator[Pair]:
    """Every target, floats with loss, and what the source names. `only`: of these targets; of all where it is empty."""
    tried = [name for name in TARGETS if name != "fp16"] if source.targets is None else source.targets
    pairs = [Pair(name, {"allow_lossy": True} if TARGETS[name].element else {}) for name in tried]
    return (pair for pair in (*pairs, *source.pairs) if not only or pair.to in only)


def verdict_of(folder: Path, engine: str, tp: int) -> dict[str, Any]:
    """Ask `moeq oracle` whether the engine takes a folder on this machine, and with what."""
    gpu = detect_gpu() or detect_cpu()
    said = moeq.decide(moeq.open(folder), moeq.Deployment(gpu=gpu, tp=tp, engine=engine))
    error = None if said.error is None else said.error.text
    failed = [gate.text for gate in said.gates if not gate.passed]
    return {
        "takes": said.ok,
        "backend": said.chosen.backend if said.chosen else None,
        "runs_as": said.runs_as if said.chosen else None,
        "advisories": [advisory.code for advisory in said.advisories],
        **({} if said.ok else {"why": "; ".join(filter(None, [error, *failed]))[:300]}),
    }


def run_source(
    source: Source, engines: Engines, engine: str, scratch: Path, only: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Rows of one source. `only`: targets to try, all where it is empty."""
    folder = scratch / "source"
    source.write(folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = _prompts(vocabulary)
    transcode(folder, scratch / "floats", "bf16", allow_lossy=True)
    answers: dict[int, tuple[Answer, dict[str, Any]]] = {}
    known: Reference | None = None
    for number, pair in enumerate(pairs_of(source, only)):
        out = scratch / str(number)
        row: dict[str, Any] = {"source": source.name, "transcode": pair.text, "tp": pair.tp}
        try:
            done = transcode(folder, out, pair.to, **pair.options)
        except moeq.MoeqError as error:
            if error.code != "usage.target":  # nothing that the target stores
                yield {**row, "answer": "not written", "why": str(error).replace(str(folder), source.name)[:300]}
            continue
        tp = pair.source_tp or pair.tp
        if tp not in answers:
            answers[tp] = engines.ask(folder, prompts, NEW, tensor_parallel_size=tp), verdict_of(folder, engine, tp)
        (before, said_before), said_after = answers[tp], verdict_of(out, engine, pair.tp)
        after = engines.ask(out, prompts, NEW, tensor_parallel_size=pair.tp)
        row |= {"exact": done.exact, "notes": list(done.notes), "oracle": [said_before, said_after]}
        row["disagrees"] = _disagreement(before, said_before) + _disagreement(after, said_after)
        reasons = [reason(before), reason(after)]
        row |= {"refused": reasons} if any(reasons) else {}
        if after.found is None:
            row["answer"] = "refused"
        else:
            known = known or Reference.of(folder, scratch / "floats", prompts)
            changed = _activations(said_after) != ("16" if before.found is None else _activations(said_before))
            row |= compare(before.found, after.found, known, activations=changed)
            defects = set(said_after["advisories"]) - set(said_before["advisories"])
            if row["answer"] == "DIFFERENT" and defects:
                row["answer"] = f"defect ({', '.join(sorted(defects))})"
        yield row
        shutil.rmtree(out)


def _activations(said: Mapping[str, Any]) -> str:
    """`A16` of `W4A16`."""
    return str(said["runs_as"]).partition("A")[2]


def _prompts(vocabulary: int) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (length,), generator=draw).tolist() for length in LENGTHS]


def _disagreement(answer: Answer, said: Mapping[str, Any]) -> list[str]:
    """Where the oracle, which speaks of experts, and the engine do not say the same."""
    why = reason(answer)
    if said["takes"] == (why is None) or (why and re.search(r"attention|head_dim|head_size", why)):
        return []
    return [f"oracle: {said['backend'] or said.get('why')}; engine: {why or 'runs'}"]


def text(row: Mapping[str, Any]) -> str:
    """One line."""
    shown = {"tokens": "d", "of": "d", "furthest": ".1e", "apart": ".1e", "source_error": ".1e", "result_error": ".1e"}
    shown |= {"bf16_error": ".1e", "experts": ".1e", "gap": ".3f"}
    figures = " ".join(f"{key} {row[key]:{form}}" for key, form in shown.items() if key in row)
    lossy = "" if row.get("exact", True) else " lossy"
    why = "".join(f"\n    {str(one)[:200]}" for one in row.get("refused", [row.get("why")]) if one)
    wrong = "".join(f"\n    DISAGREES {one[:300]}" for one in row.get("disagrees", []))
    return f"{row['source']:32s} {row['transcode']:40s} {row['answer']}{lossy} {figures}{why}{wrong}"


def main() -> int:
    """Command line; exits 1 where a pair differs, or the oracle and the engine disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, action="append", help="[all]", metavar="NAME")
    parser.add_argument("--to", choices=TARGETS, action="append", help="only these targets [all]", metavar="FORMAT")
    parser.add_argument("--folder", type=Path, help="where to write [the temporary folder]")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        engines = Engines(_DROP_COMPILER)
        import torch
        import transformers
        import vllm

        about = {
            "schema": "moeq.transcode-generate/1",
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else str(detect_cpu().arch),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        engine = f"vllm@{re.match(r'[0-9.]+[0-9]', vllm.__version__)[0]}"
        for name in options.source or SOURCES:
            with tempfile.TemporaryDirectory(dir=scratch) as own:
                for row in run_source(SOURCES[name], engines, engine, Path(own), options.to or ()):
                    rows.append(row)
                    print(text(row), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["answer"] == "DIFFERENT" or row.get("disagrees") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
