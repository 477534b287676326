"""What every start of a script reads and computes again, done once: half of a small start.

Groups of settings are composed once for each choice of them, as long as no file below the folders that Hydra
searches changes, and the vocabulary of the quick start is made once. Compositions, 0.2 s each, are shared by
all processes of a session through files in the folder REMEMBERED.
"""

import hashlib
import os
import pickle
from copy import deepcopy
from functools import cache
from pathlib import Path


def begin():
    """Have this process, and those that are forked from it, remember."""
    from hydra._internal import defaults_list
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.hydra import Hydra

    from whitenedcse.model import scratch

    Hydra.get_mode = lambda *_, **__: None  # composes all once more to read hydra.mode, which nothing sets
    defaults_list._create_defaults_list = choosing(defaults_list._create_defaults_list)
    composed = composing(ConfigLoaderImpl._compose_config_from_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = composed
    made = cache(scratch.wordpiece)
    scratch.wordpiece = lambda sentences, vocabulary: deepcopy(made(tuple(sentences), vocabulary))


class Shared(dict):
    """Bytes by key, of this process and of all others with the same folder."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.folder = kind, os.environ["REMEMBERED"]

    def file(self, key):
        return Path(self.folder, f"{self.kind}-{hashlib.sha256(key).hexdigest()}")

    def made(self, key, make):
        """The bytes of a key, made where no process has made them before."""
        if key not in self:
            try:
                self[key] = self.file(key).read_bytes()
            except FileNotFoundError:
                self[key] = make()
                own = Path(f"{self.file(key)}.{os.getpid()}")
                own.write_bytes(self[key])
                own.replace(self.file(key))
        return self[key]


def state(repo):
    """The folders that Hydra searches, and of each file in them when it was written and how long it is."""
    found = []
    for source in repo.get_sources():
        for folder, _, names in os.walk(source.path):
            stats = [(name, os.stat(Path(folder, name))) for name in sorted(names)]
            found += [(folder, name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
        found.append((source.provider, source.path))
    return tuple(sorted(found))


def choosing(create):
    """Hydra's list of the files that a choice of groups reads, made once for each choice."""
    known = Shared("defaults")

    def chosen(repo, config_name, overrides, prepend_hydra, skip_missing):
        changed = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
        key = pickle.dumps((state(repo), config_name, changed, prepend_hydra, skip_missing))

        def made():
            found = create(repo, config_name, overrides, prepend_hydra, skip_missing)
            return pickle.dumps((found, changed))  # these are what is noted on the way

        found, after = pickle.loads(known.made(key, made))
        vars(overrides).update(after)
        return found

    return chosen


def composing(compose):
    """The settings in a list of files, composed once."""
    known = Shared("settings")

    def composed(loader, defaults, repo):
        key = pickle.dumps((state(repo), [vars(default) for default in defaults]))
        return pickle.loads(known.made(key, lambda: pickle.dumps(compose(loader, defaults, repo))))

    return composed
