"""CPU kernels in C++, built on first use for the machine's instruction set."""
