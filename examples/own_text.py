"""Train an encoder on your own text, in Python: python own_text.py ENCODER CORPUS [PAIRS]

ENCODER is a directory or a hub id, such as bert-base-uncased; CORPUS a file with a sentence a line, or
"quickstart", 20,000 bundled sentences; PAIRS a file with score, sentence1 and sentence2, which picks the
best checkpoint.
"""

import sys

import whitenedcse

encoder, corpus, *pairs = sys.argv[1:]
run = whitenedcse.train(
    encoder,
    corpus,
    dev=pairs[0] if pairs else None,
    output="outputs/first",
    pooling="mean",
    views=3,
    settings={"trainer.max_steps": 100},
)
print(run, "best dev score:", run.best_score)  # None without PAIRS

embedder = run.embedder
x = embedder.encode(["A cat sleeps on the sofa.", "A dog runs in the park.", "The cat is asleep."])
x /= (x**2).sum(axis=1, keepdims=True) ** 0.5
print((x @ x.T).round(2))  # cosine similarities
