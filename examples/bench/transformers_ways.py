"""Ways to run a converted model in transformers, for `engine_options.py`: caches, compiled, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from generating import Generated

#: Caches of the prompts and the new tokens have room for so many.
ROOM = 128


def generate(
    folder: Path, way: str, prompts: list[list[int]], new: int, device: str
) -> tuple[list[Generated], dict[str, Any]]:
    """In a process of its own: load, log-probabilities of each prompt, greedy tokens in the way of that name.

    Returns:
        what was said, and facts: how often a graph of the compiler was broken, the experts' module.

    Raises:
        MoeqError: `environment.engine-version` for a transformers that is too old.
    """
    from transformers import AutoModelForCausalLM

    import moeq.engines.transformers  # noqa: F401 - registers the method; refuses versions that are too old

    mapped = {"device_map": device} if find_spec("accelerate") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="moeq", **mapped)
    model = model.to(device).eval()
    # Every choice of this run is the model's: the config of no generation is stored.
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    experts = next(module for module in model.modules() if hasattr(module, "converted"))
    if device == "cpu":  # where the reference would run: what a GPU runs, in Triton's interpreter
        for module in model.modules():
            if hasattr(module, "converted"):
                module.converted.run_on = "kernels"
    greedy = WAYS[way](model)
    with torch.no_grad():
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            said = model(ids).logits[0, :-1].float().log_softmax(-1).cpu()
            tokens, logits = greedy(ids, new)
            found.append(Generated(tokens, said, logits.float().log_softmax(-1).cpu()))
    facts: dict[str, Any] = {"experts": type(experts).__name__}
    broken = torch._dynamo.utils.counters["graph_break"]
    frames = torch._dynamo.utils.counters["frames"]
    facts |= {"graph breaks": {str(key)[:200]: count for key, count in broken.items()}, "frames": dict(frames)}
    prepared = getattr(experts.converted, "_prepared", None)
    return found, facts | {"kernels": str(prepared[2]) if prepared else None}


Greedy = Callable[[torch.Tensor, int], tuple[list[int], torch.Tensor]]


def _generate(model: Any, ids: torch.Tensor, new: int, **more: Any) -> tuple[list[int], torch.Tensor]:
    """Run transformers' own `generate`."""
    kept = {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **kept, **more)
    return found.sequences[0, ids.shape[1] :].tolist(), torch.cat(found.logits)


def _by(**more: Any) -> Callable[[Any], Greedy]:
    return lambda model: partial(_generate, model, **more)


def _by_generate(model: Any) -> Greedy:
    """`generate` with a static cache, which compiles where the quantisation method says that it may."""
    type(model.hf_quantizer).is_compileable = True
    return partial(_generate, model, cache_implementation="static")


def _stepwise(model: Any, step: Any, ids: torch.Tensor, new: int) -> tuple[list[int], torch.Tensor]:
    """Generate with a static cache; `step` turns a token's id into its logits `[1, 1, V]`."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    logits = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].clone()]
    for place in range(new - 1):
        logits.append(step(logits[-1].argmax(-1), cache, ids.shape[1] + place).clone())
    joined = torch.cat(logits, 1)[0]
    return joined.argmax(-1).tolist(), joined


def _decode(model: Any, token: torch.Tensor, cache: Any, position: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(token, past_key_values=cache, position_ids=position, use_cache=True).logits
    return logits


def _compiled(mode: str, fullgraph: bool) -> Callable[[Any], Greedy]:
    """Each token through torch.compile."""

    def way(model: Any) -> Greedy:
        run = torch.compile(partial(_decode, model), mode=mode, fullgraph=fullgraph)

        def step(token: torch.Tensor, cache: Any, place: int) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return run(token, cache, torch.full((1, 1), place, device=token.device))  # type: ignore[no-any-return]

        return partial(_stepwise, model, step)

    return way


def _graph(model: Any) -> Greedy:
    """Each token by a CUDA graph of the whole forward pass, which is captured anew for each prompt's cache."""
    if not torch.cuda.is_available():
        raise NotImplementedError("a CUDA graph needs a GPU")
    kept: dict[str, Any] = {}

    def step(token: torch.Tensor, cache: Any, place: int) -> torch.Tensor:
        position = torch.full((1, 1), place, device=token.device)
        if kept.get("cache") is not cache:
            # Two runs beside the graph: they load what loads itself at the first use. Each writes where the cache says
            # that it ends, so that is put back.
            kept.clear()
            inputs, lengths = (token.clone(), position.clone()), _lengths(cache)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    _decode(model, inputs[0], cache, inputs[1])
            torch.cuda.current_stream().wait_stream(stream)
            _set_lengths(cache, lengths)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = _decode(model, inputs[0], cache, inputs[1])
            _set_lengths(cache, lengths)
            kept.update(cache=cache, graph=graph, inputs=inputs, out=out)
        kept["inputs"][0].copy_(token)
        kept["inputs"][1].copy_(position)
        kept["graph"].replay()
        out: torch.Tensor = kept["out"]
        return out

    return partial(_stepwise, model, step)


def _lengths(cache: Any) -> list[torch.Tensor]:
    return [layer.cumulative_length.clone() for layer in cache.layers]


def _set_lengths(cache: Any, lengths: list[torch.Tensor]) -> None:
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.cumulative_length.copy_(length)


#: Name to a function that makes, of a model, one from a prompt and a number of tokens to tokens and logits.
WAYS: dict[str, Callable[[Any], Greedy]] = {
    "eager": _by(),
    "static cache": _by(cache_implementation="static"),
    "static cache by steps": lambda model: partial(
        _stepwise,
        model,
        lambda token, cache, place: _decode(model, token, cache, torch.full((1, 1), place, device=token.device)),
    ),
    "static cache, compiled by generate": _by_generate,
    "compiled": _compiled("default", False),
    "compiled as one graph": _compiled("default", True),
    "compiled, reduce-overhead": _compiled("reduce-overhead", False),
    "CUDA graph": _graph,
}
