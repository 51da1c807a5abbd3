"""Accesses that nothing orders, by vector clocks.

===========================  ===============================================================================
``agents.Agent``             who acts: its clock, its scope, and mirrors of the clock for what only a proxy
                             fence, an alias fence or a delivery of puts orders
``agents.ThreadsAgent``      a program whose threads are told apart: a component and a scope for each
``agents.AsyncAgent``        bulk copies and ``wgmma``: they end at any time after their start
``agents.SignalLog``         which word was meant to order two accesses, and did not
``agents.Rules``             rules, left out one by one to name the reason of a race
``shadow.ShadowMemory``      who touched each byte last, and when, by component of the clock
``collector.Collector``      what a run tells of fences, proxies, puts and mbarriers; the findings
``happens_before.Detector``  what it tells of accesses, atomics, barriers, streams and events
===========================  ===============================================================================
"""
