"""`bier train` as a user runs it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import bier
from bier.cli.train import outcome
from bier.config import Config
from bier.data.sampler import BalancedBatches
from bier.runs import Run
from bier.training import TrainingResult, resolve
from bier.training.plan import Plan
from bier.training.setup import Scores, load_data

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
Cli = Callable[..., tuple[int, str, str]]
SMALL = [
    *("--set", "model.embedding=12", "--set", "diversity.hidden=8", "--set", "data.validation=0"),
    *("--set", "train.batch_classes=3", "--set", "train.batch_images=3", "--set", "train.log_every=1"),
]


def test_json_is_one_object_and_the_run_is_complete(cli: Cli, features_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--data", "features", "--root", features_file, "--method", "bier", "--out", run, *SMALL]
    code, out, said = cli("train", *options, "--set", "train.steps=4", "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result.pop("seconds") > 0
    assert 0 <= result.pop("validation_share") < 1
    assert result == {
        "run": str(run),
        "model": str(run / "model"),
        "steps": 4,
        "best_step": None,
        "best_validation": None,
        "validation": None,
        "untrained": None,
        "planned_seconds": None,
        "choice": None,
        "skipped": [],
    }
    config = Config.from_toml(run / "config.toml")
    assert (config.method, config.data.root, config.train.steps) == ("bier", str(features_file), 4)
    assert {"config.toml", "metrics.jsonl", "checkpoints", "model"} <= {path.name for path in run.iterdir()}
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == [".bier.json"]  # a folder of ours

    again = tmp_path / "again"
    code, out, said = cli("train", "--config", run / "config.toml", "--out", again)
    assert (code, out) == (0, "")
    assert f"Next: bier evaluate {again}" in said
    assert (again / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()

    code, out, said = cli("train", "--resume", run, "--set", "loss.cost=9.0", "--set", "seed=1")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert "loss.cost: 10.0 / 9.0" in said
    assert "seed: 0 / 1" in said


def test_the_default_folder_says_what_it_is(
    cli: Cli, features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--data", "features", "--root", features_file, *SMALL, "--set", "train.steps=1", "--set", "seed=5"]
    code, _, said = cli("train", *options)
    assert code == 0, said
    assert (tmp_path / "runs" / "features-a-bier-5" / "model" / "model.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "glyphs", "--method", "abier"], "Did you mean 'a-bier'?"),
        (
            ["--data", "glyphs", "--set", "train.step=5"],
            "There is no setting 'train.step'. Did you mean 'train.steps'?",
        ),
        (["--set", "train.steps"], "section.key=value"),
        (
            ["--data", "glyphs", "--set", "train.steps=many"],
            "The setting 'train.steps' must be a whole number, at least 1. Got 'many' instead.",
        ),
        (["--data", "glyphs", "--set", "model.groups=100-100"], "add up to 'model.embedding' = 512"),
        (["--data", "flowers"], "Got 'flowers' instead"),
        (["--data", "folder"], "needs a root"),
        (["--data", "folder", "--root", "nowhere"], "nowhere"),
        (["--data", "folder", "--root", "."], "It holds none"),
        (["--data", "glyphs", "--set", "model.backbone=conv5"], "Got 'conv5' instead. Did you mean conv4"),
        (["--resume", "nowhere"], "There is no config at nowhere/config.toml"),
        (["--resume", "nowhere", "--out", "elsewhere"], "leave out --out"),
        (["--resume", "nowhere", "--method", "bier"], "leave out --method"),
        (["--config", "nowhere.toml", "--data", "cub"], "leave out --data"),
        (["--config", "nowhere.toml"], "There is no config at nowhere.toml"),
        (["--stepss", "4"], "--stepss"),
        (["--steps", "0"], "--steps"),
        (["--data", "glyphs", "--minutes", "10", "--steps", "5"], "leave out --steps and train.steps"),
        (["--minutes", "10", "--data", "glyphs"], "Got conv4 on glyphs instead; use --steps"),
        (["--resume", "nowhere", "--minutes", "5"], "leave out --minutes"),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, said = cli("train", *arguments)
    assert (code, out) == (2, "")
    assert len(said.splitlines()) == 1, said
    assert said.startswith("bier: ")
    assert expected in said
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_overwritten(cli: Cli, features_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 0\n")
    code, _, said = cli("train", "--data", "features", "--root", features_file, "--out", tmp_path)
    assert code == 2
    assert f"{tmp_path} already holds a run. Resume it with --resume {tmp_path}" in said


def test_a_loss_that_breaks(cli: Cli, features_file: Path, tmp_path: Path) -> None:
    options = ["--data", "features", "--root", features_file, "--method", "a-bier", "--out", tmp_path / "run", *SMALL]
    options += [
        "--set",
        "train.learning_rate=100",
        "--set",
        "diversity.norm_weight=1000",
        "--set",
        "train.optimizer=sgd",
    ]
    code, out, said = cli("train", *options, "--set", "train.checkpoint_every=1")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert said.startswith("bier: Step ")
    assert "checkpoint" in said


def test_a_broken_picture_is_named_and_can_be_skipped(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for name in range(4):
        (root / f"{name}").mkdir(parents=True)
        for number in range(1 if name == 0 else 3):  # one class has a single image
            Image.open(pictures / f"class {name}" / f"{number}.png").save(root / f"{name}" / f"{number}.jpg")
        broken = root / f"{name}" / "broken.jpg"
        broken.write_bytes((root / f"{name}" / "0.jpg").read_bytes()[:600])
    options = ["--data", "folder", "--root", root, *SMALL, "--set", "train.steps=6", "--set", "model.backbone=conv4"]
    code, out, said = cli("train", *options, "--out", tmp_path / "refused")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert "broken.jpg" in said
    code, _, said = cli("train", *options, "--out", tmp_path / "run", "--skip-broken")
    assert code == 0, said
    in_training = [line for line in said.splitlines() if line.startswith("skipped: ")]
    assert len(in_training) == 2
    assert all("broken.jpg" in line for line in in_training)
    code, out, said = cli("evaluate", tmp_path / "run", "--json", "--no-report")  # the run knows that it skips
    assert code == 0, said
    assert [Path(one["path"]).name for one in json.loads(out)["skipped"]] == ["broken.jpg"] * 2
    _, _, said = cli("evaluate", tmp_path / "run", "--no-report", "--no-untrained")
    in_test = [line for line in said.splitlines() if line.startswith("skipped: ")]
    assert len({*in_training, *in_test}) == 4


def test_where_no_image_can_be_read(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    """One line, also where it is all of the validation, or all that the time would be measured on."""
    root = tmp_path / "photos"
    options = ["--data", "folder", "--root", root, "--skip-broken", "--out", tmp_path / "run"]
    for name in range(8):
        shutil.copytree(pictures / f"class {name}", root / f"{name}")
    dataset = load_data(resolve("a-bier", "folder", {"data.root": str(root)}))
    for name, more in (("validation", ()), ("train", ("--minutes", "1"))):
        for image in dataset[name].images:
            Path(image).write_bytes(b"no picture")
        code, out, said = cli("train", *options, *more)
        assert (code, out) == (2, "")
        assert "images of 'folder' can be read" in said.splitlines()[-1]


VALIDATED = [*SMALL[:4], "--set", "data.validation=0.4", *SMALL[6:], "--set", "train.validate_every=2"]


def test_the_end_says_whether_training_has_paid(cli: Cli, features_file: Path, tmp_path: Path) -> None:
    options = ["--data", "features", "--root", features_file, *VALIDATED, "--steps", 4]
    code, out, said = cli("train", *options, "--out", tmp_path / "good", "--json")
    assert code == 0, said
    result = json.loads(out)
    assert result["untrained"].keys() == result["validation"].keys() == {"recall", "map"}
    assert result["best_validation"] == result["validation"]["recall"]
    assert f"untrained backbone: validation R@1 {result['untrained']['recall']:.2f}, MAP@R" in said
    wrong = ["--set", "train.learning_rate=3.0", "--set", "train.optimizer=sgd", "--set", "train.schedule=constant"]
    code, _, said = cli("train", *options, *wrong, "--out", tmp_path / "bad")
    assert code == 0, said
    recall = f"{result['untrained']['recall']:.2f}"
    assert f"Kept: step 0, validation R@1 {recall} (MAP@R" in said
    assert f"untrained backbone {recall} (" in said
    assert "searched among each other and 48 training images" in said
    assert "Training gained nothing" in said
    assert "--set train.learning_rate=1" in said


@pytest.mark.parametrize(
    ("best_step", "best", "expected"),
    [
        (0, Scores(55, 30), "Training gained nothing: no step was better than the untrained backbone"),
        (
            10,
            Scores(55.5, 30.5),
            "little (MAP@R +0.50) and was still improving. Try more --minutes, or --steps 20.",
        ),
        (4, Scores(55.5, 30.5), "(MAP@R +0.50), and later steps were worse. Try a lower rate (--set train.learning_r"),
        (4, Scores(61.2, 35), None),
    ],
)
def test_what_to_try(best_step: int, best: Scores, expected: str | None) -> None:
    run = TrainingResult(Path("run"), 10, best_step, best.recall, False, best, Scores(55, 30), 40, 0)
    first, *more = outcome(run, resolve("a-bier", "folder", {"train.steps": 10}))
    assert first == (
        f"Kept: step {best_step}, validation R@1 {best.recall:.2f} (MAP@R {best.map_at_r:.2f}), untrained backbone "
        "55.00 (30.00); 40 validation images."
    )
    assert (expected is None and not more) or expected in more[0]


def test_validation_that_cannot_show_a_gain() -> None:
    run = TrainingResult(Path("run"), 10, 10, 100.0, False, Scores(100, 100), Scores(100, 99.9), 8, 16)
    _, told = outcome(run, resolve("a-bier", "folder", {"train.steps": 10}))
    assert told.startswith("The untrained backbone already ranks nearly all validation images right")


def photos(pictures: Path, root: Path) -> Path:
    """A copy as JPEG files."""
    for folder in sorted(pictures.iterdir()):
        (root / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir()):
            Image.open(file).save(root / folder.name / f"{file.stem}.jpg")
    return root


CONV4 = ["--data", "folder", *SMALL, "--set", "model.backbone=conv4", "--set", "data.workers=0"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:600])


@pytest.mark.filterwarnings("default")
def test_a_broken_picture_that_no_batch_draws_costs_nothing(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    """The match threshold looks at more images than the batches; it leaves this one out and says so."""
    files = sorted(pictures.rglob("*.png"))
    for name in range(100):  # of which 20 are for validation, as many as a threshold needs
        (tmp_path / "photos" / f"{name}").mkdir(parents=True)
        for number in range(2):
            Image.open(files[name % 50 + number]).save(tmp_path / "photos" / f"{name}" / f"{number}.jpg")
    shares: dict[str, object]
    root, shares = tmp_path / "photos", {"data.validation": 0.4, "data.validation_classes": 20}
    part = load_data(resolve("a-bier", "folder", {"data.root": str(root), **shares}))["train"]
    drawn = {number for number, _ in next(BalancedBatches(part.labels, 3, 3, seed=0))}
    broken = next(image for number, image in enumerate(part.images) if number not in drawn)
    truncate(Path(broken))
    shares |= {"train.validate_by": "recall"}  # no training image is looked at to validate
    chosen = [word for key, value in shares.items() for word in ("--set", f"{key}={value}")]
    code, _, said = cli("train", *CONV4, *chosen, "--root", root, "--steps", 1, "--out", tmp_path / "run")
    assert code == 0, said
    assert "The match threshold leaves out 1 image that cannot be read." in said
    assert Path(broken).name in said
    assert bier.load(tmp_path / "run").metadata["same"] is not None


@pytest.mark.filterwarnings("default")
def test_a_broken_picture_in_a_batch_costs_no_step(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    """The model so far is kept, and the run goes on without the picture."""
    root = photos(pictures, tmp_path / "photos")
    config = resolve("a-bier", "folder", {"data.root": str(root), "data.validation": 0.0})
    part = load_data(config)["train"]
    batches = BalancedBatches(part.labels, 3, 3, seed=0)
    first, second = ({number for number, _ in next(batches)} for _ in range(2))
    broken = Path(part.images[min(second - first)])
    truncate(broken)
    run = tmp_path / "run"
    code, _, said = cli("train", *CONV4, "--root", root, "--steps", 4, "--out", run)
    assert code == 2
    assert broken.name in said
    assert f"The model of step 1 is in {run / 'model'}. Go on with --resume {run}" in said
    assert bier.load(run).groups
    assert Run(run).step == 1
    code, _, said = cli("train", "--resume", run, "--skip-broken")
    assert code == 0, said
    assert [row["step"] for row in Run(run).metrics()] == [1, 2, 3, 4]
    assert f"skipped: Cannot read the picture {broken}" in said


def test_all_sampled_images_are_broken(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    root = photos(pictures, tmp_path / "photos")
    options = ["--data", "folder", "--root", root, "--skip-broken", "--set", "data.workers=0"]
    validation = ["--set", "data.validation=0.3", "--set", "data.validation_order=last"]
    config = resolve("a-bier", "folder", {"data.root": str(root), "data.validation": 0.3})
    config = config.with_settings({"data.validation_order": "last"})
    dataset = load_data(config)
    for image in dataset["validation"].images:
        truncate(Path(image))
    small = ["--set", "model.backbone=conv4", "--set", "model.embedding=12", "--steps", 1]
    code, out, said = cli("train", *options, *validation, *small, "--out", tmp_path / "run")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert f"None of the {len(dataset['validation'])} validation images of 'folder' can be read." in said
    for image in dataset["train"].images:
        truncate(Path(image))
    code, out, said = cli("train", *options, *validation, "--minutes", 5, "--out", tmp_path / "run")
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert "can be read." in said


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_is_extended(cli: Cli, features_file: Path, tmp_path: Path, schedule: str) -> None:
    options = ["--data", "features", "--root", features_file, *SMALL, "--set", f"train.schedule={schedule}"]
    for name, steps in (("short", 4), ("long", 9)):
        assert cli("train", *options, "--steps", steps, "--out", tmp_path / name)[0] == 0
    code, _, said = cli("train", "--resume", tmp_path / "short", "--steps", 9)
    assert code == 0, said
    assert "The run was planned for 4 steps and goes on from step 4 to 9. The learning rate is" in said
    assert ("constant, as in a run of 9 steps" in said) == (schedule == "constant")
    assert ("that of a cosine schedule over 9 steps from here on" in said) == (schedule == "cosine")
    assert Run(tmp_path / "short").config.train.steps == 9
    assert Run(tmp_path / "short").records["made_by"]["planned_steps"] == [4]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("short", "long")]
    assert (weights[0] == weights[1]) == (schedule == "constant")
    code, _, said = cli("train", "--resume", tmp_path / "short", "--steps", 5)
    assert (code, "has reached step 9; 'train.steps' must be at least that. Got 5" in said) == (2, True)


def test_a_folder_that_is_called_like_a_number(
    cli: Cli, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pictures, "2024.10")
    code, _, said = cli("train", *CONV4, "--set", "data.root=2024.10", "--root", ".", "--steps", 1, "--out", "run")
    assert code == 0, said
    assert Run("run").config.data.root == "2024.10"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["model/thesis.txt", "metrics.jsonl", "notes.txt", "checkpoints/step-1/state.pt"])
def test_a_folder_of_others_is_refused(cli: Cli, features_file: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = contents(tmp_path)
    for out in (tmp_path / "out", file, "/"):
        code, _, said = cli("train", "--data", "features", "--root", features_file, *SMALL, "--steps", 1, "--out", out)
        assert (code, len(said.splitlines())) == (2, 1)
        assert "must be" in said
    assert contents(tmp_path) == before


def test_the_pictures_are_no_run_folder(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    root = photos(pictures, tmp_path / "photos")
    before = contents(root)
    code, _, said = cli("train", *CONV4, "--root", root, "--steps", 1, "--out", root)
    assert code == 2
    assert f"The folder of a new run must be new or empty. Got {root}, which holds 'class 0'." in said
    assert contents(root) == before


def test_stale_checkpoints_are_no_start(cli: Cli, features_file: Path, tmp_path: Path) -> None:
    options = ["--data", "features", "--root", features_file, *SMALL, "--steps", 2, "--out", tmp_path / "run"]
    assert cli("train", *options)[0] == 0
    (tmp_path / "run" / "config.toml").unlink()
    before = contents(tmp_path)
    code, _, said = cli("train", *options)
    assert (code, "must be new or empty. Got" in said) == (2, True)
    assert contents(tmp_path) == before
    for name in ("checkpoints", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "metrics.jsonl").unlink()  # what is left, a killed start leaves too
    assert cli("train", *options)[0] == 0


def test_maps_go_with_the_end_of_a_run(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    """Those in `data.cache` stay and serve the next run, whatever their settings have to do with the maps."""
    frozen = ["--set", "model.trainable_from=embedding", "--set", "model.trunk_views=1", "--set", "model.resolution=64"]
    options = ["--data", "folder", "--root", pictures, *SMALL, *frozen, "--steps", 1]
    assert cli("train", *options, "--out", tmp_path / "run")[0] == 0
    assert Run(tmp_path / "run").maps() == []
    cached = [*options, "--cache", tmp_path / "cache"]
    assert cli("train", *cached, "--out", tmp_path / "first")[0] == 0
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("trunk-*/maps.json")}
    assert len(made) == 1
    other = ["--set", "data.workers=0", "--set", "train.batch_classes=2", "--skip-broken"]
    assert cli("train", *cached, *other, "--out", tmp_path / "second")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("trunk-*/maps.json")} == made


PLANNED = [
    *SMALL,
    *("--set", "model.resolution=64", "--set", "train.batch_classes=2", "--set", "data.workers=0"),
    *("--set", "data.validation=0.5", "--set", "train.log_every=10"),
]


def test_a_planned_run(cli: Cli, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is shown before the run, kept, and part of the config; what was set by hand stays."""
    monkeypatch.setattr("bier.training.plan.MOST_STEPS", 12)
    monkeypatch.setattr("bier.training.plan.LEAST_STEPS", 6)
    options = ["--data", "folder", "--root", pictures, *PLANNED, "--set", "model.trainable_from=blocks.5"]
    code, out, said = cli("train", *options, "--minutes", 2, "--out", tmp_path / "run", "--json")
    assert code == 0, said
    assert said.startswith("Plan for 2 minutes: train blocks.5 and what follows it of efficientnet_lite0, 12 steps")
    config = Config.from_toml(tmp_path / "run" / "config.toml")
    assert (config.train.steps, config.train.schedule, config.train.validate_every) == (12, "cosine", 2)
    assert (config.model.trainable_from, config.model.trunk_views) == ("blocks.5", 3)
    result = json.loads(out)
    assert 0 < result["planned_seconds"] < 120
    assert result["untrained"] is not None
    few = "Loss: binomial-deviance, the gentle one: to choose by validation takes 20 held-out classes, and there are"
    assert few in said
    assert few in result["choice"]["why"]
    code, _, said = cli("train", *options, "--out", tmp_path / "run")
    assert code == 2
    assert "already holds a run" in said  # before anything is timed
    assert len(said.splitlines()) == 1


