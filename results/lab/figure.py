"""Draw lab.png, every comparison of the plan on both encoders: python -m results.lab.figure"""

from matplotlib import rc_context
from matplotlib.figure import Figure

from results.lab.answers import ENCODERS, HERE, QUESTIONS, asked
from whitenedcse.report.charts import COLOURS, STYLE


def main() -> None:
    """A line for each comparison, a mark with its 95 % interval for each encoder."""
    labels = [f"{one} - {other}".replace("`", "") for pairs in QUESTIONS.values() for one, other in pairs]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.32 * len(labels) + 1.1), layout="constrained")
        axis = figure.subplots()
        for i, (encoder, name) in enumerate(ENCODERS.items()):
            every = [(asked(question), range(len(pairs))) for question, pairs in QUESTIONS.items()]
            found = [answers[number, encoder][0] for answers, numbers in every for number in numbers]
            places = [0.12 - 0.24 * i - place for place in range(len(found))]
            middles = [d.difference for d in found]
            errors = [[d.difference - d.low for d in found], [d.high - d.difference for d in found]]
            axis.errorbar(
                middles, places, xerr=errors, fmt="os"[i], color=COLOURS[i], capsize=2, ms=4, label=name
            )
        axis.axvline(0, color="0.6", linewidth=0.8)
        axis.set(xlabel="difference, Spearman x 100 (mean of paired seeds, 95 % interval)")
        axis.set_yticks(range(0, -len(labels), -1), labels)
        axis.legend(frameon=False)
        figure.savefig(HERE / "lab.png")


if __name__ == "__main__":
    main()
