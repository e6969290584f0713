"""Models on disk and from elsewhere: fetched, converted, checked, identified, loaded."""
