"""The arithmetic of bench/plan.py; its runs are made by hand."""

import pytest

from bench.plan import Cost, Line, hours, lines, through


def test_a_line_passes_through_both_points_and_never_falls():
    line = through({40: 11.0, 10: 5.0})
    assert [line.at(n) for n in (0, 10, 40, 100)] == [3.0, 5.0, 11.0, 23.0]
    assert through({10: 5.0, 40: 4.0}) == Line(4.0, 0.0)


def test_time_and_disk_grow_and_memory_does_not():
    found = lines({10: Cost(5.0, 700.0, 1.0), 20: Cost(9.0, 600.0, 2.0)})
    assert found == {"seconds": Line(1.0, 0.4), "memory": Line(700.0, 0.0), "disk": Line(0.0, 0.1)}


FACTS = {"counting": 0.001, "parameters": 10**9, "gigabits": 8.0}


@pytest.mark.parametrize(
    ("work", "devices", "seconds"),
    [
        ("encode", 1, 36.0 + 3_600),
        ("encode", 10, 36.0 + 36 + 356.4),  # counting is not shared
        ("train", 1, 36.0 + 3_600),
        ("train", 2, 36.0 + 1_800 + 36_000 / 64 * 4.0),  # 4 GB of gradients once, at 1 GB a second
        ("train", 4, 36.0 + 900 + 36_000 / 64 * 6.0),
    ],
)
def test_devices_share_what_is_not_counting_and_exchange_gradients(work, devices, seconds):
    content = {"lines": {work: {"seconds": [36.0, 0.1]}}, "facts": FACTS}
    assert hours(content, work, 36_000, devices) == pytest.approx(seconds / 3600)
