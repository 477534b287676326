"""The quick-start data: facts told in many ways, and pairs whose gold is the share of the fact they keep.

`python data/quickstart/generate.py [--out DIR]` writes sentences.txt, dev.tsv and test.tsv, the same bytes on
every platform: only `random.Random(SEED).random()`, whose sequence Python guarantees, makes a choice.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

SEED, SENTENCES, PAIRS = 0, 20_000, 750
T = TypeVar("T")

# One person an entry: first name, last name, then the words for what only this person does.
PEOPLE = """Anna Berg doctor physician|Tom Hale farmer grower|Mira Kohl teacher instructor
Ivan Petrov sailor seaman|Rosa Lima singer vocalist|Carl Voss judge magistrate
Nadia Haddad lawyer attorney|Owen Price thief robber|Lena Falk author novelist
Hugo Brandt tailor dressmaker|Paula Reyes pilot aviator|Samir Khan merchant trader
Greta Lind actress performer|Felix Roth priest clergyman|Clara Moss nurse carer|Diego Vega soldier warrior
Edith Stone scholar academic|Boris Orlov hunter trapper|Yara Silva dancer ballerina
Peter Quill clerk secretary|Ingrid Dahl butcher slaughterer|Amos Finch gardener horticulturist
Layla Nasser chef cook|Victor Crane detective investigator|Hana Mori chemist pharmacist
Jonas Webb mayor alderman|Olga Sorin landlady innkeeper|Ralph Dunn driver chauffeur
Celia Marsh student pupil|Nils Aker miner digger"""

# One thing an entry: an adjective it may carry, then its names.
THINGS = """red violin fiddle|rusty car automobile|wooden boat vessel|silver clock timepiece
tall lamp lantern|leather book volume|faded map chart|woollen coat jacket|golden ring band|oak chair seat
slim wallet billfold|copper kettle teapot|green bicycle bike|blue vase urn|marble statue sculpture
oval mirror looking-glass|persian carpet rug|brass telescope spyglass|grand piano pianoforte
curved sword sabre|wicker basket hamper|bronze bell chime|sealed letter message|roman coin token
scented candle taper|striped flag banner|steep ladder stepladder|worn saddle harness|canvas tent pavilion
locked trunk chest|black umbrella parasol|spare wheel tyre|iron anchor grapnel|framed portrait likeness
crystal goblet chalice|knitted blanket quilt"""

RELATIONS = """bought purchased acquired|sold auctioned|found discovered located|lost misplaced mislaid
repaired mended fixed|photographed snapped|cleaned washed|examined inspected studied|carried hauled lugged
described portrayed depicted|admired praised|guarded protected|copied reproduced duplicated|wrapped packed
displayed exhibited|burned torched|returned restored|measured gauged|damaged harmed|concealed stashed"""

PLACES = """at the harbour/by the docks|in the market/at the bazaar|near the station/beside the railway
in the forest/among the trees|at the castle/inside the fortress|on the hill/up the slope
in the kitchen/by the stove|at the museum/in the gallery|near the river/along the stream
in the cellar/below the house|at the school/in a classroom|on the beach/along the shore
in the garden/on the lawn|behind the church/near the chapel|at the theatre/on the stage
in the village/in a hamlet"""

TIMES = """on Monday/at the start of the week|in winter/during the cold months|at dawn/at sunrise
at midnight/in the dead of night|last summer/in the hot season|in April/in spring
after lunch/in the afternoon|before the war/in peacetime|on Sunday/at the weekend|at dusk/at sunset
ten years ago/a decade ago|during the storm/amid the gale"""

MANNERS = """quickly/hastily|carefully/cautiously|secretly/covertly|gladly/cheerfully|angrily/furiously
clumsily/awkwardly|proudly/boastfully|silently/noiselessly"""

OPENINGS = (
    "",
    "",
    "as far as we can tell,",
    "many have said that",
    "if the papers are right,",
    "people in town say that",
)

CLOSINGS = ("", "", "", "or so we hear", "to our surprise", "and nobody knows why")

FRAMES = (
    "{s} {m} {v} {o}",
    "{o} was {m} {v} by {s}",
    "it was {s} who {m} {v} {o}",
    "it was {o} that {s} {m} {v}",
)


class Fact(NamedTuple):
    """Who did what to which thing, and optionally where, when and how: the number of an entry for each."""

    subject: int
    relation: int
    object: int
    place: int | None = None
    time: int | None = None
    manner: int | None = None


class Style(NamedTuple):
    """All that a sentence says without meaning it."""

    opening: str
    closing: str
    frame: str
    fronted: bool


def people_names(entry: str) -> list[str]:
    """The ways to mention one person; two of them may share no word."""
    first, last, *roles = entry.split()
    return [
        f"{first} {last}",
        *(f"{form} {r}" for r in roles for form in (f"{last} the", f"{first} the", "the")),
    ]


def thing_names(entry: str) -> list[str]:
    """The ways to mention one thing."""
    adjective, *nouns = entry.split()
    return [f"the {form}" for noun in nouns for form in (noun, f"{adjective} {noun}")]


def entries(block: str) -> list[str]:
    """The entries of a block above: `|` or a new line stands between two."""
    return block.replace("\n", "|").split("|")


# NAMES[slot][entry]: the ways to say it, in the order of the slots of a Fact.
NAMES: tuple[list[list[str]], ...] = (
    [people_names(e) for e in entries(PEOPLE)],
    [e.split() for e in entries(RELATIONS)],
    [thing_names(e) for e in entries(THINGS)],
    *([e.split("/") for e in entries(block)] for block in (PLACES, TIMES, MANNERS)),
)
WEIGHTS = (2, 2, 2, 1, 1, 1)


def gold(a: Fact, b: Fact) -> float:
    """5 x the weight of the slots where both facts agree / the weight of the slots that either fact fills."""
    filled = [(w, x == y) for w, x, y in zip(WEIGHTS, a, b, strict=True) if (x, y) != (None, None)]
    return 5 * sum(w for w, kept in filled if kept) / sum(w for w, _ in filled)


def pick(rng: Random, values: Sequence[T]) -> T:
    """One of the values, each as likely."""
    return values[int(rng.random() * len(values))]


def slot(rng: Random, k: int) -> int | None:
    """A value for slot k; a place, time or manner is left out three times in five."""
    if k >= 3 and rng.random() < 0.6:
        return None
    return int(rng.random() * len(NAMES[k]))


def random_fact(rng: Random) -> Fact:
    """A fact whose slots are drawn one by one."""
    return Fact(*(slot(rng, k) for k in range(6)))  # type: ignore[arg-type]


def changed(rng: Random, fact: Fact) -> Fact:
    """The fact with some of its slots, from none to all, given another value."""
    order = [k for _, k in sorted((rng.random(), k) for k, x in enumerate(fact) if x is not None)]
    values: list[int | None] = list(fact)
    for k in order[: int(rng.random() * (len(order) + 1))]:
        while values[k] == fact[k]:
            values[k] = slot(rng, k)
    return Fact(*values)  # type: ignore[arg-type]


def style(rng: Random) -> Style:
    """A way to tell a fact, drawn without looking at it."""
    return Style(pick(rng, OPENINGS), pick(rng, CLOSINGS), pick(rng, FRAMES), rng.random() < 0.4)


def told(rng: Random, fact: Fact, how: Style) -> str:
    """The sentence that tells a fact in a style, each slot under one of its names."""
    s, v, o, place, time, m = ("" if k is None else pick(rng, NAMES[i][k]) for i, k in enumerate(fact))
    core = how.frame.format(s=s, v=v, o=o, m=m)
    parts = [
        how.opening,
        time + "," if time and how.fronted else "",
        core,
        place,
        "" if how.fronted else time,
    ]
    text = " ".join(" ".join(parts).split()) + (f", {how.closing}" if how.closing else "") + "."
    return text[0].upper() + text[1:]


def pair(rng: Random) -> tuple[float, str, str]:
    """Gold and two sentences; whether they share a style is a coin toss that does not look at the gold."""
    a = random_fact(rng)
    b, how = changed(rng, a), style(rng)
    other = how if rng.random() < 0.5 else style(rng)
    return gold(a, b), told(rng, a, how), told(rng, b, other)


def graded(rng: Random, seen: set[str]) -> list[str]:
    """The lines of a file of PAIRS pairs, no sentence of which was seen before."""
    lines = ["score\tsentence1\tsentence2"]
    while len(lines) <= PAIRS:
        score, one, two = pair(rng)
        if one != two and not {one, two} & seen:
            seen |= {one, two}
            lines.append(f"{score:.2f}\t{one}\t{two}")
    return lines


def unlabelled(rng: Random, seen: set[str]) -> list[str]:
    """SENTENCES sentences, none of which was seen before."""
    lines: list[str] = []
    while len(lines) < SENTENCES:
        text = told(rng, random_fact(rng), style(rng))
        if text not in seen:
            seen.add(text)
            lines.append(text)
    return lines


def write(path: Path, lines: list[str]) -> None:
    """The lines to a file, all or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_bytes("".join(line + "\n" for line in lines).encode("ascii"))
    os.replace(part, path)
    print(f"{path}: {len(lines)} lines, {path.stat().st_size} bytes")


def main(out: Path) -> None:
    """Write the three files."""
    rng, seen = Random(SEED), set[str]()
    files = {
        "dev.tsv": graded(rng, seen),
        "test.tsv": graded(rng, seen),
        "sentences.txt": unlabelled(rng, seen),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        write(out / name, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    main(parser.parse_args().out)
