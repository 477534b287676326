"""What a step of each system of the study costs: python -m bench.systems [--quick] [--json FILE]

Whole steps of train.py, as bench.step takes them, of +experiment=wiki_mini with the study's systems. Encoder,
sentences and their order are the same for all, so sentences a second are the batch over the time of a step.
WHITENEDCSE_DATA as in +experiment=wiki_mini.
"""

from __future__ import annotations

from omegaconf import OmegaConf

from bench import measure
from bench.measure import Variant
from bench.peers import silence, trained
from bench.step import Baton
from whitenedcse.app.config import CONF

SWEEP = OmegaConf.load(CONF / "sweep" / "study.yaml")
SYSTEMS = SWEEP.hydra.sweeper.params.system.split(",")


def main() -> None:
    """One table."""
    options = measure.parser(__doc__).parse_args()
    here, steps = measure.begin(options), options.rounds or (3 if options.quick else 25)
    silence()
    same = ["+experiment=wiki_mini", "data.sample=20000", "seed=1", "trainer.devices=1"]
    same += ["trainer.accelerator=cpu", f"trainer.max_steps={steps + 1}"]
    baton = Baton({name: trained([*same, f"+system={name}"]) for name in SYSTEMS}, options.threads)
    for _ in range(steps + 1):
        baton.round()
    rows = {name: Variant(lambda: None, None if name == SYSTEMS[0] else SYSTEMS[0]) for name in SYSTEMS}
    table = measure.table("a step of 64 sentences, MiniLM (6 x 384), Wikipedia", rows, baton.seconds)
    measure.end(options, here, [table])


if __name__ == "__main__":
    main()
