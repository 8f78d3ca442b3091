"""`python -m lazytrain`: the same as the console script. By name, since this room may not import the recipes."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("lazytrain.recipes.command").main())
