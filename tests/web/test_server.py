"""The API, asked as a client asks it."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from h11 import LocalProtocolError
from numpy.typing import NDArray
from PIL import Image
from starlette.testclient import TestClient

import bier
from bier import Index, Model
from bier.collection import Collection
from bier.collection.served import recall_figures
from bier.errors import DataError, ModelError
from bier.evaluate.ensemble import evaluate_ensemble
from bier.web.app import STATIC, create_app
from bier.web.guard import Access, Limits
from bier.web.server import ShortLog

GENEROUS = Limits(rate=1000, burst=10_000)


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@contextmanager
def serving(collection: Collection, limits: Limits = GENEROUS, **options: Any) -> Iterator[TestClient]:
    """A client with one event loop, so that the worker processes stay from one request to the next."""
    with TestClient(create_app(collection, limits, **options), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def client(collection: Collection, report: Path) -> Iterator[TestClient]:
    with serving(collection, report=report) as made:
        yield made


def send(client: TestClient, data: bytes, **options: Any) -> Any:
    return client.post("/api/search", files={"image": ("picture.png", data)}, params=options)


def code(response: Any) -> tuple[int, str]:
    assert list(response.json()) == ["error"]
    assert response.json()["error"]["message"].endswith(".")
    return response.status_code, response.json()["error"]["code"]


def test_status_says_what_there_is(client: TestClient, collection: Collection) -> None:
    status = client.get("/api/status").json()
    assert (status["images"], status["classes"], status["groups"]) == (48, 6, [8, 16, 24])
    assert [prefix["dimension"] for prefix in status["prefixes"]] == [8, 24, 48]
    assert [prefix["bytes"] for prefix in status["prefixes"]] == [32, 96, 192]
    assert status["report"] is True
    assert status["queries"] == 48


def test_recall_of_every_prefix_is_that_of_a_naive_search(client: TestClient, index: Index) -> None:
    status = client.get("/api/status").json()
    vectors = index.vectors(index.ids)
    labels = np.array([entry.label for entry in index.entries(index.ids)])
    spans = {"prefixes": [(0, 8), (0, 24), (0, 48)], "learners": [(0, 8), (8, 24), (24, 48)]}
    for name, parts in spans.items():
        for known, (start, stop) in zip(status[name], parts, strict=True):
            scores = vectors[:, start:stop] @ vectors[:, start:stop].T
            np.fill_diagonal(scores, -np.inf)
            order = np.argsort(-scores, axis=1)
            for k in (1, 4):
                right = (labels[order[:, :k]] == labels[:, None]).any(axis=1)
                assert known["recall"][str(k)] == pytest.approx(100 * right.mean(), abs=1e-2)


def test_the_page_has_the_numbers_of_the_report(model: Model) -> None:
    """By the weighting of the model, here `sqrt`; for these embeddings `alpha` gives other numbers."""
    random = np.random.default_rng(0)
    labels = np.arange(120) // 8
    raw = (random.normal(size=(15, 48))[labels] + 2 * random.normal(size=(120, 48))).astype(np.float32)
    report, other = (evaluate_ensemble(raw, model.groups, labels, (1, 2, 4, 8), weighting=w) for w in ("sqrt", "alpha"))
    assert model.weighting == "sqrt"
    assert report.recall["prefix-2"] != other.recall["prefix-2"]
    index = Index.build(model.vectors(raw), groups=model.groups, labels=labels)
    shown = Collection(
        index,
        model,
        lambda one: (Image.new("RGB", (1, 1)), None),
        recall={**recall_figures(index.vectors(index.ids), index.groups, labels, model.weighting, None), "on": "120"},
    )
    status = TestClient(create_app(shown, GENEROUS), base_url="http://localhost").get("/api/status").json()
    names = {"prefixes": ["learner-1", "prefix-2", "ensemble"], "learners": ["learner-1", "learner-2", "learner-3"]}
    for name, rows in names.items():
        for known, row in zip(status[name], rows, strict=True):
            assert known["recall"] == {str(k): round(value, 3) for k, value in report.recall[row].items()}


def test_search_by_id_gives_the_ensemble_and_every_learner(client: TestClient, index: Index) -> None:
    answer = client.get("/api/search", params={"id": "kind 2/3.png", "k": 5}).json()
    assert answer["query"] == {"id": "kind 2/3.png", "label": "kind 2"}
    assert [row["name"] for row in answer["rows"]] == ["ensemble", "learner-1", "learner-2", "learner-3"]
    vector = index.vectors(["kind 2/3.png"])[0]
    for row, learners in zip(answer["rows"], (None, [1], [2], [3]), strict=True):
        found = index.search(vector, 6, learners=learners)
        best = [one for one in found.ids.tolist() if one != "kind 2/3.png"][:5]
        assert [hit["id"] for hit in row["results"]] == best
        for hit in row["results"]:
            assert hit["right"] == (hit["label"] == "kind 2")
            assert -1 <= hit["similarity"] <= 1


def test_similarity_is_the_cosine(client: TestClient, index: Index) -> None:
    rows = client.get("/api/search", params={"id": "kind 0/0.png", "learners": 2, "k": 3}).json()["rows"]
    query = index.vectors(["kind 0/0.png"])[0]
    for row, (start, stop) in zip(rows, ((0, 24), (0, 8), (8, 24), (24, 48)), strict=True):
        assert row["dimension"] == stop - start
        for hit in row["results"]:
            other = index.vectors([hit["id"]])[0][start:stop]
            cosine = other @ query[start:stop] / np.linalg.norm(other) / np.linalg.norm(query[start:stop])
            assert hit["similarity"] == pytest.approx(cosine, abs=1e-4)


def test_the_ensemble_can_be_cut_and_asked_alone(client: TestClient, index: Index) -> None:
    for learners in (1, 2, 3):
        options = {"id": "kind 1/1.png", "learners": learners, "rows": "ensemble", "k": 4}
        [row] = client.get("/api/search", params=options).json()["rows"]
        assert row["learners"] == list(range(1, learners + 1))
        found = index.search(index.vectors(["kind 1/1.png"])[0], 5, learners=learners)
        assert [hit["id"] for hit in row["results"]] == [one for one in found.ids.tolist() if one != "kind 1/1.png"][:4]


def test_an_upload_finds_itself_and_is_remembered(
    client: TestClient, pixels: NDArray[np.uint8], collection: Collection
) -> None:
    answer = send(client, png(pixels[19]), k=3).json()
    best = answer["rows"][0]["results"][0]
    assert (best["id"], best["right"]) == ("kind 2/3.png", None)
    assert best["similarity"] == pytest.approx(1, abs=1e-3)
    assert answer["query"]["id"].startswith("upload:")
    again = client.get("/api/search", params={"id": answer["query"]["id"], "k": 3}).json()
    assert again["rows"] == answer["rows"]
    picture = client.get(f"/api/image/{answer['query']['id']}")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.content))), pixels[19])
    assert code(client.get("/api/search", params={"id": "upload:none"})) == (404, "forgotten")


@pytest.mark.parametrize(("room", "kept"), [(2.5, [404, 200, 200]), (0, [404, 404, 200])])
def test_old_uploads_are_forgotten(
    collection: Collection, pixels: NDArray[np.uint8], room: float, kept: list[int]
) -> None:
    """By the bytes of their thumbnails and vectors; the newest stays, however little room there is."""
    size = 1024 + 4 * 48 + 2 * len(png(pixels[0]))
    with serving(collection, Limits(rate=1000, burst=10_000, remembered=int(room * size))) as client:
        names = [send(client, png(pixels[row])).json()["query"]["id"] for row in range(3)]
        assert [client.get("/api/search", params={"id": name}).status_code for name in names] == kept
        assert [client.get(f"/api/image/{name}").status_code for name in names] == kept


def test_images_are_those_of_the_collection_and_no_others(
    client: TestClient, pixels: NDArray[np.uint8], report: Path
) -> None:
    answer = client.get("/api/image/kind 2/3.png")
    assert answer.headers["content-type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), pixels[19])
    assert "immutable" in client.get("/api/image/kind 2/3.png?v=1").headers["cache-control"]
    for other in ("kind 9/9.png", "../secret.txt", "%2e%2e/secret.txt", "/etc/passwd", str(report / "index.html"), "0"):
        assert client.get(f"/api/image/{other}").status_code == 404, other
    assert client.get("/api/image/kind 2/3.png?size=9999").status_code == 422
    for path in (
        "/report/../secret.txt",
        "/report/%2e%2e/secret.txt",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
    ):
        assert client.get(path).status_code == 404, path


def test_a_picture_whose_file_is_gone(index: Index, model: Model, tmp_path: Path) -> None:
    def unknown(one: str | int) -> Any:
        raise DataError(f"Cannot read {one}.")

    for picture in (unknown, lambda one: (tmp_path / "gone.png", None)):
        with serving(Collection(index, model, picture)) as client:
            assert code(client.get("/api/image/kind 2/3.png")) == (410, "gone")


def test_browsing(client: TestClient) -> None:
    every = client.get("/api/browse", params={"count": 100}).json()
    assert (every["matching"], len({one["id"] for one in every["images"]})) == (48, 48)
    first = client.get("/api/browse", params={"count": 5, "seed": 1}).json()
    assert first == client.get("/api/browse", params={"count": 5, "seed": 1}).json()
    assert first != client.get("/api/browse", params={"count": 5, "seed": 2}).json()
    some = client.get("/api/browse", params={"label": "KIND 3"}).json()
    assert some["matching"] == 8
    assert {one["label"] for one in some["images"]} == {"kind 3"}
    assert client.get("/api/browse", params={"label": "zebra"}).json() == {"matching": 0, "images": []}


def test_what_is_no_picture_is_refused(client: TestClient, collection: Collection, pixels: NDArray[np.uint8]) -> None:
    whole = png(pixels[0])
    assert code(send(client, b"hello, I am text")) == (415, "not_a_picture")
    assert code(send(client, whole[: len(whole) // 2])) == (422, "broken_picture")
    assert code(send(client, b"")) == (422, "broken_picture")
    assert code(client.post("/api/search")) == (422, "invalid")
    with serving(collection, replace(GENEROUS, upload_pixels=1000)) as strict:
        assert code(send(strict, whole)) == (413, "too_many_pixels")


def test_large_uploads_are_refused_however_they_come(collection: Collection) -> None:
    client = TestClient(create_app(collection, Limits(upload_bytes=50_000)), base_url="http://localhost")
    assert code(send(client, b"x" * 100_000)) == (413, "too_large")
    assert code(send(client, b"x" * 55_000)) == (413, "too_large")

    def streamed() -> Iterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 10_000

    form = {"content-type": "multipart/form-data; boundary=b"}
    assert code(client.post("/api/search", content=streamed(), headers=form)) == (413, "too_large")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"id": "kind 0/0.png", "k": 0}, 422),
        ({"id": "kind 0/0.png", "k": 101}, 422),
        ({"id": "kind 0/0.png", "learners": 4}, 422),
        ({"id": "kind 0/0.png", "learners": 0}, 422),
        ({"id": "kind 0/0.png", "rows": "some"}, 422),
        ({}, 422),
        ({"id": "kind 0/9.png"}, 404),
    ],
)
def test_bad_questions_get_a_clear_answer(client: TestClient, options: dict[str, Any], status: int) -> None:
    answer = client.get("/api/search", params=options)
    assert code(answer) == (status, "invalid" if status == 422 else "unknown_id")


def test_the_rate_is_limited(collection: Collection) -> None:
    client = TestClient(create_app(collection, Limits(rate=0.5, burst=3)), base_url="http://localhost")
    answers = [client.get("/api/search", params={"id": "kind 0/0.png"}) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert code(answers[-1]) == (429, "too_many")
    assert client.get("/").status_code == 200


def test_other_hosts_and_origins_are_turned_away(client: TestClient, collection: Collection) -> None:
    for host, status in (("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("evil.example", 400)):
        assert client.get("/api/status", headers={"host": host}).status_code == status, host
    assert client.get("/api/status", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/api/status", headers={"origin": "http://localhost"}).status_code == 200
    everywhere = Access(("shop.example",), any_address=True)
    anywhere = TestClient(create_app(collection, GENEROUS, access=everywhere), base_url="http://shop.example")
    for host, status in (
        *(("shop.example", 200), ("SHOP.example:80", 200), ("192.168.1.7:8000", 200), ("[fe80::1]:8000", 200)),
        *(("evil.example", 400), ("", 400), ("[", 400), ("shop.example@evil.example", 400), ("1.2.3.4.evil", 400)),
    ):
        assert anywhere.get("/api/status", headers={"host": host}).status_code == status, host


TOKEN = "a token & more"


def test_a_token_is_asked_for(collection: Collection) -> None:
    app = create_app(collection, GENEROUS, access=Access(token=TOKEN))
    client = TestClient(app, base_url="http://localhost", follow_redirects=False)
    for path in ("/api/status", "/api/browse", "/openapi.json", "/static/main.js", "/report/", "/nowhere"):
        answer = client.get(path)
        assert code(answer) == (401, "token"), path
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/").status_code == 401
    assert "bier serve" in client.get("/").text
    for wrong in ("", "x", TOKEN + "x", "café", "Basic " + TOKEN):
        assert client.get("/api/status", headers={"authorization": f"Bearer {wrong}".encode()}).status_code == 401
        assert client.get("/", params={"token": wrong}).status_code == 401
        assert client.get("/api/status", headers={"cookie": f"bier={wrong}".encode()}).status_code == 401
    assert client.get("/api/status", params={"token": TOKEN}).status_code == 401  # addresses are written to logs
    assert client.get("/api/status", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200


def test_the_address_with_the_token_opens_the_page(collection: Collection) -> None:
    app = create_app(collection, GENEROUS, access=Access(token=TOKEN))
    client = TestClient(app, base_url="http://localhost", follow_redirects=False)
    answer = client.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/").status_code == 200
    assert client.get("/api/status").status_code == 200
    assert client.get("/api/status", headers={"host": "evil.example"}).status_code == 400
    other = TestClient(create_app(collection, GENEROUS, access=Access(token="another")), base_url="http://localhost")
    other.cookies = client.cookies
    assert other.get("/api/status").status_code == 401


def test_guessing_tokens_is_slow(collection: Collection) -> None:
    app = create_app(collection, Limits(rate=0.5, burst=3), access=Access(token=TOKEN))
    client = TestClient(app, base_url="http://localhost")
    tries = [client.get("/", params={"token": f"guess {number}"}).status_code for number in range(5)]
    assert tries == [401, 401, 401, 429, 429]


def test_an_internal_error_has_the_headers_too(model: Model, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nobody expects this")

    shown = Collection(index, model, lambda one: (Image.new("RGB", (1, 1)), None))
    monkeypatch.setattr(index, "search", broken)
    client = TestClient(create_app(shown, GENEROUS), base_url="http://localhost", raise_server_exceptions=False)
    answer = client.get("/api/search", params={"id": "kind 0/0.png"})
    assert code(answer) == (500, "internal")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")


def test_headers_keep_everything_at_home(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/api/status", "/report/", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self'" if path != "/report/" else "default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_openapi_is_there_and_the_pages_that_load_from_elsewhere_are_not(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert {"/api/search", "/api/status", "/api/browse", "/api/image/{name}"} <= described["paths"].keys()
    assert described["info"]["version"] == bier.__version__
    assert client.get("/docs").status_code == 404
    assert client.get("/redoc").status_code == 404


def test_the_report_is_one_click_away(client: TestClient, collection: Collection) -> None:
    assert "The report of the run" in client.get("/report/").text
    assert client.get("/report").url.path == "/report/"
    without = TestClient(create_app(collection, GENEROUS), base_url="http://localhost")
    assert without.get("/api/status").json()["report"] is False
    assert without.get("/report/").status_code == 404


def test_the_page_names_no_other_place() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", text), file.name
        assert len(text.splitlines()) <= 300


def test_an_empty_collection(model: Model) -> None:
    empty = Collection(
        Index.build(np.empty((0, 48), np.float32), groups=model.groups),
        model,
        lambda one: (Image.new("RGB", (1, 1)), None),
    )
    client = TestClient(create_app(empty, GENEROUS), base_url="http://localhost")
    status = client.get("/api/status").json()
    assert (status["images"], status["queries"], status["prefixes"][0]["recall"]) == (0, None, None)
    assert client.get("/api/browse").json() == {"matching": 0, "images": []}


def test_a_model_with_other_learners_is_refused(model: Model) -> None:
    other = Index.build(np.eye(48, dtype=np.float32), groups=(24, 24))
    with pytest.raises(ModelError, match=r"must have the learners of the collection, \(24, 24\)"):
        Collection(other, model, lambda one: (Image.new("RGB", (1, 1)), None))


def test_pictures_stay_inside_the_collections_folder(
    index: Index, model: Model, pixels: NDArray[np.uint8], tmp_path: Path
) -> None:
    """Also with names that leave it; links inside the folder lead where their owner wants."""
    for name in ("photos/inside.png", "secret.png", "elsewhere/linked.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[0]).save(tmp_path / name)
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    root = tmp_path / "photos"
    names = ["inside.png", "../secret.png", "link/linked.png", "link/../secret.png", str(tmp_path / "secret.png")]
    hostile = Index.build(index.vectors(index.ids[:5]), names, index.groups)
    shown = Collection(hostile, model, lambda one: (root / str(one), None))
    for folders, status in (([root], [200, 403, 200, 410, 403]), ([root, tmp_path], [200, 200, 200, 410, 200])):
        with serving(shown, folders=folders) as client:
            answers = [client.get("/api/image/" + quote(name, safe="")) for name in names]
            assert [answer.status_code for answer in answers] == status
            assert all(code(answer)[1] == "outside" for answer in answers if answer.status_code == 403)


def test_recall_is_shown_of_classes_that_were_not_trained_on(collection: Collection) -> None:
    assert collection.recall is not None
    with serving(collection) as client:
        assert client.get("/api/status").json()["measured_on"] == "48 patterns"
    unknown = {key: value for key, value in collection.recall.items() if key != "on"}
    with serving(Collection(collection.store, collection.model, collection.picture, recall=unknown)) as client:
        status = client.get("/api/status").json()
        assert (status["queries"], status["measured_on"], status["prefixes"][0]["recall"]) == (None, None, None)


def test_several_pictures_are_one_query(client: TestClient) -> None:
    names = ["kind 1/1.png", "kind 1/2.png", "kind 1/1.png"]
    answer = client.get("/api/search", params={"id": names, "k": 5, "rows": "ensemble"}).json()
    assert (answer["query"]["id"], [one["id"] for one in answer["others"]]) == ("kind 1/1.png", ["kind 1/2.png"])
    [row] = answer["rows"]
    assert len(row["results"]) == 5
    assert not {one["id"] for one in row["results"]} & set(names)
    assert code(client.get("/api/search", params={"id": ["kind 1/1.png"] * 9}))[0] == 422
    assert code(client.get("/api/search", params={"id": ["kind 1/1.png", "x"]}))[0] == 404


def test_a_picture_at_full_size(index: Index, model: Model) -> None:
    large = Image.new("RGB", (5000, 100), "teal")
    with serving(Collection(index, model, lambda one: (np.asarray(large), None))) as client:
        picture = Image.open(io.BytesIO(client.get("/api/image/kind 2/3.png?size=full").content))
        assert picture.size == (4096, 82)


def test_the_log_is_short() -> None:
    """A traceback for a line that raises for the first time, then one line, and few of these per minute."""
    log, text = logging.Logger("test"), io.StringIO()
    log.addHandler(logging.StreamHandler(text))
    log.addFilter(ShortLog(lines=5))
    for number in range(100):
        try:
            raise LocalProtocolError("malformed") if number % 2 else ValueError("two\nlines")
        except (LocalProtocolError, ValueError):
            log.exception("Exception in ASGI application")
    assert text.getvalue().count("Traceback") == 1
    assert text.getvalue().count("Exception in ASGI application: ValueError: two lines\n") == 4
    assert "LocalProtocolError: malformed" not in text.getvalue()
