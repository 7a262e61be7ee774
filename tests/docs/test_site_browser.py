"""The site in a real browser, from file://: pages show, the search finds, and no request leaves the machine."""

from selenium.webdriver.common.keys import Keys


def test_the_log_shows_a_request_to_another_host(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<script>fetch("https://example.invalid/x").catch(() => document.title = "refused")</script>')
    browser.open(page)
    browser.wait(lambda: browser.driver.title == "refused")
    assert browser.external(browser.requested()) == {"https://example.invalid/x"}
    assert any("example.invalid" in error for error in browser.errors())


def test_pages_show_without_errors_or_requests_to_other_hosts(browser, site):
    browser.errors()
    for page in (
        "index.html",
        "commands.html",
        "architecture.html",
        "services/nfs.html",
        "tutorials/first-cluster.html",
    ):
        browser.open(site / page)
        assert browser.all("article h1")[0].is_displayed(), page
        requested = browser.requested()
        assert any(each.endswith(page) for each in requested)
        assert not browser.external(requested), page
        assert not browser.errors(), page


def test_the_navigation_leads_to_a_page(browser, site):
    browser.open(site / "index.html")
    link = next(each for each in browser.all("article a") if each.text == "Glossary")
    link.click()
    browser.wait(lambda: browser.driver.title.startswith("Glossary"))
    assert any("checkpoint" in cell.text or "release" in cell.text for cell in browser.all("article td"))


def test_the_search_finds_a_page_without_a_server(browser, site):
    browser.open(site / "index.html")
    box = browser.all("input[data-md-component=search-query]")[0]
    box.send_keys("hang-after")
    browser.wait(lambda: [each for each in browser.all(".md-search-result__link") if each.is_displayed()])
    found = [each.get_attribute("href") for each in browser.all(".md-search-result__link")]
    assert any("runs.html" in each or "commands.html" in each for each in found), found
    box.send_keys(Keys.ENTER)
    browser.wait(lambda: "index.html" not in browser.driver.current_url)
    assert "hang-after" in browser.driver.page_source
    assert not browser.external(browser.requested())
