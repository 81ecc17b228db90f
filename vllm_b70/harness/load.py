"""The same prompts under load: many requests share the server, arriving when they please."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from vllm_b70.harness.client import Client, Completion, ServerError
from vllm_b70.harness.oracle import Progress


async def run_together(
    client: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    users: int,
    seed: int,
    progress: Progress | None = None,
    *,
    longest_delay_s: float = 0.02,
) -> list[Completion]:
    """Answer all prompts with at most ``users`` requests in flight.

    Each prompt is sent in a seeded order after a seeded random delay, so that arrivals fall
    anywhere between engine steps rather than on a barrier. The seed fixes order and delays, not
    the server's batches; a proof must hold for any of them.

    Args:
        client: the client to send with.
        prompts: token ids.
        max_tokens: tokens to generate for each prompt.
        users: most requests in flight.
        seed: fixes order and delays.
        progress: called after each finished prompt.
        longest_delay_s: upper end of the random delay in seconds.

    Returns:
        The completions in the order of ``prompts``.

    Raises:
        ValueError: ``users`` below 1.
        ServerError, ResponseError: from the first request that fails; the rest is cancelled.
    """
    if users < 1:
        raise ValueError(f"{users} users cannot send anything; ask for at least 1")
    rng = random.Random(int(seed))
    order = list(range(len(prompts)))
    rng.shuffle(order)
    delays = [rng.uniform(0, longest_delay_s) for _ in order]
    slots = asyncio.Semaphore(users)
    completions: dict[int, Completion] = {}

    async def send(index: int, delay_s: float) -> None:
        async with slots:
            await asyncio.sleep(delay_s)
            completions[index] = await client.complete(prompts[index], max_tokens)
        if progress is not None:
            progress(len(completions), len(prompts))

    tasks = [
        asyncio.create_task(send(index, delay_s))
        for index, delay_s in zip(order, delays, strict=True)
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError)
    ]
    if errors:
        raise _most_telling(errors)
    return [completions[index] for index in range(len(prompts))]


def _most_telling(errors: Sequence[BaseException]) -> BaseException:
    """A broken connection explains the errors around it, so it is the one to report."""
    for error in errors:
        if isinstance(error, ServerError) and error.died:
            return error
    return errors[0]
