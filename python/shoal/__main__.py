"""python3 -m shoal verify ADDR: see _verify."""

import sys

from ._verify import main

sys.exit(main(sys.argv[1:]))
