"""``python -m interlace``: demo, doctor, check, build, verify, bench."""

import sys

from interlace_command import main

if __name__ == "__main__":
    sys.exit(main())
