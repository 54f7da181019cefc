"""Headers of one hop stay on their hop."""

from __future__ import annotations

from kvantile_router.attempt import request_headers
from kvantile_router.reply import passed_on


def test_headers_of_one_hop_and_those_that_connection_lists_are_dropped() -> None:
    sent = [
        (b"Connection", b"close, X-Mine"),
        (b"X-Mine", b"1"),
        (b"TE", b"x"),
        (b"X-Other", b"2"),
        (b"Upgrade", b"h2"),
    ]
    assert passed_on(sent) == [(b"x-other", b"2")]


def test_credentials_stay_and_the_request_id_is_the_gateways() -> None:
    sent = [(b"authorization", b"Bearer x"), (b"x-request-id", b"theirs"), (b"traceparent", b"t"), (b"host", b"h")]
    expected = [(b"traceparent", b"t"), (b"x-request-id", b"ours"), (b"accept-encoding", b"identity")]
    assert request_headers(sent, "ours") == expected
