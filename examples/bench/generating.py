"""Generation with vLLM: engines in processes of their own, greedy tokens and all log-probabilities."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Engine and scheduler in this process; the engine's own sampler instead of FlashInfer's.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

#: What a process imports from which those of engines are forked.
_PRELOADED = ["vllm.v1.engine.llm_engine", "vllm.engine.arg_utils", "torch._inductor"]

#: How many times further from float32 an engine may be than the same model in bf16 in transformers, which rounds
#: elsewhere; and how far a greedy token may be from the best one, relative to how far the best is from the mean.
FACTOR = 3.0
GAP = 0.05


@dataclass(frozen=True)
class Generated:
    """What an engine made of one prompt.

    Attributes:
        tokens: the greedy tokens.
        prompt: log-probabilities of every token after each token of the prompt but the last,
            `[prompt - 1, vocabulary]`.
        new: log-probabilities at each greedy token, `[tokens, vocabulary]`.
    """

    tokens: list[int]
    prompt: Tensor
    new: Tensor


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], new: int, *, graphs: bool = False, **more: Any
) -> list[Generated]:
    """Start vLLM from a folder as `vllm serve` does, all prompts together; on a GPU or a CPU.

    Args:
        folder: the checkpoint.
        prompts: token ids.
        new: tokens to generate after each.
        graphs: decode in CUDA graphs.
        more: further arguments of the engine.
    """
    import torch

    config = json.loads((folder / "config.json").read_text())
    latent = "kv_lora_rank" in config and torch.cuda.is_available()  # such attention has a backend of its own there
    quick = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if graphs else {}
    attention = "TRITON_MLA" if latent else "TRITON_ATTN"
    return said(
        start(folder, **{"enforce_eager": not graphs, **quick, "attention_backend": attention, **more}), prompts, new
    )


def start(folder: Path, **more: Any) -> Any:
    """Start a small `LLMEngine` on a folder; `more` are engine arguments beside or instead of the usual ones."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    usual = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_logprobs": json.loads((folder / "config.json").read_text())["vocab_size"],
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 28,
    }
    return LLMEngine.from_engine_args(EngineArgs(**{**usual, **more}))


def said(
    engine: Any, prompts: Sequence[Sequence[int]], new: int, lora: Any = None, *, whole: bool = True
) -> list[Generated]:
    """Generate from prompts that the engine gets together.

    Args:
        engine: as `start` returns it.
        prompts: token ids.
        new: tokens to generate after each.
        lora: the engine's request for an adapter.
        whole: also the log-probabilities of the prompts, which are empty otherwise.
    """
    import torch

    vocabulary = engine.model_config.max_logprobs
    wanted = {"logprobs": vocabulary} | ({"prompt_logprobs": vocabulary} if whole else {})

    def rows(places: Any) -> Tensor:
        found = [[place[token].logprob for token in range(vocabulary)] for place in places]
        return torch.tensor(found).reshape(-1, vocabulary)

    return [
        Generated(
            list(output.outputs[0].token_ids),
            rows(output.prompt_logprobs[1:] if whole else ()),
            rows(output.outputs[0].logprobs),
        )
        for output in outputs(engine, prompts, new, lora, **wanted)
    ]


def outputs(engine: Any, prompts: Sequence[Sequence[int]], new: int, lora: Any = None, **wanted: int) -> list[Any]:
    """Return the engine's records of its answers, one per prompt, with the `wanted` log-probabilities."""
    from vllm.sampling_params import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, **wanted)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, asked, lora_request=lora)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(number)] for number in range(len(prompts))]


@dataclass(frozen=True)
class Answer:
    """What came of a process: what an engine generated, or why it did not start; what of that the log says."""

    found: Any
    refused: str = ""
    log: str = ""


class Engines:
    """Engines in processes of their own, forked from one that has imported vLLM.

    Args:
        environment: variables of all of them; this process gets them too.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ |= ENVIRONMENT | environment
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOADED)

    def ask(self, folder: Path, prompts: Sequence[Sequence[int]], new: int, **arguments: Any) -> Answer:
        """Start, `generate`, end."""
        return self.run(partial(generate, folder, prompts, new, **arguments))

    def run(
        self,
        work: Callable[[], Any],
        *,
        limit: float | None = None,
        environment: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> Answer:
        """Return the result of `work` in a process of its own.

        Args:
            work: a function that can be pickled.
            limit: seconds after which the process is ended [none].
            environment: variables of that process.
            anew: whether the process imports vLLM itself, which reads some variables while it is imported.
        """
        context = multiprocessing.get_context("spawn") if anew else self.context
        with tempfile.NamedTemporaryFile("w+", errors="replace") as log:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(work, dict(environment or {}), log.name, sender))
            process.start()
            sender.close()
            try:
                if receiver.poll(limit):
                    answer: Answer = pickle.loads(receiver.recv_bytes())
                else:
                    process.kill()
                    answer = Answer(None, f"no answer in {limit:.0f} s")
            except EOFError:
                answer = Answer(None, "the process ended without an answer")
            process.join()
            return Answer(answer.found, answer.refused, log.read()[-50_000:])


def _answer(work: Callable[[], Any], environment: dict[str, str], log: str, sender: Any) -> None:
    """In a process of its own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment
    try:
        answer = Answer(work())
    except Exception as error:  # noqa: BLE001 - whatever an engine refuses with is the answer
        traceback.print_exc()
        answer = Answer(None, f"{type(error).__name__}: {error}")
    sender.send_bytes(pickle.dumps(answer))


def reason(answer: Answer) -> str | None:
    """Why an engine did not start: of several processes the first that says so."""
    if answer.found is not None:
        return None
    named = [line for line in answer.log.splitlines() if re.search(r"^(\S+ )*[\w.]*(Error|Exception): ", line)]
    causes = [line for line in named if "WorkerProc" not in line and "Engine core" not in line]
    if "Engine core" in answer.refused or "WorkerProc" in answer.refused:
        return (causes or [answer.refused])[0][-300:]
    return " ".join(answer.refused.split())[:300]


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Relative to how log-probabilities differ between tokens."""
    return float((found - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())


def gap_of(logits: Tensor, tokens: Sequence[int]) -> float:
    """How far tokens are from the best ones at most, relative to how far those are from the mean.

    Args:
        logits: float32 `[tokens, vocabulary]`, each row those of what is before the token.
        tokens: what an engine chose.
    """
    import torch

    best, mean = logits.max(-1).values, logits.mean(-1)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(((best - chosen) / (best - mean)).max())
