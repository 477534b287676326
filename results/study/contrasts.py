"""Paired differences between columns of seeds.csv: python results/study/contrasts.py

A line: the mean over seeds of the first less the second, its 95 % t interval, p of the paired t test alone.
"""

from pathlib import Path

import pandas
from scipy import stats

from whitenedcse.evaluation.differences import half_width, of_mean

RUNS = pandas.read_csv(Path(__file__).with_name("seeds.csv")).set_index(["system", "seed"]).sort_index()
PAIRS = [  # a system and how its vectors are used: against another
    (("whitenedcse", "as it is"), ("simcse", "whitened (training)")),
    (("sgw", "as it is"), ("simcse", "whitened (training)")),
    (("multi_positive", "whitened (training)"), ("multi_positive", "as it is")),
    (("simcse", "whitened (training)"), ("simcse", "as it is")),
    (("simcse", "whitened (target)"), ("simcse", "as it is")),
    (("whitenedcse", "whitened (training)"), ("whitenedcse", "as it is")),
    (("whitenedcse", "as it is"), ("multi_positive", "whitened (training)")),
    (("whitenedcse", "as it is"), ("multi_positive", "as it is")),
    (("whitenedcse", "as it is"), ("sgw", "as it is")),
    (("whitenedcse", "as it is"), ("group", "as it is")),
    (("whitenedcse", "as it is"), ("gradient_full", "as it is")),
    (("official", "as it is"), ("whitenedcse", "as it is")),
]

for one, other in PAIRS:
    first, second = (RUNS.loc[system][f"{row}: average"] for system, row in (one, other))
    apart = (first - second).to_numpy()
    half = half_width([of_mean(apart)])
    p = stats.ttest_rel(first, second).pvalue
    names = " - ".join(f"{system} {row}" for system, row in (one, other))
    low, middle, high = apart.mean() - half, apart.mean(), apart.mean() + half
    print(f"{names:66s} {middle:+6.2f}  ({low:+.2f} .. {high:+.2f})  p {p:.2g}")
