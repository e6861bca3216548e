"""The paper's retrieval pictures: queries chosen by rule, right answers framed green, wrong ones red."""

from pathlib import Path

from bier.data import Dataset
from bier.durable import file_aside
from bier.evaluate.pictures import choose_pictures, draw_picture
from bier.models.model import load
from bier.training.assess import assess

KINDS = ("learners", "typical", "hard", "failed")


def draw_pictures(run: Path, dataset: Dataset, folder: Path, key: str, cache: Path | None) -> list[Path]:
    """Draw what a run retrieves into `folder/KEY-KIND.png`, unless it is there. A rule without a query draws none."""
    if pictures_of(folder, key):
        return pictures_of(folder, key)
    found = assess(load(run), dataset, cache=cache)
    if found.images is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for picture in choose_pictures(found.result):
        path = folder / f"{key}-{picture.name}.png"
        with file_aside(path) as aside:
            draw_picture(picture, found.images, found.gallery_images).save(aside, format="png")
    return pictures_of(folder, key)


def pictures_of(folder: Path, key: str) -> list[Path]:
    """The pictures of a run that are there, in the paper's order."""
    return [path for kind in KINDS if (path := folder / f"{key}-{kind}.png").is_file()]
