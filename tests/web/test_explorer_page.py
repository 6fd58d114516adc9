"""The explorer in a real browser: its values are the ledger's, its controls move them, and it can be used by
keyboard, on a narrow window, in light and dark, without a network."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs, urlparse

import pytest
from playwright.sync_api import Page, expect

from denim.ledger.cost import Ledger, ledger_of
from denim.ledger.devices import DEVICES, find_device
from denim.ledger.intervals import interval_cost
from denim.ledger.lengths import Lengths
from denim.ledger.peers import SGLANG_RESERVED, SglangLayout, VllmLayout
from denim.ledger.units import size_text
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.fewest_devices import fewest_devices
from denim.spec import ModelSpec, read_spec
from denim.spec.dials import turned
from denim.spec.published import published_configs
from tests.browser import Open


def published(name: str) -> ModelSpec:
    return read_spec(published_configs()[name])


def fact(page: Page, key: str) -> str:
    return page.locator(f'[data-fact="{key}"]').get_attribute("data-value") or ""


def row(page: Page, place: str, key: str) -> list[str]:
    return page.locator(f'#{place} [data-row="{key}"] td').all_text_contents()


def facts_of(ledger: Ledger) -> list[str]:
    values = (ledger.crossover_tokens, ledger.kv_bytes_per_token, ledger.bytes_per_request)
    return ["" if value is None else str(value) for value in values]


@pytest.mark.parametrize(
    "name",
    ["Qwen3.5-0.8B", "Kimi-Linear-48B-A3B", "Jamba-1.5-mini", "Mamba2-2.7B", "Granite-4.0-Micro"],
)
def test_values_are_the_ledgers(name: str, explorer: str, open_page: Open) -> None:
    page = open_page(f"{explorer}/?model={name}&tokens=1000")
    spec = published(name)
    ledger = ledger_of(spec)
    expect(page.locator("#model")).to_contain_text(name)
    assert [fact(page, key) for key in ("crossover", "kv", "state")] == facts_of(ledger)

    plan = CapacityPlan.of(spec, find_device("H200"))
    assert fact(page, "requests") == str(plan.holding(Lengths.fixed(1000)).requests)
    assert fact(page, "arena") == str(plan.arena_bytes)

    vllm, sglang = VllmLayout.of(spec), SglangLayout.of(spec, "auto", 0, SGLANG_RESERVED[0])
    for tokens in (1000, 65536):
        full = ledger.all_full_bytes(tokens)
        sizes = [ledger.hybrid_bytes(tokens), full, vllm.request_bytes(tokens), sglang.request_bytes(tokens)]
        texts = [size_text(size) for size in sizes if size is not None]
        assert row(page, "memory-numbers", f"{tokens:,} tokens") == [f"{tokens:,} tokens", *texts]

    if ledger.bytes_per_request and ledger.kv_bytes_per_token:
        cost = interval_cost(ledger, 64, 1000)
        shown = row(page, "interval-numbers", "64")
        assert shown[1:3] == [str(cost.checkpoints), size_text(cost.checkpoint_bytes)]
        assert float(shown[3].removesuffix(" ×").replace(",", "")) == pytest.approx(cost.times_kv, rel=0.01)
    else:
        expect(page.locator("#intervals-card")).to_be_hidden()


def test_every_device_by_every_rule(explorer: str, open_page: Open) -> None:
    page = open_page(f"{explorer}/?model=Qwen3.5-35B-A3B&lengths=lognormal&tokens=2048&sigma=1")
    spec, lengths = published("Qwen3.5-35B-A3B"), Lengths.lognormal(2048, 1)
    page.wait_for_selector("[data-device]")
    for device in DEVICES:
        shown = page.locator(f'[data-device="{device.name}"]')
        devices, plan = fewest_devices(partial(CapacityPlan.of, spec, device))
        assert devices == {"L40S": 2, "RTX4090": 4}.get(device.name, 1)
        sglang = SglangLayout.of(plan.spec, "auto", 0, SGLANG_RESERVED[0])
        expected = {
            "denim": plan.holding(lengths).requests,
            "vllm": VllmLayout.of(plan.spec).requests(plan.arena_bytes, lengths),
            "sglang": sglang.requests(plan.arena_bytes, lengths),
        }
        for engine, requests in expected.items():
            strip = shown.locator(f'[data-engine="{engine}"]')
            assert strip.get_attribute("data-requests") == str(requests)
            assert float(strip.locator("span").inner_text()) == pytest.approx(requests / devices, rel=0.03)


def test_a_slider_moves_the_crossover(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    crossover, spec = page.locator('[data-fact="crossover"]'), published("Qwen3.5-0.8B")

    def moved(**changes: int) -> str:
        return str(ledger_of(turned(spec, changes)).crossover_tokens)

    assert len({moved(), moved(linear_heads=24), moved(linear_heads=32), moved(kv_heads=4)}) == 4
    expect(crossover).to_have_attribute("data-value", moved())
    page.focus("#set-linear_heads")
    page.keyboard.press("ArrowRight")
    expect(crossover).to_have_attribute("data-value", moved(linear_heads=24))
    assert parse_qs(urlparse(page.url).query) == {"linear_heads": ["24"]}
    page.keyboard.press("ArrowRight")  # the slider kept the focus
    expect(crossover).to_have_attribute("data-value", moved(linear_heads=32))
    page.get_by_label("linear heads: as it was").click()
    expect(crossover).to_have_attribute("data-value", moved())
    assert urlparse(page.url).query == ""
    page.focus("#set-kv_heads")
    page.keyboard.press("ArrowRight")
    expect(crossover).to_have_attribute("data-value", moved(kv_heads=4))


def test_a_share_of_full_attention_moves_states_and_kv(explorer: str, open_page: Open) -> None:
    """And leaves the crossover: a linear layer less is a state less here, its KV less in the other."""
    page = open_page(explorer)
    expect(page.locator('[data-fact="kv"]')).to_have_attribute("data-value", "12288")
    page.focus("#set-full_share")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    ledger = ledger_of(turned(published("Qwen3.5-0.8B"), {"full_share": 50}))
    expect(page.locator('[data-fact="kv"]')).to_have_attribute("data-value", "24576")
    assert [fact(page, key) for key in ("crossover", "kv", "state")] == facts_of(ledger)
    expect(page.locator("#weave")).to_have_attribute("aria-label", "layers: " + "LF" * 12)


def test_a_slider_is_dragged_through_many_answers(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    slider = page.locator("#set-layers")
    expect(page.locator('[data-fact="state"]')).to_be_visible()
    box = slider.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.2, middle)
    page.mouse.down()
    for part in (0.3, 0.5, 0.7, 1.0):
        page.mouse.move(box["x"] + box["width"] * part, middle)
        page.wait_for_timeout(60)
    page.mouse.up()
    expect(page.locator("#weave")).to_have_attribute("aria-label", "layers: " + "LLLF" * 32)


def test_a_link_carries_the_settings(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    page.select_option("#set-model", "Nemotron-H-8B")
    expect(page.locator("#model")).to_contain_text("Nemotron-H-8B")
    page.select_option("#set-device", "H100")
    page.select_option("#set-state_dtype", "bfloat16")
    page.locator("#set-kv_heads").focus()
    page.keyboard.press("Home")
    spec = turned(read_spec(published_configs()["Nemotron-H-8B"], state_dtype="bfloat16"), {"kv_heads": 1})
    expect(page.locator('[data-fact="kv"]')).to_have_attribute(
        "data-value", str(ledger_of(spec).kv_bytes_per_token)
    )
    page.locator("#fill").focus()
    page.keyboard.press("ArrowLeft")
    headline = page.locator("#headline").text_content()

    other = open_page(page.url)
    expect(other.locator("#headline")).to_have_text(headline or "")
    assert fact(other, "state") == str(ledger_of(spec).bytes_per_request)
    assert other.locator("#set-device").input_value() == "H100"
    assert other.locator("#fill").input_value() == "39"
    other.get_by_role("button", name="Start again").click()
    expect(other.locator("#model")).to_contain_text("Qwen3.5-0.8B")
    assert urlparse(other.url).query == ""


def test_pools_fill_and_requests_wait(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    tank = page.locator('.tank[data-engine="sglang"]')
    expect(tank).to_have_attribute("data-running", "797")
    states = tank.locator('[data-pool="states"]').get_attribute("data-used")
    keys = tank.locator('[data-pool="KV"]').get_attribute("data-used")
    assert float(states or 0) == pytest.approx(1, abs=0.01) and float(keys or 1) < 0.6
    expect(tank.locator(".waits")).to_contain_text("1,083 wait")
    page.focus("#fill")
    page.keyboard.press("Home")
    expect(tank).to_have_attribute("data-running", "0")
    expect(tank.locator(".waits")).to_be_empty()


def test_what_does_not_fit_is_said(explorer: str, open_page: Open) -> None:
    page = open_page(f"{explorer}/?model=MiniMax-Text-01&gpus=1")
    expect(page.locator("#headline")).to_contain_text("no room for states and KV beside 850 GiB of weights")
    expect(page.locator("#filling-card")).to_be_hidden()
    page.get_by_label("devices that share the model: as it was").click()  # the fewest that hold it
    expect(page.locator("#headline")).to_contain_text("8 × H200 hold")
    assert "gpus" not in page.url
    expect(page.locator("#filling-card")).to_be_visible()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_window(width: int, explorer: str, open_page: Open) -> None:
    page = open_page(f"{explorer}/?model=MiniMax-Text-01&gpus=8", viewport={"width": width, "height": 700})
    expect(page.locator('[data-fact="requests"]')).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.locator("#set-device")).to_be_hidden()
    page.locator("#panel > summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#set-device")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark(explorer: str, open_page: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = open_page(explorer, color_scheme="dark")
    light = open_page(explorer, color_scheme="light")
    colours = dark.evaluate(paper), light.evaluate(paper)
    assert colours[0] != colours[1]
    button = light.locator("#theme")
    button.click()
    button.click()
    expect(button).to_have_text("● dark")
    assert light.evaluate(paper) == colours[0]
    light.reload()
    assert light.evaluate(paper) == colours[0]


def test_a_chart_is_read_by_arrow_keys(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    value = page.locator('#memory [data-key="hybrid"] b')
    ledger = ledger_of(published("Qwen3.5-0.8B"))
    expect(value).to_have_text(size_text(ledger.hybrid_bytes(4096)))  # the length that is set
    page.focus("#memory .chart")
    page.keyboard.press("Home")
    expect(value).to_have_text(size_text(ledger.hybrid_bytes(16)))
    expect(page.locator("#memory [aria-live]")).to_contain_text("16 tokens, hybrid 18.8 MiB")
    page.keyboard.press("End")
    expect(value).to_have_text(size_text(ledger.hybrid_bytes(1 << 20)))


def test_everything_is_reached_by_tab_and_has_a_name(explorer: str, open_page: Open) -> None:
    page = open_page(explorer)
    page.wait_for_selector("#set-layers")
    wanted = set(
        page.eval_on_selector_all("input, select, button:not([hidden])", "all => all.map(e => e.id)")
    )
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert wanted - reached == set()
    unnamed = "all => all.filter(e => !e.labels?.length && !e.ariaLabel).map(e => e.outerHTML)"
    assert page.eval_on_selector_all("input, select", unnamed) == []


def test_a_wrong_link_is_said_in_one_line(explorer: str, open_page: Open) -> None:
    page = open_page(f"{explorer}/?layers=1000", expected="status of 422")
    expect(page.locator("#error")).to_contain_text("layers is 1000; choose one of 1 to 128")
    page.goto(f"{explorer}/?colour=red")
    expect(page.locator("#error")).to_have_text("colour='red': extra inputs are not permitted")
