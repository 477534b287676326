"""The page to try an encoder on: what it computes, and what a browser shows of it."""

import asyncio
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, contextmanager
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of

from whitenedcse.app import cli
from whitenedcse.model import checkpoint
from whitenedcse.serving.exports import scaled

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
QUERY = "the small dog likes bread"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def embedder(bert):
    return embedder_of(bert, kind="mean").eval()


def trial_of(embedder, texts):
    from whitenedcse.serving.demo import Trial  # and Gradio, which each worker of pytest would import

    return Trial(embedder, texts)


def cosines(a, b):
    return [[x @ y / np.sqrt((x @ x) * (y @ y)) for y in b] for x in a]


def whitened(x, y, k):
    """y by the transform that whitens x, from the eigenvectors of its covariance, k of most variance."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    values, axes = np.linalg.eigh(np.cov(x.T, bias=True))
    best = np.argsort(-values)[:k]
    return (y - x.mean(0)) @ axes[:, best] / np.sqrt(values[best])


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("k", [None, 4, 10])
@pytest.mark.slow(but=2)
def test_neighbours_and_cosines_are_those_of_the_definition(embedder, k, unit):
    trial = trial_of(scaled(embedder, unit=unit), TEXTS)
    x, query = embedder.encode(TEXTS), embedder.encode([QUERY])
    if k is not None:
        x, query = whitened(x, x, k), whitened(x, query, k)
    (wanted,) = cosines(query, x)
    best = np.argsort(-np.array(wanted), kind="stable")[:5]
    got = trial.nearest(QUERY, k, 5)
    assert [text for _, text in got] == [TEXTS[i] for i in best]
    np.testing.assert_allclose([cosine for cosine, _ in got], [wanted[i] for i in best], atol=2e-3)
    assert abs(trial.cosine(QUERY, TEXTS[3], k) - wanted[3]) < 2e-3


def test_more_than_there_are_gives_all_of_them(embedder):
    assert len(trial_of(embedder, TEXTS[:3]).nearest(QUERY, 2, 10)) == 3


def test_the_page_computes_what_it_is_asked_and_nothing_for_an_empty_box(embedder):
    page = pytest.importorskip("whitenedcse.serving.demo")
    trial = trial_of(embedder, TEXTS)
    assert page.table(trial, "  ", 4) == [] and page.cosines(trial, "a", " ", 4) == ""
    assert [row[1] for row in page.table(trial, QUERY, 4)] == [t for _, t in trial.nearest(QUERY, 4, 10)]
    numbers = re.findall(r"-?\d\.\d{4}", page.cosines(trial, QUERY, TEXTS[0], 4))
    wanted = [trial.cosine(QUERY, TEXTS[0], k) for k in (None, 4)]
    np.testing.assert_allclose([float(number) for number in numbers], wanted, atol=1e-4)
    asked = [page.components(said, trial) for said in (None, "4", "0", "99", "-1", "x", "")]
    assert asked == [16, 4, 1, 16, 16, 16, 16] and page.few(trial) == ""


def test_of_few_sentences_no_more_components_are_kept_than_vary(embedder):
    page = pytest.importorskip("whitenedcse.serving.demo")
    trial = trial_of(embedder, TEXTS[:9])
    assert [page.components(said, trial) for said in (None, "8", "16")] == [2, 8, 8]
    assert "At most 8 components" in page.few(trial)


OWN = "http://127.0.0.1:7860"
FORGED = [{"Host": host} for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "")]
FORGED += [{"Origin": f"http://{host}"} for host in ("evil.example", "localhost:7860", "127.0.0.1:1")]
FORGED += [{"Origin": "null"}, {"Host": "evil.example", "Origin": "http://evil.example"}]


def reached(kind, method, path, **headers):
    """What an application behind `own_only` was asked, and what was sent by it or instead of it."""
    page = pytest.importorskip("whitenedcse.serving.demo")
    seen, sent = [], []

    async def application(scope, receive, send):
        seen.append(scope["path"])

    async def send(message):
        sent.append(message.get("status") or message.get("code"))

    given = {"Host": "127.0.0.1:7860"} | headers
    pairs = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    scope = {"type": kind, "method": method, "path": path, "headers": pairs}
    asyncio.run(page.own_only(application)(scope, None, send))
    return seen, sent[:1]


@pytest.mark.parametrize("headers", FORGED, ids=str)
def test_a_request_from_elsewhere_is_refused_before_gradio_sees_it(headers):
    for method, path in product(("GET", "POST", "OPTIONS"), ("/config", "/gradio_api/queue/join")):
        assert reached("http", method, path, **headers) == ([], [403])
    assert reached("websocket", "", "/config", **headers) == ([], [1008])


def test_the_pages_own_requests_are_answered_and_nothing_else_is_posted():
    local = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}  # as ssh forwards it
    for headers in ({}, {"Origin": OWN}, local):
        for path in ("/gradio_api/queue/join", "/gradio_api/call/search", "/gradio_api/run/similarity"):
            assert reached("http", "POST", path, **headers) == ([path], [])
        assert reached("http", "GET", "/", **headers) == (["/"], [])
        for path in ("upload", "upload/", "process_recording", "component_server", "queue/join/../upload"):
            assert reached("http", "POST", f"/gradio_api/{path}", **headers) == ([], [404])
        assert reached("http", "PUT", "/gradio_api/queue/join", **headers) == ([], [404])


def test_sentences_too_few_to_whiten_are_refused_before_they_are_encoded(embedder, tmp_path, capsys):
    pytest.importorskip("whitenedcse.serving.demo")
    checkpoint.save(embedder, tmp_path / "best")
    (tmp_path / "few.txt").write_text("a cat\na dog\na cat\n")
    assert cli.main(["demo", str(tmp_path / "best"), str(tmp_path / "few.txt")]) == 2
    said = "few.txt has 2 different sentences; the page whitens them, for which it needs three or more ("
    assert said in capsys.readouterr().err


def test_a_number_of_components_out_of_range_is_the_nearest_in_it():
    page = pytest.importorskip("whitenedcse.serving.demo")
    assert [page.within(SimpleNamespace(most=8), k) for k in (0, 1, 8, 9)] == [1, 1, 8, 8]


def test_without_gradio_the_command_says_what_to_install(embedder, tmp_path, capsys, monkeypatch):
    checkpoint.save(embedder, tmp_path / "best")
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    monkeypatch.setitem(__import__("sys").modules, "whitenedcse.serving.demo", None)
    assert cli.main(["demo", str(tmp_path / "best"), str(tmp_path / "corpus.txt")]) == 2
    assert "pip install 'whitenedcse[demo]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_with_the_way_out():
    page = pytest.importorskip("whitenedcse.serving.demo")

    class Blocks:
        def launch(self, server_port, **_):
            raise OSError(f"Cannot find empty port in range: {server_port}-{server_port}")  # Gradio's words

    with pytest.raises(
        OSError, match=r"^--port 81 is taken: give another, or leave it out for the first free"
    ):
        page.opened(Blocks(), 81)
    with pytest.raises(OSError, match="^Cannot find empty port"):
        page.opened(Blocks(), None)


# the browser, driven by its own protocol


class Browser:
    """A tab of headless Chromium: scripts in, values out; what it said on the console, what it asked for."""

    def __init__(self, socket):
        self.socket, self.number, self.console, self.asked = socket, 0, [], []

    async def call(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while (answer := json.loads(await self.socket.receive_str(timeout=60))).get("id") != self.number:
            if answer["method"] == "Runtime.consoleAPICalled" and answer["params"]["type"] == "error":
                self.console.append(answer["params"]["args"])
            if answer["method"] == "Network.requestWillBeSent":
                self.asked.append(answer["params"]["request"]["url"])
        return answer["result"]

    async def value(self, script):
        return (await self.call("Runtime.evaluate", expression=script))["result"].get("value")

    async def until(self, script):
        """The script's value once it is true."""
        end = time.monotonic() + 40
        while not (value := await self.value(script)) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        assert value, f"not in 90 s: {script}; the page: {await self.value('document.body.innerText')}"
        return value


