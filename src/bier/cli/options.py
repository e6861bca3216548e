"""Options that several commands share, so that they are called and explained the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="NAME",
        help="The data set: glyphs (needs no root), folder, table, features, cub, cub-cropped, cars, cars-cropped, "
        "sop, inshop, vehicleid or cifar10.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="PATH",
        help="Where the data set is: its folder or the folder that contains it; for table and features the file.",
    ),
]
Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="The test set of vehicleid: small, medium or large.")]
SkipBroken = Annotated[
    bool,
    typer.Option("--skip-broken", help="Leave out images that cannot be read, and list them, instead of stopping."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Keep prepared images in this folder; later runs read them from there, many times faster.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting, like train.steps=500; may be repeated."
    ),
]
