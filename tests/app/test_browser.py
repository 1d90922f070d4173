"""The page in a real browser: it opens, generates, shows a tree, examines heads, and survives bad input.

Needs chromium with its driver, gradio and selenium (`make browser`); skipped, with the reason, where one is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium with its driver is installed; `make browser` installs both"
)
gradio = pytest.importorskip("gradio", reason="gradio is not installed; `make browser` installs it")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; `make browser` installs it")
WebDriverException = pytest.importorskip("selenium.common.exceptions").WebDriverException
Keys = webdriver.Keys

PAIR = Path(__file__).parents[2] / "model_cards"
NAMES = ("one", "two")  # of questions whose answers have more than a hundred tokens
PATIENCE = 240.0  # seconds: a machine may be busy


class Page:
    """The page as a visitor sees it."""

    def __init__(self, driver: Any):
        self.driver = driver

    def wait_for(self, found: Callable[[], Any], what: str) -> Any:
        """What `found` returns, once it is something."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            try:
                if result := found():
                    return result
            except WebDriverException:  # an element that was just replaced
                pass
            time.sleep(0.1)
        said = self.all("body")[0].text
        raise AssertionError(f"the page never showed {what}; it says: {said}")

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def one(self, css: str) -> Any:
        return self.wait_for(lambda: self.all(css), css)[0]

    def text(self, css: str) -> str:
        return self.one(css).text

    def click(self, css: str) -> None:
        element = self.one(css)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def start_from(self, name: str) -> None:
        """A new chat, with one of the page's questions."""
        (example,) = [one for one in self.all("button.gallery-item") if one.text == name]
        example.click()
        self.wait_for(lambda: not self.all("#ours .t"), "an empty chat")

    def fill(self, css: str, text: str) -> None:
        field = self.one(css)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text, Keys.TAB)

    def choose(self, control: str, option: str) -> None:
        self.click(f"{control} input")
        found = self.wait_for(
            lambda: [one for one in self.all("[role=option]") if one.text.strip().endswith(option)], option
        )
        found[0].click()


@pytest.fixture(scope="module")
def models() -> Any:
    """What the page generates with: the shipped pair."""
    from hf_specheads.cli.app import load_models

    args = argparse.Namespace(pair=PAIR, target="target", heads=["poss3", "eagle"], dtype="float32", device="cpu",
                              quiet=True)  # fmt: skip
    return load_models(args)[0]


@pytest.fixture(scope="module")
def url(models: Any) -> Iterator[str]:
    """The page with the demo's questions, served by this process."""
    from hf_specheads.app.page import build_page, launch_options
    from hf_specheads.cli.app import question_of
    from hf_specheads.cli.demo import read_demo_prompts

    chats = read_demo_prompts(None, models.chats)
    page = build_page(models, [(name, question_of(chat)) for name, chat in zip(NAMES, chats, strict=False)], "poss3")
    _, address, _ = page.launch(prevent_thread_lock=True, server_name="127.0.0.1", **launch_options())
    yield address
    page.close(verbose=False)


