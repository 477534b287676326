"""Publish a run of +experiment=pretrain: python -m results.pretrain.publish outputs/pretrain

Writes encoder/ (float16 weights, configuration, tokenizer), curve.csv, curve.png and loss.json beside this
file. loss.json: the cross-entropy of masked words on the sentences held out of training, in nats, of the
weights as they were trained and rounded to float16, with the same words masked; and how far the vectors of
these sentences (mean pooling) are apart.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from whitenedcse.app.train import built
from whitenedcse.ragged import Ragged, taken
from whitenedcse.report.charts import COLOURS, STYLE
from whitenedcse.run import Run
from whitenedcse.training.module import ContrastiveTraining

HERE = Path(__file__).parent
PIECE, AVERAGED = 64, 10  # sentences of a batch; logged losses that a row of curve.csv is the mean of


@torch.no_grad()
def measured(module: ContrastiveTraining, rows: Ragged) -> tuple[float, np.ndarray]:
    """The mean cross-entropy of masked words of held-out sentences, and the sentences' vectors (n, d)."""
    torch.manual_seed(0)
    module.eval()
    total, count = 0.0, 0
    for part in torch.arange(rows.n).split(PIECE):
        batch, _ = taken(rows, part)
        masked = torch.get_rng_state()
        words = int((module.mlm.masked(batch.ids)[1] != -100).sum())
        torch.set_rng_state(masked)  # the same words again
        total += float(module.mlm(batch)) * words
        count += words
    return total / count, module.embedder.encode_rows(rows)


def curve(run: Run) -> None:
    """Write curve.csv and curve.png: the training loss, of batches and of ten together."""
    steps, losses = run.series["train/loss"]
    n = len(losses) // AVERAGED * AVERAGED
    means = losses[:n].reshape(-1, AVERAGED).mean(axis=1)
    with (HERE / "curve.csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["step", "loss"])
        ends = steps[AVERAGED - 1 : n : AVERAGED]
        lines.writerows((int(step), f"{mean:.4f}") for step, mean in zip(ends, means, strict=True))
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        ax.plot(steps, losses, color=COLOURS[0], alpha=0.25, linewidth=0.6)
        ax.plot(steps[AVERAGED // 2 : n : AVERAGED], means, color=COLOURS[0], linewidth=1.4)
        ax.set(xlabel="optimiser step", ylabel="cross-entropy of masked words, nats")
        figure.savefig(HERE / "curve.png", dpi=150)


def main(folder: str) -> None:
    """Write all files."""
    run = Run(Path(folder))
    module, data = built(OmegaConf.load(run.path / "config.yaml"))
    newest = max(run.checkpoints.glob("*.ckpt"))
    module.load_state_dict(torch.load(newest, map_location="cpu", weights_only=True)["state_dict"])
    rows, backbone = data.held_out(), module.embedder.encoder.backbone
    loss, x = measured(module, rows)
    module.embedder.encoder.tokenizer.save_pretrained(HERE / "encoder")
    backbone.half().save_pretrained(HERE / "encoder")
    backbone.float()
    rounded, y = measured(module, rows)
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    content = {"sentences": rows.n, "loss": loss, "loss_float16": rounded}
    content |= {"least_cosine": float(cosines.min())}
    (HERE / "loss.json").write_text(json.dumps(content, indent=1) + "\n")
    curve(run)
    print(content)


if __name__ == "__main__":
    main(sys.argv[1])
