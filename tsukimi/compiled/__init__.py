"""The scheduling code and the simulator, compiled ahead by mypyc: the same source, about a third sooner.

Built by `make install` (`python -m tsukimi.compiled.build`); `tsukimi simulate` uses what was built of the very source
it would run, and runs that source itself where there is nothing.
"""
