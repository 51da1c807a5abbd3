"""``interlace.verify``: the package ``interlace_verify``, loaded when it is first asked for."""

import sys

from interlace.runtime.core.laboratory import laboratory

sys.modules[f"{__name__}.shims"] = laboratory("shims")
sys.modules[__name__] = laboratory()
