"""Modules of examples in tests: importable here, and sent to workers by value."""

import contextlib
import importlib
import pickle
import sys

import cloudpickle


def shown(pickled):
    """How an object is shown where it is unpickled, also if its class came there by value."""
    return repr(pickle.loads(pickled))


@contextlib.contextmanager
def sent_by_value(folder, *names):
    """Import modules of a folder, and have all of its modules that are imported then sent by value in the block."""
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    for name in names:
        importlib.import_module(name)
    new = [sys.modules[name] for name in set(sys.modules) - before]
    own = [module for module in new if str(folder) in (getattr(module, "__file__", "") or "")]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in own:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    sys.path.remove(str(folder))
