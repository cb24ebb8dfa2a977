"""Writes the files of jobs beside training: those of one job one after another, those of several at once.

On a CPU they are written at once instead: the cores that would write are those that compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weft.engine.execute.microbatch import ExecutedJob
from weft.engine.execute.protocol import AdapterWork, CheckpointWork
from weft.model.embeddings import Embeddings
from weft.store.checkpoint import Checkpoint, save_checkpoint
from weft.store.peft_files import write_adapter

AT_ONCE = 4
"""Jobs whose files are written at the same time. With more, each would only get a smaller part of the disk."""


class FileWriter:
    """What jobs have asked to be written."""

    def __init__(self, *, is_beside: bool) -> None:
        """`is_beside`: on threads of its own, so that nobody waits who does not ask."""
        self._threads = ThreadPoolExecutor(AT_ONCE, "weft-write") if is_beside else None
        self._last: dict[str, Future[None]] = {}
        """By job, what it asked for last."""

    def submit(self, job: str, write: Callable[[], None]) -> Future[None]:
        """Writes once all that the job asked for earlier has been written, or has failed."""
        if self._threads is None:
            made: Future[None] = Future()
            _run(write, made)
            return made
        before = self._last.get(job)
        # Whoever came before has a thread already or is done, so waiting for it in a thread cannot last for ever.
        self._last[job] = made = self._threads.submit(_after, before, write)
        made.add_done_callback(lambda done: self._forget(job, done))
        return made

    def _forget(self, job: str, done: Future[None]) -> None:
        if self._last.get(job) is done:
            self._last.pop(job, None)


def writing(
    work: CheckpointWork | AdapterWork, job: ExecutedJob, base_model: str, target_names: list[str], rows: Embeddings
) -> Callable[[], None]:
    """What writes the files of a job as it is now, whatever becomes of it in the meantime."""
    snapshot, spec = job.weights.snapshot(moments=isinstance(work, CheckpointWork)), job.given.spec
    # Threads must not share a tokenizer.
    tokenizer = copy.deepcopy(rows.tokenizer_for(spec.adapter)) if isinstance(work, AdapterWork) else None

    def write() -> None:
        tensors = snapshot()
        if isinstance(work, CheckpointWork):
            checkpoint = Checkpoint(work.step, tensors, dict(work.state), dict(work.environment))
            save_checkpoint(work.directory, checkpoint, keep=work.keep)
            return
        write_adapter(
            work.directory,
            rows.named(spec.adapter),
            job.weights.modules(tensors, best=work.best),
            base_model=base_model,
            target_names=target_names,
            chat_template=spec.chat_template,
            shared=job.weights.adapter.shared,
            head=job.given.batches.data.head,
            row_modules=rows.paths,
            tokenizer=tokenizer,
        )

    return write


def _after(before: Future[None] | None, write: Callable[[], None]) -> None:
    if before is not None:
        before.exception()
    write()


def _run(write: Callable[[], None], made: Future[None]) -> None:
    """Keeps what is raised for whoever asks how it went."""
    try:
        write()
    except Exception as error:
        made.set_exception(error)
    else:
        made.set_result(None)
