"""What users bring: classes named `module:Class`, and the policies made of them."""
