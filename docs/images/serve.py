"""The picture of the page in the README: `bier serve` on a run, one search, a screenshot by an installed Chromium.

    bier demo
    python docs/images/serve.py runs/demo/a-bier-0 --label greek --number 39

Other options of `bier serve`, such as `--images photos`, follow after `--`.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def start(run: str, options: list[str]) -> tuple["subprocess.Popen[str]", str]:
    """The server and its address."""
    command = [sys.executable, "-m", "bier", "serve", run, "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if line == "}\n":
            break
    return process, json.loads("".join(lines))["url"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--label", default="", help="search with an image whose label has this text")
    parser.add_argument("--number", type=int, default=0, help="which of the images that the page offers then")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    process, url = start(given.run, given.options)
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(url)
            images = page.request.get(f"{url}/api/browse", params={"label": given.label, "count": 50}).json()["images"]
            page.evaluate("id => { location.hash = new URLSearchParams({ id }); }", images[given.number]["id"])
            page.wait_for_selector(".row.alone .tile")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=given.out)
            browser.close()
        Image.open(given.out).quantize(256).save(given.out, optimize=True)  # a third of the bytes
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
