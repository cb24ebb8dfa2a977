"""Gets jobs ready for the engine, one after another, in a thread of its own: a long file holds up nobody but itself."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from weft.data.dataset import JobData
from weft.data.template import Tokenizer
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.held import Held, prepare
from weft.spec import JobSpec

Prepared = tuple[JobSpec, JobData]


class Preparer:
    """The jobs whose data is being fetched and read, in the order in which they came."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        tokenizer: Tokenizer,
        *,
        on_ready: Callable[[], None],
    ) -> None:
        self._database, self._blobs, self._work, self._tokenizer = database, blobs, work, tokenizer
        self._on_ready = on_ready
        self._under_way: deque[tuple[Held, Future[Prepared]]] = deque()
        self._queue: queue.SimpleQueue[tuple[Held, Future[Prepared]]] = queue.SimpleQueue()
        # A daemon: a process that must go does not wait for a long file to be read.
        self._thread = threading.Thread(target=self._run, name="weft-prepare", daemon=True)

    def start(self) -> None:
        """Jobs are prepared from now on."""
        self._thread.start()

    def put(self, held: Held) -> None:
        """Takes in a job."""
        future: Future[Prepared] = Future()
        self._under_way.append((held, future))
        self._queue.put((held, future))

    @property
    def has_ready(self) -> bool:
        """Whether the first job is ready, or turned out not to be trainable."""
        return bool(self._under_way) and self._under_way[0][1].done()

    def ready(self) -> Iterator[tuple[Held, Future[Prepared]]]:
        """The jobs that are done here, each once; the future holds what they are or what is wrong with them."""
        while self.has_ready:
            yield self._under_way.popleft()

    def _run(self) -> None:
        while True:
            held, future = self._queue.get()
            try:
                future.set_result(prepare(held, self._database, self._blobs, self._work, self._tokenizer))
            except Exception as error:
                future.set_exception(error)
            self._on_ready()
