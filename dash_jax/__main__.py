import sys

from dash_jax.cli import main

sys.exit(main())
