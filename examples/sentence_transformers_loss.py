"""Train a SentenceTransformer by its own trainer with our loss: python NAME.py MODEL CORPUS"""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

from whitenedcse.sentence_transformers import HeadInCheckpoints, WhitenedContrastiveLoss, whitened

name, corpus = sys.argv[1:]
model = SentenceTransformer(name).float()  # weights in float16 train to NaN
loss = WhitenedContrastiveLoss(model, views=3)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "theirs_checkpoints",
        num_train_epochs=1,
        learning_rate=3e-5,
        per_device_train_batch_size=64,
        dataloader_drop_last=True,  # a last batch of a few sentences cannot be whitened
        report_to="none",
    ),
    train_dataset=Dataset.from_text(corpus),
    loss=loss,
    callbacks=[HeadInCheckpoints(loss)],  # so that resume_from_checkpoint restores the head, too
)
trainer.train()
small = whitened(model, corpus, k=min(64, model.get_embedding_dimension() or 64))
small.save("theirs")  # loads in sentence-transformers without this package
print(SentenceTransformer("theirs").encode(["A cat sleeps on the sofa."]).shape)
