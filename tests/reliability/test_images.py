"""Image files that are anything else: every command reads them, or says in one line why it cannot."""

import io
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from bier.data import list_images
from bier.errors import DataError
from bier.evaluate.audit import inspect_images
from bier.images import MAX_PIXELS, open_image
from bier.images.decode import _known_formats
from bier.search import read_embeddings

Attack = Callable[..., Any]
HowMany = Callable[[int, int], int]
TRAIN = ("--data", "folder", "--steps", 4, "--set", "model.backbone=conv4", "--set", "train.batch_classes=2")
TRAIN += ("--set", "train.batch_images=3", "--set", "data.validation=0.0", "--json")
PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 32, 3), dtype=np.uint8))


def encoded(form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, form, **options)
    return file.getvalue()


def formats() -> dict[str, bytes]:
    """A picture in every format that can be written here, in more than one way where the decoders differ."""
    made = {}
    for form in _known_formats():
        try:
            made[form] = encoded(form)
        except (OSError, KeyError, ValueError):  # a Pillow without this encoder
            continue
    return {
        **made,
        "progressive JPEG": encoded("JPEG", progressive=True),
        "compressed TIFF": encoded("TIFF", compression="tiff_lzw"),
        "lossless WebP": encoded("WEBP", lossless=True),
        "palette GIF": encoded("GIF", interlace=1),
    }