async def visited(address, profile, visit):
    aiohttp = pytest.importorskip("aiohttp")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "--window-size=1280,1000"]
    process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "DevTools listening" in line)
        port = re.search(r":(\d+)/", line).group(1)
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        tab = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
        async with aiohttp.ClientSession() as session, session.ws_connect(tab, max_msg_size=0) as socket:
            browser = Browser(socket)
            for domain in ("Runtime", "Network", "Page"):
                await browser.call(f"{domain}.enable")
            await browser.call("Page.navigate", url=address)
            await visit(browser)
            return browser
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def demonstrated(*arguments):
    """The address of the page that the command shows."""
    pytest.importorskip("gradio")
    command = [sys.executable, "-m", "whitenedcse.app.cli", "demo", *map(str, arguments)]

    def hears():  # tests started in the background ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=hears, **pipes) as process:
        try:
            said = re.search(r"page: (\S+)", process.stdout.readline())
            assert said or process.wait() is None, process.stderr.read()
            yield said.group(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


TEXT = "document.body.innerText"
SET = """(() => { const box = document.querySelector('SELECTOR');
const kind = box.tagName == 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(box, VALUE);
for (const name of ['input', 'change', 'pointerup', 'blur'])
  box.dispatchEvent(new Event(name, {bubbles: true}));
box.dispatchEvent(new KeyboardEvent('keypress', {key: 'Enter', bubbles: true}));
return true })()"""


def typed(selector, value):
    """A script that puts a value into a box and presses Enter."""
    return SET.replace("SELECTOR", selector).replace("VALUE", json.dumps(str(value)))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.slow
def test_a_browser_searches_moves_the_slider_and_compares(embedder, tmp_path):
    page = pytest.importorskip("whitenedcse.serving.demo")
    checkpoint.save(embedder, tmp_path / "best")
    (tmp_path / "corpus.txt").write_text("\n".join([*TEXTS, TEXTS[0], ""]))
    trial = trial_of(embedder, TEXTS)

    async def visit(browser):
        async def finds(query, k):
            await browser.until("document.querySelectorAll('table').length > 1")
            for row in page.table(trial, query, k):
                await browser.until(f"{TEXT}.includes({json.dumps(row[1])})")
                await browser.until(f"{TEXT}.includes({json.dumps(row[0][:5])})")

        await finds(QUERY, 3)
        await finds(QUERY, None)
        assert await browser.value("document.querySelector('input[type=number]').value") == "3"
        await browser.until(typed("input[type=range]", 7))
        await finds(QUERY, 7)
        await browser.until(typed("textarea", TEXTS[5]))
        await finds(TEXTS[5], 7)
        await browser.call("Page.captureScreenshot")
        await browser.until("document.querySelectorAll('[role=tab]')[1].click() || true")
        boxes = "[...document.querySelectorAll('textarea')].filter(t => t.offsetParent && !t.disabled)"
        await browser.until(f"{boxes}.length == 2")
        await browser.until(f"{boxes}.map((t, i) => t.id = 'box' + i).length")
        await browser.until(typed("#box0", QUERY))
        await browser.until(typed("#box1", TEXTS[5]))
        wanted = page.cosines(trial, QUERY, TEXTS[5], 7)
        said = "[...document.querySelectorAll('textarea')].map(t => t.value).join()"
        await browser.until(f"{said}.includes({json.dumps(wanted)})")

    with demonstrated(tmp_path / "best", tmp_path / "corpus.txt") as url:
        address = f"{url}?q={urllib.request.quote(QUERY)}&k=3"
        browser = asyncio.run(visited(address, tmp_path / "profile", visit))
    assert url.startswith("http://127.0.0.1:")
    assert browser.console == []
    assert [asked for asked in browser.asked if not asked.startswith((url, "data:", "blob:"))] == []


def answered(url, method, path, **headers):
    """The status and the body of the answer to a request."""
    with closing(
        http.client.HTTPConnection(url.removeprefix("http://").strip("/"), timeout=60)
    ) as connection:
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.slow
def test_the_command_answers_its_own_host_and_origin_alone_and_takes_no_file(embedder, tmp_path):
    checkpoint.save(embedder, tmp_path / "best")
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    no, upload = b"refused: not from this page", "/gradio_api/upload"
    with demonstrated(tmp_path / "best", tmp_path / "corpus.txt") as url:
        assert answered(url, "GET", "/config", Origin=url.strip("/"))[0] == 200
        for headers, method in product(FORGED, ("GET", "POST", "OPTIONS")):
            assert answered(url, method, upload if method == "POST" else "/config", **headers) == (403, no)
        assert answered(url, "POST", upload) == answered(url, "POST", upload + "/") == (404, no)
