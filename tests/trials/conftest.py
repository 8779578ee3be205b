"""A real PostgreSQL server, and processes that work on a study."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def postgres_programs() -> Path | None:
    """Return the folder of initdb and pg_ctl, which distributions keep off the PATH."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[4]))
    return folders[-1].parent if folders else None


def unprivileged() -> str:
    """Return a user that the server may run as; it refuses root."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Return the URL of a database of a server that this session starts, as another user where this one is root."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed (apt install postgresql)")
    user: dict[str, Any] = {"user": unprivileged()} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="autoq-pg-"))  # short: a socket's path may have 107 characters
    if user:
        shutil.chown(folder, user["user"])
    data, port = folder / "data", str(20000 + os.getpid() % 20000)
    call: dict[str, Any] = {"check": True, "capture_output": True, "cwd": folder, **user}
    subprocess.run([programs / "initdb", "-D", data, "-U", "autoq", "--auth=trust", "--no-sync"], **call)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    subprocess.run(
        [programs / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start"], **{**call, "capture_output": False}
    )
    try:
        yield f"postgresql://autoq:secret@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **{**call, "capture_output": False})
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process on the fake study in a storage."""
    started: list[subprocess.Popen[str]] = []

    def start(storage: str, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("fake.py")), storage, str(tmp_path), str(seconds)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