def mutations(whole: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Truncated, bits flipped (in the header more often than elsewhere), bytes removed, doubled, zeroed."""
    random = np.random.default_rng(seed)
    for number in range(count):
        data = bytearray(whole)
        place = int(random.integers(0, min(len(data), 64) if number % 2 else len(data)))
        match number % 6:
            case 0:
                del data[place:]
            case 1 | 2:
                for _ in range(1 + number % 5):
                    at = int(random.integers(0, min(len(data), 64) if number % 2 else len(data)))
                    data[at] ^= 1 << int(random.integers(0, 8))
            case 3:
                data[place : place + 4] = b"\xff\xff\xff\xff"  # sizes and counts become absurd
            case 4:
                del data[place : place + 1 + number % 7]
            case _:
                data[place : place + 16] = bytes(16)
        yield bytes(data)


def strangers() -> dict[str, bytes]:
    """Files that are no pictures, and pictures that claim to be larger than any memory."""
    side = int(MAX_PIXELS**0.5) + 1
    bomb = io.BytesIO()
    Image.new("1", (side, side)).save(bomb, "PNG")
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    claims = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    bmp = bytearray(encoded("BMP"))
    bmp[18:26] = (60_000).to_bytes(4, "little") * 2
    return {
        "empty": b"",
        "one byte": b"\xff",
        "zeros": bytes(4096),
        "text": b"hello\n" * 100,
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "html": b"<!doctype html><script>alert(1)</script>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
        "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
        "zip": b"PK\x03\x04" + bytes(60),
        "pickle": b"cos\nsystem\n(S'true'\ntR.",
        "PNG bomb": bomb.getvalue(),
        "PNG of 2^62 pixels": claims,
        "BMP of 60,000 x 60,000": bytes(bmp),
        "PPM of 10^12 pixels": b"P6 1000000 1000000 255\n" + bytes(100),
        "WebP header": b"RIFF\xff\xff\xff\xffWEBPVP8 " + bytes(30),
        "TIFF that points to itself": b"II*\x00\x08\x00\x00\x00" + b"\x00\x00" + b"\x08\x00\x00\x00" * 4,
        "GIF without a frame": b"GIF89a" + b"\xff\xff\xff\xff" + bytes(3) + b";",
    }


def read(data: bytes, tally: Any, name: str, note: str) -> None:
    try:
        image = open_image(data, at_least=16)
    except DataError as error:
        tally.case(name, survived=str(error).isprintable(), note=f"{note}: {error}")
    except Exception as error:
        tally.case(name, survived=False, note=f"{note}: {type(error).__name__}: {error}")
    else:
        tally.case(name, survived=image.mode == "RGB", note=note)


def test_mutations_of_every_format(tally: Any, how_many: HowMany) -> None:
    for number, (form, whole) in enumerate(formats().items()):
        for case, data in enumerate(mutations(whole, how_many(24, 2000), seed=number)):
            read(data, tally, "mutated images, read", f"{form} {case}")


def test_a_folder_of_mutations_and_strangers(
    attack: Attack, tally: Any, how_many: HowMany, small_run: Path, photos: Path, tmp_path: Path
) -> None:
    """Through the commands: what cannot be read is listed, the rest is encoded, and nothing else is said."""
    hostile = photos / "hostile"
    hostile.mkdir()
    for number, (form, whole) in enumerate(formats().items()):
        for case, data in enumerate(mutations(whole, how_many(12, 60), seed=1000 + number)):
            (hostile / f"{form} {case}.jpg").write_bytes(data)  # all by a wrong name: the content decides
    for name, data in strangers().items():
        (hostile / f"{name}.png").write_bytes(data)
    count = len(list(photos.rglob("*.*g")))
    assert count >= 200
    ended = attack("data", "check", "--data", "folder", "--root", photos, "--json")
    assert ended.code == 2, ended.said
    assert len(ended.said.splitlines()) == 1
    unreadable = {one["path"] for one in json.loads(ended.out)["unreadable"]}
    assert {str(hostile / f"{name}.png") for name in strangers()} <= unreadable
    out = tmp_path / "v.safetensors"
    ended = attack("embed", small_run, photos, "--out", out, "--skip-broken", "--json")
    assert ended.done, ended.said
    result = json.loads(ended.out)
    assert {one["path"] for one in result["skipped"]} == unreadable
    encoded_ones = set(read_embeddings(out).paths)
    for path in hostile.iterdir():
        once = (str(path) in unreadable) != (f"hostile/{path.name}" in encoded_ones)
        tally.case("malformed images, embed and data check", survived=once, note=path.name)
    assert result["images"] == count - len(unreadable)
    ended = attack("embed", small_run, photos, "--out", tmp_path / "w.safetensors")
    assert ended.refused, ended.said
    assert not (tmp_path / "w.safetensors").exists()


def put_no_file(place: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match kind:
        case "fifo":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/zero")
        case "dangling link":
            place.symlink_to(place.with_name("gone.jpg"))
        case "link to itself":
            place.symlink_to(place)
        case "folder":
            place.mkdir()
        case _:
            with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as made:
                patch.chdir(place.parent)  # the path of a socket is short
                made.bind(place.name)


@pytest.mark.parametrize("kind", ["fifo", "device", "dangling link", "link to itself", "folder", "socket"])
def test_what_is_no_file(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, kind: str, monkeypatch: Any
) -> None:
    place = photos / "class 0" / "x.jpg"
    put_no_file(place, kind, monkeypatch)
    out = tmp_path / "v.safetensors"
    commands = {
        "embed": ("embed", small_run, photos, "--out", out),
        "index": ("index", small_run, photos, "--out", tmp_path / "index"),
        "evaluate": ("evaluate", small_run / "model", "--data", "folder", "--root", photos, "--no-report"),
        "search": ("search", tmp_path / "index", place),
        "data check": ("data", "check", "--data", "folder", "--root", photos, "--json"),
    }
    for name, command in commands.items():
        ended = attack(*command, limit=30)
        refused = ended.refused
        if name == "data check":  # what it has found is its result
            refused = ended.code == 2 and len(json.loads(ended.out)["unreadable"]) == 1
        good = ended.done if kind == "folder" and name != "search" else refused
        tally.case("pipes, devices, links, folders by the name of an image", good, note=f"{kind} {name}: {ended}")
    ended = attack("embed", small_run, photos, "--out", out, "--skip-broken", "--json", limit=30)
    found = json.loads(ended.out) if ended.done else {}
    good = found.get("images") == 12 and len(found["skipped"]) == (kind != "folder")
    tally.case("pipes, devices, links, folders by the name of an image", good, note=f"{kind} --skip-broken: {ended}")
    reasons = [reason for reason in inspect_images(list_images(photos)).reasons if reason]  # `data audit`
    good = len(reasons) == (kind != "folder")
    tally.case("pipes, devices, links, folders by the name of an image", good, note=f"{kind} audit: {reasons}")
    for other in range(1, 4):  # so that training meets one, whichever classes it takes
        put_no_file(photos / f"class {other}" / "x.jpg", kind, monkeypatch)
    for option in ((), ("--skip-broken",)):
        ended = attack("train", *TRAIN, "--root", photos, "--out", tmp_path / f"run{len(option)}", *option, limit=30)
        good = ended.done if option or kind == "folder" else ended.refused
        tally.case("pipes, devices, links, folders by the name of an image", good, note=f"{kind} train: {ended}")


def test_urls_of_any_kind(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may come from anybody: a URL in it that leads to no picture is one line, without its password."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("bier.images.decode.MOST_BYTES", 9_999)
    fsspec.filesystem("memory").pipe("/large.png", bytes(10_000))
    places = ["", "/dev/zero", "/dev/null", "/etc/passwd", f"{tmp_path}/pipe", f"{photos}", "x" * 5000]
    urls = [f"{scheme}://{place}" for scheme in ("file", "local") for place in places]
    urls += [f"{chain}::file:///dev/zero" for chain in ("simplecache", "zip://a", "tar://a", "reference://a", "dir")]
    urls += ["memory://large.png", "memory://nothing", "never://x", "://", "data://x", "reference://x", "http://["]
    urls += [f"{scheme}://me:s3cret@127.0.0.1:1/a.png" for scheme in ("http", "ftp", "sftp")]
    table = tmp_path / "images.csv"
    for url in urls:
        table.write_text(f"path,label\n{url},a\n")
        for name, arguments in {
            "embed": ("embed", small_run, table, "--out", tmp_path / "v.safetensors"),
            "source": ("embed", small_run, url, "--out", tmp_path / "v.safetensors"),
        }.items():
            ended = attack(*arguments, limit=30)
            kept = "s3cret" not in ended.said + ended.out
            listed = name == "source" and str(photos) in url  # a folder of images by its URL
            tally.case("URLs", kept and (ended.done if listed else ended.refused), note=f"{name} {url[:60]}: {ended}")
        reason = inspect_images(list_images(table)).reasons[0]  # `data audit`
        tally.case("URLs", reason.isprintable() and bool(reason), note=f"audit {url[:60]}: {reason}")
    table.write_text(f"path,label\nfile://{photos}/class 0/0.png,a\n")
    assert attack("embed", small_run, table, "--out", tmp_path / "v.safetensors").done


def test_links_in_a_circle_add_nothing(attack: Attack, tally: Any, small_run: Path, photos: Path) -> None:
    for name in ("class 0", "class 1"):
        (photos / name / "up").symlink_to(photos)
        (photos / name / "here").symlink_to(photos / name)
    (photos / "class 2" / "twin").symlink_to(photos / "class 3")
    ended = attack("embed", small_run, photos, "--out", photos.parent / "v.safetensors", "--json", limit=30)
    tally.case("links in a circle", ended.done and json.loads(ended.out)["images"] == 12, note=str(ended))


def test_names_of_any_bytes(attack: Attack, tally: Any, small_run: Path, tmp_path: Path) -> None:
    """Files are listed, encoded, found again and printed on one line, whatever their names are."""
    names = [b"a\nb", b"caf\xe9", b"\xff\xfe", b"[red]x", b"[", b":smile:", b"\x1b[31mred", b"a\tb", b"-rf", b"%s {x}"]
    names += ["日本".encode(), b"$(id)", b"'; drop", b"\\xe9", b"a\\nb", b"<script>", b" lead", b"x" * 200]
    root = tmp_path / "photos"
    for number, name in enumerate(names):
        folder = root / os.fsdecode(name)
        folder.mkdir(parents=True)
        for other in range(2):
            colours = np.random.default_rng([number, other]).integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(colours).save(folder / os.fsdecode(name + b"%d.png" % other))
    ended = attack("index", small_run, root, "--out", tmp_path / "index")
    assert ended.done, ended.said
    first = root / os.fsdecode(names[0]) / os.fsdecode(names[0] + b"0.png")
    ended = attack("search", tmp_path / "index", first, "-k", 35, "--picture", tmp_path / "row.png")
    lines = ended.said.rstrip("\n").split("\n")
    printed = ended.done and len(lines) == 37 and all(line.isprintable() for line in lines)
    tally.case("names of any bytes", printed and (tmp_path / "row.png").is_file(), note=str(ended))
    for name in names:
        file = root / os.fsdecode(name) / os.fsdecode(name + b"0.png")
        ended = attack("search", tmp_path / "index", file, "-k", 35, "--json")
        found = json.loads(ended.out)["results"] if ended.done else []
        files = {Path(one["path"]) for one in found if one["id"].encode() and one["label"].encode()}
        exact = len(files) == 35 and file not in files and all(path.is_file() for path in files)
        tally.case("names of any bytes", exact, note=f"{name!r}: {ended}")
    ended = attack("data", "check", "--data", "folder", "--root", root)
    tally.case("names of any bytes", ended.done, note=str(ended))
