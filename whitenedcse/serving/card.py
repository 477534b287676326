"""The model card of an export, and the comparison of the export's vectors with those of its source."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whitenedcse.console import as_markdown
from whitenedcse.data.sources import present, roots
from whitenedcse.evaluation import sts
from whitenedcse.evaluation.sts import Index, pairs_index
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.files import read_json
from whitenedcse.model import checkpoint
from whitenedcse.model.embedder import Embedder
from whitenedcse.report.conditions import encoder_of
from whitenedcse.report.results import grids, number
from whitenedcse.run import Run

HUB_ID = r"\w[\w.-]*(/[\w.-]+)?"

LOAD = {
    "sentence-transformers": """from sentence_transformers import SentenceTransformer

x = SentenceTransformer("{name}").encode(["a sentence"])  # (1, {k})""",
    "transformers": """from transformers import AutoModel, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel.from_pretrained("{name}").eval()
tokens = tokenizer([{text}], padding=True, truncation=True, return_tensors="pt")
out = model(**tokens, output_hidden_states=True)
{pool}""",
    "onnx": """import onnxruntime, transformers

tokens = transformers.AutoTokenizer.from_pretrained("{name}")(
    [{text}], padding=True, truncation=True, return_tensors="np", return_token_type_ids=False
)
x = onnxruntime.InferenceSession("{name}/model.onnx").run(None, dict(tokens))[0]  # (1, {k})""",
}
POOL = {
    "cls": "x = sum(out.hidden_states[i][:, 0] for i in {layers}) / {n}",
    "mean": """mask = tokens["attention_mask"].unsqueeze(-1)
x = sum((out.hidden_states[i] * mask).sum(1) / mask.sum(1) for i in {layers}) / {n}""",
    "max": """mask = tokens["attention_mask"].unsqueeze(-1) == 0
x = sum(out.hidden_states[i].masked_fill(mask, -float("inf")).amax(1) for i in {layers}) / {n}""",
    "last": """ends = tokens["attention_mask"].sum(1) - 1
x = sum(out.hidden_states[i][range(len(ends)), ends] for i in {layers}) / {n}""",
    "pooler": "x = out.pooler_output",
}


