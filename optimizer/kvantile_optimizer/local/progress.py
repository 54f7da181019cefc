"""How far a replay is: a bar on a terminal, a plain line every ten seconds elsewhere; both on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 10.0


@contextmanager
def shown(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields what is to be told how many of `total` are done."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("answers"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _plain(console, title, total)


def _plain(
    console: Console, title: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    last = clock()

    def tell(done: int) -> None:
        nonlocal last
        if done == total or clock() - last >= PLAIN_EVERY_S:
            last = clock()
            console.print(f"{title}: {done} of {total} answers", highlight=False, soft_wrap=True)

    return tell
