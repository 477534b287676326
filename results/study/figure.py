"""Draw study.png, like beside like: python -m results.study.figure

A panel for each v: by test, whitening while training minus none, and minus whitening afterwards.
"""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from results.study.contrasts import HERE, TASKS, after, contrast, during
from whitenedcse.report.charts import COLOURS, STYLE


def panel(ax: Axes, v: int) -> None:
    """Plot the differences at v views with their 95 % intervals, a line for each test, the average last."""
    lines = {**{task: [task] for task in TASKS}, "average": TASKS}
    for i, (name, pair) in enumerate({"no whitening": during(v), "whitening afterwards": after(v)}.items()):
        every = [contrast(*pair, tasks) for tasks in lines.values()]
        middles = [d.difference for d in every]
        ys = [0.12 - 0.24 * i - place for place in range(len(lines))]
        ax.errorbar(
            middles,
            ys,
            xerr=[d.high - d.difference for d in every],
            fmt="os"[i],
            color=COLOURS[i],
            capsize=2,
            markersize=4,
            label=f"minus {name}",
        )
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.axhline(0.5 - len(TASKS), color="0.85", linewidth=0.8)
    ax.set(title=f"v = {v}", xlabel="difference, Spearman x 100", yticks=range(0, -len(lines), -1))
    ax.set_yticklabels(lines)


def main() -> None:
    """Two panels with one legend."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for ax, v in zip(axes, (2, 3), strict=True):
            panel(ax, v)
        figure.suptitle("Whitening while training (mean of five paired seeds, 95 % interval)")
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
        )
        figure.savefig(HERE / "study.png")


if __name__ == "__main__":
    main()
