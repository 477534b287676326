"""Whitening inside Sentence-Transformers: a loss and an evaluator for its trainer, and faster encoding.

SentenceTransformerTrainer(model, args, dataset, loss=(loss := WhitenedContrastiveLoss(model)),
    evaluator=STSEvaluator(), callbacks=[HeadInCheckpoints(loss)])
accelerate(model).encode(texts)               # the same vectors, without computing padding; undo(model)
whitened(model, texts, k=256).save("white")   # a plain model of that library, which ends with the whitening
"""

from whitenedcse.console import lacking

try:
    from whitenedcse.sentence_transformers.loss import HeadInCheckpoints, WhitenedContrastiveLoss
    from whitenedcse.sentence_transformers.models import TEST_SETS, STSEvaluator, accelerate, undo, whitened
except ModuleNotFoundError as error:  # none at all, or an old one, which lacks a module
    if (error.name or "").partition(".")[0] != "sentence_transformers":
        raise
    package = "sentence-transformers 6.2 or newer"
    raise ImportError(str(lacking(__name__, package, "sentence-transformers", error))) from None

__all__ = [
    "TEST_SETS",
    "HeadInCheckpoints",
    "STSEvaluator",
    "WhitenedContrastiveLoss",
    "accelerate",
    "undo",
    "whitened",
]
