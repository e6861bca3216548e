"""The pictures of tutorial.md: python docs/screenshots.py INDEX QUERY OUT

Starts `bier serve INDEX`, uploads QUERY to the page in an installed Chromium, and writes OUT/tutorial-page.jpg.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main(index: str, query: str, out: str) -> None:
    command = [sys.executable, "-m", "bier", "serve", index, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):  # one JSON object, when the page is ready
                line = server.stdout.readline()
                assert line, "bier serve has ended"
                text += line
            take(json.loads(text)["url"], Path(query), Path(out))
        finally:
            server.terminate()


def take(url: str, query: Path, out: Path) -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(120_000)
        page.goto(url)
        page.locator("input[type=file]").first.set_input_files(query)
        page.locator(".tile").nth(20).wait_for()
        page.wait_for_load_state("networkidle")
        page.screenshot(path=out / "tutorial-page.jpg", type="jpeg", quality=72)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
