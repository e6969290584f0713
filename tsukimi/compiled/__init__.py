"""The scheduling code and the simulator, compiled ahead by mypyc: the same source, in about two thirds of the time.

`make install` builds it (`python -m tsukimi.compiled.build`). `tsukimi simulate` uses a build only if it was made from
the present source; else it runs the source.
"""
