"""The vocabulary of the runtime: group, place, stream, workspace, launch, agreement, result.

Everything speaks of these; they know of nothing else.
"""
