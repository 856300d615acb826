"""The last import of the server of `tests.forked`: hides all that lives from the collector.

A collection in a forked process would otherwise write to, and so copy, nearly every page.
"""

import gc

gc.collect()
gc.freeze()
