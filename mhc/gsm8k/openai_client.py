"""A client for any OpenAI-compatible server: all questions at once, retried with backoff, resumed after a kill.

Every answer is one line of a journal, on disk before the next one counts; a run started again asks only what is
missing. A request that fails for good is an error that names its question: it never becomes an empty answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)
from tqdm.asyncio import tqdm

from mhc.gsm8k.data import Problem
from mhc.gsm8k.journal import Journal
from mhc.gsm8k.prompts import MAX_TOKENS, SEED, STOP, Rule, cut_at_stop
from mhc.gsm8k.rows import verdict
from mhc.gsm8k.stats import Acceptance

RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? (\S+)(?: \d+)?$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Server:
    """Where to ask and how.

    Args:
        base_url: up to and without `/v1`, e.g. `http://localhost:8000`.
        model: the server's name for the model.
        api: `completions`, or `chat` (the same text as one user message).
        concurrency: requests in flight.
        attempts: tries of one request before it is an error.
        backoff_s: first wait between tries; it doubles, with jitter, up to a minute.
        timeout_s: of one try.
    """

    base_url: str
    model: str
    api: Literal["completions", "chat"] = "completions"
    concurrency: int = 256
    attempts: int = 6
    backoff_s: float = 1.0
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Sampling:
    """What is asked of the server for each question."""

    temperature: float = 0.0
    max_tokens: int = MAX_TOKENS
    seed: int = SEED
    stop: tuple[str, ...] = STOP


async def ask(
    server: Server, sampling: Sampling, problems: Sequence[Problem], texts: Sequence[str], journal: Journal,
    *, rule: Rule, arm: str, k: int,
) -> None:  # fmt: skip
    """Ask every question that the journal lacks and append a row for each answer.

    Args:
        problems, texts: the questions and their prompts, in the same order.
        journal: gets the rows, and one `session` line with wall time, tokens and, from a vLLM server, the counters.
        rule, arm, k: as the row says; `k` is the server's draft length (0: unknown or none).

    Raises:
        RuntimeError: some questions failed for good; the others are in the journal.
        httpx.HTTPError: the server cannot be reached at all.
    """
    done = {row["id"] for row in journal.records if row["record"] == "question"}
    todo = [(problem, text) for problem, text in zip(problems, texts, strict=True) if problem.id not in done]
    if not todo:
        return
    limits = httpx.Limits(max_connections=server.concurrency)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=server.timeout_s, limits=limits) as client:
        before, start, answered = await scrape(client), time.perf_counter(), len(journal.records)
        gate = asyncio.Semaphore(server.concurrency)
        bar = tqdm(total=len(problems), initial=len(done), desc="questions", unit="q")

        async def one(problem: Problem, text: str) -> None:
            async with gate:
                completion, tokens = await _request(client, server, sampling, text)
            completion = cut_at_stop(completion, sampling.stop)
            row = verdict(
                problem, completion, rule, arm=arm, k=k, temperature=sampling.temperature, tokens=tokens
            )  # fmt: skip
            journal.append(row.record())
            bar.update()

        results = await asyncio.gather(*(one(*item) for item in todo), return_exceptions=True)
        bar.close()
        rows = journal.records[answered:]
        journal.append(
            {
                "record": "session",
                "questions": len(rows),
                "wall_s": time.perf_counter() - start,
                "tokens": sum(row["tokens"] or 0 for row in rows),
                "acceptance": _difference(before, await scrape(client)),
            }
        )
    failed = {p.id: error for (p, _), error in zip(todo, results, strict=True) if isinstance(error, BaseException)}
    if failed:
        example, error = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(todo)} questions failed (first: {example}, {error!r}); the answers so far are in "
            f"{journal.path}, run the same command again for the rest"
        )


async def _request(client: httpx.AsyncClient, server: Server, sampling: Sampling, text: str) -> tuple[str, int | None]:
    body: dict[str, Any] = {"model": server.model, **asdict(sampling), "stop": list(sampling.stop)}
    if server.api == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    path = "/v1/chat/completions" if server.api == "chat" else "/v1/completions"
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_worth_retrying),
        stop=stop_after_attempt(server.attempts),
        wait=lambda state: _wait_s(state, server.backoff_s),
        reraise=True,
    ):
        with attempt:
            response = await client.post(path, json=body)
            if not response.is_success:
                said = f"{response.status_code} {response.reason_phrase}: {response.text[:200]}"
                raise httpx.HTTPStatusError(said, request=response.request, response=response)
            return _answer(response)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _answer(response: httpx.Response) -> tuple[str, int | None]:
    """Completion and its tokens; a 200 without them is an error, not an empty answer."""
    try:
        reply = response.json()
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise httpx.DecodingError(f"no completion in the reply: {response.text[:200]!r}") from error
    if not isinstance(text, str):
        raise httpx.DecodingError(f"the completion must be a string, got {text!r}")
    return text, (reply.get("usage") or {}).get("completion_tokens")


def _worth_retrying(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED_STATUS
    return isinstance(error, httpx.RequestError)  # transport faults, time-outs and replies cut short


def _wait_s(state: RetryCallState, backoff_s: float) -> float:
    """Exponential with jitter, but never less than the server's own Retry-After (in seconds)."""
    wait = (wait_exponential(multiplier=backoff_s, max=60) + wait_random(0, backoff_s))(state)
    error = state.outcome.exception() if state.outcome else None
    asked = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return max(wait, float(asked)) if asked.isdigit() else wait


# ---- vLLM's counters ----


async def scrape(client: httpx.AsyncClient) -> dict[str, float] | None:
    """vLLM's speculative counters, summed over engines; None when the server has no such metrics."""
    try:
        response = await client.get("/metrics")
    except httpx.RequestError:
        return None
    return parse_metrics(response.text) if response.is_success else None


def parse_metrics(text: str) -> dict[str, float] | None:
    """`drafts`, `draft_tokens`, `accepted_tokens` and `accepted_tokens_per_pos/<i>` out of Prometheus text."""
    totals: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        position = _POSITION.search(labels)
        key = f"{name}/{position[1]}" if position else name
        totals[key] = totals.get(key, 0.0) + float(value)
    return totals or None


def _difference(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, Any] | None:
    """What the counters gained, as row fields; None without drafts."""
    if before is None or after is None:
        return None
    gained = {key: int(value - before.get(key, 0.0)) for key, value in after.items()}
    if any(value < 0 for value in gained.values()):
        raise RuntimeError("the server restarted during the run: its counters went back")
    if not gained.get("drafts"):
        return None
    positions = sorted(int(key.rpartition("/")[2]) for key in gained if key.startswith("accepted_tokens_per_pos/"))
    acceptance = Acceptance(
        drafts=gained["drafts"],
        drafted=gained["draft_tokens"],
        accepted=gained["accepted_tokens"],
        accepted_per_position=tuple(gained[f"accepted_tokens_per_pos/{i}"] for i in positions),
    )
    return {**asdict(acceptance), "mean_length": acceptance.mean_length}
