"""Several processes at one moment: bench/lockstep.py in short, and in its full length by its command."""

import sys

import pytest

from bench import lockstep

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the processes are forked"),
    pytest.mark.filterwarnings("ignore:.*use of fork"),  # of Python 3.12 and later
]


@pytest.mark.parametrize("work", [lockstep.one_encoder, lockstep.other_encoders])
def test_two_processes_share_one_vector_cache(work):
    assert not lockstep.failures(work, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("work", lockstep.WORKS)
def test_four_processes_share_every_cache_and_every_place(work):
    assert not lockstep.failures(work, 4, 5)


def test_what_fails_is_counted():
    def wrong(folder, embedder, rank, turn):
        return [folder.name.startswith("alone")]

    def failing(folder, embedder, rank, turn):
        if not folder.name.startswith("alone"):
            raise FileNotFoundError("gone")

    assert lockstep.failures(wrong, 2, 2) == {"other values": 4}
    assert lockstep.failures(failing, 2, 2) == {"FileNotFoundError: gone": 4}
