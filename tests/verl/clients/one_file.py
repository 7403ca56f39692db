"""Runs the tests of one file in this process. Not to be called by hand: `own_tests.py` does."""

import os
import sys

import pytest

if __name__ == "__main__":
    options = ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "--junit-xml=result.xml", "-q"]
    sys.exit(pytest.main([*options, sys.argv[1]]))
