"""A real browser for pages: headless Chromium, with what a test asks of it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import skip_if_fast

PHONE = (390, 844)
DESKTOP = (1280, 900)
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-quic --disable-dev-shm-usage"
    " --hide-scrollbars"
)


class Browser:
    """A page at a time; `driver` is Selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._width = DESKTOP[0]

    def open(self, page: Path | str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Show a file or URL in a window of width and height in pixels; what earlier pages said is
        forgotten.
        """
        self._width, height = size
        metrics = {
            "width": self._width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.errors()
        self.driver.get(page.resolve().as_uri() if isinstance(page, Path) else page)

    def errors(self) -> list[str]:
        """What the page complained of on the console since this was last asked."""
        return [
            line["message"]
            for line in self.driver.get_log("browser")
            if line["level"] in ("SEVERE", "WARNING")
        ]

    def sideways(self) -> int:
        """Pixels by which the page is wider than its window."""
        # A phone zooms out until a wide page fits, and innerWidth follows it.
        return (
            int(self.driver.execute_script("return document.documentElement.scrollWidth"))
            - self._width
        )

    def broken_pictures(self) -> list[str]:
        """Sources of images that could not be shown, after all were loaded."""
        script = """
            const done = arguments[0], pictures = [...document.images];
            pictures.forEach(picture => { picture.loading = "eager"; });
            Promise.all(pictures.map(picture => picture.decode().catch(() => 0))).then(
                () => done(pictures.filter(each => !each.naturalWidth)
                    .map(each => each.src.slice(0, 80))));
        """
        return list(self.driver.execute_async_script(script))

    def requests(self) -> list[str]:
        """URLs that the page fetched."""
        names = self.driver.execute_script(
            "return performance.getEntriesByType('resource').map(each => each.name)"
        )
        return [name for name in names if not name.startswith("data:")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser whose settings are kept in the folder `profile`; the test is skipped where there is
    none.
    """
    skip_if_fast("a browser")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*QUIET.split(), f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()
