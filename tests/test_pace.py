"""How far work is, in words."""

from whitenedcse import console


def test_a_pipe_gets_lines_on_the_standard_error_with_the_speed_since_the_beginning(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS", 0)
    with console.pace("encoded", 1000, before=800) as more:
        more(100)
    out = capsys.readouterr()
    assert out.out == "" and "encoded:  90%" in out.err and "900/1000" in out.err


def test_short_work_says_nothing(capsys):
    with console.pace("encoded", 2) as more:
        more(2)
    assert capsys.readouterr() == ("", "")
