"""What a user may write: small classes behind the open doors. docs/ shows them; tests/unit/test_examples.py runs them."""
