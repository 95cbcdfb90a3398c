"""Against a real HTTP server on this machine, and real processes that are killed."""

import contextlib
import errno
import gzip
import hashlib
import http.server
import io
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import dataclass, field
from io import StringIO

import pytest
from geodescent.experiments import download
from geodescent.experiments.data_cifar10 import TEST_FILE, TRAIN_FILES, load_cifar10
from geodescent.experiments.download import (
    CIFAR10_SHA256,
    CIFAR10_URL,
    DownloadError,
    download_cifar10,
    download_with_progress,
)
from rich.console import Console

RECORDS = 20
TOP = "cifar-10-batches-bin"
PART = "cifar-10-binary.tar.gz.part"


@dataclass
class Site:
    """What the server does, and what it was asked."""

    content: bytes
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: bool = True
    if_range: bool = True  # whether it looks at If-Range
    length: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes after which each next answer breaks off
    statuses: list[int] = field(default_factory=list)  # of the next answers, in place of content
    location: str | None = None
    chunked: bool = False
    shift: int = 0  # bytes by which a range begins too late
    pause: threading.Event | None = None  # waited for at the cut, in place of breaking off
    requests: list[dict[str, str]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    url: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def asked(self) -> list[str | None]:
        return [headers.get("range") for headers in self.requests]


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        pass

    def do_GET(self):
        site: Site = self.server.site  # type: ignore[attr-defined]
        site.requests.append({name.lower(): value for name, value in self.headers.items()})
        if site.statuses:
            status = site.statuses.pop(0)
            self.send_response(status)
            if site.location:
                self.send_header("Location", site.location)
            self.end_headers()
            return
        begin, total = 0, len(site.content)
        given = self.headers.get("Range")
        valid = not site.if_range or self.headers.get("If-Range") in (None, site.etag or site.modified)
        if site.ranges and given and valid:
            begin = int(given.removeprefix("bytes=").removesuffix("-")) + site.shift
            if begin >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{total - 1}/{total}")
        else:
            self.send_response(200)
        for name, value in (("ETag", site.etag), ("Last-Modified", site.modified)):
            if value:
                self.send_header(name, value)
        if site.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif site.length:
            self.send_header("Content-Length", str(total - begin))
        self.end_headers()
        body = site.content[begin:]
        stop = site.cuts.pop(0) if site.cuts else len(body)
        with contextlib.suppress(ConnectionError):
            if site.chunked:  # one chunk, and the empty one at the end
                self.wfile.write(
                    b"%x\r\n%s" % (len(body), body[:stop]) + (b"\r\n0\r\n\r\n" if stop == len(body) else b"")
                )
            else:
                self.wfile.write(body[:stop])
            site.sent.append(len(body[:stop]))
            if stop < len(body) and site.pause:
                site.pause.wait(60)


@pytest.fixture
def serve():
    servers, sites = [], []

    def start(content, context=None, **behaviour):
        site = Site(content, **behaviour)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.site = site  # type: ignore[attr-defined]
        site.url = f"http{'s' if context else ''}://localhost:{server.server_port}/~kriz/cifar-10-binary.tar.gz"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        sites.append(site)
        return site

    yield start
    for site in sites:
        if site.pause:
            site.pause.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _quick_and_direct(monkeypatch):
    monkeypatch.setattr(download, "DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setenv("no_proxy", "*")


def pack(files, extra=(), mode=0o644):
    """A .tar.gz of the files under the top folder, and of further members as they are."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        top = tarfile.TarInfo(TOP)
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(top)
        for name, content in files.items():
            member = tarfile.TarInfo(f"{TOP}/{name}")
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


@pytest.fixture
def files(tmp_path, write_cifar):
    raw = write_cifar(tmp_path / "made", RECORDS)
    shutil.rmtree(tmp_path / "made")
    return {name: content.tobytes() for name, content in raw.items()} | {
        "batches.meta.txt": b"airplane\n",
        "readme.html": b"<html>",
    }


@pytest.fixture
def archive(files):
    return pack(files)


def fetch(site, folder, **changes):
    return download_cifar10(folder, **({"url": site.url, "sha256": site.sha256, "records": RECORDS} | changes))


def listing(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.name.endswith(".lock")
    }


def is_whole(folder, files):
    return listing(folder) == {TOP: None} | {f"{TOP}/{name}": content for name, content in files.items()}


# --- It works -----------------------------------------------------------------------------------------------------


def test_the_official_address_and_checksum():
    """The address from the page of CIFAR-10; the checksum as the Ruby torchvision and MLDatasets.jl have it."""
    assert CIFAR10_URL == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert CIFAR10_SHA256 == "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"


def test_the_files_are_fetched_load_and_nothing_else_is_left(serve, archive, files, tmp_path):
    site, seen = serve(archive), []
    found = fetch(site, tmp_path / "new" / "folder", progress=lambda done, total: seen.append((done, total)))
    assert found == tmp_path / "new" / "folder" / TOP
    assert is_whole(tmp_path / "new" / "folder", files)
    assert load_cifar10(found, 50, 30, seed=0, records=RECORDS).test[1].tolist() == [*range(10)] * 2
    assert [seen[0], seen[-1]] == [(0, len(archive)), (len(archive), len(archive))]
    assert seen == sorted(seen)


@pytest.fixture(params=["filter", "no filter"])
def either_tarfile(request, monkeypatch):
    """The filters are missing from Python 3.11.0 to 3.11.3, which Debian 12 has."""
    if request.param == "no filter":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has none")


@pytest.mark.usefixtures("either_tarfile")
def test_modes_of_the_archive_are_not_trusted(serve, files, tmp_path):
    """No bit that runs the file as its owner, and nobody else may write it."""
    found = fetch(serve(pack(files, mode=0o6777)), tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o7022 for path in found.iterdir()} == {0}
    assert is_whole(tmp_path, files)


@pytest.mark.parametrize("where", ["", TOP])
def test_what_is_there_is_not_fetched_again(serve, archive, write_cifar, tmp_path, where):
    site = serve(archive)
    write_cifar(tmp_path / where, RECORDS)
    before = listing(tmp_path)
    assert fetch(site, tmp_path) == tmp_path / where
    assert site.requests == []
    assert listing(tmp_path) == before


def test_an_archive_in_the_folder_is_unpacked_and_kept(serve, archive, files, tmp_path):
    site = serve(archive)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive)
    fetch(site, tmp_path)
    assert site.requests == []
    assert listing(tmp_path).pop("cifar-10-binary.tar.gz") == archive
    assert listing(tmp_path / TOP) == files


def test_a_damaged_archive_in_the_folder_is_left_and_not_used(serve, archive, files, tmp_path):
    site = serve(archive)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive[:-1])
    fetch(site, tmp_path)
    assert len(site.requests) == 1
    assert (tmp_path / "cifar-10-binary.tar.gz").read_bytes() == archive[:-1]
    assert listing(tmp_path / TOP) == files


def test_a_server_without_a_length(serve, archive, files, tmp_path):
    site, seen = serve(archive, length=False), []
    fetch(site, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert is_whole(tmp_path, files)
    assert seen[-1] == (len(archive), None)


def test_redirection_keeps_what_is_asked(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[1000])
    first = serve(b"", location=site.url, statuses=[302, 302])
    fetch(first, tmp_path, sha256=site.sha256)
    assert is_whole(tmp_path, files)
    assert site.asked == [None, "bytes=1000-"]


def test_a_server_that_sends_chunks(serve, archive, files, tmp_path):
    site = serve(archive, chunked=True, cuts=[1000])
    fetch(site, tmp_path)
    assert site.asked == [None, "bytes=1000-"]
    assert sum(site.sent) == len(archive)
    assert is_whole(tmp_path, files)


# --- Going on -----------------------------------------------------------------------------------------------------


def test_a_broken_connection_goes_on_where_it_stopped(serve, archive, files, tmp_path):
    site, told = serve(archive, cuts=[1000, 500]), []
    fetch(site, tmp_path, notify=told.append)
    assert is_whole(tmp_path, files)
    assert site.asked == [None, "bytes=1000-", "bytes=1500-"]
    assert [headers.get("if-range") for headers in site.requests] == [None, '"one"', '"one"']
    assert sum(site.sent) == len(archive)
    assert any("1,000 of" in text for text in told)


def test_a_line_that_keeps_breaking_is_an_error_and_the_next_call_goes_on(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[100, 100, 100, 100])
    with pytest.raises(DownloadError, match=r"broke off.* 400 bytes are kept, and the same command goes on") as raised:
        fetch(site, tmp_path)
    assert "\n" not in str(raised.value)
    assert (tmp_path / PART).read_bytes() == archive[:400]
    fetch(site, tmp_path)
    assert site.asked[-1] == "bytes=400-"
    assert sum(site.sent) == len(archive)
    assert is_whole(tmp_path, files)


def test_the_date_serves_where_there_is_no_strong_etag(serve, archive, files, tmp_path):
    date = "Thu, 04 Jun 2009 21:05:51 GMT"
    site = serve(archive, cuts=[700], etag=None, modified=date)
    fetch(site, tmp_path)
    assert site.requests[1]["if-range"] == date
    assert sum(site.sent) == len(archive)
    site = serve(archive, cuts=[700], etag='W/"weak"', modified=date, if_range=False, ranges=True)
    fetch(site, tmp_path / "other")
    assert site.requests[1]["if-range"] == date


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_validator_it_starts_afresh(serve, archive, files, tmp_path, etag):
    site = serve(archive, cuts=[700], etag=etag)
    fetch(site, tmp_path)
    assert site.asked == [None, None]
    assert is_whole(tmp_path, files)
    site.cuts = [700] * 4
    with pytest.raises(DownloadError, match="Run the same command again later"):  # it would not go on
        fetch(site, tmp_path / "other")


@pytest.mark.parametrize("if_range", [True, False], ids=["200", "206 of the new file"])
def test_a_changed_file_on_the_server_starts_afresh(serve, archive, files, tmp_path, if_range):
    site = serve(bytes(len(archive)), cuts=[1000, 0, 0, 0])
    with pytest.raises(DownloadError, match="broke off"):
        fetch(site, tmp_path)
    site.content, site.etag, site.if_range = archive, '"two"', if_range
    fetch(site, tmp_path)
    assert site.asked[4] == "bytes=1000-"
    assert site.requests[4]["if-range"] == '"one"'
    assert is_whole(tmp_path, files)


def test_a_range_that_begins_elsewhere_is_not_taken(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[1000], shift=7)
    fetch(site, tmp_path)
    assert site.asked == [None, "bytes=1000-", None]
    assert is_whole(tmp_path, files)


def test_the_part_of_another_address_is_not_gone_on_with(serve, archive, files, tmp_path):
    one, two = serve(bytes(len(archive)), cuts=[1000, 0, 0, 0]), serve(archive)
    with pytest.raises(DownloadError):
        fetch(one, tmp_path)
    fetch(two, tmp_path)
    assert two.asked == [None]
    assert is_whole(tmp_path, files)


def test_a_server_that_knows_no_ranges_starts_afresh(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[1000], ranges=False)
    fetch(site, tmp_path)
    assert site.asked == [None, "bytes=1000-"]
    assert site.sent == [1000, len(archive)]
    assert is_whole(tmp_path, files)


def test_416_where_the_part_is_longer_than_the_file(serve, archive, files, tmp_path):
    site = serve(archive + bytes(500), cuts=[len(archive) + 200, 0, 0, 0])
    with pytest.raises(DownloadError):
        fetch(site, tmp_path)
    site.content, site.if_range = archive, False
    fetch(site, tmp_path)
    assert site.asked[4:] == [f"bytes={len(archive) + 200}-", None]
    assert is_whole(tmp_path, files)


def test_416_where_the_part_is_the_whole_file(serve, archive, files, tmp_path):
    """Without a length nobody knows that it is whole, until the server says that nothing is left."""
    site = serve(archive, length=False)
    run_killed_at("_sha256", site, tmp_path)
    assert (tmp_path / PART).read_bytes() == archive
    fetch(site, tmp_path)
    assert site.asked == [None, f"bytes={len(archive)}-"]
    assert site.sent == [len(archive)]
    assert is_whole(tmp_path, files)


@pytest.mark.parametrize("notes", [None, b"", b"[1]", b'{"url": 1}', b"\xff"])
def test_a_part_of_unknown_origin_is_not_gone_on_with(serve, archive, files, tmp_path, notes):
    site = serve(archive)
    (tmp_path / PART).write_bytes(bytes(1000))
    if notes is not None:
        (tmp_path / f"{PART}.json").write_bytes(notes)
    fetch(site, tmp_path)
    assert site.asked == [None]
    assert is_whole(tmp_path, files)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_in_trouble_is_asked_again(serve, archive, files, tmp_path, status):
    site = serve(archive, statuses=[status, status])
    fetch(site, tmp_path)
    assert len(site.requests) == 3
    assert is_whole(tmp_path, files)


def test_the_waits_grow_and_end(serve, archive, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download, "DELAYS", (1.0, 2.0, 4.0))
    monkeypatch.setattr("time.sleep", waits.append)
    site = serve(archive, statuses=[503] * 9)
    with pytest.raises(DownloadError, match=r"503 .*gave up after 4 tries"):
        fetch(site, tmp_path)
    assert waits == [1.0, 2.0, 4.0]
    assert len(site.requests) == 4


# --- Errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [403, 404, 410, 204])
def test_a_refusal_is_an_error_at_once(serve, archive, tmp_path, status):
    site = serve(archive, statuses=[status])
    with pytest.raises(DownloadError, match=f"{site.url}: the server answers {status}"):
        fetch(site, tmp_path)
    assert len(site.requests) == 1
    assert listing(tmp_path) == {}


def test_416_to_a_request_for_everything_is_an_error(serve, archive, tmp_path):
    with pytest.raises(DownloadError, match="416"):
        fetch(serve(archive, statuses=[416]), tmp_path)


def test_a_later_refusal_keeps_the_part(serve, archive, tmp_path):
    site = serve(archive, cuts=[1000, 0, 0, 0])
    with pytest.raises(DownloadError):
        fetch(site, tmp_path)
    site.statuses = [404]
    with pytest.raises(DownloadError, match="404"):
        fetch(site, tmp_path)
    assert (tmp_path / PART).read_bytes() == archive[:1000]


def test_a_wrong_checksum_names_both_and_leaves_nothing(serve, archive, tmp_path):
    site = serve(archive)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DownloadError, match=f"expected SHA-256 {'0' * 64}, found {site.sha256}"):
        fetch(site, tmp_path, sha256="0" * 64)
    assert listing(tmp_path) == {"mine.txt": b"mine"}


def test_nobody_there(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://localhost:{free.getsockname()[1]}/x"
    with pytest.raises(DownloadError, match=r"no answer from localhost: .*refused; gave up after 4 tries"):
        download_cifar10(tmp_path, url=url)


def test_a_silent_server_times_out_and_what_came_is_kept(serve, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    monkeypatch.setattr(download, "DELAYS", ())
    site = serve(archive, cuts=[1000], pause=threading.Event())
    with pytest.raises(DownloadError, match=r"timed out.*1,000 bytes are kept"):
        fetch(site, tmp_path)
    assert (tmp_path / PART).read_bytes() == archive[:1000]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "cifar.tar.gz", "https:///x", ""])
def test_other_addresses_are_refused(tmp_path, url):
    with pytest.raises(ValueError, match="url must be"):
        download_cifar10(tmp_path / "new", url=url)
    assert not (tmp_path / "new").exists()


def test_an_address_with_a_space_is_refused(serve, archive, tmp_path):
    site = serve(archive)
    with pytest.raises(ValueError, match="url "):
        fetch(site, tmp_path, url=site.url + " x", sha256=CIFAR10_SHA256)


def test_a_malformed_checksum_is_refused(tmp_path):
    with pytest.raises(ValueError, match="64 hex digits"):
        download_cifar10(tmp_path, sha256="c32a1d4ab5d03f1284b67883e8d87530")


def test_redirection_to_a_file_is_refused(serve, archive, tmp_path):
    site = serve(archive, statuses=[302], location="file:///etc/passwd")
    with pytest.raises(DownloadError, match=r"file:///etc/passwd.* not allowed"):
        fetch(site, tmp_path)


def test_redirection_in_a_circle_is_one_line(serve, archive, tmp_path):
    site = serve(archive, statuses=[302] * 50)
    site.location = site.url
    with pytest.raises(DownloadError, match="infinite loop") as raised:
        fetch(site, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.fixture
def certificate(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    names = {"-keyout": tmp_path / "key.pem", "-out": tmp_path / "cert.pem"}
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    options += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    options += [str(word) for pair in names.items() for word in pair]
    subprocess.run(["openssl", "req", "-x509", *options], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names["-out"], names["-keyout"])
    return context, names["-out"]


def test_https_is_checked_and_never_redirected_to_http(serve, archive, files, tmp_path, certificate, monkeypatch):
    context, trusted = certificate
    site = serve(archive, context)
    with pytest.raises(DownloadError, match="certificate is not trusted"):
        fetch(site, tmp_path / "data")
    assert site.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    site.statuses, site.location = [302], serve(archive).url
    with pytest.raises(DownloadError, match="refused to follow the server's redirection to http://"):
        fetch(site, tmp_path / "data")
    fetch(site, tmp_path / "data")
    assert is_whole(tmp_path / "data", files)


@pytest.mark.parametrize("there", ["a file", "some files", "a dangling link", "files outside"])
def test_what_is_in_the_way_is_left_alone_and_named(serve, archive, tmp_path, there):
    site, target = serve(archive), tmp_path / TOP
    if there == "a file":
        target.write_text("mine")
    elif there == "some files":
        target.mkdir()
        (target / "data_batch_1.bin").write_bytes(bytes(RECORDS * 3073))
    elif there == "files outside":  # where load_cifar10 would read them, and not the new ones
        (tmp_path / "test_batch.bin").write_bytes(bytes(10))
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    with pytest.raises(DownloadError, match="move it away or delete it"):
        fetch(site, tmp_path)
    assert listing(tmp_path) == before
    assert site.requests == []


def test_an_empty_folder_is_not_in_the_way(serve, archive, files, tmp_path):
    (tmp_path / TOP).mkdir()
    fetch(serve(archive), tmp_path)
    assert is_whole(tmp_path, files)


def test_a_file_in_place_of_the_folder(serve, archive, tmp_path):
    (tmp_path / "data").write_text("mine")
    for folder in (tmp_path / "data", tmp_path / "data" / "deeper"):
        with pytest.raises(DownloadError, match=f"cannot put CIFAR-10 into {folder}: "):
            fetch(serve(archive), folder)
    assert (tmp_path / "data").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(serve, archive, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DownloadError, match="Permission denied") as raised:
            fetch(serve(archive), tmp_path)
        assert raised.value.errno == errno.EACCES
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk(serve, archive, files, tmp_path):
    (tmp_path / PART).symlink_to("/dev/full")
    with pytest.raises(DownloadError, match="No space left on device") as raised:
        fetch(serve(archive), tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / TOP).exists()
    (tmp_path / PART).unlink()
    fetch(serve(archive), tmp_path)
    assert is_whole(tmp_path, files)


def test_no_room_to_unpack_keeps_the_archive(serve, tmp_path):
    """Zeros pack to little: the archive fits under the limit of a file's size, and its files do not."""
    resource = pytest.importorskip("resource")
    files = {name: bytes(RECORDS * 3073) for name in (*TRAIN_FILES, TEST_FILE)}
    site, limits = serve(pack(files)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(DownloadError, match=f"cannot put CIFAR-10 into {tmp_path}: File too large"):
            fetch(site, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(listing(tmp_path)) == {PART, f"{PART}.json"}
    fetch(site, tmp_path)
    assert len(site.requests) == 1
    assert is_whole(tmp_path, files)


# --- Archives that are not what they must be ----------------------------------------------------------------------


def member(name, kind=tarfile.REGTYPE, link="", size=0):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside", size=5),
        member(f"{TOP}/../../outside", size=5),
        member("/tmp/geodescent-outside", size=5),
        member(f"{TOP}/extra.bin", size=5),
        member("test_batch.bin", size=RECORDS * 3073),
        member(f"{TOP}/batches.meta.txt", tarfile.SYMTYPE, "/etc/passwd"),
        member(f"{TOP}/batches.meta.txt", tarfile.LNKTYPE, f"{TOP}/test_batch.bin"),
        member(f"{TOP}/batches.meta.txt", tarfile.CHRTYPE),
        member(f"{TOP}/batches.meta.txt", tarfile.FIFOTYPE),
        member(f"{TOP}/batches.meta.txt", tarfile.DIRTYPE),
        member(f"{TOP}/batches.meta.txt", size=(1 << 20) + 1),
        member(f"{TOP}/test_batch.bin", size=RECORDS * 3073),
        member(TOP, tarfile.SYMTYPE, "/tmp"),
    ],
    ids=lambda bad: f"{bad.name}:{bad.type.decode()}:{bad.size}",
)
def test_anything_else_in_the_archive_is_refused(serve, files, tmp_path, bad):
    del files["batches.meta.txt"]
    site = serve(pack(files, [bad]))
    (tmp_path / "in").mkdir()
    with pytest.raises(DownloadError, match="the archive holds"):
        fetch(site, tmp_path / "in")
    assert listing(tmp_path) == {"in": None}
    assert not os.path.exists("/tmp/geodescent-outside")


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_files_that_are_missing_or_short_are_named(serve, files, tmp_path, name):
    with pytest.raises(DownloadError, match=f"'{TOP}/{name}' of 61,459 bytes"):
        fetch(serve(pack(files | {name: files[name][:-1]})), tmp_path)
    del files[name]
    with pytest.raises(DownloadError, match=f"lacks {TOP}/{name}"):
        fetch(serve(pack(files)), tmp_path)
    assert listing(tmp_path) == {}


@pytest.mark.usefixtures("either_tarfile")
@pytest.mark.parametrize("damage", ["no gzip", "no tar", "torn"])
def test_a_damaged_archive_with_that_checksum(serve, archive, tmp_path, damage):
    content = {
        "no gzip": b"<html>not found</html>",
        "no tar": gzip.compress(b"text" * 1000),
        "torn": archive[: len(archive) // 2],
    }[damage]
    with pytest.raises(DownloadError, match="is damaged, or not"):
        fetch(serve(content), tmp_path)
    assert listing(tmp_path) == {}


# --- Processes that are killed, and several at once ---------------------------------------------------------------


def run(site, folder, before=""):
    code = f"""
import os, signal
from geodescent.experiments import download
{before}
download.DELAYS = ()
print(download.download_cifar10({str(folder)!r}, url={site.url!r}, sha256={site.sha256!r}, records={RECORDS},
    notify=lambda text: print(text, flush=True)))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes)


def run_killed_at(name, site, folder):
    process = run(site, folder, f"download.{name} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def wait_for_part(process, folder, size):
    deadline = time.monotonic() + 60
    while not ((folder / PART).exists() and (folder / PART).stat().st_size == size):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)


def test_kill_in_the_middle_of_the_download(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[100_000], pause=threading.Event())
    process = run(site, tmp_path)
    wait_for_part(process, tmp_path, 100_000)
    process.kill()
    process.communicate()
    assert not (tmp_path / TOP).exists()
    fetch(site, tmp_path)
    assert site.asked == [None, "bytes=100000-"]
    assert site.sent == [100_000, len(archive) - 100_000]
    assert is_whole(tmp_path, files)


@pytest.mark.parametrize("name", ["_extract", "os.rename"])
def test_kill_while_it_is_unpacked(serve, archive, files, tmp_path, name):
    site = serve(archive)
    run_killed_at(name, site, tmp_path)
    assert not (tmp_path / TOP).exists()
    assert (tmp_path / f".{TOP}.unpacking").is_dir()
    fetch(site, tmp_path)
    assert len(site.requests) == 1
    assert is_whole(tmp_path, files)


def test_two_processes_at_once_fetch_once(serve, archive, files, tmp_path):
    site = serve(archive, cuts=[1000], pause=threading.Event())
    first = run(site, tmp_path)
    wait_for_part(first, tmp_path, 1000)
    second = run(site, tmp_path)
    assert second.stdout is not None
    assert second.stdout.readline().startswith("Another process")
    first.kill()
    first.communicate()
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert out.endswith(f"{tmp_path / TOP}\n")
    # the first had the lock until it was killed; the second went on from what it had
    assert site.asked == [None, "bytes=1000-"]
    assert is_whole(tmp_path, files)


def test_threads_fetch_once(serve, archive, files, tmp_path):
    site, found = serve(archive), []
    threads = [threading.Thread(target=lambda: found.append(fetch(site, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / TOP] * 4
    assert len(site.requests) == 1
    assert is_whole(tmp_path, files)


# --- What the user sees -------------------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal(serve, archive, files, tmp_path):
    site, output = serve(archive, cuts=[len(archive) // 2]), StringIO()
    console = Console(file=output, width=40)
    arguments = {"url": site.url, "sha256": site.sha256, "records": RECORDS}
    assert download_with_progress(console, tmp_path, **arguments) == tmp_path / TOP
    lines = output.getvalue().splitlines()
    megabytes = f"{len(archive) / 1e6:.1f}"
    assert f"Fetching {site.url}." in lines
    assert f"{megabytes} of {megabytes} MB" in lines
    assert any("broke off" in line for line in lines)
    assert len(lines) < 25
    download_with_progress(console, tmp_path, **arguments)
    assert output.getvalue().splitlines()[-1] == f"CIFAR-10 is in {tmp_path / TOP} already."


def test_a_bar_on_a_terminal(serve, archive, files, tmp_path):
    site, output = serve(archive), StringIO()
    console = Console(file=output, width=100, force_terminal=True, color_system=None)
    download_with_progress(console, tmp_path, url=site.url, sha256=site.sha256, records=RECORDS)
    kilobytes = f"{len(archive) / 1000:.1f}"
    assert f"{kilobytes}/{kilobytes} kB" in output.getvalue()
    assert is_whole(tmp_path, files)
