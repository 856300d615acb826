"""The tests of shardwise, laid out as the package is.

PYTEST_DONT_REWRITE: this file is imported before anyone can ask pytest to rewrite ``tests.*``.
"""

import sys

# Compiling all modules takes ten seconds, and every process imports them again: it is done once,
# even if the environment asks for no bytecode.
sys.dont_write_bytecode = False
