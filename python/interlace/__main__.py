"""``python -m interlace``: demo, doctor, check, build, verify, bench."""

import sys


def main(arguments: list[str] | None = None) -> int:
    from interlace.cli.main import run

    return run(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
