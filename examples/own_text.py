"""Train an encoder on your own text, in Python: python own_text.py ENCODER CORPUS [PAIRS]"""

from argparse import ArgumentParser

import whitenedcse

parser = ArgumentParser(description=__doc__)
parser.add_argument("encoder", help="a directory of Transformers, or a hub id such as bert-base-uncased")
parser.add_argument("corpus", help='a file with a sentence a line, or "quickstart", 20,000 bundled sentences')
parser.add_argument("pairs", nargs="?", help="score, sentence1, sentence2: picks the best checkpoint")
arguments = parser.parse_args()
run = whitenedcse.train(
    arguments.encoder,
    arguments.corpus,
    dev=arguments.pairs,
    output="outputs/first",
    pooling="mean",
    views=3,
    settings={"trainer.max_steps": 100},
)
print(run, "best dev score:", run.best_score)  # None without PAIRS

embedder = whitenedcse.Embedder.load(run)
x = embedder.encode(["A cat sleeps on the sofa.", "A dog runs in the park.", "The cat is asleep."])
x /= (x**2).sum(axis=1, keepdims=True) ** 0.5
print((x @ x.T).round(2))  # cosine similarities
