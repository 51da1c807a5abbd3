"""``interlace.verify``: the package ``interlace_verify``, imported on first use."""

import sys

from interlace.runtime.core.laboratory import laboratory

sys.modules[f"{__name__}.shims"] = laboratory("shims")
sys.modules[__name__] = laboratory()
