"""The way of an answer from the engine to its client: woken only when there is something to send.

A request has one answer per sequence and one event for all of them. The engine sets the event when a sequence has its
first token, `interval` more than were sent, or its last; whoever streams then takes what is there. Without streaming
only the last token wakes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from kvantile_engine.emulator import text
from kvantile_engine.emulator.requests import SequencePlan
from kvantile_engine.emulator.scheduler import Sequence, State


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of choice `index`, after which it has so many tokens; `finish_reason` stands on the last one."""

    index: int
    content: str
    finish_reason: str | None
    stop_reason: str | None
    """The stop string that ended it."""
    prompt_tokens: int
    tokens: int


@dataclass(slots=True, eq=False)
class Answer:
    """One sequence and how much of it was sent; `due` is the number of tokens at which its client is woken."""

    index: int
    plan: SequencePlan
    sequence: Sequence
    due: int
    news: asyncio.Event
    copies: int = 1
    """Answers to its prompt."""
    sent: int = 0
    ended: bool = False
    started_s: float = 0.0
    """The engine second of its first admission, and below that of its first token."""
    first_s: float = 0.0

    def notify(self) -> None:
        """Called by the engine after each token of the sequence."""
        if self.sequence.generated >= self.due or self.sequence.state is State.FINISHED:
            self.news.set()

    def content(self, generated: int) -> str:
        """What follows what was sent, up to the token `generated`; nothing of a stop string that is to stay out."""
        plan = self.plan
        content = text.words(plan.words_key, self.sent, generated)
        if plan.stop:
            content = content[: max(0, plan.stop.characters - text.length(plan.words_key, self.sent))]
        return content if self.sent else plan.echo + content

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return "length" if self.plan.cut else "stop"


@dataclass(slots=True, eq=False)
class Answers:
    """All answers to a request."""

    interval: int | None
    """Tokens per piece; None sends each answer whole."""
    items: list[Answer] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False

    @property
    def ended(self) -> bool:
        """Whether every answer's last piece was handed out."""
        return all(answer.ended for answer in self.items)

    def add(self, plan: SequencePlan, sequence: Sequence, copies: int = 1) -> Answer:
        """One more answer, of so many to the same prompt."""
        due = 1 if self.interval else sys.maxsize
        answer = Answer(len(self.items), plan, sequence, due, self.news, copies)
        self.items.append(answer)
        return answer

    def abort(self) -> None:
        """Ends `pieces`: nothing comes any more."""
        self.aborted = True
        self.news.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is to be sent, as it comes; ends after the last piece of the last answer, or when aborted."""
        while not self.ended:
            await self.news.wait()
            self.news.clear()
            if self.aborted:
                return
            if batch := list(self._ready()):
                yield batch

    def _ready(self) -> Iterator[Piece]:
        for answer in self.items:
            if answer.ended:
                continue
            generated = answer.sequence.generated
            answer.ended = answer.sequence.state is State.FINISHED
            if generated < answer.due and not answer.ended:
                continue
            content = answer.content(generated)
            answer.sent, answer.due = generated, generated + (self.interval or 0)
            reason, stop = (answer.finish_reason, answer.plan.stop) if answer.ended else (None, None)
            yield Piece(answer.index, content, reason, stop.string if stop else None, answer.plan.prompt, generated)
