"""Work for another core while torch traces: hashing and copying let go of Python's lock.

The checkpoint is hashed, and its weights are written into the bundle's folder, while the graphs are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollkv.export.tables import Table, write_table
from rollkv.export.write import WEIGHTS_FILE, Placed, write_weights
from rollkv.models.tensors import Parameter
from rollkv.runtime.bundle import hash_file

T = TypeVar("T")


class Background(Generic[T]):
    """One piece of work on a thread of its own, for which a process that ends does not wait."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def running(self, seconds: float | None) -> bool:
        """Whether it still runs after so long a wait; None: until it ends."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what it raised until now."""
        if self._error is not None:
            raise self._error

    def result(self) -> T:
        """Wait, and give what it gave. Raises what it raised."""
        self._thread.join()
        self.check()
        return self._done[0]

    def _run(self) -> None:
        try:
            self._done.append(self._work())
        except BaseException as error:
            self._error = error


class WeightsWriter:
    """The weights on their way into a folder: a context, behind which nothing writes there any more.

    When it is left early, no further tensor is begun.
    """

    def __init__(
        self,
        folder: Path,
        weights: Sequence[Parameter],
        tables: Mapping[str, NDArray[np.float32]],
        placed: Mapping[str, Placed],
        hosted: Mapping[str, Table],
        total: int,
    ) -> None:
        """See `write_weights` and `write_table`. hosted: by file. total: bytes to write."""
        self._total, self._written = total, 0
        self._stop = threading.Event()

        def work() -> dict[str, str]:
            write_weights(folder / WEIGHTS_FILE, weights, tables, placed, self._count)
            for table in hosted.values():
                write_table(folder / table.info.file, table, self._count)
            names = [WEIGHTS_FILE, *(table.info.file for table in hosted.values())]
            return {name: hash_file(folder / name) for name in names}

        self._work = Background(work)
        self.start, self.check = self._work.start, self._work.check

    def finish(self, report: Callable[[str, int, int], None]) -> dict[str, str]:
        """Wait for the last byte; sha256 of each file. Raises what the writing raised."""
        while self._work.running(0.1):
            report("weights", self._written, self._total)
        hashes = self._work.result()
        report("weights", self._total, self._total)
        return hashes

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        late: BaseException | None = None
        while self._work.running(0):
            try:
                self._work.running(None)
            except BaseException as signal:  # another Ctrl-C: the folder is removed next, so it waits
                late = signal
        if late is not None:
            raise late

    def _count(self, count: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("the export has ended")
        self._written += count
