"""CIFAR-10 from its official address: fetched with resume, checked, and unpacked whole or not at all.

While it is fetched, the archive lies in the folder as `NAME.part`, with `NAME.part.json` beside it: the address, the
server's validator (ETag or Last-Modified) and the length. A later call asks for the rest alone, with `Range` and
`If-Range` (RFC 9110, 13.1.5 and 14.2). Nothing is unpacked before its SHA-256 is right, and then into a folder beside
the target, which is renamed into place.

The standard library's urllib is enough for one GET with two headers, and keeps the package's dependencies as they are.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import filelock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from .data_cifar10 import RECORD_BYTES, RECORDS, TEST_FILE, TRAIN_FILES

__all__ = ["CIFAR10_SHA256", "CIFAR10_URL", "DownloadError", "download_cifar10", "download_with_progress"]

# The page gives the MD5, c32a1d4ab5d03f1284b67883e8d87530; MD5 is no protection, so this is the SHA-256 of that file,
# of 170,052,171 bytes.
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

ARCHIVE = "cifar-10-binary.tar.gz"
TARGET = "cifar-10-batches-bin"
TEXTS = ("batches.meta.txt", "readme.html")
TEXT_BYTES = 1 << 20  # far above the few bytes they have
CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds to connect, and between two arrivals of bytes
DELAYS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try

ProgressCallback = Callable[[int, "int | None"], None]
Notify = Callable[[str], None]


class DownloadError(OSError):
    """The data could not be fetched, checked or unpacked; the text says what the user can do."""


class _Interrupted(Exception):
    """This try failed in a way that another one may not."""


class _RangeRefused(Exception):
    """416: there is nothing from that byte on, of a file of `total` bytes."""

    def __init__(self, total: int | None) -> None:
        self.total = total


def download_cifar10(
    folder: str | os.PathLike[str],
    *,
    url: str = CIFAR10_URL,
    sha256: str = CIFAR10_SHA256,
    records: int = RECORDS,
    progress: ProgressCallback | None = None,
    notify: Notify | None = None,
) -> Path:
    """Fetch, check and unpack the binary version of CIFAR-10 into `folder/cifar-10-batches-bin`.

    Where `folder`, or that folder in it, holds the six files in their right sizes, nothing is fetched. An archive
    `folder/cifar-10-binary.tar.gz` with the right checksum is unpacked in place of fetching one, and is kept.

    Args:
        folder: made if it is not there; after a failure it holds what it held, and perhaps the unfinished archive,
            from which the next call goes on.
        url: https, or http where the caller says so; https is never redirected to http.
        sha256: of the archive, 64 hex digits.
        records: records a file, 10,000 in the official data.
        progress: called with the bytes there are and the bytes in all, None where the server does not say.
        notify: called with a line of text where there is something to tell.

    Returns the folder of the six files, for :func:`load_cifar10`. Raises `ValueError` for another kind of address or
    a malformed checksum, `DownloadError`, an `OSError`, for all else: no connection after five tries, a refusing
    server, another checksum than expected, an archive of other files, no space on the disk, no permission.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
    ...         _ = (Path(folder) / name).write_bytes(bytes(3073))
    ...     download_cifar10(folder, records=1) == Path(folder)  # they are there: nothing is fetched
    True
    """
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"url must be an https (or http) address, found {url!r}")
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ValueError(f"sha256 must be 64 hex digits, found {sha256!r}")
    progress, notify = progress or (lambda done, total: None), notify or (lambda text: None)
    folder = Path(folder)
    try:
        if (found := _find(folder, records)) is not None:
            notify(f"CIFAR-10 is in {found} already.")
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{ARCHIVE}.lock", notify):
            return _find(folder, records) or _obtain(folder, url, sha256.lower(), records, progress, notify)
    except DownloadError:
        raise
    except OSError as error:
        raise _readable(error, folder) from error


def download_with_progress(
    console: Console,
    folder: str | os.PathLike[str],
    *,
    url: str = CIFAR10_URL,
    sha256: str = CIFAR10_SHA256,
    records: int = RECORDS,
) -> Path:
    """:func:`download_cifar10` with a bar on a terminal, and elsewhere a line every tenth."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        tenth = -1

        def count(done: int, total: int | None) -> None:
            nonlocal tenth
            now = 10 * done // total if total else done // 10_000_000
            if now != tenth:
                tenth = now
                say(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB" if total else f"{done / 1e6:,.1f} MB")

        return download_cifar10(folder, url=url, sha256=sha256, records=records, progress=count, notify=say)

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:

        def move(done: int, total: int | None) -> None:
            # the task starts where the transfer starts: what was there before is no part of its speed
            if bar.task_ids:
                bar.update(bar.task_ids[0], completed=done, total=total)
            else:
                bar.add_task("", completed=done, total=total)

        return download_cifar10(folder, url=url, sha256=sha256, records=records, progress=move, notify=say)


def _find(folder: Path, records: int) -> Path | None:
    for root in (folder / TARGET, folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if all((root / name).stat().st_size == records * RECORD_BYTES for name in (*TRAIN_FILES, TEST_FILE)):
                return root
    return None


@contextlib.contextmanager
def _alone(path: Path, notify: Notify) -> Iterator[None]:
    """One process at a time; a second one waits, and then finds the data."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        notify(f"Another process fetches CIFAR-10 into {path.parent}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _obtain(folder: Path, url: str, sha256: str, records: int, progress: ProgressCallback, notify: Notify) -> Path:
    target = folder / TARGET
    # A folder that holds something cannot be renamed over, and clearing it first would lose it to a kill in between.
    # Batches lying in `folder` itself the loader would take in place of the new ones.
    in_the_way = os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir()))
    for place, wrong in ((target, in_the_way), (folder / TEST_FILE, (folder / TEST_FILE).exists())):
        if wrong:
            raise DownloadError(
                f"{place} is there, but not all six files of CIFAR-10 in their sizes; move it away or delete it, and "
                "run the same command again"
            )
    archive, part = folder / ARCHIVE, _Part(folder / f"{ARCHIVE}.part", url)
    if archive.is_file() and _sha256(archive) == sha256:
        notify(f"Unpacking {archive}.")
        _unpack(archive, target, records)
        return target
    _fetch(part, progress, notify)
    notify("Checking and unpacking.")
    if (found := _sha256(part.path)) != sha256:
        part.discard()
        raise DownloadError(
            f"{url}: the checksum is wrong and the file was deleted: expected SHA-256 {sha256}, found {found}; run the "
            "same command again, and if it stays wrong, the server's file is another one"
        )
    try:
        _unpack(part.path, target, records)
    except _UnfitArchive:
        part.discard()
        raise
    part.discard()
    return target


def _readable(error: OSError, folder: Path) -> DownloadError:
    place = f" ({error.filename})" if error.filename else ""
    readable = DownloadError(
        f"cannot put CIFAR-10 into {folder}: {error.strerror or error}{place}; what was fetched so far is kept, and "
        "the same command goes on from there"
    )
    readable.errno = error.errno
    return readable


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Fetching -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """Which file a part is of."""

    url: str
    validator: str | None
    total: int | None


class _Part:
    """`NAME.part`, and `NAME.part.json` that says what it is a part of."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self._notes = path.with_name(f"{path.name}.json")

    def state(self) -> tuple[int, _Origin]:
        """How many bytes there are to go on from, and of what."""
        nothing = 0, _Origin(self.url, None, None)
        try:
            done, notes = self.path.stat().st_size, json.loads(self._notes.read_bytes())
            origin = _Origin(**notes)
        except (FileNotFoundError, ValueError, TypeError):
            return nothing
        whole = origin.total is not None and done == origin.total
        # without a validator nobody can say whether the rest would be the rest of the same file
        return (done, origin) if origin.url == self.url and (whole or origin.validator) else nothing

    def describe(self, origin: _Origin) -> None:
        new = self._notes.with_name(f"{self._notes.name}.new")
        new.write_text(json.dumps(asdict(origin)))
        os.replace(new, self._notes)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)


def _fetch(part: _Part, progress: ProgressCallback, notify: Notify) -> None:
    """Until the part is whole."""
    opener = urllib.request.build_opener(_Redirects)
    for delay in (*DELAYS, None):
        try:
            return _try_once(opener, part, progress, notify)
        except _Interrupted as error:
            if delay is None:
                done, _ = part.state()
                kept = f"{done:,} bytes are kept, and the same command goes on from there"
                raise DownloadError(
                    f"{part.url}: {error}; gave up after {len(DELAYS) + 1} tries. "
                    + (kept if done else "Run the same command again later")
                ) from error
            notify(f"{error}; trying again in {delay:g} s.")
            time.sleep(delay)


def _try_once(opener: urllib.request.OpenerDirector, part: _Part, progress: ProgressCallback, notify: Notify) -> None:
    done, origin = part.state()
    if done and done == origin.total:
        return
    headers = {"User-Agent": "geodescent", "Accept-Encoding": "identity"}
    if done and origin.validator:
        headers |= {"Range": f"bytes={done}-", "If-Range": origin.validator}
    try:
        response = _open(opener, urllib.request.Request(part.url, headers=headers))
    except _RangeRefused as error:
        if done and done == error.total:
            return  # the length had not been told before: there is nothing left to ask for
        part.discard()
        raise _Interrupted(f"the server's file ends before the {done:,} bytes there are, which are given up") from None
    with response:
        if response.status == HTTPStatus.OK:
            # the whole file: there was no part, or the file is another one now, or the server knows no ranges
            done, origin = 0, _Origin(part.url, _validator(response.headers), response.length)
        elif response.status == HTTPStatus.PARTIAL_CONTENT and done:
            origin = _continued(response.headers, done, origin)
            if origin is None:
                part.discard()
                raise _Interrupted(f"the server's answer does not go on from the {done:,} bytes, which are given up")
        else:
            raise DownloadError(f"{part.url}: the server answers {response.status} {_said(response.reason)}")
        notify(f"Going on from {done:,} bytes of {part.url}." if done else f"Fetching {part.url}.")
        _receive(response, part, done, origin, progress)


def _receive(
    response: http.client.HTTPResponse, part: _Part, done: int, origin: _Origin, progress: ProgressCallback
) -> None:
    end = None if response.length is None else done + response.length
    # bytes of another file go before their description does: a kill between the two leaves an empty part
    with open(part.path, "ab" if done else "wb") as file:
        part.describe(origin)
        progress(done, origin.total)
        while end is None or done < end:
            chunk = _read(response)
            if not chunk:
                break
            file.write(chunk)
            file.flush()
            done += len(chunk)
            progress(done, origin.total)
    whole = end if origin.total is None else origin.total
    if whole is not None and done < whole:
        raise _Interrupted(f"the connection broke off after {done:,} of {whole:,} bytes")


def _continued(headers: http.client.HTTPMessage, done: int, origin: _Origin) -> _Origin | None:
    """What is being fetched if a 206 goes on with it; None if it is another part or another file, as from a server
    that does not know If-Range."""
    first, total = _content_range(headers.get("Content-Range"))
    same_file = _validator(headers) in (None, origin.validator)
    same_length = total is None or origin.total in (None, total)
    if first != done or not same_file or not same_length:
        return None
    return _Origin(origin.url, origin.validator, origin.total if total is None else total)


def _open(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> http.client.HTTPResponse:
    url = request.full_url
    try:
        return opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and request.has_header("Range"):
                raise _RangeRefused(_content_range(error.headers.get("Content-Range"))[1]) from None
            text = f"the server answers {error.code} {_said(error.reason)}"
            if error.code >= 500 or error.code in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS):
                raise _Interrupted(text) from None
            raise DownloadError(f"{url}: {text}") from None
    except DownloadError:
        raise
    except http.client.InvalidURL as error:
        raise ValueError(f"url {url!r}: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{url}: the server's certificate is not trusted: {reason.verify_message}") from error
        raise _Interrupted(f"no answer from {urlsplit(url).hostname}: {_said(reason)}") from error


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)  # what has arrived: nothing of it is lost if the next bytes never come
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(f"the connection broke off: {_said(error)}") from error


