"""What `--fail` makes of a replica, as its clients see it."""

from __future__ import annotations

import socket
import subprocess
import time

import httpx
import pytest

from tests.integration.engine.process import COMMAND, STOP_WITHIN_S, emulator

FAST = {"alpha": 0.001, "beta": 0, "gamma": 0, "delta": 0}
BODY = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}


def test_a_slow_start_refuses_connections_until_it_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*COMMAND, "--port", str(port), "--fail", "slow-start=3", "--speed", "2"]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/health")
            assert process.stderr.readline().startswith("listening on")
            assert time.monotonic() - began >= 1.5
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        finally:
            process.terminate()
            process.wait(STOP_WITHIN_S)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hanging_replica_takes_requests_and_says_nothing_but_is_healthy(stream: bool) -> None:
    with emulator(fail="hang=1", **FAST) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json={**BODY, "stream": stream}, timeout=0.3)
        assert httpx.get(f"{running.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_cut_answer_begins_and_does_not_end(stream: bool, tokens: int) -> None:
    with emulator(fail="cut=1", **FAST) as running:
        body = {**BODY, "max_tokens": tokens, "stream": stream}
        got: list[bytes] = []
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                got.extend(answer.iter_raw())
        assert got
        assert b"[DONE]" not in b"".join(got)
        assert running.metric("vllm:num_requests_running") == 0


def test_a_share_of_the_requests_is_refused_with_500_or_503_the_same_ones_for_a_seed() -> None:
    statuses = []
    for _ in range(2):
        with emulator(fail="5xx=0.5", seed=2, **FAST) as running, httpx.Client(base_url=running.url) as http:
            answers = [http.post("/v1/completions", json={**BODY, "max_tokens": 1}) for _ in range(40)]
            assert all(set(a.json()["error"]) == {"message", "type", "param", "code"} for a in answers if a.is_error)
            statuses.append([answer.status_code for answer in answers])
    assert statuses[0] == statuses[1]
    assert {200, 500, 503} == set(statuses[0])
    assert 10 <= statuses[0].count(200) <= 30


def test_out_of_memory_ends_the_process_and_the_streams_in_it() -> None:
    with emulator(fail="oom=200", **FAST) as running:
        httpx.post(f"{running.url}/v1/completions", json={**BODY, "max_tokens": 150}).raise_for_status()
        body = {**BODY, "max_tokens": 300, "stream": True}
        with (
            httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            answer.read()
        assert running.process.wait(STOP_WITHIN_S) == 1
        assert running.process.stderr is not None
        told = running.process.stderr.read()
        assert "out of memory" in told
        assert "Traceback" not in told


def test_failures_combine() -> None:
    with emulator(fail="5xx=0.4, hang=0.3, cut=0.3", seed=1, **FAST) as running:
        seen = set()
        for _ in range(25):
            try:
                answer = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=0.3)
                seen.add("served" if answer.status_code == 200 else "5xx")
            except httpx.ReadTimeout:
                seen.add("hang")
            except httpx.RemoteProtocolError:
                seen.add("cut")
        assert seen == {"served", "5xx", "hang", "cut"}


@pytest.mark.parametrize("fail", ["burn=1", "hang", "hang=2", "cut=nan", "oom=0", "hang=0.1,hang=0.2", "slow-start=-1"])
def test_a_failure_that_makes_no_sense_is_told(fail: str) -> None:
    ended = subprocess.run([*COMMAND, "--fail", fail], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--fail" in ended.stderr
    assert fail.rpartition(",")[2].partition("=")[0] in ended.stderr