def test_a_planned_run_chooses_its_loss(
    cli: Cli, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is part of the plan, and a loss that is named is taken as it is."""
    monkeypatch.setattr("bier.training.plan.MOST_STEPS", 12)
    monkeypatch.setattr("bier.training.plan.LEAST_STEPS", 6)
    monkeypatch.setattr("bier.training.choice.LEAST_STEPS", 6)
    monkeypatch.setattr("bier.training.choice.LEAST_CLASSES", 1)
    options = ["--data", "folder", "--root", pictures, *PLANNED, "--set", "model.trainable_from=blocks.5"]
    code, out, said = cli("train", *options, "--minutes", 2, "--out", tmp_path / "run", "--json")
    assert code == 0, said
    assert "choice of the loss" in said.splitlines()[1]
    result = json.loads(out)
    assert result["choice"]["map"].keys() == {"binomial-deviance", "multi-similarity"}
    assert result["choice"]["steps"] == 2
    assert said.count(result["choice"]["why"]) == 1
    assert result["steps"] == 12
    steps = [row["step"] for row in Run(tmp_path / "run").metrics()]
    assert steps == sorted(set(steps))
    assert Config.from_toml(tmp_path / "run" / "config.toml").loss.name == result["choice"]["loss"]
    named = ["--steps", 6, "--set", "loss.name=multi-similarity"]
    code, out, said = cli("train", *options, *named, "--out", tmp_path / "named", "--json")
    assert code == 0, said
    assert json.loads(out)["choice"] is None
    assert "Loss: " not in said


def test_a_run_is_planned_unless_steps_are_given(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    options = ["--data", "folder", "--root", pictures, *PLANNED]
    for more in (["--steps", 2], ["--set", "train.steps=2"]):
        code, _, said = cli("train", *options, *more, "--out", tmp_path / more[0].strip("-"))
        assert code == 0, said
        assert "Plan for" not in said


def test_the_default_plan_is_for_30_minutes_without_a_gpu(
    cli: Cli, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def planning(config: Config, minutes: float, *_: object) -> Plan:
        asked.append(minutes)
        return Plan("head", 1, 2, 1, {"training": 60.0, "evaluation": 30.0}, True)

    monkeypatch.setattr("bier.training.plan.plan_run", planning)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = ["--data", "folder", "--root", pictures, *PLANNED]
    code, _, said = cli("train", *options, "--out", tmp_path / "run")
    assert code == 0, said
    assert asked == [30.0]
    assert "Expected: 1.5 minutes in all (training 1.0, evaluation 0.5)." in said
    assert Config.from_toml(tmp_path / "run" / "config.toml").train.steps == 2
    code, _, said = cli("train", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert code == 0, said
    assert asked == [30.0]  # a run is repeated as it was
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()


def test_ctrl_c_in_a_terminal(features_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    command = [sys.executable, "-m", "bier", "train", "--data", "features", "--root", str(features_file), *SMALL]
    command += ["--out", str(run), "--set", "train.steps=1000000", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET)
    while len(Run(run).metrics()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert out == ""
    step = Run(run).metrics()[-1]["step"]
    expected = (
        f"Stopped at step {step}; a checkpoint is saved. Go on with: {sys.executable} -m bier train --resume '{run}'"
    )
    assert said.splitlines()[-1].replace(f"with: {Path(sys.executable).name} ", f"with: {sys.executable} ") == expected
    assert Run(run).complete()[-1].name == f"step-{step}"


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        ([], 0, "evaluate"),
        (["--help"], 0, "evaluate"),
        (["train", "--help"], 0, "bier train --resume runs/shop"),
        (["settings", "train"], 0, "train.steps = 1000"),
        (["settings", "--data", "glyphs"], 0, "train.steps = 600 (default 1000)"),
        (["train", "--stepss", "4"], 2, "--stepss"),
        (["train", "--data", "glyphs", "--set", "train.step=5"], 2, "Did you mean 'train.steps'?"),
        (["train", "--data", "glyphs", "--method", "abier"], 2, "Did you mean 'a-bier'?"),
        (["train", "--data", "flowers"], 2, "Got 'flowers' instead"),
        (["data", "check", "--data", "cbu"], 2, "Did you mean 'cub'?"),
    ],
)
def test_help_and_bad_options_do_not_wait_for_torch(arguments: list[str], code: int, printed: str) -> None:
    look = "import sys; from bier.cli import main\ntry: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", look, *arguments], capture_output=True, text=True, env=QUIET, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "False"
    assert printed in done.stdout + done.stderr
