"""Pure decisions: no I/O, no clock, no logging, no asyncio, no torch. Time comes in as an argument."""
