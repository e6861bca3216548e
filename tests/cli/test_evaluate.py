"""`bier evaluate` as a user runs it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

import bier
from bier.data import Dataset
from bier.evaluate.dataset import assess
from bier.evaluate.thresholds import Gallery, model_thresholds, verify
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import unit_rows
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.runs import Run
from bier.training import resolve
from bier.training.setup import load_data

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(features_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and an ensemble, trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "data.root": str(features_file),
        "model.embedding": 12,
        "train.steps": 5,
        "train.batch_classes": 3,
        "train.batch_images": 4,
        "train.log_every": 1,
        "train.precision": "float32",
        "train.validate_by": "recall",  # so few steps may be worse than none
    }
    for method in ("baseline", "a-bier"):
        bier.train(resolve(method, "features", settings), folder / method)
    return folder


def test_the_numbers_and_their_names(cli: Cli, runs: Path, features_file: Path) -> None:
    code, out, said = cli("evaluate", runs / "a-bier", "--json", "--no-report")
    assert code == 0, said
    result = json.loads(out)
    names = {"ensemble", "ensemble-alpha", "ensemble-sqrt", "learner-1", "learner-2", "learner-3", "prefix-2"}
    assert names <= result["recall"].keys() <= names | {"prefix-3", "untrained"}
    for row in result["recall"].values():
        assert list(row) == ["1", "2", "4", "8", "16", "32"]
        assert all(0 <= value <= 100 for value in row.values())
        assert list(row.values()) == sorted(row.values())
    assert result["queries"] == result["gallery"] == 72
    assert {"feature_correlation", "classifier_correlation", "seconds"} <= result.keys()
    assert not (runs / "a-bier" / "report").exists()
    test = load_data(bier.Config.from_toml(runs / "a-bier" / "config.toml"))["test"]
    vectors = bier.load(runs / "a-bier").encode(test.images)
    assert result["recall"]["ensemble"]["1"] == pytest.approx(bier.recall_at_k(vectors, test.labels, [1])[1])


def test_the_untrained_features_are_a_row(cli: Cli, runs: Path) -> None:
    run = runs / "a-bier"
    code, out, said = cli("evaluate", run, "--json")
    assert code == 0, said
    result = json.loads(out)
    test = load_data(bier.Config.from_toml(run / "config.toml"))["test"]
    plain = test.images / np.linalg.norm(test.images, axis=1, keepdims=True)
    expected = bier.recall_at_k(plain, test.labels, [1, 8])
    assert [result["recall"]["untrained"][k] for k in ("1", "8")] == pytest.approx([expected[1], expected[8]])
    assert result["untrained"]["backbone"] == "features"
    assert 0 < result["untrained"]["map_at_r"] < 100
    page = (run / "report" / "index.html").read_text()
    assert "Untrained backbone" in page
    assert f"{result['recall']['ensemble']['1'] - expected[1]:+.1f} against untrained backbone" in page
    _, _, said = cli("evaluate", runs / "baseline", run)
    assert said.count("untrained features") == 1  # both started from the same
    _, out, _ = cli("evaluate", run, "--json", "--no-untrained", "--no-report")
    assert "untrained" not in out


def test_the_untrained_backbone_of_a_run_is_computed_once(
    cli: Cli, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    settings = {"data.root": str(pictures), "model.embedding": 12, "model.resolution": 64, "data.workers": 0}
    settings |= {"train.steps": 1, "train.batch_classes": 2, "train.batch_images": 2, "data.validation": 0.0}
    bier.train(resolve("a-bier", "folder", settings), run)
    encoded: list[str] = []
    real = Model.embed_raw

    def counting(model: Model, *arguments: Any, **named: Any) -> Any:
        encoded.append(model.metadata["method"])
        return real(model, *arguments, **named)

    monkeypatch.setattr(Model, "embed_raw", counting)
    found = [json.loads(cli("evaluate", run, "--json", "--no-report")[1]) for _ in range(2)]
    assert encoded == ["a-bier", "untrained", "a-bier"]
    assert found[0]["recall"] == found[1]["recall"]
    test = load_data(bier.Config.from_toml(run / "config.toml"))["test"]
    vectors = bier.pretrained("efficientnet_lite0", resolution=64).encode(test.images)
    assert found[0]["recall"]["untrained"]["1"] == pytest.approx(bier.recall_at_k(vectors, test.labels, [1])[1])
    (file,) = (run / "untrained").iterdir()
    file.write_bytes(file.read_bytes()[:-5])  # damaged: it is computed again
    assert json.loads(cli("evaluate", run, "--json", "--no-report")[1])["recall"] == found[0]["recall"]
    cli("evaluate", run, "--part", "train", "--json", "--no-report")  # other images
    assert encoded[3:] == ["a-bier", "untrained", "a-bier", "untrained"]


def test_a_report_leaves_the_files_of_others(cli: Cli, runs: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    assert cli("evaluate", runs / "a-bier", "--report", report)[0] == 0
    (report / "mine").mkdir()
    (report / "notes.txt").write_text("mine")
    (report / "mine" / "1.jpg").write_text("mine")
    (report / "similarities.png").unlink()
    assert cli("evaluate", runs / "baseline", "--report", report, "--no-untrained")[0] == 0
    assert (report / "notes.txt").read_text() == (report / "mine" / "1.jpg").read_text() == "mine"
    assert "baseline" in (report / "index.html").read_text()
    assert (report / "similarities.png").is_file()
    assert not (report / "learner-correlation.png").exists()

    other = tmp_path / "site"
    other.mkdir()
    (other / "index.html").write_bytes("<p>Caf\u00e9</p>".encode("latin-1"))
    code, _, said = cli("evaluate", runs / "a-bier", "--report", other)
    assert (code, said.count("\n")) == (2, 1)
    assert "must be new, empty or an earlier report. It holds 'index.html'" in said


def test_a_report_is_written(cli: Cli, runs: Path, tmp_path: Path) -> None:
    code, out, said = cli("evaluate", runs / "a-bier")
    assert (code, out) == (0, "")
    assert "R@1" in said
    assert "learner-3" in said
    assert (runs / "a-bier" / "report" / "index.html").is_file()
    code, _, said = cli("evaluate", runs / "baseline", "--report", tmp_path / "here")
    assert code == 0, said
    assert (tmp_path / "here" / "index.html").is_file()


def test_it_ends_with_a_verdict_and_the_report(cli: Cli, runs: Path) -> None:
    code, _, said = cli("evaluate", runs / "a-bier")
    assert code == 0
    *_, sentences, report = said.splitlines()
    assert report == f"Report: {runs / 'a-bier' / 'report' / 'index.html'}"
    assert sentences.startswith("Measured on 72 images of 6 classes that were not trained on. For ")
    assert " than before training. The two classes that it confuses most: " in sentences
    assert sentences in (runs / "a-bier" / "report" / "index.html").read_text()
    result = json.loads(cli("evaluate", runs / "a-bier", "--json", "--part", "train")[1])
    assert "not trained on" not in result["verdict"][0]
    assert f"For {result['recall']['ensemble']['1']:.1f}% of them the right class comes first" in result["verdict"][1]


def test_runs_are_compared(cli: Cli, runs: Path) -> None:
    code, out, said = cli("evaluate", runs / "baseline", runs / "a-bier", "--json")
    assert code == 0, said
    result = json.loads(out)["runs"]
    assert list(result) == [str(runs / "baseline"), str(runs / "a-bier")]
    assert result[str(runs / "baseline")]["classifier_correlation"] is None
    assert result[str(runs / "a-bier")]["classifier_correlation"] is not None
    code, out, said = cli("evaluate", runs / "baseline", runs / "a-bier")
    assert (code, out) == (0, "")
    assert "mAP@R" in said


def test_is_the_difference_real(cli: Cli, runs: Path, tmp_path: Path) -> None:
    baseline, boosted = runs / "baseline", runs / "a-bier"
    code, out, said = cli("evaluate", baseline, boosted, "--json", "--no-untrained", "--report", tmp_path / "page")
    assert code == 0, said
    first, second = (json.loads(out)["runs"][str(run)] for run in (baseline, boosted))
    assert first["difference"] == {}
    found = second["difference"][str(baseline)]
    for name, expected in (
        ("recall", second["recall"]["ensemble"]["1"] - first["recall"]["ensemble"]["1"]),
        ("map_at_r", second["map_at_r"] - first["map_at_r"]),
    ):
        assert found[name]["value"] == pytest.approx(expected, abs=1e-9)
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert "How sure the differences are" in (tmp_path / "page" / "index.html").read_text()
    assert "a-bier - " in " ".join(cli("evaluate", baseline, boosted, "--no-untrained")[2].split())


def test_a_part(cli: Cli, runs: Path) -> None:
    code, out, said = cli("evaluate", runs / "a-bier", "--part", "train", "--json", "--no-report")
    assert code == 0, said
    assert json.loads(out)["queries"] < 72
    code, out, said = cli("evaluate", runs / "a-bier", "--part", "tests", "--json")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert "tests" in said


def test_a_model_on_a_folder(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (4, 8))).save(tmp_path / "model")
    arguments = ["--data", "folder", "--root", pictures, "--report", tmp_path / "report", "--json"]
    code, out, said = cli("evaluate", tmp_path / "model", *arguments)
    assert code == 0, said
    result = json.loads(out)
    assert result["queries"] == 64
    assert result["measured"] == {"data": "folder", "part": "all", "classes": 8, "images": 64, "root": str(pictures)}
    about = f"folder {pictures}, whole: 64 images of 8 classes"
    assert about in (tmp_path / "report" / "index.html").read_text()
    code, out, said = cli("evaluate", tmp_path / "model", "--json")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert "--data" in said


def test_data_of_the_run_is_measured_on_its_test_part_and_other_data_whole(
    cli: Cli, runs: Path, features_file: Path, tmp_path: Path
) -> None:
    def measured(*arguments: Any) -> dict[str, Any]:
        code, out, said = cli("evaluate", runs / "a-bier", "--json", "--no-report", *arguments)
        assert code == 0, said
        found: dict[str, Any] = json.loads(out)
        assert found["measured"]["images"] == found["queries"]
        return found["measured"]

    own = {"data": "features", "part": "test", "classes": 6, "images": 72, "root": str(features_file)}
    assert measured() == own
    assert measured("--data", "features", "--root", features_file) == own
    other = tmp_path / features_file.name
    other.write_bytes(features_file.read_bytes())
    whole = {"data": "features", "part": "all", "classes": 12, "images": 144, "root": str(other)}
    assert measured("--data", "features", "--root", other) == whole
    assert measured("--part", "all") == whole | {"root": str(features_file)}
    half = measured("--data", "features", "--root", other, "--part", "test")
    assert half == whole | {"part": "test", "classes": 6, "images": 72}


def test_what_was_trained_on_is_never_measured_as_unseen(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    """Class folders that join the data after training, as in the life of a shop, do not draw the split anew."""
    root, run = tmp_path / "shop", tmp_path / "run"
    shutil.copytree(pictures, root)
    options = ["--set", "model.backbone=conv4", "--set", "data.validation=0", "--set", "train.batch_images=2"]
    code, _, said = cli("train", "--data", "folder", "--root", root, "--out", run, "--steps", 1, *options)
    assert code == 0, said
    classes = Run(run).classes
    assert classes is not None
    before = json.loads(cli("evaluate", run, "--json", "--no-report")[1])
    for number in range(3):
        shutil.copytree(root / "class 0", root / f"a new kind {number}")
    shutil.rmtree(root / classes["test"][0])
    shutil.copy(root / classes["test"][1] / "0.png", root / classes["test"][1] / "another.png")
    encoded: list[str] = []

    def watched(model: Model, dataset: Dataset, **given: Any) -> Any:
        encoded.extend(dataset[given.get("part") or "test"].label_names())
        return assess(model, dataset, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bier.evaluate.dataset.assess", watched)
        code, out, said = cli("evaluate", run, "--json", "--no-report", "--no-untrained")
    assert code == 0, said
    after = json.loads(out)
    assert not set(encoded) & set(classes["train"])
    assert after["measured"]["classes"] == before["measured"]["classes"] - 1
    assert after["queries"] == before["queries"] - 8
    assert after["new_classes"]["names"] == [f"a new kind {number}" for number in range(3)]
    assert after["new_classes"]["measured"]["images"] == 24
    assert after["gone_classes"] == [classes["test"][0]]
    code, _, said = cli("evaluate", run, "--no-report", "--no-untrained")
    assert "3 classes new since training and measured as a part of their own: a new kind 0, a new kind 1" in said
    assert f"1 class gone since training: {classes['test'][0]}" in said
    assert "1 image added to known classes since training: not measured" in said


def test_tables_say_what_was_measured(cli: Cli, runs: Path, features_file: Path, tmp_path: Path) -> None:
    words = f"features {features_file}, test part: 72 images of 6 classes"
    for arguments in ([runs / "a-bier"], [runs / "baseline", runs / "a-bier"]):
        code, _, said = cli("evaluate", *arguments)
        assert code == 0, said
        assert words.replace(" ", "") in "".join(said.split())  # the terminal wraps it
    assert words in (runs / "a-bier" / "report" / "index.html").read_text()


def test_saved_embeddings(cli: Cli, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = [f"class {number // 4}" for number in range(20)]
    raw = (random.normal(size=(5, 6)).repeat(4, axis=0) + 0.1 * random.normal(size=(20, 6))).astype(np.float32)
    file = tmp_path / "vectors.safetensors"
    save_file({"raw": raw, "vectors": raw}, file)
    about = {"groups": [2, 4], "weighting": "alpha", "labels": labels, "paths": [str(n) for n in range(20)]}
    file.with_suffix(".json").write_text(json.dumps(about))
    code, out, said = cli("evaluate", "--embeddings", file, "--report", tmp_path / "report", "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result["groups"] == [2, 4]
    assert result["measured"] == {"data": str(file), "part": "all", "classes": 5, "images": 20}
    assert result["recall"]["ensemble"]["1"] > 90
    assert (tmp_path / "report" / "index.html").is_file()

    for content, expected in (
        (json.dumps({**about, "labels": None}), "no label"),
        (json.dumps({**about, "labels": [None] * 20}), "no label"),
        (json.dumps({"labels": labels}), "damaged"),
        ("{", "damaged"),
        ("[]", "damaged"),
    ):
        file.with_suffix(".json").write_text(content)
        code, out, said = cli("evaluate", "--embeddings", file)
        assert (code, out, len(said.splitlines())) == (2, "", 1), said
        assert expected in said
    file.with_suffix(".json").write_text(json.dumps(about))
    file.write_bytes(file.read_bytes()[:50])
    code, _, said = cli("evaluate", "--embeddings", file)
    assert (code, len(said.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Name one or more runs"),
        (["run", "--embeddings", "file"], "and not both"),
        (["nowhere"], "nowhere"),
        (["--embeddings", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, said = cli("evaluate", *arguments)
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert expected in said


def test_a_run_that_is_not_finished(cli: Cli, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text((runs / "a-bier" / "config.toml").read_text())
    code, _, said = cli("evaluate", tmp_path)
    assert (code, len(said.splitlines())) == (2, 1)
    assert "model" in said


def test_classification(cli: Cli, runs: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    root = tmp_path / "cifar-10-batches-bin"
    root.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (40, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(40) % 10
        (root / f"{name}.bin").write_bytes(records.tobytes())
    options = ["--data", "cifar10", "--root", root, "--method", "a-bier", "--out", tmp_path / "run"]
    code, _, said = cli("train", *options, "--set", "train.steps=2", "--set", "train.batch_images=2")
    assert code == 0, said
    code, out, said = cli("evaluate", tmp_path / "run", "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result["accuracy"].keys() == {"ensemble", "learner-1", "learner-2", "prefix-2"}
    assert result["images"] == 40
    assert result["measured"] == {"data": "cifar10", "part": "test", "classes": 10, "images": 40}
    code, _, said = cli("evaluate", tmp_path / "run", tmp_path / "run")
    assert code == 0
    assert "accuracy" in said
    code, _, said = cli("evaluate", tmp_path / "run", runs / "baseline")
    assert code == 0, said
    assert "accuracy" in said
    assert "R@1" in said


def test_the_test_set_of_vehicleid(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "train_test_split").mkdir()
    listed = [
        f"{place}-{file.stem} {place}"
        for place, folder in enumerate(sorted(pictures.iterdir()))
        for file in sorted(folder.iterdir())
    ]
    for line in listed:
        name, place = line.split()
        file = sorted(pictures.iterdir())[int(place)] / f"{name.split('-')[1]}.png"
        Image.open(file).save(tmp_path / "image" / f"{name}.jpg")
    for name, lines in (("train_list", listed), ("test_list_800", listed[:16]), ("test_list_2400", listed[:40])):
        (tmp_path / "train_test_split" / f"{name}.txt").write_text("\n".join(lines))
    options = ["--data", "vehicleid", "--root", tmp_path, "--out", tmp_path / "run", "--set", "model.backbone=conv4"]
    code, _, said = cli("train", *options, "--steps", 1, "--set", "train.batch_images=2", "--set", "data.validation=0")
    assert code == 0, said
    for options, classes in (([], 2), (["--size", "large"], 5), (["--size", "small"], 2)):
        code, out, said = cli("evaluate", tmp_path / "run", "--json", "--no-report", *options)
        assert code == 0, said
        assert json.loads(out)["measured"]["classes"] == classes
    code, _, said = cli("evaluate", tmp_path / "run", "--size", "big")
    assert (code, said.count("\n")) == (2, 1)
    code, _, said = cli("evaluate", tmp_path / "run", "--data", "folder", "--root", pictures, "--size", "large")
    assert (code, said) == (2, "bier: --size chooses a test set of vehicleid. The data here is folder.\n")


@pytest.fixture(scope="module")
def separated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feature file of 96 classes that are easier to tell apart, so that a precision of 95% can be reached."""
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(96), 8)
    features = (random.normal(size=(96, 24))[labels] + 0.5 * random.normal(size=(768, 24))).astype(np.float32)
    path = tmp_path_factory.mktemp("vectors") / "features.safetensors"
    save_file({"features": features, "labels": labels}, path)
    return path


