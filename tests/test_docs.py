"""Every command of README.md and docs/ runs as it is printed, in a folder that has what it names.

But train.py does two steps, with one seed and two systems of a table, the encoder is 16 wide, so that 256
components are 8, the sets have a few dozen rows, srun is a few lines, and nothing is installed. Of
troubleshooting.md each error is that of its command.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
from pathlib import Path

import pytest
from encoders import SENTENCES, WORDS, backbone, decoder_of
from evaluation.test_doctor import copy, write
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from programs import ROOT, begun, free_port, started, started_anew, until
from test_architecture import composed

from whitenedcse.app.config import CONF, check_keys, plain, top
from whitenedcse.run import flat

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FEW = ["trainer.max_steps=2", "trainer.log_every_n_steps=1", "monitor.every=2", "trainer.accelerator=cpu"]
ELSEWHERE = ("pip", "pytest", "git", "cd")  # CI begins with the first two
ENDS = {  # exit code and part of what is printed, where they are not what the page means
    "whitenedcse dashboard PROJECT": (2, "`wandb login`"),  # with one: tests/test_dashboard.py
    "whitenedcse data check": (1, "60 rows, 189 published"),
}


def some(n):
    """Different sentences."""
    words = [word for word in WORDS if word.isalpha()]
    return [f"{SENTENCES[i % 8]} {words[i % 31]} {words[i // 31 % 31]}" for i in range(n)]


def datasets(root, rows=60):
    """A few rows of each set, in the form of the real files; a readout is chosen on 50 pairs or more."""
    copy(root, "", rows=rows, text=some(3 * rows).__getitem__)
    write(root / "wiki1m_for_simcse.txt", "".join(f"{text}\n" for text in some(128)))
    rows = "".join(f"{a},{b},{c}\n" for a, b, c in zip(some(128), some(129)[1:], some(130)[2:], strict=True))
    write(root / "nli_for_simcse.csv", f"sent0,sent1,hard_neg\n{rows}")


def files(home):
    """What the pages call my.txt, MODEL and so on."""
    x = some(40)
    write(home / "my.txt", "".join(f"{text}\n" for text in some(128)))
    write(home / "more.txt", "".join(f"{text}\n" for text in x[:5]))
    write(home / "questions.txt", "".join(f"{text}\n" for text in x[:3]))
    write(home / "docs.csv", "key,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(some(128))))
    rows = "".join(f"{a},{b},{c}\n" for a, b, c in zip(*[iter(some(240))] * 3, strict=True))
    write(home / "triplets.csv", f"anchor,positive,negative\n{rows}")
    pairs = "score\tsentence1\tsentence2\n" + "".join(f"{i % 6}\t{x[i]}\t{x[-i - 1]}\n" for i in range(20))
    for name in ("my_pairs.tsv", "my_folder/a.tsv", "my_folder/b.tsv"):
        write(home / name, pairs)
    alike = [(a, b, len({*a.split()} & {*b.split()})) for a, b in zip(some(300), some(301)[1:], strict=True)]
    rows = "".join(f"{a}\t{b}\t{n}\n" for a, b, n in alike)
    write(home / "pairs.tsv", f"sentence1\tsentence2\tscore\n{rows}")
    write(home / "my_texts.csv", "text,label\n" + "".join(f"{t},{'ab'[i % 2]}\n" for i, t in enumerate(x)))


@pytest.fixture(scope="module")
def user(tmp_path_factory, tokenizer):
    """A folder with all that the pages name."""
    home = tmp_path_factory.mktemp("user")
    for name, kind in (("MODEL", "bert"), ("bert-base-uncased", "bert"), ("roberta-base", "roberta")):
        encoder = backbone(kind, len(tokenizer))
        for weights in encoder.parameters():  # random ones give all sentences nearly the same vector
            weights.data *= 1 if weights.dim() == 1 else 8
        encoder.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    decoder = decoder_of("gpt2")
    decoder.backbone.save_pretrained(home / "DECODER")
    decoder.tokenizer.save_pretrained(home / "DECODER")
    datasets(home / "data")
    files(home)
    import pandas

    pandas.read_csv(home / "docs.csv", dtype=str).to_parquet(home / "docs.parquet")
    shutil.copy(home / "docs.csv", home / "my.csv")
    assert run(shlex.split("python train.py +experiment=bert_base run=NAME"), home)[0] == 0
    return home


def commands(text):
    """Every command of a page, as words; of a block of Python `python -c` and the block."""
    for kind, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.M | re.S):
        if kind == "python":
            if "import mteb" not in block:  # which fetches: tests/slow/test_recipes.py
                yield ["python", "-c", block]
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


def smaller(words):
    """The words of a command whose work is small."""
    small = {"256": "8", "k=256": "k=8", "loss.dims=[64,128,256]": "loss.dims=[4,8]"}  # the encoders have 16
    # tests/test_sweeps.py has two jobs at a time
    small |= {"seed=1,2": "seed=1", "hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs=1"}
    words = [small.get(word, word.replace("k=256", "k=8")) for word in words]
    words += ["k=8"] if "protocol=bert_whitening" in words else []
    if "--processes" in words:  # tests/serving/test_encode.py has several
        at = words.index("--processes")
        words = words[:at] + words[at + 2 :]
    if {"+sweep=table3", "+sweep=table6"} & {*words}:
        words.append("system=simcse,whitenedcse")
    if "hydra/launcher=joblib" in words and not any("n_jobs" in word for word in words):
        words.append("hydra.launcher.n_jobs=1")  # in this process, whose tasks have few rows
    if "train.py" in words:  # the quick start's own encoder can be small
        own = not any(word.startswith(("+experiment", "encoder")) for word in words)
        words += FEW + (["encoder.width=16", "encoder.heads=2"] if own else [])
        words += ["data.batch_tokens=512", "optim.warmup_steps=1"] if "+experiment=pretrain" in words else []
    return words


def run(words, home):
    """Exit code and what was printed."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    words = smaller(words)
    scripts = [i for i, word in enumerate(words) if word in ("train.py", "evaluate.py")]
    if words[0] == "python" and scripts == [1] or words[0] == "whitenedcse":
        words = words[1:] if words[0] == "python" else words
        done = started(*words, cwd=home, prepared="programs:few_rows", **environment)
        return done.returncode, done.stdout + done.stderr
    if words[:2] == ["python", "-c"]:  # a block of Python, which may begin with the name of its file
        file = home / (re.match(r"(?:# (\w+\.py)\n)?", words[2])[1] or "block.py")
        file.write_text(words[2])
        done = started(file, cwd=home, **environment)
        return done.returncode, done.stdout + done.stderr
    if words[0] == "srun":
        return by_slurm(int(words[2]), words[4:], home, environment)
    words = [str(ROOT / word) if i in scripts else word for i, word in enumerate(words)]
    start = started if words[0] == "torchrun" else started_anew
    environment["PET_MASTER_PORT"] = str(free_port())  # of torchrun, which another page may run meanwhile
    done = start(*words, cwd=home, **environment)
    return done.returncode, done.stdout + done.stderr


