"""How far work is, in words."""

from whitenedcse import console


def test_lines_tell_how_far_how_fast_and_how_long_but_seldom(monkeypatch):
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    said = []
    more = console.plain_lines("encoded", 1000, said.append)
    for _ in range(4):
        more(100)
    assert said == [
        "encoded 200 of 1,000  20 sentences/s  left 00:00:40",
        "encoded 400 of 1,000  20 sentences/s  left 00:00:30",
    ]


def test_without_a_total_nothing_is_left(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    said = []
    console.plain_lines("encoded", None, said.append)(50_000)
    assert said == ["encoded 50,000  5,000 sentences/s"]


def test_what_was_done_before_counts_as_done_but_not_as_speed(monkeypatch):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    said = []
    more = console.plain_lines("encoded", 1000, said.append, before=800)
    more(0)  # nothing yet, so no speed to divide by
    more(100)
    assert said == ["encoded 900 of 1,000  5 sentences/s  left 00:00:20"]


def test_a_pipe_gets_lines_on_the_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS", 0)
    with console.pace("encoded", 2) as more:
        more(2)
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("encoded 2 of 2")
