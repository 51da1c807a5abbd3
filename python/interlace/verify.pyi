from interlace_verify import *
from interlace_verify import shims as shims
