"""Damaged models, checkpoints, embeddings, indexes and caches: one line, or the answer of the undamaged file."""

import hashlib
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import bier
from bier.collection.served import KS, _dataset
from bier.config import Config
from bier.data import Dataset, Part, load
from bier.errors import BierError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.search import Index, embeddings, read_embeddings
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint

HowMany = Callable[[int, int], int]
VECTORS = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
ABOUT = {"paths": [f"{n}.jpg" for n in range(12)], "labels": ["a", "b"] * 6, "groups": [2, 4], "weighting": "sqrt"}


class Harmful:
    """Pickles to a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def pickles(trace: Path) -> Iterator[tuple[str, bytes]]:
    """Files that would leave a trace, in the ways in which Python, torch and numpy write objects."""
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        yield f"pickle {protocol}", pickle.dumps(Harmful(trace), protocol)
    for form in (True, False):
        file = io.BytesIO()
        torch.save({"x": Harmful(trace)}, file, _use_new_zipfile_serialization=form)
        yield f"torch.save {form}", file.getvalue()
    for save in (np.save, np.savez):
        file = io.BytesIO()
        save(file, np.array([Harmful(trace)], dtype=object), allow_pickle=True)
        yield f"np.{save.__name__}", file.getvalue()


def damaged(content: bytes, cuts: int, flips: int, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Truncations and flips of one to three bits."""
    for length in sorted(draw.sample(range(len(content)), min(cuts, len(content)))):
        yield f"cut to {length}", content[:length]
    for _ in range(flips):
        changed, places = (
            bytearray(content),
            draw.sample(range(len(content)), min(draw.choice((1, 1, 3)), len(content))),
        )
        for place in places:
            changed[place] ^= 1 << draw.randrange(8)
        yield f"flipped at {places}", bytes(changed)
    for extra in (b"\0", b"}", content):
        yield "longer", content + extra
    for deep in (b"[", b'{"a":', b"a = ["):
        yield "nested", deep * 50_000


def attack(
    tally: Any,
    family: str,
    folder: Path,
    answer: Callable[[], bytes],
    how_many: HowMany,
    few: int = 20,
    redone: bool = False,
    checked: bool = True,
) -> None:
    """Damage each file of a folder in turn, and put pickles in its place.

    redone: damage must go unnoticed, since what is damaged is made again. checked: whether a flipped bit is found, or
    the file is of the user's own, without a checksum.
    """
    expected, trace = answer(), folder.with_name("trace")
    cuts, flips = how_many(few, 32_768), how_many(few, 4_000)
    draw = random.Random(0)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for what, changed in (*damaged(content, cuts, flips, draw), *pickles(trace)) if content else ():
            file.write_bytes(changed)
            survived, lost, note = True, False, f"{file.name} {what}"
            try:
                lost = answer() != expected and checked
            except BierError as error:
                survived = not redone and "\n" not in str(error)
                note += f": {error}"
            except Exception as error:
                survived, note = False, f"{note}: {error!r}"
            tally.case(family, survived and not trace.exists(), lost, note)
            trace.unlink(missing_ok=True)
            file.write_bytes(content)
    assert answer() == expected


