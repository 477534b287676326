"""Exports of real encoders against their source: vectors, and the seven STS tests by Sentence-Transformers.

WHITENEDCSE_DATA=DATA python results/shipping/agreement.py NAME=MODEL ... > results/shipping/agreement.csv

Each encoder is pooled by cls, mean, and mean over layers 1 and -1, as it is and whitened to 256 components on
4,096 Wikipedia sentences. MODEL is a directory, of which the encoder alone is taken.
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from whitenedcse.data.sources import named
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.scores import scores_of
from whitenedcse.evaluation.suite import plan
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.head import Pooling
from whitenedcse.report.published import STS
from whitenedcse.serving.export import export
from whitenedcse.serving.fit import fitted, whitened

POOLINGS = [("cls", [-1]), ("mean", [-1]), ("mean", [1, -1])]


def main() -> None:
    """One csv row for each encoder, pooling and map."""
    sentences, index, *_ = plan({name: subsets(name) for name in STS})
    table = csv.writer(sys.stdout)
    header = ["sentence-transformers", "onnx", "transformers", "average, ours", "average, theirs"]
    table.writerow(["encoder", "pooling", "k", *header, "largest difference of a test"])
    for name, model in (argument.split("=", 1) for argument in sys.argv[1:]):
        for kind, layers in POOLINGS:
            source = Embedder.load(model, Pooling(kind=kind, layers=layers))
            fit = Postprocess("whitening")
            fit.provenance = fitted(fit, source, named("wiki1m_like", sample=4096))
            for embedder, k in ((source, ""), (whitened(source, fit, 256), 256)):
                row = [name, f"{kind} {layers}", k]
                with tempfile.TemporaryDirectory() as folder:
                    for to in ("sentence-transformers", "onnx", *([] if k else ["transformers"])):
                        facts = export(embedder, Path(folder) / to, to)
                        row.append(f"{facts['difference']:.1e}")
                    row += [""] * bool(k)
                    peer = SentenceTransformer(str(Path(folder) / "sentence-transformers"), device="cpu")
                    theirs = scores_of(peer.encode(sentences, batch_size=64), index)
                ours = scores_of(embedder.encode(sentences), index)
                apart = [abs(ours["tasks"][t]["all"] - theirs["tasks"][t]["all"]) for t in STS]
                averages = [np.mean([scores["tasks"][t]["all"] for t in STS]) for scores in (ours, theirs)]
                table.writerow([*row, *(f"{average:.3f}" for average in averages), f"{max(apart):.4f}"])
                sys.stdout.flush()


if __name__ == "__main__":
    main()
