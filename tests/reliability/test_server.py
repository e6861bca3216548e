"""The server under attack: hostile requests, pictures and connections, and mixed load on `bier serve` itself."""

import asyncio
import errno
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from PIL import Image
from starlette.testclient import TestClient

from bier import EmbeddingEnsemble, Model
from bier.collection import Collection, image_collection
from bier.models.backbones import build_backbone
from bier.web.app import create_app
from bier.web.guard import Access, Limits
from bier.web.server import create_server

HowMany = Callable[[int, int], int]
GENEROUS = Limits(rate=1e6, burst=1e6)
SCRIPT = "<img src=x onerror=alert(1)>"
# Names of folders and files as bytes: not UTF-8, line breaks, markup, templates, and what means something in addresses.
NAMES = [
    b"caf\xe9.png",
    b"\xff\xfe.png",
    b"new\nline.png",
    b"tab\tbell\x07.png",
    SCRIPT.encode() + b".png",
    b"{{7*7}} ${7*7} <%= 7*7 %>.png",
    b"a#b?c=d&e;f%2e%2e.png",
    b"\"quote'.png",
    b"literal\\xe9.png",  # looks like a name whose bytes are escaped
    "e\u0301 \u202e\U0001f37a.png".encode(),
]
FOLDERS = [b"plain", b"caf\xe9", b"new\nline", b"{{7*7}}", b"%2e%2e"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    folder = tmp_path_factory.mktemp("run")
    ensemble = EmbeddingEnsemble(backbone.features, (8, 16))
    Model(backbone, ensemble, weighting="sqrt", precision="float32").save(folder / "model")
    return folder


@pytest.fixture(scope="module")
def hostile_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good pictures with bad names."""
    root = tmp_path_factory.mktemp("names")
    colours = random.Random(0)
    for folder in FOLDERS:
        for name in NAMES:
            place = os.path.join(os.fsencode(root), folder, name)  # noqa: PTH118 - a Path takes no bytes
            os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
            file = io.BytesIO()
            Image.new("RGB", (32, 32), tuple(colours.randbytes(3))).save(file, "PNG")
            Path(os.fsdecode(place)).write_bytes(file.getvalue())
    return root


@pytest.fixture(scope="module")
def collection(run: Path, hostile_names: Path) -> Collection:
    return image_collection(run, hostile_names)


@pytest.fixture(scope="module")
def client(collection: Collection) -> Iterator[TestClient]:
    with TestClient(create_app(collection, GENEROUS), base_url="http://localhost") as made:
        yield made


def test_file_names_of_any_kind_are_shown_and_found(collection: Collection, tally: Any) -> None:
    with listening(collection) as (host, port), httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        shown = client.get("/api/browse", params={"count": 200})
        assert shown.status_code == 200
        ids = [one["id"] for one in shown.json()["images"]]
        assert len(set(ids)) == len(NAMES) * len(FOLDERS)
        for one in ids:
            found = client.get("/api/search", params={"id": one, "k": 5})
            picture = client.get(f"/api/image/{quote(one)}")
            survived = found.status_code == 200 and found.json()["query"]["id"] == one and picture.status_code == 200
            tally.case("server: file names", survived, note=f"{one!r}: {found.status_code}, {picture.status_code}")


# Requests


def ask(app: Any, path: bytes = b"/api/status", headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[int, Any, bytes]:
    """(status, headers, body) of a request as it may come from the network; clients refuse to send such headers."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def asked() -> None:
        with suppress(Exception):
            await app(scope, receive, send)

    raw, _, query = path.partition(b"?")
    given = [*headers, *([] if b"host" in dict(headers) else [(b"host", b"localhost")])]
    scope = {"type": "http", "method": "GET", "path": unquote(raw.decode()), "raw_path": raw, "query_string": query}
    scope |= {"headers": given, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}
    scope |= {"http_version": "1.1", "root_path": ""}
    LOOP.run_until_complete(asked())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}, body


