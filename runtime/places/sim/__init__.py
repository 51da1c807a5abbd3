"""The place ``sim``: all ranks in one process under the seeded scheduler."""
