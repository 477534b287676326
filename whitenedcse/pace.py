"""How far long work over sentences is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.text import Text

SECONDS = 10.0  # between two lines


@contextmanager
def pace(what: str, total: int | None = None, before: int = 0) -> Iterator[Callable[[int], None]]:
    """A function to be told of so many sentences more; on the standard error, which no program reads.

    total: None where nobody has counted, which leaves the time left out. before: done already, at no speed.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        say = partial(console.print, highlight=False, soft_wrap=True)
        yield lines(what, total, say, before)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeLeft())
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task(what, total=total, completed=before)
        yield lambda more: bar.advance(row, more)


def lines(what: str, total: int | None, say: Callable[[str], None], before: int = 0) -> Callable[[int], None]:
    """The same as text: at most one line in ten seconds."""
    began = said = time.monotonic()
    done = before

    def more(count: int) -> None:
        nonlocal done, said
        done, now = done + count, time.monotonic()
        if now - said < SECONDS or done == before:
            return
        said, speed = now, (done - before) / (now - began)
        left = "" if total is None else time.strftime("  left %H:%M:%S", time.gmtime((total - done) / speed))
        say(f"{what} {done:,}{'' if total is None else f' of {total:,}'}  {speed:,.0f} sentences/s{left}")

    return more


class Speed(ProgressColumn):
    """Sentences a second."""

    def render(self, task: Task) -> Text:
        """Of the last seconds."""
        return Text(f"{task.speed:,.0f} sentences/s" if task.speed else "")
