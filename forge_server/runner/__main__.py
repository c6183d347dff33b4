"""Entry point of the zipapp."""

import sys

from .main import main

sys.exit(main())
