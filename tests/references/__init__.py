"""The pages under docs/reference, written from the code that they describe."""
