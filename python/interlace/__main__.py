"""``python -m interlace``: demo, doctor, check, build, verify, bench."""

import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    from interlace.cli.main import run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's first lines
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
