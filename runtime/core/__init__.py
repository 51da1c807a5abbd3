"""The vocabulary of the runtime: group, place, stream, workspace, launch, agreement, result.

All other folders of the runtime use these terms. This folder imports none of them except ``compat``.
"""
