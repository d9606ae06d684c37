"""What a person does with the page of a search server, in a real browser."""

import re

import pytest
from browser import DESKTOP, PHONE
from galleries import upload
from proxies import proxy
from selenium.webdriver.support.ui import WebDriverWait

# As if a person dropped a file onto the page or pasted it; the server's page cannot know the
# difference.
GIVEN = """
    const data = new DataTransfer(), [kind, name, bytes] = arguments;
    data.items.add(new File([Uint8Array.from(bytes)], name, {type: "image/png"}));
    const event = kind === "drop" ? new DragEvent(kind, {dataTransfer: data, bubbles: true})
        : new ClipboardEvent(kind, {clipboardData: data, bubbles: true});
    document.getElementById("drop").dispatchEvent(event);
"""


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "query.png"
    path.write_bytes(upload(11, size=(160, 120)))
    return path


class Page:
    """The page as a person sees it."""

    def __init__(self, browser, url, size=DESKTOP):
        self.browser = browser
        self.driver = browser.driver
        browser.open(url, size)

    def texts(self, selector):
        # At once, since the page may replace its elements meanwhile.
        keys_shown = (
            "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText.trim())"
        )
        return self.driver.execute_script(keys_shown, selector)

    def choose(self, path):
        self.driver.find_element("id", "image").send_keys(str(path))

    def wait(self, title, hits=None):
        """Wait until hits are shown, and return their keys."""

        def shown(_):
            return self.texts("#found") == [title] and (
                hits is None or len(self.texts("#hits li")) == hits
            )

        WebDriverWait(self.driver, 20).until(shown, message=f"no hits of {title}")
        return self.texts("#hits .key")

    def similar(self, row):
        self.driver.find_elements("css selector", "#hits .more")[row].click()

    def chosen(self):
        return self.driver.execute_script(
            "return [...document.getElementById('image').files].map(f => f.name)"
        )


def keys(hits):
    return [hit.key for hit in hits]


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_choosing_an_image_searches_at_once(url, searcher, browser, image, size):
    page = Page(browser, f"{url}/", size)
    page.choose(image)
    expected = searcher.by_image(image.read_bytes(), 12)
    assert page.wait("Most similar to query.png") == keys(expected)
    assert page.texts("#hits .class") == [hit.class_name for hit in expected]  # `<i>apple` as text
    assert not browser.broken_pictures() and browser.sideways() <= 0
    assert browser.driver.switch_to.active_element.text == "Most similar to query.png"
    page.similar(0)
    assert page.wait(f"Most similar to {expected[0].key}") == keys(
        searcher.by_key(expected[0].key, 12)
    )
    assert not browser.errors()
    assert all(item.startswith((url, "blob:")) for item in browser.requests())


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_an_image_that_is_dropped_or_pasted_is_searched_for_at_once(
    url, searcher, browser, image, kind
):
    page = Page(browser, f"{url}/")
    browser.driver.execute_script(GIVEN, kind, "given.png", list(image.read_bytes()))
    assert page.wait("Most similar to given.png") == keys(searcher.by_image(image.read_bytes(), 12))
    assert page.chosen() == ["given.png"]


def test_back_and_forward_return_to_earlier_searches(url, searcher, browser, image):
    page = Page(browser, f"{url}/")
    driver = browser.driver
    page.choose(image)
    of_image = page.wait("Most similar to query.png")
    page.similar(1)
    of_key = page.wait(f"Most similar to {of_image[1]}")
    page.similar(2)
    page.wait(f"Most similar to {of_key[2]}")
    assert driver.title == f"{of_key[2]} - Search by image" and page.chosen() == []
    driver.back()
    assert page.wait(f"Most similar to {of_image[1]}") == of_key
    driver.back()
    assert page.wait("Most similar to query.png") == of_image
    assert page.chosen() == ["query.png"]
    WebDriverWait(driver, 20).until(lambda _: driver.find_element("id", "preview").is_displayed())
    driver.back()
    WebDriverWait(driver, 20).until(
        lambda _: not driver.find_element("id", "results").is_displayed()
    )
    assert page.chosen() == []
    driver.forward()
    assert page.wait("Most similar to query.png") == of_image
    driver.forward()
    assert page.wait(f"Most similar to {of_image[1]}") == of_key
    assert browser.sideways() <= 0 and not browser.errors()


def test_the_address_of_a_search_by_key_opens_it_anywhere(url, searcher, browser):
    key = "<i>apple/кот 0.png"
    page = Page(browser, f"{url}/?key=%3Ci%3Eapple%2F%D0%BA%D0%BE%D1%82+0.png&k=4")
    keys_shown = page.wait(f"Most similar to {key}", 4)
    assert keys_shown == keys(searcher.by_key(key, 4))
    assert browser.driver.find_element("id", "k").get_attribute("value") == "4"
    link = browser.driver.find_element("css selector", "#hits .more").get_attribute("href")
    Page(browser, link).wait(f"Most similar to {keys_shown[0]}", 4)


def test_the_page_says_what_is_wrong_with_a_file(url, browser, image, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    page = Page(browser, f"{url}/", PHONE)
    browser.driver.find_element("id", "send").click()
    assert page.texts("#error") == ["Choose an image first."]
    page.choose(broken)
    WebDriverWait(browser.driver, 20).until(
        lambda _: page.texts("#error")[0].startswith("this is no image")
    )
    assert browser.sideways() <= 0 and page.texts("#hits li") == []
    assert browser.driver.current_url == f"{url}/"
    page.choose(image)
    page.wait("Most similar to query.png")
    page.choose(broken)  # hits of another image would look like its own
    WebDriverWait(browser.driver, 20).until(
        lambda driver: not driver.find_element("id", "results").is_displayed()
    )


def test_the_page_works_below_a_path(url, browser, image):
    with proxy(url, "/pictures/of/") as address:
        page = Page(browser, address)
        page.choose(image)
        keys_shown = page.wait("Most similar to query.png")
        assert not browser.broken_pictures()
        page.similar(0)
        page.wait(f"Most similar to {keys_shown[0]}")
        assert re.fullmatch(rf"{address}\?key=.*&k=12", browser.driver.current_url)
        assert not browser.errors()
        assert all(item.startswith((address, "blob:")) for item in browser.requests())