def _said(reason: object) -> str:
    """In one line: part of it may come from the server."""
    text = (isinstance(reason, OSError) and reason.strerror) or str(reason) or type(reason).__name__
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _validator(headers: http.client.HTTPMessage) -> str | None:
    """A strong ETag, else the date: a weak ETag must not be used in If-Range."""
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def _content_range(value: str | None) -> tuple[int | None, int | None]:
    """First byte and length of `bytes 5-9/10`, `bytes */10` or `bytes 5-9/*`."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", value or "", re.ASCII | re.IGNORECASE)
    first, total = match.groups() if match else (None, None)
    return (first if first is None else int(first)), (total if total is None else int(total))


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            fp.close()
            raise DownloadError(f"{req.full_url}: refused to follow the server's redirection to {_said(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# --- Unpacking ----------------------------------------------------------------------------------------------------


class _UnfitArchive(DownloadError):
    """The archive has the right checksum, and is still not what is expected here."""


def _unpack(archive: Path, target: Path, records: int) -> None:
    """All of the archive at `target`, or nothing."""
    staging = target.with_name(f".{target.name}.unpacking")
    if os.path.lexists(staging):
        shutil.rmtree(staging)  # left by a process that was killed
    staging.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            _extract(tar, staging, records)
        if target.is_dir():
            target.rmdir()  # an empty one, or this fails
        os.rename(staging / TARGET, target)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _UnfitArchive(f"the archive is damaged, or not a .tar.gz: {error}; nothing was unpacked") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extract(tar: tarfile.TarFile, staging: Path, records: int) -> None:
    """The expected files, each once and in its size; the first thing that is anything else is refused."""
    batches = {f"{TARGET}/{name}" for name in (*TRAIN_FILES, TEST_FILE)}
    left = batches | {f"{TARGET}/{name}" for name in TEXTS}
    for member in tar:
        if member.name == TARGET and member.isdir():
            continue
        size = records * RECORD_BYTES
        right = member.size == size if member.name in batches else member.size <= TEXT_BYTES
        if member.name not in left or not member.isreg() or not right:
            raise _UnfitArchive(
                f"the archive holds {member.name!r} of {member.size:,} bytes (type {member.type!r}), expected only "
                f"{TARGET}/ with {', '.join((*TRAIN_FILES, TEST_FILE))}, regular files of {size:,} bytes, and "
                f"{' and '.join(TEXTS)}, each once; nothing was unpacked"
            )
        left.remove(member.name)
        _extract_one(tar, member, staging)
        with open(staging / member.name, "r+b") as file:
            os.fsync(file.fileno())
    if missing := sorted(batches & left):
        raise _UnfitArchive(f"the archive lacks {', '.join(missing)}; nothing was unpacked")


def _extract_one(tar: tarfile.TarFile, member: tarfile.TarInfo, staging: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, staging, filter="data")
        return
    # Python before 3.11.4: of the member, whose name was checked, nothing is taken but the bytes
    path = staging / member.name
    path.parent.mkdir(exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None  # a regular file has content
    with source, open(path, "xb") as file:
        shutil.copyfileobj(source, file)
    if path.stat().st_size != member.size:
        raise tarfile.ReadError("unexpected end of data")