def by_slurm(n, words, home, environment):
    """What `srun --ntasks-per-node n python` does on one machine: exit code and what was printed."""
    names = {"NTASKS_PER_NODE": n, "JOB_ID": 7, "STEP_ID": 0, "NTASKS": n, "NNODES": 1, "NODEID": 0}
    ranks, said = [], [home / f"rank{i}" for i in range(n)]
    for i in range(n):
        job = names | {"NODELIST": "localhost", "PROCID": i, "LOCALID": i}
        slurm = {f"SLURM_{name}": value for name, value in job.items()}
        ranks.append(begun(*words, cwd=home, said=[said[i], said[i]], **environment, **slurm))
    codes = [rank.wait(300) for rank in ranks]
    return max(codes, key=abs), "".join(file.read_text() for file in said)


def page_of(words, home):
    """A command that serves until it is stopped: what it printed by then."""
    printed = home / "printed"
    printed.write_text("")
    process = begun(*words, cwd=home, said=[printed, printed])
    try:
        until(lambda: process.poll() is not None or "http://127.0.0.1" in printed.read_text(), 120)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
    return printed.read_text()


def test_package_citation_and_changelog_have_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1] == version


def test_the_files_of_ones_own_are_read_as_they_stand(tmp_path, monkeypatch, request):
    text = (ROOT / "docs/own.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"^```python\n(# mine.py\n.*?)^```", text, re.M | re.S)[1])
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine", None)  # other tests have their own
    request.addfinalizer(lambda: sys.modules.pop("mine", None))
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        begins = r"^# DIR/((\w+)/\w+).yaml, for --config-dir DIR (\S+)$"
        group, name, option = re.search(begins, block, re.M).groups()
        file = tmp_path / f"{group}.yaml"
        file.parent.mkdir()
        file.write_text(block)
        words = [option, f"hydra.searchpath=[file://{tmp_path}]"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = plain(compose("train", words))
        check_keys("", config, top("train"))
        own = OmegaConf.to_container(OmegaConf.load(file))
        for key, value in flat({k: v for k, v in own.items() if k != "defaults"}).items():
            assert flat(config)[key if key.split(".")[0] in config else f"{name}.{key}"] == value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.slow
def test_every_command_runs(page, user, tmp_path):
    text, home = page.read_text(), tmp_path / "home"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shutil.copytree(user, home)
    if re.search("run=NAME|outputs/NAME|$", text)[0] == "run=NAME":
        shutil.rmtree(home / "outputs")  # the page makes it
    earlier = PAGES[: PAGES.index(page)]
    before = {" ".join(words) for other in earlier for words in commands(other.read_text())}
    for words in commands(text):
        said = " ".join(words)
        if said in before and words[1] in ("train.py", "evaluate.py") and "run=" not in said:
            continue  # it ran for an earlier page, and nothing follows from it
        if words[0] in ELSEWHERE:
            assert {*re.findall(r"\[([\w-]+)\]", said)} <= project["optional-dependencies"].keys()
        elif words[:2] == ["whitenedcse", "demo"]:
            assert "http://127.0.0.1" in page_of(words, home), said
        else:
            expected, part = ENDS.get(said, (0, ""))
            code, printed = run(words, home)
            assert code == expected and part in printed, f"{said}\n{printed[-3000:]}"


@pytest.mark.slow
def test_every_error_of_the_page_on_trouble_is_the_one_that_comes(user, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(user, home)
    shutil.rmtree(home / "outputs")
    text = (ROOT / "docs/troubleshooting.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 8
    others = []
    for block in blocks:
        *before, line = block.splitlines()
        for command in before:
            code, printed = run(shlex.split(command.removeprefix("$ ")), home)
        if code == 0 or line not in printed.replace(str(home), "HERE"):
            others.append(f"{block}{printed[-1000:]}")
    assert not others, "\n".join(others)


def test_every_link_leads_somewhere():
    others = [ROOT / "bench/README.md", ROOT / "data/README.md", *(ROOT / "results").rglob("*.md")]
    for page in [*PAGES, *others]:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.slow
def test_what_others_call_differently_is_a_setting_here():
    """In the tables of coming_from.md."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/coming_from.md").read_text(), re.M):
        head, _, *rows = table.splitlines()
        if script := re.search(r"python (\w+)\.py", head.split("|")[2]):
            texts = (re.findall(r"`([^`]+)`", row.split("|")[2]) for row in rows)
            found += [(script[1], text) for some in texts for text in some]
    moved = [(script, text) for script, text in found if re.match(r"'?[\w.]+=.", text)]
    assert len(moved) > 45 and {script for script, _ in moved} == {"train", "evaluate"}
    for script, text in moved:
        check_keys("", composed(*shlex.split(text), name=script), top(script))
