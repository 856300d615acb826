"""A small fake of S3's HTTP interface, with the objects in this process's memory.

An object appears as a whole: the parts of an upload are invisible until it is completed. The fake
records requests and refuses the ones that a test selects.
"""

import hashlib
import itertools
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import obstore.fsspec

BUCKET = "bucket"
_DATE = "Tue, 01 Jan 2030 00:00:00 GMT"


@dataclass(frozen=True)
class Request:
    """A request that the fake received."""

    method: str
    key: str
    start: int = 0  # of a range
    stop: int = 0


@dataclass
class FakeS3:
    """One bucket."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)  # not completed
    requests: list[Request] = field(default_factory=list)
    refuses: Callable[[Request], bool] = lambda _request: False
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def names(self, prefix: str) -> list[str]:
        """The names of the objects under ``prefix``, without it."""
        found = [key for key in sorted(self.objects) if key.startswith(prefix)]
        return [key.removeprefix(prefix) for key in found]

    def digests(self, prefix: str) -> dict[str, str]:
        """The sha256 of every object, as `training.digests` returns it for files."""
        return {
            name: hashlib.sha256(self.objects[prefix + name]).hexdigest()
            for name in self.names(prefix)
        }

    def read(self, suffix: str) -> list[tuple[int, int]]:
        """The ranges that were read of objects whose names end with ``suffix``."""
        return [(x.start, x.stop) for x in self.requests if x.stop and x.key.endswith(suffix)]


@contextmanager
def serving() -> Iterator[FakeS3]:
    """A running fake, which other processes use through `reach`."""
    fake = FakeS3()

    class Handler(_Handler):
        s3 = fake

    with _Server(("127.0.0.1", 0), Handler) as server:
        fake.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
        thread.start()
        with reach(fake.endpoint):
            yield fake
        server.shutdown()
        thread.join()


@contextmanager
def reach(endpoint: str) -> Iterator[None]:
    """Resolve s3:// URLs to ``endpoint`` in this process."""
    options = {
        "endpoint": endpoint,
        "access_key_id": "somebody",
        "secret_access_key": "secret",
        "region": "nowhere",
        # The server may stand still for longer than the 5 s that a connection may take by default.
        "client_options": {"allow_http": True, "connect_timeout": "60s", "timeout": "120s"},
        "retry_config": {"max_retries": 0},
    }
    registered, configured = "fsspec.registry._registry", "fsspec.config.conf"
    with mock.patch.dict(registered), mock.patch.dict(configured, {"s3": options}):
        obstore.fsspec.register("s3")
        yield


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # connections of several ranks at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    s3: FakeS3

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        content = self.s3.objects.get(self._key)
        if not self._key:
            self._list()
        elif content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif "Range" in self.headers:
            start, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            stop = min(len(content), int(last or len(content)) + 1)
            span = f"bytes {start}-{stop - 1}/{len(content)}"
            self._note(int(start), stop)
            self._answer(206, content[int(start) : stop], {"Content-Range": span})
        else:
            self._note(0, len(content))
            self._answer(200, content)

    def do_HEAD(self) -> None:
        content = self.s3.objects.get(self._key)
        self._answer(200 if content is not None else 404, content or b"")

    def do_PUT(self) -> None:
        content = self._body()
        if self._refused():
            return
        if "uploadId" in self._query:
            self.s3.uploads[self._query["uploadId"]][int(self._query["partNumber"])] = content
        else:
            self.s3.objects[self._key] = content
        self._answer(200)

    def do_POST(self) -> None:
        content = self._body()
        if self._refused():
            return
        if "uploads" in self._query:
            number = f"upload-{next(self.s3.numbers)}"
            self.s3.uploads[number] = {}
            self._answer(200, _xml("InitiateMultipartUploadResult", UploadId=number))
        elif "uploadId" in self._query:
            parts = self.s3.uploads.pop(self._query["uploadId"])
            self.s3.objects[self._key] = b"".join(parts[number] for number in sorted(parts))
            self._answer(200, _xml("CompleteMultipartUploadResult", ETag="x"))
        else:
            assert "delete" in self._query
            keys = [x.text or "" for x in ET.fromstring(content).iter() if x.tag.endswith("Key")]
            for key in keys:
                self.s3.objects.pop(key, None)
            gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        if self._refused():
            return
        if "uploadId" in self._query:
            self.s3.uploads.pop(self._query["uploadId"], None)
        else:
            self.s3.objects.pop(self._key, None)
        self._answer(204)

    def _list(self) -> None:
        prefix, delimiter = (self._query.get(key, "") for key in ("prefix", "delimiter"))
        rows, folders = [], set()
        for key, content in sorted(self.s3.objects.items()):
            if not key.startswith(prefix):
                continue
            first, is_deeper, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if is_deeper:
                folders.add(prefix + first + delimiter)
            else:
                date = "2030-01-01T00:00:00.000Z"
                entry = _xml("Contents", Key=key, Size=len(content), LastModified=date, ETag="x")
                rows.append(entry)
        rows += [_xml("CommonPrefixes", Prefix=folder) for folder in sorted(folders)]
        head = b"<IsTruncated>false</IsTruncated>"
        self._answer(200, b"<ListBucketResult>" + head + b"".join(rows) + b"</ListBucketResult>")

    def _refused(self) -> bool:
        request = Request(self.command, self._key)
        self.s3.requests.append(request)
        if self.s3.refuses(request):
            self._answer(403, b"<Error><Code>QuotaExceeded</Code><Message>full</Message></Error>")
            return True
        return False

    def _note(self, start: int, stop: int) -> None:
        self.s3.requests.append(Request("GET", self._key, start, stop))

    @property
    def _key(self) -> str:
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        bucket, _, key = path.partition("/")
        return key if bucket == BUCKET else f"{path}: no such bucket"

    @property
    def _query(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return {key: values[0] for key, values in found.items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        for key, value in {"ETag": '"x"', "Last-Modified": _DATE}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _xml(tag: str, **fields: object) -> bytes:
    inside = "".join(f"<{key}>{escape(str(value))}</{key}>" for key, value in fields.items())
    return f"<{tag}>{inside}</{tag}>".encode()
