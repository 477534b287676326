"""The arithmetic of bench/plan.py; its runs are made by hand."""

import os
import subprocess
import sys

import numpy as np
import pytest

from bench import plan
from bench.plan import Cost, Line, hours, lines, through


def test_a_line_passes_through_both_points_and_never_falls():
    line = through({40: 11.0, 10: 5.0})
    assert [line.at(n) for n in (0, 10, 40, 100)] == [3.0, 5.0, 11.0, 23.0]
    assert through({10: 5.0, 40: 4.0}) == Line(4.0, 0.0)


def test_time_and_disk_grow_and_memory_does_not():
    found = lines({10: Cost(5.0, 700.0, 1.0), 20: Cost(9.0, 600.0, 2.0)})
    assert found == {"seconds": Line(1.0, 0.4), "memory": Line(700.0, 0.0), "disk": Line(0.0, 0.1)}


def test_a_cost_that_does_not_grow_is_said(capsys):
    costs = {"encode": 9.0, "train": 9.0, "index": 4.0, "query": 5.0}  # of 20 rows; of 10: 5
    found = {work: lines({10: Cost(5.0, 1.0, 1.0), 20: Cost(b, 1.0, 2.0)}) for work, b in costs.items()}
    plan.show({"lines": found, "checks": []})
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("No more seconds for more rows of index, query: measure again")
    plan.show({"lines": found | {"index": found["train"], "query": found["train"]}, "checks": []})
    assert "measure again" not in capsys.readouterr().out


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


def test_the_memory_of_a_process_is_its_own_without_pages_of_files(tmp_path):
    held, file = np.ones(30_000_000), tmp_path / "numbers"  # 240 MB here
    file.write_bytes(b"x" * 200_000_000)
    code = f"""
import mmap
space = mmap.mmap(-1, 10**9)  # which is never touched
with open({str(file)!r}, "rb") as stream:
    pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
print(pages[::4096].count(b"x"), flush=True)
input()
"""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **piped) as process:
        process.stdout.readline()  # all pages of the file were read
        assert 3 < plan.held(process.pid) < 60 and plan.held(os.getpid()) > 240 and held.all()
        process.communicate(b"x")
    assert plan.held(process.pid) == 0


def test_what_is_printed_and_drawn(tmp_path, capsys):
    line = {name: [1.0, 0.001] for name in plan.UNITS}
    row = {"rows": 1_000} | {work: {name: [4.0, 2.0] for name in plan.UNITS} for work in plan.WORKS}
    content = {"lines": dict.fromkeys(plan.WORKS, line), "facts": FACTS, "checks": [row]}
    plan.show(content)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == ["1e4", "seconds,", "s", *["11"] * 4]
    assert printed[-1].split() == ["1,000", "disk,", "said", "/", "measured", *["0.50"] * 4]
    plan.draw(content, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().count("64 x this machine") == 2
