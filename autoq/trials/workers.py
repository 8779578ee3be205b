"""More processes on one study of this machine: each is an `autoq worker`, with its share of the processor or a GPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

STORAGE = "AUTOQ_STORAGE"  # the URL may hold a password, which the process list must not show
LONGEST = 600  # seconds that a last trial may take after --timeout
PATIENCE = 20  # seconds for a worker to end when it is told to


@contextmanager
def worker_processes(
    count: int, study: str, run: Path, devices: Sequence[str], storage: str | None = None, timeout: float | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `count` workers; those that still run at the end of the block are ended, their trial is then queued again.

    Args:
        devices: of the workers, in turn.
    """
    share = max(1, (os.cpu_count() or 1) // (count + 1))
    package = str(Path(__file__).resolve().parent.parent.parent)  # the autoq that this process runs, not one that lies about
    paths = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    environment = {"OMP_NUM_THREADS": str(share), **os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    if storage is not None:
        environment[STORAGE] = storage
    workers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for i in range(count):
            log = stack.enter_context(open(run / f"worker-{i + 1}.log", "ab"))
            command = [
                sys.executable,
                "-m",
                "autoq",
                "worker",
                "--study",
                study,
                "--run",
                str(run),
                "--device",
                devices[i % len(devices)],
            ]
            command += [] if timeout is None else ["--timeout", f"{timeout:.0f}s"]
            command += ["--processes", str(count + 1)]
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            workers.append(worker)
            stack.callback(_end, worker)
        yield workers
        if timeout is not None:  # they end by themselves, with the trial they run
            for worker in workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(LONGEST)


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
