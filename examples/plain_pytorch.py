"""Whitening in a plain PyTorch loop over a Transformers model: python plain_pytorch.py ENCODER CORPUS"""

import random
from argparse import ArgumentParser
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from whitenedcse import ContrastiveLoss, ProjectionHead

parser = ArgumentParser(description=__doc__)
parser.add_argument("encoder", help="a directory of Transformers, or a hub id such as bert-base-uncased")
parser.add_argument("corpus", help="a file with a sentence a line")
arguments = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
model = AutoModel.from_pretrained(arguments.encoder).float()  # weights in float16 train to NaN
head, loss = ProjectionHead(model.config.hidden_size), ContrastiveLoss()  # SGW, linear layer, tanh
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-5)
sentences = [line for line in Path(arguments.corpus).read_text().splitlines() if line.strip()]
random.Random(0).shuffle(sentences)
views, n = 3, 64
model.train()
for start in range(0, min(len(sentences) - n, 100 * n) + 1, n):
    batch = sentences[start : start + n] * views  # dropout makes the views differ
    tokens = tokenizer(batch, padding=True, truncation=True, max_length=32, return_tensors="pt")
    x = model(**tokens).last_hidden_state[:, 0]  # the first token: (views * n, width)
    value = loss(head(x.unflatten(0, (views, -1))))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    print(f"{start // n}: {value.item():.4f}")
model.save_pretrained("plain")
tokenizer.save_pretrained("plain")
