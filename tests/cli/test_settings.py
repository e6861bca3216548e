"""`bier settings`: all settings are there, with what a user needs to set them."""

import json
from collections.abc import Callable

import pytest

from bier.config import Config, described, parse_settings
from bier.training import resolve

Cli = Callable[..., tuple[int, str, str]]


def test_every_setting_has_a_meaning_and_a_range() -> None:
    known = described()
    assert list(known) == list(Config().flat())
    assert {key: one.default for key, one in known.items()} == Config().flat()
    assert all(one.about and one.allowed for one in known.values())
    assert known["train.steps"].allowed == "a whole number, at least 1"
    assert known["data.validation"].allowed == "a number, at least 0 and at most 0.9"
    assert known["train.optimizer"].allowed == "one of adam, adamw, sgd"
    assert known["model.groups"].allowed == "a number of groups or sizes like 96-160-256"
    assert known["data.root"].allowed == "text"


def test_the_list_can_be_given_back_to_train(cli: Cli) -> None:
    code, out, _ = cli("settings")
    assert code == 0
    pairs = [line.replace(" = ", "=", 1) for line in out.splitlines() if not line.startswith(" ")]
    assert Config().with_settings(parse_settings(pairs)) == Config()
    assert len(pairs) == len(described())


def test_one_section_or_one_setting(cli: Cli) -> None:
    code, out, _ = cli("settings", "diversity")
    assert code == 0
    assert {line.split(".")[0] for line in out.splitlines() if not line.startswith(" ")} == {"diversity"}
    code, out, _ = cli("settings", "train.steps")
    assert out.splitlines() == ["train.steps = 1000", "    steps of training; a whole number, at least 1"]


def test_what_train_would_use(cli: Cli) -> None:
    code, out, _ = cli("settings", "--data", "glyphs", "--method", "bier", "--json")
    assert code == 0
    found = json.loads(out)
    wanted = resolve("bier", "glyphs").flat()
    assert found.pop("diversity.norm_weight")["value"] == "inf"
    wanted.pop("diversity.norm_weight")
    assert {key: row["value"] for key, row in found.items()} == wanted
    assert found["loss.cost"]["default"] == Config().loss.cost
    code, out, _ = cli("settings", "model.backbone", "--data", "glyphs")
    assert out.splitlines()[0] == "model.backbone = conv4 (default efficientnet_lite0)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "must be one of data, model, loss, diversity, train. Got 'trian' instead. Did you mean 'train'?"),
        (["train.step"], "Did you mean 'train.steps'?"),
        (["--method", "abier"], "Did you mean 'a-bier'?"),
        (["--data", "glyhps"], "Did you mean 'glyphs'?"),
    ],
)
def test_mistakes(cli: Cli, arguments: list[str], expected: str) -> None:
    code, out, said = cli("settings", *arguments)
    assert (code, out, len(said.splitlines())) == (2, "", 1)
    assert expected in said


def test_lines_fit_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("settings")
    assert max(map(len, out.splitlines())) <= 80
    assert "\u2026" not in out
