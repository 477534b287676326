"""Train a SentenceTransformer by its own trainer with our loss: python FILE MODEL CORPUS"""

from argparse import ArgumentParser

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from transformers import set_seed

from whitenedcse.sentence_transformers import HeadInCheckpoints, WhitenedContrastiveLoss, whitened

parser = ArgumentParser(description=__doc__)
parser.add_argument("model", help="a directory of Sentence-Transformers or Transformers, or a hub id")
parser.add_argument("corpus", help="a file with a sentence a line")
arguments = parser.parse_args()
set_seed(42)  # the loss draws the weights of its head before the trainer sets its own seed
model = SentenceTransformer(arguments.model).float()  # weights in float16 train to NaN
loss = WhitenedContrastiveLoss(model, views=3)
SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "theirs_checkpoints",
        num_train_epochs=1,
        learning_rate=3e-5,
        per_device_train_batch_size=64,
        dataloader_drop_last=True,  # a last batch of a few sentences cannot be whitened
        report_to="none",
    ),
    train_dataset=Dataset.from_text(arguments.corpus),
    loss=loss,
    callbacks=[HeadInCheckpoints(loss)],  # so that resume_from_checkpoint restores the head, too
).train()
whitened(model, arguments.corpus, k=min(64, model.get_embedding_dimension() or 64)).save("theirs")
print(SentenceTransformer("theirs").encode(["A cat sleeps on the sofa."]).shape)  # without this package
