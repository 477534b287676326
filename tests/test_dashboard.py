"""What Weights & Biases gets of a run, read back with its own reader, and the view that draws it."""

import gzip
import http.server
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from encoders import nowhere, serving
from lightning.pytorch.utilities import rank_zero_only
from programs import started
from test_scripts import TINY

from whitenedcse.app import cli
from whitenedcse.run import by_task
from whitenedcse.training import dashboard
from whitenedcse.training.dashboard import sweep, tags, wandb_logger

TRAIN = {"loss", "lr", "sentences_per_second", "diversity_before", "diversity_after"}
DEV = {"spearman", "alignment", "uniformity", "whitened_on_dev_k16", "whitened_on_corpus_k16"}
DEV |= {"effective_rank", "variance_top1", "variance_top2", "variance_top4", "variance_top8"}  # of width 16
TEST = {"test/quickstart/test", "test/avg"}
SERIES = {f"train/{name}" for name in TRAIN} | {f"dev/{name}" for name in DEV} | TEST
CONFIG = {"seed": 7, "encoder": {"_target_": "whitenedcse.model.scratch.small_bert", "layers": 2}}
VERSIONS = {"experiment": None, "system": "no_whitening", "seed": 7, "commit": "abc+changes"}
VERSIONS |= {"format": "0.3", "packages": {"hydra-core": "1"}, "machine": {"gpus": ["H200"]}}
SCORES = {
    "dev": {"best": 4.0},
    "headline": "all",
    "rows": [
        {"name": name, "sts": {"tasks": {"A": {"all": a, "mean": 0.0}}, "avg": {"all": a, "mean": 0.0}}}
        for name, a in (("as it is", 70.5), ("whitened (target)", None))
    ],
}


def begun(run):
    """A run directory as training finds it when it makes its loggers."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(CONFIG))
    (run / "versions.json").write_text(json.dumps(VERSIONS))
    return run


def logger_of(run, **settings):
    return wandb_logger(**({"project": "p", "entity": None, "artifacts": False} | settings), run=run)


class Read:
    """A run as the vendor's reader prints it: `wandb leet inspect`."""

    def __init__(self, run):
        (folder,) = (run / "wandb").glob("offline-run-*")

        def printed(*options):
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(folder)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            return result.stdout

        records = [json.loads(line) for line in printed().splitlines()]
        self.of = {
            kind: [r[kind] for r in records if r["type"] == kind] for kind in {r["type"] for r in records}
        }
        self.run, self.whole = self.of["run"][0], json.loads(printed("--summary"))
        self.history = [record["item"] for record in self.of["history"]]
        self.defined = {m["name"]: m for m in self.of["metric"] if "name" in m}
        self.folder = folder

    def series(self, name):
        return [(line["trainer/global_step"], line[name]) for line in self.history if name in line]

    @property
    def names(self):
        return {name for line in self.history for name in line if re.match("(train|dev|test)/", name)}


