"""Runs of several formats at once, one process each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tools.chat_formats.run_checks import FormatRun, is_complete, run_format


def run_formats(runs: Sequence[FormatRun], count: int, jobs: int) -> Iterator[FormatRun]:
    """Check answers of each format until there are ``count``; yields a run after every chunk.

    Args:
        runs: what has been checked; they are replaced by the ones that are yielded.
        count: answers per format.
        jobs: processes; a format is checked by one at a time.
    """
    left = [run for run in runs if not is_complete(run, count)]
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[FormatRun]] = set()
        try:
            while left or running:
                running |= {pool.submit(check_chunk, run, count) for run in left[:jobs]}
                del left[:jobs]
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    run = future.result()
                    yield run
                    if not is_complete(run, count):
                        running.add(pool.submit(check_chunk, run, count))
        finally:
            pool.shutdown(cancel_futures=True)


def check_chunk(run: FormatRun, count: int) -> FormatRun:
    """Check one chunk of answers; returns the run."""
    next(run_format(run, count), None)
    return run
