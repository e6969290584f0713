"""Prints the project's requirements, one a line, with those of the extras named: an image installs them in a layer of
its own, which a change of code leaves alone. `python requirements.py engine model`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for extra in [None, *sys.argv[1:]]:
    print(*(project["optional-dependencies"][extra] if extra else project["dependencies"]), sep="\n")