@pytest.fixture(scope="module")
def reader():
    """The vendor's reader, where its version has one."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--help"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this version of wandb has no `wandb leet inspect`")
    return Read


@pytest.fixture(scope="module")
def by_hand(reader, tmp_path_factory):
    """A job of a sweep that logged three values of each series, and has ended."""
    home = tmp_path_factory.mktemp("home")
    run = begun(home / "outputs" / "table3" / "0")
    (run.parent / "multirun.yaml").write_text("")
    (run / "best").mkdir()
    (run / "best" / "weights").write_text("w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("HOME", str(home / "nobody"))
        patch.setenv("WANDB_DATA_DIR", "restored afterwards")
        patch.delenv("WANDB_DATA_DIR")
        logger = logger_of(run, artifacts=True)
        for step, value in ((0, 5.0), (2, 3.0), (4, 4.0)):
            logger.log_metrics({name: value for name in SERIES if name.startswith("dev/")}, step=step)
            logger.log_metrics({name: value for name in SERIES if name.startswith("train/")}, step=step)
        logger.log_metrics({name: 70.5 for name in TEST}, step=4)
        logger.finish(run / "best", SCORES)
    return reader(run)


@pytest.fixture(scope="module")
def trained(reader, tmp_path_factory):
    """The quick start as a job of a sweep, evaluated on its test pairs."""
    cwd = tmp_path_factory.mktemp("user")
    settings = [
        "-m",
        *TINY,
        "trainer.max_steps=4",
        "run=table3",
        "seed=7",
        "tasks=quickstart",
        "logger=wandb",
    ]
    result = started("train.py", *settings, cwd=cwd, WANDB_API_KEY="", HOME=str(cwd))
    assert result.returncode == 0, result.stderr
    return reader(cwd / "outputs" / "table3" / "0")


def test_every_series_comes_back_against_the_optimiser_step(by_hand):
    assert by_hand.names == SERIES
    for name in SERIES - TEST:
        assert by_hand.series(name) == [(0, 5.0), (2, 3.0), (4, 4.0)], name
        assert by_hand.defined[name]["step_metric"] == "trainer/global_step", name


def test_the_best_of_scores_and_the_last_of_states_stand_for_a_run(by_hand):
    summary = by_hand.whole["summary"]
    for name in ("dev/spearman", "dev/whitened_on_dev_k16", "dev/whitened_on_corpus_k16"):
        assert summary[name] == {"max": 5, "last": 4}, name
    assert summary["train/loss"] == {"min": 3, "last": 4}
    for name in SERIES - TEST - {"train/loss"}:
        assert summary[name]["last"] == 4, name
    assert {name: summary[name] for name in TEST} == dict.fromkeys(TEST, 70.5)
    assert summary["dev/best"] == 4  # of scores.json: the highest was before training


def test_settings_code_and_machine_can_be_searched_for(by_hand):
    config = by_hand.whole["config"]
    assert {name: config[name] for name in CONFIG | VERSIONS} == VERSIONS | CONFIG


def test_a_job_of_a_sweep_is_named_grouped_and_tagged(by_hand):
    assert (by_hand.run["run_group"], by_hand.run["job_type"]) == ("table3", "train")
    assert by_hand.run["display_name"] == "table3/0"
    assert by_hand.run["tags"] == ["no_whitening", "small_bert"]


def test_the_final_scores_are_a_table_that_waits_in_the_run_directory(by_hand):
    (path,) = (by_hand.folder / "files" / "media" / "table").glob("final_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["row", "A", "avg"]
    assert table["data"] == [["as it is", 70.5, 70.5], ["whitened (target)", None, None]]
    (artifact,) = (a for a in by_hand.of["artifact"] if a["type"] == "run_table")
    (file,) = artifact["manifest"]["contents"]
    assert by_hand.folder.parent in Path(file["local_path"]).parents


def test_the_best_checkpoint_is_an_artifact(by_hand):
    (artifact,) = (a for a in by_hand.of["artifact"] if a["type"] == "model")
    assert artifact["name"] == f"model-{by_hand.run['run_id']}" and "best" in artifact["aliases"]
    assert [file["path"] for file in artifact["manifest"]["contents"]] == ["weights"]


@pytest.mark.slow
def test_the_quick_start_logs_every_series(trained):
    assert trained.names == SERIES
    assert [step for step, _ in trained.series("dev/spearman")] == [0, 2, 4]
    assert [step for step, _ in trained.series("train/loss")] == [1, 2, 3, 4]
    assert (trained.run["run_group"], trained.run["tags"]) == ("table3", ["small_bert"])
    assert trained.whole["config"]["seed"] == 7 and trained.whole["config"]["encoder"]["width"] == 16
    assert trained.whole["summary"]["final"]["ncols"] == 3
    assert "model" not in {a["type"] for a in trained.of["artifact"]}


@pytest.mark.parametrize("key", ["sts", "transfer", "rte"])
def test_a_row_by_task_ends_with_the_number_that_a_sweep_maximises(key):
    row = {
        "rte": {"accuracy": 1.0},
        "transfer": {"tasks": {"MR": {"accuracy": 2.0}, "CR": {"accuracy": 4.0}}, "avg": 3.0},
        "sts": {"tasks": {"STS-B": {"all": 5.0, "mean": 0.0}}, "avg": {"all": 6.0, "mean": 0.0}},
    }
    whole = by_task(row, "all")
    assert whole == {"RTE": 1.0, "MR": 2.0, "CR": 4.0, "STS-B": 5.0, "avg": 6.0}
    alone = {"rte": {"RTE": 1.0, "avg": 1.0}, "transfer": {"MR": 2.0, "CR": 4.0, "avg": 3.0}}
    alone["sts"] = {"STS-B": 5.0, "avg": 6.0}
    assert list(by_task({key: row[key]}, "all").items()) == list(alone[key].items())
    assert list(whole)[-1] == "avg"


def test_only_a_job_of_a_sweep_has_a_group(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "multirun.yaml").touch()
    assert sweep(tmp_path / "sweep" / "3") == "sweep" and sweep(tmp_path / "alone") is None


def test_tags_are_what_a_run_has_and_no_longer_than_the_client_takes():
    facts = {"experiment": "bert_base", "system": "bert_base", "encoder": {"path": f"/models/{'x' * 99}"}}
    assert tags(facts) == ["bert_base", "x" * 64]
    assert tags({"experiment": None, "encoder": {"path": "org/name"}}) == ["name"]


def test_ranks_but_the_first_write_and_ask_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(dashboard, "answers", lambda: pytest.fail("asked the network"))
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    logger = logger_of(tmp_path / "run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.finish(tmp_path / "run" / "best", SCORES)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server():
    """A socket that takes connections, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without account and settings, and one line an error."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where ~/.netrc is
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def login(home, machine):
    """What `wandb login` leaves."""
    (home / ".netrc").write_text(f"machine {machine} login user password {'k' * 40}\n")
    (home / ".netrc").chmod(0o600)


