"""`bier index` and `bier search`, run as a user runs them: a model, a folder of pictures, an index or a store."""

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from bier import EmbeddingEnsemble, Index, Model, load
from bier.collection import stored_collection
from bier.models.backbones import build_backbone
from bier.search import open_store, read_embeddings
from bier.search.rerank import rerank

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three kinds of stripes, eight pictures each, and a few files that are no images."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for kind, name in enumerate(("along", "across", "both")):
        (folder / name).mkdir()
        for number in range(8):
            wave = np.sin(np.arange(60) * (0.3 + 0.1 * number))
            stripes = wave[None] * (kind != 1) + wave[:, None] * (kind != 0)
            noisy = 128 + 50 * stripes[..., None] + rng.normal(0, 8, (60, 60, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "no.png").write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    folder = tmp_path_factory.mktemp("run")
    ensemble = EmbeddingEnsemble(backbone.features, (8, 16, 24))
    Model(backbone, ensemble, weighting="alpha").save(folder / "model")
    return folder


@pytest.fixture
def index(cli: Cli, run_folder: Path, photos: Path, tmp_path: Path) -> Path:
    code, _, err = cli("index", run_folder, photos, "--out", tmp_path / "index")
    assert code == 0, err
    assert "24 images" in err
    return tmp_path / "index"


def results(printed: tuple[int, str, str]) -> list[dict]:
    code, out, err = printed
    assert code == 0, err
    return json.loads(out)["results"]


def test_an_index_is_what_the_model_and_python_give(cli: Cli, index: Path, run_folder: Path, photos: Path) -> None:
    model = load(run_folder)
    made = Index.load(index)
    paths = sorted(path for path in photos.glob("*/*.png") if ".hidden" not in path.parts)
    assert made.ids == [path.relative_to(photos).as_posix() for path in paths]
    np.testing.assert_allclose(made.vectors(made.ids), model.encode(paths), atol=1e-5)
    assert [entry.label for entry in made.entries(["across/0.png", "both/3.png"])] == ["across", "both"]
    query = photos / "along" / "3.png"
    found = results(cli("search", index, query, "-k", "5", "--json"))
    exact = [one for one in made.search(model.encode([query])[0], 6).ids.tolist() if one != "along/3.png"][:5]
    assert [one["id"] for one in found] == exact
    assert [one["rank"] for one in found] == [1, 2, 3, 4, 5]
    assert all(Path(one["path"]).is_file() for one in found)


def test_a_picture_from_elsewhere(cli: Cli, index: Path, photos: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "copy.png"
    elsewhere.write_bytes((photos / "both" / "2.png").read_bytes())
    [best] = results(cli("search", index, elsewhere, "-k", "1", "--json"))
    assert (best["id"], best["label"]) == ("both/2.png", "both")
    short = results(cli("search", index, elsewhere, "-k", "1", "--learners", "2", "--json"))
    assert short[0]["id"] == "both/2.png"
    assert short[0]["score"] == pytest.approx((1 / 3) ** 2 + (2 / 3) ** 2, abs=1e-4)


def test_an_id_is_a_query_too_and_filters_hold(cli: Cli, index: Path) -> None:
    found = results(
        cli(
            "search",
            index,
            "along/0.png",
            "--id",
            "-k",
            "50",
            "--where",
            "label=both",
            "--where",
            "label=along",
            "--json",
        )
    )
    assert len(found) == 15
    assert {one["label"] for one in found} == {"both", "along"}
    code, out, err = cli("search", index, "along/0.png", "--id", "-k", "2")
    assert (code, out) == (0, "")
    assert "2 of 24 images" in err
    assert "similarity" in err


def test_a_run_finds_the_index_inside_it(cli: Cli, run_folder: Path, photos: Path) -> None:
    code, _, err = cli("search", run_folder, photos / "along" / "0.png")
    assert code == 2
    assert f"bier index {run_folder} IMAGES --out {run_folder / 'index'}" in err
    cli("index", run_folder, photos, "--out", run_folder / "index")
    assert len(results(cli("search", run_folder, photos / "along" / "0.png", "--json"))) == 10


def test_the_picture_frames_right_and_wrong(cli: Cli, index: Path, photos: Path, tmp_path: Path) -> None:
    found = results(cli("search", index, "both/0.png", "--id", "-k", "8", "--picture", tmp_path / "row.png", "--json"))
    with Image.open(tmp_path / "row.png") as picture:
        colours = {colour for _, colour in picture.getcolors(maxcolors=1_000_000)}
        assert picture.width > 7 * 200
        assert picture.height > 2 * 200
    assert ((26, 127, 55) in colours) == any(one["label"] == "both" for one in found)
    assert ((207, 34, 46) in colours) == any(one["label"] != "both" for one in found)
    code, _, err = cli("search", index, "both/0.png", "--id", "--picture", tmp_path / "row.doc")
    assert (code, "must be a picture file" in err) == (2, True)


def embeddings(folder: Path, count: int = 30) -> Path:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(count, 12)).astype(np.float32)
    save_file({"vectors": vectors}, folder / "vectors.safetensors")
    about = {
        "paths": [f"photos/{row}.jpg" for row in range(count)],
        "labels": [row % 3 for row in range(count)],
        "groups": [4, 8],
        "model": {"path": "runs/x", "fingerprint": "abc"},
    }
    (folder / "vectors.json").write_text(json.dumps(about))
    return folder / "vectors.safetensors"


def test_an_index_of_embeddings(cli: Cli, tmp_path: Path) -> None:
    file = embeddings(tmp_path)
    code, out, _ = cli("index", file, "--out", tmp_path / "index", "--json")
    assert code == 0
    summary = json.loads(out)
    assert (summary["images"], summary["method"], summary["groups"]) == (30, "exact", [4, 8])
    vectors = read_embeddings(file).vectors
    found = results(cli("search", tmp_path / "index", "photos/4.jpg", "--id", "-k", "5", "--json"))
    rows = [row for row in np.argsort(-(vectors @ vectors[4])) if row != 4][:5]
    assert [one["id"] for one in found] == [f"photos/{row}.jpg" for row in rows]


def test_the_file_of_bier_embed_can_be_indexed(cli: Cli, run_folder: Path, photos: Path, tmp_path: Path) -> None:
    code, _, err = cli("embed", run_folder, photos, "--out", tmp_path / "vectors.safetensors")
    assert code == 0, err
    code, _, err = cli("index", tmp_path / "vectors.safetensors", "--out", tmp_path / "index")
    assert code == 0, err
    elsewhere = tmp_path / "copy.png"
    elsewhere.write_bytes((photos / "both" / "2.png").read_bytes())
    [best] = results(cli("search", tmp_path / "index", elsewhere, "-k", "1", "--json"))
    assert (best["id"], best["label"]) == ("both/2.png", "both")
    assert Path(best["path"]).is_file()


@pytest.fixture(params=["postgres", "qdrant", "milvus"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a collection that does not exist yet. The password is not asked for."""
    if request.param == "postgres":
        place = request.getfixturevalue("postgres_server").uri.replace("postgres:@", "postgres:s3cret@")
        return f"{place}#cli_{secrets.token_hex(4)}"
    pytest.importorskip({"qdrant": "qdrant_client", "milvus": "milvus_lite"}[request.param])
    return f"qdrant:{tmp_path}/qdrant" if request.param == "qdrant" else f"milvus:{tmp_path}/shop.db"


def test_a_store_is_loaded_in_steps_and_answers_like_the_index(cli: Cli, tmp_path: Path, uri: str) -> None:
    file = embeddings(tmp_path)
    known = read_embeddings(file)
    half = open_store(uri, known.groups, {"model": known.model, "root": known.root})
    half.add(known.vectors[:11], known.paths[:11], known.labels[:11])
    half.close()
    for option, added in (("--store", 19), ("--store", 0), ("--add", 0)):
        code, out, err = cli("index", file, option, uri, "--json")
        assert code == 0, err
        assert (json.loads(out)["new"], json.loads(out)["images"]) == (added, 30)
        assert "s3cret" not in out + err
    cli("index", file, "--out", tmp_path / "index")
    for more in ([], ["--where", "label=2"], ["--learners", "1"]):
        question = ("photos/4.jpg", "--id", "-k", "5", "--json", *more)
        theirs, ours = results(cli("search", uri, *question)), results(cli("search", tmp_path / "index", *question))
        assert [one["id"] for one in theirs] == [one["id"] for one in ours]
        assert [one["label"] for one in theirs] == [one["label"] for one in ours]
    beside = tmp_path / "vectors.json"
    beside.write_text(beside.read_text().replace("abc", "def"))
    code, out, err = cli("index", file, "--store", uri)
    assert (code, "empty it with --rebuild" in err, "s3cret" in out + err) == (2, True, False)
    code, out, _ = cli("index", file, "--store", uri, "--rebuild", "--json")
    assert (code, json.loads(out)["new"]) == (0, 30)


def test_a_store_is_shown_with_the_model_that_it_names(
    cli: Cli, uri: str, run_folder: Path, photos: Path, index: Path
) -> None:
    code, _, err = cli("index", run_folder, photos, "--store", uri)
    assert (code, "s3cret" in err) == (0, False), err
    shown = stored_collection(None, uri)
    assert (len(shown.store), "s3cret" in shown.title) == (24, False)
    assert shown.recall == stored_collection(None, str(index)).recall
    one = shown.store.ids[0]
    assert shown.picture(one) == (photos / str(one), None)
    shown.store.close()


def test_mistakes_end_with_one_line(cli: Cli, index: Path, run_folder: Path, photos: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("index", run_folder, photos), "Give one of --out FOLDER, --store URI and --add COLLECTION"),
        (("index", run_folder, "--out", tmp_path / "x"), "a model followed by images"),
        (("index", run_folder, tmp_path / "none", "--out", tmp_path / "x"), "Images must be a folder, or a table"),
        (("index", run_folder, run_folder / "model", "--out", tmp_path / "x"), "must hold images"),
        (("index", photos, photos, "--out", tmp_path / "x"), "A model must be a folder with model.json"),
        (("index", tmp_path / "v.safetensors", "--out", tmp_path / "x"), "v.safetensors is missing"),
        (("index", run_folder, photos, "--store", "redis:x"), "milvus:NAME.db"),
        (("search", index, tmp_path / "no.jpg"), "must be an image file. There is none at"),
        (("search", index, "both/0.png", "--id", "-k", "0"), "'-k' parameter must be a whole number of at least 1"),
        (("search", index, "both/0.png", "--id", "--where", "label"), "must be KEY=VALUE"),
        (("search", tmp_path / "nowhere", "both/0.png"), "must be an index, a store's URI or a run"),
    ):
        code, out, err = cli(*arguments)
        assert (code, out) == (2, ""), arguments
        assert message in err
        assert len(err.strip().splitlines()) == 1


@pytest.fixture
def with_threshold(cli: Cli, run_folder: Path, photos: Path, tmp_path: Path) -> tuple[Path, float]:
    """An index of a model that keeps a threshold, between the 4th and the 5th image nearest to along/0.png."""
    model = load(run_folder)
    vectors = model.encode(sorted(photos.glob("along/*.png")) + sorted(photos.glob("both/*.png")))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = np.sort(unit[1:] @ unit[0])[::-1]
    threshold = float(scores[3] + scores[4]) / 2
    same = {"prefixes": [0.5, None, threshold], "learners": [0.5] * 3, "precision": 95.0}
    model.metadata["same"] = same | {"part": "validation", "classes": 2}
    model.save(tmp_path / "run" / "model")
    (tmp_path / "shop").mkdir()
    for kind in ("along", "both"):
        (tmp_path / "shop" / kind).symlink_to(photos / kind)
    code, _, err = cli("index", tmp_path / "run", tmp_path / "shop", "--out", tmp_path / "same.index")
    assert code == 0, err
    return tmp_path / "same.index", threshold


def test_same_returns_only_what_lies_above_the_threshold(cli: Cli, with_threshold: tuple[Path, float]) -> None:
    index, threshold = with_threshold
    code, out, err = cli("search", index, "along/0.png", "--id", "--same", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["threshold"] == pytest.approx(threshold)
    assert len(answer["results"]) == 4
    assert all(one["similarity"] >= threshold for one in answer["results"])
    # with the weights alpha, the score is not the cosine: (1/6)^2 + (2/6)^2 + (3/6)^2 of it
    assert all(one["score"] == pytest.approx(one["similarity"] * 14 / 36, rel=1e-4) for one in answer["results"])
    everything = results(cli("search", index, "along/0.png", "--id", "--json"))
    assert [one["id"] for one in answer["results"]] == [one["id"] for one in everything[:4]]
    assert everything[4]["similarity"] < threshold
    code, _, err = cli("search", index, "along/0.png", "--id", "--same")
    assert f"4 of 16 images with a similarity of {threshold:.4f} or more" in err
    assert "similarity" in err.splitlines()[0]


def test_same_says_when_there_is_nothing(cli: Cli, with_threshold: tuple[Path, float], photos: Path) -> None:
    index, _ = with_threshold
    code, out, err = cli("search", index, "along/0.png", "--id", "--threshold", "0.9999999", "--json")
    assert code == 0, err
    assert json.loads(out)["results"] == []
    assert json.loads(out)["nearest"] < 1
    code, out, err = cli("search", index, "along/0.png", "--id", "--threshold", "0.9999999")
    assert (code, out) == (0, "")
    assert "The collection has no image with a similarity of 1.0000 or more: the nearest has 0." in err
    assert len(err.strip().splitlines()) == 1
    assert len(results(cli("search", index, "along/0.png", "--id", "--threshold", "-1", "--json"))) == 10


def test_a_threshold_of_some_learners(cli: Cli, with_threshold: tuple[Path, float], photos: Path) -> None:
    index, _ = with_threshold
    for query in (("along/0.png", "--id"), (photos / "across" / "0.png",)):  # one of the collection, and a file
        code, out, err = cli("search", index, *query, "--same", "--learners", "1", "-k", "20", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["threshold"] == 0.5
        plain = results(cli("search", index, *query, "--learners", "1", "-k", "20", "--json"))
        assert found["results"] == [one for one in plain if one["similarity"] >= 0.5]
        assert max(one["similarity"] for one in plain) <= 1
    code, _, err = cli("search", index, "along/0.png", "--id", "--same", "--learners", "2")
    assert (code, "none reached a precision of 95%" in err) == (2, True)


def test_without_a_threshold_same_is_one_clear_line(cli: Cli, index: Path) -> None:
    for arguments, message in (
        (("--same",), "The model must keep a threshold for --same. It has none"),
        (("--threshold", "1.5"), "'--threshold' option must be a cosine from -1 to 1. Got 1.5"),
        (("--rerank", "best"), "'rerank' parameter must be one of alpha-qe, dba, k-reciprocal. Got 'best'"),
    ):
        code, out, err = cli("search", index, "both/0.png", "--id", *arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert results(cli("search", index, "both/0.png", "--id", "--threshold", "0.5", "--json"))


@pytest.mark.parametrize("name", ["alpha-qe", "dba", "k-reciprocal"])
def test_re_ranking_is_that_of_python(
    cli: Cli, index: Path, photos: Path, tmp_path: Path, name: str, with_threshold: tuple[Path, float]
) -> None:
    made = Index.load(index)
    vectors = made.vectors(made.ids)
    row = made.ids.index("both/3.png")
    others = [one for one in np.argsort(-(vectors @ vectors[row]), kind="stable") if one != row]
    order = np.argsort(-rerank(name, vectors[row], vectors[others]), kind="stable")
    expected = [made.ids[others[place]] for place in order[:6]]
    for query in (("both/3.png", "--id"), (photos / "both" / "3.png",)):
        found = results(cli("search", index, *query, "-k", "6", "--rerank", name, "--json"))
        assert [one["id"] for one in found] == expected
        assert [one["rank"] for one in found] == [1, 2, 3, 4, 5, 6]
    same, threshold = with_threshold
    found = results(cli("search", same, "along/0.png", "--id", "--same", "--rerank", name, "--json"))
    assert found
    assert all(one["similarity"] >= threshold for one in found)


def test_another_model_is_refused(cli: Cli, index: Path, photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    backbone = build_backbone("conv4")
    Model(backbone, EmbeddingEnsemble(backbone.features, (8, 16, 24))).save(tmp_path / "other")
    (tmp_path / "new.png").write_bytes((photos / "both" / "0.png").read_bytes())
    code, _, err = cli("search", index, tmp_path / "new.png", "--model", tmp_path / "other")
    assert (code, "It has other weights" in err) == (2, True)


def test_index_out_deletes_no_folder_of_the_user(cli: Cli, run_folder: Path, photos: Path, tmp_path: Path) -> None:
    """Issue 34, 1.4: pictures in folders named `data-...` were deleted, with exit code 0."""
    shop = tmp_path / "shop"
    for year in ("data-2023", "data-2024"):
        shutil.copytree(photos / "along", shop / year)
    code, _, err = cli("index", run_folder, shop, "--out", shop)
    assert code == 2
    assert "must be new, empty or an index. It holds 'data-2023'" in err
    assert len(list(shop.rglob("*.png"))) == 16


def test_an_index_removes_no_folder_of_the_user(cli: Cli, run_folder: Path, photos: Path, tmp_path: Path) -> None:
    """Every folder named `data-...` was taken for one of the index and deleted, with exit code 0."""
    mine, index = tmp_path / "mine", tmp_path / "index"
    names = ("data-2023", "data-20240101")
    for name in names:
        shutil.copytree(photos / "both", mine / name)
    before = {path: path.read_bytes() for path in mine.rglob("*.png")}
    for source in (photos, mine):
        code, _, err = cli("index", run_folder, source, "--out", mine)
        assert (code, "must be new, empty or an index" in err) == (2, True), err
    assert cli("index", run_folder, photos / "both", "--out", index)[0] == 0
    for name in names:
        (mine / name).rename(index / name)
    for arguments in (("--add", index), ("--out", index), ("--add", index)):
        code, _, err = cli("index", run_folder, photos, *arguments)
        assert code == 0, err
        Index.load(index).save(index)
    assert {mine / path.relative_to(index): path.read_bytes() for path in index.rglob("*.png")} == before
    assert sorted(path.name for path in index.iterdir() if path.is_dir() and path.name not in names)[1:] == []
