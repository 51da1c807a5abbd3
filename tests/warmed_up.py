"""Imported last, in the process of the tests and in the process from which their ranks are forked.

It makes both quicker. Collections of garbage skip all objects that exist by now. Dynamo does not measure
its guards: for a line of its debug log that would flush the processor's caches at every compilation.
"""

import gc
import sys

if "torch._dynamo.guards" in sys.modules:
    sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]

gc.collect()
gc.freeze()
gc.enable()
