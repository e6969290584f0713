"""What the conductor expects of the near future: blocks being computed, decode batches, answers' lengths, busy links."""
