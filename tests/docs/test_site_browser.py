"""The site in a real browser, from file://: pages show, the search finds, and no request leaves the machine.

Selenium drives Debian's chromium, because Debian ships a chromedriver of the same version: neither is downloaded from
elsewhere. Playwright brings its own browser builds, which come from a host that an offline machine cannot reach.
"""

import json
import os
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # root cannot use chromium's sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a request to another host fails, and is in the log all the same
    "--window-size=1400,1000",
)
LOCAL = ("file:", "data:", "blob:", "about:", "chrome:", "devtools:")


class Browser:
    """A chromium, with its requests and its console's messages."""

    def __init__(self, driver, site):
        self.driver, self.site = driver, site

    def open(self, page):
        self.requested()
        self.driver.get((self.site / page).as_uri())
        return self

    def requested(self):
        """The addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def wait(self, condition):
        return WebDriverWait(self.driver, 20, poll_frequency=0.1).until(lambda _: condition())

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory):
    program = shutil.which("chromedriver")
    if program is None and "CI" not in os.environ:
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver (scripts/setup does so on Debian)")
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    yield Browser(driver, site)
    driver.quit()


def external(addresses):
    return {each for each in addresses if not each.startswith(LOCAL)}


def test_the_log_shows_a_request_to_another_host(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<script>fetch("https://example.invalid/x").catch(() => document.title = "refused")</script>')
    browser.open(page)
    browser.wait(lambda: browser.driver.title == "refused")
    assert external(browser.requested()) == {"https://example.invalid/x"}
    assert any("example.invalid" in error for error in browser.errors())


def test_pages_show_without_errors_or_requests_to_other_hosts(browser):
    browser.errors()
    for page in (
        "index.html",
        "commands.html",
        "architecture.html",
        "services/nfs.html",
        "tutorials/first-cluster.html",
    ):
        browser.open(page)
        assert browser.all("article h1")[0].is_displayed(), page
        requested = browser.requested()
        assert any(each.endswith(page) for each in requested)
        assert not external(requested), page
        assert not browser.errors(), page


def test_the_navigation_leads_to_a_page(browser):
    browser.open("index.html")
    link = next(each for each in browser.all("article a") if each.text == "Glossary")
    link.click()
    browser.wait(lambda: browser.driver.title.startswith("Glossary"))
    assert any("checkpoint" in cell.text or "release" in cell.text for cell in browser.all("article td"))


def test_the_search_finds_a_page_without_a_server(browser):
    browser.open("index.html")
    box = browser.all("input[data-md-component=search-query]")[0]
    box.send_keys("hang-after")
    browser.wait(lambda: [each for each in browser.all(".md-search-result__link") if each.is_displayed()])
    found = [each.get_attribute("href") for each in browser.all(".md-search-result__link")]
    assert any("runs.html" in each or "commands.html" in each for each in found), found
    box.send_keys(Keys.ENTER)
    browser.wait(lambda: "index.html" not in browser.driver.current_url)
    assert "hang-after" in browser.driver.page_source
    assert not external(browser.requested())
