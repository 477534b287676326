"""A page of a run or a sweep: what was logged and nothing else, in one file, quiet in a real browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from jinja2 import nodes
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats
from test_sweep_report import SCORES, swept, trained

from whitenedcse import console
from whitenedcse.report import contrasts, page, plots, sweep
from whitenedcse.run import Run, Series

HEALTH = {
    "dev/effective_rank": {0: 3.0, 50: 5.0, 100: 6.0},
    "dev/variance_top1": {0: 0.7, 50: 0.4, 100: 0.3},
    "dev/variance_top2": {0: 0.8, 50: 0.6, 100: 0.5},
    "dev/variance_top4": {0: 0.9, 50: 0.8, 100: 0.7},
    "train/diversity_before": {10: 0.5, 60: 0.4, 90: 0.3},
    "train/diversity_after": {10: 1.1, 60: 1.2, 90: 1.3},
}
TITLES = {
    "dev": "Dev score",
    "loss": "Loss and learning rate",
    "shape": "Alignment and uniformity",
    "spectrum": "Spectrum of the dev embeddings",
    "rank": "Effective rank",
    "diversity": "Diversity of views",
    "throughput": "Throughput",
}
CHARTS = list(TITLES)


def written(folder):
    _, files = page.write([str(folder)], None, None)
    return files[0]


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of headings and cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data.strip())

    def values(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    @property
    def charts(self):
        return [v.removeprefix("chart-") for v in self.values("id") if v.startswith("chart-")]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py seed=1", "python train.py seed=1"),  # as older runs noted it
        ("/home/me/train.py", "python /home/me/train.py"),
        ("python train.py seed=1", "python train.py seed=1"),
        ("whitenedcse train data.corpus=a.py", "whitenedcse train data.corpus=a.py"),
    ],
)
def test_a_run_shows_the_command_that_made_it(tmp_path, command, shown):
    folder = trained(tmp_path / "run")
    facts = json.loads((folder / "versions.json").read_text()) | {"command": command}
    (folder / "versions.json").write_text(json.dumps(facts))
    assert f"<pre>{shown}</pre>" in written(folder).read_text()


@pytest.mark.parametrize(
    ("commit", "shown"),
    [("c0ffee5" * 5, "c0ffee5c0f"), ("beef+changes", "beef with changes"), (None, "unknown")],
)
def test_a_run_names_its_commit_and_whether_the_code_was_changed(tmp_path, commit, shown):
    folder = trained(tmp_path / "run")
    facts = json.loads((folder / "versions.json").read_text()) | {"commit": commit}
    (folder / "versions.json").write_text(json.dumps(facts))
    assert f"commit {shown}" in page.about(Run(folder))


def test_a_run_has_a_chart_for_each_thing_that_was_logged(tmp_path):
    full = Elements(written(trained(tmp_path / "full", series=HEALTH)).read_text())
    assert full.charts == CHARTS
    assert sum(tag == "svg" for tag, _ in full.tags) == len(CHARTS)
    titles = list(TITLES.values())
    assert full.values("aria-label") == titles == [word for word in full.words if word in titles]
    series = {f"train/{name}": {} for name in ("lr", "sentences_per_second")} | {"dev/alignment": {}}
    few = Elements(written(trained(tmp_path / "few", series=series)).read_text())
    assert few.charts == ["dev", "loss"] and sum(tag == "figure" for tag, _ in few.tags) == 2


def test_an_unfinished_run_has_what_there_is(tmp_path):
    folder = trained(tmp_path / "a", finished=False)
    found = Elements(written(folder).read_text())
    assert "NOT FINISHED" in " ".join(found.words) and "dev set so far, Spearman x 100" in found.words
    assert "61.00 → 70.00" in found.words and "at step 50" in found.words
    (folder / "metrics.csv").unlink()
    (folder / "versions.json").unlink()
    bare = Elements(written(folder).read_text())
    assert bare.charts == [] and "Settings (config.yaml)" in bare.words


def test_what_a_finished_run_logged_is_what_an_unfinished_one_shows(tmp_path):
    """Of the same lines, `dev` is the same, though one is read from scores.json and one from metrics.csv."""
    one, other = (Run(trained(tmp_path / n, finished=n == "a", series=HEALTH)).checked() for n in "ab")
    for name in ("before", "best", "best_step", "values_before", "values_best"):
        assert one.dev[name] == other.dev[name]


def test_the_numbers_to_look_at_first_are_those_of_the_files(tmp_path):
    text = written(trained(tmp_path / "a", average=66.25, series=HEALTH)).read_text()
    shown = dict(re.findall(r"<dd>(.*?)<small>(.*?)</small>", text))
    assert shown == {
        "61.00 → 70.00": "at step 50",
        "62.00": "whitened on dev sentences (transductive), k=8",  # the best of step 0
        "66.25": "as it is",
        "5.0": "at the best checkpoint",
        "470": "median of the run",
    }


@pytest.mark.parametrize(("scores", "best"), [((80, 60, 65), 100), ((60, 65, 65), 50), ((60,), 0)])
def test_the_best_of_an_unfinished_run_is_the_first_highest_after_step_0(tmp_path, scores, best):
    column = dict(zip((0, 50, 100), scores, strict=False))
    run = Run(trained(tmp_path / "a", finished=False, series={"dev/spearman": column})).checked()
    found = run.dev
    assert (found["before"], found["best_step"], found["best"]) == (scores[0], best, column[best])


def test_a_table_has_the_cells_of_its_grid_and_numbers_on_the_right():
    macros = page.TEMPLATES.get_template("macros.html").module
    grid = console.Grid("scores", ["task", "n"], [["a", "1"], ["b", "2"]], ["x & y"], right=(1,))
    assert re.sub(r"\s*\n\s*", "", macros.table(grid)) == (
        '<section><h2>scores</h2><div class="wide"><table>'
        '<thead><tr><th>task</th><th class="right">n</th></tr></thead>'
        '<tbody><tr><td>a</td><td class="right">1</td></tr>'
        '<tr><td>b</td><td class="right">2</td></tr></tbody>'
        '</table></div><ul class="notes"><li>x &amp; y</li></ul></section>'
    )
    assert "notes" not in macros.table(grid._replace(notes=()))


def test_the_legend_of_a_sweep_has_the_colour_and_the_mark_of_each_group(tmp_path):
    trained(swept(tmp_path / "s") / "more", 9, system="simcse", finished=False, views=2)
    text = written(tmp_path / "s").read_text()
    found = re.findall(r'<li><span style="color:(.*?)">(.*?)</span>(.*?)</li>', text)
    looks = [plots.look(i) for i in range(len(SCORES))]
    assert [line[:2] for line in found] == [(colour, plots.MARKS[mark]) for colour, mark in looks]
    assert [label for *_, label in found] == list(SCORES)
    assert (
        "3 groups, 13 runs, 12 finished; every run is a line of the csv file beside this page"
        in Elements(text).words
    )


HOSTILE = "<script>document.title='x'</script>&\"'$a_b$ {{7}}"


@pytest.mark.slow
def test_what_comes_from_files_is_text(tmp_path):
    name = HOSTILE.replace("/", "|")
    folder = trained(tmp_path / "s" / name, 1, system=HOSTILE, average=60.0, data__corpus=HOSTILE)
    for text in (written(folder).read_text(), written(tmp_path / "s").read_text()):
        assert "<script" not in text and "&lt;script" in text
        assert not {"script", "iframe", "img"} & {tag for tag, _ in Elements(text).tags}
    assert HOSTILE in html.unescape(written(folder).read_text())
    trained(tmp_path / "s" / "other", 1, system="_$x$", average=60.0, views=2)
    text = written(tmp_path / "s").read_text()
    assert "<script" not in text and "_$x$</text>" in text  # no mathematics, no private label


def named(folder, word, i):
    """Run i, in which a word stands wherever a page shows what a file says."""
    name = f"{word} {i}"
    folder = trained(
        folder / name.replace("/", "|"), 1, 70.0, 60.0, name, series=HEALTH, data__corpus=word, views=i
    )
    facts, scores = (json.loads((folder / file).read_text()) for file in ("versions.json", "scores.json"))
    facts |= dict.fromkeys(("command", "experiment"), word) | {"machine": {"gpus": [word]}}
    for row in scores["rows"]:
        row |= {"name": f"{word} {row['name']}", "setting": word}
        row["sts"]["tasks"] = {f"{word} {task}": by for task, by in row["sts"]["tasks"].items()}
        row["sts"]["avg"]["why"] = word
    (folder / "versions.json").write_text(json.dumps(facts))
    (folder / "scores.json").write_text(json.dumps(scores))
    return folder


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.slow(but=1)
def test_a_name_is_shown_as_it_is_and_adds_no_element_and_no_attribute(tmp_path, kind):
    pages = []
    for word, folder in (("tame", tmp_path / "a" / "s"), (HOSTILE, tmp_path / "b" / "s")):
        run, _ = (named(folder, word, i) for i in (1, 2))
        pages.append(Elements(written(run if kind == "run" else folder).read_text()))
    tame, hostile = pages
    assert [(tag, [*names]) for tag, names in tame.tags] == [(tag, [*names]) for tag, names in hostile.tags]
    pairs = zip(tame.words, hostile.words, strict=True)
    shown = [(a.replace("tame", HOSTILE), b) for a, b in pairs if "tame" in a and not a.startswith("run:")]
    plain = str.maketrans("/", "|", "\\")  # no folder has a slash in its name; JSON and repr escape quotes
    assert (
        all(a.translate(plain) == b.translate(plain) for a, b in shown)
        and len(shown) == {"run": 12, "sweep": 14}[kind]
    )


def test_no_template_marks_a_value_as_safe():
    names = page.TEMPLATES.list_templates()
    assert "page.html" in names
    for name in names:
        tree = page.TEMPLATES.parse(page.TEMPLATES.loader.get_source(page.TEMPLATES, name)[0])
        assert "safe" not in {found.name for found in tree.find_all(nodes.Filter)}, name
        assert not list(tree.find_all((nodes.EvalContextModifier, nodes.MarkSafe))), name


def test_a_label_that_looks_like_an_id_is_shown_as_it_is(tmp_path):
    for i, label in enumerate(('id="a" url(#b)', "other")):
        trained(tmp_path / "s" / str(i), system=label, views=2 + i)
    assert '>id="a" url(#b)</text>' in written(tmp_path / "s").read_text()


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.slow(but=1)
def test_nothing_comes_from_outside_and_ids_are_one_of_a_kind(tmp_path, kind):
    folder = trained(tmp_path / "r", series=HEALTH) if kind == "run" else swept(tmp_path / "s")
    text = written(folder).read_text()
    found = Elements(text)
    assert not re.search(r"https?:|//[a-z]|@import|<\?xml|<!DOCTYPE svg", text)
    links = [v for name in ("src", "href", "xlink:href", "action", "data") for v in found.values(name)]
    inside = {v.removeprefix("#") for v in links if v.startswith("#")} | set(
        re.findall(r"url\(#([^)]+)\)", text)
    )
    assert all(v.startswith(("#", "data:")) for v in links) and len(inside) > 5  # data: colours of a bar
    ids = found.values("id")
    assert len(ids) == len(set(ids)) and inside <= set(ids)
    assert text.count("<style") == 1  # matplotlib's own would reach into the whole page
    assert not {"script", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in found.tags}
    assert not [name for _, names in found.tags for name in names if name.startswith("on")]
    policies = [
        names["content"] for _, names in found.tags if names.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert (Path(page.__file__).parent / "templates" / "page.css").read_text() in text


@pytest.mark.slow
def test_the_same_run_makes_the_same_bytes(tmp_path):
    folder = trained(tmp_path / "a", average=60.0, series=HEALTH)
    assert written(folder).read_bytes() == written(folder).read_bytes()
    sweep = swept(tmp_path / "s")
    before = written(sweep).read_bytes()
    assert before == written(sweep).read_bytes()
    shutil.copytree(sweep, tmp_path / "elsewhere" / "s")
    assert written(tmp_path / "elsewhere" / "s").read_bytes() == before


def axes():
    return Figure().subplots()


def lines(ax):
    return {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in ax.lines}


def test_the_dev_chart_shows_the_best_k_of_each_evaluation(tmp_path):
    ax = axes()
    page.quality(ax, Run(trained(tmp_path / "a")).checked())
    drawn = {name: (list(x), list(y)) for name, (x, y) in lines(ax).items()}
    assert drawn["as it is"] == ([0, 50, 100], [61, 70, 69])
    assert drawn["whitened (dev)"] == ([0, 50, 100], [62, 64, 68])  # k = 8, 4, 8
    assert drawn["whitened (training)"] == ([0, 50, 100], [59.5, 61, 60])
    assert ([50], [70]) in drawn.values()  # the ring


def test_the_spectrum_is_that_of_the_first_the_best_and_the_last_evaluation(tmp_path):
    ax = axes()
    page.spectrum(ax, Run(trained(tmp_path / "a", series=HEALTH)).checked())
    drawn = {name: (list(x), list(y)) for name, (x, y) in lines(ax).items()}
    assert drawn == {
        "step 0": ([1, 2, 4], [0.7, 0.8, 0.9]),
        "step 50 (best)": ([1, 2, 4], [0.4, 0.6, 0.8]),
        "step 100": ([1, 2, 4], [0.3, 0.5, 0.7]),
    }


def test_alignment_stands_against_uniformity_evaluation_by_evaluation(tmp_path):
    ax = axes()
    page.shape(ax, Run(trained(tmp_path / "a", best=70.0)).checked())
    points = ax.collections[0]
    np.testing.assert_allclose(points.get_offsets(), [[-0.5, 0.05], [-2.7, 0.27], [-2.4, 0.3]])
    assert points.get_array().tolist() == [0, 50, 100]
    assert [t.get_text() for t in ax.texts] == ["first, step 0", "best, step 50"]


def groups_of(folder):
    return sweep.gathered(sweep.runs([folder])).groups


def test_the_strip_has_every_seed_the_mean_and_scipys_interval(tmp_path):
    found, ax = groups_of(swept(tmp_path / "s")), axes()
    contrasts.strip(ax, found, lambda run: run.scores["dev"]["best"], "dev best")
    for i, (name, by_seed) in enumerate(SCORES.items()):
        best = [b for b, _ in by_seed.values()]
        low, high = stats.t.interval(0.95, len(best) - 1, loc=np.mean(best), scale=stats.sem(best))
        (bar,) = ax.containers[i].lines[2]
        np.testing.assert_allclose(bar.get_segments()[0][:, 0], [low, high])
        dots = next(line for line in ax.lines if len(line.get_xdata()) == 4 and line.get_ydata()[0] == -i)
        assert sorted(dots.get_xdata()) == sorted(best) and ax.texts[i].get_text() == name
        assert dots.get_color() == plots.look(i)[0]


def test_dev_curves_are_the_mean_and_the_range_of_the_seeds(tmp_path):
    found, ax = groups_of(swept(tmp_path / "s")), axes()
    contrasts.quality(ax, found)
    for i, by_seed in enumerate(SCORES.values()):
        best = np.array([b for b, _ in by_seed.values()])
        np.testing.assert_allclose(ax.lines[i].get_ydata(), [best.mean() - 9, best.mean(), best.mean() - 1])
        y = ax.collections[i].get_paths()[0].vertices
        assert {tuple(v) for v in y} >= {(50, best.min()), (50, best.max())}


def test_49_groups_look_different():
    assert len({plots.look(i) for i in range(49)}) == 49


# the browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def chromium(file, profile, *arguments):
    """What headless Chromium writes of a file; fails for a word on the console."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    log = ["--enable-logging=stderr", "--v=0"]
    command = [CHROMIUM, *quiet, *log, *arguments, f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


PROBE = """<!doctype html><meta charset="utf-8"><title>probe</title>
<iframe id="it" width="WIDTH" height="900" srcdoc="PAGE"></iframe><pre id="said"></pre><script>
const it = document.getElementById("it");
it.onload = () => {
  const inside = it.contentDocument;
  const box = e => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
  document.getElementById("said").textContent = JSON.stringify({
    width: inside.documentElement.scrollWidth,
    charts: [...inside.querySelectorAll("figure")].map(f => [f.id, ...box(f.querySelector("svg"))]),
    letters: [...inside.querySelectorAll("svg text")].map(t => box(t)[1]),
    rows: inside.querySelectorAll("tbody tr").length,
    loaded: it.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
  });
};
</script>"""


def probed(file, width, folder):
    """The page in a window of a width, as the browser laid it out."""
    probe = folder / f"probe{width}.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(file.read_text())))
    dom = chromium(
        probe, folder / "profile", "--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom"
    )
    return json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', dom).group(1)))


@browser
@pytest.mark.slow
def test_a_word_on_the_console_and_a_request_are_heard(tmp_path):
    loud = tmp_path / "loud.html"
    loud.write_text("<script>console.error('loud')</script>")
    with pytest.raises(AssertionError, match="loud"):
        chromium(loud, tmp_path / "profile", "--dump-dom")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{page.POLICY}">'
    loud.write_text(policy + '<img src="https://example.org/x.png">')
    with pytest.raises(AssertionError, match="Loading the image"):
        chromium(loud, tmp_path / "profile", "--dump-dom")


@browser
@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.slow
def test_a_browser_shows_every_chart_on_a_laptop_and_on_a_phone_without_a_word(tmp_path, kind):
    run = kind == "run"
    folder = (
        trained(tmp_path / HOSTILE.replace("/", "|"), average=66.0, series=HEALTH)
        if run
        else swept(tmp_path / "s")
    )
    file = tmp_path / "page.html"
    page.write([str(folder)], file, None)
    assert page.write([str(folder)], tmp_path, None)[1][0] == tmp_path / "report.html"
    dom = chromium(file, tmp_path / "profile", "--dump-dom")
    assert len(Elements(dom).charts) == (7 if run else 4)
    for width in (1280, 390):
        found = probed(file, width, tmp_path)
        assert found["width"] <= width and found["loaded"] == []
        assert [name.removeprefix("chart-") for name, *_ in found["charts"]] == (
            CHARTS if run else list("0123")
        )
        assert all(w > 250 and h > 150 for _, w, h in found["charts"])
        assert min(found["letters"]) > 9 and found["rows"] >= 8


@browser
@pytest.mark.slow
def test_a_screenshot_has_ink_and_a_dark_screen_is_dark(tmp_path):
    file = written(trained(tmp_path / "a", series=HEALTH))
    shades = {}
    for name, more in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        picture = tmp_path / f"{name}.png"
        chromium(file, tmp_path / name, "--window-size=1280,2400", f"--screenshot={picture}", *more)
        image = imread(picture)[..., :3]
        assert image.shape[:2] == (2400, 1280) and image.std() > 0.05
        blue = np.abs(image - np.array([0x00, 0x72, 0xB2]) / 255).max(axis=-1) < 0.02
        assert blue.sum() > 500  # the curves
        shades[name] = np.median(image[:, :20])  # the margin
    assert shades["light"] > 0.9 and shades["dark"] < 0.2


def test_a_job_of_a_sweep_is_called_after_it(tmp_path):
    for folder in ("alone", "table3/4"):
        trained(tmp_path / folder)
    (tmp_path / "table3" / "multirun.yaml").touch()
    pages = {name: page.of_run(Run(tmp_path / name).checked()) for name in ("alone", "table3/4")}
    assert all(f"<h1>{name}</h1>" in text for name, text in pages.items())


def test_the_loss_is_smoothed_by_the_mean_around_each_step():
    values = np.random.default_rng(0).normal(size=103)
    naive = [values[max(i - 2, 0) : i + 3].mean() for i in range(103)]
    np.testing.assert_allclose(page.smoothed(values), naive, rtol=0, atol=1e-12)
    np.testing.assert_allclose(page.smoothed(values[:49]), values[:49], rtol=0, atol=1e-12)


def test_the_loss_is_drawn_with_each_of_its_terms_and_nothing_else():
    names = ("loss", "contrastive", "covariance", "mlm", "sentences_per_second", "diversity_before")
    series = {f"train/{name}": Series(np.arange(3), np.ones(3)) for name in names}
    ax = Figure().subplots()
    page.loss(ax, SimpleNamespace(series=series))
    assert ax.get_legend_handles_labels()[1] == ["loss", "contrastive", "covariance", "mlm"]


@pytest.mark.parametrize(("n", "marker"), [(1, "o"), (20, "o"), (21, "")])
def test_a_short_loss_has_marks(n, marker):
    ax = Figure().subplots()
    page.loss(ax, SimpleNamespace(series={"train/loss": Series(np.arange(n), np.ones(n))}))
    assert [drawn.get_marker() for drawn in ax.lines] == [marker]
