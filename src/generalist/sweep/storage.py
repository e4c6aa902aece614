"""The database that workers share: SQLite in the sweep's folder, or PostgreSQL by URL, both through Optuna.

A worker that claims a trial locks the whole sweep for a few milliseconds, so that two workers never take the same
one. The lock ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from generalist.core.errors import SweepError
from generalist.core.files import clear_write_errors
from generalist.sweep.definition import Sweep

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage

MISSES = 4
"""Signs of life that a worker may miss before it is considered dead."""
_LOCK_WAIT = "120s"
_OPTUNAS = {"studies", "version_info", "alembic_version"}
"""Tables that identify an Optuna database, even while another worker is still creating them."""


def optuna_module() -> Any:
    """Optuna, which only sweeps need."""
    try:
        import optuna
        import sqlalchemy  # noqa: F401
    except ImportError:
        raise SweepError("sweeps need Optuna: pip install 'generalist-at[sweep]'") from None
    optuna.logging.set_verbosity(logging.WARNING)
    # Optuna calls heartbeats experimental, and means them for its own loop; ours sends them itself.
    warnings.filterwarnings("ignore", message=".*[Hh]eartbeat.*", module=r"(optuna|generalist)\..*")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


@dataclass(frozen=True)
class Place:
    """Where a sweep's records are: a database, and the folder with the runs of this machine."""

    url: str
    folder: Path

    @property
    def shown(self) -> str:
        """The URL without its password, which may also be among its options."""
        import sqlalchemy

        url = sqlalchemy.make_url(self.url)
        return str(url.difference_update_query(url.query).render_as_string(hide_password=True))

    @property
    def file(self) -> Path | None:
        """SQLite's file; None for a server."""
        import sqlalchemy

        url = sqlalchemy.make_url(self.url)
        return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def choose_place(storage: str | None, folder: Path) -> Place:
    """The database that `--storage` names; by default a file in the sweep's folder."""
    optuna_module()
    import sqlalchemy

    if storage is None:
        # Built by SQLAlchemy, because a ? or % in a folder's name has a meaning in URLs.
        return Place(sqlalchemy.URL.create("sqlite", database=str(folder / "sweep.db")).render_as_string(), folder)
    remedy = "write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
    try:
        url = sqlalchemy.make_url(storage)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise SweepError(f"--storage is not the URL of a database; {remedy}") from None
    if url.drivername in {"postgresql", "postgres"}:
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise SweepError(f"--storage: {url.drivername!r} is not a database that sweeps can use; {remedy}")
    if "@" in (url.host or ""):  # else half of the password would be read as part of the host, and shown
        raise SweepError("--storage: an @ in a password must be written as %40 (or keep the password in ~/.pgpass)")
    if url.drivername == "sqlite" and url.database in {None, "", ":memory:"}:
        raise SweepError("--storage: a database in memory would end with this process; name a file, sqlite:///FILE")
    return Place(url.render_as_string(hide_password=False), folder)


@contextmanager
def clear_storage_errors(place: Place) -> Iterator[None]:
    """Turn a database's errors into one line, without its password."""
    optuna = optuna_module()
    import sqlalchemy

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        text = str(getattr(cause, "orig", None) or cause or error).strip().split("\n")[0]
        raise SweepError(f"the database {place.shown} does not work as it should: {text[:300]}") from error
    except ImportError as error:
        if "psycopg" not in str(error):
            raise  # of a package that a trial needs
        raise SweepError(
            "PostgreSQL needs psycopg: pip install 'generalist-at[sweep]' (or use SQLite: leave --storage out)"
        ) from None


