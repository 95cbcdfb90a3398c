"""Runs the jobs of a study, several at a time, and stores each cell as it ends."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import joblib

from .cells import Cell, run_cell
from .distributed import Processes
from .protocol import Job
from .results import CellKey, ResultsStore, latest, to_json

__all__ = ["BACKENDS", "Pool", "Progress", "RunReport", "follow", "run_jobs"]

Record = dict[str, Any]
Finished = Mapping[CellKey, Record]
_Run = Callable[["Sequence[Cell]"], "Iterator[tuple[Cell, Record]]"]

BACKENDS = ("local", "ray", "dask")


@dataclass(frozen=True)
class Pool:
    """Where cells run.

    Attributes:
        workers: how many cells at a time.
        threads: threads a cell.
        backend: "local", processes of this machine, or a cluster: "dask", through joblib, or "ray".
        address: of the cluster; None starts one on this machine.
    """

    workers: int = 1
    threads: int = 1
    backend: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, found {self.backend!r}")
        if self.address is not None and self.backend == "local":
            raise ValueError("address is that of a cluster: name its backend too, ray or dask")


class Progress(Protocol):
    """What the runner tells whoever shows progress."""

    def round_started(self, cells: Sequence[Cell], known: int) -> None: ...
    def cell_ended(self, cell: Cell, record: Record) -> None: ...


@dataclass(frozen=True)
class RunReport:
    """Every job with its results line; `fresh` cells were run just now."""

    jobs: tuple[tuple[Job, Record], ...]
    fresh: int

    @property
    def failed(self) -> list[Record]:
        return list(latest(record for _, record in self.jobs if record["status"] == "failed").values())


def run_jobs(
    jobs_of: Callable[[Finished], Sequence[Job]],
    store: ResultsStore,
    pool: Pool,
    progress: Progress,
    planned: Callable[[Sequence[Job], Finished], None] | None = None,
    processes: Processes | None = None,
) -> RunReport:
    """Run what `store` does not have as "ok" yet, until `jobs_of` knows of nothing more.

    A cell that fails is stored as failed, with its traceback, and the rest goes on; it is run again by the next call.
    The results line of a cell is on disk as soon as it ends, so a kill costs the cells in flight and nothing else.

    Args:
        jobs_of: the jobs known by what has ended; see `protocol.jobs_of`.
        store: the caller holds its lock, and keeps it until this returns.
        planned: told all jobs before each round, to write them down.
        processes: of torchrun: this is the first, the others `follow`, and each cell is trained by all of them.
    """
    ended: dict[CellKey, Record] = {k: r for k, r in latest(store.records()).items() if r["status"] == "ok"}
    fresh = 0
    shared = processes if processes is not None and processes.count > 1 else None
    with contextlib.ExitStack() as stack:
        run: _Run | None = None
        while True:
            jobs = jobs_of(ended)
            if planned is not None:
                planned(jobs, ended)
            todo = list({job.cell.key: job.cell for job in jobs if job.cell.key not in ended}.values())
            if shared is not None:
                shared.broadcast(todo)
            if not todo:
                return RunReport(tuple((job, ended[job.cell.key]) for job in jobs), fresh)
            progress.round_started(todo, len(jobs))
            if run is None:
                run = functools.partial(_together, pool, shared) if shared else stack.enter_context(_workers(pool))
            for cell, record in run(todo):
                store.append(record)
                ended[cell.key] = to_json(record)  # as it will be read when the study is resumed
                fresh += 1
                progress.cell_ended(cell, record)


def follow(threads: int, processes: Processes) -> None:
    """Train with the first process what it runs, until it has nothing more."""
    while cells := processes.broadcast(None):
        for cell in cells:
            run_cell(cell, threads, processes=processes)


def _work(threads: int, parent: int | None, cell: Cell) -> tuple[Cell, Record]:
    """In a worker. One whose parent was killed would train on for nobody: it ends itself."""

    def alive(_step: int) -> None:
        if parent is not None and os.getppid() != parent:
            os._exit(1)

    return cell, run_cell(cell, threads, alive)


def _together(pool: Pool, processes: Processes, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
    for cell in cells:
        yield cell, run_cell(cell, pool.threads, processes=processes)


# --- workers: each gives a function from cells to their results lines, as they end ----------------------------------


@contextlib.contextmanager
def _workers(pool: Pool) -> Iterator[_Run]:
    if pool.backend == "ray":
        with _ray(pool) as imap:
            yield imap
        return
    where = _dask(pool) if pool.backend == "dask" else _local(pool)
    with where, joblib.Parallel(pool.workers, return_as="generator_unordered") as parallel:
        parent = os.getpid() if pool.backend == "local" and pool.workers > 1 else None

        def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
            calls = (joblib.delayed(_work)(pool.threads, parent, cell) for cell in cells)
            yield from cast(Iterator[tuple[Cell, Record]], parallel(calls))

        yield run


def _local(pool: Pool) -> AbstractContextManager[Any]:
    if pool.workers == 1:
        return contextlib.nullcontext()
    return joblib.parallel_config("loky", inner_max_num_threads=pool.threads)


@contextlib.contextmanager
def _dask(pool: Pool) -> Iterator[None]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ValueError(
            f'--backend dask needs Dask ({error}): pip install "dask[distributed]", or use --backend ray or local'
        ) from None
    with contextlib.ExitStack() as stack:
        where: Any = pool.address
        if where is None:
            options = {"n_workers": pool.workers, "threads_per_worker": 1, "dashboard_address": None}
            where = stack.enter_context(LocalCluster(**options))
        stack.enter_context(Client(where))
        stack.enter_context(joblib.parallel_config("dask"))
        yield


@contextlib.contextmanager
def _ray(pool: Pool) -> Iterator[_Run]:
    """Ray's own pool: joblib's backend for Ray (2.60) wraps it, and cannot hand over results as they end
    (`supports_return_generator` is False), so a kill would cost more than the cells in flight."""
    try:
        import ray
        from ray.util.multiprocessing import Pool as RayPool
    except ImportError as error:
        raise ValueError(
            f"--backend ray needs Ray ({error}): pip install ray, or use --backend dask or local"
        ) from None
    if pool.address is None:
        ray.init(num_cpus=pool.workers, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=pool.address, log_to_driver=False)
    try:
        workers = RayPool(processes=pool.workers)
        try:
            yield functools.partial(workers.imap_unordered, functools.partial(_work, pool.threads, None), chunksize=1)
        finally:
            workers.terminate()
    finally:
        ray.shutdown()
