"""Files that are either complete or absent: atomic writes, checksums, clear errors for a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from generalist.core.errors import DataError, RunError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def clear_write_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into one clear line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = _of_the_system(error)
        if reason is None:
            raise
        if reason.errno in _NO_SPACE:
            raise RunError(
                f"no space left to write {path}: free some and start again (train and evaluate go on with --resume); "
                "earlier files are intact"
            ) from error
        raise RunError(f"cannot write {path}: {reason.strerror or reason}") from error


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The system's error behind this one. PyTorch, for example, closes its file after that and raises its own error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


@contextlib.contextmanager
def clear_read_errors(path: Path) -> Iterator[None]:
    """Turn a failure to read a directory or file into one clear line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}; fix that first") from error


def try_lock(stream: IO[Any], path: Path) -> bool:
    """Lock an open file until this process ends; returns False if another process holds the lock."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{path} cannot be locked ({error.strerror}): its file system could not keep two processes apart; "
            "choose another --out"
        ) from error
    return True


def atomic_write(path: Path, write: Callable[[BinaryIO], None]) -> str:
    """Write, fsync, rename. Returns the SHA-256 of what was written. On failure the old file is untouched."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w+b") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
                stream.seek(0)
                digest = _digest(stream)
            rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return digest


def check_target(path: Path, suffix: str) -> None:
    """Check, before anything is run for it, that a file can be written there and replaces no file of another kind."""
    if path.is_dir():
        raise RunError(f"{path} is a directory: name a file, as in {path / f'name{suffix}'}")
    if path.exists() and path.suffix.lower() != suffix:
        raise RunError(f"{path} already exists and is not a {suffix} file: choose another name")
    check_folder(path.parent)


def check_folder(path: Path) -> None:
    """Check, before anything is run for it, that files can be written to this folder; it is made if needed."""
    with clear_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let only one process at a time in, by a lock on a file or directory; if it cannot be locked, let all in."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def rename(source: Path, target: Path) -> None:
    """Move a file over another one, so that a power cut leaves either the old or the new one."""
    source.replace(target)
    _sync_directory(target.parent)


def write_bytes(path: Path, data: bytes) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(data)

    atomic_write(path, write)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return _digest(stream)


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _sync_directory(path: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
