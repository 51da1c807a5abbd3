"""Find unordered accesses by vector clocks, see docs/how-to/check/races.md.

===========================  ===============================================================================
``agents.Agent``             an actor: its scope, its clock with a component per thread, and mirrors of it
                             for orders that need a proxy fence, an alias fence or a delivery of puts
``agents.AsyncAgent``        bulk copies and ``wgmma``: they end at any time after their start
``agents.SignalLog``         the words that should order two accesses, but do not
``agents.Rules``             the rules; one is left out at a time to find the reason of a race, or a barrier
``shadow.ShadowMemory``      the last accesses of each byte, with their times, by component of the clock
``collector.Collector``      the events of fences, proxies, puts and mbarriers; the findings
``happens_before.Detector``  the events of accesses, atomics, barriers, streams and CUDA events
===========================  ===============================================================================
"""
