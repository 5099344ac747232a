"""``python -m cdc_assets_tests.oracle``."""

import sys

from cdc_assets_tests.oracle.soak import main

if __name__ == "__main__":
    sys.exit(main())