class Scaled(torch.nn.Module):
    """Pixels as a trunk takes them."""

    def __init__(self, trunk: torch.nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.trunk(pixels.float() / 255)
        return maps


def digest(*arrays: Any) -> bytes:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()


def test_models(tally: Any, how_many: HowMany, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(build_backbone("features", features=6), EmbeddingEnsemble(6, (2, 4)), metadata={"data": "x"})
    model.save(tmp_path / "model")

    def answer() -> bytes:
        loaded = bier.load(tmp_path / "model")
        return digest(loaded.encode(VECTORS)) + json.dumps(loaded.metadata).encode()

    attack(tally, "damaged models", tmp_path / "model", answer, how_many, few=100)


def test_checkpoints(tally: Any, how_many: HowMany, features_file: Path, tmp_path: Path) -> None:
    settings = {"data.root": str(features_file), "model.embedding": 6, "diversity.hidden": 4, "train.steps": 2}
    settings |= {"train.batch_classes": 2, "train.batch_images": 2}
    run = bier.train(resolve("a-bier", "features", settings), tmp_path / "run").folder

    def answer() -> bytes:
        state = read_checkpoint(run / "checkpoints" / "step-2")
        weights = [value.numpy() for _, value in sorted(state.objective.items())]
        return digest(*weights, state.random["cpu"].numpy()) + repr((state.trainer, state.sampler)).encode()

    attack(tally, "damaged checkpoints", run / "checkpoints" / "step-2", answer, how_many, few=60)


def write_embeddings(out: Path) -> None:
    writer = embeddings.EmbeddingsWriter(out, 12, "x")
    writer.begin()
    writer.write(0, VECTORS, 2 * VECTORS)
    writer.finish(ABOUT)


def test_embeddings(tally: Any, how_many: HowMany, tmp_path: Path) -> None:
    out = tmp_path / "e" / "v.safetensors"
    write_embeddings(out)

    def answer() -> bytes:
        known = read_embeddings(out, raw=True)
        words = (known.paths, known.labels, known.groups, known.model, known.root, known.weighting)
        return digest(known.vectors, known.raw) + repr(words).encode()

    attack(tally, "damaged embeddings", out.parent, answer, how_many, few=100)


def test_shards_are_computed_again(tally: Any, how_many: HowMany, tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"

    def begun() -> embeddings.EmbeddingsWriter:
        writer = embeddings.EmbeddingsWriter(out, 12, "x")
        if not writer.begin():
            writer.write(0, VECTORS, 2 * VECTORS)
        return writer

    def answer() -> bytes:
        writer = begun()
        shutil.copytree(writer.parts, tmp_path / "kept", dirs_exist_ok=True)
        writer.finish(ABOUT)
        shutil.move(tmp_path / "kept", writer.parts)
        return digest(read_embeddings(out).vectors)

    begun()
    attack(tally, "damaged shards", out.with_suffix(".parts"), answer, how_many, redone=True)


@pytest.mark.parametrize("kind", ["exact", "bits"])
def test_indexes(tally: Any, how_many: HowMany, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bier.search.index.EXACT_ROWS", 5 if kind == "bits" else 50_000)
    built = Index.build(VECTORS, ABOUT["paths"], (2, 4), ABOUT["labels"], [{"n": 1}] * 12, about={"model": {}})
    built.save(tmp_path / "index")

    def answer() -> bytes:
        index = Index.load(tmp_path / "index")
        found = index.search(VECTORS, 3)
        return digest(found.scores) + repr((found.ids.tolist(), index.entries(index.ids), index.about)).encode()

    attack(tally, f"damaged indexes, {kind}", tmp_path / "index", answer, how_many, few=40)


def test_a_manifest_of_another_format_without_a_version(tmp_path: Path) -> None:
    """Two flipped bits: a KeyError, which only `make soak` met."""
    Index.build(VECTORS, ABOUT["paths"], (2, 4)).save(tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    text = manifest.read_text().replace('"bier-index"', '"cier-index"').replace('"version"', '"vershon"')
    manifest.write_text(text)
    with pytest.raises(BierError, match="is damaged or of another program"):
        Index.load(tmp_path / "index")


@pytest.mark.parametrize("form", ["features.safetensors", "features"])
def test_features_of_the_user(tally: Any, how_many: HowMany, tmp_path: Path, form: str) -> None:
    arrays = {"features": np.repeat(VECTORS, 2, axis=0), "labels": np.repeat(np.arange(6), 4)}
    place = tmp_path / "data" / form
    place.parent.mkdir()
    if form == "features":
        place.mkdir()
        for name, array in arrays.items():
            np.save(place / name, array)
    else:
        save_file(arrays, place)

    def answer() -> bytes:
        return b"".join(part.images.tobytes() for part in load("features", place).parts.values())  # type: ignore[union-attr]

    attack(tally, "damaged features", place.parent, answer, how_many, few=40, checked=False)


def test_drawn_characters_of_the_server(tally: Any, how_many: HowMany, tmp_path: Path, monkeypatch: Any) -> None:
    """Kept between two starts, and drawn again where they are damaged."""
    labels, classes = np.array([0, 0, 1, 1]), ("a", "b")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    drawn = Dataset("glyphs", {"test": Part(pixels, labels, classes)}, KS)
    monkeypatch.setattr("bier.collection.served.load_data", lambda _: drawn)

    def answer() -> bytes:
        part = _dataset(tmp_path / "run", Config().data)["test"]
        return digest(part.images, part.labels) + repr(part.classes).encode()

    attack(tally, "damaged drawn characters", tmp_path / "run", answer, how_many, few=100, redone=True)


def test_embeddings_without_a_checksum_are_read_with_the_json_beside_them(tmp_path: Path) -> None:
    save_file({"vectors": VECTORS}, tmp_path / "v.safetensors")
    (tmp_path / "v.json").write_text(json.dumps(ABOUT))
    known = read_embeddings(tmp_path / "v.safetensors")
    assert (known.paths, known.labels) == (ABOUT["paths"], ABOUT["labels"])
    (tmp_path / "v.json").unlink()
    with pytest.raises(BierError, match="with a JSON file beside it"):
        read_embeddings(tmp_path / "v.safetensors")


def test_a_checksum_that_has_lost_its_name(tmp_path: Path) -> None:
    """Three flipped bits, one of them in the word sha256, once made a shard pass for one of an earlier version."""
    out = tmp_path / "v.safetensors"
    writer = embeddings.EmbeddingsWriter(out, 12, "x")
    writer.begin()
    writer.write(0, VECTORS, VECTORS)
    (shard,) = writer.parts.glob("shard-*")
    content = bytearray(shard.read_bytes().replace(b'"sha256"', b'"cha256"'))
    content[-1] ^= 1
    shard.write_bytes(content)
    assert writer.begin() == 0


def test_words_that_were_changed_by_hand_are_not_ignored(tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    write_embeddings(out)
    out.with_suffix(".json").write_text(json.dumps({**ABOUT, "labels": ["c"] * 12}))
    with pytest.raises(BierError, match=r"v\.json must be what .*v\.safetensors holds, and it was changed since"):
        read_embeddings(out)
    out.with_suffix(".json").unlink()
    assert read_embeddings(out).labels == ABOUT["labels"]
