"""Commands that published tables print fill their rows, and no others.

They run as they are printed, on a tiny encoder that a hub on this machine serves under the name that the
papers used, and on a few rows of each data set. That all commands have the conditions of their rows is in
tests/report/test_published.py.
"""

import shlex

import pandas
import pytest
from encoders import architecture, model_hub
from programs import started
from test_docs import datasets, some

from whitenedcse.app.config import composed
from whitenedcse.report import published

# tables; of the encoder layers and width, as many as the most components kept; rows of a set, for a whitening
# more
SIZES = {
    "WhitenedCSE/T2 WhitenedCSE/T6": (2, 48, 60),
    "WhiteningBERT/T1 WhiteningBERT/T3": (12, 48, 60),
    "BERT-whitening/T1": (2, 384, 220),
}


def commands(table):
    """The programs of the command of a table's last row of BERT-base."""
    rows = [row for row in table["rows"] if row["command"]]
    ours = [row for row in rows if published.asked(row, composed)["encoder"] == "bert-base-uncased"]
    return ours[-1]["command"].split(" && ")


@pytest.mark.slow
@pytest.mark.parametrize("keys", SIZES)
def test_a_printed_command_fills_its_rows_and_no_others(keys, tmp_path, tokenizer):
    layers, width, rows = SIZES[keys]
    home, hub = tmp_path / "home", tmp_path / "hub"
    datasets(home / "data", rows)
    for part in ("data/train", *(f"plain_text/{part}" for part in ("train", "validation", "test"))):
        file = home / f"data/mnli_snli/{part}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame({"premise": some(128), "hypothesis": some(128)[::-1]}).to_parquet(file)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 16}
    architecture("bert", len(tokenizer), **shape).save_pretrained(hub / "bert-base-uncased")
    tokenizer.save_pretrained(hub / "bert-base-uncased")
    with model_hub(hub) as (url, _):
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        for key in keys.split():
            table, before = published.tables()[key], set(home.rglob("scores.json"))
            for command in (parts := commands(table)):
                words = shlex.split(command)
                given = {"cwd": home, "prepared": "programs:few_rows_and_a_hub", "seconds": 900}
                done = started(*words[words[0] == "python" :], **given, **environment)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            made = [file.parent for file in set(home.rglob("scores.json")) - before]
            wanted = [row["label"] for row in table["rows"] if (row["command"] or "").split(" && ") == parts]
            grid = published.report(key, composed, made)
            ours = [row for row in grid.rows if row[1] == "ours"]
            assert sorted(row[0] for row in ours) == sorted(wanted) and wanted, key
            assert all(set(row[2:]) != {"-"} for row in ours)
            assert not [row for row in grid.rows if row[1] == "near miss"]
