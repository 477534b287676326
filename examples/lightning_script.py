"""The parts in your own Lightning script: python lightning_script.py ENCODER CORPUS

Anything that Lightning's Trainer does is yours: callbacks, loggers, strategies, precision.
"""

from argparse import ArgumentParser

import lightning
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from whitenedcse import (
    ContrastiveLoss,
    ContrastiveTraining,
    Embedder,
    Pooling,
    ProjectionHead,
    SentenceData,
)

parser = ArgumentParser(description=__doc__)
parser.add_argument("encoder", help="a directory of Transformers, or a hub id such as bert-base-uncased")
parser.add_argument("corpus", help='a file with a sentence a line, or "quickstart", 20,000 bundled sentences')
arguments = parser.parse_args()
embedder = Embedder(encoder=arguments.encoder, pooling=Pooling("mean"))
embedder.head = ProjectionHead(embedder.encoder.width, position="after")  # dense, tanh, then SGW
data = SentenceData(corpus=arguments.corpus, tokenizer=embedder.encoder.tokenizer, batch_size=32, passes=2)
module = ContrastiveTraining(embedder=embedder, loss=ContrastiveLoss(temperature=0.1), views=4)
trainer = lightning.Trainer(
    max_steps=100,
    gradient_clip_val=1.0,
    use_distributed_sampler=False,  # SentenceData gives each rank its share
    enable_checkpointing=False,
    logger=CSVLogger("logs"),
    callbacks=[LearningRateMonitor()],
)
trainer.fit(module, data)
embedder.save("trained")
print(Embedder.load("trained").encode(["A cat sleeps on the sofa."]).shape)
