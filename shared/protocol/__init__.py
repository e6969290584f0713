"""The vocabulary every service speaks: ids, subjects, messages, errors. Types only, no behaviour to configure."""
