"""Read by every Python process of a client's run: adapts what it imports to a machine without GPUs."""

import importlib.metadata
import os
import random
import sys

if os.environ.get("CLIENT_RUN"):
    import adapt  # beside this file

    sys.meta_path.insert(0, adapt.Adapts())
    importlib.metadata.version = adapt.with_engine(importlib.metadata.version)
    random.seed(0)
