"""Fit a whitening to an encoder's vectors of a corpus, keep 64 components, and search: ENCODER CORPUS QUERY

BERT-whitening (arXiv:2103.15316) in a few lines: no training, smaller vectors.
"""

import sys
from pathlib import Path

from whitenedcse import Embedder, Index, Pooling, Postprocess, whitened

encoder, corpus, query = sys.argv[1:]
texts = [line for line in Path(corpus).read_text().splitlines() if line.strip()]
embedder = Embedder.load(encoder, Pooling("mean"))
fit = Postprocess("whitening").fit(embedder.encode(texts, progress=True))
small = whitened(embedder, fit, k=min(64, embedder.width))
print(f"{embedder.width} numbers a text -> {small.width}")

for name, each in {"as it is": embedder, "whitened": small}.items():
    index = Index.build(each, texts)
    for hit in index.query([query], 3)[0]:
        print(f"{name:9} {hit.cosine:.3f}  {hit.text}")
index.save("index")  # with its encoder; whitenedcse search query index "another question"
