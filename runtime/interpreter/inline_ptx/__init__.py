"""Inline PTX for the interpreter: parser, values, one file per kind of instruction."""