@pytest.fixture(scope="module")
def run_with_threshold(separated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "shop"
    settings = {"data.root": str(separated), "data.validation": 0.5, "model.embedding": 24, "train.steps": 2}
    settings |= {"train.batch_classes": 3, "train.batch_images": 4, "train.precision": "float32"}
    bier.train(resolve("bier", "features", settings), run)
    return run


def test_same_or_not(cli: Cli, run_with_threshold: Path) -> None:
    """The threshold is found on validation classes and tested on the test classes; the model keeps both."""
    run = run_with_threshold
    model, dataset = bier.load(run), load_data(bier.Config.from_toml(run / "config.toml"))
    kept = model.metadata["same"]
    assert (kept["part"], kept["classes"], kept["queries"], kept["images"]) == ("validation", 24, 192, 384)
    z = {name: model.embed_raw(dataset[name].images) for name in dataset.parts}
    others = Gallery(z["train"], 100 + dataset["train"].labels)
    again = model_thresholds(
        z["validation"], dataset["validation"].labels, others, model.groups, model.weighting, part="validation"
    )
    assert again is not None
    assert kept["prefixes"] == pytest.approx(again["prefixes"])

    code, out, said = cli("evaluate", run, "--json", "--no-report")
    assert code == 0, said
    same = json.loads(out)["same"]
    assert same["pairs"] == {"same": 48 * 8 * 7, "different": 48 * 8 * 47 * 8}
    assert set(same["tar"]) == {"0.01", "0.001", "0.0001"}
    found = verify(model.encode(dataset["test"].images), dataset["test"].labels, threshold=kept["threshold"])
    assert found is not None
    assert found.tested is not None
    assert same["tested"] == pytest.approx(found.tested._asdict())
    assert same["eer"] == pytest.approx(found.eer)
    tested = {
        "data": "features",
        "classes": 48,
        "precision": found.tested.precision_with_unknown,
        "recall": found.tested.recall,
    }
    assert same["kept"] == {**kept, "tested": pytest.approx(tested)}
    after = bier.load(run)
    assert after.metadata["same"] == same["kept"]
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), model.parameters(), strict=True))
    code, _, said = cli("evaluate", run)
    assert code == 0, said
    name = "found on validation images (24 classes)"
    assert f"the model's, {name}" in said
    assert f"EER {same['eer']:.2f}" in said
    page = (run / "report" / "index.html").read_text()
    assert "Same or not" in page
    assert f"Kept in the model, {name}" in page
    assert (run / "report" / "roc.png").is_file()
    bier.load(run).save(run.parent / "copy")
    other = bier.load(run.parent / "copy").metadata["same"]
    cli("evaluate", run, "--part", "validation", "--no-report")
    assert bier.load(run).metadata["same"] == other  # images that it was chosen on are no test


