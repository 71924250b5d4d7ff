"""URLs of images: which are read, which are refused, and that no connection is made for those."""

from __future__ import annotations

import base64
import http.server
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.features.images.frontend import download
from compiled_engine.features.images.frontend.download import Downloader, PromptDownloads, Target, require_public
from compiled_engine.features.images.frontend.sources import read_source
from compiled_engine.features.images.frontend.urls import UrlPolicy, read_data_url
from compiled_engine.process.smallest_first import WorkStopped

PIXELS = b"these are the bytes of an image"


class Server:
    """An HTTP server on this machine. `answer` writes the response to each request."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], None] = send(PIXELS)
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.paths.append(self.path)
                server.headers.append(dict(self.headers))
                server.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(
    body: bytes, status: int = 200, length: int | None = None, **headers: str
) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def fetch(server: Server, path: str = "/a.png", **options: float) -> bytes:
    policy = UrlPolicy((f"localhost:{server.port}",))
    downloader = Downloader(lambda address: None, **options)
    return policy.read(f"http://localhost:{server.port}{path}", downloader).data


@given(st.binary(min_size=1), st.sampled_from(["png", "jpeg", "svg+xml", "x-icon"]), st.sampled_from(["", ";a=b"]))
def test_data_urls_hold_any_bytes(data: bytes, kind: str, more: str) -> None:
    assert read_data_url(f"data:image/{kind}{more};base64,{base64.b64encode(data).decode()}") == data


@given(st.text())
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    for url in (text, f"data:{text}", f"data:image/png;base64,{text}", f"http://{text}", f"file://{text}"):
        try:
            assert UrlPolicy().read(url, Downloader()).data == base64.b64decode(text)
        except ValueError as error:
            said = str(error)
            assert ("\n" in said, len(said) < 500) == (False, True)


@given(st.text())
def test_no_spelling_of_a_url_reaches_another_host(text: str) -> None:
    policy = UrlPolicy(("images.example",))
    for url in (f"http://{text}", f"https://images.example{text}", f"https://{text}images.example/", f"http:{text}"):
        try:
            target = policy.target(url)
        except ValueError:
            continue
        assert (target.host, target.port) in (("images.example", 80), ("images.example", 443))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://images.example/a", "has no scheme that is read"),
        ("gopher:a", "has no scheme that is read"),
        ("/etc/passwd", "has no scheme that is read"),
        ("", "has no scheme that is read"),
        ("data:text/plain;base64,YQ==", "must begin with data:image/"),
        ("data:image/png,abc", "must begin with data:image/"),
        ("data:image/png;base64,a*c=", "not valid base64"),
        ("data:image/png;base64,", "has 0 bytes"),
        ("http://images.example.evil/a", "not fetched from images.example.evil:80; allowed: images.example"),
        ("http://images.example:8080/a", "not fetched from images.example:8080"),
        ("http://images.example@evil/a", "no user name"),
        ("http://evil\\@images.example/a", "backslashes"),
        ("http://images.example/a b", "spaces"),
        ("http:///a", "must have a host"),
        ("http://[::1/a", "malformed"),
        ("http://images.example:port/a", "malformed"),
        (f"http://images.example/{'a' * 9000}", "characters; allowed: at most 8192"),
        ("file:///etc/passwd", "file: URLs are not read"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        UrlPolicy(("images.example",)).read(url, Downloader())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1"),
        *(
            "::1",
            "::",
            "fe80::1",
            "fe80::1%eth0",
            "fc00::1",
            "fec0::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
        ),
        *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:a9fe::1", "2001:db8::1"),
    ],
)
def test_special_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="not of the public internet"):
        require_public(address)


@given(st.ip_addresses(v=4, network="192.168.0.0/16") | st.ip_addresses(v=6, network="fe80::/10"))
def test_private_and_link_local_addresses_are_refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    with pytest.raises(ValueError, match="not of the public internet"):
        require_public(str(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are_allowed(address: str) -> None:
    require_public(address)


def test_no_connection_is_made_to_a_special_address(server: Server) -> None:
    policy = UrlPolicy((f"localhost:{server.port}", f"127.0.0.1:{server.port}"))
    for host in ("localhost", "127.0.0.1"):
        with pytest.raises(ValueError, match="not of the public internet"):
            policy.read(f"http://{host}:{server.port}/a.png", Downloader())
    assert server.paths == []


def test_a_name_is_resolved_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose address changes between the check and the connection would pass the check."""
    resolved: list[str] = []

    def resolve(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        resolved.append(host)
        address = "127.0.0.1" if len(resolved) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    class OwnResolution:
        """The module socket, with another resolution."""

        getaddrinfo = staticmethod(resolve)

        def __getattr__(self, name: str) -> object:
            return getattr(socket, name)

    monkeypatch.setattr(download, "socket", OwnResolution())
    checked: list[str] = []
    data = Downloader(checked.append).fetch(Target("http", "images.example", server.port, "/a.png"))
    assert (data, resolved, checked) == (PIXELS, ["images.example"], ["127.0.0.1"])


def test_an_image_is_fetched_with_its_query_and_host(server: Server) -> None:
    assert fetch(server, "/a.png?size=2") == PIXELS
    assert server.paths == ["/a.png?size=2"]
    assert server.headers[0]["Host"] == f"localhost:{server.port}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (send(b"", 302, Location="http://169.254.169.254/"), r"redirects \(302\)"),
        (send(b"", 308, Location="file:///etc/passwd"), r"redirects \(308\)"),
        (send(b"no", 404), "answers 404"),
        (send(b"", length=1 << 30), "has 1073741824 bytes; allowed: at most"),
        (send(PIXELS, length=1000), "the connection ended too early|the connection failed"),
        (send(PIXELS, Content_Encoding="gzip"), "compresses"),
    ],
)
def test_answers_that_are_refused(
    server: Server, answer: Callable[[http.server.BaseHTTPRequestHandler], None], message: str
) -> None:
    server.answer = answer
    with pytest.raises(ValueError, match=f"^the image at localhost:{server.port} cannot be fetched: .*({message})"):
        fetch(server)
    assert len(server.paths) == 1


