"""The tests of shardwise, laid out as the package is.

PYTEST_DONT_REWRITE: this file is imported before anyone can ask pytest to rewrite ``tests.*``.
"""
