"""What clients get: OpenAI's JSON, whole or as server-sent events, written straight to ASGI's `send`.

A response listens for the client's disconnect while it sends, and aborts the request in the engine at once; however
it ends, nothing of the request stays behind in the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvantile_engine.emulator.answers import Answers, Piece
from kvantile_engine.emulator.engine import Engine
from kvantile_engine.emulator.failures import Fate
from kvantile_engine.emulator.requests import CompletionRequest

DONE = b"data: [DONE]\n\n"


class CompletionResponse(Response):
    """Serves one request: submits it when the response starts, and sends what comes."""

    def __init__(self, engine: Engine, request: CompletionRequest, request_id: str, headers: dict[str, str]) -> None:
        super().__init__(headers=headers)
        self._engine, self._request = engine, request
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._id, self._created = f"{prefix}-{request_id}", int(time.time())
        self._fate = engine.lottery.fate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Sends the answer, or as much of it as its fate allows."""
        if self._fate is Fate.HANGS:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        answers = self._engine.submit(self._request)
        watcher = asyncio.create_task(self._abort_on_disconnect(receive, answers), name="disconnect watcher")
        try:
            await (self._stream(answers, send) if self._request.stream else self._send_whole(answers, send))
        finally:
            self._engine.abort(answers)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _abort_on_disconnect(self, receive: Receive, answers: Answers) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(answers)

    async def _stream(self, answers: Answers, send: Send) -> None:
        await send(self._start("text/event-stream; charset=utf-8"))
        started: set[int] = set()
        async for pieces in answers.pieces():
            body = b"".join(_event(self._chunk(piece, first=piece.index not in started)) for piece in pieces)
            started.update(piece.index for piece in pieces)
            if self._fate is Fate.CUT and (answers.ended or self._half_way(answers)):
                # The server closes the connection of a response that returns before its end.
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return
            tail = self._tail(answers) if answers.ended else b""
            await send({"type": "http.response.body", "body": body + tail, "more_body": not answers.ended})

    @staticmethod
    def _half_way(answers: Answers) -> bool:
        done = sum(answer.sequence.generated for answer in answers.items)
        return 2 * done >= sum(answer.plan.output for answer in answers.items)

    def _tail(self, answers: Answers) -> bytes:
        """What follows the last piece, sent together with it: a write to a socket costs more than all the JSON."""
        usage = self._envelope([], ".chunk") | {"usage": self._usage(answers)}
        return (_event(usage) if self._request.include_usage else b"") + DONE

    async def _send_whole(self, answers: Answers, send: Send) -> None:
        whole = {piece.index: piece async for pieces in answers.pieces() for piece in pieces}
        if answers.aborted:
            return
        choices = [self._choice(whole[index]) for index in sorted(whole)]
        body = json.dumps(self._envelope(choices, "") | {"usage": self._usage(answers)}).encode()
        await send(self._start("application/json", ((b"content-length", str(len(body)).encode()),)))
        cut = self._fate is Fate.CUT
        await send({"type": "http.response.body", "body": body[: len(body) // 2] if cut else body, "more_body": cut})

    def _start(self, content_type: str, more: Iterable[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
        own = [header for header in self.raw_headers if header[0] != b"content-length"]
        headers = [*own, (b"content-type", content_type.encode()), *more]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _envelope(self, choices: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._request.chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        if self._request.chat:
            role = {"role": "assistant"} if first else {}
            content: dict[str, Any] = {"delta": {**role, "content": piece.content}}
        else:
            content = {"text": piece.content}
        chunk = self._envelope([self._with_reason(piece, content)], ".chunk")
        if self._request.continuous_usage:
            chunk["usage"] = _counted(piece.prompt_tokens, piece.tokens)
        return chunk

    def _choice(self, piece: Piece) -> dict[str, Any]:
        if self._request.chat:
            return self._with_reason(piece, {"message": {"role": "assistant", "content": piece.content}})
        return self._with_reason(piece, {"text": piece.content})

    @staticmethod
    def _with_reason(piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        return {"index": piece.index, **content, "logprobs": None, **ending}

    def _usage(self, answers: Answers) -> dict[str, Any]:
        """Tokens: each prompt once, however many sequences share it."""
        firsts = answers.items[:: self._request.per_prompt]
        prompt = sum(answer.sequence.prompt for answer in firsts)
        completion = sum(answer.sequence.generated for answer in answers.items)
        cached = sum(answer.sequence.cached_tokens for answer in firsts)
        return {**_counted(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def _counted(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
