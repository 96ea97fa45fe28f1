"""Commands that write a folder end through their clean-up when they are told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopped_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process as they would, with 128 + their number, but through the clean-up."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