def test_a_model_whose_threshold_was_not_found_says_so(cli: Cli, runs: Path) -> None:
    kept = bier.load(runs / "a-bier").metadata["same"]
    assert (kept["threshold"], kept["part"], kept["classes"]) == (None, "validation", 1)
    code, _, said = cli("evaluate", runs / "a-bier", "--no-report")
    assert code == 0
    assert "the model keeps no threshold: that takes 20 validation classes, and it was trained with 1" in said


def test_embeddings_that_are_nearly_alike_are_measured_exactly(cli: Cli, tmp_path: Path) -> None:
    """Mean cosine 0.9999999: with scores in float32, MAP@R fell to nonsense while Recall@K stayed exact."""
    random = np.random.default_rng(0)
    labels = np.arange(400) % 40
    raw = random.normal(size=(40, 16))[labels] + 0.02 * random.normal(size=(400, 16))
    raw = (1 + 3e-4 * raw).astype(np.float32)
    unit = unit_rows(torch.from_numpy(raw)).double().numpy()
    scores = unit @ unit.T
    assert 0.9999998 < scores.mean() < 1
    shares = []
    for query, row in enumerate(scores):  # MAP@R as it is defined, in double precision
        order = np.argsort(-np.where(np.arange(400) == query, -1, row))[:9]
        right = labels[order] == labels[query]
        shares.append((right * np.cumsum(right) / np.arange(1, 10)).sum() / 9)
    file = tmp_path / "vectors.safetensors"
    save_file({"raw": raw, "vectors": raw}, file)
    names = [f"class {label}" for label in labels]
    about = {"groups": [16], "weighting": "alpha", "labels": names, "paths": [str(n) for n in range(400)]}
    file.with_suffix(".json").write_text(json.dumps(about))
    code, out, said = cli("evaluate", "--embeddings", file, "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result["map_at_r"] == pytest.approx(100 * np.mean(shares), abs=0.05)
    assert result["same"]["eer"] < 1  # cosines, which are told apart although they differ by 1e-7


def test_re_ranking_is_shown_beside_the_plain_row(cli: Cli, runs: Path) -> None:
    names = ("--rerank", "alpha-qe", "--rerank", "k-reciprocal")
    code, out, said = cli("evaluate", runs / "a-bier", "--json", *names)
    assert code == 0, said
    result = json.loads(out)
    assert list(result["rerank"]) == ["shortlist", "plain", "alpha-qe", "k-reciprocal"]
    plain = result["rerank"]["plain"]
    assert plain["recall"] == pytest.approx(result["recall"]["ensemble"])
    assert plain["map_at_r"] == pytest.approx(result["map_at_r"])
    assert result["rerank"]["k-reciprocal"]["milliseconds"] > plain["milliseconds"] > 0
    assert "Re-ranking" in (runs / "a-bier" / "report" / "index.html").read_text()
    code, _, said = cli("evaluate", runs / "a-bier", "--no-report", *names)
    assert "ms per query" in said
    assert "re-ranking of the 100 nearest images" in said
    code, _, said = cli("evaluate", runs / "a-bier", "--rerank", "best")
    assert (code, "'rerank' parameter must be one of" in said) == (2, True)
