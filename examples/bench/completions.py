"""Requests to a server's `/v1/completions` from many users at a time, with prompts of random token ids."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids."""
    chosen = random.Random(seed)
    return [[chosen.randrange(10, 30000) for _ in range(length)] for _ in range(count)]


def body_of(prompt: list[int], new: int, **more: Any) -> bytes:
    """Return a request for exactly that many new tokens."""
    request = {"model": "m", "prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0, **more}
    return json.dumps(request).encode()


def ask(port: int, prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    """One answer."""
    found: dict[str, Any] = json.loads(post(port, "/v1/completions", body_of(prompt, new, **more)))
    return found


def post(port: int, path: str, body: bytes) -> bytes:
    """Send one request. Raises RuntimeError with the answer unless it is a success."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {text[:300]!r}")
    return text


def gaps(port: int, prompt: list[int], new: int) -> Iterator[float]:
    """Seconds between the tokens of one streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    request = body_of(prompt, new, stream=True)
    connection.request("POST", "/v1/completions", request, {"Content-Type": "application/json"})
    last = None
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if last is not None:
                yield now - last
            last = now
    connection.close()


def together(users: int, jobs: list[list[int]], work: Any) -> float:
    """Seconds until `users` threads have done `work` on all jobs."""
    waiting, lock, failed = iter(jobs), threading.Lock(), []

    def run() -> None:
        while not failed:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            try:
                work(job)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(users)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return time.perf_counter() - start
