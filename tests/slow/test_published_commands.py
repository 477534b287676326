"""Each command that a published table prints fills its rows, and no others.

The commands run as they are printed, on tiny encoders that a hub on this machine serves under the names that
the papers used, and on two dozen rows of each data set.
"""

import shlex

import pandas
import pytest
from encoders import architecture, byte_level, model_hub
from programs import started
from test_docs import datasets, some

from whitenedcse.app.config import composed
from whitenedcse.report import published

SIZES = {  # width, as many as the most components kept; rows of a set, for a whitening more; sentences
    "WhitenedCSE/T1 T2 F1 F3": (288, 24, 700),  # of 64 a step enough to log a tenth one
    "WhitenedCSE/T3": (48, 24, 128),
    "WhitenedCSE/T4": (48, 24, 128),
    "WhitenedCSE/T5": (48, 24, 128),
    "WhitenedCSE/T6": (48, 24, 128),
    "BERT-whitening/T1 T2 F1": (384, 220, 128),
    "WhiteningBERT/T1 T2 T3 F1 F2": (48, 40, 128),
}
SHAPES = {  # what architectures need besides
    "albert": {"embedding_size": 16},
    "deberta": {"pos_att_type": [], "relative_attention": False},
    "distilbert": {"hidden_dim": 16},
    "gpt2": {"n_inner": 16, "pad_token_id": None},
}


def save_encoder(folder, name, tokenizer, width, layers):
    """A random encoder of the architecture that the papers' has, in the files that a hub would hold."""
    kind = published.content()["encoders"][name].partition(" ")[0]
    tokenizer = byte_level(ends=False) if kind == "gpt2" else tokenizer
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 16}
    shape |= {"embedding_size": width} if kind == "squeezebert" else {}
    made = architecture(kind, len(tokenizer), **shape | SHAPES.get(kind, {}))
    made.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)


@pytest.fixture
def hub(tmp_path):
    """The folder of a model hub on this machine, and its address."""
    with model_hub(tmp_path / "hub") as (url, _):
        yield tmp_path / "hub", url


def tables_of(keys):
    """The published tables that keys such as "WhitenedCSE/T1 F1" name, by key."""
    paper, _, names = keys.partition("/")
    return {f"{paper}/{name}": published.tables()[f"{paper}/{name}"] for name in names.split()}


def commands(tables):
    """The programs of all commands of tables, each once, in the order printed."""
    whole = [row["command"] for table in tables.values() for row in table["rows"] if row["command"]]
    return list(dict.fromkeys(part for command in whole for part in command.split(" && ")))


def filled(row, command, made):
    """Whether a command makes all runs that a row's own makes: two rows may share one of training."""
    own = (row["command"] or "").split(" && ")
    return bool(row["command"]) and all(part in command.split(" && ") for part in own if made[part])


def test_every_published_table_is_among_these():
    assert {key for keys in SIZES for key in tables_of(keys)} == published.tables().keys()


@pytest.mark.slow
@pytest.mark.parametrize("keys", SIZES)
def test_each_printed_command_fills_its_rows_and_no_others(keys, hub, tmp_path, tokenizer):
    folder, url = hub
    home = tmp_path / "home"
    width, rows, sentences = SIZES[keys]
    datasets(home / "data", rows)
    x = some(sentences)
    (home / "data/wiki1m_for_simcse.txt").write_text("\n".join(x))
    parts = [f"plain_text/{part}" for part in ("train", "validation", "test")]
    for part in ("data/train", *parts):
        file = home / f"data/mnli_snli/{part}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame({"premise": x, "hypothesis": x[::-1]}).to_parquet(file)
    tables = tables_of(keys)
    rows = [row for table in tables.values() for row in table["rows"] if row["command"]]
    for name in sorted({published.asked(row, composed)["encoder"] for row in rows}):
        twelfth = name == "bert-base-uncased" and keys.startswith(
            "WhiteningBERT/"
        )  # a row there is of layer 12
        save_encoder(folder, name, tokenizer, width, 12 if twelfth else 2)
    made = {}
    for command in commands(tables):
        words = shlex.split(command)
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        before = set(home.rglob("scores.json"))
        done = started(
            *words[words[0] == "python" :],
            cwd=home,
            prepared="programs:few_rows_and_a_hub",
            seconds=900,
            **environment,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        made[command] = sorted(file.parent for file in set(home.rglob("scores.json")) - before)
    for key, table in tables.items():
        for command in dict.fromkeys(row["command"] for row in table["rows"] if row["command"]):
            runs = [run for part in command.split(" && ") for run in made[part]]
            grid = published.report(key, composed, runs)
            ours = [row[0] for row in grid.rows if row[1] == "ours"]
            assert ours == [row["label"] for row in table["rows"] if filled(row, command, made)], command
            assert all(set(row[2:]) != {"-"} for row in grid.rows if row[1] == "ours")
        grid = published.report(key, composed, [home / "outputs"])
        asked = [row["label"] for row in table["rows"] if row["command"]]
        assert [row[0] for row in grid.rows if row[1] == "ours"] == asked
        assert not [row for row in grid.rows if row[1] == "near miss"]
