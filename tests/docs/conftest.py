"""The site that ``scripts/docs`` builds, once for all tests of it, and Debian's chromium.

Selenium drives Debian's chromium, because Debian ships a chromedriver of the same version: neither is downloaded from
elsewhere. Playwright brings its own browser builds, which come from a host that an offline machine cannot reach.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parents[2]
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

    def __init__(self, driver):
        self.driver = driver

    def open(self, path):
        self.requested()
        self.driver.get(Path(path).as_uri())
        return self

    def requested(self):
        """The addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    @staticmethod
    def external(addresses):
        return {each for each in addresses if not each.startswith(LOCAL)}

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def wait(self, condition):
        return WebDriverWait(self.driver, 20, poll_frequency=0.1).until(lambda _: condition())

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)


def start_chromium(folder, *more):
    """A chromium with its own profile; skips without chromedriver."""
    program = shutil.which("chromedriver")
    if program is None and "CI" not in os.environ:
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver (scripts/setup does so on Debian)")
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, *more, f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(program))


@pytest.fixture(scope="session")
def axe():
    """The text of axe-core; skips without it."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None and "CI" not in os.environ:
        pytest.skip("no axe-core: scripts/setup installs it")
    return Path(found.origin).with_name("axe.min.js").read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_chromium(tmp_path_factory.mktemp("chromium"))
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="module")
def chinese(tmp_path_factory):
    """A browser whose first language is Chinese."""
    driver = start_chromium(tmp_path_factory.mktemp("chinese"), "--lang=zh-CN", "--accept-lang=zh-CN")
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(argv, check=True, capture_output=True, cwd=ROOT, timeout=240)
    return folder
