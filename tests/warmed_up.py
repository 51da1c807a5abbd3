"""Imported last, in the process of the tests and in the one that their ranks are forked from.

It makes both quicker: what is there by now stays, so collections of garbage pass it by; and Dynamo does not
measure its guards, which flushes the processor's caches at every compilation, for a line of its debug log.
"""

import gc
import sys

if "torch._dynamo.guards" in sys.modules:
    sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]

gc.collect()
gc.freeze()
gc.enable()
