"""A PostgreSQL server of the tests' own, in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEBIAN = Path("/usr/lib/postgresql")  # Debian keeps the server's programs here, by version, and not on the path


def find_program(name: str) -> Path | None:
    found = shutil.which(name)
    versions = sorted(DEBIAN.glob(f"*/bin/{name}"))
    return Path(found) if found else (versions[-1] if versions else None)


def _as_other_user() -> tuple[list[str], int]:
    """What to put before a command: the server refuses to run as root."""
    if os.geteuid() != 0:
        return [], os.geteuid()
    if shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no setpriv to become another user")
    names = {user.pw_name for user in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"], user.pw_uid


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh server's database; skips where PostgreSQL is not installed."""
    initdb, server = find_program("initdb"), find_program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    prefix, owner = _as_other_user()
    folder = Path(tempfile.mkdtemp(prefix="generalist-pg-"))  # not pytest's own: others may not enter that
    os.chown(folder, owner, -1)
    data = folder / "data"
    try:
        command = [str(initdb), "-D", str(data), "-U", "tests", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run([*prefix, *command], check=True, capture_output=True, cwd=folder, timeout=120)
        options = ["-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        process = subprocess.Popen(
            [*prefix, str(server), *options], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            url = f"postgresql://tests@/postgres?host={folder}"
            _wait_for(url)
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # SIGTERM would wait for every open connection
            process.wait(timeout=60)
    finally:
        shutil.rmtree(folder)


def _wait_for(url: str) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.1)
        else:
            return