class Lock:
    """Admits one worker at a time, across all machines that share the database."""

    def __init__(self, place: Place) -> None:
        import sqlalchemy
        from sqlalchemy.pool import NullPool

        self.place = place
        self._engine = None if place.file else sqlalchemy.create_engine(place.url, poolclass=NullPool)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._file() if self.place.file is not None else self._server():
            yield

    @contextmanager
    def _file(self) -> Iterator[None]:
        path = Path(f"{self.place.file}.lock")
        with clear_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("a")  # append, as a file of that name may belong to somebody else
        with stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _server(self) -> Iterator[None]:
        from sqlalchemy import text

        assert self._engine is not None, "a server has an engine"
        key = int.from_bytes(hashlib.sha256(b"generalist sweep").digest()[:8], "big", signed=True)
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"set lock_timeout = '{_LOCK_WAIT}'"))
            # A machine that vanished must not hold the lock for hours, until TCP gives up.
            connection.execute(text("set tcp_keepalives_idle = 30"))
            connection.execute(text("set tcp_keepalives_interval = 10"))
            connection.execute(text("set tcp_keepalives_count = 3"))
            connection.execute(text("select pg_advisory_lock(:key)"), {"key": key})
            yield


@dataclass(frozen=True)
class Shared:
    """An open sweep: its study in the database, and its lock."""

    sweep: Sweep
    place: Place
    study: Study
    storage: RDBStorage
    lock: Lock


def open_shared(sweep: Sweep, place: Place, *, create: bool = True) -> Shared:
    """The sweep's study, which is created if it does not exist yet and `create` is set."""
    optuna = optuna_module()
    if place.file is not None:
        _check_file(place.file, create=create)
    if place.file is not None and create:
        with clear_write_errors(place.file):
            place.file.parent.mkdir(parents=True, exist_ok=True)
    with clear_storage_errors(place):
        lock = Lock(place)
        with lock():  # two workers that create the tables at once would get in each other's way
            try:
                storage = optuna.storages.RDBStorage(
                    place.url,
                    engine_kwargs={"connect_args": {"timeout": 60}} if place.file else {"pool_pre_ping": True},
                    heartbeat_interval=sweep.options.heartbeat,
                    grace_period=MISSES * sweep.options.heartbeat,
                )
            except RuntimeError as error:  # tables of another version of Optuna
                raise SweepError(f"the database {place.shown}: {' '.join(str(error).split())}") from error
            return Shared(sweep, place, _study(sweep, storage, create=create), storage, lock)


def _check_file(file: Path, *, create: bool) -> None:
    """Refuse a database of another program, in which Optuna would create its tables; if nothing may be created, refuse
    any that lacks those tables."""
    tables = set[str]()
    if file.is_file():
        try:
            with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=60)) as connection:
                tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        except sqlite3.Error as error:
            raise SweepError(f"{file} cannot be read as a database: {error}") from None
    if not create and "studies" not in tables:
        raise SweepError(f"there is no sweep in {file} yet: start it first")
    if tables and not tables & _OPTUNAS:
        raise SweepError(f"{file} is a database of another program: choose another file for --storage")


def _study(sweep: Sweep, storage: RDBStorage, *, create: bool) -> Study:
    optuna = optuna_module()
    directions = [objective.direction for objective in sweep.options.objectives]
    if sweep.name not in optuna.study.get_all_study_names(storage):
        if not create:
            raise SweepError(f"the database has no sweep {sweep.name!r} yet: start it first")
        study: Study = optuna.create_study(study_name=sweep.name, storage=storage, directions=directions)
        study.set_user_attr("sweep", sweep.fingerprint())
        return study
    study = cast("Study", optuna.load_study(study_name=sweep.name, storage=storage))
    before = study.user_attrs.get("sweep")
    same = [direction.name.lower() for direction in study.directions] == directions
    if before is None and same and not study.get_trials(deepcopy=False):
        study.set_user_attr("sweep", sweep.fingerprint())  # its creator was stopped before it could do so
    elif before != sweep.fingerprint():
        raise SweepError(
            f"the database has another sweep of the name {sweep.name!r} (only `trials`, `heartbeat` and `source` may "
            "change): give this one another `name`, or another --out or --storage"
        )
    return study
