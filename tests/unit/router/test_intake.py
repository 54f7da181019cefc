"""What stands between socket and request: paths that lead elsewhere, and clients that stall."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvantile_router.errors import TooSlowError, UnknownPathError
from kvantile_router.intake import check_path, read_body


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/a/..", "/v1/./models", "/.."])
def test_a_path_that_leads_out_of_what_is_ours_is_unknown(path: str) -> None:
    with pytest.raises(UnknownPathError):
        check_path(path)


def test_dots_within_a_step_are_letters() -> None:
    check_path("/v1/models/llama-3.1..8b")


async def test_a_client_that_sends_half_a_body_is_given_up() -> None:
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Message:
        if pieces:
            return pieces.pop()
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TooSlowError):
        await read_body(receive, 100, "50", pause_s=0.01)