@pytest.fixture
def offline(monkeypatch, tmp_path, bare):
    """Whether a logger made in this environment is offline."""

    def made(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return logger_of(begun(tmp_path / "run"))._offline

    return made


def test_without_a_key_it_is_offline_even_if_the_server_answers(offline, server):
    assert offline(WANDB_BASE_URL=server)


def test_with_a_key_and_a_server_it_is_online(offline, server):
    assert not offline(WANDB_BASE_URL=server, WANDB_API_KEY="k" * 40)


@pytest.mark.parametrize("port", [False, True])
def test_a_key_stored_by_login_counts(offline, server, tmp_path, port):
    login(tmp_path, server.removeprefix("http://") if port else "127.0.0.1")
    assert not offline(WANDB_BASE_URL=server)


@pytest.mark.parametrize("machine", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_a_key_for_the_vendors_own_server_counts_under_its_old_and_new_name(bare, tmp_path, machine):
    assert not dashboard.has_key()
    login(tmp_path, machine)
    assert dashboard.has_key()


def test_with_a_key_and_no_server_it_is_offline(offline):
    assert offline(WANDB_BASE_URL=nowhere(), WANDB_API_KEY="k" * 40)


def test_the_mode_that_the_user_set_wins(offline, server):
    assert offline(WANDB_BASE_URL=server, WANDB_API_KEY="k" * 40, WANDB_MODE="offline")
    assert not offline(WANDB_BASE_URL=nowhere(), WANDB_MODE="online")


def test_a_resumed_run_is_the_same_run_there(offline, tmp_path):
    assert offline(WANDB_MODE="offline")
    ids = {logger_of(begun(tmp_path / name))._id for name in ("run", "run", "other")}
    assert len(ids) == 2


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The request by which `whitenedcse dashboard` saves a view, and what it prints; the server is a stub."""
    pytest.importorskip("wandb_workspaces", exc_type=ImportError)
    requests = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
            request = json.loads(body) if self.path == "/graphql" else {}
            view = {"upsertView": {"view": {"id": "i", "name": "nw-abc-v"}, "inserted": True}}
            requests.extend([request] if "upsertView" in str(request) else [])
            viewer = {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}
            answer = json.dumps({"data": view if "upsertView" in str(request) else viewer}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Silence."""

    with serving(Answer) as address:
        account = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40}
        done = started("whitenedcse", "dashboard", "mine", cwd=tmp_path_factory.mktemp("owner"), **account)
    assert done.returncode == 0, done.stderr
    (request,) = requests
    return request["variables"], done.stdout, address


def panels(sent):
    """Section and settings of every panel that was sent."""
    bank = json.loads(sent[0]["spec"])["section"]["panelBankConfig"]
    return [(section["name"], panel) for section in bank["sections"] for panel in section["panels"]]


def drawn(panel, logged):
    """The names that a panel reads, patterns as the logged ones that they fit."""
    config = panel["config"]
    pattern = config.get("metricRegex")
    fit = {name for name in logged if pattern and re.search(pattern, name)}
    assert fit or not pattern, pattern
    axes = {config[axis].removeprefix("summary:") for axis in ("xAxis", "yAxis") if axis in config}
    table = {"final"} if '"final"' in json.dumps(config) else set()
    return fit | axes | table | set(config.get("metrics", []))


@pytest.mark.slow
def test_the_view_goes_to_the_named_project_of_the_accounts_owner(sent):
    variables, output, address = sent
    assert (variables["entityName"], variables["projectName"]) == ("me", "mine")
    assert variables["displayName"] == "WhitenedCSE"
    assert output == f"view: {address}/me/mine?nw=abc\n"


@pytest.mark.slow
def test_every_panel_draws_what_training_logs_and_no_series_is_left_out(sent, trained):
    names, summary = trained.names, trained.whole["summary"]
    logged = names | set(summary) | {f"{name}.{kind}" for name in SERIES - TEST for kind in summary[name]}
    every = [drawn(panel, names) for _, panel in panels(sent)]
    assert all(every) and set().union(*every) - logged == set()
    assert SERIES - {"test/quickstart/test"} <= set().union(*every)  # tasks are in the table


@pytest.mark.slow
def test_scores_and_baselines_share_a_chart_and_so_do_the_two_diversities(sent):
    every = [(section, drawn(panel, SERIES)) for section, panel in panels(sent)]
    baselines = {f"dev/{name}" for name in DEV if name.startswith(("spearman", "whitened"))}
    assert ("STS dev", baselines | {"trainer/global_step"}) in every
    views = {"train/diversity_before", "train/diversity_after", "trainer/global_step"}
    assert ("Diversity of views", views) in every


@pytest.mark.slow
def test_a_sweep_is_compared_by_system_with_its_spread(sent):
    bars = [panel["config"] for section, panel in panels(sent) if section == "Sweep"]
    assert [bar["metrics"] for bar in bars] == [["test/avg"], ["dev/best"]]
    for bar in bars:
        assert (bar["groupBy"], bar["groupAgg"], bar["groupArea"]) == ("system.value", "mean", "stddev")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb-workspaces is written for pydantic 1
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "`wandb login`"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "nowhere"}, "does not answer"),
    ],
)
def test_without_account_or_network_one_line_says_what_to_do(bare, monkeypatch, capsys, environment, words):
    pytest.importorskip("wandb_workspaces", exc_type=ImportError)
    for name, value in environment.items():
        monkeypatch.setenv(name, nowhere() if value == "nowhere" else value)
    assert cli.main(["dashboard", "mine"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line and "wandb sync" in line


def test_without_the_package_one_line_names_it(bare, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert cli.main(["dashboard", "mine"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "pip install wandb-workspaces" in line
