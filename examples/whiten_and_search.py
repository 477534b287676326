"""Fit a whitening to an encoder's vectors of a corpus, keep 64 components, and search.

BERT-whitening (arXiv:2103.15316), without training: python whiten_and_search.py ENCODER CORPUS QUERY
"""

from argparse import ArgumentParser
from pathlib import Path

from whitenedcse import Embedder, Index, Pooling, Postprocess, whitened

parser = ArgumentParser(description=__doc__)
parser.add_argument("encoder", help="a directory of Transformers, or a hub id such as bert-base-uncased")
parser.add_argument("corpus", help="a file with a text a line")
parser.add_argument("query", help="a text whose nearest ones are printed")
arguments = parser.parse_args()
texts = [line for line in Path(arguments.corpus).read_text().splitlines() if line.strip()]
embedder = Embedder.load(arguments.encoder, Pooling("mean"))
fit = Postprocess("whitening").fit(embedder.encode(texts, progress=True))
small = whitened(embedder, fit, k=min(64, embedder.width))
print(f"{embedder.width} numbers a text -> {small.width}")

for name, each in {"as it is": embedder, "whitened": small}.items():
    index = Index.build(each, texts)
    for hit in index.query([arguments.query], 3)[0]:
        print(f"{name:9} {hit.cosine:.3f}  {hit.text}")
index.save("index")  # with its encoder; whitenedcse search query index "another question"