LOOP = asyncio.new_event_loop()
ODD = (b"http://[", b"http://[::1", b"null", b"", b"://", b"http://\xff\xfe", b"http://localhost@evil", b"[" * 999)
NAMED = (b"origin", b"host", b"cookie", b"authorization", b"range", b"accept-encoding")
HEADERS = [
    *((name, value) for name in NAMED for value in ODD),
    *((b"content-length", value) for value in (b"9" * 5000, b"-1", b"1e3", b"\xb2", b"", b"10000000000")),
    *((b"content-type", value) for value in (b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 9999)),
]


def test_no_header_makes_an_internal_error(collection: Collection, tally: Any) -> None:
    app = create_app(collection, GENEROUS)
    secret = create_app(collection, GENEROUS, access=Access(token="a" * 20))
    for name, value in HEADERS:
        for made in (app, secret):
            status, headers, _ = ask(made, headers=((name, value),))
            survived = status < 500 and "content-security-policy" in headers
            tally.case("server: request headers", survived, note=f"{name!r}: {value[:40]!r} gave {status}")


def test_paths_lead_nowhere_else(collection: Collection, tmp_path: Path, tally: Any) -> None:
    report = tmp_path / "run" / "report"
    report.mkdir(parents=True)
    (report / "index.html").write_text("the report")
    (tmp_path / "run" / "secret.txt").write_text("SECRET")
    app = create_app(collection, GENEROUS, report)
    ups = (b"..", b"%2e%2e", b"%252e%252e", b"..%00", b".%2e", b"..\\..", b"..%5c..", b"%c0%ae%c0%ae", b"%uff0e")
    aims = (b"secret.txt", b"run/secret.txt", b"etc/passwd", os.fsencode(tmp_path)[1:] + b"/run/secret.txt")
    starts = (b"/report/", b"/static/", b"/api/image/", b"/report//", b"/static/./")
    for start, up, depth, aim in product(starts, ups, (1, 6), aims):
        path = start + (up + b"/") * depth + aim
        status, headers, body = ask(app, path)
        survived = status in (400, 404, 405) and "location" not in headers
        survived &= b"SECRET" not in body and b"root:" not in body
        tally.case("server: path traversal", survived, note=f"{path!r} gave {status}")


def test_nothing_from_a_request_is_repeated_as_markup_or_header(collection: Collection, tally: Any) -> None:
    app = create_app(collection, GENEROUS)
    texts = (b"%0d%0aset-cookie:%20a=b", b"{{7*7}}", b"<script>alert(1)</script>", b"${7*7}", b"%00", b"%ff%fe")
    starts = (b"/", b"/api/image/", b"/api/search?id=", b"/api/browse?label=", b"/api/search?k=", b"/report")
    for start, text in product(starts, texts):
        status, headers, body = ask(app, start + text)
        survived = status < 500 and "set-cookie" not in headers and headers["x-content-type-options"] == "nosniff"
        survived &= b"49" not in body or b"7*7" in body
        survived &= headers.get("content-type", "").startswith("application/json")
        tally.case("server: injection", survived, note=f"{start + text!r} gave {status} {body[:80]!r}")