def test_a_body_without_a_length_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MOST_FILE_BYTES", 1 << 16)

    def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    server.answer = endless
    with pytest.raises(ValueError, match="has more than 65536 bytes"):
        fetch(server)


def test_a_server_that_sends_slowly_is_left(server: Server) -> None:
    over = threading.Event()

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not over.wait(0.05):
            handler.wfile.write(b"a")

    server.answer = slow
    begin = time.monotonic()
    with pytest.raises(ValueError, match="it took too long"):
        fetch(server, longest_s=0.5)
    over.set()
    assert time.monotonic() - begin < 30


def test_a_body_without_a_length_that_is_cut_at_the_time_limit_is_not_whole(server: Server) -> None:
    over = threading.Event()

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(PIXELS)
        over.wait(30)

    server.answer = slow
    with pytest.raises(ValueError, match="it took too long"):
        fetch(server, longest_s=0.5)
    over.set()


def test_a_name_that_is_not_resolved_in_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class SlowResolution:
        """The module socket, whose resolver does not answer."""

        @staticmethod
        def getaddrinfo(*arguments: object, **options: object) -> object:
            over.wait(30)
            raise OSError

        def __getattr__(self, name: str) -> object:
            return getattr(socket, name)

    monkeypatch.setattr(download, "socket", SlowResolution())
    with pytest.raises(ValueError, match="it took too long"):
        Downloader(longest_s=0.2).fetch(Target("http", "images.example", 80, "/"))
    assert not over.is_set()
    over.set()


def test_the_images_of_a_prompt_have_bounds_together(server: Server) -> None:
    target = Target("http", "localhost", server.port, "/a.png")
    downloader = Downloader(lambda address: None)
    downloads = PromptDownloads(downloader, most_bytes=2 * len(PIXELS))
    assert [downloads.fetch(target), downloads.fetch(target)] == [PIXELS] * 2
    with pytest.raises(ValueError, match=f"must have at most {2 * len(PIXELS)} bytes"):
        downloads.fetch(target)
    with pytest.raises(ValueError, match="must be fetched within 0 s"):
        PromptDownloads(downloader, longest_s=0).fetch(target)
    with pytest.raises(WorkStopped):
        PromptDownloads(downloader, lambda: True).fetch(target)
    assert len(server.paths) == 3


def test_a_pipe_is_no_image_and_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    pipe = tmp_path / "inner" / "a.png"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(2) as threads:
        reads = [
            threads.submit(UrlPolicy(folder=tmp_path).read, pipe.as_uri(), Downloader()),
            threads.submit(read_source, "image", pipe, 1 << 20),
        ]
        try:
            for each in reads:
                with pytest.raises(ValueError, match="is no regular file"):
                    each.result(10)
        finally:
            os.close(os.open(pipe, os.O_RDWR))  # ends those that wait


@pytest.mark.parametrize("swapped", ["inner/a.png", "inner"])
def test_a_link_that_appears_after_the_check_is_not_followed(swapped: str, tmp_path: Path) -> None:
    folder, secret = tmp_path / "allowed", tmp_path / "secret"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.png").write_bytes(PIXELS)
    secret.mkdir()
    (secret / "a.png").write_bytes(b"secret")

    class Changing(type(folder)):  # type: ignore[misc]
        """The folder, in which a link takes the place of what has been checked."""

        def resolve(self, strict: bool = False) -> Path:
            place = Path(self) / swapped
            place.rename(tmp_path / "before")
            place.symlink_to(secret / "a.png" if swapped.endswith("png") else secret)
            return Path(self)

    with pytest.raises(OSError, match=r"symbolic|directory"):
        UrlPolicy(folder=Changing(folder)).read((folder / "inner" / "a.png").as_uri(), Downloader())


def test_files_within_the_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PIXELS)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    policy = UrlPolicy(folder=folder)

    assert policy.read((folder / "a b.png").as_uri(), Downloader()).data == PIXELS
    outside = ["file:///etc/passwd", f"file://{folder}/../secret", f"file://{folder}/%2e%2e/secret"]
    outside += [f"file://{folder}/link", f"file://{folder}/missing", f"file://{folder}/a%00b"]
    for url in outside:
        with pytest.raises(ValueError, match="is no file within the folder that may be read"):
            policy.read(url, Downloader())
    with pytest.raises(ValueError, match="must not have a host"):
        policy.read(f"file://elsewhere{folder}/a.png", Downloader())
    with pytest.raises((ValueError, OSError)):
        policy.read(folder.as_uri(), Downloader())
