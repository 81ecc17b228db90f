import asyncio
from collections.abc import Callable

import pytest
from fake_vllm import FakeServer, true_token

from vllm_b70.harness.client import Client, Completion, ResponseError, ServerError
from vllm_b70.harness.load import run_together

Start = Callable[..., FakeServer]


def together(
    server: FakeServer, prompts: list[list[int]], users: int, seed: int = 0
) -> list[Completion]:
    async def run() -> list[Completion]:
        async with Client(server.base_url, "tiny") as client:
            return await run_together(client, prompts, 8, users, seed)

    return asyncio.run(run())


@pytest.mark.parametrize("users", [1, 2, 4, 6])
def test_as_many_as_users_are_in_flight_and_no_more(
    fake: Start, prompts: list[list[int]], users: int
) -> None:
    server = fake(holds=[users])
    answers = together(server, prompts, users)
    assert server.engine.max_running == users
    assert [answer.token_ids for answer in answers] == [
        [true_token(prompt, position) for position in range(8)] for prompt in prompts
    ]


def test_the_seed_decides_the_order(fake: Start, prompts: list[list[int]]) -> None:
    def order(seed: int) -> list[list[int]]:
        server = fake()
        together(server, prompts, 1, seed)
        return [body["prompt"] for body in server.engine.bodies]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2)) == sorted(prompts)


def test_progress_counts_every_prompt(fake: Start, prompts: list[list[int]]) -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        async with Client(fake().base_url, "tiny") as client:
            await run_together(
                client, prompts, 8, 3, 0, lambda done, total: seen.append((done, total))
            )

    asyncio.run(run())
    assert seen == [(done, 6) for done in range(1, 7)]


def test_a_dead_server_is_the_error_that_is_reported(fake: Start, prompts: list[list[int]]) -> None:
    with pytest.raises(ServerError) as caught:
        together(fake(mode="drop", after=2), prompts, 4)
    assert caught.value.died


def test_the_first_error_ends_the_rest(fake: Start, prompts: list[list[int]]) -> None:
    server = fake(mode="no_ids")
    with pytest.raises(ResponseError):
        together(server, prompts, 1)
    assert len(server.engine.bodies) < len(prompts)


def test_no_users_are_refused(fake: Start, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="0 users"):
        together(fake(), prompts, 0)
