"""Where trials are kept: Optuna's journal file in the run folder, any database, or a gRPC proxy."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autoq.errors import UserError
from autoq.trials.retry import queue_again
from autoq.urls import without_password

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

JOURNAL = "trials.journal"
HEARTBEAT = 20  # seconds between signs of life in a database
GRACE = 120  # seconds without one after which a trial is taken to be lost
GRPC_WAIT = 20  # seconds to wait for a proxy

optuna.logging.set_verbosity(optuna.logging.ERROR)


def open_storage(url: str | None, run: Path, grace: int = GRACE) -> BaseStorage:
    """Open the storage of a study; None is the journal file in the run folder.

    Args:
        url: a SQLAlchemy URL (sqlite:///trials.db, postgresql://user:password@host/database), grpc://host:port, or a path of a journal file.
        grace: seconds without a sign of life after which a database gives a running trial up.

    Raises UserError, never with a password in it, for what cannot be opened.
    """
    if url is None:
        return _journal(run / JOURNAL)
    if "://" not in url:
        if not url.endswith(".journal"):
            raise UserError(
                f"--storage {url!r} is no URL: give sqlite:///trials.db, postgresql://..., grpc://host:port or a .journal file"
            )
        return _journal(Path(url))
    if url.startswith("grpc://"):
        return _proxy(url)
    return _database(url, grace)


def _journal(path: Path) -> BaseStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise UserError(f"the journal {str(path)!r} cannot be opened: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the journal {str(path)!r} is damaged ({error}): restore it, or move it away to begin anew") from error


def _drop_torn_line(path: Path) -> None:
    """Cut off a line that a killed process left without its end; the trial it belonged to is then still running, and is run again."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _proxy(url: str) -> BaseStorage:
    found = re.fullmatch(r"grpc://([^:/]+):(\d{1,5})/?", url)
    if found is None:
        raise UserError(f"--storage {url!r} must be grpc://host:port")
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError:
        raise UserError("--storage grpc:// needs grpcio and protobuf: pip install 'autoq[grpc]'") from None
    from optuna.storages import GrpcStorageProxy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = GrpcStorageProxy(host=found[1], port=int(found[2]))
    try:
        storage.wait_server_ready(timeout=GRPC_WAIT)
    except ConnectionError as error:
        raise UserError(f"no Optuna gRPC proxy answers at {url}") from error
    return storage


def _database(text: str, grace: int) -> BaseStorage:
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    shown = without_password(text)
    try:
        url = _with_driver(text)
        is_sqlite = url.get_backend_name() == "sqlite"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = RDBStorage(
                url.render_as_string(hide_password=False), heartbeat_interval=min(HEARTBEAT, max(1, grace // 4)), grace_period=grace,
                heartbeat_stale_trial_callback=queue_again,
                engine_kwargs={"connect_args": {"timeout": 60}} if is_sqlite else {"pool_pre_ping": True},
            )  # fmt: skip
        if is_sqlite:
            _serialize(storage)
        return storage
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(
            f"--storage {shown!r} is no database URL: sqlite:///trials.db or postgresql://user:password@host/name"
        ) from error
    except ImportError as error:  # Optuna wraps what is missing
        driver = getattr(error if isinstance(error, ModuleNotFoundError) else error.__cause__, "name", None) or "of that database"
        raise UserError(f"--storage {shown!r} needs the driver {driver}: pip install {driver}") from error
    except (SQLAlchemyError, RuntimeError, OSError) as error:
        raise UserError(f"--storage {shown!r} cannot be opened: {_reason(error)}") from error


def _serialize(storage: RDBStorage) -> None:
    """Make every transaction of SQLite take the write lock at its beginning.

    SQLite has no SELECT ... FOR UPDATE, and Python's driver begins a transaction only before the first write, so that two processes
    could both read a queued trial as free and both take it.
    """
    from sqlalchemy import event

    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    storage.engine.dispose()
    event.listen(storage.engine, "connect", connect)
    event.listen(storage.engine, "begin", begin)


def _with_driver(text: str) -> URL:
    """Take the driver that is installed where the URL names none."""
    from sqlalchemy.engine import make_url

    url = make_url(text)
    if url.drivername == "postgresql" and importlib.util.find_spec("psycopg2") is None:
        return url.set(drivername="postgresql+psycopg")
    return url


def _reason(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    words = without_password(" ".join(str(cause).split()))
    return words[:200]


logging.getLogger("alembic").setLevel(logging.ERROR)
