"""The built site in a real browser: `make docs` builds it and runs these."""

import pathlib
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

SITE = pathlib.Path(__file__).parents[2] / "build" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"desktop": 1280, "narrow": 390}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def address():
    if not (SITE / "docs" / "index.html").exists():
        pytest.skip("the site is not built: `make docs`")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not there")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver on this system")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = selenium.ChromeService(executable_path=driver)
    page = selenium.Chrome(options=options, service=service)
    page.set_page_load_timeout(60)
    yield page
    page.quit()


def pages() -> list[str]:
    """Those that the first page leads to."""
    from html.parser import HTMLParser

    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag, attrs):
            named = dict(attrs)
            kind = named.get("class") or ""
            if tag == "a" and "reference internal" in kind:
                found.append((named.get("href") or "").split("#")[0])

    index = SITE / "docs" / "index.html"
    Links().feed(index.read_text())
    return sorted({link for link in found if link})


def errors(browser) -> list[str]:
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_page_opens_without_an_error_and_fits_the_window(address, browser, width):
    browser.set_window_size(width, 900)
    links = pages()
    assert len(links) > 15
    for link in links:
        browser.get(f"{address}/docs/{link}")
        assert not errors(browser), link
        assert browser.find_elements("css selector", "h1"), link
        scrolls = "return document.documentElement.scrollWidth - window.innerWidth"
        assert browser.execute_script(scrolls) <= 1, link


def test_nothing_is_fetched_from_elsewhere(address, browser):
    import json

    browser.get_log("performance")
    browser.get(f"{address}/docs/start.html")
    asked = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    own = [url for url in asked if url.startswith((address, "data:", "chrome"))]
    assert asked == own
    assert any(url.endswith("start.html") for url in own)


def test_a_search_finds_the_page_on_kinks(address, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}/search.html?q=complementarity")
    found = lambda page: page.find_elements("css selector", "#search-results li a")
    WebDriverWait(browser, 30).until(found)
    assert any("theory" in link.get_attribute("href") for link in found(browser))
    assert not errors(browser)


def test_results_of_executed_code_stand_on_the_pages():
    start = SITE / "docs" / "start.html"
    if not start.exists():
        pytest.skip("the site is not built: `make docs`")
    assert "-5.375" in start.read_text()
    kinks = (SITE / "docs" / "kinks.html").read_text()
    assert "cell_output" in kinks
    assert "<img" in kinks
