"""Random numbers are a function of the position alone, on every device."""

import torch

from whitenedcse.training import module
from whitenedcse.training.module import reseed

POSITIONS = [(0, 1, 2), (1, 0, 2), (0, 2, 1), (0, 1), (1, 0), (0, 1, 2, 0), (0, 12), (0, 1, -2)]
POSITIONS += [(-1,), (1,), ()]


def draw(*position):
    reseed(*position)
    return torch.rand(4).tolist()


def test_a_position_gives_its_own_numbers_whatever_came_before():
    first = draw(0, 1, 2)
    torch.rand(100)
    assert draw(0, 1, 2) == first
    assert len({tuple(draw(*at)) for at in POSITIONS}) == len(POSITIONS)


def test_the_other_devices_start_there_too(monkeypatch):
    class Device:
        seeds = []
        manual_seed = seeds.append

    monkeypatch.setattr(module, "_devices", lambda: [Device])
    reseed(3, 4)
    assert Device.seeds == [torch.initial_seed()]