@pytest.fixture(scope="module")
def page(url: str) -> Iterator[Page]:
    """A headless browser that has opened it."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1400",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get(url)
    opened = Page(driver)
    opened.wait_for(lambda: opened.one("#generate").is_displayed(), "its button")
    opened.fill("#tokens input[type=number]", "32")
    yield opened
    driver.quit()


def test_it_generates_beside_plain_decoding(page: Page) -> None:
    page.click("#generate")
    page.wait_for(lambda: "The same text, token for token" in page.text("#verdict"), "that the texts are the same")
    assert page.text("#ours .turn") == page.text("#plain .turn")
    assert page.all("#ours .t.p1") and page.all("#ours .t.p2"), "drafts are coloured by position"
    assert float(page.text("#ours-head [data-number=tau]")) > 1.5
    assert float(page.text("#ours-head [data-number='tokens/s']")) > 0
    ours, plain = (int(page.text(f"#{side}-head [data-number='target forwards']")) for side in ("ours", "plain"))
    assert ours < plain


def test_the_tree_of_any_round_is_shown(page: Page) -> None:
    page.start_from("two")
    page.choose("#tree-kind", "dynamic")
    page.fill("#tokens input[type=number]", "24")  # another number than before tells the new reply
    page.click("#generate")
    page.wait_for(lambda: page.text("#plain-head [data-number=tokens]") == "24", "a reply of 24 tokens")
    page.wait_for(lambda: "The same text" in page.text("#verdict") and page.all("#tree svg"), "a tree")
    number = page.one("#ours .t.p2").get_attribute("data-round")
    page.click("#ours .t.p2")  # shows the tree of its round
    page.wait_for(lambda: page.text("#round-words").startswith(f"Round {number}:"), "the round of the token")
    assert page.one("#ours .t.now").get_attribute("data-round") == number
    assert len(page.all("#tree svg .accepted")) >= 2 and page.all("#tree svg .rejected")
    assert page.one("#tree svg .accepted title").get_attribute("textContent").startswith("accepted: ")


def test_the_end_of_a_reply_is_seen_and_an_example_begins_a_new_chat(page: Page) -> None:
    seen = """const box = document.querySelector('#ours .sh-reply').getBoundingClientRect();
    const end = [...document.querySelectorAll('#ours .t')].at(-1).getBoundingClientRect();
    return end.bottom <= box.bottom + 1 && end.top >= box.top - 1;"""
    page.start_from("one")
    page.fill("#tokens input[type=number]", "120")
    page.click("#generate")
    page.wait_for(lambda: page.all("#ours .t") and "The same text" in page.text("#verdict"), "a long reply")
    assert page.driver.execute_script(seen), "the newest tokens are out of sight"
    page.start_from("two")
    assert "SQL" in page.one("#prompt textarea").get_attribute("value")
    assert not page.all("#ours .t") and not page.all("#plain .turn")


@pytest.fixture
def slow(models: Any) -> Iterator[None]:
    """A target that leaves time for a click between two of its forwards."""
    handle = models.target.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    yield
    handle.remove()


def test_a_reply_is_stopped_and_says_so(page: Page, slow: None) -> None:
    page.fill("#tokens input[type=number]", "512")
    page.click("#generate")
    page.wait_for(lambda: page.all("#ours .t.p1"), "some rounds")
    page.click("#stop")
    page.wait_for(lambda: page.text("#ours").endswith("[stopped]"), "that the reply was stopped")
    assert not page.all("#plain .t"), "plain decoding was not begun"


def test_a_new_chat_begins_while_a_reply_is_written(page: Page, models: Any, slow: None) -> None:
    page.click("#generate")
    page.wait_for(lambda: page.all("#ours .t.p1") and models.lock.locked(), "some rounds")
    page.click("#clear")
    page.wait_for(lambda: not page.all("#ours .t"), "an empty page")
    page.fill("#tokens input[type=number]", "16")
    page.click("#generate")
    page.wait_for(lambda: "The same text" in page.text("#verdict"), "the reply of the new chat")
    assert page.text("#plain-head [data-number=tokens]") == "16"


def test_bad_input_is_answered_and_the_page_lives_on(page: Page) -> None:
    page.fill("#prompt textarea", " ")
    page.click("#generate")
    page.wait_for(lambda: "the prompt is empty" in page.text("#verdict"), "that the prompt is empty")
    page.driver.execute_script(
        "const box = document.querySelector('#prompt textarea'); box.value = 'def f():\\n'.repeat(2000);"
        "box.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    page.click("#generate")
    page.wait_for(lambda: "exceed the target's context" in page.text("#verdict"), "that the prompt is too long")
    page.fill("#prompt textarea", "class A:")
    page.click("#generate")
    page.wait_for(lambda: "The same text" in page.text("#verdict"), "a reply after bad input")


def test_the_doctor_examines(page: Page) -> None:
    (tab,) = [one for one in page.all("button[role=tab]") if one.text == "Doctor"]
    page.driver.execute_script("window.scrollTo(0, 0)")
    tab.click()
    page.fill("#doctor-prompts textarea", " ")
    page.click("#examine")
    page.wait_for(lambda: "write at least one" in page.text("#diagnosis"), "that there are no prompts")
    page.fill("#doctor-prompts textarea", "import os")
    page.fill("#doctor-tokens input[type=number]", "16")
    page.click("#examine")
    page.wait_for(lambda: page.all("#diagnosis .sh-doctor"), "a diagnosis")
    assert "teacher-forced position 1" in page.text("#diagnosis")


def test_nothing_is_asked_of_other_machines(page: Page) -> None:
    sent = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    assert asked and not [address for address in asked if address.startswith("http") and "//127.0.0.1" not in address]
