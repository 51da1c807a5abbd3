"""``python -m interlace``: demo, inspect, doctor, check, build, verify, new, bench, tune, calibrate."""

import sys

from interlace_command import main

if __name__ == "__main__":
    sys.exit(main())
