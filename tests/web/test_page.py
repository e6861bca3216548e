"""The page in a real browser: pick, upload, click through, cut, go back, and everything that can go wrong."""

import csv
import io
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bier import Index, Model
from bier.collection import Collection
from bier.search.rerank import search_reranked
from bier.web.guard import Limits

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    *("--no-sandbox", "--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(serve: Any, collection: Collection, report: Path) -> str:
    return str(serve(collection, report))


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page at 1280 x 860 that fails its test on a script error or a request to another place."""
    yield from opened(browser, address)


def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}} | options))
    context.set_default_timeout(15_000)
    made = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda request: asked.append(request.url))
    made.goto(address)
    made.wait_for_selector("#about:not(:empty)")  # its script has asked the server what it shows
    yield made
    context.close()
    assert not errors
    assert [url for url in asked if not url.startswith((address, "blob:" + address, "data:"))] == []


def picture(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"name": "mine.png", "mimeType": "image/png", "buffer": file.getvalue()}


def ids(page: Any, row: str) -> list[str]:
    links = page.locator(f"{row} .tile").evaluate_all("all => all.map(one => one.hash)")
    return [page.evaluate("hash => new URLSearchParams(hash.slice(1)).get('id')", link) for link in links]


def until(page: Any, condition: str) -> None:
    """Wait for an expression to hold. Playwright's own way needs `eval` in the page, which its policy forbids."""
    end = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def banner(page: Any) -> str:
    page.wait_for_selector("#banner:not([hidden])")
    return str(page.inner_text("#banner-text"))


def pick_first(page: Any) -> str:
    page.wait_for_selector("#browse .tile")
    first = ids(page, "#browse")[0]
    page.locator("#browse .tile").first.click()
    page.wait_for_selector(".row.ensemble .tile")
    return first


def compare(page: Any) -> None:
    """Open what shows the learners one by one."""
    page.locator("#compare summary").click()
    page.wait_for_selector(".row.alone .tile")


def test_picking_one_shows_the_nearest_and_every_learner(page: Any, index: Index) -> None:
    assert page.inner_text("#about") == "48 images · 6 labels"
    chosen = pick_first(page)
    assert page.locator(".row:visible").count() == 1
    assert not page.locator("#learners").is_visible()
    compare(page)
    assert page.locator(".row").count() == 4
    assert page.locator(".row.alone").count() == 3
    found = index.search(index.vectors([chosen])[0], 13).ids.tolist()
    assert ids(page, ".row.ensemble") == [one for one in found if one != chosen][:12]
    [label] = [entry.label for entry in index.entries([chosen])]
    assert page.inner_text("#query-label") == label
    right = page.locator(".row.ensemble .tile.right").count()
    assert right == sum(one.startswith(f"{label}/") for one in ids(page, ".row.ensemble"))
    assert page.locator(".row.ensemble .tile.wrong").count() == 12 - right
    assert page.locator(".tile.right .mark").first.inner_text() == "✓"


def test_names_and_similarities_are_whole(page: Any) -> None:
    pick_first(page)
    texts = page.locator(".row.ensemble .tile").first.inner_text().splitlines()[1:]  # after the mark
    assert texts[0].startswith("kind ")
    assert texts[1].endswith(".png")
    assert 0 < float(texts[2].removeprefix("similarity ")) <= 1
    whole = "[...document.querySelectorAll('.row .name, .row .label')].every(one => one.scrollWidth <= one.clientWidth)"
    assert page.evaluate(whole)


def test_a_click_makes_the_next_query_and_back_returns(page: Any) -> None:
    first = pick_first(page)
    second = ids(page, ".row.ensemble")[0]
    page.locator(".row.ensemble .tile").first.click()
    until(page, f"new URLSearchParams(location.hash.slice(1)).get('id') === {second!r}")
    until(page, f"document.querySelector('#query-image').src.includes({second.split('/')[1]!r})")
    page.go_back()
    until(page, f"new URLSearchParams(location.hash.slice(1)).get('id') === {first!r}")
    until(page, f"document.querySelector('#query-image').src.includes({first.split('/')[1]!r})")
    page.reload()
    page.wait_for_selector(".row.ensemble .tile")
    assert second in ids(page, ".row.ensemble")


def test_the_slider_cuts_the_ensemble(page: Any, collection: Collection, index: Index) -> None:
    chosen = pick_first(page)
    compare(page)
    assert "48 dimensions" in page.inner_text("#cut-size")
    assert "measured on 48 patterns (48 queries)" in page.inner_text("#cut-note")
    page.locator("#learners").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('.row.ensemble h2').textContent.includes('by the first learner')")
    assert "8 dimensions" in page.inner_text("#cut-size")
    assert collection.recall is not None
    recall = collection.recall["prefixes"][0]["1"]
    assert f"{recall:.1f} %" in page.inner_text("#cut-recall")
    found = index.search(index.vectors([chosen])[0], 13, learners=1).ids.tolist()
    assert ids(page, ".row.ensemble") == [one for one in found if one != chosen][:12]
    assert page.locator(".row.alone.unused").count() == 2
    page.locator(".row.ensemble .tile").first.click()  # and it stays cut for the next query
    until(page, "location.hash.includes('learners=1')")


def test_an_upload_and_going_back_to_it(page: Any, pixels: NDArray[np.uint8]) -> None:
    page.set_input_files("#file", picture(pixels[19]))
    page.wait_for_selector(".row.ensemble .tile")
    assert ids(page, ".row.ensemble")[0] == "kind 2/3.png"
    assert page.inner_text("#query-label") == "Your picture"
    assert page.locator(".tile.right, .tile.wrong").count() == 0
    page.locator(".row.ensemble .tile").nth(1).click()
    until(page, "document.querySelector('#query-label').textContent.startsWith('kind')")
    page.go_back()
    until(page, "document.querySelector('#query-label').textContent === 'Your picture'")
    assert page.evaluate("document.querySelector('#query-image').naturalWidth") == 48


def test_a_dropped_picture(page: Any, pixels: NDArray[np.uint8]) -> None:
    page.wait_for_selector("#browse .tile")
    data = list(picture(pixels[19])["buffer"])
    page.evaluate(
        """data => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(data)], "mine.png", { type: "image/png" }));
          for (const kind of ["dragenter", "dragover", "drop"])
            document.body.dispatchEvent(
              new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    page.wait_for_selector(".row.ensemble .tile")
    assert ids(page, ".row.ensemble")[0] == "kind 2/3.png"


def test_the_keyboard_is_enough(page: Any) -> None:
    pick_first(page)
    page.locator(".row.ensemble .tile").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Rank 2, kind")
    page.keyboard.press("ArrowDown")
    assert int(page.evaluate("document.activeElement.ariaLabel").split(",")[0].removeprefix("Rank ")) > 3
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    aim = page.evaluate("document.activeElement.hash")
    page.keyboard.press("Enter")
    until(page, f"location.hash.startsWith({aim!r})")


def test_the_filter_and_its_empty_state(page: Any) -> None:
    page.wait_for_selector("#browse .tile")
    page.fill("#filter", "kind 3")
    until(page, "document.querySelectorAll('#browse .tile').length === 8")
    page.fill("#filter", "zebra")
    until(page, "document.querySelector('#browse-note').textContent.includes('No label contains')")


def test_the_report_is_one_click_away(page: Any) -> None:
    page.click("#report")
    page.wait_for_selector("text=The report of the run")


def test_pictures_that_cannot_be_used(
    browser: Any, serve: Any, collection: Collection, pixels: NDArray[np.uint8]
) -> None:
    for page in opened(browser, serve(collection, limits=Limits(upload_bytes=2**20, rate=100, burst=1000))):
        refuse_all(page, pixels)


def refuse_all(page: Any, pixels: NDArray[np.uint8]) -> None:
    page.wait_for_selector("#browse .tile")
    whole = picture(pixels[0])["buffer"]
    for name, kind, data, message in (
        ("broken.png", "image/png", whole[: len(whole) // 2], "The picture is broken"),
        ("text.png", "image/png", b"I am text", "not a picture in a known format"),
        ("notes.txt", "text/plain", b"I am text", "is not a picture"),
        ("empty.png", "image/png", b"", "is empty"),
        ("huge.png", "image/png", bytes(2**20 + 1), "at most 1 MB"),
    ):
        page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})
        until(page, f"document.querySelector('#banner-text').textContent.includes({message!r})")
        assert message in banner(page)
    page.click("#banner-close")
    assert page.locator("#banner").is_hidden()
    pick_first(page)


def test_an_address_that_is_not_there_any_more(page: Any) -> None:
    page.wait_for_selector("#browse .tile")
    page.evaluate("location.hash = '#id=upload:gone'")
    assert "Send it again" in banner(page)
    page.evaluate("location.hash = '#id=nothing'")
    until(page, "document.querySelector('#banner-text').textContent.includes('has no image')")


def test_a_server_that_is_gone_and_comes_back(page: Any) -> None:
    page.wait_for_selector("#browse .tile")
    page.route("**/api/search*", lambda route: route.abort())
    page.locator("#browse .tile").first.click()
    assert "does not answer" in banner(page)
    page.unroute("**/api/search*")
    page.click("#banner-again")
    page.wait_for_selector(".row.ensemble .tile")
    assert page.locator("#banner").is_hidden()


def test_too_many_requests_are_told(browser: Any, serve: Any, collection: Collection) -> None:
    for page in opened(browser, serve(collection, limits=Limits(rate=0.01, burst=6))):
        page.wait_for_selector("#browse .tile")
        for _ in range(6):
            page.click("#random")
        assert "Too many requests" in banner(page)


def test_an_empty_collection(browser: Any, serve: Any, model: Model) -> None:
    nothing = Index.build(np.empty((0, 48), np.float32), groups=model.groups)
    empty = Collection(nothing, model, lambda one: (Image.new("RGB", (1, 1)), None))
    for page in opened(browser, serve(empty)):
        page.wait_for_selector("text=The collection is empty")
        assert page.locator("#pick").is_hidden()
        assert page.locator("#cut").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_the_dark(browser: Any, address: str, scheme: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    for page in opened(browser, address, **phone):
        pick_first(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for target in ("label[for=file]", "#random", "#others"):
            assert page.locator(target).bounding_box()["height"] >= 40
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(","))
        assert (brightness < 150) == (scheme == "dark")


def threshold_between(index: Index, chosen: str) -> float:
    """A similarity between the third and the fourth image nearest to one."""
    vector = index.vectors([chosen])[0]
    scores = index.search(vector, 11).scores[1:] / float(vector @ vector)
    return float(scores[2] + scores[3]) / 2


def keeping(model: Model, threshold: float) -> Model:
    """The model with this threshold for the ensemble, and thresholds that nothing and everything reaches for others."""
    same = {"prefixes": [-1.0, -1.0, threshold], "learners": [1.0, -1.0, None], "precision": 95.0}
    same |= {"part": "validation", "classes": 2}
    return Model(model.backbone, model.ensemble, model.weighting, model.precision, {"same": same})


def test_a_line_is_drawn_between_same_and_similar(
    browser: Any, serve: Any, collection: Collection, index: Index
) -> None:
    chosen = index.ids[0]
    model = keeping(collection.model, threshold_between(index, str(chosen)))
    same = Collection(index, model, collection.picture)
    for page in opened(browser, serve(same)):
        page.evaluate(f"location.hash = new URLSearchParams({{id: {chosen!r}}})")
        page.wait_for_selector(".row.ensemble .tile")
        compare(page)
        assert page.locator(".row.ensemble li").count() == 12
        lines = "all => all.map(one => [...one.parentNode.children].indexOf(one))"
        assert page.locator(".row.ensemble .similar-from-here").evaluate_all(lines) == [3]
        assert "3 the same" in page.inner_text(".row.ensemble h2")
        width = "one => getComputedStyle(one, '::before').width"
        assert page.locator(".row.ensemble .similar-from-here").evaluate(width) == "3px"
        spoken = page.locator(".row.ensemble .tile").evaluate_all("all => all.map(one => one.ariaLabel)")
        assert ["the same" in one for one in spoken] == [True] * 3 + [False] * 9
        # each row has a threshold of its own: one that nothing reaches, one that everything does, and none
        first, second, third = (page.locator(f'.row.alone[data-learner="{m}"]') for m in (1, 2, 3))
        assert first.locator(".similar-from-here").evaluate_all(lines) == [0]
        assert "none the same" in first.locator("h2").inner_text()
        assert (second.locator(".similar-from-here").count(), third.locator(".similar-from-here").count()) == (0, 0)
        assert "12 the same" in second.locator("h2").inner_text()
        assert "the same" not in third.locator("h2").inner_text()
        assert page.locator("#key-line").is_visible()
        assert "3 of them the same" in page.inner_text("#told")


SCRIPTS = (
    "<img src=x onerror=window.attacked=1>",
    "<script>window.attacked = 1</script>",
    "\"><svg onload='window.attacked = 1'>",
    "javascript:window.attacked=1",
    "{{constructor.constructor('window.attacked=1')()}}",
)


def test_names_and_labels_that_are_scripts_are_shown_as_text(
    browser: Any, serve: Any, collection: Collection, index: Index, pixels: NDArray[np.uint8]
) -> None:
    """Labels, ids, the title and the names of uploads; `opened` also fails on a request to another place."""
    names = [f"{SCRIPTS[row % 5]}/{row}{SCRIPTS[row // 5 % 5]}.png" for row in range(len(index))]
    labels = [None if row % 7 == 0 else SCRIPTS[row % 5] for row in range(len(index))]
    hostile = Index.build(index.vectors(index.ids), names, index.groups, labels)
    row_of = {one: row for row, one in enumerate(names)}
    shown = Collection(hostile, collection.model, lambda one: (pixels[row_of[one]], None), SCRIPTS[0])
    for page in opened(browser, serve(shown)):
        chosen = pick_first(page)
        label = labels[row_of[chosen]]
        assert page.inner_text("#title") == SCRIPTS[0]
        assert page.inner_text("#query-label") == (chosen if label is None else label)
        images = "[...document.querySelectorAll('.row img')].slice(0, 3)"  # others wait until they are in view
        loaded = f"{images}.every(one => one.complete && one.naturalWidth === 48)"
        until(page, loaded)
        for script in SCRIPTS:
            page.set_input_files("#file", {"name": script, "mimeType": "text/plain", "buffer": b"x"})
            assert script in banner(page)
            page.fill("#filter", script)
            until(page, "document.querySelectorAll('#browse .tile').length > 0")
            page.evaluate("id => { location.hash = new URLSearchParams({ id }); }", f"nothing {script}")
            until(page, "document.querySelector('#banner-text').textContent.includes('has no image')")
        page.wait_for_timeout(100)
        assert page.evaluate("window.attacked") is None
        assert page.locator("main img[src=x], main script, main svg, .banner img").count() == 0


def test_the_page_behind_a_token(browser: Any, serve: Any, collection: Collection) -> None:
    address = serve(collection, token="a token & more")
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    assert "asks for a token" in page.inner_text("body")
    page.goto(f"{address}/?token=a+token+%26+more")
    page.wait_for_selector("#browse .tile")
    assert "token" not in page.url
    until(page, "[...document.querySelectorAll('#browse img')].some(one => one.naturalWidth > 0)")
    context.close()


def test_without_a_threshold_there_is_no_line(page: Any) -> None:
    pick_first(page)
    assert page.locator(".similar-from-here").count() == 0
    assert "the same" not in page.inner_text("#results")
    assert not page.locator("#key-line").is_visible()


def test_the_selector_re_ranks_every_row(page: Any, index: Index) -> None:
    chosen = pick_first(page)
    compare(page)
    plain = ids(page, ".row.ensemble")
    for name in ("alpha-qe", "dba", "k-reciprocal"):
        found = search_reranked(index, index.vectors([chosen])[0], 12, name, without=chosen).ids.tolist()
        page.locator("#rerank").select_option(name)
        until(page, f"location.hash.includes('rerank={name}')")
        page.wait_for_selector("#results[aria-busy=false]")
        assert ids(page, ".row.ensemble") == found
        alone = search_reranked(index, index.vectors([chosen])[0], 12, name, learners=[2], without=chosen)
        assert ids(page, '.row.alone[data-learner="2"]') == alone.ids.tolist()
    assert not page.locator("#cut-recall").is_visible()  # it is that of the plain search
    # it stays for the next query, in the slider's searches and after a reload
    page.locator(".row.ensemble .tile").first.click()
    until(page, f"!location.hash.includes({chosen.split('/')[1]!r}) && location.hash.includes('rerank=k-reciprocal')")
    page.reload()
    page.wait_for_selector(".row.ensemble .tile")
    assert page.locator("#rerank").input_value() == "k-reciprocal"
    page.locator("#rerank").select_option("none")
    until(page, "location.hash.includes('rerank=none')")
    page.go_back()
    until(page, f"new URLSearchParams(location.hash.slice(1)).get('id') === {chosen!r}")
    page.locator("#rerank").select_option("none")
    page.wait_for_selector("#results[aria-busy=false]")
    until(page, "location.hash.includes('rerank=none')")
    page.wait_for_timeout(300)
    assert ids(page, ".row.ensemble") == plain


WIDTHS = [(390, 844), (768, 1024), (1280, 860), (1920, 1080)]
PANELS = ["#drop", "#tools", "#results", ".controls #cut", ".controls #order", "#alone", "#pick"]
OVERLAPS = """panels => {
  const boxes = panels.map(one => document.querySelector(one)).filter(one => one && one.checkVisibility())
    .flatMap(one => [one, ...one.querySelectorAll("dd, h2, .tile, button, input[type=search], select")])
    .map(one => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  const found = [];
  for (const [a, x] of boxes) for (const [b, y] of boxes) {
    if (a === b || a.contains(b) || b.contains(a) || a.closest("li")?.contains(b)) continue;
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 1 && high > 1) found.push(`${a.id || a.textContent} over ${b.id || b.textContent}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
  return found;
}"""


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_no_two_panels_overlap_whatever_is_moved(
    browser: Any, address: str, width: int, height: int, pixels: NDArray[np.uint8]
) -> None:
    for page in opened(browser, address, viewport={"width": width, "height": height}):
        page.wait_for_selector("#browse .tile")
        assert page.evaluate(OVERLAPS, PANELS) == []
        page.set_input_files("#file", picture(pixels[19]))
        page.wait_for_selector(".row.ensemble .tile")
        top = "document.querySelector('#results').getBoundingClientRect().top"
        until(page, f"{top} >= 0 && {top} < innerHeight / 2")
        assert page.evaluate(OVERLAPS, PANELS) == []
        compare(page)
        for value in ("1", "2", "3"):
            page.locator("#learners").fill(value)
            until(page, f"document.querySelector('#cut-count').textContent.startsWith('{value} of')")
            assert page.evaluate(OVERLAPS, PANELS) == [], value
        for name in ("alpha-qe", "dba", "k-reciprocal", "none"):
            page.locator("#rerank").select_option(name)
            page.wait_for_selector("#results[aria-busy=false]")
            assert page.evaluate(OVERLAPS, PANELS) == [], name
        page.fill("#narrow", "kind 2")
        assert page.evaluate(OVERLAPS, PANELS) == []


def test_a_photograph_at_full_size(page: Any, index: Index) -> None:
    pick_first(page)
    first, second = ids(page, ".row.ensemble")[:2]
    page.locator(".row.ensemble .look").first.click()
    assert page.inner_text("#photo-name") == first.split("/")[1]
    assert first.split("/")[0] in page.inner_text("#photo-folder")
    until(page, "document.querySelector('#photo-image').naturalWidth === 48")
    assert page.locator("#photo-open").get_attribute("href").endswith("?size=full&v=1")
    page.click("#photo-copy")
    page.keyboard.press("Escape")
    assert not page.locator("#photo").is_visible()
    page.locator(".row.ensemble .look").nth(1).click()
    page.click("#photo-search")
    until(page, f"new URLSearchParams(location.hash.slice(1)).get('id') === {second!r}")


def test_several_pictures_are_one_query(page: Any, pixels: NDArray[np.uint8], index: Index) -> None:
    page.set_input_files("#file", [picture(pixels[row]) for row in (16, 17, 19)])
    page.wait_for_selector(".row.ensemble .tile")
    assert page.locator("#query-more .tile").count() == 2
    vectors = index.vectors([f"kind 2/{row}.png" for row in (0, 1, 3)])
    mean = np.concatenate([part / np.linalg.norm(part) for part in np.split(vectors.mean(0), (8, 24))])
    lengths = [np.linalg.norm(part) for part in np.split(vectors[0], (8, 24))]
    mean *= np.repeat(lengths, (8, 16, 24))
    assert ids(page, ".row.ensemble") == index.search(mean, 12).ids.tolist()
    chosen = ids(page, ".row.ensemble")[0]
    page.locator(".row.ensemble .look").first.click()
    page.click("#photo-add")
    until(page, "document.querySelectorAll('#query-more .tile').length === 3")
    assert chosen not in ids(page, ".row.ensemble")
    page.reload()
    page.wait_for_selector(".row.ensemble .tile")
    assert page.locator("#query-more .tile").count() == 3


def test_a_part_of_the_picture_is_searched_with(page: Any) -> None:
    pick_first(page)
    until(page, "document.querySelector('#query-image').naturalWidth === 48")
    box = page.locator("#query-image").bounding_box()
    middle, side = box["x"] + box["width"] / 2, box["height"] / 2
    page.mouse.move(middle - side, box["y"] + 1)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + side, steps=4)
    assert page.locator("#crop-box").is_visible()
    page.mouse.up()
    until(page, "document.querySelector('#query-label').textContent === 'Your picture'")
    size = "(image => image.naturalWidth + 100 * image.naturalHeight)(document.querySelector('#query-image'))"
    until(page, f"{size} > 2300 && {size} < 2600")  # about 24 x 24 of 48 x 48
    page.go_back()
    until(page, "document.querySelector('#query-label').textContent.startsWith('kind')")


def test_more_results_filter_and_export(page: Any) -> None:
    pick_first(page)
    page.click("#more")
    until(page, "document.querySelectorAll('.row.ensemble .tile').length === 36")
    page.click("#more")
    until(page, "document.querySelectorAll('.row.ensemble .tile').length === 47")
    assert not page.locator("#more").is_visible()
    page.fill("#narrow", "kind 3")
    shown = page.locator(".row.ensemble li:visible")
    assert shown.count() in (7, 8)
    with page.expect_download() as saved:
        page.click("#export")
    rows = list(csv.DictReader(io.StringIO(Path(saved.value.path()).read_text())))
    assert len(rows) == shown.count()
    assert {row["label"] for row in rows} == {"kind 3"}
    shown.first.locator(".choose").check()
    assert page.inner_text("#selected") == "1 selected"
    with page.expect_download() as saved:
        page.click("#export")
    [row] = csv.DictReader(io.StringIO(Path(saved.value.path()).read_text()))
    assert row["id"] == f"kind 3/{row['name']}"
    assert 0 < float(row["similarity"]) <= 1


def test_a_collection_that_was_replaced_is_told(browser: Any, serve: Any, collection: Collection, index: Index) -> None:
    """By another process while the page is open: the server answers from the new one, and the page says so."""
    few = Collection(
        Index.build(index.vectors(index.ids[:9]), index.ids[:9], index.groups),
        collection.model, collection.picture,
    )  # fmt: skip
    waiting = [few]
    ready = threading.Event()
    address = serve(collection, reopen=lambda: waiting.pop() if ready.is_set() and waiting else None)
    for page in opened(browser, address):
        page.wait_for_selector("#browse .tile")
        ready.set()
        assert banner(page) == "The collection was replaced. It has 9 images now."
        assert page.locator("#browse .tile").count() == 9
