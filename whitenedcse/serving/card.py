"""The model card of an export: which vector it is, how to load it, and how it was trained and scored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whitenedcse.console import as_markdown
from whitenedcse.model.embedder import Embedder
from whitenedcse.report.tables import grids
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


def encoder_of(run: Run) -> str | None:
    """The encoder that a run started from; None for a new one."""
    return (run.settings.get("encoder") or {}).get("path")


def text(embedder: Embedder, facts: Mapping[str, Any]) -> str:
    """The card as Markdown with a YAML head. facts: the content of export.json."""
    run = Run.of(facts["source"])
    said = f"# {facts['name']}\n\nSentence vectors of width {embedder.width}, from {shown(facts['source'])}, "
    said += f"exported by whitenedcse {facts['whitenedcse']} to {facts['to']}."
    steps = "".join(f"- {step}\n" for step in vector(embedder, facts)).strip()
    parts = [head(facts, run), said, f"## Which vector this is\n\n{steps}"]
    parts += [f"## How to load it\n\n```python\n{loading(embedder, facts)}\n```", training(run), scores(run)]
    return "\n\n".join(filter(None, parts)) + "\n"


def head(facts: Mapping[str, Any], run: Run | None) -> str:
    """The fields that the hub reads. The licence, that of encoder and data, is not known here."""
    tags = ["sentence-similarity", "feature-extraction", "whitening", facts["to"]]
    fields = {"library_name": facts["to"], "pipeline_tag": "sentence-similarity", "tags": tags}
    fields["license"] = "unknown"
    base = (encoder_of(run) if run else facts["source"]) or ""
    if re.fullmatch(HUB_ID, base) and not Path(base).exists():
        fields["base_model"] = base
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def vector(embedder: Embedder, facts: Mapping[str, Any]) -> list[str]:
    """How a vector is computed, step by step, and how far it was compared."""
    prompts = {"a text": embedder.prompt, **embedder.prompts}
    steps = [f"{name} is put after the prompt `{quoted(put)}`" for name, put in prompts.items() if put]
    steps += [f"texts are cut to {embedder.max_length} tokens, special ones counted"]
    steps += [f"pooling: {embedder.pooling} (0 is the embedding layer, -1 the last)"]
    after = {"dense": ["a dense layer and tanh"], "head": ["the head that it was trained with"]}
    steps += after.get(embedder.embedding, [])
    if embedder.final is not None and embedder.final.weight is not None:
        steps += transforms(embedder.final.provenance)
    unit = (
        "divided by their length" if embedder.unit else "not divided by their length; compare by the cosine"
    )
    if "difference" not in facts:
        return [*steps, unit, "not compared with the source"]
    most = f"{facts['difference']:.1e} of the vector's length, or of 1 if it is shorter"
    return [*steps, unit, f"in 64 texts no component differs from the source by more than {most}"]


def transforms(provenance: Mapping[str, Any]) -> list[str]:
    """What was fitted to what, a line for each transform that is part of the final one."""
    before = transforms(provenance["before"]) if provenance.get("before") else []
    if "kind" not in provenance:
        return [*before, "an affine transform"]
    corpus = shown(str(provenance.get("corpus", "an unknown corpus")))
    fitted = f"{provenance.get('texts', 'some')} texts of {corpus}"
    return [*before, f"{provenance['kind']}, {provenance['k']} components, fitted to {fitted}"]


def loading(embedder: Embedder, facts: Mapping[str, Any]) -> str:
    """The lines of Python that load the export and give a vector x."""
    layers = embedder.pooling.layers
    pool = POOL[embedder.pooling.kind].format(layers=list(layers), n=len(layers))
    if embedder.unit:
        pool += "\nx = x / x.norm(dim=-1, keepdim=True)"
    one = quoted(f"{embedder.prompt}a sentence")
    return LOAD[facts["to"]].format(name=facts["name"], k=embedder.width, pool=pool, text=one)


def quoted(text: str) -> str:
    """A text as Python writes it, in double quotes and in one line."""
    return json.dumps(text, ensure_ascii=False)


def training(run: Run | None) -> str:
    """The section on data and settings of training; "" without a run."""
    if run is None:
        return ""
    said = {name: value for name, value in run.origin.items() if value is not None and name != "encoder"}
    said |= {"encoder": shown(encoder_of(run) or "random weights"), "commit": run.facts.get("commit")}
    with suppress(KeyError, TypeError):
        data = run.settings["data"]
        rows = f"{data['sample']:,}" if data["sample"] else "all"
        held = "" if run.settings["monitor"]["dev"] else ", some of them held out"
        said |= {"corpus": shown(data["corpus"]), "sentences": rows + held}
    if run.scores is None:
        said["not finished"] = "this is its best checkpoint so far"
    return "\n".join(["## Training", "", *(f"- {name}: {value}" for name, value in said.items())])


def scores(run: Run | None) -> str:
    """The section on the scores of the run, with intervals; "" where it has none."""
    results = run.scores if run is not None else None
    if not results or "rows" not in results:
        return ""
    about = "Of the run's best checkpoint, before anything that the export added."
    return "\n\n".join(["## Scores", about, *(as_markdown(grid).strip() for grid in grids(results))])


def shown(place: str) -> str:
    """A hub id or a name unchanged; the last part of a local path or a URL, the last two of a sweep's job."""
    private = Path(place).exists() or place.startswith(("/", ".", "~")) or "://" in place
    if not private:
        return place
    name = Path(place).name
    return "/".join(Path(place).parts[-2:]) if name.isdigit() else name
