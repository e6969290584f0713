"""Model weights: fetching, converting, checking, digesting and loading them."""