def text(embedder: Embedder, facts: Mapping[str, Any], name: str) -> str:
    """The card as Markdown with a YAML head. facts: the content of export.json. name: of the directory."""
    run = Run.of(facts["source"])
    front = head(facts, run)
    title = f"# {name}\n\nSentence vectors of width {embedder.width}, from {shown(facts['source'])}"
    said = f"{title}, exported by whitenedcse {facts['whitenedcse']} to {facts['to']}."
    parts = [
        front,
        said,
        vector(embedder, facts),
        loading(embedder, facts["to"], name),
        training(run),
        scores(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def head(facts: Mapping[str, Any], run: Run | None) -> str:
    """The fields that the hub reads. The licence, that of encoder and data, is unknown unless given."""
    tags = ["sentence-similarity", "feature-extraction", "whitening", facts["to"]]
    base = (encoder_of(run) if run else facts["source"]) or ""
    fields = {"library_name": facts["to"], "pipeline_tag": "sentence-similarity", "tags": tags}
    fields["license"] = facts["license"] or "unknown"
    if re.fullmatch(HUB_ID, base) and not Path(base).exists():
        fields["base_model"] = base
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def vector(embedder: Embedder, facts: Mapping[str, Any]) -> str:
    """The section on how a vector is computed, step by step."""
    steps = [f"a text is put after the prompt `{quoted(embedder.prompt)}`"] if embedder.prompt else []
    others = {name: text for name, text in embedder.prompts.items() if text}
    steps += [f"for {name}, after the prompt `{quoted(text)}`" for name, text in others.items()]
    steps += [
        f"texts are cut to {embedder.max_length} tokens, special ones counted",
        f"pooling: {embedder.pooling} (0 is the embedding layer, -1 the last)",
    ]
    if embedder.embedding != "encoder":
        steps.append(
            {"dense": "a dense layer and tanh", "head": "the head that it was trained with"}[
                embedder.embedding
            ]
        )
    if (final := embedder.final) is not None:
        steps += mapped(final.provenance) if final.weight is not None else []
    steps.append(
        "divided by their length" if embedder.unit else "not divided by their length; compare by the cosine"
    )
    return "## Which vector this is\n\n" + "\n".join(f"- {step}" for step in [*steps, checked(facts)])


def checked(facts: Mapping[str, Any]) -> str:
    """The section on the comparison of the vectors with those of the source."""
    difference = facts.get("difference")
    said = (
        "not compared with the source"
        if difference is None
        else f"in 64 texts no component differs by more than {difference:.1e} from the source, in vectors "
        "longer than 1 by more than this share of their length"
    )
    if facts["int8"]:
        before, after = facts["spearman"], facts["spearman_int8"]
        said += f"; int8: {facts['pairs']} scores {after:.2f}, and {before:.2f} in float32"
    return said


def loading(embedder: Embedder, to: str, name: str) -> str:
    """The section on how to load the export."""
    layers = embedder.pooling.layers
    pool = POOL[embedder.pooling.kind].format(layers=list(layers), n=len(layers))
    if embedder.final is not None:
        pool += "\nx = x / x.norm(dim=-1, keepdim=True)"
    text = quoted(f"{embedder.prompt}a sentence")
    code = LOAD[to].format(name=name, k=embedder.width, pool=pool, text=text)
    unused = "\n\nIf Transformers reports weights of a pooler as missing: this vector does not use them."
    unused *= to == "transformers" and embedder.pooling.kind != "pooler"
    return f"## How to load it\n\n```python\n{code}\n```{unused}"


def quoted(text: str) -> str:
    """A text as Python writes it, in double quotes and in one line."""
    return json.dumps(text, ensure_ascii=False)


def training(run: Run | None) -> str:
    """The section on the data and the settings of training."""
    if run is None:
        return ""
    config = run.settings
    said = {name: value for name, value in run.origin.items() if value is not None and name != "encoder"}
    said |= {"encoder": shown(encoder_of(run) or "random weights"), "commit": run.facts.get("commit")}
    with suppress(KeyError, TypeError):
        said |= {"corpus": shown(config["data"]["corpus"]), "sentences": config["data"]["sample"] or "all"}
    dev = (run.scores or {}).get("dev", {})
    if dev.get("n"):
        said["dev set"] = dev_scores(config["monitor"]["dev"], dev)
    if run.scores is None:
        at = "" if (step := checkpoint.noted_step(run.best)) is None else f", of step {step:,}"
        said["not finished"] = f"this is its best checkpoint so far{at}"
    if frozen := untrained(run):
        said["not trained, no part of the vector"] = ", ".join(frozen)
    lines = [f"- {name}: {value}" for name, value in said.items()]
    packages = ", ".join(f"{name} {number}" for name, number in run.facts.get("packages", {}).items())
    return "\n".join(["## Training", "", *lines, f"- packages: {packages}"])


def dev_scores(name: str, dev: Mapping[str, Any]) -> str:
    """The scores of the dev set before training and at the best checkpoint, which it chose."""
    scores = f"{number(dev['before'])} before training, {number(dev['best'])} at step {dev['best_step']:,}"
    return f"{shown(name)}, {dev['n']:,} pairs, Spearman x 100: {scores}, the checkpoint that it chose"


def untrained(run: Run) -> list[str]:
    """The parts of the encoder that were frozen, as the run noted."""
    noted = run.best / checkpoint.SETTINGS
    return read_json(noted).get("frozen", []) if noted.is_file() else []


def scores(run: Run | None) -> str:
    """The section on the scores of the run, with intervals."""
    results = run.scores if run is not None else None
    if not results or "rows" not in results:
        return ""
    about = (
        "Of the run's best checkpoint, before anything that the export added; the rows say what was fitted."
    )
    return "\n\n".join(["## Scores", about, *(as_markdown(grid).strip() for grid in grids(results, None))])


def shown(place: str) -> str:
    """A hub id or a name unchanged; the last part of a local path or a URL, the last two of a sweep's job."""
    private = Path(place).exists() or place.startswith(("/", ".", "~")) or "://" in place
    *_, folder, name = ("", "", *Path(place).parts)
    return (f"{folder}/{name}" if name.isdigit() and folder else name) if private else place


def mapped(provenance: Mapping[str, Any]) -> list[str]:
    """The lines on what was fitted to what, one for each transform that is part of the final one."""
    steps = mapped(provenance["before"]) if provenance.get("before") else []
    if "kind" not in provenance:
        return [
            *steps,
            f"an affine transform ({json.dumps({k: v for k, v in provenance.items() if k != 'before'})})",
        ]
    fields = {"corpus": "an unknown corpus", "texts": "some", "sample": None, **provenance}
    drawn = f", drawn as a sample of {fields['sample']}" if fields["sample"] else ""
    corpus = shown(str(fields["corpus"]))
    fitted = f"fitted to {fields['texts']} texts of {corpus}{drawn}"
    return [*steps, f"{fields['kind']}, {fields['k']} components, {fitted}"]


LIMIT, LIMIT_INT8 = 1e-5, 1e-2

STORY = (
    "The harbour was quiet when the last ferry came in, and the two women who had waited since noon folded "
    "their umbrellas, counted the passengers twice and found that the boy with the green suitcase was not "
    "among them; so they asked the captain, who remembered him well, and learned that he had stepped off at "
    "the island to look for a dog."
)
SPECIAL = [
    "",
    ".",
    "a",
    "I",
    "?!",
    "42",
    "3.14159 and 2,718",
    "ALL CAPITALS, AND A COMMA",
    "don't, can't, won't; e.g. this",
    "https://example.org/a?b=c&d=%20",
    "naïve café, Ärger, øre, łódź",
    "日本語の文です。",
    "Это предложение по-русски.",
    "جملة قصيرة",
    "an emoji \U0001f642 and a flag \U0001f1eb\U0001f1ee",
    "tabs\tand\nlines\nwithin",
    "soft\u00adhyphen, zero\u200bwidth",
    "e\u0301 is composed, é is not",
    "[CLS] as text [SEP] and [MASK] too",
    "antidisestablishmentarianism" * 3,
    "word " * 9 + "word",
    f"{STORY} {STORY}",
    " ".join([STORY] * 12),
    " ".join([STORY] * 40),
]
TEXTS = [*SPECIAL, *(" ".join(STORY.split()[start : start + start + 1]) for start in range(40))]  # 64


def texts(tokenizer: Any) -> list[str]:
    """The texts to compare; where "" has no token another text takes its place, or it has no vector."""
    return TEXTS if tokenizer("")["input_ids"] else [text or "b" for text in TEXTS]


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest |a - b| of any number, relative to the length of a vector of a if that is above 1.

    a: (n, k), b: (n, k). Infinite where the shapes differ or a number is not finite.
    """
    if a.shape != b.shape:
        return np.inf
    x, y = a.astype(np.float64), b.astype(np.float64)
    distances = np.abs(x - y).max(axis=1) / np.maximum(1, np.linalg.norm(x, axis=1))
    return float(distances.max()) if np.isfinite(distances).all() else np.inf


def refuse(difference: float, limit: float) -> None:
    """Raise ValueError for a difference above the limit."""
    if not difference <= limit:
        cure = "A whitening that keeps axes of almost no variance amplifies rounding: --dim keeps fewer; "
        if limit == LIMIT_INT8:
            cure = "A whitening amplifies the rounding of int8 weights: leave out one of the two; "
        raise ValueError(
            f"the export gives other vectors than its source: components differ by {difference:.1e}, more "
            f"than {limit:.0e}, on {len(TEXTS)} test texts; nothing was written. {cure}--no-verify does not "
            "compare" + ", and the scores that --int8 prints tell what is lost" * (limit == LIMIT_INT8)
        )


def pairs() -> tuple[str, list[str], Index]:
    """The scored pairs that are available, STS-B's dev set or the bundled ones: name, sentences, index."""
    name = "STS-B/dev" if present("senteval", roots()) else "quickstart/dev"
    return (name, *pairs_index({name: subsets(name)}))


def spearman(x: NDArray[Any], index: Index) -> float:
    """Spearman x 100 over all pairs, from the sentences' vectors (n, k); NaN where it is undefined."""
    value: float | None = sts.scores_of(x, index)["avg"]["all"]
    return np.nan if value is None else value
