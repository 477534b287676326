"""From an encoder to its best readout: one encode of all layers, a choice on pairs, an embedder with it
folded in.

n: sentences    r: layers, the embedding layer counted    d: width
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whitenedcse.console import Grid, pace
from whitenedcse.data import sources
from whitenedcse.data.corpus import blocks
from whitenedcse.data.tokens import worded
from whitenedcse.evaluation.readout import (
    MOST,
    NEAR,
    Choice,
    Map,
    Moments,
    Readout,
    Spectrum,
    check_pairs,
    choice,
    groups,
    maps,
    similarities,
)
from whitenedcse.evaluation.scores import cosine
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import Subset, subsets
from whitenedcse.files import writing
from whitenedcse.model.checkpoint import SETTINGS
from whitenedcse.model.embedder import Embedder, ragged_ids
from whitenedcse.model.head import Final, Pooling
from whitenedcse.model.layers import Layers, averaged, pooled_layers, states_of

UNKNOWN = "which readout is best cannot be told without labels: score 200 pairs of your texts, --pairs"
BLOCK = 1_000  # sentences of the corpus at a time: (r, 1000, d) float32 of each pooling
SHOWN = 8  # sets of layers in the table; half of them in the picture


class Found(NamedTuple):
    """The readouts of an embedder: what is known without pairs, and, with pairs, the choice.

    facts: by pooling and layer. tried: all readouts, as in choice.scores. embedder: with the chosen one.
    """

    facts: dict[tuple[str, int], dict[str, float]]
    tried: list[Readout]
    choice: Choice | None
    embedder: Embedder

    @property
    def best(self) -> Readout | None:
        """The readout of `embedder` that the pairs choose; None without pairs, or if it is left as it is."""
        return self.tried[self.choice.best] if self.choice and self.choice.shown else None

    def __str__(self) -> str:
        """What to do, in a sentence."""
        return UNKNOWN if self.choice is None else verdict(self, self.choice)


def every_layer(embedder: Embedder, sentences: Sequence[str], kinds: Sequence[str]) -> Layers:
    """The vectors of every layer in one pass, for each kind of pooling."""
    encoder = embedder.encoder
    rows = ragged_ids(sentences, encoder.tokenizer, embedder.max_length, embedder.prompt)
    return pooled_layers(encoder, rows, kinds, range(encoder.depth + 1))


def moments_of(embedder: Embedder, texts: Iterable[str], kinds: Sequence[str]) -> dict[str, Moments]:
    """The moments of every layer over texts, for each kind of pooling."""
    moments = {kind: Moments() for kind in kinds}
    with pace("encoded") as more:
        for block in blocks(texts, BLOCK):
            for kind, x in every_layer(embedder, block, kinds).kinds.items():
                moments[kind].add(x)
            more(len(block))
    return moments


def readout(
    model: Embedder | str | os.PathLike[str],
    corpus: str | os.PathLike[str] | Sequence[str],
    pairs: str | os.PathLike[str] | Subset | None = None,
    *,
    sample: int | None = 20_000,
    columns: Sequence[str] = (),
) -> Found:
    """The best readout of an encoder that was trained before, for texts like those of a corpus.

    model: an embedder, or the path or hub id of one. corpus: texts that whitening is fitted to, or a file,
    folder or name of a corpus, of which `sample` texts are drawn; columns: of a table. pairs: scored pairs,
    which choose; a file, the name of a task such as "STS-B/dev", or a `Subset`; of more than MOST, a random
    part. None: only the spectra of all layers are described, because nothing that needs no label was found to
    predict what whitening brings. Raises ValueError for fewer texts than two, and for pairs that cannot
    choose.

    >>> from whitenedcse.model.scratch import small_bert
    >>> embedder = Embedder(encoder=small_bert(vocabulary=200, layers=1, width=8, heads=1))
    >>> found = readout(embedder, ["a cat sleeps", "a dog runs", "the bird eats"])
    >>> found.choice is None, len(found.facts)  # two kinds of pooling, the embeddings and one layer
    (True, 4)
    """
    embedder, scored = Embedder.of(model), None if pairs is None else part(joined(pairs))
    if scored is not None:
        check_pairs(scored.gold, groups(scored.left, scored.right))
    kinds = (embedder.encoder.one_token, "mean")
    every = worded(sources.given(corpus, columns, sample), embedder.encoder.tokenizer)
    moments = moments_of(embedder, every, kinds)
    if moments["mean"].n < 2:
        raise ValueError(f"{moments['mean'].n} texts: a whitening is fitted to two or more, better to 20,000")
    layers = range(embedder.encoder.depth + 1)
    facts = {(k, i): Spectrum.of(*moments[k].of([i])).facts() for k in kinds for i in layers}
    if scored is None:
        return Found(facts, [], None, embedder)
    tried, judged = chosen(embedder, moments, scored)
    best = tried[judged.best]
    spectrum = Spectrum.of(*moments[best.pooling].of(best.layers))
    place = {"corpus": os.fspath(corpus)} if isinstance(corpus, str | os.PathLike) else {}
    about = {"texts": moments["mean"].n, **place}
    return Found(facts, tried, judged, folded(embedder, best, spectrum, about) if judged.shown else embedder)


def joined(pairs: str | os.PathLike[str] | Subset) -> Subset:
    """Scored pairs, or those of a file or of all subsets of a task. Raises ValueError for labelled texts."""
    if isinstance(pairs, Subset):
        return pairs
    parts = subsets(os.fspath(pairs))
    left = [text for subset in parts for text in subset.left]
    right = [text for subset in parts for text in subset.right]
    return Subset(os.fspath(pairs), left, right, np.concatenate([subset.gold for subset in parts]))


def part(pairs: Subset) -> Subset:
    """The pairs, or MOST of them at random."""
    if len(pairs.gold) <= MOST:
        return pairs
    at = np.sort(np.random.default_rng(0).choice(len(pairs.gold), MOST, replace=False))
    return pairs._replace(
        left=[pairs.left[i] for i in at], right=[pairs.right[i] for i in at], gold=pairs.gold[at]
    )


def chosen(embedder: Embedder, moments: dict[str, Moments], pairs: Subset) -> tuple[list[Readout], Choice]:
    """All readouts, and what the pairs say of them."""
    sentences, index, *_ = plan({"pairs": [pairs]})
    ((_, rows),) = index["pairs"]
    seen = every_layer(embedder, sentences, [*moments, states_of(embedder.pooling)])
    own = cosine(*averaged(embedder, seen, None, extra=0)[rows])
    planes = {kind: seen.kinds[kind] for kind in moments}
    tried: list[Readout] = []
    found: list[NDArray[np.float32]] = []
    every = maps(embedder.encoder.width, moments["mean"].n)
    for readouts, cosines in similarities(planes, moments, rows, every):
        tried += readouts
        found.append(cosines.astype(np.float32))
    sizes, equal = [len(one.layers) for one in tried], groups(pairs.left, pairs.right)
    return tried, choice(pairs.gold, own, np.concatenate(found, axis=1), sizes, groups=equal)


def folded(embedder: Embedder, best: Readout, spectrum: Spectrum, about: Mapping[str, Any]) -> Embedder:
    """The embedder with another pooling and the map as its last step; unit length stays last where it was.

    about: the texts that the map was fitted to, for its provenance.
    """
    provenance: dict[str, Any] = {"kind": best.map.kind, "readout": str(best)}
    final = None
    if best.map.kind != "none":
        weight = matrix(best.map, spectrum).T
        provenance |= {"k": len(weight), **about}
        final = Final(
            weight=torch.from_numpy(weight.copy()),
            bias=torch.from_numpy(-weight @ spectrum.mean),
            unit=embedder.unit,
            provenance=provenance,
        )
    elif embedder.unit:
        final = Final(weight=None, bias=None, unit=True, provenance=provenance)
    return embedder.replaced(pooling=Pooling(best.pooling, best.layers), embedding="encoder", final=final)


def matrix(chosen: Map, spectrum: Spectrum) -> NDArray[np.float64]:
    """The matrix (d, k) of x -> (x - mean) @ matrix, whose cosines are those that chose the map."""
    scaled = spectrum.axes * np.sqrt(chosen.squares(spectrum.variances))
    return scaled[:, : chosen.k] if chosen.k else scaled @ spectrum.axes.T


def grids(found: Found) -> list[Grid]:
    """The tables of a result: the spectra, and with pairs the readouts near the best."""
    rows = [[kind, str(layer), f"{100 * f['top']:.1f}", f"{f['rank']:.0f}", f"{f['cosine']:.2f}"]
            for (kind, layer), f in found.facts.items()]  # fmt: skip
    rows = [["-" if cell == "nan" else cell for cell in row] for row in rows]
    columns = ("pooling", "layer", "first axis, %", "effective rank", "mean cosine")
    spectra = Grid("the spectrum of each layer over the corpus", columns, rows, right=range(1, 5))
    if found.choice is None:
        return [spectra._replace(notes=[UNKNOWN])]
    return [spectra, near(found, found.choice)]


Where = tuple[str, tuple[int, ...]]  # a kind of pooling, and the layers whose vectors are averaged


def near(found: Found, judged: Choice) -> Grid:
    """A row for each of the best sets of layers, a column for each kind of map: the best score of each."""
    best: dict[Where, dict[str, tuple[float, Map]]] = {}
    for i in np.flatnonzero(~np.isnan(judged.scores)):
        one, score = found.tried[i], float(judged.scores[i])
        row = best.setdefault((one.pooling, one.layers), {})
        if one.map.kind not in row or score > row[one.map.kind][0]:
            row[one.map.kind] = (score, one.map)
    kinds, rows = ("none", "centre", "abtt", "pca", "whitening"), []
    for at in needed({at: max(score for score, _ in row.values()) for at, row in best.items()}):
        row = best[at]
        of = str(row["whitening"][1]).removeprefix("whitening, ") if "whitening" in row else "-"
        rows.append([said(at), *(f"{row[kind][0]:.2f}" if kind in row else "-" for kind in kinds), of])
    columns = ("layers", *kinds, "of the whitening")
    title = f"Spearman x 100 on the pairs, best of {len(judged.scores):,} readouts"
    title += f"; the model's own: {judged.own:.2f}"
    return Grid(title, columns, rows, notes=[verdict(found, judged)], right=range(1, 6))


def said(at: Where) -> str:
    """A kind of pooling and its layers, in words."""
    return f"{at[0]} of {' + '.join(map(str, at[1]))}"


def needed(scores: Mapping[Where, float]) -> list[Where]:
    """The SHOWN best sets of layers, without those of which a part scores as much, but for NEAR."""

    def more(at: Where) -> bool:
        parts = ((at[0], part) for size in range(1, len(at[1])) for part in combinations(at[1], size))
        return all(scores.get(part, -np.inf) < scores[at] - NEAR for part in parts)

    return sorted(filter(more, scores), key=lambda at: -scores[at])[:SHOWN]


def verdict(found: Found, judged: Choice) -> str:
    """What to do, in a sentence."""
    gain = f"{judged.gain:+.2f} ({judged.low:+.2f} .. {judged.high:+.2f})"
    if judged.shown:
        return f"chosen: {found.best}; on pairs that did not choose it gains {gain}"
    why = "which includes 0" if judged.high >= 0 else "a loss"
    return f"leave it as it is: on pairs that did not choose, the best readout gains {gain}, {why}"


def write(found: Found, out: Path) -> list[Path]:
    """Write what was found to a folder: all scores, the picture, and the embedder if it has gained or if an
    older one is there; returns the files."""
    written = []
    if found.choice is not None:
        with writing(out / "readouts.csv", "w") as stream:
            stream.write("pooling,layers,map,spearman\n")
            for one, score in zip(found.tried, found.choice.scores, strict=True):
                stream.write(f'{one.pooling},{" ".join(map(str, one.layers))},"{one.map}",{score:.4f}\n')
        picture(found, found.choice, out / "readouts.png")
        written += [out / "readouts.csv", out / "readouts.png"]
        if found.choice.shown or (out / "model" / SETTINGS).is_file():  # of an earlier call, with its choice
            found.embedder.save(out / "model")
            written.append(out / "model")
    return written


def picture(found: Found, judged: Choice, path: Path) -> None:
    """The score over the number of components for the best sets of layers; as they are, dashed."""
    from matplotlib.figure import Figure

    curves: dict[Where, dict[int, float]] = {}
    plain: dict[Where, float] = {}
    for one, score in zip(found.tried, judged.scores, strict=True):
        if one.map == Map("whitening", one.map.k) and not np.isnan(score):
            curves.setdefault((one.pooling, one.layers), {})[one.map.k or 0] = float(score)
        elif one.map.kind == "none":
            plain[one.pooling, one.layers] = float(score)  # NaN of a token that does not vary
    best = {at: np.nanmax([*curve.values(), plain[at]]) for at, curve in curves.items()}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, at in enumerate(needed(best)[: SHOWN // 2]):
        ks = sorted(curves[at])
        axes.plot(ks, [curves[at][k] for k in ks], marker="o", color=f"C{i}", label=said(at))
        axes.axhline(plain[at], color=f"C{i}", linestyle="--", linewidth=1)
    axes.axhline(judged.own, color="black", linewidth=1, label="the model as it is")
    axes.set(xlabel="components kept by the whitening (dashed: the same layers, not whitened)",
             ylabel="Spearman x 100 on the pairs")  # fmt: skip
    axes.legend(frameon=False)
    with writing(path) as stream:
        figure.savefig(stream, dpi=150)