def test_the_interface_keeps_its_own_description(collection: Collection, tally: Any, how_many: HowMany) -> None:
    """schemathesis draws requests from /openapi.json, good and bad, and checks every response against it."""
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi import checks

    kept = [
        *(schemathesis.checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance),
        *(checks.response_schema_conformance, checks.response_headers_conformance),
    ]
    few = settings(
        max_examples=how_many(12, 100),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with listening(collection) as (host, port):
        schema = schemathesis.openapi.from_url(f"http://{host}:{port}/openapi.json")
        for found in schema.get_all_operations():

            @few
            @given(case=found.ok().as_strategy())
            def holds(case: Any) -> None:
                tally.case("server: schemathesis", case.call_and_validate(checks=kept).status_code < 500)

            holds()


# Pictures


def upload(client: TestClient, data: bytes, name: str = "picture.png") -> Any:
    return client.post("/api/search", files={"image": (name, data)}, params={"k": 1})


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def many_scans(count: int, size: tuple[int, int] = (7000, 7000)) -> bytes:
    """A small progressive JPEG whose last scan is repeated; each costs a pass over the whole picture."""
    data = encoded(Image.new("L", size, 99), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:start] + data[start:end] * count + data[end:]


def test_a_slow_picture_is_stopped_and_others_are_answered(collection: Collection, tally: Any) -> None:
    bomb, good = many_scans(80), encoded(Image.new("RGB", (300, 200), "teal"), "JPEG")
    app = create_app(collection, Limits(rate=1e6, burst=1e6, decode_seconds=1))
    with TestClient(app, base_url="http://localhost") as client:
        assert upload(client, many_scans(2000, (64, 64))).json()["error"]["code"] == "too_slow"
        upload(client, good)
        answers: dict[str, Any] = {}

        def send_bomb() -> None:
            answers["bomb"] = (upload(client, bomb).json()["error"]["code"], time.monotonic())

        attack = threading.Thread(target=send_bomb)
        attack.start()
        for _ in range(3):
            status = upload(client, good).status_code
            tally.case("server: beside a slow picture", status == 200, note=str(status))
        others = time.monotonic()
        attack.join()
        assert answers["bomb"][0] == "too_slow"
        assert others < answers["bomb"][1]
        tally.case("server: beside a slow picture", upload(client, good).status_code == 200)


def test_pictures_of_every_kind_of_damage(client: TestClient, tally: Any, how_many: HowMany) -> None:
    draw = random.Random(0)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    whole = {form: encoded(photo, form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA")}
    cases = [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<html></html>",
        bytes(999),
        b"GIF89a",
        b"\xff\xd8\xff\xd9",
    ]
    for data in whole.values():
        for _ in range(how_many(4, 40)):
            flipped = bytearray(data)
            for _ in range(draw.randint(1, 20)):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            cases += [data[: draw.randrange(len(data))], bytes(flipped)]
    for data in cases:
        status = upload(client, data).status_code
        tally.case("server: damaged uploads", status in (200, 413, 415, 422), note=f"{data[:20]!r} gave {status}")
    flat = Image.new("RGB", (9000, 9000))
    assert upload(client, encoded(flat, "WEBP", lossless=True)).json()["error"]["code"] == "too_many_pixels"


def test_a_machine_without_processes_left(client: TestClient, tally: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot be started is no internal error: the next request may succeed."""

    async def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    picture = encoded(Image.new("RGB", (9, 9)))
    with monkeypatch.context() as patched:
        patched.setattr("anyio.to_process.run_sync", refused)
        answer = upload(client, picture)
        survived = answer.status_code == 503 and answer.json()["error"]["code"] == "busy"
        tally.case("server: no processes left", survived, note=answer.text)
    tally.case("server: no processes left", upload(client, picture).status_code == 200)


def test_one_file_per_form(client: TestClient) -> None:
    picture = encoded(Image.new("RGB", (9, 9)))
    several = client.post("/api/search", files=[("image", (f"{n}.png", picture)) for n in range(3)])
    assert several.status_code == 400


# Connections


@contextmanager
def listening(collection: Collection, limits: Limits = GENEROUS, **options: Any) -> Iterator[tuple[str, int]]:
    """A server of this process with limits of its own."""
    server = create_server(create_app(collection, limits), **options)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield bound.getsockname()
        server.should_exit = True
        thread.join(20)


def is_closed(connection: socket.socket, within: float) -> bool:
    connection.settimeout(within)
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def answers(place: tuple[str, int]) -> bool:
    return httpx.get(f"http://{place[0]}:{place[1]}/api/status", timeout=20).status_code == 200


GET = b"GET /api/status HTTP/1.1\r\nhost: localhost\r\n"
HEADS = (b"", b"G", GET + b"x: ", GET + b"\r\n" + GET)  # unfinished; the last one after a request that is answered


def test_half_open_connections_are_closed_and_others_are_answered(collection: Collection, tally: Any) -> None:
    with listening(collection, connections=24, head_seconds=1.5) as place:
        held = []
        for number in range(96):
            held.append(socket.create_connection(place))
            held[-1].sendall(HEADS[number % len(HEADS)])
        tally.case("server: beside held connections", answers(place))
        for connection in held:
            tally.case("server: half-open connections", is_closed(connection, 20))
            connection.close()


def test_slow_and_aborted_uploads(collection: Collection, tally: Any) -> None:
    head = b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    form = b'--b\r\ncontent-disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    with listening(collection, Limits(rate=1e6, burst=1e6, upload_seconds=1), head_seconds=3) as place:
        slow = [socket.create_connection(place) for _ in range(10)]
        for connection in slow:
            connection.sendall(head + b"content-length: 1000000\r\n\r\n" + form)
        for number in range(20):
            with socket.create_connection(place) as aborted:
                aborted.sendall(head + b"content-length: 1000000\r\n\r\n" + form + bytes(1000 * number))
        tally.case("server: beside slow uploads", answers(place))
        for connection in slow:
            connection.settimeout(20)
            with suppress(OSError):
                connection.sendall(b"x")
            first = connection.recv(65_536)
            tally.case("server: slow uploads", first.startswith(b"HTTP/1.1 408"), note=repr(first[:40]))
            connection.close()
        tally.case("server: beside aborted uploads", answers(place))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_not_read(collection: Collection, chunked: bool, tally: Any) -> None:
    limits = Limits(rate=1e6, burst=1e6, upload_bytes=2**20)
    head = b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: 99999999999\r\n\r\n"
    form = b'--b\r\ncontent-disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    with listening(collection, limits, head_seconds=3) as place, socket.create_connection(place) as connection:
        connection.sendall(head)
        sent, piece = 0, form
        connection.settimeout(0.2)
        answer = b""
        while not answer and sent < 64 * 2**20:
            with suppress(OSError):
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                sent += len(piece)
            piece = bytes(2**16)
            connection.setblocking(False)
            with suppress(BlockingIOError):
                answer = connection.recv(4096)
            connection.settimeout(0.2)
        survived = answer.startswith(b"HTTP/1.1 413") and sent < 16 * 2**20
        tally.case("server: oversized bodies", survived, note=f"{answer[:40]!r} after {sent} bytes")


# Load


def private_memory(process: int) -> float:
    """MB of memory that a process holds for itself; 0 where it has ended."""
    with suppress(OSError):
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024
    return 0.0


def workers_of(process: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@contextmanager
def watched(process: int, every: float) -> Iterator[list[float]]:
    """Measures the private memory of a process while the block runs."""
    found: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every):
            found.append(private_memory(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def served(run: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`bier serve` in a process of its own that may open 256 files, with its log."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("memory is measured through /proc")
    log = tmp_path_factory.mktemp("log") / "stderr"
    folder = tmp_path_factory.mktemp("served") / os.fsdecode(b"caf\xe9")
    shutil.copytree(pictures, folder)
    shutil.copy(folder / "class 0" / "0.png", folder / "class 0" / os.fsdecode(b"caf\xe9\n.png"))
    (folder / "class 0" / os.fsdecode(b"br\xf6ken.png")).write_bytes(b"no picture")
    command = [sys.executable, "-m", "bier", "serve", str(run), "--images", str(folder), "--port", "0", "--json"]
    shell = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    with log.open("wb") as err, subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=err) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == b"}\n":
                break
        assert lines, log.read_text()
        yield json.loads(b"".join(lines)) | {"pid": process.pid, "log": log}

        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


def small_jpeg(seed: int, side: int = 400) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise).resize((side, side)), "JPEG", quality=80)


def requests_to_send() -> list[tuple[str, float, dict[str, Any], set[int]]]:
    """(name, how often, arguments of httpx's `request`, statuses that are right)."""
    good = [small_jpeg(seed, side) for seed, side in ((1, 64), (2, 400), (3, 1600))]
    bad = [b"text", good[1][:2000], b"", encoded(Image.new("RGB", (9000, 9000)), "WEBP", lossless=True)]
    large = encoded(Image.new("RGB", (6900, 6900)), "WEBP", lossless=True)
    ids = [f"class {kind}/{number}.png" for kind in range(8) for number in range(8)]

    def post(data: bytes) -> dict[str, Any]:
        return {"method": "POST", "url": "/api/search", "files": {"image": ("a.jpg", data)}}

    return [
        *(("upload", 4.0, post(data), {200, 503}) for data in good),
        *(("bad upload", 1.0, post(data), {413, 415, 422, 503}) for data in bad),
        ("large upload", 0.2, post(large), {200, 422, 503}),  # 422: too slow, on a busy machine
        *(("search", 0.5, {"method": "GET", "url": "/api/search", "params": {"id": one}}, {200}) for one in ids[::4]),
        *(("image", 0.5, {"method": "GET", "url": f"/api/image/{one}"}, {200}) for one in ids[::4]),
        ("browse", 3.0, {"method": "GET", "url": "/api/browse"}, {200}),
        *(("static", 2.0, {"method": "GET", "url": path}, {200}) for path in ("/", "/static/main.js", "/openapi.json")),
        ("nowhere", 2.0, {"method": "GET", "url": "/static/%2e%2e/app.py"}, {404}),
    ]


async def loaded(url: str, seconds: float, tally: Any) -> dict[str, list[float]]:
    """Mixed requests from 64 connections, each from an address of its own; the times by name in milliseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    refused: Counter[int] = Counter()
    choices = requests_to_send()
    until = time.monotonic() + seconds

    async def one_client(number: int) -> None:
        draw = random.Random(number)
        transport = httpx.AsyncHTTPTransport(local_address=f"127.0.1.{number + 1}", verify=False)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=60) as client:
            while time.monotonic() < until:
                [(name, _, arguments, right)] = draw.choices(choices, [one[1] for one in choices])
                started = time.perf_counter()
                answer = await client.request(**arguments)
                times[name].append(1e3 * (time.perf_counter() - started))
                limited = answer.status_code == 429
                refused[answer.status_code] += limited or answer.status_code == 503
                survived = limited or answer.status_code in right
                if answer.status_code == 503:
                    survived &= answer.json()["error"]["code"] == "busy"
                if name == "large upload" and answer.status_code == 422:
                    survived &= answer.json()["error"]["code"] == "too_slow"
                tally.case("server: mixed load", survived, note=f"{name}: {answer.status_code} {answer.text[:80]}")

    await asyncio.gather(*(one_client(number) for number in range(64)))
    tally.remark(
        f"server: in {seconds:g} s {refused[503]:,} uploads were refused by a full queue (503), "
        f"{refused[429]:,} requests by the rate (429)"
    )
    return times


async def fill_memory(url: str) -> int:
    """Upload until the server has as many pictures as it remembers; its memory has no reason to grow any more."""
    noise = np.random.default_rng(0).integers(0, 256, (640, 640, 3), dtype=np.uint8)
    picture = encoded(Image.fromarray(noise), "JPEG", quality=85)
    needed, sent = 1, 0
    while sent < needed:
        transport = httpx.AsyncHTTPTransport(local_address=f"127.0.2.{sent % 250 + 1}", verify=False)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=60) as client:
            answer = await client.post("/api/search", files={"image": ("a.jpg", picture)})
            if sent == 0:
                name = answer.json()["query"]["id"]
                sizes = [len((await client.get(f"/api/image/{name}?size={size}")).content) for size in (256, 640)]
                needed = Limits().remembered // sum(sizes) + 1
            sent += answer.status_code == 200
    return sent


def test_mixed_load_from_64_connections(served: dict[str, Any], tally: Any, soak: bool) -> None:
    """Memory: the largest that is seen in the last third of the measured time, against that of the first third."""
    server, seconds = served["pid"], 60 if soak else 4
    filled = asyncio.run(fill_memory(served["url"])) if soak else 0
    first = asyncio.run(loaded(served["url"], seconds / 2, tally))
    with watched(server, every=seconds / 60) as memory:
        times = asyncio.run(loaded(served["url"], seconds, tally))
    third = len(memory) // 3
    early, late = max(memory[:third]), max(memory[-third:])
    growth = 16 if soak else 64  # MB; in the short form the uploads that are remembered still grow
    note = f"{early:.0f} MB in the first third, {late:.0f} MB in the last"
    tally.case("server: memory after warm-up", late < early + growth, note=note)
    workers = [private_memory(one) for one in workers_of(server)]
    tally.case("server: memory of workers", len(workers) <= 4 and max(workers) < 64, note=f"{workers}")

    count, before = (sum(map(len, one.values())) for one in (times, first))
    tally.remark(
        f"server: {count:,} requests in {seconds} s from 64 connections, after {before:,} to warm up and {filled} "
        "uploads that fill the memory of uploads"
    )
    tally.remark(
        f"server: private memory at most {early:.0f} MB in the first third of this time and {late:.0f} MB in the last; "
        f"{len(workers)} workers with at most {max(workers):.0f} MB each after it"
    )
    for name, some in sorted(times.items()):
        middle, high = np.percentile(some, [50, 99])
        tally.remark(f"server: {name}: median {middle:.0f} ms, p99 {high:.0f} ms")


def test_more_connections_than_files(served: dict[str, Any], tally: Any) -> None:
    """260 held connections stopped a server with 200 files and wrote 62 MB of log."""
    place = ("127.0.0.1", int(served["url"].rpartition(":")[2]))
    before = served["log"].stat().st_size
    held = []
    for number in range(400):
        with suppress(OSError):
            held.append(socket.create_connection(place, timeout=5))
            held[-1].sendall(HEADS[number % len(HEADS)])
    for number in range(50):
        with suppress(OSError), socket.create_connection(place, timeout=5) as garbage:
            garbage.sendall(b"\x16\x03\x01 this is not HTTP %d\r\n\r\n" % number)
    for number in range(100):  # a malformed chunk to a foreign host: answered before the application is
        host = b"evil.example" if number % 2 else b"localhost"
        head = b"POST /api/search HTTP/1.1\r\nhost: " + host + b"\r\ntransfer-encoding: chunked\r\n"
        with suppress(OSError), socket.create_connection(place, timeout=5) as malformed:
            malformed.sendall(head + b"content-type: multipart/form-data; boundary=b\r\n\r\nZZ\r\n")
            malformed.recv(4096)
    for _ in range(5):
        tally.case("server: beside held connections", answers(place))
    for connection in held:
        connection.close()
    written = served["log"].stat().st_size - before
    tally.case("server: log", written < 10_000, note=served["log"].read_text()[-500:])


def test_names_that_are_no_text_on_the_command_line(served: dict[str, Any]) -> None:
    assert served["images"] == 65
    assert httpx.get(f"{served['url']}/api/status").json()["title"] == "caf\\xe9"
    assert "left out: " in served["log"].read_text()


def test_only_this_machine_can_connect(served: dict[str, Any]) -> None:
    port = int(served["url"].rpartition(":")[2])
    assert served["url"].startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_workers_end_with_the_server(run: Path, pictures: Path, served: dict[str, Any]) -> None:
    """Also when it is killed: a worker ends when its pipe does."""
    children = Path(f"/proc/{served['pid']}/task/{served['pid']}/children").read_text().split()
    assert children
    os.kill(served["pid"], signal.SIGKILL)
    until = time.monotonic() + 20
    while any(Path(f"/proc/{one}").exists() for one in children):
        assert time.monotonic() < until
        time.sleep(0.05)
