"""The sentences about the study; results/conclusions.py writes them into README.md and the one beside this.

Figures typed here are those of the paper's text and of settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from results.markdown import listed, text
from results.study.contrasts import (
    PLAIN,
    SYSTEMS,
    TARGET,
    TASKS,
    WHITE,
    WHOLE,
    Arm,
    after,
    before,
    beside,
    contrast,
    dev,
    during,
    figures,
    of,
    paired_by_seed,
    paper,
    said,
    share,
    shown,
    steps,
    tests,
    verdict,
    where,
    whitened,
)

OTHERS = [task for task in TASKS if task != "SICK-R"]
SIMCSE, WHITENEDCSE = Arm("simcse"), Arm("whitenedcse")


def on(one: Arm, other: Arm, tasks: Sequence[str] = TASKS) -> str:
    """The difference of two arms on the average over tasks, and whether it is shown."""
    return said(contrast(one, other, tasks))


def percent(one: Arm, other: Arm) -> str:
    """The share of SICK-R in the difference of the average."""
    return f"{100 * share(one, other, 'SICK-R'):.0f} %"


def like() -> str:
    """Whitening while training beside whitening afterwards, at equal v."""
    against = "\n".join(
        f"- **At v = {v} whitening while training {verdict(contrast(*after(v)))} whitening afterwards:** "
        f"{figures(contrast(*after(v)))}. It is higher on {where(*after(v), 1)}, lower on "
        f"{where(*after(v), -1)}: which of the two is better depends on the test."
        for v in PLAIN
    )
    return text(f"""
{beside()}

{against}
- **Over no whitening**, whitening while training gains {on(*during(2))} at v = 2 and
  {on(*during(3))} at v = 3; whitening afterwards, which adds nothing to training, gains
  {on(*whitened("simcse"))} and {on(*whitened("multi_positive"))}. The WhitenedCSE paper lacks that baseline
  (Forooghi et al., arXiv:2407.12886, whiten trained encoders); without it, what it gives would be credited
  to training.
- **SICK-R alone** makes {percent(*during(2))} of the gain over no whitening at v = 2, {percent(*during(3))}
  at v = 3, and {percent(*WHOLE)} of WhitenedCSE's over SimCSE. On the other six tests (a choice made after
  looking) these gains are {on(*during(2), OTHERS)}, {on(*during(3), OTHERS)} and {on(*WHOLE, OTHERS)}; over
  whitening afterwards {on(*after(2), OTHERS)} at v = 2 and {on(*after(3), OTHERS)} at v = 3.
- **Where it falls** against no whitening: at v = 2 on {where(*during(2), -1)}, at v = 3 on
  {where(*during(3), -1)}. STS12 changes by {on(*during(2), ["STS12"])} at v = 2, and by
  {on(*WHOLE, ["STS12"])} from SimCSE to WhitenedCSE.
""")


def holds() -> str:
    """What else the study shows."""
    best = max(SYSTEMS, key=lambda name: fmean(tests(Arm(name)).values()))
    target = {f"`{name}`": contrast(*whitened(name, TARGET)) for name in SYSTEMS}
    return text(f"""
- **Each half of the method helps SimCSE, and so do both.** Whitening alone gives {on(Arm("sgw"), SIMCSE)},
  a third view alone {on(Arm("multi_positive"), SIMCSE)}, both {on(*WHOLE)}. The paper's Table 6 has
  {paper("T6", 1, 0)}, {paper("T6", 2, 0)} and {paper("T6", 4, 0)} for BERT-base with one run each.
- **Do not whiten twice.** Whitening afterwards on training sentences changes `sgw` by
  {on(*whitened("sgw"))} and `whitenedcse` by {on(*whitened("whitenedcse"))}, where it changes `simcse` by
  {on(*whitened("simcse"))}. On the target's own sentences it lowers
  {listed(n for n, d in target.items() if d.high < 0)}, and raises
  {listed(n for n, d in target.items() if d.low > 0)}.
- **The highest average is that of `{best}`.** `official` is the official code's head (thirds of the batch,
  64 groups of 6 channels): {on(Arm("official"), SIMCSE)} over SimCSE and {on(Arm("official"), WHITENEDCSE)}
  over the paper's head (`whitenedcse`), the latter not corrected for having looked. It may be groups of 6,
  or statistics over all views of fewer sentences; the study does not say which.
""")


def fails() -> str:
    """What the paper says and the study does not show."""
    last, losses = dev("one_pass", "last").values(), [run["loss"] for run in of("one_pass").values()]
    largest = [max(series.values()) for series in losses]
    on_dev = paired_by_seed(dev("whitenedcse", "best"), dev("simcse", "best"))
    against = [contrast(Arm(name), SIMCSE) for name in SYSTEMS if name not in ("simcse", "one_pass")]
    halves = [(d.high - d.low) / 2 for d in against]
    assert on_dev
    return text(f"""
- **That the shuffle changes anything:** `whitenedcse` minus `group` is {on(WHITENEDCSE, Arm("group"))}. The
  paper's Table 3 has {paper("T3", 4, 3)}. With dropout in each pass the views differ anyway; and these
  groups are pairs, as published.
- **That a third view adds to whitening:** `whitenedcse` minus `sgw` is {on(WHITENEDCSE, Arm("sgw"))}; the
  paper has {paper("T6", 4, 1)}.
- **That one encoding is enough:** `one_pass` minus `simcse` is {on(Arm("one_pass"), SIMCSE)}. Section 3.2.2
  describes whitening one encoding several times, with a step in {steps()["one_pass"]:.2f} of SimCSE's time;
  the views are then so easy that the loss, logged from step {min(losses[0])} on, is at most
  {max(largest):.1e} (below 1e-6 for {sum(x < 1e-6 for x in largest)} of {len(largest)} seeds), of which
  AdamW still makes full steps: dev goes from {before():.2f} to {fmean(last):.2f} ({min(last):.2f} to
  {max(last):.2f} over seeds) at the end. The scores published can only be those of one pass a view.
- **That uniformity improves:** of the exported vector, whitening while training changes {geometry(2)} at v
  = 2; {geometry(3)} at v = 3. Lower is better. The paper claims both better; what it measured is not said.
- **That the gradient through W matters:** `gradient_full` minus `whitenedcse` is
  {on(Arm("gradient_full"), WHITENEDCSE)} for pairs. Cutting it, the default here, is the cheaper choice.
- **That dev orders systems as the tests do:** WhitenedCSE minus SimCSE is {said(on_dev)} on STS-B dev,
  {on(*WHOLE)} on the tests.
- **Small differences.** The intervals of differences from SimCSE reach {min(halves):.2f} to
  {max(halves):.2f} to either side (`one_pass` left out). Only the p-values of the table of systems are
  corrected for their number.
""")


def geometry(v: int) -> str:
    """Alignment and uniformity at v views without whitening and with it, and the interval of the change."""
    cells = []
    for name, digits in (("alignment", 3), ("uniformity", 2)):
        plain, white = dev(PLAIN[v], name), dev(WHITE[v], name)
        d = paired_by_seed(white, plain)
        assert d and shown(d)
        start, end = (f"{fmean(values.values()):.{digits}f}" for values in (plain, white))
        cells.append(f"{name} from {start} to {end} ({d.low:+.{digits}f} .. {d.high:+.{digits}f})")
    return " and ".join(cells)
