"""Progress of a long command: a bar on a terminal, a sparse line elsewhere (logs, CI)."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_INTERVAL_S = 5.0


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to be called with the bytes done since its last call."""
    if sys.stdout.isatty():
        with _bar(title, total_bytes) as advance:
            yield advance
    else:
        yield _plain(title, total_bytes)


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _plain(title: str, total_bytes: int) -> Callable[[int], None]:
    done_bytes, next_line_s = 0, time.monotonic() + PLAIN_INTERVAL_S

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes, next_line_s
        done_bytes += num_bytes
        if time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + PLAIN_INTERVAL_S
            print(f"{title}: {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB", flush=True)

    return advance
